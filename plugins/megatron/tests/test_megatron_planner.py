"""Schedules on paper: the simulator, the search and the drawings; and that the lists are those that torch runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from itertools import product
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.api import UsageError
from drivetrain.api.programs import pip_line
from drivetrain_megatron.commands import plan
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.planner.actions import Action, ActionLists, parse
from drivetrain_megatron.planner.catalogue import (
    SCHEDULES,
    check,
    classic_bubble,
    find,
    nearest,
    theoretical_bubble,
)
from drivetrain_megatron.planner.costs import Costs, costs
from drivetrain_megatron.planner.inputs import count_list, number_list, read_costs, size
from drivetrain_megatron.planner.measured import Recorder, costs_of, last_step, timeline
from drivetrain_megatron.planner.planning import Request, plan_best, plan_one
from drivetrain_megatron.planner.search import Batch, search
from drivetrain_megatron.planner.simulate import simulate
from drivetrain_megatron.planner.text import draw
from drivetrain_testing import spawn

EXACT = 1e-9
"""Sums of a few hundred floats near 1 in another order: an error of 1e-13 is seen, 1e-9 is never reached."""

ranks, counts = st.integers(1, 5), st.integers(1, 9)
times = st.floats(0.1, 10)


def gpipe(num_ranks, num_micro_batches):
    """All forwards, then all backwards."""
    steps = [(kind, m) for kind in "FB" for m in range(num_micro_batches)]
    return ActionLists(tuple(tuple(Action(kind, rank, m) for kind, m in steps) for rank in range(num_ranks)))


def one_forward_one_backward(num_ranks, num_micro_batches):
    """As many forwards first as there are ranks from here to the end, then backward and forward in turn."""

    def of(rank):
        ahead = min(num_ranks - rank, num_micro_batches)
        steps = [("F", m) for m in range(ahead)]
        for m in range(num_micro_batches):
            steps += [("B", m)] + ([("F", m + ahead)] if m + ahead < num_micro_batches else [])
        return tuple(Action(kind, rank, m) for kind, m in steps)

    return ActionLists(tuple(map(of, range(num_ranks))))


@st.composite
def random_lists(draw_from):
    """Lists that cannot block: each rank got its actions in an order in which a job once ran them."""
    num_ranks, num_micro_batches = draw_from(st.integers(1, 3)), draw_from(counts)
    num_stages = num_ranks * draw_from(st.integers(1, 2))
    owner = [stage % num_ranks for stage in range(num_stages)]
    split = draw_from(st.booleans())
    done, lists = set(), [[] for _ in range(num_ranks)]
    left = set(product("FIW" if split else "FB", range(num_stages), range(num_micro_batches)))

    def possible(kind, stage, m):
        if kind == "F":
            return stage == 0 or ("F", stage - 1, m) in done
        if kind == "W":
            return ("I", stage, m) in done
        return ("F", stage, m) in done and (stage == num_stages - 1 or (kind, stage + 1, m) in done)

    shuffle = draw_from(st.randoms(use_true_random=False))
    while left:
        chosen = shuffle.choice(sorted(each for each in left if possible(*each)))
        left.remove(chosen)
        done.add(chosen)
        lists[owner[chosen[1]]].append(Action(*chosen))
    return ActionLists(tuple(map(tuple, lists)))


@st.composite
def uneven(draw_from, lists):
    """Costs of each stage of some lists."""
    column = st.lists(times, min_size=lists.num_stages, max_size=lists.num_stages)
    sizes = st.lists(st.integers(0, 1000), min_size=lists.num_stages, max_size=lists.num_stages)
    return costs(
        draw_from(column),
        backward=draw_from(column),
        weight_share=draw_from(st.floats(0, 1)),
        activations=draw_from(sizes),
        resident=draw_from(sizes),
        transfer=draw_from(st.floats(0, 3)),
        gap=draw_from(st.floats(0, 1)),
        split=draw_from(st.floats(1, 2)),
    )


class TestSimulator:
    @given(ranks, counts, times, times)
    def test_gpipe_and_1f1b_have_the_bubble_of_theory(self, p, m, forward, backward):
        equal = costs([forward] * p, backward=[backward])
        for lists in (gpipe(p, m), one_forward_one_backward(p, m)):
            timeline = simulate(lists, equal)
            assert timeline.duration == pytest.approx((m + p - 1) * (forward + backward), rel=EXACT)
            assert timeline.bubble == pytest.approx(classic_bubble(p, m), abs=EXACT)

    @given(ranks, counts)
    def test_1f1b_holds_what_is_on_its_way_and_gpipe_everything(self, p, m):
        sizes = costs([1.0] * p, activations=[7.0], resident=[100.0])
        assert simulate(gpipe(p, m), sizes).peak_bytes == (100 + 7 * m,) * p
        held = simulate(one_forward_one_backward(p, m), sizes)
        assert held.peak_activations == tuple(min(m, p - rank) for rank in range(p))
        assert held.peak_bytes == tuple(100 + 7 * min(m, p - rank) for rank in range(p))

    def test_what_waits_for_the_weights_is_still_held(self):
        lists = parse([["0F0", "0F1", "0I0", "0F2", "0I1", "0I2", "0W0", "0W1", "0W2"]])
        held = simulate(lists, costs([1.0], activations=[8.0], resident=[100.0], kept_for_weights=0.25))
        assert held.peak_bytes == (100 + 8 + 8 + 2,)  # before 0I1: micro-batches 1 and 2, and a quarter of 0
        assert held.peak_activations == (3,)
        assert simulate(lists, costs([1.0], activations=[8.0])).peak_bytes == (24,)

    @given(st.data())
    @settings(max_examples=60, deadline=None)
    def test_every_action_waits_for_what_it_needs_and_for_nothing_else(self, data):
        lists = data.draw(random_lists())
        price = data.draw(uneven(lists))
        timeline = simulate(lists, price)
        bars = [bar for row in timeline.bars for bar in row]
        ends = {(bar.action.kind, bar.action.stage, bar.action.micro_batch): bar for bar in bars}
        for row in timeline.bars:
            free = 0.0
            for bar in row:
                kind, stage, m = bar.action.kind, bar.action.stage, bar.action.micro_batch
                before = {
                    "F": [("F", stage - 1, m)],
                    "B": [("B", stage + 1, m), ("F", stage, m)],
                    "I": [("I", stage + 1, m), ("F", stage, m)],
                    "W": [("I", stage, m)],
                }[kind]
                needed = [ends[key] for key in before if key in ends]
                arrivals = [each.end + (price.transfer if each.rank != bar.rank else 0) for each in needed]
                assert bar.start == max([free, *arrivals])
                free = bar.end + price.gap
        apart = price.split if any(bar.action.kind == "I" for bar in bars) else 1
        backward = sum(price.backward_input) + sum(price.backward_weight)
        work = (sum(price.forward) + backward * apart) * lists.num_micro_batches
        assert sum(timeline.busy) == pytest.approx(work, rel=EXACT)
        assert 0 <= timeline.bubble < 1
        assert all(-EXACT <= idle < 1 for idle in timeline.idle)

    @given(st.data())
    @settings(max_examples=40, deadline=None)
    def test_slower_never_ends_sooner(self, data):
        lists = data.draw(random_lists())
        price = data.draw(uneven(lists))
        slower = costs(
            [value + data.draw(times) for value in price.forward],
            backward=[a + b for a, b in zip(price.backward_input, price.backward_weight, strict=True)],
            weight_share=[b / (a + b) for a, b in zip(price.backward_input, price.backward_weight, strict=True)],
            transfer=price.transfer + data.draw(st.floats(0, 2)),
            gap=price.gap,
            split=price.split,
        )
        assert simulate(lists, slower).duration >= simulate(lists, price).duration * (1 - EXACT)

    def test_lists_that_block_each_other_are_told_where(self):
        lists = parse([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]])
        with pytest.raises(ValueError, match="rank 0 at 0B0, rank 1 at 1F1"):
            simulate(lists, costs([1.0, 1.0]))

    @pytest.mark.parametrize(
        ("broken", "said"),
        [
            ([["0F0", "0B0", "0F0", "0B0"]], "stage 0 runs F B F B"),
            ([["0B0", "0F0"]], "stage 0 runs B F"),
            ([["0F0", "0I0"]], "stage 0 runs F I"),
            ([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0"]], "need 4 forwards, there are 3"),
            ([["0F0", "0B0"], ["0F1", "0B1"]], "stage 0 is on more than one rank"),
        ],
    )
    def test_lists_that_are_not_whole_are_refused(self, broken, said):
        with pytest.raises(ValueError, match=said):
            parse(broken)


class TestCosts:
    @given(st.lists(times, min_size=1, max_size=4), st.integers(1, 4), st.floats(0, 0.1))
    def test_cutting_and_joining_keeps_the_work_beside_the_overhead(self, forward, parts, overhead):
        price = costs(forward, overhead=overhead, activations=[8.0], resident=[16.0])
        finer = price.for_stages(len(forward) * parts)
        extra = (parts - 1) * len(forward) * 2 * overhead
        assert finer.work == pytest.approx(price.work + extra, rel=EXACT)
        assert sum(finer.activations) == pytest.approx(sum(price.activations))
        assert finer.for_stages(len(forward)).forward == pytest.approx(price.forward, rel=EXACT)

    @given(times, st.floats(0, 1), st.floats(0.1, 8), st.floats(0.1, 8))
    def test_resizing_twice_is_resizing_once(self, forward, overhead, first, second):
        price = costs([forward], overhead=overhead)
        twice = price.resized(first).resized(second)
        # A time below the overhead is all overhead, and stays so.
        if forward > overhead:
            assert twice.forward == pytest.approx(price.resized(first * second).forward, rel=EXACT)

    def test_three_stages_say_nothing_about_two(self):
        with pytest.raises(UsageError, match="costs of 3 stages say nothing about 2"):
            costs([1.0] * 3).for_stages(2)

    @pytest.mark.parametrize(
        ("wrong", "said", "advised"),
        [
            (
                {"backward": [1.0, 2.0]},
                r"different lengths: \{'forward': 3, 'backward_input': 2, .*\}\. Give one number for each stage, or a",
                [{"backward": [1.0, 2.0, 2.0]}, {"backward": [2.0]}],
            ),
            (
                {"activations": [-1.0]},
                r"activations of a stage is negative or not finite: \[-1\.0, -1\.0, -1\.0\]\. Give finite numbers",
                [{"activations": [0.0]}],
            ),
            (
                {"weight_share": 1.5},
                r"1\.5 of the backward for the weights\. Use a share from 0",
                [{"weight_share": 1}],
            ),
            ({"kept_for_weights": 2}, r"2 of the activations wait for .*\. Use 0 to 1\.", [{"kept_for_weights": 1}]),
            ({"split": 0}, r"a backward take 0 times its time\. Use 1 or more: the parts' times over", [{"split": 1}]),
        ],
    )
    def test_costs_that_cannot_be_are_refused_and_those_that_are_advised_are_not(self, wrong, said, advised):
        with pytest.raises(UsageError, match=said):
            costs([1.0, 1.0, 1.0], **wrong)
        for each in advised:
            assert costs([1.0, 1.0, 1.0], **each).num_stages == 3


ANY = ("gpipe", "zbv")

MODEL = """
from torch import nn

NUMBER = 3


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())


def nothing():
    pass
"""


def accepts(section, num_ranks):
    """Whether the backend trains with this section."""
    from drivetrain_megatron.pipeline.schedules import wanted_parts

    try:
        wanted_parts(section, num_ranks)
    except UsageError:
        return False
    return True


def all_numbers(most_ranks, most_micro_batches):
    for schedule in SCHEDULES.values():
        for p in range(1, most_ranks + 1):
            for v in [schedule.stages_per_rank] if schedule.stages_per_rank else [1, 2, 3]:
                for m in range(1, most_micro_batches + 1):
                    yield schedule, p, v, m


class TestTorchsLists:
    def test_our_rules_are_those_of_torch_and_of_the_backend_and_no_list_blocks(self):
        from drivetrain_megatron.planner.engine_lists import action_lists, build

        for schedule, p, v, m in all_numbers(4, 10):
            try:
                build(schedule, p, v, 0, m)
                taken = True
            except ValueError:
                taken = False
            # Torch lets a looped schedule run with fewer micro-batches than ranks, all of whose rounds are then one.
            assert schedule.takes(p, v, m) == (taken and (m >= p or schedule.name in ANY)), (schedule.name, p, v, m)
            section = MegatronConfig(schedule=schedule.name, num_micro_batches=m, stages_per_rank=v)
            # One micro-batch runs under every schedule: the stages one after the other.
            assert accepts(section, p) == (m == 1 or schedule.takes(p, v, m)), (schedule.name, p, v, m)
            if schedule.takes(p, v, m):
                lists = action_lists(schedule.name, p, v, m)
                assert (lists.num_stages, lists.num_micro_batches) == (p * v, m)
                timeline = simulate(lists, costs([1.0] * (p * v)))
                expected = theoretical_bubble(schedule, p, v, m)
                if expected is not None:
                    assert timeline.bubble == pytest.approx(expected, abs=EXACT), (schedule.name, p, v, m)

    @pytest.mark.parametrize("name", SCHEDULES)
    @pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (3, 6)])
    def test_a_list_is_what_torchs_class_asks_its_stages_for(self, name, p, m):
        from drivetrain_megatron.planner.engine_lists import action_lists, build, run_noting

        schedule = find(name)
        v = schedule.stages_per_rank or 2
        lists = action_lists(name, p, v, m)
        for rank in range(p):
            built, noted = build(schedule, p, v, rank, m)
            run_noting(built, m)
            assert tuple(noted) == lists.ranks[rank]

    @pytest.mark.parametrize("name", SCHEDULES)
    @pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (3, 6)])
    def test_messages_are_asked_for_before_they_are_used_and_come_from_another_rank(self, name, p, m):
        from drivetrain_megatron.planner.engine_lists import action_lists, messages_asked_for

        v = find(name).stages_per_rank or 2
        lists = action_lists(name, p, v, m)
        asked = messages_asked_for(name, p, v, m)
        for rank, actions in enumerate(lists.ranks):
            assert len(asked[rank]) == len(actions)
            for place, early in enumerate(asked[rank]):
                for one in early:
                    assert lists.owner[one.stage - 1 if one.kind == "F" else one.stage + 1] != rank
                    kinds = {"F"} if one.kind == "F" else {"B", "I"}
                    later = actions[place + 1 :]
                    assert any(
                        (a.stage, a.micro_batch) == (one.stage, one.micro_batch) and a.kind in kinds for a in later
                    )
        assert any(early for each in asked for early in each) == (name not in ("gpipe", "1f1b"))

    def test_the_lists_of_gpipe_and_1f1b_are_the_textbooks(self):
        from drivetrain_megatron.planner.engine_lists import action_lists

        assert action_lists("gpipe", 4, 1, 6) == gpipe(4, 6)
        assert action_lists("gpipe", 4, 1, 2) == gpipe(4, 2)
        assert action_lists("1f1b", 4, 1, 6) == one_forward_one_backward(4, 6)

    @given(times, times, st.floats(0.0, 1.0), st.integers(2, 4), st.integers(1, 3))
    @settings(max_examples=20, deadline=None)
    def test_theory_holds_for_other_times_too(self, forward, backward, share, p, rounds):
        """Of 1F1B interleaved, and of ZB-H1 as long as the weights' part is the shorter one."""
        from drivetrain_megatron.planner.engine_lists import action_lists

        for name, v in (("interleaved_1f1b", 2), ("zero_bubble", 1)):
            price = costs([forward / v] * (p * v), backward=[backward / v], weight_share=share / 2)
            halves = (forward, backward * (1 - share / 2), backward * share / 2)
            expected = theoretical_bubble(find(name), p, v, p * rounds, halves)
            if name == "zero_bubble" and forward < halves[2]:
                continue
            assert simulate(action_lists(name, p, v, p * rounds), price).bubble == pytest.approx(expected, abs=EXACT)


class TestRules:
    @given(st.sampled_from(list(SCHEDULES)), ranks, st.integers(1, 3), st.integers(1, 40))
    def test_what_is_named_instead_works_and_is_the_nearest(self, name, p, v, m):
        schedule = find(name)
        v = schedule.stages_per_rank or v
        near = nearest(schedule, p, v, m)
        assert all(schedule.takes(p, v, count) for count in near)
        between = range(min(near) + 1 if len(near) == 2 else 1, max(near))
        assert not any(schedule.takes(p, v, count) for count in between if count != m)

    @pytest.mark.parametrize(
        ("name", "numbers", "said", "advised"),
        [
            ("dualpipev", (4, 2, 6), r"at least 2p \(p = 4\)\. Use 8 micro-batches", [("dualpipev", (4, 2, 8))]),
            (
                "1f1b",
                (4, 1, 3),
                r"stages a rank: 1, does not take 3 .* p \(p = 4\)\. Use 4 micro-batches .*, or the schedule g",
                [("1f1b", (4, 1, 4)), ("gpipe", (4, 1, 3))],
            ),
            (
                "interleaved_1f1b",
                (2, 2, 5),
                r"Use 4 or 6 micro-batches",
                [("interleaved_1f1b", (2, 2, count)) for count in (4, 6)],
            ),
            (
                "zbv",
                (2, 3, 4),
                r"'zbv' holds 2 stages a rank, not 3\. Use 2; with 3: interleaved_1f1b, zero_bubble\.",
                [("zbv", (2, 2, 4)), ("interleaved_1f1b", (2, 3, 4)), ("zero_bubble", (2, 3, 4))],
            ),
            ("gpipe", (2, 2, 4), r"'gpipe' holds 1 stage a rank, not 2\. Use 1; with 2: int", [("gpipe", (2, 1, 4))]),
            ("gpipe", (0, 1, 4), r"0 ranks for the schedule 'gpipe'\. Use 1 or more\.", [("gpipe", (1, 1, 4))]),
        ],
    )
    def test_what_does_not_fit_is_told_with_what_does(self, name, numbers, said, advised):
        with pytest.raises(UsageError, match=said):
            check(find(name), *numbers)
        for other, fitting in advised:
            check(find(other), *fitting)

    def test_a_name_mistyped_is_guessed(self):
        words = (
            r"there is no schedule 'zero_buble'\. Did you mean 'zero_bubble'\? There are: gpipe, 1f1b, .*, dualpipev\."
        )
        with pytest.raises(UsageError, match=words) as caught:
            find("zero_buble")
        assert find("zero_bubble").name == "zero_bubble"
        for name in caught.value.cure.partition("There are: ")[2].rstrip(".").split(", "):
            assert find(name).name == name


def textbook(name, num_ranks, stages_per_rank, num_micro_batches):
    assert stages_per_rank == 1
    return {"gpipe": gpipe, "1f1b": one_forward_one_backward}[name](num_ranks, num_micro_batches)


class TestSearch:
    @given(st.integers(1, 4), st.integers(1, 48), st.floats(0, 0.5), st.floats(1, 60), st.data())
    @settings(max_examples=60, deadline=None)
    def test_the_best_is_the_shortest_that_fits(self, p, samples, overhead, memory, data):
        stages = st.lists(times, min_size=p, max_size=p)
        price = costs(data.draw(stages), overhead=overhead, activations=[1.0], resident=[1.0])
        batch = Batch(price, 8, samples)
        by_hand = []
        for name, least in (("gpipe", 1), ("1f1b", p)):
            for m in range(1, samples + 1):
                if samples % m == 0 and m >= least:
                    timeline = simulate(textbook(name, p, 1, m), price.resized(8 / m))
                    if max(timeline.peak_bytes) <= memory:
                        by_hand.append(timeline.duration)
        if not by_hand:
            with pytest.raises(UsageError, match=r"nothing fits: even .* needs|none of these"):
                search(batch, p, textbook, memory=memory, schedules=("gpipe", "1f1b"))
            return
        found = search(batch, p, textbook, memory=memory, schedules=("gpipe", "1f1b"))
        assert found.best.timeline.duration == pytest.approx(min(by_hand), rel=1e-8)  # it compares nine digits
        assert all(max(each.timeline.peak_bytes) <= memory for each in found.fitting)
        assert all(max(each.timeline.peak_bytes) > memory for each in found.rejected)
        assert all(each.rejected.startswith("rank ") for each in found.rejected)

    @given(st.integers(2, 4), st.lists(times, min_size=4, max_size=4))
    @settings(max_examples=20, deadline=None)
    def test_without_overhead_the_shortest_has_the_least_bubble(self, p, forward):
        found = search(Batch(costs(forward[:p]), 8, 24), p, textbook, schedules=("gpipe", "1f1b"))
        least = min(each.timeline.bubble for each in found.fitting)
        assert found.best.timeline.bubble == pytest.approx(least, abs=1e-8)

    def test_less_memory_means_smaller_micro_batches_and_a_longer_step(self):
        """With torch's lists."""
        price = costs([1.0] * 4, activations=[1.0], resident=[1.0], overhead=0.1)
        request = Request(4, 8, price, samples=32)
        chosen = {}
        for memory in (None, 4.0, 2.0):
            plan, _ = plan_best(request, memory=memory)
            assert memory is None or max(plan.timeline.peak_bytes) <= memory
            chosen[memory] = plan.schedule, plan.num_micro_batches, plan.timeline.duration
        assert len(set(chosen.values())) == 3
        assert [duration for *_, duration in chosen.values()] == sorted(duration for *_, duration in chosen.values())

    def test_counts_that_do_not_cut_the_samples_are_refused(self):
        with pytest.raises(UsageError, match="10 samples cannot be cut into 4"):
            search(Batch(costs([1.0]), 2, 10), 2, textbook, counts=[2, 4])


class TestDrawings:
    def test_a_drawing_is_exact(self):
        drawing = draw(simulate(one_forward_one_backward(2, 2), costs([1.0, 1.0])), scale=3)
        assert drawing.splitlines() == [
            "rank 0 F0>F1>......B0<<<<...B1<<<<",
            "rank 1 ...F0>B0<<<<F1>B1<<<<......",
        ]

    def test_a_bar_begins_in_the_nearest_column(self):
        drawing = draw(simulate(gpipe(2, 1), costs([1.3, 2.4], backward=[1.3])), scale=2)
        # At 1.3 and 3.7 the second rank begins and goes on to its backward, at 5.0 the first to its own.
        assert drawing.splitlines() == ["rank 0 F0>.......B0<", "rank 1 ...F0>>B0<..."]

    @given(st.data(), st.integers(20, 120))
    @settings(max_examples=40, deadline=None)
    def test_every_line_fits_and_idle_columns_are_idle_time(self, data, width):
        lists = data.draw(random_lists())
        timeline = simulate(lists, costs([1.0] * lists.num_stages))
        blocks = draw(timeline, width=width, scale=4).split("\n\n")
        rows = ["".join(block.splitlines()[rank][7:] for block in blocks) for rank in range(len(lists.ranks))]
        assert all(len(line) <= width for block in blocks for line in block.splitlines())
        for row, idle in zip(rows, timeline.idle, strict=True):
            # Times are multiples of a half here and a column is a quarter, so nothing is rounded.
            assert row.count(".") == round(idle * timeline.duration * 4)

    def test_a_picture_shows_the_bars_it_should(self, tmp_path):
        pytest.importorskip("matplotlib", reason="pictures need matplotlib")
        from matplotlib.image import imread

        from drivetrain_megatron.planner.picture import COLOURS, IDLE, write

        timeline = simulate(one_forward_one_backward(2, 3), costs([1.0, 1.0]))
        write(timeline, tmp_path / "drawn.png", title="two ranks")
        pixels = (imread(tmp_path / "drawn.png")[:, :, :3] * 255).round().astype(int)

        def area(colour):
            wanted = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
            return int((abs(pixels - wanted).max(axis=2) <= 1).sum())

        # Backwards take twice as long as forwards; labels and the legend's three equal patches blur it.
        assert area(COLOURS["B"][0]) / area(COLOURS["F"][0]) == pytest.approx(2, rel=0.15)
        assert area(IDLE) / area(COLOURS["F"][0]) == pytest.approx(1, rel=0.15)
        write(timeline, tmp_path / "drawn.svg", title="two ranks")
        assert "<svg" in (tmp_path / "drawn.svg").read_text(encoding="utf-8")

    def test_a_file_that_is_no_picture_is_refused(self, tmp_path):
        pytest.importorskip("matplotlib", reason="pictures need matplotlib")
        from drivetrain_megatron.planner.picture import write

        with pytest.raises(UsageError, match=r"Use \.png or \.svg"):
            write(simulate(gpipe(1, 1), costs([1.0])), tmp_path / "drawn.txt", title="")

    def test_without_matplotlib_the_package_is_named(self, tmp_path, monkeypatch):
        from drivetrain_megatron.planner.picture import write

        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(UsageError, match=re.escape(pip_line("megatron", "plot"))):
            write(simulate(gpipe(1, 1), costs([1.0])), tmp_path / "drawn.png", title="")


class TestInputs:
    @pytest.mark.parametrize(("text", "value"), [("512MiB", 2**29), ("1.5 GB", 1.5e9), ("4096", 4096), ("2k", None)])
    def test_sizes(self, text, value):
        if value is None:
            with pytest.raises(UsageError, match="is no size"):
                size(text)
        else:
            assert size(text) == value

    def test_lists(self):
        assert number_list("1, 1.5") == [1.0, 1.5]
        assert count_list("4,8") == [4, 8]
        for reader, text in ((number_list, "1;2"), (count_list, "1.5"), (count_list, "0")):
            with pytest.raises(UsageError, match="is no list of"):
                reader(text)

    def test_a_file_of_costs(self, tmp_path):
        file = tmp_path / "costs.json"
        file.write_text('{"forward": [1, 2], "backward_input": [1, 3], "backward_weight": [1, 1]}', encoding="utf-8")
        read = read_costs(file).costs()
        assert read == Costs((1, 2), (1, 3), (1, 1), (0, 0), (0, 0))
        file.write_text(
            '{"forward": [1], "backward": [2], "backward_input": [1.5], "backward_weight": [1.5]}', encoding="utf-8"
        )
        assert read_costs(file).costs().split == 1.5
        file.write_text('{"forwards": [1], "transfer": -1}', encoding="utf-8")
        with pytest.raises(UsageError, match=r"forwards: .*; transfer: .*|transfer: .*; forwards: .*"):
            read_costs(file)
        file.write_text('{"forward": [1], "backward_input": [1]}', encoding="utf-8")
        with pytest.raises(UsageError, match="a backward has two parts"):
            read_costs(file).costs()


class TestCommand:
    def run(self, *arguments):
        outcome = CliRunner().invoke(plan, ["schedule", *arguments], catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output
        return outcome.output

    def test_it_draws_beside_the_theory(self):
        text = self.run("--ranks", "2", "--micro-batches", "4", "--width", "80")
        assert "1f1b: 2 ranks, 4 micro-batches, bubble 20.0% (theory (p-1)/(m+p-1): 20.0%)" in text
        assert "rank 1 ...F0>B0<<<<F1>B1<<<<" in text

    def test_everything_as_json(self):
        data = json.loads(self.run("--schedule", "zbv", "--ranks", "2", "--micro_batches", "4", "--json"))
        assert data["theoretical_bubble"] == pytest.approx(1 / 5)
        assert data["ranks"][0]["actions"][0] == {"kind": "F", "stage": 0, "micro_batch": 0, "start": 0.0, "end": 0.5}
        busy = sum(each["end"] - each["start"] for rank in data["ranks"] for each in rank["actions"])
        assert data["bubble"] == pytest.approx(1 - busy / 2 / data["duration"])

    def test_a_search_tells_what_it_tried(self, tmp_path):
        arguments = ["--search", "--samples", "16", "--activations", "1GiB", "--memory", "4GiB", "--micro_batches", "8"]
        data = json.loads(self.run(*arguments, "--json"))
        fitting = [each for each in data["candidates"] if not each["rejected"]]
        assert data["duration"] == min(each["duration"] for each in fitting)
        assert {each["num_micro_batches"] for each in data["candidates"]} == {1, 2, 4, 8, 16}
        text = self.run(*arguments)
        section = re.search(r"^To train with it, (megatron: \{.*\})$", text, re.MULTILINE)[1]
        (tmp_path / "config.yaml").write_text(f"distributed_type: megatron\n{section}\n", encoding="utf-8")
        chosen = json.loads(self.run("--config", str(tmp_path / "config.yaml"), "--json"))
        for key in ("schedule", "stages_per_rank", "num_micro_batches", "num_ranks"):
            assert chosen[key] == data[key]
        assert "Do not fit:" in text
        assert "> 4 GiB" in text

    def test_a_configuration_fills_up_what_is_not_said(self, tmp_path):
        file = tmp_path / "config.yaml"
        section = "megatron: {pipeline_parallel_size: 3, schedule: zero_bubble, num_micro_batches: 6}\n"
        file.write_text(f"distributed_type: megatron\n{section}", encoding="utf-8")
        text = self.run("--config", str(file))
        assert "zero_bubble: 3 ranks, 2 stages a rank, 6 micro-batches" in text
        text = self.run("--config", str(file), "--schedule", "1f1b", "--micro_batches", "9")
        assert "1f1b: 3 ranks, 9 micro-batches" in text

    def test_a_picture_is_written(self, tmp_path):
        pytest.importorskip("matplotlib", reason="pictures need matplotlib")
        file = tmp_path / "drawn.png"
        self.run("--output", str(file))
        assert file.read_bytes().startswith(b"\x89PNG")

    def show(self, *arguments):
        outcome = CliRunner().invoke(plan, ["show", *arguments], catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output
        return outcome.output

    def test_a_layout_is_shown(self, tmp_path, monkeypatch):
        (tmp_path / "pairs_of_layers.py").write_text(MODEL, encoding="utf-8")
        (tmp_path / "config.yaml").write_text(
            "distributed_type: megatron\nmegatron: {tensor_parallel_size: 3, tp_plan: {up: colwise, down: rowwise}}\n",
            encoding="utf-8",
        )
        monkeypatch.chdir(tmp_path)
        text = self.show("pairs_of_layers:Pair", "--tp", "2")
        assert re.search(r"^up.weight +colwise +12 x 4 +6 x 4$", text, re.MULTILINE)
        assert re.search(r"^down.bias +replicated +4 +4$", text, re.MULTILINE)
        assert "a rank holds at most 232 of 448 bytes" in text
        data = json.loads(self.show("pairs_of_layers.py:Pair", "--config", "config.yaml", "--json"))
        assert (data["degree"], data["bytes_by_rank"]) == (3, [160] * 3)
        assert data["source"] == "megatron.tp_plan"
        assert data["parameters"][2]["local_shapes"] == [[4, 4]] * 3
        for wrong, said in (
            ("nowhere:Pair", "'nowhere' cannot be imported"),
            ("pairs_of_layers:Other", "there is no 'Other'"),
            ("pairs_of_layers:NUMBER", "cannot be called"),
            ("pairs_of_layers:nothing", r"returned a NoneType, not a model\. Name a function that returns a module"),
            ("pairs_of_layers", "names no model"),
        ):
            with pytest.raises(UsageError, match=said):
                self.show(wrong)

    def test_a_file_imports_what_lies_beside_it(self, tmp_path, monkeypatch):
        (tmp_path / "beside_the_model.py").write_text("WIDTH = 4\n", encoding="utf-8")
        text = """
            from __future__ import annotations

            from dataclasses import dataclass

            from beside_the_model import WIDTH
            from torch import nn

            @dataclass
            class Sizes:
                width: int = WIDTH

            def make():
                return nn.Sequential(nn.Linear(Sizes().width, 8), nn.ReLU(), nn.Linear(8, 4))
        """
        file = tmp_path / "with_a_neighbour.py"
        file.write_text(textwrap.dedent(text), encoding="utf-8")
        monkeypatch.setattr(sys, "path", list(sys.path))
        assert "rank" in self.show(f"{file}:make", "--tp", "2")
        file.write_text("import no_such_module_at_all\n", encoding="utf-8")
        with pytest.raises(UsageError) as caught:
            self.show(f"{file}:make", "--tp", "2")
        assert caught.value.cure == "It imports 'no_such_module_at_all', which is to be installed."

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--memory", "1GiB"], "--memory is for --search"),
            (["--schedule", "gpipe", "--schedule", "1f1b"], "2 schedules; one can be drawn"),
            (["--schedule", "dualpipev", "--micro_batches", "6"], "Use 8 micro-batches"),
            (["--ranks", "4", "--forward", "1,2,3"], "cannot be laid on 4 ranks"),
            (["--forward", "1,x"], "is no list of numbers"),
            (["--forward", "0"], "take no time"),
            (["--output", "/nowhere/at/all.png"], "cannot be written: there is no folder"),
            (["--search", "--activations", "9GiB", "--memory", "1GiB"], "nothing fits: even"),
        ],
    )
    def test_mistakes_are_told_in_words(self, arguments, said):
        with pytest.raises(UsageError, match=said):
            self.run(*arguments)

    @pytest.mark.parametrize(
        ("wrong", "said", "advised"),
        [
            (
                ["--forward", "1,1,1", "--backward", "1,2"],
                r"costs by stage have different lengths: .*\. Give one number for each stage, or a single one for all",
                [["--forward", "1,1,1", "--backward", "1,2,2"], ["--forward", "1,1,1", "--backward", "2"]],
            ),
            (
                ["--forward", "-1,1"],
                r"forward of a stage is negative or not finite: \[-1\.0, 1\.0\]\. Give finite numbers from 0 on",
                [["--forward", "0,1"]],
            ),
            (
                ["--forward", "0"],
                r"all stages together take no time\. Give forwards or backwards a duration",
                [["--forward", "1"], ["--forward", "0", "--backward", "2"]],
            ),
            (
                ["--activations", "2k"],
                r"'2k' is no size\. Write 512MiB, 40GiB, 1\.5GB, or a number of bytes",
                [["--activations", size] for size in ("512MiB", "40GiB", "1.5GB", "4096")],
            ),
            (
                ["--search", "--counts", "4,8.5"],
                r"'4,8\.5' is no list of whole numbers from 1\. Write 8, or several as in 4,8,16",
                [["--search", "--counts", "8"], ["--search", "--counts", "4,8,16"]],
            ),
            (["--search", "--counts", "inf"], r"'inf' is no list of whole numbers from 1", []),
            (
                ["--weight_share", "2", "--transfer", "inf"],
                r"costs of the command line: transfer: .* finite number; weight_share: .* less than or equal to 1\. G",
                [["--weight_share", "1", "--transfer", "8"]],
            ),
            (
                ["--schedule", "gpip"],
                r"there is no schedule 'gpip'\. Did you mean 'gpipe'\? There are: gpipe, 1f1b, ",
                [["--schedule", "gpipe"], ["--schedule", "1f1b"]],
            ),
            (
                ["--schedule", "gpipe", "--stages_per_rank", "2"],
                r"'gpipe' holds 1 stage a rank, not 2\. Use 1; with 2: interleaved_1f1b, zero_bubble, zbv, dualpipev",
                [
                    ["--schedule", "gpipe", "--stages_per_rank", "1"],
                    *(["--schedule", name, "--stages_per_rank", "2"] for name in ("zero_bubble", "zbv")),
                ],
            ),
            (
                ["--ranks", "4", "--micro_batches", "3"],
                r"does not take 3 micro-batches; it takes at least p \(p = 4\)\. Use 4 micro-batches .*, or the sch",
                [
                    ["--ranks", "4", "--micro_batches", "4"],
                    ["--ranks", "4", "--micro_batches", "3", "--schedule", "gpipe"],
                ],
            ),
        ],
    )
    def test_what_is_advised_instead_of_a_mistake_is_drawn(self, wrong, said, advised):
        with pytest.raises(UsageError, match=said):
            self.run(*wrong)
        for arguments in advised:
            assert "rank 0 " in self.run(*arguments)

    def test_costs_are_given_in_one_place(self, tmp_path):
        file = tmp_path / "costs.json"
        file.write_text('{"forward": [3]}', encoding="utf-8")
        with pytest.raises(UsageError, match=r"--costs and --forward say the same thing twice\. Leave one of them out"):
            self.run("--costs", str(file), "--forward", "2")
        for arguments, duration in ((["--costs", str(file)], 3), (["--forward", "2"], 2)):
            data = json.loads(self.run("--ranks", "1", "--micro_batches", "1", "--json", *arguments))
            assert data["duration"] == 3 * duration

    @pytest.mark.parametrize(
        ("wrong", "said", "advised"),
        [
            (
                {"forwards": [2]},
                r"costs\.json: forwards: .*\. There are forward, backward, .*, unit\.",
                {"forward": [2]},
            ),
            ({"forward": 2}, r"costs\.json: forward: Input should be a valid list\. Give values as", {"forward": [2]}),
            ([2], r"costs\.json: all of it: Input should be a valid dictionary .*\. Give values as", {"forward": [2]}),
            (
                {"backward": [0], "backward_input": [1], "backward_weight": [1]},
                r"the two parts of a backward take inf times its time\. Use 1 or more",
                {"backward": [2], "backward_input": [1], "backward_weight": [1]},
            ),
            (
                {"backward": [2], "backward_input": [0], "backward_weight": [0]},
                r"the two parts of a backward take 0 times its time\. Use 1 or more",
                {"backward": [2], "backward_input": [1], "backward_weight": [1]},
            ),
            (
                {"backward": [], "backward_input": [], "backward_weight": []},
                r"costs by stage have different lengths: .* Give one number for each stage",
                {"backward": [2], "backward_input": [1], "backward_weight": [1]},
            ),
        ],
    )
    def test_a_file_that_cannot_be_is_refused_until_it_is_corrected(self, tmp_path, wrong, said, advised):
        file = tmp_path / "costs.json"
        file.write_text(json.dumps(wrong), encoding="utf-8")
        with pytest.raises(UsageError, match=said):
            self.run("--costs", str(file))
        file.write_text(json.dumps(advised), encoding="utf-8")
        assert "rank 0 " in self.run("--costs", str(file))

    def test_its_help_imports_no_torch(self):
        code = (
            "import sys; from click.testing import CliRunner; from drivetrain.cli.main import drivetrain as d;"
            "out = CliRunner().invoke(d, ['plan', 'schedule', '--help']).output; assert '--micro_batches' in out, out;"
            "import drivetrain_megatron.planner.planning, drivetrain_megatron.planner.picture;"
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=180, cwd=Path(__file__).parent)


@given(st.lists(times, min_size=1, max_size=5), st.integers(1, 8))
def test_uneven_stages_of_gpipe_take_what_alpas_formula_says(forward, m):
    """T = sum t_i + (m-1) max t_i (arXiv 2201.12023); it holds for forwards and for backwards."""
    price = costs(forward, backward=[2 * each for each in forward])
    expected = 3 * (sum(forward) + (m - 1) * max(forward))
    assert simulate(gpipe(len(forward), m), price).duration == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize(("p", "m"), [(0, 4), (2, 0)])
def test_a_plan_needs_a_rank_and_a_micro_batch(p, m):
    with pytest.raises(UsageError, match=rf"{p} ranks and {m} micro-batches\. Use 1 or more of each\."):
        plan_best(Request(p, m, costs([1.0])))
    best, _ = plan_best(Request(max(p, 1), max(m, 1), costs([1.0])))
    assert best.timeline.duration > 0


def test_a_plan_takes_costs_by_rank_and_cuts_them_for_the_schedules_stages():
    request = Request(2, 4, costs([1.0, 3.0]), measured_at=8)
    assert plan_one(request, "1f1b").costs.forward == (2.0, 6.0)
    assert plan_one(request, "zbv").costs.forward == (1.0, 1.0, 3.0, 3.0)


class TestMeasured:
    @given(st.data())
    @settings(max_examples=60, deadline=None)
    def test_costs_of_a_simulated_step_explain_it(self, data):
        """What is read off a timeline gives that timeline again."""
        lists = data.draw(random_lists())
        price = data.draw(uneven(lists))
        found = simulate(lists, price)
        read = costs_of(lists, found)
        assert simulate(lists, read).duration == pytest.approx(found.duration, rel=1e-6)

    def test_a_recorder_notes_and_leaves_nothing_behind(self):
        class Stage:
            stage_index = 3

            def forward_one_chunk(self, micro_batch, *args, save_forward_output=True):
                return micro_batch, args, save_forward_output

            def backward_one_chunk(self, micro_batch, loss=None, full_backward=True, last_backward=False):
                return loss, full_backward

            def backward_weight_one_chunk(self, micro_batch, last_backward=False):
                return last_backward

        stage, calls = Stage(), []
        with Recorder(lambda: calls.append(1)).of([stage]) as moments:
            assert stage.forward_one_chunk(2, "x", save_forward_output=False) == (2, ("x",), False)
            assert stage.backward_one_chunk(2, loss=1, full_backward=False) == (1, False)
            assert stage.backward_weight_one_chunk(2, last_backward=True) is True
            stage.backward_one_chunk(0)
        assert [str(action) for action, _, _ in moments] == ["3F2", "3I2", "3W2", "3B0"]
        assert all(start <= end for _, start, end in moments)
        assert len(calls) == 8
        assert vars(stage) == {}

    def test_the_last_of_several_steps_counts(self):
        once = [(Action("F", 0, m), 1.0, 2.0) for m in range(3)] + [(Action("B", 0, m), 3.0, 4.0) for m in range(3)]
        again = [(action, start + 10, end + 10) for action, start, end in once]
        assert last_step([*once, *again]) == again
        assert last_step(once) == once
        assert last_step([]) == []

    def test_moments_of_ranks_make_a_timeline(self):
        ranks = [
            [(Action("F", 0, 0), 10.0, 11.0), (Action("B", 0, 0), 15.0, 17.0)],
            [(Action("F", 1, 0), 12.0, 13.0), (Action("B", 1, 0), 13.0, 14.5)],
        ]
        lists, found = timeline(ranks)
        assert lists == one_forward_one_backward(2, 1)
        assert (found.duration, found.busy, found.peak_activations) == (7.0, (3.0, 2.5), (1, 1))
        read = costs_of(lists, found)
        assert (read.transfer, read.gap) == (0.75, 0.0)  # between 1.0 and 0.5; the last stage goes on at once


def run_every_schedule(micro_batches):
    """On real ranks over gloo: what the stages of each schedule are asked for, rank by rank."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, schedules

    from drivetrain_megatron.planner.catalogue import default_stages_per_rank
    from drivetrain_megatron.planner.engine_lists import construct, stages_of

    class Stage(PipelineStage):
        def _get_init_p2p_neighbors_ops(self):
            """Messages that set up connections of NCCL; in torch 2.9 the two ends name other sizes, so gloo aborts."""
            return []

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, schedule in SCHEDULES.items():
        per_rank = default_stages_per_rank(schedule)
        stages = [
            Stage(torch.nn.Linear(4, 4), index, world * per_rank, torch.device("cpu"))
            for index in stages_of(schedule.placement, world, per_rank, rank)
        ]
        kind = schedules.get_schedule_class(schedule.torch_name)
        built = construct(kind, stages, micro_batches, torch.nn.functional.mse_loss)
        batch = torch.ones(micro_batches, 4)
        inputs = [batch] if any(stage.is_first for stage in stages) else []
        target = {"target": batch} if any(stage.is_last for stage in stages) else {}
        with Recorder().of(stages) as moments:
            built.step(*inputs, **target)
        found[name] = list(moments)
    dist.destroy_process_group()
    return found


def test_real_ranks_run_the_lists_that_are_simulated():
    from drivetrain_megatron.planner.catalogue import default_stages_per_rank
    from drivetrain_megatron.planner.engine_lists import action_lists

    outcomes = spawn(run_every_schedule, 2, 4, timeout=180)
    for name, schedule in SCHEDULES.items():
        lists, real = timeline([outcome[name] for outcome in outcomes])
        assert lists == action_lists(name, 2, default_stages_per_rank(schedule), 4), name
        assert 0 <= real.bubble < 1


def test_the_documents_show_what_the_command_prints():
    folder = Path(__file__).parents[3] / "docs" / "how-to"
    pages = [folder / "pipeline-schedules.md", folder / "search-a-schedule.md"]
    if not pages[0].exists():
        pytest.skip("the documents are in the repository only")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    shown = re.findall(r"```sh\ndrivetrain plan schedule ([^\n]*)\n```\n(?:\n```text\n(.*?)```)?", text, re.DOTALL)
    assert len(shown) == 3
    for arguments, expected in shown:
        outcome = CliRunner().invoke(plan, ["schedule", *arguments.split()], catch_exceptions=False)
        assert outcome.exit_code == 0
        assert outcome.output.startswith(expected)


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def train_and_measure(folder):
    """The backend itself, two ranks: what it runs, measured, and the file of costs."""
    from drivetrain import Accelerator
    from drivetrain_megatron.planner.training import measure

    rank = os.environ["RANK"]
    config = {
        "distributed_type": "megatron",
        "use_cpu": True,
        "megatron": {"pipeline_parallel_size": 2, "num_micro_batches": 4, "schedule": "zbv"},
    }
    file = Path(folder) / f"config-{rank}.yaml"
    file.write_text(json.dumps(config), encoding="utf-8")
    accelerator = Accelerator(config=file)
    model = Blocks()
    plain = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step():
        accelerator.backward(model(torch.ones(8, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(UsageError, match="not been cut yet"), measure(model):
        pass
    step()
    with measure(model) as measured:
        step()
        step()
    with pytest.raises(UsageError, match="is not trained by a pipeline"), measure(plain):
        pass
    with pytest.raises(UsageError, match="no step was trained"), measure(model):
        pass
    measured.write_costs(Path(folder) / f"costs-{rank}.json")
    accelerator.end_training()
    return measured.lists, measured.timeline.bubble


def test_a_run_of_the_backend_is_measured_and_planned_from(tmp_path):
    from drivetrain_megatron.planner.engine_lists import action_lists

    (lists, bubble), other = spawn(train_and_measure, 2, tmp_path, timeout=180)
    assert other == (lists, bubble), "both ranks know the whole pipeline"
    assert lists == action_lists("zbv", 2, 2, 4)
    assert 0 <= bubble < 1
    read = read_costs(tmp_path / "costs-0.json")
    assert (len(read.forward), read.num_micro_batches, read.unit) == (4, 4, "s")
    arguments = ["schedule", "--schedule", "zbv", "--ranks", "2", "--costs", str(tmp_path / "costs-0.json")]
    outcome = CliRunner().invoke(plan, arguments, catch_exceptions=False)
    assert "zbv: 2 ranks, 2 stages a rank, 4 micro-batches" in outcome.output
