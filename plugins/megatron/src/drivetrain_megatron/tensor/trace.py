"""Traces a model's forward on fake tensors, without memory or data.

The forward runs once on fake tensors: shapes, no values. Its inputs are guessed from the model; each call of a torch
function is written down with its arguments and results, so that the flow of data between parameters can be followed.

If a forward reads values (``if late.any():``), its control flow depends on the data. Then only those of its modules are
traced that read none: they compute the same in every run.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.api import UsageError
from drivetrain.api.engines import trees
from drivetrain_megatron.module_state import quiet_fake_tensors, unchanged
from drivetrain_megatron.tensor.attention import can_follow, multi_head_attention

logger = logging.getLogger(__name__)

_FUSED_IN_EVALUATION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
BATCH, LENGTH = 2, 4
"""Samples and positions of the guessed input; few positions, since a model may allow no more."""


Inputs = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each argument of a forward."""


@dataclass(frozen=True)
class Call:
    """One call of a torch function.

    Args:
        func: the function.
        args: its arguments; tensors by their number in the trace's ``values`` (:class:`Value`).
        kwargs: the same.
        outputs: numbers of the tensors that it returned.
        scope: name of the innermost module that was running.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    scope: str

    @property
    def inputs(self) -> list[int]:
        """Numbers of the tensors among the arguments."""
        return [leaf.number for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Value)]


@dataclass(frozen=True)
class Value:
    """Placeholder of a tensor of the trace."""

    number: int


@dataclass
class Trace:
    """Trace of a forward.

    Args:
        values: for each tensor one on the meta device that looks like it.
        calls: in order.
        parameters: number of each parameter, by the first of its names.
        inputs: numbers of the forward's own arguments.
        outputs: numbers of the tensors in what it returned.
        opaque: numbers of the tensors that an ``autograd.Function`` of the script or of a library takes or returns. Its
            backward is code that no trace shows, and computes on whole tensors.
    """

    values: list[Tensor] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)
    opaque: set[int] = field(default_factory=set)

    def users(self) -> dict[int, list[int]]:
        """Return the calls that take each value, by index."""
        found: dict[int, list[int]] = {}
        for place, call in enumerate(self.calls):
            for number in call.inputs:
                found.setdefault(number, []).append(place)
        return found

    def makers(self) -> dict[int, int]:
        """Return the first call that returned each value, by index."""
        found: dict[int, int] = {}
        for place, call in enumerate(self.calls):
            for number in call.outputs:
                if number not in call.inputs:
                    found.setdefault(number, place)
        return found


class _Recorder(TorchFunctionMode):
    """Records calls. Tensors are identified by ``id``, and kept alive so that no ``id`` is reused."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._of_node: dict[Any, int] = {}
        self.scopes = [""]

    def number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._alive)
            self._alive.append(tensor)
        number = self._numbers[id(tensor)]
        if tensor.grad_fn is not None:
            if _is_opaque(tensor.grad_fn):
                self._trace.opaque.add(number)
                before = [node for node, _ in tensor.grad_fn.next_functions]
                self._trace.opaque.update(self._of_node[node] for node in before if node in self._of_node)
            self._of_node.setdefault(tensor.grad_fn, number)
        return number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and can_follow(args, kwargs):
            with self:
                return multi_head_attention(args, kwargs)
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if outputs:
            made = tuple(self.number(each) for each in outputs)
            self._trace.calls.append(Call(func, self.refs(args), self.refs(kwargs), made, self.scopes[-1]))
        return result

    def values(self) -> list[Tensor]:
        """Return the recorded values as meta tensors; call it outside of the fake mode."""
        return [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta") for each in self._alive]

    def refs(self, tree: Any) -> Any:
        return tree_map(lambda leaf: Value(self.number(leaf)) if isinstance(leaf, Tensor) else leaf, tree)


def _is_opaque(node: Any) -> bool:
    """Whether a node of autograd's graph runs the backward of a function that is none of torch's own."""
    if not isinstance(node, BackwardCFunction):
        return False
    function = getattr(node, "_forward_cls", None)
    return function is None or function.__module__.partition(".")[0] != "torch"


def record(model: nn.Module) -> Trace:
    """Run the model's forward on fake tensors and write down what it does. Not collective; the model is left as it was.

    Raises:
        UsageError: it reads values, or the forward fails for all guesses at the inputs; quotes its error.
    """
    problems = []
    for inputs in _guesses(model):
        # Some operators have shape functions in low precision only.
        for low in (False, True):
            try:
                return _record(model, *_as_arguments(model, _like_inputs(inputs)), low=low)
            except Exception as problem:  # noqa: BLE001 (a user's forward raises anything; it is reported)
                if not low:
                    problems.append(_why(problem, inputs))
    tried = "; ".join(list(dict.fromkeys(problems))[:3])
    raise UsageError(
        f"its forward cannot be run without values: {tried}",
        cure="Write megatron.tp_plan: {'layers.*.wq': colwise, 'layers.*.wo': rowwise, ...}.",
    )


def _why(problem: Exception, inputs: Inputs) -> str:
    if isinstance(problem, (DataDependentOutputException, DynamicOutputShapeException)):
        libraries = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
        frames = [each for each in extract_tb(problem.__traceback__) if not each.filename.startswith(libraries)]
        if frames:  # the innermost line of the script's
            return f"it asks for them at {Path(frames[-1].filename).name}:{frames[-1].lineno}"
    first_line = (str(problem).splitlines() or [""])[0]
    return f"with {_told(inputs)}: {type(problem).__name__}: {first_line}"


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


def record_parts(model: nn.Module) -> dict[str, Trace]:
    """Record of a model that :func:`record` cannot follow the largest modules that can be followed.

    Their inputs are those of a run of the whole model on values; of modules that did not run, guessed as the model's
    own. Not collective; every rank draws the same input, and the model is left as it was.

    Returns:
        A trace for each path of a module.
    """
    calls = _calls_on_values(model)
    found: dict[str, Trace] = {}
    for path, part in model.named_modules():
        if not path or any(path.startswith(f"{outer}.") for outer in found) or next(part.parameters(), None) is None:
            continue
        try:
            found[path] = _record(part, *calls[path], low=False) if path in calls else record(part)
        except Exception as problem:  # noqa: BLE001 (a user's forward raises anything; its own modules are next)
            logger.debug("%s of %s cannot be followed: %s", path, type(model).__name__, problem)
    return found


def _calls_on_values(model: nn.Module) -> dict[str, Arguments]:
    """Return the modules' arguments in a run on values; empty for models on meta, or if no guess at the inputs runs."""
    if any(tensor.is_meta for tensor in model.parameters()):
        return {}
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    for inputs in _guesses(model):
        calls: dict[str, Arguments] = {}
        positional, by_name = _as_arguments(model, _drawn_inputs(inputs, device))
        try:
            with unchanged(model), torch.no_grad(), _calm(model), _first_calls(model, calls):
                model(*positional, **by_name)
        except Exception as problem:  # noqa: BLE001 (a user's forward raises anything; record() has told what)
            logger.debug("%s does not run on %s: %s", type(model).__name__, _told(inputs), problem)
        else:
            return calls
    return {}


@contextmanager
def _first_calls(model: nn.Module, calls: dict[str, Arguments]) -> Iterator[None]:
    """Keep what each module, under the first of its names, is given when it is called first; tensors as meta ones."""

    def keep(path: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if path not in calls:
                calls[path] = tree_map(lambda one: one.to("meta") if isinstance(one, Tensor) else one, (args, kwargs))

        return hook

    handles = [
        module.register_forward_pre_hook(keep(path), with_kwargs=True) for path, module in model.named_modules() if path
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _like_inputs(inputs: Inputs) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in inputs.items()}


def _drawn_inputs(inputs: Inputs, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(device, dtype)
        if dtype.is_floating_point
        else torch.zeros(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in inputs.items()
    }


def _record(model: nn.Module, positional: Any, by_name: Any, *, low: bool) -> Trace:
    """Record a call with tensors like these, which may be on meta."""

    def fake(like: Any) -> Any:
        if not isinstance(like, Tensor):
            return like
        dtype = torch.bfloat16 if low and like.dtype.is_floating_point else like.dtype
        return torch.empty(like.shape, dtype=dtype)

    trace = Trace()
    recorder = _Recorder(trace)
    calm = (_calm(model), quiet_fake_tensors(), _scopes(model, recorder))
    # With gradients: the graph names functions whose backward no trace shows, and forward may register hooks.
    with unchanged(model), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), calm[0], calm[1], calm[2]:
        one_each = {tensor: fake(tensor) for tensor in (*model.parameters(), *model.buffers())}
        for tensor in model.parameters():
            one_each[tensor].requires_grad_(tensor.requires_grad)
        tensors = {name: one_each[tensor] for name, tensor in _held(model)}
        trace.parameters = {name: recorder.number(one_each[one]) for name, one in model.named_parameters()}
        positional, by_name = tree_map(fake, (positional, by_name))
        given = tree_leaves((positional, by_name))
        trace.inputs = {recorder.number(each) for each in given if isinstance(each, Tensor)}
        with recorder:
            output = functional_call(model, tensors, positional, by_name, tie_weights=False)
        trace.outputs = {recorder.number(leaf) for leaf in _tensors(output)}
    trace.values = recorder.values()
    return trace


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of each module: one that two modules share comes twice, one of a module of two names once.

    ``functional_call`` would exchange the latter twice, and leave its own tensor there afterwards.
    """
    for path, module in model.named_modules():
        yield from module.named_parameters(path, recurse=False, remove_duplicate=False)
        yield from module.named_buffers(path, recurse=False, remove_duplicate=False)


def guessed_arguments(model: nn.Module) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Any]]]:
    """Arguments that such a model's forward may take, of zeros, the likeliest first. Not collective."""
    for inputs in _guesses(model):
        given = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in inputs.items()}
        yield _as_arguments(model, given)


def _as_arguments(model: nn.Module, given: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    names = inspect.signature(model.forward).parameters
    if "use_cache" in names:
        return (), {**given, "use_cache": False}
    if all(name in names for name in given):
        return (), dict(given)
    return tuple(given.values()), {}


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for each in output.values():
            yield from _tensors(each)
    elif isinstance(output, (list, tuple)):
        for each in output:
            yield from _tensors(each)


@contextmanager
def _calm(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, but for modules that compute in one opaque kernel then; each its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = isinstance(module, _FUSED_IN_EVALUATION)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _scopes(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, *_: Any) -> None:
        recorder.scopes.append(names[module])

    def leave(*_: Any) -> None:
        recorder.scopes.pop()

    handles = [module.register_forward_pre_hook(enter, prepend=True) for module in names]
    handles += [module.register_forward_hook(leave, always_call=True) for module in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _guesses(model: nn.Module) -> Iterator[Inputs]:
    """Inputs that such a model may take, the likeliest first."""
    own = trees.attribute(model, "dummy_inputs")
    if isinstance(own, Mapping) and all(isinstance(each, Tensor) for each in own.values()):
        yield {name: (tuple(each.shape), each.dtype) for name, each in own.items()}
    parameters = inspect.signature(model.forward).parameters.values()
    fixed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in parameters if each.kind in fixed and each.default is inspect.Parameter.empty]
    if not names:
        names = [each.name for each in parameters if each.kind in fixed][:1] or ["x"]
    for shape, dtype in _shapes(model):
        yield dict.fromkeys(names, (shape, dtype))


def _shapes(model: nn.Module) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    """Guess input shapes from the first module that has parameters and a known kind of input."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield (BATCH, LENGTH), torch.int64
            return
        if isinstance(module, nn.Linear):
            dtype = module.weight.dtype
            yield (BATCH, module.in_features), dtype
            yield (BATCH, LENGTH, module.in_features), dtype
            return
        if isinstance(module, nn.Conv2d):
            for side in (8, 16, 28, 32, 64, 224):
                yield (BATCH, module.in_channels, side, side), module.weight.dtype
            return
    yield (BATCH, LENGTH), torch.int64


def _told(inputs: Inputs) -> str:
    return ", ".join(
        f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}" for name, (shape, dtype) in inputs.items()
    )
