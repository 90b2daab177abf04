"""Does a checkpoint fit what is to be loaded? Names, shapes, parameter groups, and the sentences. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from drivetrain.errors import CheckpointMismatchError

_SHOWN = 6  # Names in one sentence; a wrong model has hundreds.


@dataclass
class Differences:
    """What one rank found.

    Args:
        missing: needed here, not in the checkpoint.
        unused: in the checkpoint, not needed here.
        shapes: sentences about tensors of another shape.
        others: further sentences; loading cannot go on with any of these or of ``shapes``, strict or not.
    """

    missing: set[str] = field(default_factory=set)
    unused: set[str] = field(default_factory=set)
    shapes: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def joined(found: Sequence[Differences]) -> Differences:
    """All ranks' differences as one: a tensor is unused only if no rank needs it."""
    return Differences(
        missing=set().union(*(one.missing for one in found)),
        unused=set.intersection(*(one.unused for one in found)),
        shapes=_once(sentence for one in found for sentence in one.shapes),
        others=_once(sentence for one in found for sentence in one.others),
    )


def judge(differences: Differences, where: str, *, strict: bool) -> str:
    """Raise when the checkpoint does not fit.

    Args:
        differences: of all ranks.
        where: the checkpoint's folder.
        strict: missing and unused names count too.

    Returns:
        The sentence about names that were passed over, empty when there are none.

    Raises:
        CheckpointMismatchError: names every kind of difference at once.
    """
    hard = [*differences.others]
    if differences.shapes:
        hard.append("other shapes: " + _list(differences.shapes))
    soft = []
    if differences.missing:
        soft.append("missing in the checkpoint: " + _list(_hinted(differences.missing, differences.unused)))
    if differences.unused:
        soft.append("in the checkpoint but not here: " + _list(sorted(differences.unused)))
    if hard or (strict and soft):
        raise CheckpointMismatchError(
            "the checkpoint does not fit what is prepared: " + "; ".join(hard + soft),
            whose=where,
            cure="Prepare the same models, optimizers and registered objects in the same order as when it was saved"
            + (", or pass strict=False to leave out the names that differ." if not hard else "."),
        )
    return "; ".join(soft)


def compare_groups(
    saved: Any, here: Any, tied: Mapping[str, str], what: str, ungrouped: Collection[str] = ()
) -> list[str]:
    """Sentences about optimizers and parameter groups that differ; empty when they fit.

    Groups are the same when they hold the same parameters, in any order, and stand at the same position: schedulers
    address them by position.

    Args:
        saved: list of optimizers, each a list of groups with ``"params"`` (names).
        here: the same of what is prepared.
        tied: first name of each other name of a tied parameter, on both sides.
        what: begins the sentences, e.g. ``"model 0"``.
        ungrouped: parameters of which the checkpoint does not know whether they were in a group; they do not count.
    """
    if len(saved) != len(here):
        return [f"{what} was saved with {len(saved)} optimizer(s) and has {len(here)} here"]
    sentences = []
    for number, (old, new) in enumerate(zip(saved, here, strict=True)):
        before = [{tied.get(name, name) for name in group["params"]}.difference(ungrouped) for group in old]
        after = [{tied.get(name, name) for name in group["params"]}.difference(ungrouped) for group in new]
        if before == after:
            continue
        where = f"optimizer {number} of {what}"
        if len(before) == len(after) and all(group in after for group in before):
            sentences.append(f"{where} has its parameter groups in another order")
        elif set().union(*before) == set().union(*after):
            moved = {name for one, two in zip(before, after, strict=False) for name in one ^ two}
            sentences.append(
                f"{where} has {len(after)} parameter group(s) where {len(before)} were saved, "
                f"differing in {_list(sorted(moved))}"
            )
        else:
            gone, come = set().union(*before) - set().union(*after), set().union(*after) - set().union(*before)
            parts = [f"no longer holds {_list(sorted(gone))}"] if gone else []
            parts += [f"did not hold {_list(_hinted(come, gone))} when it was saved"] if come else []
            sentences.append(f"{where} {' and '.join(parts)}")
    return sentences


def _hinted(names: Iterable[str], candidates: Iterable[str]) -> list[str]:
    pool = sorted(candidates)
    hinted: list[str] = []
    for name in sorted(names):
        near = get_close_matches(name, pool, n=1) if len(hinted) < _SHOWN else []
        hinted.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return hinted


def _list(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def _once(sentences: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(sentences))
