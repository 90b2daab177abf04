"""Averages gradients over ranks with DistributedDataParallel, whether or not its own forward computed the loss.

DistributedDataParallel expects the loss to come from its own forward. Here it wraps the *loss*: a module that
holds the model's parameters and returns the loss that it is given. Its reducer is thereby made ready right before each
backward that closes an accumulation window, and reduces buckets while that backward runs. Methods of the model,
submodules called alone and any number of forwards therefore all work.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.nn.parallel.distributed import DistributedDataParallel

from drivetrain.api import LocalGradients, Topology, UnsupportedError, UsageError, collectives
from drivetrain_ddp.script_hooks import ScriptHooks

logger = logging.getLogger(__name__)


class _Parameters(nn.Module):
    """A model's parameters, for DistributedDataParallel; its forward returns the loss unchanged.

    Args:
        model: the user's module.
        flags: an extra parameter, whose averaged gradient tells which parameters the ranks reached. It comes first,
        since DistributedDataParallel fills its buckets from the end and the flags are known last. ``None`` for none.
    """

    def __init__(self, model: nn.Module, flags: nn.Parameter | None) -> None:
        super().__init__()
        self.flags = flags
        self.model = model

    def forward(self, loss: Tensor) -> Tensor:
        return loss


@final
class GradientReducer:
    """Reduces the gradients of one model over the data-parallel ranks.

    Args:
        model: the user's module, the same on all ranks except for its values.
        topology: the job.
        wrap: makes the DistributedDataParallel of a module, given whether its graph is static, and whether to compare
            parameters over ranks and give them rank 0's values. Collective over all ranks.
        static_graph: the script asserts that every backward reaches the same parameters.
        exact: gradients are averaged exactly. Where a communication hook may round them, the flags take a separate
        all-reduce.
    """

    def __init__(
        self,
        model: nn.Module,
        topology: Topology,
        wrap: Callable[[nn.Module, bool, bool], DistributedDataParallel],
        *,
        static_graph: bool,
        exact: bool,
    ) -> None:
        self._model, self._topology, self._wrap = model, topology, wrap
        self._static, self._exact = static_graph, exact
        self.wrapper: DistributedDataParallel | None = None
        self.enabled = True
        """Whether the next backward reduces."""
        self.joined = False
        """Inside ``join``: ranks without batches take part in the reducer's collectives only."""
        self._armed = False
        self.local = LocalGradients(model, lambda: self.enabled)
        """Gradients that hold contributions of this rank only."""
        self.hooks = ScriptHooks(self.local, self._name)
        """Hooks of the script on parameters."""
        self._hooks_changed = False
        """Hooks have changed gradients, and ranks have not compared the results."""
        self._hooks_stepped = False
        """An optimizer has stepped since."""
        self._num_hooks = self._hooks_compared = 0
        """Number of hooks in the last backward that reduced, and at the last comparison."""
        self._reductions = 0
        """Reductions that are over."""
        self._starts = True
        self._lazy = False
        self.changed = True
        """The script has changed submodules, parameters or dtypes; looked at before the next forward or backward."""
        self._sparse: frozenset[Tensor] = frozenset()
        self._all: list[nn.Parameter] = []
        self._required: list[bool] = []
        """Holds whether each parameter required gradients when the buckets were made."""
        self._trained: list[nn.Parameter] = []
        self._dtypes: list[torch.dtype] = []
        self._matrices: list[nn.Parameter] = []
        self._strides: list[tuple[int, ...]] = []
        """Keeps those of the trained parameters with two dims or more, as they were when the buckets were made."""
        self._accumulators: list[GradientEdge] = []
        """Gradient accumulator nodes of the trained parameters, for which the buckets are registered."""
        self._relaid = False
        """Strides have changed, and ranks have not compared whether all of theirs did."""
        self._recorded = self._miscounted = False
        """Tell of a static graph: torch has recorded it; it has counted a backward that does not reduce before that."""
        self._told = torch.empty(0)
        """Message of this rank in the usual case: 1 for each trained parameter, then zeros for the digest."""
        self._flags: nn.Parameter | None = None
        self._pending: Any = None
        self._writes = -1
        """Writes to the parameters that torch had counted when this was last in order; -1 before the first time."""
        self.refresh()

    # ---- parameters ------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Follow changes of the model: new layers, frozen and unfrozen parameters, other dtypes and strides.

        torch's reducer copies a gradient into its bucket with the strides that the parameter had when buckets were
        made, and out of it with those of now: after ``p.t_()`` the gradient would come back transposed. Other strides
        therefore need other buckets.

        Collective over all ranks where something changed; new parameters start from rank 0's values.
        """
        changed, self.changed = self.changed, False
        if changed:
            self._all = list(self._model.parameters())
            self._sparse = frozenset(
                module.weight
                for module in self._model.modules()
                if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
            )
        flags = [*map(_REQUIRES_GRAD, self._all)]
        same = not changed and flags == self._required
        trained = self._trained if same else [one for one, flag in zip(self._all, flags, strict=True) if flag]
        dtypes = [*map(_DTYPE, trained)]
        if same and dtypes == self._dtypes:
            relaid = [*map(Tensor.stride, self._matrices)] != self._strides
            if not (relaid or self._miscounted):
                return
            if relaid and self.joined:
                raise UnsupportedError(
                    f"inside join_uneven_inputs strides of a parameter of {type(self._model).__name__} were changed, "
                    "and ranks without batches have other buckets",
                    cure="Change strides (p.t_(), p.data = ..., memory_format) outside of the context, or use "
                    "even_batches=True without join_uneven_inputs.",
                )
            self._relaid |= relaid
        self._drop_wrapper()
        self._required, self._trained, self._dtypes = flags, trained, dtypes
        self._recorded = self._miscounted = False
        self._matrices = [parameter for parameter in trained if parameter.dim() > 1]
        self._strides = [parameter.stride() for parameter in self._matrices]
        self._accumulators = [get_gradient_edge(parameter) for parameter in trained]
        if trained:
            # In the parameters' dtype they share a bucket with them; in 16 bits an average would be rounded.
            dtype = max(dtypes[0].to_real(), torch.float32, key=lambda each: each.itemsize)
            self._told = torch.ones(len(trained) + FLAG_BITS, dtype=dtype, device=trained[0].device)
            self._told[-FLAG_BITS:] = 0
            carried = self._exact and not self._static
            self._flags = nn.Parameter(torch.zeros_like(self._told)) if carried else None
            self.wrapper = self._wrap(_Parameters(self._model, self._flags), self._static, self._starts)
            self.local.watch()
        if changed:
            # torch does so for parameters at the start; later, between a forward and its backward, that would count as
            # an in-place write to them.
            parameters = () if self._starts and trained else self._all
            self.agree((*parameters, *self._model.buffers()))
        self._starts = False
        self._writes = sum(map(_VERSION, self._trained))

    # ---- backward --------------------------------------------------------------------------------------------------

    def arm_when_reached(self) -> None:
        """Arm at the first gradient of a backward: several models are trained, and a loss need not reach this one.

        Collective over all ranks. A static graph, which torch records from the loss on, cannot be assumed then.
        """
        if not self._lazy:
            self._lazy, self._static, self.changed = True, False, True
            self.local.begun = self._arm_once
            self.refresh()

    def _arm_once(self) -> None:
        if self._expected and not self._armed:
            with torch.enable_grad():
                self._arm(torch.zeros((), device=self._topology.device))

    _expected = False
    """A backward of ours runs, and reduces."""

    def _arm(self, loss: Tensor) -> Tensor:
        assert self.wrapper is not None
        self._armed = True
        armed: Tensor = self.wrapper(loss)
        return armed

    def before_backward(self, loss: Tensor) -> Tensor:
        """Get ready for a backward of this loss; returns what to call ``backward`` on."""
        if self.local.reached:
            self.local.before_backward()
            # torch counts how often each parameter is reached until the first reduction, and waits for as many later.
            self._miscounted = self._static and not self._recorded
        if not self.enabled or not loss.requires_grad:
            return loss
        if self._armed:
            # The previous backward raised; its reducer waits for the remaining gradients.
            self._armed, self.changed = False, True
        self.refresh()
        if self.wrapper is None:
            return loss
        self._expected = True
        hooked = [one for one in self._trained if len(one._backward_hooks or ()) > 1 or one._post_accumulate_grad_hooks]  # noqa: SLF001
        self._num_hooks = 0
        if hooked:
            accumulating = self.wrapper._accum_grad_hooks  # noqa: SLF001 (there where torch._dynamo reduces in Python)
            self._num_hooks = self.hooks.begin(hooked, [handle.id for handle in accumulating])
        return loss if self._lazy else self._arm(loss)

    def after_backward(self) -> None:
        """Finish the reduction. Collective over the data-parallel ranks where this backward reduces."""
        if not self._armed:
            self.restore_hooks()
            return
        self._armed = self._expected = False
        self._recorded = True
        hooked = bool(self.hooks.found)
        if hooked:
            # Hooks must not see the zeros of parameters that were not reached.
            self.hooks.hold()
        arrived = list(self.local.reached) if hooked else []
        unreached = frozenset[int]() if self._static else self._complete()
        if self._static and not self.joined:
            self._check_finished()
            if self._relaid:
                # Alike on all ranks, or their reducers do not fit together any more.
                self._relaid, self._reductions = False, 0
            if self._is_due():
                self._compare()
        self.local.forget()
        if hooked and self.hooks.call(arrived, unreached):
            self._hooks_changed = True

    def restore_hooks(self) -> None:
        """Restore the script's hooks after a backward that reduced nothing, or that raised."""
        self._expected = False
        if self.hooks.found:
            self.hooks.end()

    def _name(self, parameter: Tensor) -> str:
        names = {id(one): name for name, one in self._model.named_parameters()}
        return f"{names.get(id(parameter), 'a parameter')} of {type(self._model).__name__}"

    def _complete(self) -> frozenset[int]:
        """Reduce the parameters too that this backward did not reach, but other ranks or earlier ones may have.

        The reducer waits for every parameter. One that this rank's backward did not reach is given a gradient of
        zeros, which adds nothing; where no rank reached it in the whole window its gradient is ``None`` again, as on
        one process, since an optimizer treats zeros otherwise.

        Returns the parameters that no rank reached in this backward, by identity.
        """
        reached = set(map(id, self.local.reached))
        missing = [parameter for parameter in self._trained if id(parameter) not in reached]
        written = sum(map(_VERSION, self._trained)) != self._writes
        # A hook that draws random numbers, or that only one rank has, makes replicas differ in the first step.
        drifts = self._hooks_stepped and self._num_hooks != self._hooks_compared
        # What the counts do not show: an optimizer with state or random numbers of one rank, writes through `data`.
        due = not self.joined and self._is_due()
        relaid, self._relaid = self._relaid, False
        read = written or drifts or due or relaid
        if missing and self.joined:
            raise UnsupportedError(
                f"inside join_uneven_inputs a backward did not reach {len(missing)} trained parameter(s), and ranks "
                "without batches cannot tell whether they reached them before",
                cure="Freeze them with requires_grad_(False), or use even_batches=True without join_uneven_inputs.",
            )
        told = self._told
        if missing or read:
            # One half for a gradient of earlier backwards.
            used = [1.0 if id(one) in reached else 0.5 * (one.grad is not None) for one in self._trained]
            digest = self._digest() if read else [0.0] * FLAG_BITS
            told = torch.tensor([*used, *digest], dtype=told.dtype, device=told.device)
        # Every rank sends its flags, since any other may need them; one that reached everything and saw no write to
        # its parameters sends the same each time, and does not read the result, which would wait for the device.
        earlier = frozenset(id(one) for one in missing if one.grad is not None)
        late, zeros = list(missing), [self._zeros(one) for one in missing]
        if self._flags is not None:
            late.append(self._flags)
            zeros.append(told)
        if late:
            # What torch.autograd.backward calls; its own checks of arguments take as long again.
            _engine_run_backward(
                tuple(late), tuple(zeros), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        self._check_finished()
        if self._flags is not None:
            average, self._flags.grad = self._flags.grad, None
        elif self.joined:
            return frozenset()
        else:
            average = told.clone()
            self._pending = dist.all_reduce(average, async_op=True)
        if self.joined or not (missing or read):
            return frozenset()
        assert average is not None
        if self._flags is None:
            self._pending.wait()
            average /= self._topology.dp_size
        values = average.tolist()
        are_used, averaged = values[:-FLAG_BITS], values[-FLAG_BITS:]
        if read and self._differ(digest, averaged):
            self._refuse(due=due, written=written, hooked=drifts, relaid=relaid)
        if drifts:
            self._hooks_compared = self._num_hooks
            self._hooks_changed = self._hooks_stepped = False
        self._writes = sum(map(_VERSION, self._trained))
        return self._settle(are_used, earlier)

    def _check_finished(self) -> None:
        """Raise where the reducer waits for gradients, though this backward and its zeros have made all of them."""
        wrapper: Any = self.wrapper
        try:
            wrapper._check_reducer_finalized()  # noqa: SLF001 (torch's docstring: for a call after backward)
        except RuntimeError as error:
            nodes = map(get_gradient_edge, self._trained)
            gone = [one for one, edge, was in zip(self._trained, nodes, self._accumulators, strict=True) if edge != was]
            if not gone:
                raise
            raise UnsupportedError(
                f"{self._name(gone[0])} was changed to another dtype or device after prepare (`p.data = ...`, "
                "model.half()): torch's DistributedDataParallel no longer averages its gradients, and has not averaged "
                "those of this backward",
                cure="Write values in place (`with torch.no_grad(): p.copy_(values)`), and convert a copy of the "
                "model: copy.deepcopy(accelerator.unwrap_model(model)).",
            ) from error

    def _settle(self, are_used: list[float], earlier: Collection[int]) -> frozenset[int]:
        """Reset gradients that no rank reached to ``None``; returns what none reached in this backward, by identity.

        Args:
            are_used: the averaged flag of each trained parameter.
            earlier: those that this rank did not reach, and that had a gradient before.
        """
        unreached = []
        for parameter, is_used in zip(self._trained, are_used, strict=True):
            if not is_used:
                parameter.grad = None
            if not is_used or (id(parameter) in earlier and is_used < 0.5 + 0.25 / self._topology.dp_size):
                unreached.append(id(parameter))
        return frozenset(unreached)

    def _is_due(self) -> bool:
        """Count a reduction; whether replicas are compared in it: in 0, 1, 2, 4, 8, 16, ..."""
        number = self._reductions
        self._reductions += 1
        return not number & (number - 1)

    def _compare(self) -> None:
        """Compare replicas where no flags are sent. Collective over all ranks."""
        digest = torch.tensor(self._digest(), device=self._topology.device)
        average = collectives.all_reduce(digest, "sum", self._topology) / self._topology.world_size
        if self._differ(digest.tolist(), average.tolist()):
            written = sum(map(_VERSION, self._trained)) != self._writes
            self._refuse(due=True, written=written, hooked=self._hooks_stepped)
        self._writes = sum(map(_VERSION, self._trained))

    def left_join(self) -> None:
        """Every rank takes part again: the next reduction compares what was not compared in between."""
        self.joined, self._reductions = False, 0

    def _differ(self, digest: list[float], averaged: list[float]) -> bool:
        """Whether parameters differ over ranks: the same answer on all ranks that sent a digest."""
        # A bit that is the same on all ranks averages to itself; else each rank is off by at least 1/ranks.
        tolerance = 0.5 / self._topology.dp_size
        return any(abs(bit - mean) > tolerance for bit, mean in zip(digest, averaged, strict=True))

    def _refuse(self, *, due: bool, written: bool, hooked: bool, relaid: bool = False) -> None:
        """Raise where replicas have drifted apart; where only their rounding differs, warn once.

        Collective over all ranks if ``due``, the same on all of them.

        Args:
            due: all ranks compare in this reduction, whatever they saw.
            written: this rank's script has written to parameters since the last step.
            hooked: hooks have changed the gradients of the last step.
            relaid: buckets were made anew for other strides on this rank, and others have sent no digest.
        """
        kind = type(self._model).__name__
        if relaid and not due:
            raise UsageError(
                f"the script changed strides of parameters of {kind} after prepare, on this rank and not on all, or "
                "wrote other values there",
                cure="Write `p.t_()`, `p.data = ...` and model.to(memory_format=...) on every rank alike.",
            )
        if due:
            name, difference, written, hooked = self._largest_difference(written=written, hooked=hooked)
        if hooked:
            raise UsageError(
                f"after a step in which hooks of parameters of {kind} changed gradients, the parameters are not the "
                "same on all ranks",
                cure="Set the same hooks on every rank, and let them do the same there: they are called with "
                "gradients over all ranks. Draw random numbers from a torch.Generator with the same seed.",
            )
        if written:
            raise UsageError(
                f"the script wrote to parameters of {kind} after prepare, and their values are not the same on all "
                "ranks",
                cure="Write the same on every rank: call drivetrain.utils.set_seed(0) before drawing random values; "
                "give all ranks the mean of what each has found, accelerator.reduce(values, 'mean'); or rank 0's "
                "values with drivetrain.utils.broadcast.",
            )
        if difference > _ROUNDING:
            raise UsageError(
                f"the replicas of {kind} have drifted apart: {name} differs from rank 0's by {difference:.2g} of its "
                "norm",
                cure="Let every rank step alike. Usual causes: an optimizer that stepped before prepare on one rank "
                "only, one that draws random numbers (seed them alike on every rank), and writes to `parameter.data`.",
            )
        if not self._warned:
            self._warned = True
            logger.warning(
                "The replicas of %s differ by rounding: %s by %.2g of its norm. Steps may be computed in another "
                "order of operations on each rank; drivetrain.utils.set_seed(seed, deterministic=True) asks torch for "
                "one order.",
                kind,
                name,
                difference,
            )

    _warned = False

    @torch.no_grad()
    def _largest_difference(self, *, written: bool, hooked: bool) -> tuple[str, float, bool, bool]:
        """Find the parameter that differs most from rank 0's, relative to its norm there. Collective over all ranks.

        Returns its name, that difference, and whether any rank has `written` or is `hooked`; the same on all ranks.
        """
        found = torch.zeros(len(self._all) + 2, dtype=torch.float64)
        found[-2:] = torch.tensor([written, hooked])
        places = {id(one): place for place, one in enumerate(self._all)}
        for group in _pieces(self._all):
            flat = collectives.broadcast(torch.cat([tensor.reshape(-1) for tensor in group]), 0, self._topology)
            for tensor, first in zip(group, torch.split(flat, [tensor.numel() for tensor in group]), strict=True):
                difference = torch.linalg.vector_norm(_real(tensor.reshape(-1)) - _real(first), dtype=torch.float64)
                norm = torch.linalg.vector_norm(_real(first), dtype=torch.float64)
                found[places[id(tensor)]] = float(difference / norm.clamp(min=torch.finfo(torch.float32).tiny))
        # A NaN of one rank alone is as large a difference as there is.
        found = found.nan_to_num(nan=torch.inf)
        found = collectives.all_reduce(found.to(self._told.device, self._told.dtype), "max", self._topology)
        *differences, any_written, any_hooked = found.tolist()
        place = max(range(len(differences)), key=differences.__getitem__)
        names = {id(one): name for name, one in self._model.named_parameters()}
        return names[id(self._all[place])], differences[place], bool(any_written), bool(any_hooked)

    def stepped(self) -> None:
        """Handle an optimizer's update of parameters, which is the same on every rank."""
        self._hooks_stepped = self._hooks_changed
        self._writes = sum(map(_VERSION, self._trained))

    @torch.no_grad()
    def _digest(self) -> list[float]:
        """A digest in bits, equal for replicas with the same values. Not collective."""
        # Frozen parameters too: a forward may write to them.
        values = [one if one.is_floating_point() else _real(one) for one in self._all]
        norms = torch.stack([torch.linalg.vector_norm(one, dtype=torch.float64) for one in values])
        sums = torch.stack([one.sum(dtype=torch.float64) for one in values])
        read = torch.stack([norms, sums]).cpu().numpy().tobytes()
        hashed = int.from_bytes(hashlib.blake2b(read, digest_size=FLAG_BITS // 8).digest())
        return [float(hashed >> at & 1) for at in range(FLAG_BITS)]

    # ---- compilation, buffers, release -----------------------------------------------------------------------------

    def compiling(self) -> AbstractContextManager[Any]:
        """Lets torch.compile cut the model's graph at bucket boundaries, so that reducing overlaps with backward."""
        return nullcontext() if self.wrapper is None else self.wrapper._inside_ddp_forward()  # noqa: SLF001

    @torch.no_grad()
    def agree(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank rank 0's values. Collective over all ranks."""
        for group in _pieces(tensors):
            flat = collectives.broadcast(torch.cat([tensor.reshape(-1) for tensor in group]), 0, self._topology)
            values = torch.split(flat, [tensor.numel() for tensor in group])
            for tensor, value in zip(group, values, strict=True):
                # Without changing version counters: a graph kept for a second backward may have saved these values.
                tensor.data.copy_(value.view_as(tensor))

    def _zeros(self, parameter: Tensor) -> Tensor:
        if parameter in self._sparse:
            return parameter.detach().new_zeros(parameter.shape).to_sparse(1)
        return torch.zeros_like(parameter)

    def release(self) -> None:
        """Release the wrapper, whose reducer must be destroyed before the process group."""
        self.local.release()
        self._drop_wrapper()

    def _drop_wrapper(self) -> None:
        if self._pending is not None:
            self._pending.wait()
        self.wrapper = self._pending = None


def _real(tensor: Tensor) -> Tensor:
    """Its values as floating-point numbers, which a norm can be taken of: a frozen parameter may hold integers."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.is_floating_point() else tensor.double()


def _pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of tensors of one dtype that fit into one message of moderate size."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        piece: list[Tensor] = []
        for tensor in group:
            if piece and sum(one.nbytes for one in piece) + tensor.nbytes > _PIECE:
                yield piece
                piece = []
            piece.append(tensor)
        yield piece


_PIECE = 2**26
"""Bytes of a broadcast: as torch's own pieces, a fraction of what a model holds."""

FLAG_BITS = 32
"""Bits of a digest of the parameters' values, which follow the flags."""

_ROUNDING = 1e-3
"""Tolerance relative to a parameter's norm: other kernels or orders of summation differ less for thousands of steps."""

_VERSION, _REQUIRES_GRAD, _DTYPE = attrgetter("_version"), attrgetter("requires_grad"), attrgetter("dtype")
