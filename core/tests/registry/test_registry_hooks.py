"""Hooks: misspelt, unmarked, failing, observed, traced; trackers and commands from several plugins."""

from __future__ import annotations

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
