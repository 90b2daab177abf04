"""Watches how often XLA compiles: a graph for each shape is the usual reason why a run on it is slow."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any, final

from torch import Tensor
from torch_xla.debug import metrics

logger = logging.getLogger(__name__)

_KEPT = 8
"""Shapes of one input that a warning lists."""


def compile_count() -> int:
    """Graphs that XLA has compiled in this process."""
    found = metrics.metric_data("CompileTime")
    return int(found[0]) if found else 0


def read_count() -> int:
    """Number of times that this process has read a value from the device, which waits for it."""
    found = metrics.metric_data("TransferFromDeviceTime")
    return int(found[0]) if found else 0


@final
class CompileWatch:
    """Gives one warning when graphs are still compiled after the warm-up.

    Args:
        warmup_steps: optimizer steps in which compiling is expected.
        max_recompiles: graphs that may be compiled after them.
    """

    def __init__(self, warmup_steps: int, max_recompiles: int) -> None:
        self._left, self._allowed = warmup_steps, max_recompiles
        self._at_warm = 0
        self._told = False
        self._shapes: dict[str, OrderedDict[tuple[int, ...], None]] = {}

    def saw(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the shapes that a forward was called with."""
        if self._told:
            return
        for index, value in enumerate(args):
            self._note(f"input {index}", value)
        for name, value in kwargs.items():
            self._note(name, value)

    def stepped(self) -> None:
        """Look at the count at the end of an optimizer step."""
        if self._told:
            return
        if self._left:
            self._left -= 1
            if not self._left:
                self._at_warm = compile_count()
            return
        later = compile_count() - self._at_warm
        if later > self._allowed:
            self._told = True
            logger.warning("%s", self._sentence(later))
            self._shapes.clear()

    def _note(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            seen = self._shapes.setdefault(name, OrderedDict())
            seen[tuple(value.shape)] = None
            if len(seen) > _KEPT:
                seen.popitem(last=False)
        elif isinstance(value, (tuple, list)):
            for index, part in enumerate(value):
                self._note(f"{name}[{index}]", part)
        elif isinstance(value, dict):
            for key, part in value.items():
                self._note(f"{name}[{key!r}]", part)

    def _sentence(self, later: int) -> str:
        changing = {name: list(shapes) for name, shapes in self._shapes.items() if len(shapes) > 1}
        start = f"XLA has compiled {later} graphs after the warm-up, and the training waits for each"
        if not changing:
            return (
                f"{start}. The shapes of the model's inputs stayed the same: a Python number or a branch in the model "
                "or the loss changes from step to step. Make it a tensor."
            )
        told = "; ".join(f"{name}: {', '.join(map(str, map(list, shapes)))}" for name, shapes in changing.items())
        return (
            f"{start}. These shapes change: {told}. Pad them to a few sizes in the collate function; for the last "
            "batch of an epoch there are drop_last=True and xla.fill_last_batch."
        )
