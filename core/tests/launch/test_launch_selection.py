"""Which accelerators the workers see: pure choices on machines of every kind, and the environment of a real worker."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.backend import ProcessGroupSettings
from drivetrain.config import load_config
from drivetrain.distributed.process_group import ensure_process_group, pick_device
from drivetrain.errors import BackendBlockedError, ConfigError
from drivetrain.launch import plan as planning
from drivetrain.launch.devices import (
    KINDS,
    Device,
    DeviceRequest,
    Inventory,
    check_count,
    choose,
    kind_from,
    known_kinds,
    take_inventory,
)
from drivetrain.topology import ProcessInfo

UUIDS = [f"GPU-{index}a1b2c3d-0000-1111-2222-333344445555" for index in range(4)]
CUDA = Inventory("cuda", "NVIDIA", tuple(Device(i, "H200", UUIDS[i], "9.0", 139 * 2**30) for i in range(4)))
ROCM = Inventory("cuda", "AMD", tuple(Device(i, "MI300X") for i in range(4)))


def machine(device_type: str) -> Inventory:
    return Inventory(device_type, "", tuple(Device(i, device_type) for i in range(4)))


@pytest.mark.parametrize(
    ("present", "variable"),
    [
        (CUDA, "CUDA_VISIBLE_DEVICES"),
        (ROCM, "HIP_VISIBLE_DEVICES"),
        (machine("xpu"), "ZE_AFFINITY_MASK"),
        (machine("hpu"), "HABANA_VISIBLE_MODULES"),
        (machine("npu"), "ASCEND_RT_VISIBLE_DEVICES"),
        (machine("tpu"), "TPU_VISIBLE_CHIPS"),
    ],
)
@pytest.mark.parametrize("ids", [("0", "2"), ("2", "0")])
def test_each_vendor_has_its_variable_and_the_order_is_kept(present, variable, ids):
    chosen = choose(DeviceRequest(ids), {}, present)
    assert chosen.variables == {variable: ",".join(ids)}
    assert chosen.devices == ids


def test_nothing_is_set_when_nothing_was_chosen():
    assert choose(DeviceRequest(), {}, CUDA).variables == {}
    assert choose(DeviceRequest(), {}, None).devices is None


def test_an_empty_list_hides_everything():
    chosen = choose(DeviceRequest(()), {}, CUDA)
    assert chosen.variables == {"CUDA_VISIBLE_DEVICES": ""}
    assert chosen.on_cpu


def test_uuids_are_taken_whole_or_by_their_beginning():
    chosen = choose(DeviceRequest((UUIDS[2], UUIDS[0])), {}, CUDA)
    assert chosen.variables == {"CUDA_VISIBLE_DEVICES": f"{UUIDS[2]},{UUIDS[0]}"}
    assert choose(DeviceRequest((UUIDS[1][:12],)), {}, CUDA).devices == (UUIDS[1][:12],)
    with pytest.raises(ConfigError, match="names one accelerator twice"):
        choose(DeviceRequest((UUIDS[1], UUIDS[1][:12])), {}, CUDA)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (("0", "4"), r"accelerator 4 does not exist; this machine has cuda 0: H200 .*; 3: H200"),
        (("0", "4", "5"), "accelerators 4, 5 do not exist; this machine has"),
        (("0", "0"), "names 0 more than once"),
        (("cuda:0", "xpu:1"), "mixes kinds of accelerators"),
        (("cuda:0", "1"), "mixes kinds of accelerators"),
        (("xpu:0",), "no xpu accelerator on this machine"),
        (("gpu:0",), "'gpu' is no kind of accelerator"),
        (("0", UUIDS[1]), "mixes numbers and UUIDs"),
        (("first",), "'first' cannot be ids of NVIDIA devices"),
        (("GPU-ffffffff",), "GPU-ffffffff does not exist"),
    ],
)
def test_wrong_ids_are_refused_with_what_is_there(ids, words):
    with pytest.raises(ConfigError, match=words):
        choose(DeviceRequest(ids, "flag gpu_ids"), {}, CUDA)


def test_a_machine_without_accelerators_says_so():
    with pytest.raises(ConfigError, match="accelerator 0 does not exist; this machine has no accelerator"):
        choose(DeviceRequest(("0",)), {}, Inventory())
    assert choose(DeviceRequest(("0",), cpu=True), {}, Inventory()).variables == {"CUDA_VISIBLE_DEVICES": "0"}


def test_a_kind_may_be_named_with_the_id():
    assert choose(DeviceRequest(("cuda:1", "cuda:0")), {}, ROCM).variables == {"HIP_VISIBLE_DEVICES": "1,0"}
    assert choose(DeviceRequest(("xpu:0.1",)), {}, None).variables == {"ZE_AFFINITY_MASK": "0.1"}


def test_an_exported_variable_is_honoured_and_shown():
    chosen = choose(DeviceRequest(), {"CUDA_VISIBLE_DEVICES": "2,0"}, CUDA)
    assert chosen.variables == {}
    assert chosen.devices == ("2", "0")
    assert chosen.remarks == ("CUDA_VISIBLE_DEVICES=2,0 was exported",)


def test_flags_may_narrow_an_exported_variable_and_not_contradict_it():
    exported = {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert choose(DeviceRequest(("3",)), exported, CUDA).variables == {"CUDA_VISIBLE_DEVICES": "3"}
    assert choose(DeviceRequest((UUIDS[3],)), exported, CUDA).devices == (UUIDS[3],)
    for ids in ("0",), ():
        with pytest.raises(ConfigError, match=r"contradicts CUDA_VISIBLE_DEVICES='2,3'.*flag gpu_ids"):
            choose(DeviceRequest(ids, "flag gpu_ids"), exported, CUDA)


def test_the_variable_that_was_exported_is_the_one_that_is_narrowed():
    chosen = choose(DeviceRequest(("1",)), {"CUDA_VISIBLE_DEVICES": "0,1"}, ROCM)
    assert chosen.variables == {"CUDA_VISIBLE_DEVICES": "1"}


def test_the_order_of_devices():
    assert choose(DeviceRequest(order="pci_bus_id"), {}, CUDA).variables == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    exported = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert "CUDA_DEVICE_ORDER=FASTEST_FIRST was exported" in choose(DeviceRequest(), exported, CUDA).remarks
    with pytest.raises(ConfigError, match="contradicts CUDA_DEVICE_ORDER='FASTEST_FIRST'"):
        choose(DeviceRequest(order="pci_bus_id"), exported, CUDA)
    with pytest.raises(ConfigError, match="has no meaning for Intel"):
        choose(DeviceRequest(order="pci_bus_id"), {}, machine("xpu"))


def test_an_order_that_cannot_be_had_is_refused_and_left_out():
    wanted = DeviceRequest(order="pci_bus_id", order_from="flag device_order")
    what = r"device_order pci_bus_id has no meaning for Intel devices, whose order cannot be chosen"
    with pytest.raises(ConfigError, match=rf"{what} \[flag device_order\]\. Leave device_order out"):
        choose(wanted, {}, machine("xpu"))
    assert choose(DeviceRequest(), {}, machine("xpu")).variables == {}
    exported = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    with pytest.raises(ConfigError, match=r"`unset CUDA_DEVICE_ORDER` or leave device_order out"):
        choose(wanted, exported, CUDA)
    assert choose(wanted, {}, CUDA).variables == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert choose(DeviceRequest(), exported, CUDA).variables == {}


def test_devices_that_cannot_be_hidden_cannot_be_chosen():
    with pytest.raises(ConfigError, match="Apple devices cannot be chosen"):
        choose(DeviceRequest(("0",)), {}, Inventory("mps", "", (Device(0, "M4"),)))


@given(st.permutations(range(4)), st.integers(1, 4))
def test_any_selection_of_what_is_there_is_taken_as_it_was_written(order, count):
    ids = tuple(map(str, order[:count]))
    assert choose(DeviceRequest(ids), {}, CUDA).variables == {"CUDA_VISIBLE_DEVICES": ",".join(ids)}


def test_more_processes_than_accelerators_are_refused():
    check_count(2, ("0", "2"), CUDA)
    check_count(8, (), None)
    with pytest.raises(ConfigError, match=r"3 processes on this machine .* and 2 can be used: 0, 2"):
        check_count(3, ("0", "2"), CUDA)


def test_a_plugin_adds_a_kind_or_replaces_one():
    ours = kind_from({"type": "npu2", "visibility": "NPU2_DEVICES", "communication_backend": "x"})
    kinds = known_kinds([{"type": "tpu", "visibility": "MY_TPU", "communication_backend": "y"}])
    assert ours.visibility == ("NPU2_DEVICES",)
    assert [kind.visibility for kind in kinds if kind.type == "tpu"] == [("MY_TPU",)]
    assert len(kinds) == len(KINDS)


def planned(present, environ, monkeypatch, **overrides):
    """A plan on a machine that is described, since this one may have no accelerator."""
    count = len(present.devices)
    monkeypatch.setattr(planning, "take_inventory", lambda kinds, environ: present)
    monkeypatch.setattr(planning, "count_devices", lambda: count)
    return planning.make_plan(load_config(overrides=overrides, environ={}), environ=environ)


def test_chosen_accelerators_set_the_number_of_processes(monkeypatch):
    assert planned(CUDA, {}, monkeypatch).processes_here == 4
    assert planned(CUDA, {}, monkeypatch, accelerator_ids="2,0").processes_here == 2
    assert planned(CUDA, {}, monkeypatch, accelerator_ids=[]).processes_here == 1
    assert planned(CUDA, {}, monkeypatch, accelerator_ids="all").processes_here == 4
    assert planned(CUDA, {}, monkeypatch, accelerator_ids="2,0", distributed_type="dp").processes_here == 1
    with pytest.raises(ConfigError, match="5 processes"):
        planned(CUDA, {}, monkeypatch, num_processes=5)
    with pytest.raises(ConfigError, match=r"2 processes .* 1 can be used: 3"):
        planned(CUDA, {}, monkeypatch, num_processes=2, accelerator_ids="3")


def test_this_machine_can_be_asked():
    found = take_inventory(known_kinds())
    assert (found.type == "cpu") == (not found.devices)


WORKER = """
import json, os, sys
from drivetrain import Accelerator
accelerator = Accelerator()
seen = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "ZE_AFFINITY_MASK")}
json.dump({**seen, "device": str(accelerator.device)}, open(f"{sys.argv[1]}/{accelerator.process_index}.json", "w"))
"""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("use_cpu=true num_processes=2 accelerator_ids=2,0", {"CUDA_VISIBLE_DEVICES": "2,0"}),
        ("use_cpu=true accelerator_ids=xpu:1", {"ZE_AFFINITY_MASK": "1"}),
        ("use_cpu=true device_order=pci_bus_id", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ("accelerator_ids=[]", {"CUDA_VISIBLE_DEVICES": ""}),
        ("use_cpu=true accelerator_ids=1 distributed_type=dp", {"CUDA_VISIBLE_DEVICES": "1"}),
    ],
)
@pytest.mark.gate("*xpu:1*")
def test_a_real_worker_receives_the_selection(launch, script, tmp_path, settings, expected):
    ended = launch(settings, script(WORKER), tmp_path)
    assert ended.returncode == 0, ended.stderr
    for file in sorted(tmp_path.glob("[0-9].json")):
        seen = json.loads(file.read_text())
        assert {name: value for name, value in seen.items() if value is not None} == {**expected, "device": "cpu"}
    assert (tmp_path / "0.json").exists()


def test_what_hides_the_devices_is_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BackendBlockedError, match=r"no cuda device.*CUDA_VISIBLE_DEVICES='' hides devices.*unset CUDA"):
        pick_device("cuda", ProcessInfo())
    process = ProcessInfo(rank=0, world_size=2, local_rank=0, local_world_size=2)
    with pytest.raises(BackendBlockedError, match=r"'nccl' is for cuda devices.*CUDA_VISIBLE_DEVICES=''"):
        ensure_process_group(process, "cpu", ProcessGroupSettings(communication_backend="nccl"))
