"""From the trainer's weights to the engine's: in order, checked, and never silently stale.

A publisher is one rank's. All ranks that train or generate publish together, whether they do both (colocated) or one of
the two (disaggregated). Memory phases, in order: the engine's weights wake, values move, the prefix cache is cleared
and the version bumped, what the trainer lent leaves the device, the KV cache wakes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from megatron_rl.errors import MegatronRLError, ReshardError
from megatron_rl.parallel.links import Word
from megatron_rl.reshard.execute import Marks, Side, Tensors, Transfer
from megatron_rl.types import SyncReport

NamedTensors = Iterable[tuple[str, torch.Tensor]]

_SHOWN = 20
_SAMPLES = 1 << 16
_SAMPLED_AS = 32


class WeightTaker(Protocol):
    """The part of an engine that weights go to (rollout/engine.py)."""

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
    """What a worker sees of either way to publish."""

    def publish(self, version: int, *, expect_change: bool) -> SyncReport:
        """Give the engines the trainer's weights as `version`; a collective over all ranks.

        expect_change: the trainer has made an update with a gradient since the last publish. Raises ReshardError, on
        all ranks, where the weights are the ones published before then (contract W8), and where an engine does not
        hold `version` at the end.
        """
        ...


def _nothing() -> None:
    """Where the trainer lends nothing."""


class FullPublisher:
    """Whole tensors into one engine: each is gathered on every rank, and the engine takes its part of it.

    What most systems do: the yardstick for ReshardPublisher, and the way into engines that have no layout of their own.
    """

    def __init__(
        self,
        engine: WeightTaker,
        export: Callable[[], NamedTensors],
        *,
        held_bytes: int = 0,
        lent_back: Callable[[], None] = _nothing,
    ) -> None:
        """export: the trainer's tensors in Hugging Face names, in the engine's dtype; a collective over its ranks.
        held_bytes: of these, what this rank's shard makes up. lent_back: called when the trainer's weights may
        leave the device.
        """
        self._engine, self._export = engine, export
        self._held_bytes, self._lent_back = held_bytes, lent_back
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
        # All ranks see the same tensors, so that all raise.
        if not self._watch.look(Side.of(samples))() and expect_change:
            raise ReshardError(_unchanged(version))
        self._lent_back()
        self._engine.wake()
        _check_version(self._engine, version)
        received = max(0, sum(sizes) - self._held_bytes)
        return SyncReport(
            local_bytes=sum(sizes),
            moved_bytes=received,
            full_gather_bytes=received,
            staging_bytes=max(sizes),
            seconds=time.perf_counter() - start,
        )


class ReshardPublisher:
    """The plan's moves and nothing else: what the engine shares with the trainer stays, what lies on this rank is
    copied, what is missing comes from other ranks (execute.py).

    Before the first byte moves all ranks agree that they have the same plan and that none has a fault.
    """

    def __init__(
        self,
        transfer: Transfer,
        engine: WeightTaker | None,
        sources: Callable[[], Tensors] | None,
        *,
        lent_back: Callable[[], None] = _nothing,
    ) -> None:
        """engine: None on a rank that only trains. sources: this rank's trained parameters by the plan's names, None on
        one that only generates. lent_back: called when the trainer's weights may leave the device.
        """
        self._transfer, self._engine, self._sources = transfer, engine, sources
        self._lent_back = lent_back
        self._watch = PayloadWatch()

    def publish(self, version: int, *, expect_change: bool) -> SyncReport:
        """See WeightPublisher."""
        start = time.perf_counter()
        transfer, engine = self._transfer, self._engine
        phase = f"sync of weight version {version}"
        faults: list[str] = []
        sources = Side.of(self._sources() if self._sources is not None else {})
        targets = Side.of({})
        changed = self._watch.look(sources)
        try:
            if engine is not None:
                engine.begin_update()
                targets = Side.of(engine.parameters())
            faults = transfer.faults(sources, targets, engine.shared if engine is not None else ())
        except MegatronRLError as error:
            # Told to all ranks, which would otherwise wait for this one.
            faults.append(str(error))
        has_changed = not faults and changed()
        digest = hashlib.sha256(f"{transfer.plan.digest} {transfer.key} {version} {expect_change}".encode()).digest()
        words = transfer.links.agree(phase, digest, flag=has_changed, fault=_listed(faults))
        _judge(words, phase)
        if expect_change and not any(word.flag for word in words):
            raise ReshardError(_unchanged(version))
        moved = transfer.run(sources, targets, phase)
        if engine is not None:
            engine.end_update(version)
        self._lent_back()
        if engine is not None:
            engine.wake()
        transfer.wait(targets)
        if engine is not None:
            _check_version(engine, version)
        planned = transfer.planned()
        return SyncReport(
            local_bytes=moved.local,
            aliased_bytes=moved.aliased,
            moved_bytes=moved.received,
            minimum_bytes=planned.minimum,
            full_gather_bytes=planned.full_gather,
            messages=moved.messages,
            staging_bytes=moved.staging,
            seconds=time.perf_counter() - start,
        )


def sample_of(tensor: torch.Tensor, count: int = 1) -> torch.Tensor:
    """[n] a view of every value of up to 65,536 * count elements, and of about as many, evenly spread, of more.

    The stride is odd, so that the samples of a matrix do not lie in a few of its columns.
    """
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // (_SAMPLES * count)) | 1]


class PayloadWatch:
    """Whether weights differ from those of the call before, told by samples of each; where an optimizer keeps many in
    one buffer, by two million values of the buffer: an update that changes one weight in 100,000 changes some of them.
    """

    def __init__(self) -> None:
        self._marks: Marks = ()
        self._views: _Views = {}
        self._before: dict[_Kind, torch.Tensor] = {}

    @torch.no_grad()
    def look(self, side: Side) -> Callable[[], bool]:
        """Take samples; the answer waits for them, and makes them those that the next look compares with. True in the
        first look too; False where there are no tensors.
        """
        if side.marks != self._marks:
            self._marks, self._views = side.marks, _sample_views(side.tensors)
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
    for (_, dtype), held in by_storage.items():
        storage = held[0].untyped_storage()
        size = storage.nbytes() // dtype.itemsize
        found = views.setdefault((dtype, held[0].device), [])
        # A buffer that holds little else is sampled at once: one kernel in place of hundreds.
        if len(held) > 1 and sum(tensor.numel() for tensor in held) > 0.9 * size:
            whole = held[0].detach().as_strided((size,), (1,), 0)
            found.append(sample_of(whole, min(len(held), _SAMPLED_AS)))
        else:
            found += [sample_of(tensor) for tensor in held]
    return views


def _judge(words: Sequence[Word], phase: str) -> None:
    """Raise ReshardError, alike on all ranks, where a rank has a fault or another plan."""
    complaints = [f"rank {rank}: {word.fault}" for rank, word in enumerate(words) if word.fault]
    if complaints:
        raise ReshardError(f"{phase}: nothing was moved: " + " | ".join(complaints))
    ranks_of: dict[bytes, list[int]] = {}
    for rank, word in enumerate(words):
        ranks_of.setdefault(word.digest, []).append(rank)
    if len(ranks_of) > 1:
        groups = "; ".join(f"{digest.hex()[:12]} on {_ranks(ranks)}" for digest, ranks in ranks_of.items())
        raise ReshardError(
            f"{phase}: nothing was moved: the ranks do not agree on what to move (plan, dtypes, bucket size, version): "
            f"{groups}; all need the same config, model and version"
        )


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _listed(faults: Sequence[str]) -> str:
    more = "" if len(faults) <= _SHOWN else f"; and {len(faults) - _SHOWN} more"
    return "; ".join(faults[:_SHOWN]) + more


def _unchanged(version: int) -> str:
    return (
        f"weights of version {version} equal those published before, though the optimizer made an update with a "
        "gradient; the learning rate is too small for the weights' precision, or the update is lost"
    )


def _check_version(engine: WeightTaker, version: int) -> None:
    if engine.weight_version != version:
        raise ReshardError(f"the engine holds version {engine.weight_version} after a publish of {version}")
