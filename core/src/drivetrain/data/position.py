"""Where a loader stands: a few numbers, the same on every rank and for any number of ranks. No torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.errors import UsageError

FORMAT = 1


@dataclass(slots=True)
class Position:
    """What has been shown. Not frozen: a loader moves it on with every batch, and a new one each time costs more.

    Args:
        epoch: counts from 0.
        consumed: units (samples or batches) of the epoch that were shown, over all ranks, repetitions not counted.
        finished: the epoch's last batch was shown.
        streams: for a dataset read by several workers, units taken from each worker's stream; else empty.
        turn: the worker whose stream is next.
    """

    epoch: int = 0
    consumed: int = 0
    finished: bool = False
    streams: tuple[int, ...] = ()
    turn: int = 0

    def next_epoch(self) -> Position:
        """The beginning of the epoch after this one."""
        return Position(self.epoch + 1)


@dataclass(frozen=True)
class Identity:
    """What must agree between the loader that saved a position and the one that takes it over.

    Args:
        unit: ``"samples"`` or ``"batches"``.
        num_streams: worker streams of an iterable dataset, else 1.
        length: units in an epoch where known.
        shares: 0 where the loader shares samples out among the ranks; else, for data that each rank already has a
            share of, the number of ranks: their shares cannot be dealt out anew.
    """

    unit: str
    num_streams: int = 1
    length: int | None = None
    shares: int = 0


def to_state(position: Position, seed: int, identity: Identity) -> dict[str, Any]:
    """JSON-able state."""
    return {
        "format": FORMAT,
        "unit": identity.unit,
        "seed": seed,
        "epoch": position.epoch,
        "consumed": position.consumed,
        "finished": position.finished,
        "streams": list(position.streams),
        "turn": position.turn,
        "length": identity.length,
        "shares": identity.shares,
    }


def from_state(state: Mapping[str, Any], identity: Identity) -> tuple[Position, int]:
    """Position and seed from :func:`to_state`'s answer.

    Raises:
        UsageError: the state is not a loader's, or of one whose position means something else here.
    """
    try:
        if state["format"] != FORMAT:
            raise UsageError(
                f"the loader's state has format {state['format']}, this version reads {FORMAT}",
                cure="Upgrade drivetrain, or resume with the version that saved it.",
            )
        position = Position(
            int(state["epoch"]),
            int(state["consumed"]),
            bool(state["finished"]),
        )
        streams = tuple(int(each) for each in state["streams"])
        turn = int(state["turn"])
        seed, unit, shares, length = int(state["seed"]), state["unit"], int(state["shares"]), state["length"]
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"this is not the state of a prepared loader ({type(error).__name__}: {error})",
            cure="Pass what PreparedDataLoader.state_dict() returned.",
        ) from error
    _check(identity, unit, shares, position, len(streams) or 1)
    if len(streams) == identity.num_streams:
        position.streams, position.turn = streams, turn
    if length is not None and identity.length is not None and length != identity.length:
        warnings.warn(
            f"the loader's epoch had {length} {unit} when its position was saved and has {identity.length} now; "
            "the order of a changed dataset is another one, so samples may repeat or be left out",
            UserWarning,
            stacklevel=3,
        )
    return position, seed


def _check(identity: Identity, unit: str, shares: int, position: Position, streams: int) -> None:
    if unit != identity.unit:
        raise UsageError(
            f"the saved position counts {unit}, this loader counts {identity.unit}",
            cure="Resume with the same kind of loader (a batch_sampler of your own, or a batch_size).",
        )
    if shares != identity.shares:
        raise UsageError(
            f"the saved position is of data shared out by its owner among {shares or 'any number of'} ranks, "
            f"this loader's is shared out among {identity.shares or 'any number of'}",
            cure="Resume on the same number of data-parallel ranks, with the same mark already_sharded().",
        )
    if streams != identity.num_streams and position.consumed and not position.finished:
        raise UsageError(
            f"the saved position is of {streams} worker stream(s), this loader reads {identity.num_streams}",
            cure=f"Resume this iterable dataset with num_workers={streams if streams > 1 else '0 or 1'}.",
        )
