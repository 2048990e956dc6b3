"""From the trainer's weights to the engine's: in order, checked, and never silently stale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch

from megatron_rl.errors import ReshardError

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class WeightTaker(Protocol):
    """The part of an engine that weights go to (rollout/engine.py)."""

    @property
    def weight_version(self) -> int: ...

    def update_weights(self, tensors: NamedTensors, version: int) -> None: ...

    def wake(self) -> None: ...


class WeightPublisher:
    """Hands the trainer's tensors to one engine.

    Colocated placement, whole tensors: each rank's engine takes every tensor, gathered one at a time, so the staging
    memory is one parameter. Phases: the engine's weights wake, tensors stream in, the prefix cache is cleared, the
    version
    is bumped, the KV cache wakes.
    """

    def __init__(self, engine: WeightTaker, export: Callable[[], NamedTensors]) -> None:
        """export: the trainer's tensors in Hugging Face names, in the engine's dtype; a collective over its ranks."""
        self._engine = engine
        self._export = export
        self._fingerprint: torch.Tensor | None = None

    def publish(self, version: int, *, expect_change: bool) -> int:
        """Send everything; returns the bytes sent.

        expect_change: the trainer has made an update with a gradient since the last publish. Raises ReshardError where
        the payload is bit for bit the last one then (contract W8), or where the engine does not hold `version` at
        the end.
        """
        marks: list[torch.Tensor] = []
        num_bytes = 0

        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal num_bytes
            for name, tensor in self._export():
                wide = tensor.detach().double()
                marks.append(torch.stack([wide.sum(), wide.square().sum()]))
                num_bytes += tensor.numel() * tensor.element_size()
                yield name, tensor

        self._engine.update_weights(watched(), version)
        fingerprint = torch.stack(marks).cpu()
        unchanged = self._fingerprint is not None and torch.equal(fingerprint, self._fingerprint)
        if expect_change and unchanged:
            raise ReshardError(
                f"weights of version {version} equal those published before, though the optimizer made an update with "
                "a gradient; the learning rate is too small for the weights' precision, or the update is lost"
            )
        self._fingerprint = fingerprint
        self._engine.wake()
        if self._engine.weight_version != version:
            raise ReshardError(f"the engine holds version {self._engine.weight_version} after a publish of {version}")
        return num_bytes
