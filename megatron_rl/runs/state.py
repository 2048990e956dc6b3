"""What of a run changes from step to step, in one list: a checkpoint is this and the models' own state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from megatron_rl.errors import CheckpointError
from megatron_rl.trainers.parts import Parts


class Stateful(Protocol):
    """A part of the run that a resumed run goes on from. Its state is plain values."""

    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any], /) -> None: ...


def stateful_parts(parts: Parts) -> dict[str, Stateful]:
    """Every part of a run that has a state, by name. The buffer is the loop's own."""
    own: dict[str, Stateful] = {"references": parts.references} if parts.cfg.needs.preferences else {}
    return {
        **own,
        "data": parts.data,
        "sampler": parts.sampler,
        "kl_control": parts.kl_control,
        "nonfinite": parts.models.guard,
        "mismatch": parts.mismatch,
        "loss_average": parts.loss_average,
    }


class RunState:
    """The number of steps that are complete, and the parts with a state."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self.step = 0
        self.parts = dict(parts)

    def state(self) -> dict[str, Any]:
        """Step and parts, as plain values."""
        return {"step": self.step, "parts": {name: part.state() for name, part in self.parts.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Every part goes on from its own state. CheckpointError if parts are missing or unknown: none is changed."""
        saved: Mapping[str, dict[str, Any]] = state["parts"]
        missing, unknown = sorted(self.parts.keys() - saved.keys()), sorted(saved.keys() - self.parts.keys())
        if missing or unknown:
            raise CheckpointError(
                f"the checkpoint is of another kind of run: parts without a state in it: {missing}; states without a "
                f"part here: {unknown} -- resume with the algorithm that made it"
            )
        for name, part in self.parts.items():
            part.restore(saved[name])
        self.step = state["step"]
