"""Raises if a script reads gradients or elements of a parameter that ZeRO keeps elsewhere.

Under stages 1 to 3 DeepSpeed takes gradients out of ``parameter.grad`` while backward runs, and under stage 3 a
parameter is an empty tensor outside of its layer's forward. torch's functions take both for what they look like: no
gradients to clip, no elements to clamp. So outside of the engine's calls such parameters have a class whose operations
check this first; inside they are plain parameters, at plain speed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from types import FrameType
from typing import Any, final

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from drivetrain.api import UnsupportedError
from drivetrain_deepspeed.layout import partition_of, partitioned
from drivetrain_deepspeed.strides import run_in_order
from drivetrain_sharding import has_other_strides, with_strides

_ENGINE = ("deepspeed.", "drivetrain_deepspeed.")

_ABOUT = frozenset(
    {
        *("requires_grad", "requires_grad_", "dtype", "device", "layout", "is_leaf", "grad_fn", "names", "name"),
        *("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad", "output_nr", "_is_view"),
        *("register_hook", "register_post_accumulate_grad_hook", "is_floating_point", "is_complex", "is_signed"),
        *("is_cuda", "is_cpu", "is_xpu", "is_hpu", "is_npu", "is_mps", "is_meta", "is_sparse", "is_quantized"),
        *("is_mkldnn", "is_nested", "is_inference", "is_sparse_csr", "itemsize", "element_size", "get_device"),
        *("is_contiguous", "is_pinned", "is_shared"),
    }
)
"""Attributes that are valid for a partitioned parameter."""

_WHOLE: Mapping[str, Callable[..., Any]] = {
    "shape": lambda p: torch.Size(p.ds_shape),
    "size": lambda p, dim=None: torch.Size(p.ds_shape) if dim is None else p.ds_shape[dim],
    "numel": lambda p: p.ds_numel,
    "nelement": lambda p: p.ds_numel,
    "dim": lambda p: len(p.ds_shape),
    "ndim": lambda p: len(p.ds_shape),
    "ndimension": lambda p: len(p.ds_shape),
    "__len__": lambda p: p.ds_shape[0],
}
"""Attributes that are computed for the full parameter."""


class GuardedParameter(nn.Parameter):
    """A parameter outside of the engine's calls. Never constructed: :class:`Guard` assigns the class."""

    _drivetrain_guard: Guard

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            if not _asked_by_engine():
                name = _name(func)
                for value in _parameters((*args, *kwargs.values())):
                    value._drivetrain_guard.check(value, name)  # noqa: SLF001
                first = args[0] if args else None
                if isinstance(first, GuardedParameter):
                    if name == "grad":
                        first._drivetrain_guard.check_gradient(func, args)  # noqa: SLF001
                    elif name in _WHOLE and in_parts(first):
                        return _WHOLE[name](*args, **kwargs)
                    elif name == "data" and func.__name__ == "__get__":
                        # Shares the count of writes, which `data` does not: DeepSpeed's own checks go by it.
                        func, args = torch.Tensor.detach, (first,)
                    elif name == "data":
                        first._drivetrain_guard.strides.pop(id(first), None)  # noqa: SLF001
                if name not in _ABOUT and name != "grad":
                    strides = _strides((*args, *kwargs.values()))
                    if strides:
                        return run_in_order(func, args, kwargs, strides)
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            if hasattr(self, "ds_id"):
                raise UnsupportedError(
                    f"a parameter of {self._drivetrain_guard.model} cannot be copied: ZeRO stage 3 shares it out over "
                    "ranks",
                    cure="Build a second model, and load accelerator.get_state_dict(model) into it on the main "
                    "process, where it is whole; or copy the model before prepare.",
                )
            strides = self._drivetrain_guard.strides.get(id(self), self.stride())
            values = with_strides(self.detach().clone(), strides)
            copied: nn.Parameter = memo.setdefault(id(self), nn.Parameter(values, self.requires_grad))
            return copied

    def __reduce_ex__(self, protocol: int) -> Any:  # type: ignore[override]
        if hasattr(self, "ds_id"):
            raise UnsupportedError(
                f"a parameter of {self._drivetrain_guard.model} cannot be pickled: ZeRO stage 3 shares it out over "
                "ranks",
                cure="Save accelerator.get_state_dict(model), or call accelerator.save_model(model, folder).",
            )
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            if in_parts(self):
                return f"Parameter in parts over the ranks: {tuple(self.ds_shape)}, {self.dtype}"  # type: ignore[attr-defined]
            return super().__repr__(**kwargs)  # type: ignore[no-untyped-call,no-any-return]


@final
class Guard:
    """The parameters of one engine, and when their operations look first.

    Args:
        module: the user's.
        names: of its parameters, by identity.
        stage: of ZeRO.
        strides: of the parameters that did not lie row by row, by identity. Those that ZeRO lays out anew are guarded
            outside of the engine's calls at every stage, so that random numbers come in the script's order.
    """

    def __init__(self, module: nn.Module, stage: int, strides: Mapping[int, tuple[int, ...]] | None = None) -> None:
        self.model, self._stage = type(module).__name__, stage
        self._names = {id(each): name for name, each in module.named_parameters()}
        given = strides or {}
        self.strides = {
            id(each): given[id(each)]
            for each in module.parameters()
            if id(each) in given and each.stride() != given[id(each)]
        }
        self.pending: Callable[[], bool] = lambda: False
        """Whether gradients of an open window wait for a step."""
        plain = [each for each in module.parameters() if type(each) is nn.Parameter] if stage else []
        self._plain: list[Any] = [each for each in plain if stage < 3 or hasattr(each, "ds_id")]
        self.stepped: AbstractSet[int] = frozenset()
        """Parameters whose gradients DeepSpeed has dropped with a step, and the script has not: identities, live."""
        self.dropped: Callable[[int], None] = lambda _: None
        """Called where it drops the gradient of one of them by hand."""
        self._module = module
        self._pieces = partitioned(module)
        self._touched = False
        """The script has accessed gathered parameters under stage 3, and may have written to them."""
        self._lent: dict[int, tuple[Any, int]] = {}
        """Stage 3: parameters that a layer which the script calls by itself was given, with torch's count of writes."""
        self._theirs: list[tuple[Any, Callable[..., Any]]] = []
        """Stage 3: what gathers a parameter, as DeepSpeed made it."""
        for each in self._plain:
            each._drivetrain_guard = self  # noqa: SLF001
            if stage == 3:
                # DeepSpeed's own check: writes in a GatheredParameters that sends none raise.
                each.ds_enable_sanity_checks = True
                self._theirs.append((each, each.all_gather))
                each.all_gather = self._gathering(each, each.all_gather)
        self._laid = [each for each in self._plain if id(each) in self.strides]
        self._on = False
        self._lifted = 0
        self._switch(on=stage == 3)

    # A context manager by hand, and reentrant: a training step enters it five times.

    def __enter__(self) -> None:
        """The engine begins to work: parameters are plain ones."""
        if self._lent:
            self._check_lent()
        self._lifted += 1
        if self._on or self._laid:
            self._switch(on=False)
            if self._touched:
                self.take_in()

    def __exit__(self, *_: object) -> None:
        self._lifted -= 1
        if not self._lifted:
            wanted = self._stage == 3 or self.pending() or bool(self.stepped)
            if wanted != self._on or self._laid:
                self._switch(on=wanted)

    @property
    def engine_at_work(self) -> bool:
        """Whether what runs was called by the core."""
        return bool(self._lifted)

    def release(self) -> None:
        """Plain parameters for good."""
        self._laid = []
        self._switch(on=False)
        for each in self._plain:
            del each._drivetrain_guard  # noqa: SLF001
        for each, theirs in self._theirs:
            each.all_gather = theirs
        self._plain, self._theirs = [], []

    def _switch(self, *, on: bool) -> None:
        self._on, kind = on, GuardedParameter if on else nn.Parameter
        for each in self._plain:
            each.__class__ = kind
        if not self._lifted:
            for each in self._laid:
                each.__class__ = GuardedParameter

    def keep_strides(self, parameter: nn.Parameter) -> None:
        """Remember a parameter's strides, before ZeRO lays the values that it was given out row by row."""
        if has_other_strides(parameter):
            self.strides[id(parameter)] = parameter.stride()
            self._laid = [each for each in self._plain if id(each) in self.strides]

    @torch.no_grad()
    def take_in(self) -> None:
        """Under stage 3, copy gathered parameters, as small ones are between uses, to this rank's partitions.

        DeepSpeed releases gathered parameters if a forward runs other layers than the one before, and then gathers
        their partitions again: writes of the script would be lost.
        """
        self._touched = False
        parts, values = [], []
        for piece in self._pieces:
            data = piece.parameter.data
            if piece.numel and data.shape == piece.shape:
                self.keep_strides(piece.parameter)
                parts.append(partition_of(piece.parameter)[: piece.numel])
                values.append(data.reshape(-1)[piece.start : piece.start + piece.numel])
        if parts:
            torch._foreach_copy_(parts, values)

    def _gathering(self, parameter: Any, theirs: Callable[..., Any]) -> Callable[..., Any]:
        """DeepSpeed's ``parameter.all_gather``.

        A script's ``GatheredParameters`` begins with it. A forward that reads a parameter of one of its layers begins
        with it too, the first time: DeepSpeed knows of it from then on, and keeps it to the end of that forward. The
        first time the layer's own forward would release it.
        """

        def all_gather(*args: Any, **kwargs: Any) -> Any:
            if self._touched:
                self.take_in()
            gathered = theirs(*args, **kwargs)
            running = parameter_offload.FWD_MODULE_STACK
            if running and any(parameter is each for _, each in running[-1].ds_external_parameters()):
                parameter.ds_active_sub_modules.add(running[-1].ds_id)
            return gathered

        return all_gather

    def check(self, parameter: Any, name: str) -> None:
        """Raise if an operation reads the elements of a partitioned parameter."""
        if name in _ABOUT or name in _WHOLE or name == "grad":
            return
        self._touched = self._stage == 3
        if in_parts(parameter):
            raise UnsupportedError(
                f"`{name}` asks for the elements of {self.named(id(parameter))}, which ZeRO stage 3 shares out over "
                "ranks: this rank holds a part of it",
                cure="For all values use accelerator.get_state_dict(model) or accelerator.save_model(model, folder); "
                "to read or write some, on every rank, `with deepspeed.zero.GatheredParameters(parameters, "
                "modifier_rank=0):`; zero_stage: 2 keeps them whole.",
            )
        if self._touched and parameter.ds_active_sub_modules:
            self._lent.setdefault(id(parameter), (parameter, parameter._version))  # noqa: SLF001

    def _check_lent(self) -> None:
        """Raise where the forward of a layer has written to what was gathered for it."""
        lent, self._lent = self._lent, {}
        for number, (parameter, version) in lent.items():
            if parameter._version != version:  # noqa: SLF001
                raise self.lost(f"a layer of {self.model}", number)

    def lost(self, whose: str, parameter: int) -> UnsupportedError:
        """The refusal of a forward that writes to one of its parameters under stage 3."""
        return UnsupportedError(
            f"the forward of {whose} writes to {self.named(parameter)}, and ZeRO stage 3 drops what a forward "
            "writes to parameters",
            cure="Compute with the changed values without writing them, or write after optimizer.step() inside "
            "deepspeed.zero.GatheredParameters(parameters, modifier_rank=0); zero_stage 0, 1 or 2 keep what every rank "
            "writes alike.",
        )

    def check_gradient(self, func: Any, args: tuple[Any, ...]) -> None:
        """Raise where a script reads or writes ``parameter.grad`` and DeepSpeed has the gradients."""
        wrote, number = func.__name__ == "__set__", id(args[0])
        writes = wrote and args[1] is not None
        if self.pending():
            # The core's zero_grad of the model drops all of them.
            refused = writes or not _zeroes(self._module)
        elif number in self.stepped and not writes:
            caller = _caller_in_module()
            if wrote or caller == "zero_grad":
                self.dropped(number)
            # Module.to() and its like move gradients where there are any.
            refused = not wrote and caller not in ("zero_grad", "_apply")
        else:
            refused = writes
        if refused:
            how = "written, without effect" if wrote else "read, and is None"
            raise UnsupportedError(
                f"`grad` of {self.named(id(args[0]))} was {how}: ZeRO stage {self._stage} takes gradients out "
                "of the parameters while backward runs, and shares them out over ranks",
                cure="Clip with accelerator.clip_grad_norm_ or accelerator.clip_grad_value_, drop gradients with "
                "optimizer.zero_grad(), weight them in the loss or in parameter.register_hook; zero_stage: 0 keeps "
                "them in the parameters.",
            )

    def named(self, parameter: int) -> str:
        """``the parameter head.weight of Net``, by identity."""
        return f"the parameter {self._names[parameter]} of {self.model}"


def in_parts(parameter: Any) -> bool:
    """Whether this rank holds only a part of it now."""
    return getattr(parameter, "ds_status", ZeroParamStatus.AVAILABLE) is not ZeroParamStatus.AVAILABLE


def _strides(values: Iterable[Any]) -> dict[int, tuple[int, ...]]:
    """Return the script's strides of the parameters among these that ZeRO lays out otherwise, by identity."""
    found: dict[int, tuple[int, ...]] = {}
    for each in _parameters(values):
        its = each._drivetrain_guard.strides.get(id(each))  # noqa: SLF001
        if its is not None and not in_parts(each):
            found[id(each)] = its
    return found


def _parameters(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, GuardedParameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from _parameters(value)


def _name(func: Any) -> str:
    """``requires_grad`` for the getter and the setter of this attribute, else the function's own name."""
    name = str(getattr(func, "__name__", ""))
    return str(func.__self__.__name__) if name in ("__get__", "__set__", "__delete__") else name


def _asked_by_engine() -> bool:
    """Whether the first caller outside of torch is DeepSpeed (a layer called directly gathers) or this plugin."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if name != "torch" and not name.startswith("torch."):
            return name.startswith(_ENGINE)
        frame = frame.f_back
    return False


def _caller_in_module() -> str:
    """Return the name of the calling method of ``nn.Module``, or an empty string."""
    frame = sys._getframe(3)  # noqa: SLF001
    return frame.f_code.co_name if frame.f_globals.get("__name__") == nn.Module.__module__ else ""


def _zeroes(module: nn.Module) -> bool:
    """Whether the caller is ``zero_grad`` of this module as a whole."""
    frame = sys._getframe(3)  # noqa: SLF001
    caller = frame.f_locals.get("self") if frame.f_code.co_name == "zero_grad" else None
    return caller is not None and getattr(caller, "module", caller) is module
