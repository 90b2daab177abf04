"""Layout of a model over ranks, as ``drivetrain plan show`` prints it, as text and as JSON. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

WHOLE = "replicated"
"""The style of a parameter that every tensor-parallel rank holds whole."""


@dataclass(frozen=True)
class Held:
    """One parameter.

    Args:
        name: as the engine calls it.
        style: how it is cut over the tensor-parallel ranks, in the engine's words.
        shape: whole.
        local_shapes: on each tensor-parallel rank.
        element_size: bytes of an element.
        stages: that hold it, ascending; several where it is tied across them.
        of: the model's own names, where the engine calls it something else.
        tied: its further names.
    """

    name: str
    style: str
    shape: tuple[int, ...]
    local_shapes: Sequence[tuple[int, ...]]
    element_size: int
    stages: tuple[int, ...] = (0,)
    of: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """A model over the ranks of the axes ``pp`` and ``tp``.

    Args:
        model: its class.
        engine: what computes it.
        source: where the tensor-parallel plan comes from; empty without tensor parallelism.
        cut: where the stages come from; empty if there is one stage.
        degree: ranks of the axis ``tp``.
        rank_of_stage: for each stage, in order, its rank of the axis ``pp``.
        modules: for each stage what it computes, by names in the model.
        parameters: each once.
        remark: what else there is to know.
    """

    model: str
    engine: str
    source: str
    cut: str
    degree: int
    rank_of_stage: tuple[int, ...]
    modules: Sequence[Sequence[str]]
    parameters: Sequence[Held]
    remark: str = ""

    @property
    def pipeline_ranks(self) -> int:
        """Ranks of the axis ``pp``."""
        return max(self.rank_of_stage) + 1

    def of_stage(self, stage: int) -> list[Held]:
        """Return the parameters of a stage."""
        return [one for one in self.parameters if stage in one.stages]

    def of_rank(self, pipeline_rank: int) -> list[Held]:
        """Return the parameters of a pipeline rank, over all of its stages; shared ones once."""
        return [one for one in self.parameters if pipeline_rank in {self.rank_of_stage[stage] for stage in one.stages}]

    def ranks(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield for each rank its ``pp`` and ``tp`` coordinates, and the number and bytes of its parameters."""
        for pipeline_rank in range(self.pipeline_ranks):
            for rank in range(self.degree):
                yield pipeline_rank, rank, *_sizes(self.of_rank(pipeline_rank), rank)

    @property
    def whole_bytes(self) -> int:
        """Bytes of all parameters in one process."""
        return sum(prod(one.shape) * one.element_size for one in self.parameters)

    # ---- for people -------------------------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        """Return the page; parameters of one layer after the other that lie alike share a line."""
        several = len(self.rank_of_stage) > 1
        lines = [*self._head(), ""]
        for stage, rank in enumerate(self.rank_of_stage):
            held = self.of_stage(stage)
            if several:
                lines.append(f"stage {stage}, pipeline rank {rank}: {', '.join(collapsed(self.modules[stage]))}")
                lines += [f"  {line}" for line in [*self._table(held, stage), self._told(held)]]
            else:
                lines += self._table(held, stage)
            lines.append("")
        if len(self.rank_of_stage) > self.pipeline_ranks:
            for pipeline_rank in range(self.pipeline_ranks):
                lines.append(f"pipeline rank {pipeline_rank}, all stages: {self._told(self.of_rank(pipeline_rank))}")
        most = max(size for *_, size in self.ranks())
        share = most / self.whole_bytes if self.whole_bytes else 1.0
        lines.append(f"a rank holds at most {most:,} of {self.whole_bytes:,} bytes of parameters ({share:.1%})")
        return lines + ([self.remark] if self.remark else [])

    def _head(self) -> list[str]:
        depth, width = self.pipeline_ranks, self.degree
        lines = [f"{self.model} by engine {self.engine}, {depth * width} rank(s): pp {depth} x tp {width}"]
        if self.cut:
            lines.append(f"{len(self.rank_of_stage)} stages, by {self.cut}")
        if self.source:
            lines.append(f"tensor parallel over {self.degree} ranks, by {self.source}")
        return lines

    def _told(self, held: Sequence[Held]) -> str:
        """Describe the parameters of the tensor-parallel rank that holds the most of these."""
        count, size = max((_sizes(held, rank) for rank in range(self.degree)), key=lambda sizes: sizes[1])
        return f"{count:,} parameters, {size:,} bytes on a rank"

    def _table(self, held: Sequence[Held], stage: int) -> list[str]:
        heads = ("style", "whole", "on a rank") if self.source else ("whole",)
        lines = [_Line(one.name, self._cells(one), _remark(one, stage)) for one in held]
        cells = [("parameter", *heads, "")]
        cells += [(line.name, *line.cells, line.remark) for line in _merged(lines)]
        widths = [*(max(len(row[column]) for row in cells) for column in range(len(heads) + 1)), 0]
        return [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]

    def _cells(self, one: Held) -> tuple[str, ...]:
        return (one.style, _shape(one.shape), _locals(one.local_shapes)) if self.source else (_shape(one.shape),)

    # ---- for programs -----------------------------------------------------------------------------------------------

    def data(self) -> dict[str, Any]:
        """Return the layout as JSON data; ranks in their order, ``tp`` fastest."""
        ranks = list(self.ranks())
        return {
            "model": self.model,
            "engine": self.engine,
            "source": self.source,
            "cut": self.cut,
            "degree": self.degree,
            "bytes": self.whole_bytes,
            "bytes_by_rank": [size for *_, size in ranks],
            "parameters_by_rank": [count for _, _, count, _ in ranks],
            "stages": [
                {"pipeline_rank": rank, "modules": list(modules)}
                for rank, modules in zip(self.rank_of_stage, self.modules, strict=True)
            ],
            "parameters": [
                {
                    "name": one.name,
                    "of": list(one.of),
                    "tied": list(one.tied),
                    "style": one.style,
                    "shape": list(one.shape),
                    "local_shapes": [list(shape) for shape in one.local_shapes],
                    "bytes": prod(one.shape) * one.element_size,
                    "stages": list(one.stages),
                }
                for one in self.parameters
            ],
            "remark": self.remark,
        }


def _sizes(held: Sequence[Held], rank: int) -> tuple[int, int]:
    """Parameters and bytes of these on one tensor-parallel rank."""
    counts = [prod(one.local_shapes[rank]) for one in held]
    return sum(counts), sum(count * one.element_size for count, one in zip(counts, held, strict=True))


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _locals(shapes: Sequence[Sequence[int]]) -> str:
    """Return the one shape of all ranks, or each rank's where they differ."""
    if len(set(map(tuple, shapes))) == 1:
        return _shape(shapes[0])
    return ", ".join(f"{_shape(shape)} (rank {rank})" for rank, shape in enumerate(shapes))


def _remark(one: Held, stage: int) -> str:
    """Return a remark: the other stages that hold it, its tied parameters, and its name in the model."""
    others = ", ".join(str(other) for other in one.stages if other != stage)
    words = [f"also on stage {others}"] if others else []
    words += [f"tied to {', '.join(one.tied)}"] if one.tied else []
    words += [f"is {_braced(one.of)}"] if one.of else []
    return "; ".join(words)


def _braced(names: Sequence[str]) -> str:
    """Names that differ in one word, as ``attn.{q,k,v}.weight``."""
    words = [name.split(".") for name in names]
    if len({len(each) for each in words}) > 1:
        return ", ".join(names)
    together = [list(dict.fromkeys(each)) for each in zip(*words, strict=True)]
    if sum(len(each) > 1 for each in together) > 1:
        return ", ".join(names)
    return ".".join(each[0] if len(each) == 1 else f"{{{','.join(each)}}}" for each in together)


def collapsed(names: Sequence[str]) -> list[str]:
    """``layers.0``, ``layers.1`` as ``layers.0-1``, in the order of the first of each."""
    return [row.name for row in _merged([_Line(name) for name in names])]


@dataclass(frozen=True)
class _Line:
    """A line of a table.

    Args:
        name: of the parameter.
        cells: what is the same for all that share a line.
        remark: may hold the same numbers as the name.
    """

    name: str
    cells: tuple[str, ...] = ()
    remark: str = ""


def _merged(lines: Sequence[_Line]) -> list[_Line]:
    """Lines that differ in one number of the name become one, where those numbers follow each other."""
    found = list(lines)
    for place in reversed(range(max((len(line.name.split(".")) for line in lines), default=0))):
        found = _merged_at(found, place)
    return found


def _merged_at(lines: Sequence[_Line], place: int) -> list[_Line]:
    groups: dict[object, list[tuple[int, _Line]]] = {}
    for line in lines:
        number = "".join(line.name.split(".")[place : place + 1])
        if number.isdigit():
            alike = (place, _with(line.name, place, "#"), line.cells, _without(line.remark, number, "#"))
            groups.setdefault(alike, []).append((int(number), line))
        else:
            groups[line] = [(-1, line)]
    merged = []
    for group in groups.values():
        run = [group[0]]
        for after in group[1:]:
            if after[0] != run[-1][0] + 1:
                merged.append(_spanning(run, place))
                run = []
            run.append(after)
        merged.append(_spanning(run, place))
    return merged


def _spanning(run: Sequence[tuple[int, _Line]], place: int) -> _Line:
    (first, line), last = run[0], run[-1][0]
    if first == last:
        return line
    span = f"{first}-{last}"
    return _Line(_with(line.name, place, span), line.cells, _without(line.remark, str(first), span))


def _with(name: str, place: int, word: str) -> str:
    words = name.split(".")
    return ".".join([*words[:place], word, *words[place + 1 :]])


def _without(text: str, number: str, word: str) -> str:
    """The text with a word in place of a number between dots."""
    return text.replace(f".{number}.", f".{word}.")
