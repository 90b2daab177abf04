"""How long the way through our own code is: calls and files on each path, and the size of the core.

Run it from the root of the repository as ``python -m benchmarks.paths``; nothing is timed, and the counts are the same
on every machine with the same versions of torch and of the engines. What is counted, with :func:`sys.setprofile`:

- **calls**: functions of our own that are entered, those whose source lies in the packages ``drivetrain`` and
  ``drivetrain_*``. Properties, lambdas and functions that torch or an engine calls back count. A comprehension is part
  of the function that it stands in, a generator counts when it begins and not when it goes on, and code that Python or
  a library generates, such as the ``__init__`` of a dataclass, is nobody's file. What runs while one of our modules is
  imported does not count.
- **files**: different files among these calls.
- **changes**: calls whose *caller*, which is the nearest function of our own below it on the stack, stands in another
  file. So a function that ``torch`` calls for us is compared with the one of ours that called ``torch``. What the
  script itself calls, and the first function of a new thread, has no caller and is no change. Returning is none either.
- **imported**: modules of our own that were imported on the way. Zero but for programs that have just started.

Collective paths are those of rank 0 of two processes over gloo. Each path is taken three times in the same processes,
and the third time is what counts: the first ones import modules and fill caches. Each ``Accelerator()`` forms its
process group anew; ``prepare`` takes a model, its optimizer, a scheduler and a loader; a step is forward, backward,
clipping, optimizer, scheduler and ``zero_grad`` with a batch at hand, in a window of one micro-batch. The model has
twelve parameters, and its optimizer is AdamW: much of a checkpoint is done once for each tensor. ``deepspeed`` is
ZeRO-2, and a batch of ``pp`` is cut into two micro-batches.

``Accelerator() in a new program`` and ``launch`` are counted once, in a program of their own: up to the start
of the first worker for ``launch``, whose workers are what the other paths show.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib.util
import inspect
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks import peers

ROOT = Path(__file__).resolve().parent.parent
TURNS = 3
COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
CONSTRUCTION, NEW = "Accelerator()", "Accelerator() in a new program"


@dataclass(frozen=True)
class Place:
    """Where the paths are counted.

    Args:
        title: for the table.
        world: processes.
        config: of the run, as flags.
        needs: module of an engine that has to be installed.
    """

    title: str
    world: int
    config: Mapping[str, Any]
    needs: str = "torch"

    @property
    def package(self) -> str:
        """Ours that brings the backend."""
        name = self.config["distributed_type"]
        return "drivetrain" if name == "single" else f"drivetrain_{name}"


PLACES = {
    "single": Place("single", 1, {"distributed_type": "single"}),
    "dp": Place("dp", 1, {"distributed_type": "dp"}),
    "ddp": Place("ddp", 2, {"distributed_type": "ddp"}),
    "fsdp": Place("fsdp", 2, {"distributed_type": "fsdp"}),
    "deepspeed": Place(
        "deepspeed, ZeRO-2", 2, {"distributed_type": "deepspeed", "deepspeed.zero_stage": 2}, needs="deepspeed"
    ),
    "tp": Place("megatron, tp", 2, {"distributed_type": "megatron", "megatron.tensor_parallel_size": 2}),
    "pp": Place(
        "megatron, pp, 2 micro-batches",
        2,
        {"distributed_type": "megatron", "megatron.pipeline_parallel_size": 2, "megatron.num_micro_batches": 2},
    ),
}
GROUPS = (*PLACES, "launch", "size")


@dataclass(frozen=True)
class Call:
    """One function of our own that was entered.

    Args:
        file: below the folder that holds the package.
        line: where the function begins.
        function: with the names of the classes and functions that it stands in.
        depth: callers of our own below it.
        changes: whether its caller stands in another file.
    """

    file: str
    line: int
    function: str
    depth: int
    changes: bool


@dataclass(frozen=True)
class Trace:
    """What one path called, in order.

    Args:
        calls: the functions.
        imported: modules of our own that were imported on the way.
    """

    calls: list[Call] = field(default_factory=list)
    imported: int = 0

    @property
    def files(self) -> int:
        """Different files."""
        return len({call.file for call in self.calls})

    @property
    def changes(self) -> int:
        """Calls into another file than the caller's."""
        return sum(call.changes for call in self.calls)

    @classmethod
    def read(cls, text: str) -> Trace:
        """What :meth:`text` wrote."""
        found = json.loads(text)
        return cls([Call(**each) for each in found["calls"]], found["imported"])

    def text(self) -> str:
        """As JSON, to be handed to another process."""
        return json.dumps(asdict(self))


class Recorder:
    """Notes each entry into a function of our own, in this thread and in those that are started meanwhile."""

    def __init__(self) -> None:
        packages = ["drivetrain", *(path.name for path in ROOT.glob("plugins/*/src/drivetrain_*"))]
        specs = [spec for spec in map(importlib.util.find_spec, packages) if spec is not None]
        self._folders = tuple(f"{Path(spec.origin).parent}{os.sep}" for spec in specs if spec.origin is not None)
        self._known: dict[str, str | None] = {}
        self._before: list[FrameType] = []
        self._calls: list[Call] = []
        self._imported = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the block calls."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        """Record from here on; frames that are on the stack already are nobody's callers."""
        # A finalizer that happens to run now would be counted where it does not belong.
        gc.collect()
        gc.disable()
        self._calls, self._imported = [], 0
        frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the documented way to this frame
        while frame is not None:
            self._before.append(frame)
            frame = frame.f_back
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def stop(self) -> None:
        """Stop recording."""
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        self._before.clear()
        gc.enable()

    @property
    def trace(self) -> Trace:
        """What was recorded last."""
        return Trace(self._calls, self._imported)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (file := self._file(frame.f_code)) is None:
            return
        if frame.f_code.co_name == "<module>":
            self._imported += 1
        elif _is_function(frame.f_code) and not _goes_on(frame):
            callers = list(self._callers(frame))
            if not any(code.co_name == "<module>" for _, code in callers):
                functions = [file for file, code in callers if _is_function(code)]
                changes = bool(functions) and functions[0] != file
                code = frame.f_code
                self._calls.append(Call(file, code.co_firstlineno, code.co_qualname, len(functions), changes))

    def _callers(self, frame: FrameType) -> Iterator[tuple[str, CodeType]]:
        """Frames of our own below this one, the nearest first."""
        below = frame.f_back
        while below is not None and below not in self._before:
            file = self._file(below.f_code)
            if file is not None:
                yield file, below.f_code
            below = below.f_back

    def _file(self, code: CodeType) -> str | None:
        """The file's name when it is one of ours."""
        name = code.co_filename
        if name not in self._known:
            folder = next((each for each in self._folders if name.startswith(each)), None)
            self._known[name] = None if folder is None else str(Path(name).relative_to(Path(folder).parent))
        return self._known[name]


def _is_function(code: CodeType) -> bool:
    """Not a module's or a class's body, nor a comprehension, which newer Pythons run inside of its function."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_name not in COMPREHENSIONS


def _goes_on(frame: FrameType) -> bool:
    """A generator that was entered before: the instruction RESUME says by its lowest bits where it stands."""
    code = frame.f_code
    return bool(code.co_flags & GENERATORS) and code.co_code[frame.f_lasti + 1] & 3 != 0


def missing(place: Place) -> str | None:
    """Why a place cannot be counted here."""
    for name in (place.package, place.needs):
        if importlib.util.find_spec(name) is None:
            return f"{place.title}: {name} is not installed"
    return None


def count(place: Place) -> dict[str, Trace]:
    """The paths of one place, by name, as rank 0 takes them."""
    from drivetrain import load_config
    from drivetrain.launch.environment import CONFIG
    from drivetrain_testing import spawn

    resolved = load_config(overrides={**place.config, "use_cpu": True}, environ={})
    with tempfile.TemporaryDirectory(prefix="drivetrain-bench-") as folder:
        found = spawn(_paths, place.world, folder, timeout=300, env={CONFIG: resolved.to_json()})[0]
    traces = {name: Trace.read(text) for name, text in found.items()}
    if place is not PLACES["pp"]:
        del traces["backward"]
    return traces


def _paths(folder: str) -> dict[str, str]:
    """Take every path several times, as a script that a launcher has started. Runs on every rank."""
    import torch

    torch.set_num_threads(1)
    recorder = Recorder()
    found: dict[str, str] = {}

    def counted(name: str, path: Callable[..., Any], *args: Any) -> Any:
        with recorder.recording():
            result = path(*args)
        found[name] = recorder.trace.text()
        return result

    for _ in range(TURNS):
        _train(counted, folder)
    return found


def _train(counted: Callable[..., Any], folder: str) -> None:
    """A short run; what ``counted`` is given is counted under its name, the last call of each name counts."""
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset

    from benchmarks.parallel import Network, ParallelCase
    from drivetrain import Accelerator

    case = ParallelCase("", width=16, blocks=2, rows=8)
    accelerator = counted(CONSTRUCTION, Accelerator)
    network = Network(case)
    plain = torch.optim.AdamW(network.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda _: 1.0)
    samples = torch.randn(2, 6 * case.rows, case.width)
    loader = DataLoader(TensorDataset(*samples), batch_size=case.rows)
    model, optimizer, scheduler, batches = counted("prepare", accelerator.prepare, network, plain, schedule, loader)

    def update() -> None:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    def step(x: Any, y: Any) -> None:
        accelerator.backward(F.mse_loss(model(x), y))
        update()

    x, y = next(iter(batches))
    for _ in range(TURNS):
        counted("step", step, x, y)
    for _ in range(TURNS):
        loss = F.mse_loss(model(x), y)
        counted("backward", accelerator.backward, loss)
        update()
    for _ in range(TURNS):
        counted("save_state", accelerator.save_state, folder)
    for _ in range(TURNS):
        counted("load_state", accelerator.load_state, folder)
    accelerator.end_training()


def count_program(name: str) -> Trace:
    """A path that is taken once, in a program of its own: :data:`NEW`, or ``launch``."""
    with tempfile.TemporaryDirectory(prefix="drivetrain-bench-") as folder:
        result = Path(folder) / "trace.json"
        # Importable by its own name, whatever program this is.
        words = "import sys; from benchmarks import paths; paths.program(*sys.argv[1:])"
        settings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-c", words, name, str(result)]
        ended = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
        if ended.returncode or not result.exists():
            raise RuntimeError(f"counting {name!r} failed:\n{ended.stdout}{ended.stderr}")
        return Trace.read(result.read_text(encoding="utf-8"))


def program(name: str, result: str) -> None:
    """Take a path in this program, which has just begun, and write its trace."""
    recorder = Recorder()
    if name == NEW:
        with recorder.recording():
            from drivetrain import Accelerator

            Accelerator(cpu=True)
        Path(result).write_text(recorder.trace.text(), encoding="utf-8")
        return
    script = Path(result).with_name("script.py")
    script.write_text("", encoding="utf-8")

    def hear(event: str, words: tuple[Any, ...]) -> None:
        # The first worker only: a hook cannot be taken away again.
        if event == "subprocess.Popen" and str(script) in words[1] and not Path(result).exists():
            recorder.stop()
            Path(result).write_text(recorder.trace.text(), encoding="utf-8")

    sys.addaudithook(hear)
    sys.argv = ["drivetrain", "launch", "--cpu", "--num_processes=2", str(script)]
    recorder.start()
    from drivetrain.cli.main import main as entry_point

    entry_point()


KITS = {"accelerate": "test_utils"}
"""The part of a package that is there for tests."""


@dataclass(frozen=True)
class Size:
    """How much source there is.

    Args:
        files: of Python.
        lines: all.
        code: without blank lines, comments and strings that stand by themselves, such as docstrings.
    """

    files: int
    lines: int
    code: int


def size(package: str, *, kit: bool) -> Size:
    """Size of an installed package, with the part that is there for tests or without it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    left_out = None if kit or package not in KITS else folder / KITS[package]
    found = [path for path in sorted(folder.rglob("*.py")) if left_out is None or left_out not in path.parents]
    texts = [path.read_text(encoding="utf-8") for path in found]
    return Size(len(found), sum(len(text.splitlines()) for text in texts), sum(map(code_lines, texts)))


def code_lines(text: str) -> int:
    """Lines that hold code; see :class:`Size`."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def path_rows(traces: Mapping[str, Trace]) -> list[list[str]]:
    """The table of the paths, its head first."""
    rows = [["path", "calls", "files", "changes", "imported"]]
    for name, trace in traces.items():
        numbers = (len(trace.calls), trace.files, trace.changes, trace.imported)
        rows.append([name, *map(str, numbers)])
    return rows


def size_rows() -> list[list[str]]:
    """The table of sizes, its head first."""
    rows = [["package", "files", "lines", "lines of code"]]
    for package in ("drivetrain", "drivetrain_testing", *(peers.MODULES[name] for name in peers.present())):
        for kit in (False, True) if package in KITS else (True,):
            words = "" if package not in KITS else f", with {KITS[package]}" if kit else f", without {KITS[package]}"
            found = size(package, kit=kit)
            rows.append([f"{package}{words}", *(f"{number:,}" for number in (found.files, found.lines, found.code))])
    return rows


def shown(rows: list[list[str]]) -> str:
    """A table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers in rows:
        cells = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def markdown(rows: list[list[str]]) -> str:
    """The same for a page."""
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" + "|--:" * (len(rows[0]) - 1) + "|", *rest])


def sequence(trace: Trace) -> str:
    """The calls of a path, each below its caller; ``*`` marks those that change the file."""
    width = max(len(f"{call.file}:{call.line}") for call in trace.calls) if trace.calls else 0
    lines = []
    for call in trace.calls:
        where = f"{call.file}:{call.line}".ljust(width)
        lines.append(f"{'*' if call.changes else ' '} {where}  {'  ' * call.depth}{call.function}")
    return "\n".join(lines)


def conditions(groups: list[str]) -> list[str]:
    """What the numbers hold for, and what is not here to be counted."""
    found = ", ".join(f"{name} {version}" for name, version in peers.versions().items())
    lines = [f"{found}, Python {platform.python_version()}"]
    absent = [name for name in peers.PEERS if name not in peers.present()]
    if "size" in groups and absent:
        lines.append(f"Not installed here, so not measured: {', '.join(peers.PEERS[name] for name in absent)}")
    reasons = [missing(place) for name, place in PLACES.items() if name in groups]
    return lines + [f"Not counted: {reason}" for reason in reasons if reason is not None]


def main(arguments: list[str]) -> int:
    """Count, print, and write what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paths", description="Calls and files on the ways through our code; its size."
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; none means all")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables and every call")
    parser.add_argument("--calls", metavar="PATH", help='print the calls of one path, as "ddp step" or "launch"')
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.groups) - set(GROUPS))
    if unknown:
        parser.error(f"there is no group {unknown[0]!r}; there are {', '.join(GROUPS)}")
    groups = options.groups or list(GROUPS)
    if options.calls:
        groups = [options.calls.partition(" ")[0]]
        if groups[0] not in {*PLACES, "launch"}:
            parser.error(f"--calls takes a group and a path, as in the first column; there is no group {groups[0]!r}")
    head = conditions(groups)
    print("\n".join(head) + "\n", flush=True)
    traces = all_traces(groups)
    if options.calls:
        if options.calls not in traces:
            parser.error(f"there is no path {options.calls!r}; there are {', '.join(map(repr, traces))}")
        print(sequence(traces[options.calls]))
        return 0
    tables = [path_rows(traces)] if traces else []
    tables += [size_rows()] if "size" in groups else []
    print("\n\n".join(map(shown, tables)))
    if options.markdown:
        blocks = ["\n".join(f"- {line}" for line in head), *map(markdown, tables)]
        options.markdown.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    if options.json:
        found = {name: asdict(trace) for name, trace in traces.items()}
        options.json.write_text(json.dumps({"conditions": head, "tables": tables, "paths": found}), encoding="utf-8")
    return 0


def all_traces(groups: list[str]) -> dict[str, Trace]:
    """The paths of these groups, by group and path."""
    from drivetrain_testing import preload

    traces: dict[str, Trace] = {}
    wanted = {name: place for name, place in PLACES.items() if name in groups and missing(place) is None}
    if "deepspeed" in wanted:
        preload("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", opens_accelerators=True)
    for name, place in wanted.items():
        if name == "single":
            traces[f"{name} {NEW}"] = count_program(NEW)
        traces |= {f"{name} {path}": trace for path, trace in count(place).items()}
    if "launch" in groups:
        traces["launch"] = count_program("launch")
    return traces


if __name__ == "__main__":
    # Ranks find functions by their module's name, which is not this one's.
    from benchmarks import paths

    raise SystemExit(paths.main(sys.argv[1:]))
