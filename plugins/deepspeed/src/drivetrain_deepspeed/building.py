"""Partitions the parameters of a model during its construction, by DeepSpeed's ``zero.Init``.

``zero.Init`` partitions the parameters of each module when its constructor ends. Many models are then initialised once
more from the outside (``init_weights`` of Transformers); on partitioned parameters this would silently do nothing.
Here a parameter is gathered on first access, and partitioned again when others are accessed.

Values are drawn on the CPU, as without ``zero.Init``, which would make the tensors on an accelerator: its generator
draws other numbers from the same seed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from deepspeed import comm
from deepspeed.runtime.zero import DeepSpeedTensorOverride
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from drivetrain_deepspeed import quiet

if TYPE_CHECKING:
    from drivetrain_deepspeed.backend import DeepSpeedBackend

_AT_WORK = 4
"""Number of parameters gathered at a time: a module that is initialised, such as a norm, has fewer."""

_SAME_WHEN_CUT = frozenset(
    {"requires_grad", "dtype", "device", "grad", "grad_fn", "is_leaf", "layout", "requires_grad_"}
)
"""Attributes that are the same for a partitioned parameter."""

_DRAW = frozenset({
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
    *("bernoulli", "multinomial", "normal", "poisson", "rand_like", "randint_like", "randn_like"),
})
"""Functions that take random numbers for, or of the size of, a tensor that they are given."""


@contextmanager
def partitioned_construction(backend: DeepSpeedBackend) -> Iterator[None]:
    """Under stage 3, partition each module's parameters as soon as it is built; under the others do nothing.

    Collective: every rank builds the same modules in the same order. Values are rank 0's, those of a construction
    without this context under the same seed.
    """
    if backend.config.stage < 3:
        yield
        return
    config, _ = backend.config.dictionary()
    with quiet.surroundings(backend.settings.process):
        opened = _WholeAtWork()
        cutting = backend.deepspeed.zero.Init(
            config_dict_or_path=config, tensor_overrides=[DeepSpeedTensorOverride.dtype]
        )
        cutting._post_init_method = opened.without(cutting._post_init_method)  # noqa: SLF001
        with cutting, opened:
            yield
        opened.close(0)


@final
class _WholeAtWork(TorchFunctionMode):
    """Gathers partitioned parameters that an operation accesses, and partitions them again when others are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self._whole: OrderedDict[int, Any] = OrderedDict()
        self._off = False

    def without(self, function: Callable[[Any], None]) -> Callable[[Any], None]:
        """A function of DeepSpeed that cuts parameters, and looks at them afterwards."""

        def call(module: Any) -> None:
            self._off = True
            try:
                function(module)
            finally:
                self._off = False

        return call

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._off or _name(func) in _SAME_WHEN_CUT:
            return func(*args, **kwargs)
        args = tuple(args)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        for tensor in tensors:
            if is_zero_param(tensor):
                self._open(tensor)
        if _name(func) in _DRAW and kwargs.get("generator") is None and any(map(self._is_opened, tensors)):
            return _drawn_on_the_cpu(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_opened(self, tensor: Tensor) -> bool:
        """Whether a tensor is a gathered parameter on an accelerator, or a view of one (its ``data``)."""
        if tensor.device.type == "cpu":
            return False
        address = tensor.untyped_storage().data_ptr()
        return any(whole.data.untyped_storage().data_ptr() == address for whole in self._whole.values())

    def _open(self, parameter: Any) -> None:
        if parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:
            self.close(_AT_WORK - 1)
            parameter.all_gather()
            self._whole[parameter.ds_id] = parameter

    def close(self, left: int) -> None:
        """Partition again, oldest first, until ``left`` are gathered; every rank gets rank 0's values. Collective."""
        while len(self._whole) > left:
            _, parameter = self._whole.popitem(last=False)
            comm.broadcast(parameter.data, 0, parameter.ds_process_group)
            parameter.partition(has_been_updated=True)


def _drawn_on_the_cpu(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a random function with the CPU's generator."""
    on_cpu = tree_map_only(Tensor, lambda each: each.detach().cpu(), (args, dict(kwargs)))
    found = func(*on_cpu[0], **on_cpu[1])
    if not _name(func).endswith("_"):
        return found.to(args[0].device)
    with torch.no_grad():
        args[0].copy_(found)
    return args[0]


def _name(func: Any) -> str:
    """``requires_grad`` for the getter and the setter of this attribute, else the function's own name."""
    name = str(getattr(func, "__name__", ""))
    return str(func.__self__.__name__) if name in ("__get__", "__set__") else name
