"""Dynamic loss scaling by the policy's numbers.

DeepSpeed scales losses by itself only where it holds parameters in float16. Here they are float32 and a forward runs
under autocast, so the scale is ours, one for all engines of a run: one loss may reach several.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final


@final
class LossScale:
    """Grows after a number of good steps, backs off after an overflow, as ``torch.amp.GradScaler`` does.

    Args:
        settings: arguments of ``torch.amp.GradScaler``, absent ones with its defaults; and DeepSpeed's ``hysteresis``
            (back off only at this many overflows since the scale grew), ``consecutive_hysteresis`` (or since the last
            good step) and ``min_scale``.

    Attributes:
        scale: what losses are multiplied by.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.scale = float(settings.get("init_scale", 2.0**16))
        self._growth = float(settings.get("growth_factor", 2.0))
        self._backoff = float(settings.get("backoff_factor", 0.5))
        self._interval = int(settings.get("growth_interval", 2000))
        self._patience = self._left = int(settings.get("hysteresis", 1))
        self._consecutive = bool(settings.get("consecutive_hysteresis", False))
        self._least = float(settings.get("min_scale", 0.0))
        self._good = 0
        self._noted: bool | None = None

    def note(self, *, overflow: bool) -> None:
        """Note a step of an optimizer."""
        self._noted = overflow or bool(self._noted)

    def move(self) -> None:
        """Move the scale once for all steps since the last backward; before the next one."""
        overflow, self._noted = self._noted, None
        if overflow is None:
            return
        if overflow:
            self._good = 0
            self._left -= 1
            if self._left <= 0:
                self.scale = max(self.scale * self._backoff, self._least)
                self._left = 1
            return
        self._good += 1
        if self._consecutive:
            self._left = self._patience
        if self._good == self._interval:
            self.scale, self._good, self._left = self.scale * self._growth, 0, self._patience

    def state(self) -> dict[str, Any]:
        """State after the steps so far: JSON-able, in the words of ``GradScaler.state_dict``.

        So it travels to and from other backends.
        """
        self.move()
        return {
            "scale": self.scale,
            "growth_factor": self._growth,
            "backoff_factor": self._backoff,
            "growth_interval": self._interval,
            "_growth_tracker": self._good,
            "hysteresis": self._left,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over :meth:`state`, or what a ``GradScaler`` saved."""
        self._noted = None
        self.scale = float(state["scale"])
        self._growth = float(state.get("growth_factor", self._growth))
        self._backoff = float(state.get("backoff_factor", self._backoff))
        self._interval = int(state.get("growth_interval", self._interval))
        self._good = int(state.get("_growth_tracker", 0))
        self._left = int(state.get("hysteresis", self._patience))
