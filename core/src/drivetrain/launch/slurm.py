"""Slurm's compressed lists, of hosts and of tasks, as its variables hold them. No torch."""

from __future__ import annotations

import re


def first_host(listed: str) -> str:
    """First name of Slurm's compressed list: ``node[03-05,9],gpu1`` begins with ``node03``.

    Source: the hostlist expressions of ``scontrol show hostnames``.
    """
    before, bracket, after = listed.partition("[")
    if not bracket or "," in before:
        return before.partition(",")[0]
    inside, _, rest = after.partition("]")
    return before + re.split("[-,]", inside)[0] + first_host(rest)


def tasks_per_node(text: str) -> list[int] | None:
    """Slurm's ``4(x2),3`` as ``[4, 4, 3]``; ``None`` when the text is a plain number or no such list."""
    if text.isdecimal() or not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        return None
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts
