"""Names: found, aliased, contested, absent, misspelt, broken, and of another contract."""

from __future__ import annotations

import pytest

from drivetrain.api import CONTRACT
from drivetrain.api.programs import pip_line


def test_a_sound_plugin_is_found_by_name_and_alias_in_any_case(toys):
    toys.add("sound")
    assert toys.ask("answer = [registry.resolve(n) for n in ('sound', 'SOUND', 'Sound_Alias')]") == ["sound"] * 3


def test_loading_by_name_imports_that_plugin_alone(toys):
    toys.add("sound")
    toys.add("other")
    seen = toys.ask("""
        import sys
        registry.info('sound')
        answer = sorted(m for m in sys.modules if m.startswith('toy_') or m in {'torch', 'pydantic'})
    """)
    assert seen == ["toy_sound", "toy_sound.plugin"]


def test_no_backend_of_the_core_or_of_a_plugin_imports_torch_when_listed(toys):
    toys.add("sound")
    code = "import sys; registry.reports(); answer = 'torch' in sys.modules"
    assert toys.ask(code) is False


def test_loading_the_class_and_only_that_imports_the_heavy_module(toys):
    toys.add("sound")
    assert toys.ask("""
        import sys
        info = registry.info('sound')
        before = 'toy_sound.heavy' in sys.modules
        answer = [before, registry.load_backend(info).__name__, registry.load_section(info)]
    """) == [False, "Toy", None]


def test_two_distributions_that_claim_one_name_are_both_named(toys):
    toys.add("twin", distribution="toy-first", version="1.0")
    toys.add("twin", distribution="toy-second", version="2.5")
    assert toys.ask("answer = registry.resolve('twin')") == [
        "BackendConflictError",
        (
            "the name 'twin' is claimed by toy-first 1.0 and toy-second 2.5. "
            "Run: pip uninstall toy-first or pip uninstall toy-second"
        ),
    ]


def test_a_contested_name_is_reported_for_both_and_harms_nobody_else(toys):
    toys.add("twin", distribution="toy-first")
    toys.add("twin", distribution="toy-second")
    toys.add("sound")
    rows = toys.ask(
        "answer = [[r.name, r.distribution, r.ready] for r in registry.reports() if 'toy' in r.distribution]"
    )
    assert rows == [["sound", "toy-sound", True], ["twin", "toy-first", False], ["twin", "toy-second", False]]


def test_two_distributions_that_claim_one_alias_are_both_named(toys):
    toys.add("one")
    toys.add("two", plugin=_with_alias("two", "one_alias"))
    kind, sentence = toys.ask("answer = registry.resolve('ONE_ALIAS')")
    assert kind == "BackendConflictError"
    assert "toy-one 1.0 and toy-two 1.0" in sentence


def test_the_owner_of_the_entry_point_keeps_a_name_that_another_plugin_claims_too(toys):
    toys.add("owner")
    toys.add("thief", plugin=_with_alias("owner", "nothing"))
    assert toys.ask("answer = registry.owner('owner')") == "toy-owner 1.0"
    rows = toys.ask("answer = [[r.distribution, r.ready, r.why] for r in registry.reports() if r.name == 'owner']")
    assert rows == [
        ["toy-owner", True, ""],
        ["toy-thief", False, "the name 'owner' belongs to toy-owner 1.0, whose entry point it is"],
    ]


def test_a_plugin_that_fails_to_import_is_raised_when_asked_for_and_harms_nobody_else(toys):
    toys.add("broken", plugin="import a_module_that_is_not_there")
    toys.add("sound")
    assert toys.ask("answer = registry.resolve('sound_alias')") == "sound"
    assert toys.ask("answer = registry.info('broken')") == [
        "BackendBrokenError",
        (
            "plugin 'broken' could not be imported: ModuleNotFoundError: No module named 'a_module_that_is_not_there' "
            "[toy-broken 1.0]. `drivetrain backends --verbose` shows the traceback."
        ),
    ]


def test_the_original_error_is_the_cause_and_its_traceback_is_reported(toys):
    toys.add("broken", plugin="def inner():\n    raise RuntimeError('deep inside')\ninner()\n")
    report, cause = toys.ask("""
        report = [r.traceback for r in registry.reports() if r.name == 'broken'][0]
        try:
            registry.resolve('broken')
        except ImportError as error:
            answer = [report, repr(error.__cause__)]
    """)
    assert "in inner" in report
    assert cause == "RuntimeError('deep inside')"


def test_even_a_plugin_that_exits_does_not_end_the_process(toys):
    toys.add("broken", plugin="import sys; sys.exit(3)")
    assert toys.ask("answer = [r.ready for r in registry.reports() if r.name == 'broken']") == [False]


def test_a_plugin_made_for_another_core_says_so_when_it_breaks(toys):
    toys.add("broken", plugin="raise ImportError('x')", requires=("drivetrain<0.0.2", "numpy"))
    _, sentence = toys.ask("answer = registry.info('broken')")
    assert "It wants drivetrain<0.0.2, installed is " in sentence


@pytest.mark.parametrize(("api", "upgrade"), [(0, "toy-old"), (99, "drivetrain")])
def test_another_contract_version_names_both_numbers_and_who_should_move(toys, api, upgrade):
    toys.add("old", more=f", api={api}")
    assert toys.ask("answer = registry.load_backend(registry.info('old'))") == [
        "ContractMismatchError",
        (
            f"backend 'old' speaks version {api} of the backend contract, this core speaks version {CONTRACT} "
            f"[toy-old 1.0]. Run: pip install --upgrade {upgrade}"
        ),
    ]


# Every backend is installed where these tests run; here one is not.
WITHOUT_DEEPSPEED = """
from importlib.metadata import entry_points
from drivetrain.registry import Registry
points = [*entry_points(group="drivetrain"), *entry_points(group="drivetrain.hooks")]
registry = Registry([point for point in points if "deepspeed" not in point.value])
"""


def test_a_name_that_is_not_installed_and_that_core_knows_gives_the_pip_command(toys):
    _, sentence = toys.ask(f"{WITHOUT_DEEPSPEED}answer = registry.info('DEEPSPEED').name")
    assert sentence.endswith(f"Run: {pip_line('deepspeed')}")


def test_a_typo_is_guessed_among_names_and_aliases(toys):
    toys.add("sound")
    kind, sentence = toys.ask("answer = registry.resolve('suond')")
    assert kind == "BackendNotFoundError"
    assert sentence.endswith("Did you mean 'sound'?")
    assert "installed: " in sentence


def test_a_typo_of_what_is_not_installed_is_guessed_with_the_pip_command(toys):
    _, sentence = toys.ask(f"{WITHOUT_DEEPSPEED}answer = registry.resolve('deepsped')")
    assert sentence.endswith(f"Did you mean 'deepspeed'? It is not installed; run: {pip_line('deepspeed')}")


def test_a_name_like_no_other_points_to_the_list_and_to_broken_plugins(toys):
    toys.add("broken", plugin="1 / 0")
    _, sentence = toys.ask("answer = registry.resolve('zzzzzz')")
    assert "`drivetrain backends` lists what can be used." in sentence
    assert sentence.endswith("These plugins could not be loaded and may bring it: broken (toy-broken 1.0).")


def test_distributed_type_resolves_aliases_and_lowers_what_nobody_brings(toys):
    toys.add("sound")
    assert toys.ask("""
        from drivetrain.distributed_type import DistributedType
        answer = [DistributedType.SOUND_ALIAS, DistributedType.NO, DistributedType.NEVER_HEARD_OF,
                  DistributedType.NEVER_HEARD_OF, hasattr(DistributedType, 'no'), hasattr(DistributedType, '__next__')]
    """) == ["sound", "single", "never_heard_of", "never_heard_of", False, False]


def _with_alias(name: str, alias: str) -> str:
    return f"""
        from drivetrain.backend import BackendInfo
        from drivetrain.hookspecs import hookimpl

        @hookimpl
        def drivetrain_backends():
            return [BackendInfo(name="{name}", summary="", backend="a:b", aliases=("{alias}",))]
    """


@pytest.mark.parametrize("name", ["mesh", "scheduler", "profile", "fp16", "dynamo_config", "my_config"])
def test_a_backend_named_like_a_key_of_the_configuration_is_refused(toys, name):
    named = _with_alias(name, "other")
    toys.add("clashing", plugin=named)
    toys.add("sound")
    kind, sentence = toys.ask("answer = registry.info('clashing')")
    assert kind == "BackendBrokenError"
    assert f"a backend cannot be called '{name}': its section could not be told from that key" in sentence
    assert toys.ask("answer = registry.resolve('sound_alias')") == "sound"
    rows = toys.ask("answer = [each.why for each in registry.reports() if each.name == 'clashing']")
    assert "give it another name" in rows[0]


def test_rules_that_two_plugins_bring_for_a_section_are_refused_until_one_is_uninstalled(toys):
    for name in ("one", "two"):
        toys.add(name, more=f", imports={{'toy_config': 'toy_{name}.heavy:RULES'}}", heavy="RULES = {'steps': None}")
    read = "answer = registry.import_rules()['toy_config']"
    assert toys.ask(read) == [
        "BackendConflictError",
        "two plugins bring rules for the section 'toy_config': toy-one 1.0 and toy-two 1.0. Uninstall one of the two.",
    ]
    toys.remove("toy-two")
    assert toys.ask(read) == {"steps": None}


def test_rules_that_are_no_mapping_are_refused_until_the_plugin_is_repaired(toys):
    toys.add("listing", more=", imports={'toy_config': 'toy_listing.heavy:RULES'}", heavy="RULES = ['steps']")
    read = "answer = registry.import_rules()['toy_config']"
    kind, sentence = toys.ask(read)
    assert kind == "BackendBrokenError"
    assert sentence.startswith("toy_listing.heavy:RULES is no mapping of rules [toy-listing 1.0]. ")
    (toys.folder / "toy_listing" / "heavy.py").write_text("RULES = {'steps': None}")
    assert toys.ask(read) == {"steps": None}


def test_a_name_that_two_backends_bring_is_refused_until_one_is_uninstalled(toys):
    for name in ("one", "two"):
        toys.add(name, more=f", names={{'ToyPlugin': 'toy_{name}.heavy:Toy'}}")
    read = "from drivetrain.utils import ToyPlugin; answer = ToyPlugin.__module__"
    assert toys.ask(read) == [
        "BackendConflictError",
        "two backends bring the name 'ToyPlugin': toy-one 1.0 and toy-two 1.0. Uninstall one of the two.",
    ]
    toys.remove("toy-one")
    assert toys.ask(read) == "toy_two.heavy"


@pytest.mark.parametrize("uninstalled", ["toy-first", "toy-second"])
def test_a_contested_backend_is_found_when_one_of_the_two_is_uninstalled(toys, uninstalled):
    for distribution in ("toy-first", "toy-second"):
        toys.add("twin", distribution=distribution)
    _, sentence = toys.ask("answer = registry.resolve('twin')")
    assert f"pip uninstall {uninstalled}" in sentence
    toys.remove(uninstalled)
    assert toys.ask("answer = registry.resolve('twin')") == "twin"


def test_a_contested_tracker_is_found_when_one_of_the_two_is_uninstalled(toys):
    source = """
        from drivetrain.hookspecs import hookimpl

        @hookimpl
        def drivetrain_trackers(): return {'ledger': 'a.b:C'}
    """
    for name in ("one", "two"):
        toys.add(name, plugin=source)
    _, sentence = toys.ask("answer = registry.trackers()")
    assert sentence == (
        "two plugins bring a tracker named 'ledger': toy-one 1.0 and toy-two 1.0. Uninstall one of the two."
    )
    toys.remove("toy-one")
    assert toys.ask("answer = registry.trackers()['ledger']") == "a.b:C"
