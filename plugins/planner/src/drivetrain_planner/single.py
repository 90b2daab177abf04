"""Estimates the memory of the backend ``single``."""

from __future__ import annotations

from drivetrain_planner.estimates import Estimate, Ledger, PlanRequest, held_whole, replay_whole, trained_sizes


def estimates(request: PlanRequest) -> list[Estimate]:
    """One layout: everything in one process."""
    accumulation = request.accumulation(1)
    refused = "" if accumulation is not None else request.indivisible(1)
    if request.world_size > 1:
        refused = f"it trains in one process, and {request.world_size} are asked for"
    if refused or accumulation is None:
        return [Estimate("single", "single", "single", 0, refused=refused)]
    trace = request.trace((), (), None)
    trained = trained_sizes(request.model)
    ledger = Ledger(held_whole(request))
    replay_whole(ledger, trace, accumulation)
    ledger.during("optimizer step", request.optimizer.step(trained))
    return [
        Estimate(
            title="single",
            backend="single",
            family="single",
            rank=0,
            settings={"distributed_type": "single", "gradient_accumulation_steps": accumulation},
            memory=ledger.memory,
            resident=held_whole(request),
            moment=ledger.moment,
            accumulation=accumulation,
            trace=trace,
            stepped=sum(trained),
        )
    ]
