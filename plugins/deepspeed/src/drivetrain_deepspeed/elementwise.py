"""Checks that an optimizer is element-wise, so that it may step ZeRO's flat partitions.

ZeRO concatenates the parameters of a group and cuts the flat buffer anywhere. An optimizer that uses a parameter's
shape, norms or blocks would compute other updates there, without an error. DeepSpeed's own list has nine classes;
others are tested by a trial.
"""

from __future__ import annotations

import logging

from torch.optim import Optimizer

from drivetrain.api import UnsupportedError
from drivetrain.api.accelerate import DummyOptim
from drivetrain_sharding import ELEMENTWISE, check_elementwise

logger = logging.getLogger(__name__)

_DESCRIBED = frozenset({"lion", *(each.__name__.lower() for each in ELEMENTWISE)}) - {"adagrad"}
"""Optimizers that a section may name. DeepSpeed replaces torch's Adagrad by a second one, which no schedule updates."""


def check(optimizer: Optimizer, stage: int) -> None:
    """Raise :class:`UnsupportedError` where ZeRO would make another optimizer of this one. Not collective.

    What DeepSpeed has not tested and a trial finds element-wise is said once: its own warning of that is answered here.

    Args:
        optimizer: the script's, before its first step; it is left as it is.
        stage: of ZeRO; 0 cuts nothing.
    """
    if not stage or type(optimizer) in ELEMENTWISE or isinstance(optimizer, DummyOptim):
        return
    check_elementwise(optimizer, f"ZeRO stage {stage}", flat=True, instead="zero_stage: 0")
    logger.warning(
        "DeepSpeed has not tested %s under ZeRO. Steps of a copy, whole and in flat parts, were equal: it is taken to "
        "be element-wise.",
        type(optimizer).__name__,
    )


def check_described(kind: str, stage: int) -> None:
    """The same of an optimizer that the section names and DeepSpeed makes."""
    if stage and kind.lower() not in _DESCRIBED:
        raise UnsupportedError(
            f"the section names the optimizer {kind}, which is not known to update each element by itself, and ZeRO "
            f"stage {stage} cuts parameters into flat parts",
            cure="Prepare an optimizer of torch in the script, name Adam, AdamW or Lion, or use zero_stage: 0.",
        )
