"""Estimates memory and communication of a rank under ``ddp``, for a planner."""

from __future__ import annotations

from drivetrain_ddp.config import DDPConfig
from drivetrain_ddp.reducer import FLAG_BITS
from drivetrain_planner import Estimate, Ledger, PlanRequest, Traffic, held_whole, replay_whole, trained_sizes


def estimates(request: PlanRequest) -> list[Estimate]:
    """Return one layout: a full replica on every rank."""
    ranks = request.world_size
    if ranks == 1:
        return [Estimate("ddp", "ddp", "ddp", 10, refused="it averages gradients over processes, and there is one")]
    accumulation = request.accumulation(ranks)
    if accumulation is None:
        return [Estimate("ddp", "ddp", "ddp", 10, refused=request.indivisible(ranks))]
    section = DDPConfig.model_validate(request.sections.get("ddp", {}))
    trace = request.trace((), (), None)
    trained = trained_sizes(request.model)
    gradients = sum(trace.gradients.values())
    # Which parameters were reached is told by a parameter of its own, with a gradient and a place in the buckets.
    flags = (len(trained) + FLAG_BITS) * 4
    held = {**held_whole(request), "buckets": sum(trained) + 4 * flags}
    ledger = Ledger(held)
    if section.gradient_as_bucket_view:
        for event in trace.events:
            ledger.replay(event)
            if event.kind == "gradient":
                # Copied into its bucket when it is complete.
                ledger.during("gradients", trace.gradients[event.name])
    else:
        replay_whole(ledger, trace, accumulation)
    ledger.during("optimizer step", request.optimizer.step(trained))
    settings = {"distributed_type": "ddp", "gradient_accumulation_steps": accumulation}
    return [
        Estimate(
            title="ddp",
            backend="ddp",
            family="ddp",
            rank=10,
            settings=settings,
            memory=ledger.memory,
            resident=held,
            moment=ledger.moment,
            accumulation=accumulation,
            trace=trace,
            traffic=[Traffic("all_reduce", ranks, gradients, max(1, gradients // _BUCKET))],
            # Into buckets, and back where they are not the gradients themselves: each is read and written.
            copied=2 * gradients * (1 if section.gradient_as_bucket_view else 2),
            stepped=sum(trained),
        )
    ]


_BUCKET = 25 * 2**20
"""Default bucket size of torch in bytes."""
