"""Prompts of the configuration wizard: menus on a terminal, one line of text per question elsewhere."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO

import click


@dataclass(frozen=True)
class Choice:
    """One choice of a menu.

    Args:
        value: the answer.
        about: one sentence.
        blocked: why it cannot be taken here, in a word or two; empty when it can.
        cure: the whole reason, and what to type so that it can be taken.
    """

    value: str
    about: str = ""
    blocked: str = ""
    cure: str = ""


@dataclass(frozen=True)
class Question:
    """One question.

    Args:
        text: the question, short enough for one line.
        about: what to know before answering.
        default: the answer when the user only presses Enter.
        choices: answers to choose from; empty = any text.
        several: any number of the choices, with commas between them in the answer.
        complaint: what is wrong with an answer, empty when nothing is.
    """

    text: str
    default: str = ""
    choices: tuple[Choice, ...] = ()
    several: bool = False
    complaint: Callable[[str], str] = lambda _: ""
    about: str = ""


class NoAnswerError(Exception):
    """The input has ended."""


class Asker(Protocol):
    """Asks questions."""

    def ask(self, question: Question) -> str:
        """Return a valid answer. Raises :class:`NoAnswerError`; ``click.Abort`` when interrupted."""


class Terminal:
    """Menus and lines on a terminal, by questionary. Ctrl-C ends the whole command."""

    def ask(self, question: Question) -> str:
        import questionary

        _explain(question)
        if question.several:
            chosen = question.default.split(",")
            menu = [
                questionary.Choice(each.value, checked=each.value in chosen, description=_below_menu(each))
                for each in question.choices
            ]
            prompt = questionary.checkbox(
                question.text,
                menu,
                instruction="(space marks, enter goes on)",
                validate=lambda marked: question.complaint(",".join(marked)) or True,
            )
        elif question.choices:
            menu = [
                questionary.Choice(each.value, disabled=each.blocked or None, description=_below_menu(each))
                for each in question.choices
            ]
            # The cursor cannot be on a disabled choice.
            free = [each.value for each in question.choices if not each.blocked]
            start = question.default if question.default in free else None
            prompt = questionary.select(question.text, menu, default=start, instruction="(arrow keys)")
        else:
            prompt = questionary.text(
                question.text, default=question.default, validate=lambda text: _valid(question, text)
            )
        answer: str | list[str] | None = prompt.ask(kbi_msg="")
        if answer is None:
            raise click.Abort
        return ",".join(answer) if isinstance(answer, list) else answer.strip() or question.default


class Lines:
    """One line of text for each question, from any stream."""

    def __init__(self, source: TextIO) -> None:
        self._source = source

    def ask(self, question: Question) -> str:
        _explain(question)
        told = any(each.about or each.blocked for each in question.choices)
        for each in question.choices if told else ():
            click.echo(f"  {each.value}{f' ({each.blocked})' if each.blocked else ''}: {each.about}".rstrip(": "))
        more = "" if told or not question.choices else f" ({', '.join(each.value for each in question.choices)})"
        more += " (several with commas between them)" if question.several else ""
        while True:
            click.echo(f"{question.text}{more} [{question.default}]: ", nl=False)
            line = self._source.readline()
            click.echo()
            if not line:
                raise NoAnswerError
            answer = line.strip() or question.default
            complaint = _not_a_choice(question, answer) or question.complaint(answer)
            if not complaint:
                return answer
            click.echo(complaint)


def explain_blocked(choices: Sequence[Choice]) -> None:
    """Explain each blocked choice and what to do about it, below the menu."""
    for each in choices:
        if each.cure:
            _aside(f"{each.value} cannot be chosen here: {each.cure}")


def _explain(question: Question) -> None:
    if question.about:
        _aside(question.about)
    explain_blocked(question.choices)


def _aside(text: str) -> None:
    click.echo(click.style(textwrap.fill(text, _width(), initial_indent="  ", subsequent_indent="    "), dim=True))


def _below_menu(choice: Choice) -> str | None:
    """The description of the choice under the cursor; questionary itself cuts what is longer than a line."""
    indent = " " * len("  Description: ")
    return textwrap.fill(choice.about, _width(), initial_indent=indent, subsequent_indent=indent).strip() or None


def _width() -> int:
    return shutil.get_terminal_size().columns - 1


def _valid(question: Question, answer: str) -> bool | str:
    return question.complaint(answer.strip() or question.default) or True


def _not_a_choice(question: Question, answer: str) -> str:
    """The error for an answer that is not among the choices."""
    if not question.choices:
        return ""
    free = [each.value for each in question.choices if not each.blocked]
    blocked = {each.value: each.blocked for each in question.choices if each.blocked}
    for word in answer.split(",") if question.several else [answer]:
        if word.strip() in blocked:
            return f"{word.strip()} cannot be chosen here: {blocked[word.strip()]}"
        if word.strip() not in free and answer:
            return f"{word.strip()!r} is none of {', '.join(free)}"
    return ""
