"""A running mean of the loss, by which a supervised run may end early (trainer.target_loss)."""

from __future__ import annotations

from collections.abc import Mapping

_KEPT = 0.9
"""Share of the mean that a new loss leaves."""


class LossAverage:
    """An exponential moving average; the first loss is its first value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, loss: float) -> None:
        """The loss of one more step."""
        self.value = loss if self.value is None else _KEPT * self.value + (1 - _KEPT) * loss

    def state(self) -> dict[str, float | None]:
        """What a resumed run needs."""
        return {"value": self.value}

    def restore(self, state: Mapping[str, float | None]) -> None:
        """The inverse of `state`."""
        self.value = state["value"]
