"""``fsdp`` passes the conformance kit."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain_testing.kit import Kit, run_case
from drivetrain_testing.suite import *  # noqa: F403


class Requirements(BaseRequirements):  # noqa: F405
    backend = "fsdp"
    world_sizes = (2, 4)
    shared_ranks = True
    layouts = {4: [{"mesh": {"dp_replicate": 2, "dp_shard": 2}}]}  # noqa: RUF012


class Replicas(Requirements):
    mesh = {4: {"dp_replicate": 2, "dp_shard": 2}}  # noqa: RUF012


@pytest.mark.parametrize(
    "case",
    [
        "honesty.every_rank_saves_its_part",
        "honesty.saves_beside_training",
        "clipping.clips_as_one_process_does",
        "windows.ragged_windows",
        "state.resumed_equals_uninterrupted",
    ],
)
@pytest.mark.gate("clipping.*", "state.*")
def test_replicas_of_shards(case: str, tmp_path: Path) -> None:
    run_case(case, Kit.of(Replicas, 4, tmp_path), 4)
