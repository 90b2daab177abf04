"""Chooses what ``make test`` and ``make test-all`` run. Keeps the collector away from what all tests share.

``make test`` leaves out what is marked as slow, here or in its file. ``make test-all`` gives ``--by-turns``: what an
engine's layouts show alike runs in one of them, and of large grids a part. pytest without either option runs all that
it is asked for, as ``make reports`` does with the conformance cases.

A pytest plugin for the suite of this repository; ``conftest.py`` beside the Makefile names it.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from math import ceil
from pathlib import Path
from typing import Any
from zlib import crc32

import hypothesis
import pytest

KIT = Path(__file__).resolve().parents[2] / "kit"

WHOLE = {"ddp"}
"""Backends whose conformance cases all run in `make test`: what the core does for every backend is shown there."""

QUICK_CASES = {
    "gradients": (
        "dense ragged_labels empty_micro_batch explicit_step frozen_parameters tied_weights unused_parameters "
        "parameter_groups several_models"
    ),
    "windows": "partial_window ragged_windows without_accumulate",
    "uneven": "last_batch three_ranks",
    "clipping": "clips_as_one_process_does same_norm_everywhere not_finite_is_skipped clips_by_value",
    "loose": "in_the_optimizer_of_a_model",
    "precision": "bf16_policy fp16_policy overflow_is_skipped",
    "scheduling": "once_per_window metric_of_each_rank",
    "data": "ranks_share_the_samples",
    "randomness": "masks_of_each_rank masks_go_on_after_a_load equal_masks_on_demand",
    "collectives": "gather_nested reductions",
    "evaluation": "before_and_after_training each_sample_once_in_order statistics_are_alike synchronised_statistics",
    "apart": "parts_of_the_data skipped_batches right_training_agrees",
    "order": "follows_the_plain_loader goes_on_after_a_load",
    "deferred": "value_before_backward unrecordable_is_refused",
    "scripts": (
        "the_model_is_the_users methods_that_call_the_model methods_that_do_not parameters_that_are_written "
        "weights_of_other_strides later_optimizers gradients_that_are_edited hooks_of_parameters forwards_that_write "
        "state_dicts"
    ),
    "honesty": (
        "one_process_only unlisted_mesh_axes unlisted_precisions one_optimizer_per_model joins_uneven_inputs "
        "no_uneven_inputs no_sync_keeps_gradients_local no_training_alone trains_alone_and_averages "
        "replicas_are_whole_and_equal pipelined_means_deferred devices_are_listed optimizer_is_the_users "
        "every_rank_saves_its_part every_rank_could_save_all saves_beside_training no_saving_beside_training "
        "unlisted_handlers parameter_names_are_the_users"
    ),
    "mesh": "dp_replicate dp_shard cp tp pp",
    "state": (
        "resumed_equals_uninterrupted load_undoes parameter_groups_come_back random_numbers_go_on loss_scale_travels"
    ),
}
"""By family the conformance cases that `make test` runs for the other backends: those that an engine's own code
decides, every capability, and one for each promise of README. Where a backend has several layouts with a module each,
pipelines and tensor parallelism, each case runs in one of them; `make test-all` runs these cases in all."""


QUICK_EXAMPLES, EXAMPLES = 25, 50
"""Examples that hypothesis draws for a test in `make test` and in `make test-all`; elsewhere it draws a hundred."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register ``--by-turns``."""
    parser.addoption("--by-turns", action="store_true", help="run a part, always the same, of what shows one thing")


def pytest_configure(config: pytest.Config) -> None:
    """Let hypothesis draw fewer examples in `make test`, which is known by the slow tests that it leaves out."""
    hypothesis.settings.register_profile("gate", max_examples=QUICK_EXAMPLES)
    hypothesis.settings.register_profile("by turns", max_examples=EXAMPLES)
    if config.option.markexpr == "not slow":
        hypothesis.settings.load_profile("gate")
    elif config.option.by_turns:
        hypothesis.settings.load_profile("by turns")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Keep the modules of all tests out of later collections of garbage, each of which would walk them anew."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Mark as slow what `make test` leaves out: by the marker `gate`, and in conformance modules."""
    _keep_named(items, whole=not any("::" in argument for argument in config.args))
    layouts: dict[tuple[str, str], dict[Path, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        requirements = getattr(getattr(item, "module", None), "Requirements", None)
        parameters = getattr(getattr(item, "callspec", None), "params", None)
        if requirements is None or parameters is None or item.get_closest_marker("slow") is not None:
            continue
        if _left_out(item.originalname, parameters, requirements):
            item.add_marker(pytest.mark.slow)
        elif item.originalname == "test_conformance" and not item.path.is_relative_to(KIT):
            layouts[requirements.backend, parameters["conformance_case"]][item.path].append(item)
    for alike in _beyond_turns([list(modules.values()) for modules in layouts.values()]):
        for item in alike:
            item.add_marker(pytest.mark.slow)
    if config.option.by_turns:
        kept = take_turns(items)
        left_out = [item for item in items if item not in kept]
        config.hook.pytest_deselected(items=left_out)
        # The kit fails a session that misses tests of its suite, unless an option says that a part was chosen.
        config.option.deselect = [*(config.option.deselect or ()), *(item.nodeid for item in left_out)]
        items[:] = [item for item in items if item in kept]


def take_turns(items: list[Any]) -> set[Any]:
    """Return what of these tests runs with ``--by-turns``.

    Conformance cases that are not in :data:`QUICK_CASES` show what the core does under every engine. Each runs in one
    of the layouts of each backend: a stage of ZeRO, a number of ranks, pipelines or tensor parallelism; and in one of
    the kit's own backends. Of the slow parameters of a test with the marker `turns(n)` a share of 1/n runs, the same
    each time. It is drawn by their names: every n-th of a product would leave out whole rows.
    """
    cases: dict[tuple[str, str], list[Any]] = defaultdict(list)
    shared: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("turns")
        if marker is not None and item.get_closest_marker("slow") is not None:
            shared[item.nodeid.partition("[")[0], marker.args[0]].append(item)
        requirements = getattr(getattr(item, "module", None), "Requirements", None)
        if requirements is not None and item.originalname == "test_conformance":
            name = item.callspec.params["conformance_case"]
            family, _, case = name.partition(".")
            if requirements.backend not in WHOLE and case not in QUICK_CASES.get(family, case).split():
                backend = "of the kit" if item.path.is_relative_to(KIT) else requirements.backend
                cases[backend, name].append(item)
    kept = set(items)
    for (_, share), alike in shared.items():
        alike.sort(key=lambda item: crc32(item.nodeid.encode()))
        kept -= {*alike[ceil(len(alike) / share) :]}
    return kept.difference(_beyond_turns(cases.values()))


def _beyond_turns(groups: Iterable[Sequence[Any]]) -> Iterator[Any]:
    """Yield all of each group but one: the first of the first group, the second of the next, and so on."""
    for number, alike in enumerate(groups):
        yield from (item for place, item in enumerate(alike) if place != number % len(alike))


def _keep_named(items: list[Any], *, whole: bool) -> None:
    """Mark the parameters of a test as slow that its marker `gate` does not name.

    Args:
        items: the tests.
        whole: tests were chosen by file or folder, so that all parameters of a test are here.
    """
    missing: dict[str, set[str]] = defaultdict(set)
    found: dict[str, set[str]] = defaultdict(set)
    for item in items:
        marker = item.get_closest_marker("gate")
        if marker is None:
            continue
        test = item.nodeid.partition("[")[0]
        matching = {name for name in marker.args if fnmatchcase(item.callspec.id, name)}
        missing[test].update(marker.args)
        found[test] |= matching
        if not matching:
            item.add_marker(pytest.mark.slow)
    for test, names in missing.items():
        if whole and names - found[test]:
            raise pytest.UsageError(f"{test} has no parameter {', '.join(sorted(names - found[test]))}: see its @gate")


def _left_out(test: str, parameters: dict[str, Any], requirements: Any) -> bool:
    """Whether a faster test of the same module shows nearly the same.

    Cases run on two processes where the backend takes several, those of :data:`QUICK_CASES` alone unless the backend is
    of :data:`WHOLE`. A case of somebody's model, which no family names, runs always. Checkpoints travel between
    `single` and two processes; every pair of backends is in tests/parity, which is slow. Of the two moments of a killed
    save one is left.
    """
    quick = 2 if 2 in requirements.world_sizes else min(requirements.world_sizes)
    if test == "test_conformance":
        family, _, case = parameters["conformance_case"].partition(".")
        if requirements.backend not in WHOLE and case not in QUICK_CASES.get(family, case).split():
            return True
        # A case with worlds of its own, as one on three ranks, has no other place.
        return bool(parameters["world_size"] != quick and parameters["world_size"] in requirements.world_sizes)
    if test in {"test_state_travels", "test_samples_after_resume"}:
        return any(place not in {("single", 1), (requirements.backend, quick)} for place in parameters["journey"])
    return test == "test_killed_save" and parameters["moment"] != "writing"
