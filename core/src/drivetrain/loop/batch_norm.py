"""Batch normalization with statistics over all data-parallel ranks, and a warning where they are per rank."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from drivetrain.distributed import collectives
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.topology import axes_that_split

if TYPE_CHECKING:
    from collections.abc import Iterable

    from drivetrain.backend import Backend
    from drivetrain.topology import Topology

logger = logging.getLogger(__name__)

_SWITCH = "`sync_batch_norm: true` in the configuration, or Accelerator(sync_batch_norm=True),"


def convert_or_warn(model: nn.Module, backend: Backend, *, training: bool) -> None:
    """Convert a model's batch norms if ``sync_batch_norm``; else warn once of per-rank statistics. Not collective.

    Called before the backend prepares the model.

    Raises:
        UnsupportedError: the backend, or a layer, cannot be converted.
        UsageError: the script has made layers of ``torch.nn.SyncBatchNorm``, which do not run on this device.
    """
    if not training:
        return
    if backend.settings.sync_batch_norm:
        backend.synchronise_batch_norm(model)
        return
    topology = backend.topology
    layers = _batch_norms(model)
    if topology.dp_size == 1 or not layers:
        return
    by_torch = [name for name, layer in layers.items() if isinstance(layer, nn.SyncBatchNorm)]
    if by_torch and not _torch_synchronises(torch.device(topology.device)):
        raise UsageError(
            f"torch.nn.SyncBatchNorm ({_listed(by_torch)} of {type(model).__name__}) does not run on {topology.device}",
            cure=f"Leave out convert_sync_batchnorm; {_SWITCH} does it on every device.",
        )
    local = [name for name, layer in layers.items() if not isinstance(layer, (nn.SyncBatchNorm, Synchronised))]
    trained = any(parameter.requires_grad for parameter in model.parameters())
    if local and trained and topology.rank == 0:
        logger.warning(
            "%s has %d batch norm layer(s) (%s), which in training normalise by the statistics of each process's own "
            "batch. With %d data-parallel processes the results are not those of one process with the global batch. "
            "%s takes the statistics over all of them.",
            type(model).__name__,
            len(local),
            _listed(local),
            topology.dp_size,
            _SWITCH,
        )


def convert(model: nn.Module, topology: Topology) -> None:
    """Make a model's batch norms compute their statistics over all data-parallel ranks. Not collective.

    Each layer stays the same object with the same parameters, buffers, hooks and names, and an instance of its class;
    only its class is replaced, by a subclass. Layers that normalise otherwise (``LayerNorm``, ``GroupNorm``,
    ``InstanceNorm``) are unchanged. With one data-parallel rank nothing is done.

    Raises:
        UnsupportedError: the model is split along a mesh axis on which ranks process parts of a batch one after
        another, or a layer overrides its computation; nothing was converted then.
    """
    layers = {name: layer for name, layer in _batch_norms(model).items() if not isinstance(layer, Synchronised)}
    if not layers:
        return
    cut = [axis for axis in axes_that_split("layers", "sequence") if topology.mesh.sizes[axis] > 1]
    if cut:
        raise UnsupportedError(
            f"sync_batch_norm takes statistics over whole batches, and with the mesh axis {cut[0]} "
            f"{type(model).__name__} sees them in parts",
            cure="Use data or tensor parallelism, or a normalisation without batch statistics such as GroupNorm.",
        )
    if topology.dp_size == 1:
        return
    lazy = [name for name, layer in layers.items() if isinstance(layer, LazyModuleMixin)]
    if lazy:
        raise UnsupportedError(
            f"sync_batch_norm cannot convert the lazy layer(s) {_listed(lazy)} of {type(model).__name__}, whose "
            "number of features is known after their first forward only",
            cure="Call the model once on a batch under torch.no_grad() before prepare, or use layers that are not "
            "lazy.",
        )
    own = [f"{name} ({type(layer).__name__})" for name, layer in layers.items() if not _is_plain(layer)]
    if own:
        raise UnsupportedError(
            f"sync_batch_norm cannot convert layers with a forward of their own: {_listed(own)} of "
            f"{type(model).__name__}",
            cure="Use torch.nn.BatchNorm1d, 2d or 3d in their place, or leave sync_batch_norm out.",
        )
    for layer in layers.values():
        kind = type(layer)
        layer.__class__ = _synchronised(_AnyDims if kind is nn.SyncBatchNorm else kind)
        layer._topology = topology  # type: ignore[assignment]  # noqa: SLF001 (set on the layer, not read from it)


def synchronised_layers(model: nn.Module) -> list[nn.Module]:
    """Return the batch norms whose forwards are collective over the data-parallel ranks in training mode."""
    return [layer for layer in _batch_norms(model).values() if isinstance(layer, Synchronised)]


def refuse_uneven(modules: Iterable[nn.Module]) -> None:
    """Raise :class:`UnsupportedError` where ranks that ran out of batches would be missing in a collective forward."""
    for module in modules:
        if synchronised_layers(module):
            raise UnsupportedError(
                f"with sync_batch_norm every rank takes part in each training forward of {type(module).__name__}, so "
                "that none can run out of batches before the others",
                cure="Keep even_batches=True, or leave sync_batch_norm out.",
            )


class Synchronised(_BatchNorm):
    """Mixin of converted layers, with statistics over all data-parallel ranks.

    In training mode a forward is collective over the data-parallel ranks, and so is its backward. Batches of ranks may
    differ in size: what counts is each element. Outside of training mode nothing is communicated.

    The process group is looked up at each call, so that a layer can be copied and pickled.
    """

    _topology: Topology
    _kind: type[_BatchNorm]

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Group of the data-parallel ranks; ``None`` for the default one. Read by torch's forward."""
        return collectives.dp_group(self._topology)

    # Names under which torch's forward looks up its check.
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels  # noqa: SLF001

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Normalise. Collective over the data-parallel ranks in training mode."""
        if not self.training or input.is_meta or not dist.is_initialized():
            return super().forward(input)
        if _torch_synchronises(input.device):
            output: Tensor = nn.SyncBatchNorm.forward(self, input)  # type: ignore[arg-type]
            return output
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        factor = 0.0 if self.momentum is None else self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        return self._normalised(input, factor)

    def _normalised(self, given: Tensor, factor: float) -> Tensor:
        """Mean first, then squared differences from it: the difference of two large sums would lose digits."""
        dims = [dim for dim in range(given.dim()) if dim != 1]
        shape = [1, -1, *[1] * (given.dim() - 2)]
        wide = given.to(torch.promote_types(given.dtype, torch.float32))
        count = wide.new_tensor([given.numel() / given.shape[1]])
        group = self.process_group
        sums = _sum(torch.cat([wide.sum(dims), count]), group)
        total = sums[-1].detach()
        if total.item() <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {list(given.shape)} on each rank"
            )
        mean = sums[:-1] / total
        centred = wide - mean.view(shape)
        variance = _sum(centred.square().sum(dims), group) / total
        scale = (variance + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        output = centred * scale.view(shape)
        if self.bias is not None:
            output = output + self.bias.view(shape)
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach() * (total / (total - 1)), factor)
        return output.to(given.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, factor: float) -> None:
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None:
                running.lerp_(value.to(running.dtype), factor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the base class, since this class is made at run time."""
        return _blank, (self._kind,), self.__dict__.copy()


class _AnyDims(_BatchNorm):
    """Replaces ``torch.nn.SyncBatchNorm``, which DistributedDataParallel refuses on the CPU."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class _Sum(torch.autograd.Function):
    """Differentiable all-reduce (sum); its gradient is an all-reduce too, to any order."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        value = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


def _sum(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    result: Tensor = _Sum.apply(value, group)  # type: ignore[no-untyped-call]
    return result


_made: dict[type[_BatchNorm], type[_BatchNorm]] = {}


def _synchronised(kind: type[_BatchNorm]) -> type[_BatchNorm]:
    """The converted class of a layer's class, made once for each."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__, "_kind": kind}
    if kind not in _made:
        _made[kind] = type(kind.__name__, (Synchronised, kind), names)
    return _made[kind]


def _blank(kind: type[_BatchNorm]) -> _BatchNorm:
    """A layer without any state, for copies."""
    made = _synchronised(kind)
    return made.__new__(made)


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer computes what torch's batch norm does."""
    return type(layer) is nn.SyncBatchNorm or type(layer).forward is _BatchNorm.forward


def _batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name or "the model": one for name, one in model.named_modules() if isinstance(one, _BatchNorm)}


def _torch_synchronises(device: torch.device) -> bool:
    """Whether torch's own layer, which is much faster, runs on this kind of device."""
    return device.type in {"cuda", "hpu", "xpu", torch._C._get_privateuse1_backend_name()}  # noqa: SLF001


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
