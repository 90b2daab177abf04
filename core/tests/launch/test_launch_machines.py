"""What machine 0 decides about the others, on a clock of the test's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drivetrain.launch.machines import Board, Card, RollCall, Rules


class Story:
    """Machines that say what the test wants them to say; a second passes between two looks."""

    def __init__(self, **rules):
        self.roll = RollCall(Rules(**{"minimum": 2, "maximum": 2, "timeout": 100.0, "lost_after": 5.0, **rules}), 0.0)
        self.now, self.cards, self.silent = 0.0, {}, set()

    @property
    def board(self) -> Board:
        return self.roll.board

    def comes(self, *machines, life=0):
        for machine in machines:
            name = f"{machine}/{life}"
            self.cards[machine] = Card(machine, name, f"host{machine}", f"10.0.0.{machine}", self.board.round + 1)
        return self

    def says(self, machine, **changes):
        self.cards[machine] = replace(self.cards[machine], **changes)
        return self

    def passes(self, seconds=1):
        """Rounds begin as soon as they may."""
        for _ in range(seconds):
            self.now += 1.0
            for machine, card in self.cards.items():
                if machine not in self.silent:
                    self.roll.hear(card, int(self.now), self.now)
            if self.roll.look(self.now):
                self.roll.begin(1000 + self.board.called)
        return self

    @property
    def members(self):
        return [card.machine for card in self.board.members]


def test_a_round_begins_when_all_are_there_in_the_order_of_their_numbers():
    story = Story(minimum=3, maximum=3).comes(2, 0).passes(3)
    assert story.board.round == 0
    story.comes(1).passes()
    assert (story.board.round, story.board.port, story.members) == (1, 1001, [0, 1, 2])
    assert [story.board.place_of(name) for name in ("0/0", "1/0", "2/0", "1/1")] == [0, 1, 2, None]
    assert Board.from_json(story.board.to_json()) == story.board


def test_who_did_not_come_is_named():
    story = Story(minimum=4, maximum=4).comes(0, 2).passes(102)
    assert story.board.over == (
        "after 100 seconds machine 0 (host0, 10.0.0.0), machine 2 (host2, 10.0.0.2) came, machines 1, 3 did not"
    )
    assert Story(minimum=2, maximum=3).comes(0).passes(102).board.over == (
        "after 100 seconds machine 0 (host0, 10.0.0.0) came, machines 1, 2 did not (at least 2 are needed)"
    )


def test_with_a_range_the_last_call_begins_anew_when_one_more_comes():
    story = Story(minimum=1, maximum=4, last_call=5.0).comes(0).passes(4).comes(3).passes(4)
    assert story.board.round == 0
    assert story.passes(3).members == [0, 3]


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_silent_machine_is_lost_and_what_follows_depends_on_the_restarts(restarts):
    story = Story(max_restarts=restarts).comes(0, 1).passes()
    story.silent.add(1)
    story.passes(8)
    sentence = "machine 1 (host1, 10.0.0.1) was lost: no sign of life for 5 seconds"
    assert story.board.fates == {1: sentence}
    assert (story.board.over, story.board.called) == ((sentence, 1) if restarts == 0 else (None, 2))


def test_a_machine_that_comes_back_makes_the_next_round_complete():
    story = Story(max_restarts=1).comes(0, 1).passes()
    story.comes(1, life=1).passes()  # before anybody missed it
    assert (story.board.called, story.board.over) == (2, None)
    story.says(0, ready=2).passes()
    assert (story.board.round, story.members) == (2, [0, 1])
    story.comes(1, life=2).passes()
    assert story.board.over == "machine 1 (host1, 10.0.0.1) was started again"  # the one restart is used up


def test_failing_workers_call_all_to_the_next_round_and_count_once():
    story = Story(max_restarts=1).comes(0, 1).passes().says(1, ready=2).passes()
    assert story.board.called == 2
    story.says(0, ready=2).passes()
    assert (story.board.round, story.board.over) == (2, None)
    assert story.says(0, ready=3).passes().board.over == "workers of machine 0 (host0, 10.0.0.0) failed"


def test_fewer_go_on_only_when_the_lost_one_is_known_to_be_lost():
    story = Story(minimum=1, maximum=2, max_restarts=1, last_call=1.0).comes(0, 1).passes()
    story.silent.add(1)
    story.says(0, ready=2).passes(4)  # it may only be slow to stop its workers
    assert story.board.round == 1
    story.passes(4)
    assert (story.board.round, story.members, story.board.over) == (2, [0], None)


def test_one_that_joins_is_no_failure():
    story = Story(minimum=1, maximum=2, last_call=1.0).comes(0).passes(4)
    assert story.members == [0]
    story.comes(1).passes()
    assert (story.board.called, story.board.over) == (2, None)
    assert story.says(0, ready=2).passes().members == [0, 1]


def test_one_that_failed_for_good_ends_the_run_of_all():
    story = Story(max_restarts=9).comes(0, 1).passes().says(1, fate="failed", why="rank 1 failed: Oops").passes()
    assert story.board.over == "machine 1 (host1, 10.0.0.1): rank 1 failed: Oops"
    assert story.board.fates == {1: story.board.over}
    assert story.board.here == (0, 1)
    assert story.says(1, bye=True).passes().board.here == (0,)


def test_one_that_was_told_to_go_is_lost_at_once():
    story = Story(minimum=1, max_restarts=1, last_call=1.0).comes(0, 1).passes()
    story.says(1, fate="gone", why="was stopped by SIGTERM", bye=True).passes()
    assert story.board.called == 2
    assert story.says(0, ready=2).passes(3).members == [0]


def test_what_finished_cannot_be_trained_again():
    story = Story(minimum=1, max_restarts=9).comes(0, 1).passes().says(0, fate="finished").passes()
    assert (story.board.over, story.board.called) == (None, 1)
    story.silent.add(1)
    assert "machine 0 (host0, 10.0.0.0) had finished" in story.passes(7).board.over
