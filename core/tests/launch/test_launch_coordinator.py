"""What the coordinator of several nodes decides, on a clock of the test's own."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from drivetrain.config.schema import RendezvousConfig
from drivetrain.launch.coordinator import Coordinator, JobState, NodeStatus
from drivetrain.launch.plan import LaunchPlan


class Story:
    """Nodes that say what the test wants them to say; a second passes between two updates."""

    def __init__(self, minimum=2, maximum=2, max_restarts=0, last_call=30.0):
        timeouts = RendezvousConfig(timeout_seconds=100.0, last_call_seconds=last_call, lost_after_seconds=5.0)
        plan = LaunchPlan(maximum, 1, maximum, fewest_machines=minimum, max_restarts=max_restarts, rendezvous=timeouts)
        self.coordinator = Coordinator(plan, 0.0)
        self.now, self.nodes, self.silent = 0.0, {}, set()

    @property
    def state(self) -> JobState:
        return self.coordinator.state

    def comes(self, *machines, life=0):
        for machine in machines:
            name = f"{machine}/{life}"
            self.nodes[machine] = NodeStatus(machine, name, f"host{machine}", f"10.0.0.{machine}", self.state.round + 1)
        return self

    def says(self, machine, **changes):
        self.nodes[machine] = replace(self.nodes[machine], **changes)
        return self

    def passes(self, seconds=1):
        """Rounds begin as soon as they may."""
        for _ in range(seconds):
            self.now += 1.0
            for machine, status in self.nodes.items():
                if machine not in self.silent:
                    self.coordinator.hear(status, self.now)
            if self.coordinator.update(self.now):
                self.coordinator.begin(1000 + self.state.next_round)
        return self

    @property
    def members(self):
        return [member.node for member in self.state.members]


def test_a_round_begins_when_all_are_there_in_the_order_of_their_numbers():
    story = Story(minimum=3, maximum=3).comes(2, 0).passes(3)
    assert story.state.round == 0
    story.comes(1).passes()
    assert (story.state.round, story.state.port, story.members) == (1, 1001, [0, 1, 2])
    assert [story.state.index_of(name) for name in ("0/0", "1/0", "2/0", "1/1")] == [0, 1, 2, None]
    assert JobState.from_dict(json.loads(json.dumps(asdict(story.state)))) == story.state


def test_who_did_not_come_is_named():
    story = Story(minimum=4, maximum=4).comes(0, 2).passes(102)
    assert story.state.over == (
        "after 100 seconds machine 0 (host0, 10.0.0.0), machine 2 (host2, 10.0.0.2) came, machines 1, 3 did not"
    )
    assert Story(minimum=2, maximum=3).comes(0).passes(102).state.over == (
        "after 100 seconds machine 0 (host0, 10.0.0.0) came, machines 1, 2 did not (at least 2 are needed)"
    )


def test_with_a_range_the_last_call_begins_anew_when_one_more_comes():
    story = Story(minimum=1, maximum=4, last_call=5.0).comes(0).passes(4).comes(3).passes(4)
    assert story.state.round == 0
    assert story.passes(3).members == [0, 3]


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_silent_machine_is_lost_and_what_follows_depends_on_the_restarts(restarts):
    story = Story(max_restarts=restarts).comes(0, 1).passes()
    story.silent.add(1)
    story.passes(8)
    sentence = "machine 1 (host1, 10.0.0.1) was lost: no sign of life for 5 seconds"
    assert story.state.departures == {1: sentence}
    assert (story.state.over, story.state.next_round) == ((sentence, 1) if restarts == 0 else (None, 2))


def test_a_machine_that_comes_back_makes_the_next_round_complete():
    story = Story(max_restarts=1).comes(0, 1).passes()
    story.comes(1, life=1).passes()  # before anybody missed it
    assert (story.state.next_round, story.state.over) == (2, None)
    story.says(0, ready=2).passes()
    assert (story.state.round, story.members) == (2, [0, 1])
    story.comes(1, life=2).passes()
    assert story.state.over == "machine 1 (host1, 10.0.0.1) was started again"  # the one restart is used up


def test_failing_workers_call_all_to_the_next_round_and_count_once():
    story = Story(max_restarts=1).comes(0, 1).passes().says(1, ready=2, why="rank 1 failed: Oops").passes()
    assert (story.state.next_round, story.state.failures) == (2, 1)
    story.says(0, ready=2).passes()
    assert (story.state.round, story.state.over) == (2, None)
    story.says(0, ready=3, why="rank 0 failed: Oops").passes()
    assert story.state.over == "machine 0 (host0, 10.0.0.0): rank 0 failed: Oops"
    assert story.state.failures == 2


def test_fewer_go_on_only_when_the_lost_one_is_known_to_be_lost():
    story = Story(minimum=1, maximum=2, max_restarts=1, last_call=1.0).comes(0, 1).passes()
    story.silent.add(1)
    story.says(0, ready=2).passes(4)  # it may only be slow to stop its workers
    assert story.state.round == 1
    story.passes(4)
    assert (story.state.round, story.members, story.state.over) == (2, [0], None)


def test_one_that_joins_is_no_failure():
    story = Story(minimum=1, maximum=2, last_call=1.0).comes(0).passes(4)
    assert story.members == [0]
    story.comes(1).passes()
    assert (story.state.next_round, story.state.over) == (2, None)
    assert story.says(0, ready=2).passes().members == [0, 1]


def test_one_that_failed_for_good_ends_the_run_of_all():
    story = Story(max_restarts=9).comes(0, 1).passes().says(1, left="failed", why="rank 1 failed: Oops").passes()
    assert story.state.over == "machine 1 (host1, 10.0.0.1): rank 1 failed: Oops"
    assert story.state.departures == {1: story.state.over}
    assert story.state.present == (0, 1)
    assert story.says(1, done=True).passes().state.present == (0,)


def test_one_that_was_told_to_go_is_lost_at_once():
    story = Story(minimum=1, max_restarts=1, last_call=1.0).comes(0, 1).passes()
    story.says(1, left="interrupted", why="was stopped by SIGTERM", done=True).passes()
    assert story.state.next_round == 2
    assert story.says(0, ready=2).passes(3).members == [0]


def test_what_finished_cannot_be_trained_again():
    story = Story(minimum=1, max_restarts=9).comes(0, 1).passes().says(0, left="finished").passes()
    assert (story.state.over, story.state.next_round) == (None, 1)
    story.silent.add(1)
    assert "machine 0 (host0, 10.0.0.0) had finished" in story.passes(7).state.over


def test_a_second_launcher_of_one_rank_is_a_rival_until_the_first_is_lost_or_left():
    story = Story().comes(0, 1).passes()
    second = replace(story.nodes[1], id="another")
    coordinator, first = story.coordinator, story.nodes[1]
    assert coordinator.rival(first, 1.0) is None
    assert coordinator.rival(second, 1.0) == (first, 1.0)
    assert coordinator.rival(second, 7.0) is None
    story.says(1, left="finished").passes()
    assert coordinator.rival(second, story.now) is None
