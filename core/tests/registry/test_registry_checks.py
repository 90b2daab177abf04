"""Requirements, probes, classes and sections: what is checked between a name and a running backend."""

from __future__ import annotations

import pytest

from drivetrain.registry import pip_line


def test_an_unmet_requirement_is_named_with_what_is_there(toys):
    toys.add("needy", more=", requires=('no-such-thing>=2', 'click>=1', 'pluggy>=99')")
    kind, sentence = toys.ask("import pluggy; answer = registry.load_backend(registry.info('needy'))")
    assert kind == "BackendBlockedError"
    assert sentence.startswith("backend 'needy' needs no-such-thing>=2 (not installed); pluggy>=99 (installed is ")
    assert sentence.endswith('Run: pip install "no-such-thing>=2" "pluggy>=99"')


def test_a_requirement_for_another_system_does_not_count(toys):
    toys.add("needy", more=""", requires=('no-such-thing; sys_platform == "nowhere"',)""")
    assert toys.ask("answer = registry.check_ready(registry.info('needy')).ready") is True


def test_a_requirement_is_checked_before_the_import(toys):
    toys.add("needy", more=", requires=('no-such-thing',)", heavy="raise RuntimeError('imported')")
    assert toys.ask("answer = registry.load_backend(registry.info('needy'))")[0] == "BackendBlockedError"


def test_a_probe_that_says_no_blocks_with_reason_and_cure(toys):
    toys.add("picky", more=", probe=lambda: Readiness(False, 'no toy drive', 'Plug one in.')")
    assert toys.ask("answer = registry.load_backend(registry.info('picky'))") == [
        "BackendBlockedError",
        "backend 'picky' cannot run here: no toy drive [toy-picky 1.0]. Plug one in.",
    ]
    rows = toys.ask("answer = [[r.ready, r.why, r.cure] for r in registry.reports() if r.name == 'picky']")
    assert rows == [[False, "backend 'picky' cannot run here: no toy drive", "Plug one in."]]


def test_a_probe_that_fails_is_the_plugins_fault(toys):
    toys.add("picky", more=", probe=lambda: 1 / 0")
    kind, sentence = toys.ask("answer = registry.load_backend(registry.info('picky'))")
    assert kind == "BackendBrokenError"
    assert "ZeroDivisionError" in sentence


@pytest.mark.parametrize(
    ("heavy", "word"),
    [
        ("raise OSError('libtoy.so')", "OSError: libtoy.so"),
        ("Toy = 3", "not a class derived from"),
        ("", "AttributeError"),
    ],
)
def test_a_class_that_cannot_be_had_is_the_plugins_fault(toys, heavy, word):
    toys.add("hollow", heavy=heavy)
    kind, sentence = toys.ask("answer = registry.load_backend(registry.info('hollow'))")
    assert kind == "BackendBrokenError"
    assert word in sentence
    assert "toy-hollow 1.0" in sentence


def test_a_section_must_be_a_pydantic_model(toys):
    toys.add("odd", more=", config='toy_odd.heavy:Toy'")
    kind, sentence = toys.ask("answer = registry.load_section(registry.info('odd'))")
    assert kind == "BackendBrokenError"
    assert "not a pydantic model" in sentence


def test_the_default_is_the_highest_preference_that_fits_and_is_ready(toys):
    toys.add("best", more=", preference=1000, probe=lambda: Readiness(False, 'never')")
    toys.add("second", more=", preference=900")
    toys.add("alone", more=", preference=950, capabilities=Capabilities(multi_process=False)")
    toys.add("shy")
    assert toys.ask("answer = [registry.default(n).name for n in (1, 2)]") == ["alone", "second"]


def test_no_default_says_why_and_what_to_install(toys):
    toys.add("best", more=", preference=1000, probe=lambda: Readiness(False, 'no toy drive')")
    kind, sentence = toys.ask("""
        from drivetrain.registry import Registry
        from importlib.metadata import entry_points
        found = [p for p in entry_points(group='drivetrain') if p.name in {'best', 'single'}]
        hooks = [p for p in entry_points(group='drivetrain.hooks') if p.module == 'drivetrain.backends.plugin']
        registry = Registry([*found, *hooks])
        answer = registry.default(4)
    """)
    assert kind == "BackendNotFoundError"
    assert "no installed backend can train over 4 processes without being named; installed: best, single" in sentence
    assert "no toy drive" in sentence
    assert pip_line("NAME") in sentence
