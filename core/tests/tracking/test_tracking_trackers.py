from __future__ import annotations

import json
import logging
import math
import os
import re

import pytest

from drivetrain.errors import UsageError
from drivetrain.logging import set_rank
from drivetrain.registry import Registry, pip_line
from drivetrain.tracking import GeneralTracker, Trackers, on_main_process, register_tracker_class


class Memory(GeneralTracker):
    """Remembers every call."""

    name = "memory"
    requires_logging_directory = False

    def __init__(self, run_name, **kwargs):
        super().__init__()
        self.calls = [("init", run_name, kwargs)]

    @property
    def tracker(self):
        return self.calls

    def start(self):
        self.calls.append("start")

    def store_init_configuration(self, values):
        self.calls.append(("config", values))

    def log(self, values, step=None, **kwargs):
        self.calls.append((values, step, kwargs))

    def finish(self):
        self.calls.append("finish")


class Everywhere(Memory):
    name = "everywhere"
    main_process_only = False


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_run_of_a_registered_class():
    assert register_tracker_class(Memory) is Memory
    trackers = Trackers("MEMORY")
    trackers.init("run", {"lr": 1}, {"memory": {"color": "red"}})
    trackers.log({"loss": 2}, step=3, log_kwargs={"memory": {"commit": True}})
    calls = trackers.get("memory", unwrap=True)
    trackers.finish()
    trackers.finish()
    assert calls == [
        ("init", "run", {"color": "red"}),
        "start",
        ("config", {"lr": 1}),
        ({"loss": 2}, 3, {"commit": True}),
        "finish",
    ]


def test_instances_classes_and_lists():
    instance = Memory("mine")
    trackers = Trackers([instance, Everywhere])
    assert trackers.names == ["memory", "everywhere"]
    trackers.init("run")
    assert trackers.get("memory") is instance
    assert trackers.get("everywhere").calls == [("init", "run", {}), "start"]
    trackers.finish()


def test_other_processes_feed_only_what_wants_it():
    set_rank(1, 2)
    trackers = Trackers([Memory, Everywhere])
    trackers.init("run")
    trackers.log({"a": 1})
    assert [tracker.name for tracker in trackers.running] == ["everywhere"]
    assert trackers.get("everywhere").calls[-1] == ({"a": 1}, None, {})
    with pytest.raises(UsageError, match="'everywhere' is not running"):
        Trackers([Memory, Everywhere]).get("everywhere")
    blank = trackers.get("memory")
    assert (blank.log({"a": 1}), blank.finish(), blank.start()) == (None, None, None)
    trackers.finish()


@pytest.mark.parametrize("unwrap", [False, True])
def test_on_other_processes_a_trackers_own_methods_are_there_and_do_nothing(unwrap):
    set_rank(1, 2)
    trackers = Trackers(Memory)
    trackers.init("run")
    found = trackers.get("memory", unwrap)
    assert isinstance(found, GeneralTracker) is not unwrap
    found.log_images({"samples": [1]}, step=3)
    found.writer.add_figure("loss", None).close()
    found.add_text("prompt", "words")
    found.summary["best"] = found.summary["last"]
    found.config.update({"rate": 0.1}, allow_val_change=True)
    found.url = "nowhere"
    assert list(found.runs()) == []
    with pytest.raises(ZeroDivisionError), found.span("epoch") as span:
        span.note(1 / 0)
    assert not found.run
    with pytest.raises(UsageError, match="has no tracker 'other'"):
        trackers.get("other", unwrap)
    trackers.finish()


def test_every_process_lists_the_same_trackers():
    listed = {}
    for rank in (0, 1):
        set_rank(rank, 2)
        trackers = Trackers([Everywhere, Memory])
        assert trackers.shown == []
        trackers.init("run")
        listed[rank] = [tracker.name for tracker in trackers.shown]
        trackers.shown[1].tracker.append("own")
        trackers.shown[1].log_images({"samples": [1]}) if rank else None
        trackers.finish()
        assert trackers.shown == []
    assert listed == {0: ["everywhere", "memory"], 1: ["everywhere", "memory"]}


READ = {
    "compared": lambda run: max(run.summary["best"], 0.5),
    "added": lambda run: 1 + run.step,
    "a path": lambda run: os.path.join(run.dir, "samples"),  # noqa: PTH118 (as guides write it)
    "a number": lambda run: float(run.summary["best"]),
    "formatted": lambda run: f"{run.summary['best']:.3f}",
}


@pytest.mark.parametrize("read", READ)
def test_a_value_of_a_run_is_the_main_process_s(read):
    set_rank(1, 2)
    trackers = Trackers(Memory)
    trackers.init("run")
    run = trackers.get("memory", unwrap=True)
    assert f"{run.url}" == repr(run)
    assert len(run.history) == 0
    with pytest.raises(UsageError, match=r"read on rank 1.*\n?.*if accelerator.is_main_process"):
        READ[read](run)
    trackers.finish()


def test_a_second_init_ends_the_first_run():
    trackers = Trackers(Memory)
    trackers.init("one")
    first = trackers.get("memory")
    trackers.init("two")
    assert first.calls[-1] == "finish"
    assert [tracker.calls[0][1] for tracker in trackers.running] == ["two"]
    trackers.finish()


def test_one_that_fails_is_named_and_the_others_go_on(caplog):
    class Failing(Memory):
        name = "failing"

        def log(self, values, step=None, **kwargs):
            raise RuntimeError("disk full")

        def finish(self):
            raise RuntimeError("still full")

    trackers = Trackers([Memory, Failing, Everywhere])
    trackers.init("run")
    memory, everywhere = trackers.get("memory"), trackers.get("everywhere")
    trackers.log({"a": 1})
    trackers.log({"a": 2})
    trackers.finish()
    assert memory.calls[-3:] == everywhere.calls[-3:] == [({"a": 1}, None, {}), ({"a": 2}, None, {}), "finish"]
    assert trackers.running == []
    first, last = caplog.records
    assert first.getMessage() == "the tracker 'failing' failed in log"
    assert str(first.exc_info[1]) == "disk full"
    assert last.getMessage() == "the tracker 'failing' failed 3 times in this run"


def test_one_that_cannot_begin_raises():
    class Failing(Memory):
        name = "failing"

        def start(self):
            raise RuntimeError("no such project")

    with pytest.raises(RuntimeError, match="no such project"):
        Trackers([Failing]).init("run")


def test_nothing_asked_for_is_nothing_done(caplog):
    trackers = Trackers()
    trackers.init("run", {"a": 1})
    trackers.log({"a": 1})
    trackers.finish()
    assert not caplog.records


def test_words_about_what_goes_nowhere(caplog):
    caplog.set_level(logging.WARNING)
    trackers = Trackers(Memory)
    trackers.log({"a": 1})
    trackers.log({"a": 2})
    trackers.init("run", init_kwargs={"wandb": {"mode": "offline"}})
    trackers.finish()
    assert [record.getMessage() for record in caplog.records] == [
        "log() was called while no tracker runs; call init_trackers(project_name) before.",
        "init_kwargs names wandb, which this run does not feed.",
    ]
    Trackers(Memory).log({"a": 1})
    assert len(caplog.records) == 3  # another run


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: Trackers("tensorbord", "x"),
            r"no tracker is called 'tensorbord'; there are jsonl.*Did you mean 'tensorboard'",
        ),
        (lambda: Trackers("jsonl"), "writes files and was given no folder. Pass a local project_dir"),
        (lambda: Trackers(Memory).get("memory"), "not running. Call init_trackers"),
        (lambda: Trackers(Memory).get("jsonl"), "this run has no tracker 'jsonl'; it has memory"),
        (lambda: register_tracker_class(dict), "is not a tracker"),
        (
            lambda: register_tracker_class(type("Jsonl", (Memory,), {"name": "JSONL"})),
            "the tracker name 'JSONL' is taken",
        ),
        (type("Half", (GeneralTracker,), {"name": "half"}), "Half lacks requires_logging_directory, tracker"),
    ],
)
def test_mistakes(ask, message):
    with pytest.raises(UsageError, match=message):
        ask()


def test_a_tracker_with_the_attributes_that_it_lacked_is_made():
    attributes = {"name": "half", "requires_logging_directory": False, "tracker": None}
    assert type("Half", (GeneralTracker,), attributes)().name == "half"

    class Late(GeneralTracker):
        def __init__(self):
            vars(self).update(attributes)
            super().__init__()

    assert Late().name == "half"


def test_what_is_not_installed_gives_the_line_to_type(monkeypatch):
    monkeypatch.setattr("drivetrain.registry.get_registry", lambda: Registry(entry_points=()))
    with pytest.raises(UsageError, match=rf"'wandb' is not installed\. Run: {re.escape(pip_line('wandb'))}"):
        Trackers("wandb")
    register_tracker_class(Memory)
    assert Trackers("all", "somewhere").names == ["jsonl", "memory"]


def test_all_leaves_out_what_has_no_folder(caplog):
    register_tracker_class(Memory)
    assert "jsonl" not in Trackers("all").names
    assert "memory" in Trackers("all").names
    assert "leaves out jsonl" in caplog.text


def test_a_plugins_tracker_that_cannot_be_imported(monkeypatch):
    class Registry:
        def trackers(self):
            return {"ghost": "no_such_module:Ghost", "number": "json:loads"}

    monkeypatch.setattr("drivetrain.registry.get_registry", Registry)
    with pytest.raises(UsageError, match="'ghost' could not be imported"):
        Trackers("ghost").init("run")
    with pytest.raises(UsageError, match="'number' does not derive from GeneralTracker"):
        Trackers("number").init("run")


def test_methods_on_the_main_process():
    class Decorated(Memory):
        log = on_main_process(Memory.log)

    tracker = Decorated("run")
    set_rank(1, 2)
    tracker.log({"a": 1})
    assert len(tracker.calls) == 1
    tracker.main_process_only = False
    tracker.log({"a": 1})
    assert len(tracker.calls) == 2


def test_jsonl(tmp_path):
    import torch

    trackers = Trackers("jsonl", tmp_path)
    trackers.init("run", {"lr": 0.1, "layers": (1, 2), "path": tmp_path})
    trackers.log({"loss": torch.tensor(0.5), "rows": torch.ones(2, dtype=torch.int32), "bad": math.nan}, step=1)
    trackers.finish()
    again = Trackers("jsonl", tmp_path)
    again.init("run")
    again.log({"note": "resumed"}, log_kwargs={"jsonl": {"phase": "eval"}})
    again.finish()
    first, second = read(tmp_path / "run" / "metrics.jsonl")
    assert first.pop("time") <= second.pop("time")
    assert first == {"step": 1, "loss": 0.5, "rows": [1, 1], "bad": "nan"}
    assert second == {"step": None, "note": "resumed", "phase": "eval"}
    config = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert config == {"lr": 0.1, "layers": [1, 2], "path": str(tmp_path)}
