"""Derives a tensor-parallel plan by following the flow of data in a recorded forward.

A trial begins with one parameter, cut along the dim that a layer writes, and adds what that requires: a weight that
reads the cut dim is cut along it (column, then row), the other operand of a product comes from a layer that is cut
alike (queries, keys and values; both branches of a gated unit), a fused layer is cut in parts. It ends well when
every result is whole again; else the parameter stays whole.
"""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain_megatron.tensor.sharded import operation
from drivetrain_megatron.tensor.trace import Trace
from drivetrain_megatron.tensor.trial import (
    Cut,
    Group,
    Probe,
    Refused,
    Replay,
    Unit,
    WantsCut,
    WantsParts,
    views_of_parameters,
    written_dim,
)


def derive(trace: Trace, *, taken: Iterable[int] = ()) -> list[Group]:
    """All groups of parameters that can be cut.

    Args:
        trace: a forward.
        taken: parameters that stay as they are.
    """
    replay, parameters = Replay(trace), set(trace.parameters.values())
    views, users = views_of_parameters(trace, parameters), trace.users()
    groups: list[Group] = []
    used = set(taken)

    def attempt(first: int, number: int, dim: int, *, vocabulary: bool = False) -> None:
        group = try_cuts(replay, first, {number: Cut(dim)}, used, vocabulary=vocabulary)
        if group is not None:
            groups.append(group)
            used.update(group.cuts)

    for first, number in _tables(trace, parameters):
        if number not in used:
            attempt(first, number, 0, vocabulary=True)
    words = {trace.values[number].shape[0] for _, number in _tables(trace, parameters)}
    for first, call in enumerate(trace.calls):
        weight = written_dim(call, trace, views)
        if weight is None or weight[0] in used:
            continue
        # A piece of it was taken before.
        begin = min(first, *users[weight[0]])
        attempt(begin, *weight)
        if weight[0] not in used and trace.values[weight[0]].shape[weight[1]] in words:
            attempt(begin, *weight, vocabulary=True)
    return groups


_MOST_ATTEMPTS = 12
"""Maximum rounds of a trial; more rounds than a layer has operands mean that it does not converge."""


def try_cuts(
    replay: Replay, first: int, cuts: dict[int, Cut], used: set[int], *, vocabulary: bool = False
) -> Group | None:
    """Grow a group from these cuts; ``None`` when it cannot be."""
    start, tried = dict(cuts), set()
    for _ in range(_MOST_ATTEMPTS):
        group = Group(dict(start), first=first)
        probe = Probe(replay.on_cut)
        try:
            replay.run(group, probe, outputs_may_be_cut=vocabulary)
        except WantsCut as wish:
            start |= wish.cuts
            # A bias may have been taken to pieces before the weight was.
            first = min(first, *(min(replay.users[number]) for number in wish.cuts))
            continue
        except WantsParts as wish:
            if not _give_parts(replay.trace, start, wish.length, wish.parts):
                return None
            continue
        except Refused:
            # A view may have cut a fused dim at its outer factor: three for queries, keys and values.
            hint = next((each for each in probe.hints if each not in tried), None)
            if hint is None:
                return None
            tried.add(hint)
            if not _give_parts(replay.trace, start, *hint):
                return None
            continue
        if not vocabulary:
            group.units = probe.units | {
                unit for number, cut in group.cuts.items() for unit in _units(replay, number, cut)
            }
        useful = vocabulary or len(group.cuts) > 1
        return group if useful and not used & set(group.cuts) else None
    return None


def _units(replay: Replay, number: int, cut: Cut) -> Iterable[Unit]:
    shape = replay.trace.values[number].shape
    return (Unit(part, part) for part in cut.parts or (shape[cut.dim],))


def _give_parts(trace: Trace, cuts: dict[int, Cut], length: int, parts: tuple[int, ...]) -> bool:
    """Give the cuts of this length finer parts; whether there was one that had coarser ones."""
    changed = False
    for number, cut in list(cuts.items()):
        if trace.values[number].shape[cut.dim] == length == sum(parts) and len(parts) > len(cut.parts or (length,)):
            cuts[number] = Cut(cut.dim, parts)
            changed = True
    return changed


def _tables(trace: Trace, parameters: set[int]) -> list[tuple[int, int]]:
    """Embeddings that words are looked up in: the call, and the table. A table of positions takes no input."""
    makers = trace.makers()
    found = []
    for place, call in enumerate(trace.calls):
        if operation(call.func) != "embedding":
            continue
        ids, table = call.inputs[:2]
        rows, columns = trace.values[table].shape
        if table in parameters and rows >= columns and _comes_from(trace, makers, ids) & trace.inputs:
            found.append((place, table))
    return found


def _comes_from(trace: Trace, makers: dict[int, int], number: int) -> set[int]:
    waiting, seen = [number], set()
    while waiting:
        at = waiting.pop()
        if at not in seen:
            seen.add(at)
            if at in makers:
                waiting.extend(trace.calls[makers[at]].inputs)
    return seen


def conditions(trace: Trace, cuts: dict[int, Cut]) -> tuple[set[Unit], dict[int, Cut]]:
    """Return the conditions on the number of ranks for a given plan, and its cuts with packed parts.

    Unlike in :func:`derive`, what is needed whole may be gathered.
    """
    replay, own = Replay(trace), dict(cuts)
    for _ in range(_MOST_ATTEMPTS):
        probe = Probe(lambda *_: None, strict=False)
        try:
            replay.run(Group(dict(own)), probe, outputs_may_be_cut=True)
        except WantsParts as wish:
            if _give_parts(trace, own, wish.length, wish.parts):
                continue
        except Refused:
            return set(), own
        return probe.units, own
    return set(), own
