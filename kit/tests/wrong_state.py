"""Backends that save, report or exchange something wrong."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from toy_backend import CAPABILITIES, ToyTrainable
from wrong_base import Mistake

from drivetrain.api import PortableState, TensorSpec, Topology
from drivetrain.distributed.watchdog import unwatched

# ---- state ----------------------------------------------------------------------------------------------------------


class ForgetsMoments(Mistake):
    """Loads the parameters but not the optimizer's state."""

    caught_by = ("state.resumed_equals_uninterrupted", "state.load_undoes")

    class trainable(ToyTrainable):  # noqa: N801
        def load_portable_state(self, state: PortableState) -> None:
            before = [dict(optimizer.state) for optimizer in self.optimizers]
            kept = [{parameter: dict(slots) for parameter, slots in each.items()} for each in before]
            super().load_portable_state(state)
            for optimizer, states in zip(self.optimizers, kept, strict=True):
                optimizer.state.clear()
                optimizer.state.update(states)


class ForgetsBuffers(Mistake):
    """Neither saves nor restores buffers."""

    caught_by = ("state.load_undoes",)

    class trainable(ToyTrainable):  # noqa: N801
        def portable_state(self) -> PortableState:
            return self.without_buffers(super().portable_state())

        def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
            return self.without_buffers(super().portable_template(saved))

        def without_buffers(self, state: PortableState) -> PortableState:
            for name, _ in self.module.named_buffers():
                state.tensors.pop(f"model.{name}", None)
            return state

        def load_portable_state(self, state: PortableState) -> None:
            for name, tensor in self.module.named_buffers():
                state.tensors[f"model.{name}"] = tensor
            super().load_portable_state(state)


class KeepsItsBuffers(Mistake):
    """Saves buffers, and goes on with those that it has when it loads."""

    caught_by = ("state.load_undoes",)

    class trainable(ToyTrainable):  # noqa: N801
        def load_portable_state(self, state: PortableState) -> None:
            before = self.kept
            super().load_portable_state(state)
            for tensor, kept in zip(self.module.buffers(), before, strict=True):
                tensor.copy_(kept)

        def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
            self.kept = [tensor.clone() for tensor in self.module.buffers()]
            return super().portable_template(saved)


class SavesPart(Mistake):
    """Leaves the last parameter out of what it saves."""

    caught_by = ("state.load_undoes", "state.resumed_equals_uninterrupted")

    class trainable(ToyTrainable):  # noqa: N801
        def portable_state(self) -> PortableState:
            state = super().portable_state()
            state.tensors.pop([name for name in state.tensors if name.startswith("model.")][-1])
            return state


class ForgetsLossScale(Mistake):
    """Does not save the loss scaler's state."""

    caught_by = ("state.loss_scale_travels",)

    class trainable(ToyTrainable):  # noqa: N801
        def portable_state(self) -> PortableState:
            return replace(super().portable_state(), extra={})


class PrefixesNames(Mistake):
    """Lets its wrapper's name into the state dict."""

    caught_by = ("honesty.parameter_names_are_the_users", "gradients.dense")

    class trainable(ToyTrainable):  # noqa: N801
        def full_state_dict(self) -> Any:
            for name, tensor in super().full_state_dict():
                yield f"module.{name}", tensor


class ClaimsShards(Mistake):
    """Declares ``sharded_save`` although every rank holds everything."""

    capabilities = replace(CAPABILITIES, sharded_save=True)
    caught_by = ("honesty.every_rank_saves_its_part",)


class GivesParts(Mistake):
    """Shards its parameters, it says, and lets ``state_dict()`` give what this rank holds of them."""

    capabilities = replace(CAPABILITIES, replicated=False)
    caught_by = ("scripts.state_dicts",)

    class trainable(ToyTrainable):  # noqa: N801
        whole = False

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)

            def cut(_module: Any, found: dict[str, Any], _prefix: str, _: Any) -> None:
                topology = self.backend.topology
                for name, one in found.items():
                    if not self.whole:
                        found[name] = one.tensor_split(topology.dp_size)[topology.dp_rank]

            self.module.register_state_dict_post_hook(cut)

        def full_state_dict(self) -> Iterator[tuple[str, Tensor]]:
            self.whole = True
            yield from super().full_state_dict()
            self.whole = False

        def before_state_dict(self, *, replicated: bool) -> None:
            pass


class CopiesTied(Mistake):
    """Gives a copy of each tensor, so that tied parameters are two in the file."""

    caught_by = ("scripts.state_dicts",)

    class trainable(ToyTrainable):  # noqa: N801
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)

            def copied(_module: Any, found: dict[str, Any], _prefix: str, _: Any) -> None:
                found |= {name: one.clone() for name, one in found.items()}

            self.module.register_state_dict_post_hook(copied)


class LendsCopies(Mistake):
    """Gives copies where the tensors are asked for that it trains."""

    caught_by = ("scripts.averages",)

    class trainable(ToyTrainable):  # noqa: N801
        def live_tensors(self) -> dict[str, Any]:
            return {name: one.clone() for name, one in super().live_tensors().items()}


class AllowsCopiesOfParts(Mistake):
    """Zeroes what is another rank's, as an engine does that keeps parts, and lets the script copy the model."""

    caught_by = ("scripts.copies",)

    class trainable(ToyTrainable):  # noqa: N801
        def before_copy(self) -> None:
            if self.backend.topology.rank:
                self.flat.values.zero_()


class ForwardsToAnother(Mistake):
    """Runs a copy of the model, made in ``prepare``, that shares its parameters and not its attributes."""

    caught_by = ("scripts.attributes_that_forward_reads",)

    class trainable(ToyTrainable):  # noqa: N801
        def __init__(self, backend: Any, model: Any, optimizers: Any) -> None:
            super().__init__(backend, model, optimizers)
            shared = {id(one): one for one in (*model.parameters(), *model.buffers())}
            self.model = copy.deepcopy(model, shared)


class StepsACopy(Mistake):
    """Steps an optimizer of its own making, not the script's."""

    caught_by = ("honesty.optimizer_is_the_users",)

    class trainable(ToyTrainable):  # noqa: N801
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.optimizers = copy.deepcopy(self.optimizers)
            for own, user in zip(self.optimizers, args[-1], strict=True):
                for mine, group in zip(own.param_groups, user.param_groups, strict=True):
                    mine["params"] = group["params"]


# ---- collectives and manners ----------------------------------------------------------------------------------------


class NoBarrier(Mistake):
    """``barrier`` waits for nobody: files are read before they are written."""

    caught_by = ("collectives.main_process_goes_first",)

    def barrier(self) -> None:
        pass


class GathersBackwards(Mistake):
    """Concatenates the ranks in the wrong order."""

    caught_by = ("collectives.gather_nested", "evaluation.each_sample_once_in_order")

    def gather(self, tensor: Tensor) -> Tensor:
        parts = super().gather(tensor).chunk(self.topology.dp_size)
        return torch.cat(parts[::-1])


class GathersItself(Mistake):
    """Gives each rank its own rows in the place of every rank's."""

    caught_by = ("scheduling.metric_of_each_rank",)

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * self.topology.dp_size)


class KnowsItselfOnly(Mistake):
    """Gives each rank its own object in the place of every rank's."""

    caught_by = ("apart.parts_of_the_data", "apart.settings_of_loaders")

    def gather_object(self, obj: Any) -> list[Any]:
        return [obj] * self.topology.dp_size


class LetsRanksPart(Mistake):
    """Enters the context of uneven ranks for a model, and never leaves it."""

    caught_by = ("apart.skipped_batches",)

    def prepare(self, model: Any, optimizers: Any = (), *, training: bool = True) -> Any:
        self.apart = unwatched()
        self.apart.__enter__()
        return super().prepare(model, optimizers, training=training)


class SettingsByTheRank(Mistake):
    """Sets what an optimizer has by the number of the rank; without momentum nothing comes of it yet."""

    caught_by = ("apart.right_training_agrees",)

    def prepare(self, model: Any, optimizers: Any = (), *, training: bool = True) -> Any:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["dampening"] = 0.1 * self.topology.rank
        return super().prepare(model, optimizers, training=training)


class MeansForSums(Mistake):
    """``reduce`` averages whatever it is asked for."""

    caught_by = ("collectives.reductions", "gradients.ragged_labels")

    def reduce(self, tensor: Tensor, op: Any = "sum") -> Tensor:
        return super().reduce(tensor, "mean" if op == "sum" else op)


class LeavesVariables(Mistake):
    """Sets an environment variable and leaves it."""

    caught_by = ("gradients.dense", "gradients.start_stop_start")

    def start(self) -> Topology:
        os.environ["WRONG_BACKEND_WAS_HERE"] = "1"
        return super().start()


class LeavesDtype(Mistake):
    """Changes the process's default dtype."""

    caught_by = ("gradients.dense", "clipping.leaves_small_gradients")

    def stop(self) -> None:
        super().stop()
        torch.set_default_dtype(torch.float64)


class LeavesProcessGroup(Mistake):
    """Forms a process group and never destroys it."""

    caught_by = ("gradients.dense",)

    def stop(self) -> None:
        pass


class ServesOneModel(Mistake):
    """Declares several models but reduces the first one's gradients only."""

    caught_by = ("gradients.several_models", "gradients.one_loss_through_two_models")

    class trainable(ToyTrainable):  # noqa: N801
        def average(self) -> None:
            if self is self.backend.trainables[0]:
                super().average()
