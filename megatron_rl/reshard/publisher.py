"""Publishes the trainer's weights to the engines: in order, checked, never silently stale.

Each rank has a publisher. All ranks that train or generate publish together, whether they do both (colocated) or one of
the two (disaggregated). Memory phases, in order: the engine's weights wake, values move, the prefix cache is cleared
and the version bumped, the trainer's weights may leave the device (`release`), the KV cache wakes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from megatron_rl.errors import MegatronRLError, ReshardError
from megatron_rl.messages import first_of
from megatron_rl.parallel.p2p import RankStatus
from megatron_rl.reshard.execute import Fingerprint, Tensors, TensorSet, Transfer
from megatron_rl.types import SyncReport

NamedTensors = Iterable[tuple[str, torch.Tensor]]

_SHOWN = 20
_SAMPLES = 1 << 16
_SAMPLED_AS = 32


class WeightReceiver(Protocol):
    """What a publisher needs of an engine (rollout/engine.py)."""

    @property
    def weight_version(self) -> int: ...

    @property
    def shared(self) -> frozenset[str]: ...

    def parameters(self) -> dict[str, torch.Tensor]: ...

    def begin_update(self) -> None: ...

    def end_update(self, version: int) -> None: ...

    def update_weights(self, tensors: NamedTensors, version: int) -> None: ...

    def wake(self) -> None: ...


class WeightPublisher(Protocol):
    """Either way to publish, as workers see it."""

    def publish(self, version: int, *, expect_change: bool) -> SyncReport:
        """Give the engines the trainer's weights as `version`; a collective over all ranks.

        expect_change: the trainer has made an update with a gradient since the last publish. Raises ReshardError, on
        all ranks, if the weights are the ones published before then (contract W8), or if an engine does not report
        `version` at the end.
        """
        ...


def do_nothing() -> None:
    """If nothing may leave the device."""


class FullPublisher:
    """Full tensors into one engine: each is gathered on every rank, and the engine takes its shard of it.

    What most systems do: the baseline for ReshardPublisher, and the only way into engines that store unsharded tensors.
    """

    def __init__(
        self,
        engine: WeightReceiver,
        export: Callable[[], NamedTensors],
        *,
        held_bytes: int = 0,
        release: Callable[[], None] = do_nothing,
    ) -> None:
        """export: the trainer's tensors in Hugging Face names, in the engine's dtype; a collective over its ranks.
        held_bytes: the part of these that this rank's shard makes up. release: called once the trainer's weights
        may leave the device.
        """
        self._engine, self._export = engine, export
        self._held_bytes, self._release = held_bytes, release
        self._watch = PayloadWatch()

    def publish(self, version: int, *, expect_change: bool) -> SyncReport:
        """See WeightPublisher."""
        start = time.perf_counter()
        samples: dict[str, torch.Tensor] = {}
        sizes: list[int] = []

        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self._export():
                samples[name] = sample_of(tensor).clone()
                sizes.append(tensor.numel() * tensor.element_size())
                yield name, tensor

        self._engine.update_weights(watched(), version)
        # All ranks see the same tensors, so all of them raise.
        if not self._watch.look(TensorSet.of(samples))() and expect_change:
            raise ReshardError(unchanged(version))
        self._release()
        self._engine.wake()
        check_version(self._engine, version)
        received = max(0, sum(sizes) - self._held_bytes)
        return SyncReport(
            local_bytes=sum(sizes),
            moved_bytes=received,
            full_gather_bytes=received,
            staging_bytes=max(sizes),
            seconds=time.perf_counter() - start,
        )


class Merger(Protocol):
    """Adapters that are merged into an engine's weights (adapters.py)."""

    def gather(self) -> Tensors:
        """The adapters; a collective over the trainer's ranks."""
        ...

    def merge(self, tensors: Tensors, adapters: Tensors) -> None:
        """Add them to an engine's parameters."""
        ...


class ReshardPublisher:
    """Executes the plan's moves and nothing else: aliased parameters stay, local values are copied, missing ones are
    received from other ranks (execute.py).

    Before the first byte moves, all ranks agree that they have the same plan and that none has a fault.
    """

    def __init__(
        self,
        transfer: Transfer,
        engine: WeightReceiver | None,
        sources: Callable[[], Tensors] | None,
        *,
        release: Callable[[], None] = do_nothing,
        merger: Merger | None = None,
    ) -> None:
        """engine: None on a rank that only trains. sources: this rank's parameters by the plan's names, None on one
        that only generates. release: called once the trainer's weights may leave the device. merger: what trains beside
        the parameters, and is added to the engine's, none of which it may share then.
        """
        self._transfer, self._engine, self._sources = transfer, engine, sources
        self._release, self._merger = release, merger
        self._watch = PayloadWatch()

    def publish(self, version: int, *, expect_change: bool) -> SyncReport:
        """See WeightPublisher."""
        start = time.perf_counter()
        transfer, engine = self._transfer, self._engine
        phase = f"sync of weight version {version}"
        faults: list[str] = []
        sources = TensorSet.of(self._sources() if self._sources is not None else {})
        targets = TensorSet.of({})
        adapters = self._merger.gather() if self._merger is not None else dict[str, torch.Tensor]()
        changed = self._watch.look(TensorSet.of(adapters) if self._merger is not None else sources)
        try:
            if engine is not None:
                engine.begin_update()
                targets = TensorSet.of(engine.parameters())
            faults = transfer.faults(sources, targets, engine.shared if engine is not None else ())
        except MegatronRLError as error:
            # Reported to all ranks, which would otherwise wait for this one.
            faults.append(str(error))
        has_changed = not faults and changed()
        key = f"{transfer.plan.digest} {transfer.key} {version} {expect_change}"
        # No rank moves a byte before all have said that they are about to do the same, and can.
        statuses = transfer.group.agree(phase, key, flag=has_changed, fault=first_of(faults, _SHOWN, "; "))
        _require_consensus(statuses, phase)
        if expect_change and not any(status.flag for status in statuses):
            raise ReshardError(unchanged(version))
        moved = transfer.run(sources, targets, phase)
        if self._merger is not None and engine is not None:
            self._merger.merge(targets.tensors, adapters)
        if engine is not None:
            engine.end_update(version)
        self._release()
        if engine is not None:
            engine.wake()
        transfer.wait(targets)
        if engine is not None:
            check_version(engine, version)
        planned = transfer.planned()
        return SyncReport(
            local_bytes=moved.local,
            aliased_bytes=moved.aliased,
            moved_bytes=moved.received,
            minimum_bytes=planned.minimum,
            full_gather_bytes=planned.full_gather,
            messages=moved.messages,
            staging_bytes=moved.staging,
            adapter_bytes=sum(tensor.nbytes for tensor in adapters.values()),
            seconds=time.perf_counter() - start,
        )


def sample_of(tensor: torch.Tensor, count: int = 1) -> torch.Tensor:
    """[n] a view of every value of up to 65,536 * count elements, and of about as many, evenly spread, of more.

    The stride is odd, so that the samples of a matrix do not lie in a few of its columns.
    """
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // (_SAMPLES * count)) | 1]


class PayloadWatch:
    """Whether weights have changed since the last call, judged by samples of each tensor.

    If an optimizer keeps many tensors in one buffer, two million values of the buffer are sampled: an update that
    changes one weight in 100,000 changes some of them.
    """

    def __init__(self) -> None:
        self._fingerprint: Fingerprint = ()
        self._views: _Views = {}
        self._before: dict[_Kind, torch.Tensor] = {}

    @torch.no_grad()
    def look(self, side: TensorSet) -> Callable[[], bool]:
        """Take samples; the answer waits for them, and makes them those that the next look compares with. True in the
        first look too; False where there are no tensors.
        """
        if side.fingerprint != self._fingerprint:
            self._fingerprint, self._views = side.fingerprint, _sample_views(side.tensors)
        now = {kind: torch.cat(parts) for kind, parts in self._views.items()}
        before = self._before
        same = [kind for kind, found in now.items() if kind in before and before[kind].shape == found.shape]
        differ = [torch.ne(before[kind], now[kind]).any() for kind in same]

        def changed() -> bool:
            self._before = now
            return len(same) < len(now) or any(bool(one) for one in differ)

        return changed


_Kind = tuple[torch.dtype, torch.device]
_Views = dict[_Kind, list[torch.Tensor]]


def _sample_views(tensors: Tensors) -> _Views:
    by_storage: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors.values():
        by_storage.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append(tensor)
    views: _Views = {}
    for (_, dtype), members in by_storage.items():
        storage = members[0].untyped_storage()
        size = storage.nbytes() // dtype.itemsize
        samples = views.setdefault((dtype, members[0].device), [])
        # A buffer that holds little else is sampled at once: one kernel in place of hundreds.
        if len(members) > 1 and sum(tensor.numel() for tensor in members) > 0.9 * size:
            whole = members[0].detach().as_strided((size,), (1,), 0)
            samples.append(sample_of(whole, min(len(members), _SAMPLED_AS)))
        else:
            samples += [sample_of(tensor) for tensor in members]
    return views


def _require_consensus(statuses: Sequence[RankStatus], phase: str) -> None:
    """Raise ReshardError, the same on all ranks, if a rank has a fault or another plan."""
    faults = [f"rank {rank}: {status.fault}" for rank, status in enumerate(statuses) if status.fault]
    if faults:
        raise ReshardError(f"{phase}: nothing was moved: " + " | ".join(faults))
    ranks_of: dict[bytes, list[int]] = {}
    for rank, status in enumerate(statuses):
        ranks_of.setdefault(status.fingerprint, []).append(rank)
    if len(ranks_of) > 1:
        groups = "; ".join(f"{one.hex()[:12]} on {_ranks(ranks)}" for one, ranks in ranks_of.items())
        raise ReshardError(
            f"{phase}: nothing was moved: the ranks do not agree on what to move (plan, dtypes, bucket size, version): "
            f"{groups}; all need the same config, model and version"
        )


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def unchanged(version: int) -> str:
    return (
        f"weights of version {version} equal those published before, though the optimizer made an update with a "
        "gradient; the learning rate is too small for the weights' precision, or the update is lost"
    )


def check_version(engine: WeightReceiver, version: int) -> None:
    if engine.weight_version != version:
        raise ReshardError(f"the engine holds version {engine.weight_version} after a publish of {version}")
