"""Reads a script without running it and finds what raises here, gives other numbers, or can be left out.

Only what the text shows is found: names that are bound as scripts usually bind them, in one file. What Drivetrain has,
the installed one is asked. Imports no torch.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import final

import drivetrain
from drivetrain.api import DrivetrainError, UsageError


class Kind(StrEnum):
    """Effect of a line of a script."""

    RAISES = "raises"
    DIFFERS = "differs"
    LEAVE_OUT = "can go"


@dataclass(frozen=True, order=True)
class Finding:
    """One line of a script, what is the matter with it, and what to write.

    Args:
        line: counted from 1.
        kind: what it leads to.
        text: what is the matter.
        instead: what to write.
    """

    line: int
    kind: Kind
    text: str
    instead: str


def check_script(source: str, name: str = "the script") -> list[Finding]:
    """Find what to change in a script written for Accelerate, for torch's own wrappers, or for this library.

    Args:
        source: text of the script.
        name: of its file, for messages.

    Returns:
        Findings by line, each once.

    Raises:
        UsageError: it is not Python.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UsageError(f"{name}{line} is not Python: {error}", cure="Give a script that Python can read.") from error
    bindings = _Bindings()
    bindings.visit(tree)
    reader = _Reader(bindings)
    reader.visit(tree)
    return sorted(set(reader.found))


def _dotted(node: ast.AST) -> str:
    """``a.b.c`` of a chain of attributes, empty for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _names(node: ast.AST) -> Iterator[str]:
    """Chains that a target assigns to."""
    if isinstance(node, ast.Tuple | ast.List):
        for each in node.elts:
            yield from _names(each.value if isinstance(each, ast.Starred) else each)
    elif name := _dotted(node):
        yield name


def _inside(node: ast.AST, wanted: Callable[[str], bool]) -> bool:
    return any(wanted(_dotted(each)) for each in ast.walk(node))


@final
class _Bindings(ast.NodeVisitor):
    """First pass: collects the bindings of names."""

    def __init__(self) -> None:
        self.imports: dict[str, str] = {}
        """Full name of each imported one."""
        self.accelerators: set[str] = set()
        self.prepared: dict[str, int] = {}
        """The line from which on each name is a prepared model, optimizer or loader."""
        self.models: set[str] = set()
        """Names that ``accelerator.unwrap_model`` gave."""
        self.gathered: set[str] = set()
        self.losses: set[str] = set()
        """Names that ``accelerator.backward`` is given."""
        self.by_processes: set[str] = set()
        """Names of what was multiplied by the number of processes."""
        self.calls: set[str] = set()
        """Last words of all calls."""

    @property
    def drivetrain_trainer(self) -> bool:
        """A trainer of Drivetrain's is imported."""
        return any(name.startswith("drivetrain_transformers") for name in self.imports.values())

    def full(self, name: str) -> str:
        """A chain with its first word resolved by imports."""
        first, dot, rest = name.partition(".")
        return self.imports.get(first, first) + dot + rest

    def is_accelerator(self, name: str) -> bool:
        """Whether a chain is an accelerator."""
        return name in self.accelerators or name.rpartition(".")[2] == "accelerator"

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            first = each.name.partition(".")[0]
            self.imports[each.asname or first] = each.name if each.asname else first

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for each in node.names:
            self.imports[each.asname or each.name] = f"{node.module or ''}.{each.name}"

    def is_prepared(self, name: str, node: ast.AST) -> bool:
        """Whether this name was prepared by the time that this line runs."""
        return self.prepared.get(name, sys.maxsize) < getattr(node, "lineno", 0)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        names = [name for target in node.targets for name in _names(target)]
        if not isinstance(node.value, ast.Call) and _multiplies_by_processes(node.value):
            self.by_processes.update(names)
        if not isinstance(node.value, ast.Call):
            return
        called = _dotted(node.value.func)
        owner, _, method = called.rpartition(".")
        if self.full(called).rpartition(".")[2] == "Accelerator":
            self.accelerators.update(names)
        elif self.is_accelerator(owner) and method in ("prepare", "prepare_model"):
            for name in names:
                self.prepared[name] = min(self.prepared.get(name, sys.maxsize), node.end_lineno or node.lineno)
        elif "unwrap_model" in (method, called):
            self.models.update(names)
        elif self.full(called).rpartition(".")[2] in _WRAPPERS:
            for name in names:
                self.prepared.setdefault(name, node.end_lineno or node.lineno)
        elif self.is_accelerator(owner) and method == "gather":
            self.gathered.update(names)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        owner, _, method = _dotted(node.func).rpartition(".")
        self.calls.add(method)
        if method == "backward" and self.is_accelerator(owner):
            self.losses.update(filter(None, map(_dotted, node.args)))


_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "fully_shard"})
"""Wrapper classes and functions of torch."""

_OF_ALL = frozenset(
    {
        *("backward", "broadcast", "clip_grad_norm_", "clip_grad_value_", "gather", "gather_for_metrics"),
        *("get_state_dict", "load_state", "pad_across_processes", "prepare", "reduce", "save_model", "save_state"),
        *("train_step", "wait_for_everyone"),
    }
)
"""Methods that every process calls."""

_WRITE = frozenset({"save_model", "save_state"})
"""Methods among these that write on the main process only."""

_ENGINES_OF_ARGUMENTS = ("deepspeed", "fsdp", "parallelism_config")
"""Arguments of ``TrainingArguments`` by which Transformers chooses an engine."""

_CONVERSIONS = frozenset({"to", "cuda", "cpu", "half", "float", "double", "bfloat16"})

_SCHEDULE = re.compile(r"(^|_)(get_)?\w*(schedule|scheduler)\w*$|LR$|Scheduler$")

_MAIN = (
    *("is_main_process", "is_local_main_process", "is_last_process"),
    *("is_world_process_zero", "is_local_process_zero"),
)

_RANKS = ("rank", "get_rank", "local_rank", "global_rank", "process_index", "local_process_index")

_OF_TORCH = {
    "DistributedSampler": (
        Kind.LEAVE_OUT,
        "prepare shares the samples out",
        "Write DataLoader(dataset, shuffle=...) alone.",
    ),
    "GradScaler": (
        Kind.DIFFERS,
        "a scaler of the script's own stands beside the engine's",
        "Leave it out: Accelerator(mixed_precision='fp16') scales losses, and skips steps that overflow.",
    ),
    "autocast": (
        Kind.DIFFERS,
        "it chooses a precision and a device beside the configuration",
        "Leave it out around the model's call, or write accelerator.autocast().",
    ),
    "destroy_process_group": (
        Kind.LEAVE_OUT,
        "it ends what Accelerator() began",
        "Write accelerator.end_training().",
    ),
    "init_process_group": (Kind.LEAVE_OUT, "Accelerator() does what init_process_group does", "Leave it out."),
    "set_device": (Kind.LEAVE_OUT, "Accelerator() does what set_device does", "Leave it out."),
    "spawn": (
        Kind.LEAVE_OUT,
        "drivetrain launch starts the processes",
        "Call the function, and run the script by drivetrain launch --num_processes N.",
    ),
}
"""Functions and classes of torch, by their last word, that an accelerator makes needless, and what to write."""

_COLLECTIVES = frozenset({"all_reduce", "reduce", "all_gather", "gather", "all_gather_object", "gather_object"})
"""Collectives of ``torch.distributed``."""

_OF_TRAINERS = frozenset({"evaluate", "predict", "save_model", "train"})
"""Methods of trainers that every process calls."""


@final
class _Reader(ast.NodeVisitor):
    """Second reading: what is said about each line."""

    def __init__(self, bindings: _Bindings) -> None:
        self._of = bindings
        self._runs = bool(bindings.accelerators) or any(
            name.partition(".")[0] in ("accelerate", "drivetrain") for name in bindings.imports.values()
        )
        """The script has an accelerator."""
        imported = {full.partition(".")[0] for full in bindings.imports.values()}
        self._by_hand = not self._runs and "backward" in bindings.calls and "step" in bindings.calls
        self._by_hand = self._by_hand and imported.isdisjoint(("lightning", "pytorch_lightning", "jax"))
        """It trains without one."""
        self._trainer = any(re.fullmatch(r"(transformers|trl)\..*Trainer", full) for full in bindings.imports.values())
        self._main_only = self._accumulating = self._of_loss = 0
        self._wraps = any(name in _WRAPPERS for name in bindings.calls) or any(
            full.rpartition(".")[2] in _WRAPPERS for full in bindings.imports.values()
        )
        self.found: list[Finding] = []

    def _say(self, node: ast.AST, kind: Kind, text: str, instead: str) -> None:
        self.found.append(Finding(getattr(node, "lineno", 1), kind, text, instead))

    # ---- imports ---------------------------------------------------------------------------------------------------

    def visit_Module(self, node: ast.Module) -> None:
        self.generic_visit(node)
        if self._by_hand and not self._trainer:
            self._say(
                node,
                Kind.DIFFERS,
                "the script trains without an Accelerator: each process would train a model of its own"
                if not self._wraps
                else "the script trains without an Accelerator: the engine is the one that it wraps the model in",
                "Write from drivetrain import Accelerator; accelerator = Accelerator(); model, optimizer, loader = "
                "accelerator.prepare(model, optimizer, loader).",
            )
        if self._trainer and not self._of.drivetrain_trainer:
            self._say(
                node,
                Kind.DIFFERS,
                "the trainer is the library's own, whose engines are Accelerate's",
                "Run it as it stands by drivetrain launch --trainer, or write on_drivetrain(TheTrainer) of "
                "drivetrain_transformers.",
            )

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            package, _, path = each.name.partition(".")
            if package == "accelerate":
                bound = each.asname or package
                self._say(
                    node, Kind.DIFFERS, f"{each.name} is Accelerate's", f"Write import drivetrain as {bound}."
                )
                self._check_path(node, path)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        package, _, path = (node.module or "").partition(".")
        if package not in ("accelerate", "drivetrain") or node.level:
            return
        if package == "accelerate":
            module = ".".join(filter(None, ("drivetrain", path)))
            names = ", ".join(f"{each.name} as {each.asname}" if each.asname else each.name for each in node.names)
            self._say(node, Kind.DIFFERS, f"{node.module} is Accelerate's", f"Write from {module} import {names}.")
        if package == "accelerate" and not self._check_path(node, path):
            return
        for each in node.names:
            # Other modules of ours have names of their own.
            if each.name != "*" and (package == "accelerate" or path in ("", "utils")):
                self._check_name(node, each.name)

    def _check_path(self, node: ast.AST, path: str) -> bool:
        if path and not _is_module(f"drivetrain.{path}"):
            self._say(node, Kind.RAISES, f"there is no module drivetrain.{path}", "Import its names from drivetrain.")
            return False
        return True

    def _check_name(self, node: ast.AST, name: str) -> None:
        if name in drivetrain.__all__ or re.fullmatch(r"is_\w+_available", name):
            return
        try:
            getattr(drivetrain, name)  # one of Accelerate's that is refused, or one that a backend brings
        except DrivetrainError as error:
            self._say(node, Kind.RAISES, f"there is no {name} here", error.cure)
        except AttributeError:
            there = "docs/reference/accelerate.md says what there is."
            self._say(node, Kind.RAISES, f"drivetrain has no name {name}", there)

    # ---- what runs where -------------------------------------------------------------------------------------------

    @contextmanager
    def _within(
        self, *, main_only: bool = False, accumulating: bool = False, of_loss: bool = False
    ) -> Iterator[None]:
        self._main_only += main_only
        self._accumulating += accumulating
        self._of_loss += of_loss
        try:
            yield
        finally:
            self._main_only -= main_only
            self._accumulating -= accumulating
            self._of_loss -= of_loss

    def visit_If(self, node: ast.If) -> None:
        main, negated = _asks_for_main(node.test)
        self.visit(node.test)
        with self._within(main_only=main and not negated):
            for each in node.body:
                self.visit(each)
        with self._within(main_only=main and negated):
            for each in node.orelse:
                self.visit(each)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        marks = [_dotted(each.func if isinstance(each, ast.Call) else each) for each in node.decorator_list]
        main = any(mark.rpartition(".")[2] in ("on_main_process", "on_local_main_process") for mark in marks)
        with ExitStack() as stack:
            stack.enter_context(self._within(main_only=main))
            for each in (*node.decorator_list, node.args, *node.body):
                self.visit(each)
                if isinstance(each, ast.If) and _lets_main_alone_on(each):
                    stack.enter_context(self._within(main_only=True))

    def visit_With(self, node: ast.With) -> None:
        calls = [each.context_expr for each in node.items if isinstance(each.context_expr, ast.Call)]
        ends = [_dotted(call.func).rpartition(".")[2] for call in calls]
        with self._within(accumulating="accumulate" in ends):
            self.generic_visit(node)

    # ---- expressions -----------------------------------------------------------------------------------------------

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        owner = _dotted(node.value)
        if not owner:
            return
        if owner in self._of.accelerators and not _is_member(node.attr):
            self._say(node, Kind.RAISES, f"an Accelerator has no {node.attr}", "See its methods in the API reference.")
        if node.attr == "__version__" and self._of.full(owner) == "accelerate":
            self._say(
                node,
                Kind.DIFFERS,
                "the version is Drivetrain's, which counts otherwise than Accelerate's",
                "Leave the comparison out, and keep what it allows.",
            )
        if self._of.is_prepared(owner, node) and node.attr == "module":
            self._say(
                node,
                Kind.LEAVE_OUT,
                f"{owner} is the model itself, and {owner}.module the same model once more",
                f"Write {owner}, or accelerator.unwrap_model({owner}).",
            )

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        cuts = isinstance(node.slice, ast.Slice) and node.slice.upper is not None
        value = node.value
        gathered = _dotted(value) in self._of.gathered or (
            isinstance(value, ast.Call) and self._method(value.func) == "gather"
        )
        if cuts and gathered:
            self._say(
                node,
                Kind.LEAVE_OUT,
                "repeated samples are cut from the end of what was gathered",
                "Write accelerator.gather_for_metrics(...), which gives each sample once, and no cut.",
            )

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        if not (self._accumulating and self._of_loss) or not isinstance(node.op, ast.Mult | ast.Div):
            return
        if not _dotted(node.right).endswith("gradient_accumulation_steps"):
            return
        if not _inside(node.left, lambda name: "loss" in name.lower()):
            return
        if isinstance(node.op, ast.Div):
            text = "inside accumulate, backward divides by the micro-batches of the window: this divides twice"
        else:
            text = "the last window is divided by the micro-batches that it has, and this factor is too large for it"
        self._say(
            node,
            Kind.DIFFERS,
            text,
            "Pass the loss as it is, or a sum with accelerator.backward(loss_sum, num_items=...).",
        )

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [name for target in node.targets for name in _names(target)]
        with self._within(of_loss=not self._of.losses.isdisjoint(names)):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        if _dotted(node.target) in self._of.losses:
            with self._within(of_loss=True):
                self.visit_BinOp(ast.copy_location(ast.BinOp(node.target, node.op, node.value), node))

    def _method(self, function: ast.AST) -> str:
        """The method of an accelerator that is called; empty for other calls."""
        owner, _, method = _dotted(function).rpartition(".")
        return method if self._of.is_accelerator(owner) else ""

    def visit_Call(self, node: ast.Call) -> None:
        with self._within(of_loss=self._method(node.func) == "backward"):
            self.generic_visit(node)
        name = _dotted(node.func)
        full = self._of.full(name)
        end = full.rpartition(".")[2]
        if end == "Accelerator":
            self._check_arguments(node)
        if end == "Fabric" and full.startswith(("lightning", "pytorch_lightning")):
            self._say(
                node,
                Kind.DIFFERS,
                "Fabric sets up engines of Lightning's",
                "Write Accelerator(); docs/reference/fabric.md has each call of Fabric beside the one here.",
            )
        if self._trainer:
            self._check_trainer(node, name, end)
        if not (self._runs or self._by_hand):
            return
        method = self._method(node.func)
        if method:
            self._check_method(node, method)
        else:
            self._check_torch(node, full, end)
            self._check_prepared(node, name)
        self._check_schedule(node, end)

    def _check_method(self, node: ast.Call, method: str) -> None:
        if self._main_only and method in _OF_ALL:
            self._say(
                node,
                Kind.DIFFERS,
                f"accelerator.{method} is called on the main process alone, and every process takes part in it",
                "Move it out of the branch; what it writes is written once."
                if method in _WRITE
                else "Call it on every process before the branch, and use there what it returned.",
            )
        if method == "skip_first_batches" and "load_state" in self._of.calls:
            self._say(
                node,
                Kind.LEAVE_OUT,
                "load_state restores the position in the data too",
                "Leave skip_first_batches out, or write the number of batches in the epoch that has begun.",
            )

    def _check_torch(self, node: ast.Call, full: str, end: str) -> None:
        if full.startswith("torch.") and end in _OF_TORCH:
            self._say(node, *_OF_TORCH[end])
        elif full.startswith("torch.distributed.") and end in _COLLECTIVES:
            self._say(
                node,
                Kind.DIFFERS,
                f"{end} of torch spans processes that share a sample too, under tensor and pipeline parallelism",
                "Write accelerator.gather_for_metrics(...), accelerator.gather(...) or accelerator.reduce(...).",
            )
        elif (full.startswith("torch.") and end in _WRAPPERS) or full == "deepspeed.initialize":
            self._say(
                node,
                Kind.RAISES,
                f"{full} wraps a model by hand",
                "Leave it out: accelerator.prepare(model) does it, and distributed_type chooses the engine.",
            )
        elif full in ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"):
            self._say(
                node,
                Kind.DIFFERS,
                f"{end} of torch sees this process's part of the gradients, and a window that may still be open",
                f"Write accelerator.{end}(...).",
            )
        elif full == "torch.save" and node.args and self._has_prepared_state(node.args[0], node):
            self._say(
                node,
                Kind.DIFFERS,
                "the state dict of a prepared model may be this process's part",
                "Write accelerator.save_model(model, folder) or accelerator.save_state(folder), on every process.",
            )
        else:
            self._check_methods(node, full, end)

    def _check_methods(self, node: ast.Call, full: str, end: str) -> None:
        """Find calls that are known by the name of a method."""
        if end == "set_epoch" and "sampler" in full:
            self._say(node, Kind.LEAVE_OUT, "a prepared loader counts its epochs itself", "Leave it out.")
        elif end == "shard" and any(_inside(each.value, _of_this_process) for each in node.keywords):
            self._say(
                node,
                Kind.DIFFERS,
                "the dataset is shared out by hand, and prepare shares it out once more",
                "Leave it out, or mark the dataset: drivetrain.already_sharded(dataset).",
            )
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "backward" and _scales(node.func.value):
            self._say(
                node, Kind.DIFFERS, "backward of a scaled loss bypasses the engine", "Write accelerator.backward(loss)."
            )
        elif end == "backward" and not node.args and full.count(".") == 1 and "loss" in full.lower():
            self._say(
                node,
                Kind.DIFFERS,
                f"{full}() bypasses the engine, which may not reduce these gradients",
                f"Write accelerator.backward({full.rpartition('.')[0]}).",
            )
        elif (end == "cuda" and not full.startswith("torch.")) or (
            end in ("to", "device") and node.args and any(map(_says_cuda, ast.walk(node.args[0])))
        ):
            self._say(node, Kind.DIFFERS, "it asks for a CUDA device", "Write .to(accelerator.device).")

    def _has_prepared_state(self, value: ast.AST, at: ast.AST) -> bool:
        """Whether the state dict of a prepared object is in this value."""
        for each in ast.walk(value):
            if not (isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)):
                continue
            owner = each.func.value
            if each.func.attr != "state_dict":
                continue
            name = _dotted(owner)
            unwrapped = isinstance(owner, ast.Call) and self._method(owner.func) == "unwrap_model"
            if unwrapped or name in self._of.models or self._of.is_prepared(name, at):
                return True
        return False

    def _check_trainer(self, node: ast.Call, name: str, end: str) -> None:
        """Return findings on a program that uses Transformers' Trainer or a subclass of it."""
        arguments = end.endswith("TrainingArguments") or self._of.full(name).startswith("trl.")
        for each in node.keywords if arguments else ():
            chosen = not (isinstance(each.value, ast.Constant) and not each.value.value)
            if each.arg in _ENGINES_OF_ARGUMENTS and chosen:
                self._say(
                    each.value,
                    Kind.RAISES,
                    f"{end}({each.arg}=...) chooses an engine, which the configuration does here",
                    "Leave it out; the error that it raises holds the configuration to write instead.",
                )
        owner, _, method = name.rpartition(".")
        if self._main_only and owner.rpartition(".")[2].endswith("trainer") and method in _OF_TRAINERS:
            self._say(
                node,
                Kind.DIFFERS,
                f"{name} is called on the main process alone, and every process takes part in it",
                "Move it out of the branch; what it writes is written once.",
            )

    def _check_prepared(self, node: ast.Call, name: str) -> None:
        owner, _, method = name.rpartition(".")
        if method == "from_pretrained":
            for each in node.keywords:
                if each.arg == "device_map":
                    self._say(
                        each.value,
                        Kind.DIFFERS,
                        "device_map places a model on devices, which prepare does",
                        "Leave it out.",
                    )
        if self._of.is_prepared(owner, node) and method in _CONVERSIONS:
            self._say(
                node,
                Kind.RAISES,
                f"{owner}.{method}() comes after prepare, when engines that share parameters out have laid them out",
                "Call it before accelerator.prepare; mixed_precision says in which dtype a model computes.",
            )
        if (
            name in ("copy.deepcopy", "deepcopy")
            and node.args
            and self._of.is_prepared(_dotted(node.args[0]), node)
        ):
            self._say(
                node,
                Kind.RAISES,
                "a prepared model cannot be copied where its parameters are shared out",
                "Copy it before accelerator.prepare, or average its weights by drivetrain.EMA.",
            )

    def _check_schedule(self, node: ast.Call, end: str) -> None:
        given = [*node.args, *(each.value for each in node.keywords)]
        if not _SCHEDULE.search(end) or self._method(node.func):
            return
        for each in given:
            if _multiplies_by_processes(each) or _dotted(each) in self._of.by_processes:
                self._say(
                    each,
                    Kind.DIFFERS,
                    "the schedule is made longer by the number of processes, and here it moves once an update",
                    "Leave the factor out, or write scheduler: {step_per_process: true} in the configuration.",
                )

    def _check_arguments(self, node: ast.Call) -> None:
        for each in node.keywords:
            if each.arg is None:
                continue
            if each.arg == "mixed_precision" and isinstance(each.value, ast.Constant) and each.value.value == "fp8":
                self._say(each.value, Kind.RAISES, "fp8 is not supported", "Write mixed_precision='bf16'.")
            if each.arg in _arguments():
                continue
            if re.search(r"_plugins?$", each.arg) or each.arg == "parallelism_config":
                engine = each.arg.removesuffix("s").removesuffix("_plugin")
                place = "mesh" if each.arg == "parallelism_config" else engine.removesuffix("_lm")
                self._say(
                    each.value,
                    Kind.DIFFERS,
                    f"{each.arg} belongs to one engine, which the configuration chooses",
                    f"Write it in the section `{place}:` of the configuration.",
                )
            else:
                self._say(each.value, Kind.RAISES, f"Accelerator takes no {each.arg}", "Leave it out.")


def _asks_for_main(test: ast.expr) -> tuple[bool, bool]:
    """Whether a branch is taken on the main process only, and whether on all other processes instead."""
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return False, negated
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        first = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value == 0
        asked = test.left.func if isinstance(test.left, ast.Call) else test.left
        if first and _dotted(asked).rpartition(".")[2] in _RANKS:
            return True, isinstance(test.ops[0], ast.NotEq)
    return _inside(test, lambda name: name.rpartition(".")[2] in _MAIN), negated


def _lets_main_alone_on(node: ast.If) -> bool:
    """Whether all processes but the main one leave the function here."""
    return isinstance(node.body[-1], ast.Return) and _asks_for_main(node.test) == (True, True)


def _multiplies_by_processes(node: ast.AST) -> bool:
    """Whether the number of processes is a factor in here, and not in what is divided by."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod):
        return _multiplies_by_processes(node.left)
    factors = (node.left, node.right) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) else ()
    if any(_counts_processes(_dotted(each)) for each in factors):
        return True
    return any(map(_multiplies_by_processes, ast.iter_child_nodes(node)))


def _scales(node: ast.AST) -> bool:
    """Whether this is the call of a loss scaler."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "scale"


def _of_this_process(name: str) -> bool:
    return name.rpartition(".")[2] in ("process_index", "local_process_index")


def _counts_processes(name: str) -> bool:
    return name.rpartition(".")[2] in ("num_processes", "world_size")


def _says_cuda(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda")


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # nor is the package around it
        return False


@cache
def _class(file: str, name: str) -> ast.ClassDef:
    """One of our own classes, read rather than imported, which would import torch."""
    tree = ast.parse((Path(drivetrain.__file__).parent / file).read_text(encoding="utf-8"))
    return next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)


_CLASSES = (("accelerator.py", "Accelerator"), ("distributed/process_control.py", "ProcessControl"))


@cache
def _members() -> frozenset[str]:
    found = set()
    for each in (part for place in _CLASSES for part in ast.walk(_class(*place))):
        if isinstance(each, ast.FunctionDef):
            found.add(each.name)
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and _dotted(each.value) == "self":
            found.add(each.attr)
    return frozenset(found)


def _is_member(name: str) -> bool:
    return name in _members() or name.endswith("_plugin") or name.startswith("__")


@cache
def _arguments() -> frozenset[str]:
    (made,) = (each for each in _class(*_CLASSES[0]).body if getattr(each, "name", "") == "__init__")
    assert isinstance(made, ast.FunctionDef)
    return frozenset(each.arg for each in (*made.args.args, *made.args.kwonlyargs))


__all__ = ["Finding", "Kind", "check_script"]
