"""Compares what DiLoCo sends, and for how long, with reducing gradients in every step. Numbers only, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """A run on paper.

    Args:
        num_parameters: of the model.
        num_workers: that train it.
        num_steps: inner optimizer steps of the whole run.
        local_steps: steps of a round.
        bandwidth: bytes that a worker can send in a second.
        step_seconds: time of a step that sends nothing.
        element_size: bytes of an element that is sent.
    """

    num_parameters: float
    num_workers: int
    num_steps: int
    local_steps: int
    bandwidth: float
    step_seconds: float
    element_size: int = 4

    @property
    def message(self) -> float:
        """Bytes that a worker sends for one mean over all: 2(n-1)/n of the whole, in a ring."""
        return 2 * (self.num_workers - 1) / self.num_workers * self.num_parameters * self.element_size

    def bytes_sent(self, every: int) -> float:
        """Bytes that a worker sends in the run when it communicates once every so many steps."""
        return self.message * (self.num_steps // every)

    def seconds(self, every: int) -> float:
        """Time of the run, nothing overlapped."""
        return self.num_steps * self.step_seconds + self.bytes_sent(every) / self.bandwidth

    def rows(self) -> list[tuple[str, float, float]]:
        """Name, bytes sent and seconds of both ways to train."""
        ways = (("every step", 1), (f"rounds of {self.local_steps}", self.local_steps))
        return [(name, self.bytes_sent(every), self.seconds(every)) for name, every in ways]
