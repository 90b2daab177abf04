"""The questions of ``drivetrain config``: which, in which order, and two ways to ask them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import click

from drivetrain.config import load_config
from drivetrain.errors import DrivetrainError

BEST = "the best for the number of processes"


@dataclass(frozen=True)
class Question:
    """One question about one key.

    Args:
        key: of the configuration.
        text: the question.
        default: the answer when the user only presses Enter; empty = the key stays as it is.
        choices: allowed answers; empty = any.
        when: whether to ask, given the answers so far.
    """

    key: str
    text: str
    default: str = ""
    choices: tuple[str, ...] = ()
    when: Callable[[dict[str, str]], bool] = lambda _: True


class Asker(Protocol):
    """How a question is put."""

    def ask(self, question: Question) -> str | None:
        """Return the answer, or ``None`` when nobody answers any more."""


class Terminal:
    """Menus and lines on a terminal. Ctrl-C ends the whole command, nothing is written."""

    def ask(self, question: Question) -> str | None:
        import questionary

        if question.choices:
            prompt = questionary.select(question.text, choices=list(question.choices), default=question.default)
        else:
            prompt = questionary.text(question.text, default=question.default)
        answer: str | None = prompt.ask()
        if answer is None:
            raise click.Abort
        return answer


class Lines:
    """One line of text for each question, from anything that can be read; the end of it leaves the rest unasked."""

    def __init__(self, source: TextIO) -> None:
        self._source = source

    def ask(self, question: Question) -> str | None:
        choices = f" ({', '.join(question.choices)})" if question.choices else ""
        click.echo(f"{question.text}{choices} [{question.default}]: ", nl=False)
        line = self._source.readline()
        click.echo()
        return line.strip() or question.default if line else None


def lines_from(source: TextIO) -> Lines:
    """Ask by lines of text."""
    return Lines(source)


def questions() -> list[Question]:
    """Return the questions, with what is installed as choices of the first."""
    from drivetrain.registry import get_registry

    def several(answers: dict[str, str]) -> bool:
        return answers.get("num_machines", "1") != "1"

    return [
        Question("distributed_type", "Which backend trains?", BEST, (BEST, *get_registry().names())),
        Question("num_machines", "How many machines?", "1"),
        Question("num_processes", "How many processes over all machines? (empty: one per accelerator)"),
        Question("machine_rank", "Which of them is this one, from 0?", "0", when=several),
        Question("main_process_ip", "Address of machine 0?", when=several),
        Question("main_process_port", "Port on machine 0?", "29500", when=several),
        Question("use_cpu", "Stay on the CPU?", "no", ("no", "yes")),
        Question("mixed_precision", "Mixed precision?", "no", ("no", "bf16", "fp16")),
        Question("gradient_accumulation_steps", "Micro-batches between two optimizer steps?", "1"),
    ]


def ask_all(asker: Asker) -> dict[str, Any]:
    """Ask every question and return typed values by key; a wrong answer is explained and asked again.

    Returns:
        Only what was answered, and differs from the key's own default where the default is to leave it open.
    """
    given: dict[str, str] = {}
    for question in questions():
        if not question.when(given):
            continue
        while True:
            answer = asker.ask(question)
            if answer is None:
                click.echo("no more answers: the rest are defaults")
                return _typed(given)
            if answer in {"", BEST}:
                break
            try:
                _check(question, answer, given)
            except DrivetrainError as error:
                click.echo(str(error))
                continue
            given[question.key] = answer
            break
    return _typed(given)


def _check(question: Question, answer: str, given: dict[str, str]) -> None:
    """Raise when this answer is not among the choices or the configuration refuses it."""
    if question.choices and answer not in question.choices:
        raise DrivetrainError(f"{answer!r} is none of {', '.join(question.choices)}")
    load_config(overrides={**given, question.key: answer}, environ={})


def _typed(given: dict[str, str]) -> dict[str, Any]:
    config = load_config(overrides=dict(given), environ={}).config
    return {key: getattr(config, key) for key in given}
