"""The progress bar of ``tqdm``, on the main process."""

from __future__ import annotations

from typing import Any

from drivetrain.logging import current_rank


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """``tqdm.auto.tqdm``, with its arguments and methods.

    Args:
        *args: as for tqdm: the iterable first.
        main_process_only: the other processes iterate without a bar.
        **kwargs: as for tqdm.
    """
    from tqdm.auto import tqdm as bar

    if main_process_only and current_rank() != 0:
        kwargs["disable"] = True
    return bar(*args, **kwargs)
