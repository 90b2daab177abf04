"""Matches the numbered parameters of an optimizer's ``state_dict`` to names, by shape and order. Imports no torch.

``torch.optim`` numbers its parameters group by group and keeps no names. Known are the names and shapes of the
model's tensors in the model's order, and for each number the shape of its state, if it has any.
"""

from __future__ import annotations

from collections.abc import Sequence

Shape = tuple[int, ...]

_MOST_STATES = 200_000
"""Partial answers that are looked at; beyond this the question counts as ambiguous."""


def match(names: Sequence[tuple[str, Shape]], groups: Sequence[Sequence[Shape | None]]) -> list[list[str]] | None:
    """Name every entry of every group, if there is exactly one way to do it.

    Each group lists its parameters in the model's order; no parameter is in two groups; some may be in none.

    Args:
        names: name and shape of what can be a parameter, in the model's order.
        groups: for each group the shape of each entry, ``None`` where it is unknown.

    Returns:
        Names in the form of ``groups``; ``None`` when there is no way, or more than one.
    """
    # Forward: the positions in all groups that are reachable before each name, and in how many ways (2 means several).
    start = tuple(0 for _ in groups)
    goal = tuple(len(group) for group in groups)
    levels: list[dict[tuple[int, ...], int]] = [{start: 1}]
    for left, (_, shape) in zip(range(len(names) - 1, -1, -1), names, strict=True):
        level: dict[tuple[int, ...], int] = {}
        for place, ways in levels[-1].items():
            for after in _moves(place, shape, groups):
                if sum(goal) - sum(after) <= left:
                    level[after] = min(2, level.get(after, 0) + ways)
        levels.append(level)
        if len(level) > _MOST_STATES:
            return None
    if levels[-1].get(goal) != 1:
        return None
    # Backward along the only way.
    found: list[list[str]] = [[] for _ in groups]
    place = goal
    for (name, shape), level in zip(reversed(names), reversed(levels[:-1]), strict=True):
        before = next(one for one in level if place in _moves(one, shape, groups))
        for number, (old, new) in enumerate(zip(before, place, strict=True)):
            if new > old:
                found[number].insert(0, name)
        place = before
    return found


def match_unordered(
    names: Sequence[tuple[str, Shape]], groups: Sequence[Sequence[Shape | None]]
) -> list[list[str]] | None:
    """Like :func:`match`, without the order of ``names``: an entry's shape must be that of one name only."""
    by_shape: dict[Shape, list[str]] = {}
    for name, shape in names:
        by_shape.setdefault(shape, []).append(name)
    found = []
    for group in groups:
        fitting = [by_shape.get(shape, []) if shape is not None else [] for shape in group]
        if any(len(each) != 1 for each in fitting):
            return None
        found.append([each[0] for each in fitting])
    every = [name for group in found for name in group]
    return found if len(set(every)) == len(every) else None


def _moves(place: tuple[int, ...], shape: Shape, groups: Sequence[Sequence[Shape | None]]) -> list[tuple[int, ...]]:
    """Possible assignments of one more name: to each group whose next entry fits, or to none."""
    moves = [place]
    for number, group in enumerate(groups):
        at = place[number]
        if at < len(group) and group[at] in (None, shape):
            moves.append((*place[:number], at + 1, *place[number + 1 :]))
    return moves
