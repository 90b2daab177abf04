from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.backend import RunSettings
from drivetrain.distributed.current import World
from drivetrain.distributed.process_control import ProcessControl
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.launch.environment import read_process_info
from drivetrain_testing import spawn


def start() -> ProcessControl:
    """What a script has before it makes an accelerator."""
    world = World(RunSettings(process=read_process_info(), device_type="cpu"))
    world.start()
    return ProcessControl(world)


def facts() -> list[Any]:
    control = start()
    assert control.device == torch.device("cpu")
    return [
        control.num_processes,
        control.process_index,
        control.local_process_index,
        control.is_main_process,
        control.is_local_main_process,
        control.is_last_process,
        control.use_distributed,
    ]


def test_facts() -> None:
    assert spawn(facts, 1) == [[1, 0, 0, True, True, True, False]]
    assert spawn(facts, 2) == [[2, 0, 0, True, True, False, True], [2, 1, 1, False, False, True, True]]


def decorated() -> list[Any]:
    control = start()
    ran: list[str] = []

    @control.on_main_process
    def bare(value: int, *, plus: int = 0) -> int:
        """Kept."""
        ran.append("bare")
        return value + plus

    @control.on_main_process()
    def called(value: int) -> int:
        return value

    @control.on_local_main_process
    def local(value: int) -> int:
        return value

    @control.on_last_process
    def last(value: int) -> int:
        return value

    @control.on_process(process_index=1)
    def second(value: int) -> int:
        return value

    @control.on_local_process(local_process_index=1)
    def local_second(value: int) -> int:
        return value

    assert bare.__name__ == "bare"
    assert bare.__doc__ == "Kept."
    results = [bare(1, plus=1), called(2), local(3), last(4), second(5), local_second(6)]
    results.append(control.on_process(lambda: 7, process_index=1)())
    return [results, ran]


def test_decorated_functions_run_where_they_should_and_return_what_they_return() -> None:
    assert spawn(decorated, 2) == [[[2, 2, 3, None, None, None, None], ["bare"]], [[None, None, None, 4, 5, 6, 7], []]]
    # A lone process is every process, so that a script for two runs on one.
    assert spawn(decorated, 1) == [[[2, 2, 3, 4, 5, 6, 7], ["bare"]]]


def names_nobody() -> None:
    control = start()
    with pytest.raises(UsageError, match=r"process_index=2 names none of 2 .*Give process_index a value from 0 to 1"):
        control.on_process(process_index=2)
    assert [control.on_process(lambda: 7, process_index=index)() for index in range(2)].count(7) == 1
    with pytest.raises(UsageError, match="process_index=None names none of 2"):
        control.on_process(lambda: 1, process_index=None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="local_process_index=-1 names none of 2"):
        control.on_local_process(local_process_index=-1)
    with pytest.raises(UnsupportedError, match=r"does not train \(Linear was given\)"):
        control._job.prepare(torch.nn.Linear(1, 1))


def test_a_process_that_does_not_exist_is_refused() -> None:
    spawn(names_nobody, 2)


def main_goes_first(folder: str, local: bool) -> bool:
    control = start()
    mark = Path(folder) / "mark"
    with control.local_main_process_first() if local else control.main_process_first():
        if control.is_main_process:
            assert not mark.exists()
            mark.write_text("made by the main process")
        return mark.exists()


@pytest.mark.parametrize("local", [False, True])
def test_the_main_process_goes_first(tmp_path: Path, local: bool) -> None:
    assert spawn(main_goes_first, 4, str(tmp_path), local) == [True] * 4


def main_fails_first() -> str:
    control = start()
    try:
        with control.main_process_first():
            if control.is_main_process:
                raise ValueError("no disk")
    except ValueError as error:
        return str(error)
    return "passed"


def test_a_failing_main_process_does_not_keep_the_others_waiting() -> None:
    assert spawn(main_fails_first, 2, timeout=20) == ["no disk", "passed"]


def prints(capture: str) -> str:
    with Path(capture).with_suffix(f".{read_process_info().rank}").open("w+") as file:
        start().print("hello", "there", sep="-", file=file)
        file.seek(0)
        return file.read()


def test_print_speaks_once_per_machine(tmp_path: Path) -> None:
    assert spawn(prints, 2, str(tmp_path / "out")) == ["hello-there\n", ""]


def splits() -> list[Any]:
    control = start()
    prompts = {"text": ["a", "b", "c"], "ids": torch.arange(3)}
    with control.split_between_processes(prompts, apply_padding=True) as mine:
        out = [mine["text"], mine["ids"].tolist()]
    with control.split_between_processes(["a"]) as mine:
        out.append(mine)
    assert prompts["text"] == ["a", "b", "c"], "the inputs are left as they were"
    return out


def test_inputs_are_split_between_processes() -> None:
    assert spawn(splits, 2) == [[["a", "b"], [0, 1], ["a"]], [["c", "c"], [2, 2], []]]
    assert spawn(splits, 1) == [[["a", "b", "c"], [0, 1, 2], ["a"]]]
