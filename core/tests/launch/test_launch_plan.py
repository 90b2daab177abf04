"""How many processes, where they meet, and what is refused before anything starts."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from drivetrain.api import BackendInfo, Capabilities, hookimpl
from drivetrain.config import load_config
from drivetrain.errors import BackendBlockedError, BackendNotFoundError, ConfigError
from drivetrain.launch import plan as planning
from drivetrain.launch.failures import Failure, LastSeen, explain, file_report, read_failures
from drivetrain.launch.plan import LaunchPlan, count_devices, describe, make_plan, trains_over
from drivetrain.registry import get_registry, reset_registry


def planned(**overrides):
    return make_plan(load_config(overrides=overrides, environ={}))


def test_without_a_number_there_is_one_process_per_device():
    seen = count_devices()
    count = max(1, seen)
    assert planned() == LaunchPlan(count, count, backend="ddp" if count > 1 else "single", accelerators=seen)
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


def test_a_mesh_that_the_backend_or_the_processes_do_not_fit_is_refused(tmp_path):
    pytest.importorskip("drivetrain_ddp")
    file = tmp_path / "c.yaml"
    file.write_text("distributed_type: ddp\nnum_processes: 4\nuse_cpu: true\nmesh: {tp: 2}\n")
    with pytest.raises(ConfigError, match=r"'ddp' has no mesh axis tp; it has the mesh axes dp_replicate") as caught:
        make_plan(load_config(file, environ={}), environ={})
    assert caught.value.whose.endswith("c.yaml:4:12")
    assert "Remove it from `mesh:`" in caught.value.cure
    with pytest.raises(ConfigError, match=r"a mesh of dp_replicate 3 = 3 does not divide 4 processes"):
        planned(distributed_type="ddp", num_processes=4, use_cpu=True, mesh={"dp_replicate": 3})
    assert planned(distributed_type="ddp", num_processes=4, use_cpu=True, mesh={"dp_replicate": 4, "tp": 1}).backend


class Cutting(BaseModel):
    """The section of a backend that cuts matrices."""

    tensor_parallel_size: int = Field(1, json_schema_extra={"mesh_axis": "tp"})


@pytest.fixture
def cutting(monkeypatch):
    """A backend whose section sets the size of a mesh axis."""
    module = types.ModuleType("toy_cutting")
    module.Cutting = Cutting
    monkeypatch.setitem(sys.modules, "toy_cutting", module)

    class Plugin:
        @hookimpl
        def drivetrain_backends(self):
            able = Capabilities(mesh_axes=frozenset({"tp"}))
            return [BackendInfo("cutting", "a toy", "toy_cutting:Toy", config="toy_cutting:Cutting", capabilities=able)]

    reset_registry()
    get_registry().register(Plugin(), name="cutting")
    yield
    reset_registry()


def test_sizes_of_an_axis_that_contradict_each_other_are_refused_and_written_once(cutting, tmp_path):
    head, mesh, section = "distributed_type: cutting\nnum_processes: 4\nuse_cpu: true\n", "mesh: {tp: 4}\n", "cutting: "
    file = tmp_path / "c.yaml"

    def plan(*parts):
        file.write_text(head + "".join(parts))
        return make_plan(load_config(file, environ={}), environ={})

    with pytest.raises(ConfigError, match=r"cutting\.tensor_parallel_size: 2 contradicts mesh\.tp: 4") as caught:
        plan(mesh, section, "{tensor_parallel_size: 2}\n")
    assert caught.value.whose == f"{file}:4:12, {file}:5:33"
    assert caught.value.cure == "Write it in one place."
    assert plan(mesh).world_size == plan(section, "{tensor_parallel_size: 2}\n").world_size == 4


def test_a_backend_that_is_not_installed_is_refused():
    with pytest.raises(BackendNotFoundError):
        planned(distributed_type="no_such_backend")


def test_the_header_names_backend_distribution_and_size():
    resolved = load_config(overrides={"distributed_type": "single", "mixed_precision": "bf16"}, environ={})
    line = describe(LaunchPlan(1, 1, backend="single"), resolved)
    assert "single (drivetrain " in line
    assert line.endswith("on 1 process, bf16")


@pytest.mark.parametrize(
    ("settings", "accelerators", "shown"),
    [
        ({"use_cpu": True}, None, " of the CPU (2 cores)"),
        ({}, 0, " of the CPU (no accelerator found; 2 cores)"),
        ({}, 8, ""),
        ({}, None, ""),
    ],
)
def test_the_header_says_when_processes_run_on_the_cpu(monkeypatch, settings, accelerators, shown):
    monkeypatch.setattr(planning, "available_cores", lambda: 2)
    resolved = load_config(overrides=settings, environ={})
    line = describe(LaunchPlan(8, 8, backend="single", accelerators=accelerators), resolved)
    assert line.endswith(f"on 8 processes{shown}")


@pytest.mark.parametrize(("settings", "counted"), [({"num_processes": 2}, 0), ({}, 0), ({"num_processes": 1}, None)])
def test_accelerators_are_counted_where_their_number_matters(monkeypatch, settings, counted):
    monkeypatch.setattr(planning, "count_devices", lambda: 0)
    assert planning.make_plan(load_config(overrides=settings, environ={}), environ={}).accelerators == counted


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
        "rank 1 failed too: Oops: 1 (exit code 1)\n"
        "Signal 9 comes from the system, most often, when host memory is short (`dmesg` says so): fewer workers of "
        "loaders, or smaller batches, need less."
    )
    assert explain(failures[1:]).startswith("Traceback of 1\nrank 1 failed: Oops: 1")
    lost = Failure(0, 1, 2.0, "RuntimeError: [x/pair.cc:553] Connection closed by peer")
    said = "rank 1 failed: KeyError: 1 (exit code 1)\nrank 0 lost its connection to rank 1"
    assert explain([Failure(1, 1, 1.0, "KeyError: 1"), lost]) == said


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("AssertionError: Torch not compiled with CUDA enabled", "Leave .to('cuda') and .cuda() out"),
        ("RuntimeError: Tensor on device cpu is not on the expected device meta!", "device=accelerator.device"),
        ("AttributeError: Can't pickle local object 'D.__init__.<locals>.<lambda>'", "at the top of a module"),
        ("ValueError: mine", ""),
    ],
)
def test_common_errors_of_torch_and_python_are_given_a_next_step(message, hint):
    said = explain([Failure(0, 1, 1.0, message)])
    assert said.startswith(f"rank 0 failed: {message} (exit code 1)")
    assert hint in said
    assert (said.count("\n") == 1) == bool(hint)


def test_an_error_of_ours_is_shown_once_and_a_file_only_where_it_says_more(tmp_path):
    said = "drivetrain.errors.UsageError: a long sentence. And its cure."
    first = Failure(1, 1, 1.0, said, f"Traceback\n  in ours\n{said}\n", ours=f"Traceback\n{said}\n")
    assert explain([first]) == f"Traceback\n{said}\nrank 1 failed: UsageError (exit code 1)"
    assert file_report([first], None) == ""
    leaving = Failure(0, None, seen=LastSeen(0, 1, stack="  Garbage-collecting\n  <no Python frame>"))
    assert file_report([first, leaving], None) == ""
    line = file_report([first], str(tmp_path))
    assert line.startswith(f"The report: {tmp_path}/drivetrain-failure-")
    assert "\n  in ours\n" in Path(line.split(": ", 1)[1].strip()).read_text()
    stopped = Failure(0, None, seen=LastSeen(0, 1, stack='  File "train.py", line 3 in <module>'))
    line = file_report([first, stopped, Failure(2, None, seen=LastSeen(2, 1))], str(tmp_path))
    assert line.startswith("With the stack of rank 0: ")
    assert Path(line.split(": ", 1)[1].strip()).read_text().count("most recent call first") == 1
    assert Failure(0, 3).shell_code == 3
    assert Failure(0, None).shell_code == 1
