"""Which gathered rows count: the arithmetic of ``gather_for_metrics``. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.data.active import BatchInfo
from drivetrain.errors import UsageError


def rows_to_keep(sizes: Sequence[int], info: BatchInfo | None, what: str, *, scalar: bool = False) -> list[int]:
    """How many leading rows of each rank's part are real.

    A part is aligned with the batch when it has a row for each row loaded. Where every rank gives as many rows as a
    full batch has while the current batch is shorter (``loss.repeat(batch_size)``), each keeps one for each sample.
    A rank that holds repeated samples only is left out whatever it gives, if these are a whole batch.

    Args:
        sizes: rows of each coordinate's part.
        info: the current batch; ``None`` outside of a loop, where nothing is cut.
        what: the value in words, for the error.
        scalar: each part is one number per rank, not rows: kept, unless its rank holds repeated rows only.

    Raises:
        UsageError: the current batch holds repeated rows and the parts cannot be aligned with it.
    """
    rows = None if info is None else info.rows
    if info is None or rows is None:
        return list(sizes)
    if scalar or not rows.counted:
        return [size if real else 0 for size, real in zip(sizes, rows.real, strict=True)]
    if tuple(sizes) == rows.loaded:
        return list(rows.real)
    if info.nominal_rows and all(size == info.nominal_rows for size in sizes):
        return [min(size, real) for size, real in zip(sizes, rows.real, strict=True)]
    if rows.whole or not rows.padded:
        return [size if real else 0 for size, real in zip(sizes, rows.real, strict=True)]
    raise UsageError(
        f"gather_for_metrics cannot tell which rows of {what} repeat samples: the parts have {_list(sizes)} rows by "
        f"rank, the current batch has {_list(rows.loaded)}, of which {_list(rows.real)} count",
        cure="Pass values with one row per sample of the batch; what is not per sample goes to accelerator.gather().",
    )


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
