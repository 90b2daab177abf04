"""Copies a model without memory: its tensors are fake, so that a forward costs nothing and can be traced.

A result that depends on a parameter has no value; one that depends only on inputs and buffers (a mask, a rotary table,
shifted labels) has its true value. A pipeline sends the former between stages, and computes the latter on each stage.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from drivetrain.api import UnsupportedError, UsageError
from drivetrain_megatron.module_state import OF_TORCH, quiet_fake_tensors
from drivetrain_megatron.pipeline.values import leaves, rebuilt

logger = logging.getLogger(__name__)

NO_VALUE = (
    torch._subclasses.fake_tensor.DataDependentOutputException,  # noqa: SLF001 (torch has no public name for them)
    torch._subclasses.fake_tensor.DynamicOutputShapeException,  # noqa: SLF001
)
"""Exceptions raised when a program reads the value of a fake tensor."""


_MEMORY = "_drivetrain_memory"
"""Attribute of an absent tensor that refers to the memory in whose place it is used."""


def memory_of(value: Any) -> Any:
    """Return the memory that an absent tensor replaces, which modules of a stage return instead; else the value."""
    return vars(value).get(_MEMORY, value) if isinstance(value, Tensor) else value


def forget_memory(value: Any) -> None:
    """Release the memory that an absent tensor replaces, after the forward that made it."""
    if isinstance(value, Tensor):
        vars(value).pop(_MEMORY, None)


_TRACED: list[Callable[[Tensor], bool]] = []
"""Predicates of the active traces: whether a fake tensor replaces one of another rank."""


def is_absent(value: Any) -> bool:
    """Whether this is a tensor without a value."""
    return isinstance(value, FakeTensor) and (not _TRACED or _TRACED[-1](value))


@contextmanager
def traced(is_elsewhere: Callable[[Tensor], bool]) -> Iterator[None]:
    """Trace with fake tensors only, of which a predicate tells those of other ranks.

    Args:
        is_elsewhere: whether a fake tensor replaces one of another rank.
    """
    _TRACED.append(is_elsewhere)
    try:
        yield
    finally:
        _TRACED.pop()


_KNOWN = [0]
"""Number of open contexts of :func:`known_elsewhere`."""


@contextmanager
def known_elsewhere() -> Iterator[None]:
    """Let :class:`Elsewhere` behave as a parameter without value and gradient, for code that skips it."""
    _KNOWN[0] += 1
    try:
        yield
    finally:
        _KNOWN[0] -= 1


@contextmanager
def unaware() -> Iterator[None]:
    """Make reads of :class:`Elsewhere` raise, within :func:`known_elsewhere` too, for code of the script."""
    known, _KNOWN[0] = _KNOWN[0], 0
    try:
        yield
    finally:
        _KNOWN[0] = known


P = ParamSpec("P")
R = TypeVar("R")


def passing_over(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method that works on each parameter separately, so that it skips those of other stages."""

    @wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with known_elsewhere():
            return method(*args, **kwargs)

    return wrapped


def trained(parameters: Sequence[Tensor]) -> tuple[bool, ...]:
    """Return which parameters require gradients, including those of other stages."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (what torch's own subclasses use)
        return tuple(one.requires_grad for one in parameters)


class Elsewhere(FakeTensor):
    """A parameter of another pipeline stage: it has a shape, and computing with it raises.

    A norm or a penalty that a script sums over ``model.parameters()`` would be that of one stage; so reading its value
    or gradient, or a result computed from them, raises. Operations on single parameters skip it, since its own stage
    performs them.
    """

    fqn: str
    _hooks: tuple[dict[int, Any], dict[int, Any]]
    """Hooks of the script: on its gradient, and post-accumulate-grad hooks."""
    _shown: Elsewhere | None = None
    """Its gradient for those."""

    @staticmethod
    def of(absent: Tensor, name: str) -> Elsewhere:
        """Turn a parameter without memory into one."""
        absent.__class__ = Elsewhere
        assert isinstance(absent, Elsewhere), "its class was exchanged"
        absent.fqn, absent._hooks = name, ({}, {})  # noqa: SLF001 (its own class)
        # Its copies are of this class too.
        vars(absent).pop("__deepcopy__", None)
        return absent

    @property
    def grad(self) -> Any:
        """Not here."""
        if _KNOWN[0] or torch._C._current_graph_task_id() != -1:  # noqa: SLF001 (torch has no public name for it)
            return None
        if self._shown is not None:
            return self._shown
        caller = sys._getframe(1).f_locals.get("self")  # noqa: SLF001 (Python has no public name for it)
        if isinstance(caller, torch.amp.GradScaler):
            raise UsageError(
                f"torch.amp.GradScaler looks for the gradient of {self.fqn}, which lies on another pipeline stage: the "
                "stages would skip steps apart",
                cure="Set mixed_precision: fp16 in the configuration, or Accelerator(mixed_precision='fp16'), which "
                "scales the loss by itself; write accelerator.backward(loss) and optimizer.step() without a scaler.",
            )
        raise self.refused("its gradient was read")

    @grad.setter
    def grad(self, value: Any) -> None:
        """Its own stage does it."""

    def set_(self, *_: Any, **__: Any) -> Any:
        """Do nothing: the parameter's own stage does it. torch calls no ``__torch_function__`` here."""
        _count_writes([self])
        return self

    def passed_over(self, func: Any, args: Any, kwargs: Any) -> Elsewhere:
        """Write nothing. What its own stage draws to write into it is drawn, so that the next numbers are alike."""
        if getattr(func, "__name__", "") == "detach_":
            self.requires_grad_(False)
            return self
        _count_writes([self])
        if getattr(func, "__name__", "") not in _DRAWS:
            return self
        drawn = _ones(self)
        with torch.no_grad():
            named = {name: drawn if one is self else one for name, one in kwargs.items()}
            func(*(drawn if one is self else one for one in args), **named)
        return self

    def take_hooks(self, parameter: Tensor) -> None:
        """Take over hooks and attributes of the parameter that it replaces; handles of hooks remove them here too."""
        # Torch has no public way to list them.
        before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # noqa: SLF001
        self._hooks = (OrderedDict() if before is None else before, OrderedDict() if after is None else after)
        # What the script has set, and methods that refuse hooks; not the one that pickles the parameter that is freed.
        own = {*vars(self), "__reduce_ex__"}
        vars(self).update({name: its for name, its in vars(parameter).items() if name not in own})

    def register_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """As torch's; see :meth:`call_hooks`."""
        return self._register(hook, 0)

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """As torch's; see :meth:`call_hooks`."""
        return self._register(hook, 1)

    def _register(self, hook: Callable[..., Any], kind: int) -> RemovableHandle:
        hooks = self._hooks[kind]
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def gradient(self) -> Elsewhere:
        """Return a placeholder for its gradient; reading it raises."""
        return Elsewhere.of(self._copied().detach(), self.fqn)

    def call_hooks(self) -> None:
        """Call its hooks with a gradient that refuses to be read: what they compute for it, its own stage computes.

        A hook that keeps or measures gradients would otherwise see only one stage's, without a word.
        """
        if not (self._hooks[0] or self._hooks[1]):
            return
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (what torch's own subclasses use)
            if not self.requires_grad:
                return
        gradient = self.gradient()
        with unaware():
            try:
                for hook in list(self._hooks[0].values()):
                    getattr(hook, "of_script", hook)(gradient)
                self._shown = gradient
                for hook in list(self._hooks[1].values()):
                    hook(self)
            finally:
                self._shown = None

    def refused(self, what: str) -> UsageError:
        """The error for what a script did with it."""
        name = getattr(self, "fqn", "a parameter")
        return UsageError(
            f"{name} lies on another pipeline stage, and {what}: a sum or norm over the model's parameters, or a copy "
            "of them, would be that of one stage",
            cure="Write accelerator.clip_grad_norm_(model.parameters(), max_norm), with math.inf to measure only; "
            "parameter.register_hook to change gradients; weight_decay in the optimizer for a penalty; "
            "accelerator.get_state_dict(model) for values. Copy a model for an average of its weights after its first "
            "forward. pipeline_parallel_size: 1 keeps all parameters on every rank.",
        )

    def __format__(self, spec: str) -> str:
        if spec:
            raise self.refused("its value was printed")
        return str(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise self.refused("torch.save, pickle or copy.copy was given it")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = Elsewhere.of(self._copied(), getattr(self, "fqn", ""))
        memo[id(self)] = made
        return made

    def _copied(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (what torch's own subclasses use)
            like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
            absent = self.fake_mode.fake_tensor_converter.from_meta_and_device(self.fake_mode, like, self.device)
            return nn.Parameter(absent, requires_grad=self.requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(getattr(kind, "RECORDS", False) for kind in types):
            return NotImplemented  # An output that is not known yet: it records the call, or refuses it.
        return cls._called(func, args, kwargs or {})

    @classmethod
    def _called(cls, func: Any, args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (what torch's own subclasses use)
            if _KNOWN[0] or torch._C._current_graph_task_id() != -1:  # noqa: SLF001
                return func(*args, **kwargs)
            name = getattr(func, "__name__", str(func))
            first = args[0] if args else next(iter(kwargs.values()), None)
            if name in _CONVERSIONS and isinstance(first, Elsewhere):
                if func(*args, **kwargs).dtype != first.dtype:
                    raise first.refused(f"{name} changes its dtype")
                return first
            if name.endswith("_") and not name.endswith("__"):
                if isinstance(first, Elsewhere):
                    # What is trained is known on every rank: gradients cross the cuts by it.
                    return func(*args, **kwargs) if name == "requires_grad_" else first.passed_over(func, args, kwargs)
                if isinstance(first, (list, tuple)):
                    return _of_those_here(func, args, kwargs)
            absent = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, Elsewhere))
            if name in _JOINING and _several(args, kwargs):
                # What was cut out of it and written back, p.data = vector[:9], torch would take without a word.
                raise absent.refused(f"{name} joins it with others")
            if name in EXPORTS or name == "backward" or (name.endswith("_") and not name.endswith("__")):
                raise absent.refused(f"{name} reads it")
            try:
                args, kwargs = tree_map(_without_history, (args, kwargs))
                with _DrawsAlike():  # type: ignore[no-untyped-call]
                    found = func(*args, **kwargs)
            except NO_VALUE as problem:
                raise absent.refused(f"{name} reads it") from problem
            # What is computed from it is as unknown as it is, until somebody reads it.
            for one in tree_leaves(found):
                if type(one) is FakeTensor:
                    Elsewhere.of(one, absent.fqn)
            return found


class StatesHere(defaultdict[Any, Any]):
    """State of an optimizer by parameter; raises for parameters of other stages."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        super().__init__(dict, values)

    def __missing__(self, key: Any) -> Any:
        self._check(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """See ``dict.get``."""
        self._check(key)
        return super().get(key, default)

    def _check(self, key: Any) -> None:
        if isinstance(key, Elsewhere) and not _KNOWN[0]:
            raise UsageError(
                f"{key.fqn} lies on another pipeline stage, and so does the optimizer's state of it, which was asked "
                "for: a sum over the states would be that of one stage",
                cure="accelerator.save_state(folder) writes the states of all stages. pipeline_parallel_size: 1 keeps "
                "all parameters, with their states, on every rank.",
            )

    def __reduce_ex__(self, _: Any) -> Any:
        return defaultdict, (dict, dict(self))


@contextmanager
def showing_gradients(parameters: Sequence[Elsewhere]) -> Iterator[None]:
    """Give these parameters placeholder gradients: reading them raises, and in-place operations on each skip them."""
    for one, trains in zip(parameters, trained(parameters), strict=True):
        one._shown = one.gradient() if trains else None  # noqa: SLF001 (a class of ours)
    try:
        yield
    finally:
        for one in parameters:
            one._shown = None  # noqa: SLF001


_DRAWS = frozenset(
    {"bernoulli_", "cauchy_", "exponential_", "geometric_", "kaiming_uniform_", "log_normal_", "normal_", "random_"}
    | {"uniform_"}
)

_DRAWS_BY_VALUE = frozenset({"poisson", "binomial", "_standard_gamma", "_sample_dirichlet"})
"""Operations that draw as many numbers as their values say."""


@final
class _DrawsAlike(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws what random operations on absent tensors draw on their own stage, so that the next numbers are alike."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            if func.overloadpacket.__name__ in _DRAWS_BY_VALUE:
                raise NO_VALUE[0](func)
            # Ones are a valid mean, probability and weight.
            func(*tree_map(_ones, args), **tree_map(_ones, kwargs))
        return func(*args, **kwargs)


def _ones(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).fill_(1)


EXPORTS = frozenset({"numpy", "__array__", "__dlpack__"})
"""Methods that export the memory of a tensor to other libraries."""

_JOINING = frozenset(
    {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "row_stack", "block_diag"}
)


def _several(args: Any, kwargs: Any) -> bool:
    """Whether a call is given tensors that come from more than one parameter."""
    found = {getattr(one, "fqn", "") for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
    return len(found) > 1


_CONVERSIONS = frozenset({"to", "float", "double", "half", "bfloat16", "cpu", "cuda", "contiguous"})


def _without_history(one: Any) -> Any:
    # Torch warns where it reads the gradient of a tensor that something computed, to copy it without its values.
    return one.detach() if type(one) is Tensor and not one.is_leaf else one


def _count_writes(written: Sequence[Tensor]) -> None:
    """Count a write to each, as torch does where there are values."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (what torch's own subclasses use)
        increment_version([one for one in written if not one.is_inference()])


def _of_those_here(func: Any, args: Any, kwargs: Any) -> Any:
    """One of torch's functions on lists that change the first, without what this rank lacks."""
    here = [index for index, one in enumerate(args[0]) if not isinstance(one, Elsewhere)]

    def kept(value: Any) -> Any:
        return [value[index] for index in here] if isinstance(value, (list, tuple)) else value

    chosen, named = [kept(one) for one in args], {name: kept(one) for name, one in kwargs.items()}
    absent = [one for one in tree_leaves((chosen, named)) if isinstance(one, Elsewhere)]
    if absent:
        raise absent[0].refused(f"{func.__name__} reads it")
    _count_writes([one for one in args[0] if isinstance(one, Elsewhere)])
    return func(*chosen, **named) if here else None


@final
class Blanks:
    """Makes parameters without memory.

    Args:
        device: where their values would be.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    @torch.inference_mode(False)
    def absent_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter of the same shape, strides and dtype, without memory, that counts writes."""
        like = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        absent = self.mode.fake_tensor_converter.from_meta_and_device(self.mode, like, self._device)
        made = nn.Parameter(absent, requires_grad=parameter.requires_grad)
        # Torch's own copying reads the address of memory that does not exist; scripts copy models.
        made.__deepcopy__ = lambda memo: self.absent_parameter(made)  # type: ignore[method-assign]  # noqa: ARG005
        return made


@final
class Skeleton:
    """The model's structure with parameters that have no values; buffers are copies with values.

    Args:
        module: a whole model; it stays as it is.
        device: where its inputs will be, though it may be elsewhere yet.

    Raises:
        UnsupportedError: the model cannot be copied.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.blanks = Blanks(device)
        self.mode = self.blanks.mode
        memo: dict[int, Any] = {id(one): self.blanks.absent_parameter(one) for one in module.parameters()}
        # torch copies leaves alone. A layer that is pruned keeps a weight that was computed, and computes it anew.
        kept = (value for part in module.modules() for value in vars(part).values())
        memo |= {id(one): one.detach().clone() for one in kept if isinstance(one, Tensor) and not one.is_leaf}
        try:
            self.module: nn.Module = copy.deepcopy(module, memo)
        except Exception as problem:
            raise UnsupportedError(
                f"{type(module).__name__} cannot be cut into pipeline stages: it cannot be copied ({problem})",
                cure="Keep what cannot be copied (locks, files, process groups) outside of the module, or use "
                "pipeline_parallel_size: 1.",
            ) from problem
        for part in self.module.modules():
            for name, buffer in list(part._buffers.items()):  # noqa: SLF001 (the order in which they were registered)
                if buffer is not None and not buffer.is_meta:
                    part._buffers[name] = buffer.to(device)  # noqa: SLF001
        self.opaque: dict[str, Exception] = {}
        """Modules that read values, with the error; their output is assumed to have the shape of their first tensor."""
        self._written: _Written | None = None
        for name, part in self.module.named_modules():
            self._make_robust(part, name)

    def follow(self, module: nn.Module) -> dict[int, Any]:
        """Take over what the module keeps as it is now: mode, buffers, the script's attributes, what is frozen.

        Returns:
            The memo of the copy, in which what the skeleton keeps stands for what the module keeps.
        """
        pairs = list(zip(module.modules(), self.module.modules(), strict=True))
        memo: dict[int, Any] = {id(ours): theirs for ours, theirs in pairs}
        for one, flag in zip(self.module.parameters(), trained(list(module.parameters())), strict=True):
            one.requires_grad_(flag)
        for ours, theirs in pairs:
            theirs.training = ours.training
            for name, value in vars(ours).items():
                if name in OF_TORCH or name == "forward" or isinstance(value, Tensor):
                    continue
                try:
                    vars(theirs)[name] = copy.deepcopy(value, memo)
                except Exception as problem:  # noqa: BLE001 (a user's own __deepcopy__ raises anything)
                    # The copy has what there was at prepare, which could be copied.
                    logger.debug("%s.%s is not copied again: %s", type(ours).__name__, name, problem)
            for name, buffer in ours._buffers.items():  # noqa: SLF001
                now = theirs._buffers.get(name)  # noqa: SLF001
                if buffer is None or now is None:
                    continue
                if not (buffer.is_meta or is_absent(now) or is_absent(buffer)):
                    theirs._buffers[name] = buffer.detach().to(now.device, copy=True)  # noqa: SLF001
        return memo

    def absent(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor without a value."""
        with self.mode:
            return torch.empty(shape, dtype=dtype, device=device)

    def is_written(self, value: Any) -> bool:
        """Whether the forward that runs has written an absent value into the memory of this tensor."""
        return self._written is not None and self._written.holds(value)

    def _make_robust(self, module: nn.Module, name: str) -> None:
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._written is None:
                written = self._written = _Written(self.mode)
                try:
                    with written:
                        output = forward(*args, **kwargs)
                finally:
                    self._written = None
                if written.foreign is not None:
                    refuse_foreign(written.foreign, self.module)
                return output
            try:
                with quiet_fake_tensors():
                    return self._written.seen(inner(*args, **kwargs))
            except (RuntimeError, NotImplementedError, *NO_VALUE) as problem:
                given = [one for one in (*args, *kwargs.values()) if is_absent(one) and one.is_floating_point()]
                if not given or not name:
                    raise
                self.opaque.setdefault(name, problem)
                return torch.empty_like(given[0])

        module.forward = forward


@final
class _Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks as absent what a forward of a skeleton reads from memory into which an absent value was written.

    A forward may make a tensor with a value, zeros for sums, and write into it what depends on a parameter. Torch
    passes over such a write, and whatever was in that memory would be taken for the true value.

    Args:
        mode: that of the skeleton's parameters.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._storages: dict[int, Tensor] = {}
        self.foreign: nn.Parameter | None = None
        """A trained parameter that is computed with and is not of the module."""

    def seen(self, output: Any) -> Any:
        """Return a module's output as the code after it may read it."""
        found = leaves(output) if self._storages else []
        if not any(map(self.holds, found)):
            return output
        # In a stage the module returns the memory itself: code that counts the calls of forward must not see these.
        with torch._C.DisableTorchFunction():  # noqa: SLF001 (torch has no public name for it)
            shown = [self._shown(one) for one in found]
        for one, each in zip(found, shown, strict=True):
            if each is not one:
                setattr(each, _MEMORY, one)
        return rebuilt(output, shown)

    def holds(self, value: Any) -> bool:
        """Whether this is a tensor with a value in memory into which an absent value was written."""
        if type(value) not in (Tensor, nn.Parameter):
            return False
        with torch._C.DisableTorchFunction():  # noqa: SLF001 (torch has no public name for it)
            return value.layout is torch.strided and value.untyped_storage()._cdata in self._storages  # noqa: SLF001

    def _shown(self, value: Any) -> Any:
        if not self.holds(value):
            return value
        return self._mode.from_tensor(value.detach()).requires_grad_(value.requires_grad)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._storages:
            given, named = tree_map(self._shown, (args, kwargs))
        else:
            given, named = args, kwargs
        if self.foreign is None:
            # Those of the module have no values here.
            parameters = (one for one in tree_leaves((args, kwargs)) if type(one) is nn.Parameter)
            self.foreign = next((one for one in parameters if one.requires_grad and not is_absent(one)), None)
        result = func(*given, **named)
        if not func._schema.is_mutable or not any(map(is_absent, tree_leaves((given, named)))):  # noqa: SLF001
            return result
        targets = [
            kwargs.get(each.name) if each.kwarg_only or place >= len(args) else args[place]
            for place, each in enumerate(func._schema.arguments)  # noqa: SLF001
            if each.alias_info is not None and each.alias_info.is_write
        ]
        for one in tree_leaves(targets):
            if type(one) in (Tensor, nn.Parameter):
                self._storages[one.untyped_storage()._cdata] = one  # noqa: SLF001
        return targets[0] if len(targets) == 1 and isinstance(result, Tensor) else result


def refuse_foreign(parameter: nn.Parameter, module: nn.Module) -> None:
    """Raise where a forward computes with a parameter that its stage's rank alone would train.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"the forward of {type(module).__name__} computes with a parameter of shape {tuple(parameter.shape)} that is "
        "not one of its own, as in layers that a plain list holds, and of the ranks of a pipeline one alone would "
        "train it",
        cure="Register it: layers in an nn.ModuleList, a parameter as an attribute of the module; or freeze it, "
        "requires_grad_(False).",
    )
