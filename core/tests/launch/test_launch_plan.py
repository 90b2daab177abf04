"""How many processes, where they meet, and what is refused before anything starts."""

from __future__ import annotations

import pytest

from drivetrain.config import load_config
from drivetrain.errors import BackendBlockedError, BackendNotFoundError, ConfigError
from drivetrain.launch.failures import Failure, explain, read_failures
from drivetrain.launch.plan import LaunchPlan, count_devices, describe, make_plan, trains_over


def planned(**overrides):
    return make_plan(load_config(overrides=overrides, environ={}))


def test_without_a_number_there_is_one_process_per_device():
    count = max(1, count_devices())
    assert planned() == LaunchPlan(count, count, backend="ddp" if count > 1 else "single")
    assert planned(use_cpu=True) == LaunchPlan(1, 1, backend="single")


def test_processes_are_shared_out_over_machines():
    plan = planned(num_processes=4, num_machines=2, machine_rank=1, main_process_ip="node0", rdzv_backend="static")
    assert (plan.world_size, plan.processes_here, plan.machine_rank) == (4, 2, 1)
    assert (plan.rdzv_endpoint, plan.num_machines, plan.fewest_machines) == ("node0:29500", 2, 0)


def test_a_range_of_machines_counts_the_processes_of_all():
    plan = planned(num_processes=8, num_machines="1:4", machine_rank=3, main_process_ip="node0")
    assert (plan.world_size, plan.processes_here, plan.num_machines, plan.fewest_machines) == (8, 2, 4, 1)
    assert (plan.rendezvous.timeout_seconds, plan.rendezvous.last_call_seconds) == (600.0, 30.0)
    with pytest.raises(ConfigError, match="num_processes: 6 cannot be shared equally by num_machines: 1:4"):
        planned(num_processes=6, num_machines="1:4", main_process_ip="node0")


def test_a_port_on_one_machine_is_used():
    assert planned(num_processes=2, main_process_port=1234).rdzv_endpoint == "localhost:1234"


def test_unequal_shares_and_machines_without_a_meeting_point_are_refused():
    with pytest.raises(ConfigError, match="cannot be shared equally"):
        planned(num_processes=3, num_machines=2, main_process_ip="node0")
    with pytest.raises(ConfigError, match="main_process_ip is not set"):
        planned(num_processes=2, num_machines=2)


def test_a_machine_beyond_the_number_of_machines_is_refused():
    with pytest.raises(ConfigError, match="machine 2 does not exist among num_machines: 1") as caught:
        planned(machine_rank=2)
    assert "machine_rank" in caught.value.whose


def test_a_backend_of_one_process_is_refused_for_two():
    with pytest.raises(BackendBlockedError, match="'single' trains in one process, but 2 were asked for") as caught:
        planned(distributed_type="single", num_processes=2)
    assert "num_processes: 1" in caught.value.cure
    assert trains_over("single", 1)
    assert not trains_over("single", 2)


def test_a_backend_that_is_not_installed_is_refused():
    with pytest.raises(BackendNotFoundError):
        planned(distributed_type="no_such_backend")


def test_the_header_names_backend_distribution_and_size():
    resolved = load_config(overrides={"distributed_type": "single", "mixed_precision": "bf16"}, environ={})
    line = describe(LaunchPlan(1, 1, backend="single"), resolved)
    assert "single (drivetrain " in line
    assert line.endswith("on 1 process, bf16")


def test_a_crash_goes_before_complaints_and_what_was_stopped_goes_last(tmp_path):
    def record(rank: int, time: float) -> None:
        folder = tmp_path / str(rank)
        folder.mkdir()
        details = {"rank": str(rank), "precise": str(time), "py_callstack": f"Traceback of {rank}\n", "exit_code": 1}
        import json

        text = json.dumps({"message": {"message": f"Oops: {rank}", "extraInfo": details}})
        (folder / "error.json").write_text(text)

    record(0, 2.5)
    record(1, 2.25)
    assert [f.rank for f in read_failures({0: 1, 1: 1, 2: None}, tmp_path)] == [1, 0, 2]
    failures = read_failures({0: 1, 1: None, 2: -9}, tmp_path)
    assert [f.rank for f in failures] == [2, 1, 0]
    assert failures[0].shell_code == 137
    assert explain(failures) == (
        "rank 2 failed: ended by signal 9 (SIGKILL)\n"
        "rank 0 failed too: Oops: 0 (exit code 1)\n"
        "rank 1 failed too: Oops: 1 (exit code 1)"
    )
    assert explain(failures[1:]).startswith("Traceback of 1\nrank 1 failed: Oops: 1")
    assert Failure(0, 3).shell_code == 3
    assert Failure(0, None).shell_code == 1
