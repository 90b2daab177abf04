"""Words of error messages: the guess after a typing mistake, lists as people write them, texts that are too long."""

from __future__ import annotations

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
