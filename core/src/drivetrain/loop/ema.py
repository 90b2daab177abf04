"""Exponential moving average of a model's weights; each rank averages the shards that it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch import Tensor

from drivetrain.backend import PortableState, TensorSpec
from drivetrain.backends.portable import buffer_keys, tied_names
from drivetrain.distributed import collectives
from drivetrain.distributed.collectives import Ranks
from drivetrain.distributed.dtensors import is_dtensor
from drivetrain.errors import CheckpointMismatchError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from drivetrain.accelerator import Accelerator
    from drivetrain.backend import Trainable

AVERAGE = "average"
"""Key of a checkpoint entry's further state that marks an average."""


@final
class EMA:
    """Averages the weights of a prepared model: ``average = decay * average + (1 - decay) * weights``.

    The numbers are those of ``torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))`` in
    one process. Nothing is gathered: where parameters are in parts, so is the average; where an engine trains copies in
    higher precision, those are averaged. It is saved and loaded with the run, across backends and numbers of processes
    as the model is. ::

        ema = EMA(accelerator, model, decay=0.999)
        for batch in loader:
            ...
            optimizer.step()
            ema.update()
        with ema.averaged():
            evaluate(model)

    Args:
        accelerator: prepared the model.
        model: a prepared model.
        decay: weight of the average so far, from 0 to 1.
        use_buffers: average persistent buffers too; ``False`` keeps a copy of those at the last update.

    Raises:
        UsageError: the model was not prepared by this accelerator, or the decay is not from 0 to 1.
    """

    optimizers: tuple[()] = ()

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, decay: float = 0.999, *, use_buffers: bool = False
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise UsageError(f"EMA was given decay={decay}", cure="Pass a number from 0 to 1, such as 0.999.")
        self.decay, self.use_buffers = float(decay), use_buffers
        self.num_updates = 0
        """Updates so far; the first one takes the weights as they are."""
        self._accelerator = accelerator
        self._trainable: Trainable = accelerator._preparer.find(model).trainable  # noqa: SLF001 (of the same core)
        self._values: dict[str, Tensor] = {}
        self._in_model = False
        self._buffers: set[str] = set()
        self._direct: set[str] = set()
        """Names of tensors that a checkpoint stores in the layout of training."""
        self._tensors: dict[str, Any] = {}
        accelerator.register_for_checkpointing(self)

    @torch.no_grad()
    def update(self) -> None:
        """Update the average, where an accumulation window ends. Not collective.

        To be called after each ``optimizer.step()``; in the micro-batches between, where that waits, so does this.

        Raises:
            UsageError: inside :meth:`averaged`.
        """
        if not self._accelerator.sync_gradients:
            return
        self._refuse_inside("update()")
        live = self._live()
        if self.num_updates == 0:
            self._values = {name: value.clone() for name, value in live.items()}
        else:
            averaged = [name for name in live if self.use_buffers or name not in self._buffers]
            floating = [name for name in averaged if live[name].is_floating_point() or live[name].is_complex()]
            if floating:
                torch._foreach_lerp_(
                    [self._values[name] for name in floating], [live[name] for name in floating], 1 - self.decay
                )
            for name in set(averaged).difference(floating):
                self._values[name].copy_(self._values[name] * self.decay + live[name] * (1 - self.decay))
            for name in self._buffers.difference(averaged):
                self._values[name].copy_(live[name])
        self.num_updates += 1

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the model has the averaged weights, to evaluate or to save it (``accelerator.save_model``).

        Collective over all ranks. Restores the trained weights exactly.

        Raises:
            UsageError: nothing was averaged yet; a second time inside; an optimizer of this model steps inside.
        """
        self._refuse_inside("averaged()")
        if self.num_updates == 0:
            raise UsageError(
                "nothing has been averaged yet", cure="Call ema.update() after optimizer.step(), or load_state() first."
            )

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise UsageError(
                "an optimizer steps inside `with ema.averaged():`, where the model has averaged weights",
                cure="Train outside of the block.",
            )

        self._agree_on_buffers()
        self._exchange()
        self._in_model = True
        # On the object: a prepared optimizer's step calls its trainable.
        self._trainable.optimizer_step = refuse  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._trainable.optimizer_step
            self._in_model = False
            self._exchange()

    # ---- checkpoint -------------------------------------------------------------------------------------------------

    @property
    def fits(self) -> bool:
        """Whether there is an average of each tensor of the model, which the script may have changed since."""
        return not self._values or self._values.keys() >= self._trainable.live_tensors().keys()

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self._trainable.module

    def portable_state(self) -> PortableState:
        """The average under the model's names. Collective where the engine's own is."""
        self._refuse_inside("save_state")
        extra = {
            AVERAGE: {"decay": self.decay, "updates": self.num_updates},
            "tied": tied_names(self._trainable.module),
        }
        if self.num_updates == 0:
            return PortableState(extra=extra)
        self._agree_on_buffers()
        state = self._model_part()
        self._live()
        tensors = {name: _laid_out(self._values[name], state[name]) for name in self._direct.intersection(state)}
        rearranged = [name for name in state if name not in self._direct]
        if self._on_any_rank(bool(rearranged)):
            # The engine converts the tensors that are in the model.
            self._exchange()
            state = self._model_part()
            tensors |= {name: _laid_out(_local(state[name]).clone(), state[name]) for name in rearranged}
            self._exchange()
        return PortableState(tensors, extra=extra)

    def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
        """New tensors, laid out as the model's are in a checkpoint. Collective where the engine's own state is."""
        self._refuse_inside("load_state")
        if not saved:
            return PortableState()
        # Not the engine's template, which it may keep for the model's own load.
        state = self._model_part()
        layouts = {name: state[name] if name not in self._direct else one for name, one in self._tensors.items()}
        return PortableState(
            {name: _laid_out(torch.empty_like(_local(one)), one) for name, one in layouts.items()},
            extra={"tied": tied_names(self._trainable.module)},
        )

    @torch.no_grad()
    def load_portable_state(self, state: PortableState) -> None:
        """Load a filled template. Collective over all ranks."""
        found = state.extra.get(AVERAGE)
        if found is None:
            raise CheckpointMismatchError(
                "the checkpoint holds a model where this run has an average",
                cure="Prepare as many models as the run that saved, and make EMA(...) after them.",
            )
        self.num_updates = int(found["updates"])
        self._values = {}
        if not self.num_updates:
            return
        live = self._live()
        trained = {name: value.clone() for name, value in live.items()}
        rearranged = {name: one for name, one in state.tensors.items() if name not in self._direct}
        in_model = self._on_any_rank(bool(rearranged))
        if in_model:
            self._trainable.load_portable_state(PortableState(rearranged))
        self._values = {
            name: _local(state.tensors[name]) if name in self._direct and name in state.tensors else value.clone()
            for name, value in self._live().items()
        }
        if in_model:
            for name, value in self._live().items():
                value.copy_(trained[name])
            self._trainable.load_portable_state(PortableState())

    def _model_part(self) -> dict[str, Any]:
        """The model's tensors as in a checkpoint; determines which of them have the same layout as in training."""
        state = self._trainable.portable_state().tensors
        self._tensors = self._trainable.live_tensors()
        self._direct = {
            name
            for name, one in self._tensors.items()
            if name not in state or _same_memory(_local(state[name]), _local(one))
        }
        return {name: one for name, one in state.items() if name.startswith("model.")}

    # ---- local shards -----------------------------------------------------------------------------------------------

    def _live(self) -> dict[str, Tensor]:
        """The tensors trained on this rank, by the model's names; matches the average to their names and shapes."""
        tensors = self._trainable.live_tensors()
        live = {name: _local(tensor) for name, tensor in tensors.items()}
        self._buffers = buffer_keys(self._trainable.module).intersection(live)
        if self._values:
            self._follow(tensors, live)
        return live

    def _follow(self, tensors: Mapping[str, Any], live: Mapping[str, Tensor]) -> None:
        """Follow a pipeline, which is split at its first forward: keep this stage's part of the average."""
        lacking = [name for name in live if name not in self._values]
        if lacking:
            raise UnsupportedError(
                f"the model has parameters or buffers that the average does not know: {', '.join(lacking[:4])}",
                cure="Make EMA(...) again after changing a model.",
            )
        for name in [name for name in self._values if name not in live]:
            del self._values[name]
        for name, value in live.items():
            kept, tensor = self._values[name], tensors[name]
            if kept.shape == value.shape:
                continue
            if not is_dtensor(tensor) or kept.shape != tensor.shape:
                raise UnsupportedError(
                    f"{name.removeprefix('model.')} is laid out otherwise than when it was averaged",
                    cure="Make EMA(...) again after changing a model.",
                )
            from torch.distributed.tensor import distribute_tensor

            cut = distribute_tensor(kept, tensor.device_mesh, tensor.placements, src_data_rank=None)
            self._values[name] = cut.to_local().clone()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the values of the average and the model. Collective."""
        live = self._live()
        for name, value in live.items():
            before = value.clone()
            value.copy_(self._values[name])
            self._values[name].copy_(before)
        # Loading an empty state makes the engine update what it derives from its weights.
        self._trainable.load_portable_state(PortableState())

    def _agree_on_buffers(self) -> None:
        """Synchronise buffers for engines that otherwise do so at the first evaluation."""
        backend = self._accelerator.backend
        if not backend.capabilities.replicated:
            live = self._live()
            names = [name for name in live if name in self._buffers]
            pairs = [value for name in names for value in (live[name], self._values[name])]
            collectives.broadcast_in_place(pairs, backend.topology)

    def _on_any_rank(self, value: bool) -> bool:
        """Whether this is true on any rank. Collective over all ranks where they hold different parts."""
        backend = self._accelerator.backend
        return value if backend.capabilities.replicated else any(Ranks(backend).gather(value))

    def _refuse_inside(self, call: str) -> None:
        if self._in_model:
            raise UsageError(
                f"{call} inside `with ema.averaged():`, where the model has averaged weights",
                cure="Call it outside of the block.",
            )


def _local(tensor: Any) -> Tensor:
    """This rank's elements, sharing memory."""
    tensor = tensor.detach()
    if is_dtensor(tensor):
        local: Tensor = tensor.to_local()
    elif hasattr(tensor, "__create_chunk_list__"):  # Sharded in an engine's own way, around one tensor of elements.
        ((inner,), _) = tensor.__tensor_flatten__()
        local = getattr(tensor, inner)
    else:
        local = tensor
    return local


def _laid_out(local: Tensor, like: Any) -> Any:
    """Wrap this rank's elements as a shard laid out like another tensor."""
    if is_dtensor(like):
        return type(like).from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    if hasattr(like, "__create_chunk_list__"):
        ((inner,), context) = like.__tensor_flatten__()
        return type(like).__tensor_unflatten__({inner: local}, context, like.shape, like.stride())
    return local


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
