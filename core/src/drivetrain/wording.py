"""Words messages: nearest matches, lists, cut texts and the likely cause of a communication library's error.

No torch, and nothing of the package: errors and everything above them use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


def closest(word: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the candidate that was probably meant, compared without regard to case, or ``None``.

    Args:
        word: what the user typed.
        candidates: what would have been right.
        cutoff: similarity (0 to 1) below which nothing is guessed. 0.6 is difflib's own; it takes one wrong letter in
            a word of four and does not take ``dp`` for ``xla``.
    """
    import difflib  # only where something was mistyped

    by_form = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(word.lower(), by_form, n=1, cutoff=cutoff)
    return by_form[matches[0]] if matches else None


def did_you_mean(word: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``"Did you mean 'x'?"``, or an empty string when nothing is near."""
    guess = closest(word, candidates, cutoff=cutoff)
    return f"Did you mean {guess!r}?" if guess is not None else ""


def listed(words: Iterable[str], *, nothing: str = "none") -> str:
    """Return the words, sorted and separated by commas, or ``nothing`` when there are none."""
    return ", ".join(sorted(words)) or nothing


def sentences(*parts: str) -> str:
    """Join the parts that are not empty by a space."""
    return " ".join(part for part in parts if part)


def cut(text: str, limit: int) -> str:
    """Return the text, or its beginning and how long it is when it is longer than ``limit`` characters."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


_COMMUNICATION = re.compile(
    "gloo|nccl|xccl|hccl|timed out (waiting|initializ)|connection (closed|reset)|collective operation", re.IGNORECASE
)
"""Messages that communication libraries write when other ranks do not take part."""


def likely_cause(message: str) -> str:
    """The likely cause and the cure of an error of a communication library; empty for any other error."""
    if not _COMMUNICATION.search(message):
        return ""
    return (
        "Likely cause, where no rank ended before with an error of its own: ranks have not run the same submodules in "
        "this step, or one made no backward, so that what they send each other does not match. Run every submodule on "
        "every rank, in the same order, and choose by a mask afterwards what counts (`torch.where`, or weight 0 in the "
        "loss); under distributed_type: ddp ranks may run different ones. desync_watchdog: true finds calls of the "
        "script that differ."
    )


def installed(distribution: str) -> str:
    """Return the distribution with its version, or only its name where it is not installed."""
    from importlib import metadata  # only where something is missing

    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return distribution
