"""Torch's schedule classes: builds them, and takes their action lists from them. The planner's only use of torch.

A single-stage schedule (GPipe, 1F1B) is *run* with a stage that computes nothing and records its calls: the list
that such a class prints (``pipeline_order``) is made by other code than its steps, and for the last rank of 1F1B the
two differ in torch 2.13. The other classes run a list, which is read. Tests run those as well and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, final

from torch.distributed.pipelining import schedules

from drivetrain_megatron import private_names
from drivetrain_megatron.planner.actions import Action, ActionLists, Kind
from drivetrain_megatron.planner.catalogue import Schedule, check, find

_KINDS: dict[Any, Kind] = {
    schedules.FORWARD: "F",
    schedules.FULL_BACKWARD: "B",
    schedules.BACKWARD_INPUT: "I",
    schedules.BACKWARD_WEIGHT: "W",
}
_RECEIVES: dict[Any, Kind] = {schedules.RECV_F: "F", schedules.RECV_B: "B"}


@lru_cache(maxsize=512)
def action_lists(name: str, num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> ActionLists:
    """Return what each rank computes under a schedule, in order. Needs no process group and no model.

    Raises:
        UsageError: the schedule does not take these numbers; names what works.
    """
    schedule = find(name)
    check(schedule, num_ranks, stages_per_rank, num_micro_batches)
    if issubclass(schedules.get_schedule_class(schedule.torch_name), schedules.PipelineScheduleSingle):
        noted = []
        for rank in range(num_ranks):
            built, actions = build(schedule, num_ranks, stages_per_rank, rank, num_micro_batches)
            run_noting(built, num_micro_batches)
            noted.append(tuple(actions))
        return ActionLists(tuple(noted))
    built, _ = build(schedule, num_ranks, stages_per_rank, 0, num_micro_batches)
    order = built.pipeline_order_with_comms
    return ActionLists(tuple(_computations(order[rank]) for rank in range(num_ranks)))


@lru_cache(maxsize=512)
def messages_asked_for(
    name: str, num_ranks: int, stages_per_rank: int, num_micro_batches: int
) -> tuple[tuple[tuple[Action, ...], ...], ...]:
    """Return, for each computation of each rank, the later ones whose receive the rank has already posted.

    Torch's multi-stage schedules post a receive, and allocate memory for it, as soon as another rank may send;
    single-stage schedules when they need it. A backward is reported as ``B``, also if it is split.
    """
    lists = action_lists(name, num_ranks, stages_per_rank, num_micro_batches)
    built, _ = build(find(name), num_ranks, stages_per_rank, 0, num_micro_batches)
    if isinstance(built, schedules.PipelineScheduleSingle):
        return tuple(tuple(() for _ in actions) for actions in lists.ranks)
    order = built.pipeline_order_with_comms
    found = []
    for rank in range(num_ranks):
        asked: set[Action] = set()
        beside: list[tuple[Action, ...]] = []
        for action in order[rank]:
            for part in action.sub_actions or (action,):
                kind, place = part.computation_type, (part.stage_index, part.microbatch_index)
                if kind in _RECEIVES:
                    asked.add(Action(_RECEIVES[kind], *place))
                elif part.is_compute_op:
                    asked.discard(Action("F" if _KINDS[kind] == "F" else "B", *place))
                    beside.append(tuple(sorted(asked)))
        found.append(tuple(beside))
    return tuple(found)


def build(
    schedule: Schedule, num_ranks: int, stages_per_rank: int, rank: int, num_micro_batches: int
) -> tuple[Any, list[Action]]:
    """Return torch's schedule of one rank over stages that compute nothing, and the list in which they note.

    Raises:
        ValueError: torch's class does not take these numbers.
    """
    noted: list[Action] = []
    stages: list[Any] = [
        NotingStage(stage, num_ranks, rank, num_ranks * stages_per_rank, noted)
        for stage in stages_of(schedule.placement, num_ranks, stages_per_rank, rank)
    ]
    kind = schedules.get_schedule_class(schedule.torch_name)
    return construct(kind, stages, num_micro_batches, _no_loss), noted


def construct(kind: Any, stages: Sequence[Any], num_micro_batches: int, loss: Callable[..., Any]) -> Any:
    """Return torch's schedule of one rank, which runs what :func:`action_lists` says under every release of torch.

    Args:
        kind: torch's class.
        stages: of this rank, the first one first.
        num_micro_batches: of one step.
        loss: of one micro-batch; gradients are not divided by the number of micro-batches.

    Raises:
        ValueError: the class does not take these numbers.
        BackendBlockedError: torch has renamed what is used of it.
    """
    if issubclass(kind, schedules.PipelineScheduleSingle):
        # In torch 2.9 GPipe refuses fewer micro-batches than there are stages when it is built. It runs them.
        least = stages[0].num_stages if kind is schedules.ScheduleGPipe else 0
        made: Any = kind(stages[0], max(num_micro_batches, least), loss_fn=loss, scale_grads=False)
        private_names.check(made)
        made._n_microbatches = num_micro_batches  # noqa: SLF001
        return made
    made = kind(list(stages), num_micro_batches, loss_fn=loss, scale_grads=False)
    if hasattr(made, "pipeline_order_with_comms"):
        return made
    # In torch 2.9 most of these classes run a list without messages, in time steps in which a rank sends itself what
    # its next stage needs. Gloo cannot do that. The class that runs a list with messages is there as well.
    run_with_messages = private_names.run_with_messages()
    lowered = run_with_messages(list(stages), num_micro_batches, loss_fn=loss, scale_grads=False)
    lowered._prepare_schedule_with_comms(made.pipeline_order)  # noqa: SLF001
    return lowered


def stages_of(placement: str, num_ranks: int, stages_per_rank: int, rank: int) -> list[int]:
    """Return the stages that a rank holds, first one first."""
    if placement == "v":
        assert stages_per_rank == 2, stages_per_rank
        return [rank, 2 * num_ranks - 1 - rank]
    return list(range(rank, num_ranks * stages_per_rank, num_ranks))


def _computations(actions: Sequence[Any | None]) -> tuple[Action, ...]:
    """Return the computations among torch's actions; a pair that may overlap is run one after the other."""
    parts = [part for action in actions if action is not None for part in (action.sub_actions or (action,))]
    return tuple(
        Action(_KINDS[part.computation_type], part.stage_index, part.microbatch_index)
        for part in parts
        if part.is_compute_op
    )


def run_noting(built: Any, num_micro_batches: int) -> None:
    """Run a schedule whose stages record their calls; no tensors, no communication."""
    private_names.check(built)
    # Initialization would exchange shapes with neighbours, which do not exist here.
    built._initialize_stage = built._initialize_stages = lambda *_, **__: None  # noqa: SLF001
    built._step_microbatches(target_mbs=[None] * num_micro_batches)  # noqa: SLF001


def _no_loss(*_: Any) -> float:
    return 0.0


@final
class NotingStage:
    """Replaces torch's ``PipelineStage``: has a place in the pipeline, computes nothing, records every call.

    Args:
        index: of this stage.
        num_ranks: size of the pipeline's group.
        rank: the rank of this stage.
        num_stages: of the whole pipeline.
        noted: where it notes; stages of one rank share it.
    """

    def __init__(self, index: int, num_ranks: int, rank: int, num_stages: int, noted: list[Action]) -> None:
        self.stage_index, self.group_size, self.group_rank, self.num_stages = index, num_ranks, rank, num_stages
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.submod = None
        self.noted = noted

    def forward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        self.noted.append(Action("F", self.stage_index, micro_batch))

    def backward_one_chunk(self, micro_batch: int, *_: Any, full_backward: bool = True, **__: Any) -> None:
        self.noted.append(Action("B" if full_backward else "I", self.stage_index, micro_batch))

    def backward_weight_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        self.noted.append(Action("W", self.stage_index, micro_batch))

    def no_messages(self, _: int) -> list[Any]:
        """Return no messages."""
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages

    def passes(self, *_: Any, **__: Any) -> None:
        """Ignore calls of torch that compute nothing (pass on a tensor, reduce gradients)."""

    set_local_fwd_input = set_local_bwd_input = get_local_bwd_output = passes
    # The second is what torch 2.9 calls.
    perform_reduce_grad = scale_grads = passes
