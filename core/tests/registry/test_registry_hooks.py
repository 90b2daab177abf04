"""Hooks: misspelt, unmarked, failing, observed, traced; trackers and commands from several plugins."""

from __future__ import annotations

import re

import pytest

from drivetrain.registry import Registry, get_registry, reset_registry

HEAD = """
    from drivetrain.backend import BackendInfo
    from drivetrain.hookspecs import hookimpl
"""


def test_a_misspelt_hook_breaks_its_plugin_and_is_guessed(toys):
    toys.add("typo", plugin=HEAD + "    @hookimpl\n    def drivetrain_backend(): return []\n")
    toys.add("sound")
    assert toys.ask("answer = registry.resolve('sound_alias')") == "sound"
    kind, sentence = toys.ask("answer = registry.info('typo')")
    assert kind == "BackendBrokenError"
    assert "there is no hook 'drivetrain_backend'. Did you mean 'drivetrain_backends'?" in sentence


def test_a_misspelt_hook_that_is_no_plain_function_is_found_by_pluggy(toys):
    code = """
    class Called:
        @hookimpl
        def drivetrain_stepended(self): ...
    drivetrain_stepended = Called().drivetrain_stepended
    """
    toys.add("typo", plugin=HEAD + code)
    assert "unknown hook 'drivetrain_stepended'" in toys.ask("answer = registry.info('typo')")[1]


def test_a_hook_without_its_mark_would_never_be_called_and_is_refused(toys):
    toys.add("unmarked", plugin="def drivetrain_backends(): return []")
    assert "drivetrain_backends lacks @hookimpl" in toys.ask("answer = registry.info('unmarked')")[1]


def test_a_wrong_parameter_of_a_hook_breaks_its_plugin(toys):
    toys.add("wrong", plugin=HEAD + "    @hookimpl\n    def drivetrain_closed(trainer): ...\n")
    toys.add("sound")
    assert "trainer" in toys.ask("answer = registry.info('wrong')")[1]
    assert toys.ask("registry.load_all(); answer = registry.listens('closed')") is False


def test_a_wrong_answer_breaks_its_plugin(toys):
    toys.add("wrong", plugin=HEAD + "    @hookimpl\n    def drivetrain_backends(): return 'sound'\n")
    toys.add(
        "shouting",
        plugin=HEAD + "    @hookimpl\n    def drivetrain_backends(): return [BackendInfo('BIG', '', 'a:b')]\n",
    )
    assert "not a list of BackendInfo" in toys.ask("answer = registry.info('wrong')")[1]
    assert "lower-case identifier, not 'BIG'" in toys.ask("answer = registry.info('shouting')")[1]


def test_an_observer_that_fails_is_named_and_the_others_are_told(toys):
    listening = HEAD + "    @hookimpl\n    def drivetrain_closed(accelerator): {body}\n"
    toys.add("a_fails", plugin=listening.format(body="1 / 0"))
    toys.add("b_hears", plugin=listening.format(body="accelerator.append('b')"))
    code = (
        "import logging; logging.basicConfig(format='%(message)s')\n"
        "from drivetrain.registry import get_registry\n"
        "heard = []; r = get_registry()\n"
        "r.notify('closed', accelerator=heard); print(heard, r.listens('closed'), r.listens('prepared'))"
    )
    done = toys.run("-c", code)
    assert done.stdout.strip() == "['b'] True False"
    assert "plugin a_fails (toy-a_fails 1.0) failed in drivetrain_closed" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_trackers_of_all_plugins_are_joined_and_a_contested_one_names_both(toys):
    source = HEAD + "    @hookimpl\n    def drivetrain_trackers(): return {{'{name}': 'a.b:C'}}\n"
    toys.add("one", plugin=source.format(name="ledger"))
    toys.add("two", plugin=source.format(name="diary"))
    found = toys.ask("answer = registry.trackers()")
    assert {"ledger", "diary"} <= set(found)
    toys.add("three", plugin=source.format(name="ledger"))
    kind, sentence = toys.ask("answer = registry.trackers()")
    assert kind == "BackendConflictError"
    assert "toy-one 1.0 and toy-three 1.0" in sentence


def test_the_first_plan_that_is_no_none_wins(toys):
    source = HEAD + "    @hookimpl\n    def drivetrain_pipeline_split(model, num_stages): return {answer}\n"
    toys.add("one", plugin=source.format(answer="None"))
    toys.add("two", plugin=source.format(answer="['here'] * (num_stages - 1)"))
    assert toys.ask("answer = [registry.pipeline_split(None, 3), registry.tensor_parallel_plan(None, 2)]") == [
        ["here", "here"],
        None,
    ]


def test_hook_calls_are_traced_when_the_environment_says_so(toys):
    toys.add("sound")
    code = "from drivetrain.registry import get_registry; get_registry().info('sound')"
    assert "drivetrain_backends" in toys.run("-c", code, DRIVETRAIN_TRACE_HOOKS="1").stderr
    assert toys.run("-c", code, DRIVETRAIN_TRACE_HOOKS="0").stderr == ""


def test_a_plugin_may_be_registered_by_a_script(toys):
    toys.add("sound")
    assert toys.ask("""
        import types
        from drivetrain.backend import BackendInfo
        from drivetrain.hookspecs import hookimpl

        class Mine:
            @hookimpl
            def drivetrain_backends(self):
                return [BackendInfo('mine', 'My own.', 'a:b', aliases=('sound',))]

        registry.register(Mine(), name='script')
        answer = [registry.resolve('mine'), registry.resolve('sound'), registry.owner('mine')]
    """) == ["mine", "sound", "script"]


def test_one_registry_a_process_until_it_is_reset():
    first = get_registry()
    assert get_registry() is first
    reset_registry()
    assert get_registry() is not first
    assert isinstance(get_registry(), Registry)


@pytest.mark.parametrize("leaving", ["sys.exit(3)", "raise GeneratorExit", "raise Leaving('now')"])
def test_a_hook_that_leaves_is_a_broken_plugin_and_the_others_go_on(toys, leaving):
    source = f"""
    import sys
    class Leaving(BaseException): ...
    {{mark}}
    def drivetrain_{{hook}}: {leaving}
    """
    for name, hook in {
        "a_lists": "backends()", "b_tracks": "trackers()", "c_commands": "commands(group)", "d_closes": "closed()",
    }.items():  # fmt: skip
        toys.add(name, plugin=HEAD + source.format(mark="@hookimpl", hook=hook))
    toys.add("e_imports", plugin=source.format(mark="", hook="x()").replace("def drivetrain_x(): ", ""))
    probing = HEAD + f"""
    import sys
    class Leaving(BaseException): ...
    def probe(): {leaving}
    @hookimpl
    def drivetrain_backends(): return [BackendInfo('f_probes', 'A toy.', 'a:b', probe=probe)]
    """
    toys.add("f_probes", plugin=probing)
    toys.add("sound")
    kind = {"s": "SystemExit", "r": leaving.removeprefix("raise ").partition("(")[0]}[leaving[0]]
    done = toys.run("-c", "from drivetrain.cli.main import main; main()", "backends")
    assert done.returncode == 0, done.stderr
    for name in ("a_lists", "e_imports", "f_probes"):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{name}  ")]
        assert "broken" in line or "blocked" in line
    assert done.stdout.count(kind) == 3
    assert re.search(r"^sound  ready", done.stdout, re.MULTILINE)
    helped = toys.run("-c", "from drivetrain.cli.main import main; main()", "--help")
    assert helped.returncode == 0
    assert f"toy-c_commands 1.0 could not add its commands: {kind}" in helped.stderr
    told = toys.run(
        "-c",
        "from drivetrain.registry import get_registry; r = get_registry(); r.notify('closed', accelerator=None)\n"
        "print(r.trackers())",
    )
    assert told.returncode == 0, told.stderr
    assert "plugin d_closes (toy-d_closes 1.0) failed in drivetrain_closed" in told.stderr
    assert "plugin 'b_tracks' failed in the hook drivetrain_trackers" in told.stderr


def test_a_plan_that_leaves_the_process_is_an_error(toys):
    source = "    import sys\n    @hookimpl\n    def drivetrain_pipeline_split(model, num_stages): sys.exit(0)\n"
    toys.add("leaves", plugin=HEAD + source)
    kind, sentence = toys.ask("answer = registry.pipeline_split(None, 2)")
    assert kind == "BackendBrokenError"
    assert "raised SystemExit in the hook drivetrain_pipeline_split; it is implemented by toy-leaves 1.0" in sentence


def test_a_module_that_leaves_when_it_is_imported_is_a_broken_backend(toys):
    toys.add("sound", heavy="import sys; sys.exit(0)")
    kind, sentence = toys.ask("answer = registry.load_backend(registry.info('sound'))")
    assert kind == "BackendBrokenError"
    assert "toy_sound.heavy:Toy could not be imported: SystemExit: 0 [toy-sound 1.0]" in sentence


def test_a_probe_that_answers_something_else_is_said(toys):
    answer = "return [BackendInfo('odd', '', 'a:b', probe=lambda: True)]"
    toys.add("odd", plugin=HEAD + f"    @hookimpl\n    def drivetrain_backends(): {answer}\n")
    (why,) = toys.ask("answer = [each.why for each in registry.reports() if each.name == 'odd']")
    assert "the probe of backend 'odd' failed: TypeError: it returned True, not a Readiness" in why


def test_what_a_plugin_says_in_no_unicode_is_shown_escaped(toys):
    toys.add("odd", plugin="raise ValueError('half \\ud83d a pair')")
    done = toys.run("-c", "from drivetrain.cli.main import main; main()", "backends")
    assert done.returncode == 0, done.stderr
    assert r"ValueError: half \ud83d a pair" in done.stdout
