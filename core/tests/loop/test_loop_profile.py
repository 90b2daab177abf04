from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.errors import UsageError
from drivetrain.kwargs import ProfileKwargs
from drivetrain.launch.environment import read_process_info
from drivetrain.loop.profile import profile
from drivetrain.topology import Mesh, Topology
from drivetrain_testing import spawn


def profiles(folder: str, schedule: dict[str, int] | None) -> list[Any]:
    # torch says so at the second cycle; as an exception it would leave the profiler half open, which then crashes.
    warnings.filterwarnings("ignore", message=".*Profiler clears events")
    process = read_process_info()
    topology = Topology(process, Mesh({"dp_replicate": process.world_size}), "cpu")
    seen: list[str] = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option=schedule,
        on_trace_ready=lambda profiler: seen.append(type(profiler).__name__),
        record_shapes=True,
        output_trace_dir=str(Path(folder) / "deep"),
    )
    with profile(handler, topology) as profiler:
        for _ in range(6):
            torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step()
    return seen


def test_every_rank_writes_its_own_trace(tmp_path: Path) -> None:
    assert spawn(profiles, 2, str(tmp_path), None) == [["profile"], ["profile"]]
    names = sorted(path.name for path in (tmp_path / "deep").iterdir())
    assert names == ["profile_0.json", "profile_1.json"]
    trace = json.loads((tmp_path / "deep" / "profile_1.json").read_text())
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])


def test_every_cycle_of_a_schedule_is_written(tmp_path: Path) -> None:
    schedule = {"wait": 1, "warmup": 1, "active": 1, "repeat": 2}
    assert spawn(profiles, 1, str(tmp_path), schedule) == [["profile", "profile"]]
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["profile_0.json", "profile_0_1.json"]


def test_an_activity_that_this_torch_lacks_is_refused() -> None:
    handler = ProfileKwargs()
    handler.activities = ["abacus"]
    topology = Topology(read_process_info(), Mesh({"dp_replicate": 1}), "cpu")
    with pytest.raises(UsageError, match="cannot profile abacus"), profile(handler, topology):
        pass
