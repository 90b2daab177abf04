"""Which gathered rows count: the arithmetic of ``gather_for_metrics``. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.data.active import BatchInfo
from drivetrain.errors import UsageError


def rows_to_keep(sizes: Sequence[int], info: BatchInfo | None, what: str, *, scalar: bool = False) -> list[int]:
    """How many leading rows of each rank's part are real.

    A part is aligned with the batch when it has a row for each row loaded, or for each row of the nominal batch size
    (``loss.repeat(batch_size)``, an idiom that outlives a shorter last batch). Where whole batches are repeated no
    alignment is needed: such a rank's part is left out.

    Args:
        sizes: rows of each coordinate's part.
        info: the current batch; ``None`` outside of a loop, where nothing is cut.
        what: the value in words, for the error.
        scalar: each part is one number per rank, not rows: kept, unless its rank holds repeated rows only.

    Raises:
        UsageError: the current batch holds repeated rows and the parts cannot be aligned with it.
    """
    rows = None if info is None else info.rows
    if info is None or rows is None or not rows.padded:
        return list(sizes)
    if rows.whole or scalar:
        return [size if real else 0 for size, real in zip(sizes, rows.real, strict=True)]
    if all(size == loaded for size, loaded in zip(sizes, rows.loaded, strict=True)):
        return list(rows.real)
    if info.nominal_rows and all(size == info.nominal_rows for size in sizes):
        return list(rows.real)
    raise UsageError(
        f"gather_for_metrics cannot tell which rows of {what} repeat samples: the parts have {_list(sizes)} rows by "
        f"rank, the current batch has {_list(rows.loaded)}, of which {_list(rows.real)} count",
        cure="Pass values with one row per sample of the batch; what is not per sample goes to accelerator.gather().",
    )


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
