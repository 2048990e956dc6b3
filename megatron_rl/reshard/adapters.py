"""How a trainer's adapters (LoRA) reach engines: merged into their weights, or by themselves beside weights that stay.

Either way the adapters are gathered whole on every rank: they are small. What an engine's parameter is made of is known
by its table, so each rank merges what it holds, parameter by parameter, in the engine's own memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from megatron_rl.errors import ReshardError
from megatron_rl.models.lora import a_name, b_name
from megatron_rl.models.rules import LocalParam
from megatron_rl.parallel.collectives import any_rank
from megatron_rl.reshard.execute import TensorSet
from megatron_rl.reshard.publisher import (
    PayloadWatch,
    WeightPublisher,
    WeightReceiver,
    check_version,
    do_nothing,
    unchanged,
)
from megatron_rl.reshard.views import flat_rows
from megatron_rl.types import SyncReport

WholeAdapters = Mapping[str, torch.Tensor]
"""HF name -> A or B, whole"""


@dataclass(frozen=True)
class Merging:
    """What makes an engine's weights of the trainer's and of adapters.

    gather: the adapters, whole; a collective over the trainer's ranks. params: of this rank's engine. scale: of the
    product of B and A.
    """

    gather: Callable[[], WholeAdapters]
    params: Sequence[LocalParam]
    scale: float

    @torch.no_grad()
    def merge(self, tensors: Mapping[str, torch.Tensor], adapters: WholeAdapters) -> None:
        """Add the adapters to an engine's parameters, which hold the weights alone."""
        for param in self.params:
            rows = flat_rows(tensors[param.name])
            at = 0
            for block in param.blocks:
                linear = block.hf_name.removesuffix(".weight")
                a, b = adapters.get(a_name(linear)), adapters.get(b_name(linear))
                if a is not None and b is not None:
                    assert block.cols is not None
                    part = rows[at : at + block.num_rows]
                    left, right = b[slice(*block.rows)].float(), a[:, slice(*block.cols)].float()
                    part.copy_(torch.addmm(part.float(), left, right, alpha=self.scale))
                at += block.num_rows


class AdapterReceiver(WeightReceiver, Protocol):
    """What an AdapterPublisher needs of an engine."""

    @property
    def holds_weights(self) -> bool:
        """It has been given weights, and they are not gone."""
        ...

    def load_adapter(self, tensors: WholeAdapters, version: int) -> None:
        """Compute with these adapters from now on, as `version`; cached prefixes are forgotten."""
        ...


class AdapterPublisher:
    """Gives engines adapters alone. The weights, which never change, go to engines that do not hold them."""

    def __init__(
        self,
        weights: WeightPublisher,
        engine: AdapterReceiver,
        gather: Callable[[], WholeAdapters],
        *,
        held_bytes: int = 0,
        release: Callable[[], None] = do_nothing,
    ) -> None:
        """weights: publishes the weights without adapters. gather: the adapters, whole; a collective. held_bytes: the
        part of them that this rank has. release: called once the trainer's weights may leave the device.
        """
        self._weights, self._engine, self._gather = weights, engine, gather
        self._held_bytes, self._release = held_bytes, release
        self._watch = PayloadWatch()

    def publish(self, version: int, *, expect_change: bool) -> SyncReport:
        """See WeightPublisher."""
        start = time.perf_counter()
        report = SyncReport()
        # Asked on every rank: all take part in sending weights, or none.
        if any_rank(not self._engine.holds_weights):
            report = self._weights.publish(version, expect_change=False)
        adapters = self._gather()
        # All ranks have the same adapters, so all of them raise.
        if not self._watch.look(TensorSet.of(adapters))() and expect_change:
            raise ReshardError(unchanged(version))
        self._engine.load_adapter(adapters, version)
        self._release()
        self._engine.wake()
        check_version(self._engine, version)
        size = sum(tensor.nbytes for tensor in adapters.values())
        return replace(
            report,
            adapter_bytes=size,
            moved_bytes=report.moved_bytes + max(0, size - self._held_bytes),
            seconds=time.perf_counter() - start,
        )
