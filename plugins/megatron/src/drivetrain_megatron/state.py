"""Maps a model on a mesh to the portable checkpoint: each rank saves its shards under the original names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.api import PortableState, TensorSpec, TorchEngine, UsageError, plain_state_dict, portable
from drivetrain_megatron.pipeline.parting import Share
from drivetrain_megatron.pipeline.skeleton import is_absent
from drivetrain_megatron.tensor.packing import packing_of
from drivetrain_sharding import joined_extra


def portable_state(module: nn.Module, optimizers: Sequence[Optimizer], engine: TorchEngine) -> PortableState:
    """Return the state of this rank, no copy."""
    state = packing_of(module).unpack(portable.portable_state(module, optimizers))
    state.extra |= engine.state()
    return state


def portable_template(
    module: nn.Module, optimizers: Sequence[Optimizer], saved: Mapping[str, TensorSpec]
) -> PortableState:
    """Laid out as the module is now, whatever the layout was that saved."""
    return packing_of(module).unpacked_template(portable.portable_template(module, optimizers, saved), saved)


def load_portable_state(
    module: nn.Module, optimizers: Sequence[Optimizer], engine: TorchEngine, state: PortableState
) -> None:
    """Take over a filled template."""
    packing_of(module).pack(state, dict(module.named_parameters()))
    portable.load_portable_state(module, optimizers, state)
    engine.load_state(state.extra)


def is_extra(name: str) -> bool:
    """Whether a name of a state dict is torch's for what ``get_extra_state`` returns, which need not be a tensor."""
    return name.rpartition(".")[2] == "_extra_state"


def full_tensors(module: nn.Module, entries: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by their first names, each in full, one at a time. Collective over all ranks."""
    packing = packing_of(module)
    for name, tensor in entries.items():
        yield name, tensor if is_extra(name) else packing.whole(f"model.{name}", tensor.detach())


def held(state: PortableState, share: Share | None) -> PortableState:
    """Without the tensors of other stages. ``None``: the model is not cut yet, and all is here."""
    if share is not None:
        state.tensors = {key: value for key, value in state.tensors.items() if share.holds(_name(key))}
    return state


def of_stage(state: PortableState, share: Share | None, group: dist.ProcessGroup) -> PortableState:
    """Return the state that this rank saves, with the extra state of all stages. Collective over the pipeline."""
    if share is None:
        return state
    state.tensors = {key: value for key, value in state.tensors.items() if share.mine(_name(key))}
    state.extra = joined_extra(state.extra, group)
    return state


def _name(key: str) -> str:
    """The parameter's or buffer's name in ``model.<fqn>`` and ``optim.<fqn>.<slot>``."""
    kind, _, rest = key.partition(".")
    return rest if kind == "model" else rest.rpartition(".")[0]


def tensors_of_stages(
    module: nn.Module, entries: Mapping[str, Tensor], share: Share, group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the state dict in full, one at a time, from the stage that holds it. Collective over all ranks."""
    first = {id(one): name for name, one in (*module.named_parameters(), *module.named_buffers())}
    packing = packing_of(module)
    for key, tensor in entries.items():
        name = first.get(id(tensor), key)
        if is_extra(key):
            yield key, _extra_state(key, tensor, share, group)
            continue
        source = share.owners[name][0] if name in share.owners else share.buffer_owners[name]
        if source == share.rank:
            full = packing.whole(f"model.{name}", tensor.detach()).to(device).contiguous()
        else:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        dist.broadcast(full, group=group, group_src=source)
        yield key, full


def _extra_state(key: str, value: Any, share: Share, group: dist.ProcessGroup) -> Any:
    """Return what ``get_extra_state`` gives on the stage that holds the module's first parameter. Collective."""
    path = key.removesuffix("_extra_state")
    source = next((ranks[0] for name, ranks in share.owners.items() if name.startswith(path)), 0)
    found = [value]
    dist.broadcast_object_list(found, group=group, group_src=source)
    return found[0]


@final
class WholeOnly:
    """Keeps a script from taking one stage's part of a model for all of it.

    Args:
        module: the user's module, of which this rank holds some stages.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._ours = module, False

        def check(module: nn.Module, found: Mapping[str, Any], prefix: str, _: Any) -> None:
            self._check(module, found, prefix)

        # A function, since torch puts a mark on it that a bound method does not take.
        self._handle = module.register_state_dict_post_hook(check)  # type: ignore[no-untyped-call]

    def entries(self) -> dict[str, Tensor]:
        """The module's state dict, with tensors without values for other stages."""
        self._ours = True
        try:
            return plain_state_dict(self._module, keep_vars=True)
        finally:
            self._ours = False

    def _check(self, module: nn.Module, found: Mapping[str, Any], prefix: str) -> None:
        missing = sum(is_absent(one) for one in found.values())
        if missing and not self._ours and not prefix:
            raise UsageError(
                f"this process holds some pipeline stages of {type(module).__name__}; {missing} tensor(s) of its "
                "state_dict() are on others",
                cure="Write accelerator.get_state_dict(model), or accelerator.save_model(model, folder), on all ranks.",
            )

    def remove(self) -> None:
        """Take the check off again."""
        self._handle.remove()
