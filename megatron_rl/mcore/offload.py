"""Parameters, gradients and optimizer state of a Trainable to pinned host memory and back, each on its own.

Storages move, not tensors: Megatron keeps parameters and gradients in flat buffers, and parameters, buckets and the
distributed optimizer's shards are views of them. A storage is emptied and later filled again in place, so every view
stays what it was. While a storage is away none of its views may be read or written: the memory is gone.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_rl.mcore.build import Trainable
from megatron_rl.types import OffloadReport

Kind = Literal["params", "grads", "optimizer"]
KINDS: tuple[Kind, ...] = ("params", "grads", "optimizer")

# Pinned allocations are rounded up to a power of two, so large ones are made of pieces that are one.
_PIECE_BYTES = 1 << 28


class Offload:
    """Moves the configured kinds of memory to the host and back. Calling a direction twice does nothing more.

    params: the model's weights. grads: the gradients of the last update. optimizer: AdamW's two means, and the float32
    master weights where the model's are of half precision (otherwise the model's weights are the masters).
    """

    def __init__(self, trainable: Trainable, kinds: Collection[str] = KINDS, *, keep_grads: bool = True) -> None:
        """kinds: what moves; calls that name another kind pass over it. keep_grads: False frees the gradients without
        a copy, and they come back as zeros: right where each update starts from zeroed gradients.
        """
        self._trainable = trainable
        self._kinds = tuple(kind for kind in KINDS if kind in kinds)
        self._keep_grads = keep_grads
        self._away: dict[Kind, list[tuple[torch.UntypedStorage, int]]] = {}
        self._host: dict[Kind, _HostMemory] = {}
        self._total = OffloadReport()

    def to_host(self, *kinds: Kind) -> OffloadReport:
        """Free the device memory of `kinds` (of all when none is named); bytes freed by kind, seconds taken."""
        start = time.perf_counter()
        freed: dict[str, int] = {}
        for kind in kinds or KINDS:
            if kind not in self._kinds or kind in self._away:
                continue
            if kind == "params":
                self._trainable.model.complete_params()
            storages = self._storages(kind)
            sizes = [storage.nbytes() for storage in storages]
            if self._kept(kind):
                self._memory(kind, sum(sizes)).copy_from(storages)
            self._away[kind] = list(zip(storages, sizes, strict=True))
            synchronize()
            for storage in storages:
                storage.resize_(0)
            freed[kind] = sum(sizes)
        if freed and torch.cuda.is_available():
            # An engine in this process takes memory from the driver, not from torch's cache.
            torch.cuda.empty_cache()
        return self._note(OffloadReport(freed, time.perf_counter() - start) if freed else OffloadReport())

    def to_device(self, *kinds: Kind) -> OffloadReport:
        """Bring `kinds` back (all when none is named), to the views that they left; seconds taken, no bytes."""
        start = time.perf_counter()
        coming: list[Kind] = [kind for kind in kinds or KINDS if kind in self._away]
        for kind in coming:
            moved = self._away.pop(kind)
            for storage, size in moved:
                storage.resize_(size)
            storages = [storage for storage, _ in moved]
            if self._kept(kind):
                self._host[kind].copy_to(storages)
            else:
                for storage in storages:
                    _bytes_of(storage).zero_()
            synchronize()
        return self._note(OffloadReport(seconds=time.perf_counter() - start) if coming else OffloadReport())

    def read(self, tensor: torch.Tensor, start: int, into: torch.Tensor) -> None:
        """Copy numbers of a tensor, in its memory's order, from `start` on to host memory [n], from wherever they are
        now: nothing is moved. On CUDA the copy may only be queued.
        """
        size = tensor.element_size()
        at, target = (int(tensor.storage_offset()) + start) * size, into.view(torch.uint8)
        storage = tensor.untyped_storage()
        for kind, moved in self._away.items():
            place = 0
            for away, nbytes in moved:
                if away is storage:
                    assert self._kept(kind), f"{kind} were given up"
                    self._host[kind].read(place + at, target)
                    return
                place += nbytes
        target.copy_(_bytes_of(storage)[at : at + len(target)], non_blocking=True)

    def take(self) -> OffloadReport:
        """The report of all moves since the last call."""
        total, self._total = self._total, OffloadReport()
        return total

    def _note(self, report: OffloadReport) -> OffloadReport:
        self._total += report
        return report

    def _kept(self, kind: Kind) -> bool:
        return kind != "grads" or self._keep_grads

    def _memory(self, kind: Kind, size: int) -> _HostMemory:
        """Host memory of at least `size` bytes, kept from one move to the next: pinning is slow."""
        held = self._host.get(kind)
        if held is None or held.size < size:
            held = self._host[kind] = _HostMemory(size)
        return held

    def _storages(self, kind: Kind) -> list[torch.UntypedStorage]:
        """The storages of `kind` that are on the device now, each once."""
        params = [param for chunk in self._trainable.model.chunks for param in chunk.parameters()]
        grads = [param.main_grad for param in params if param.requires_grad]  # type: ignore[attr-defined]
        if kind == "params":
            return list(_present(params).values())
        if kind == "grads":
            return list(_present(grads).values())
        # In float32 the optimizer works on the parameters themselves, or on views of their buffer.
        model = _present([*params, *grads])
        return [s for address, s in _present(_optimizer_tensors(self._trainable)).items() if address not in model]


class _HostMemory:
    """Bytes in host memory, pinned where there is a GPU."""

    def __init__(self, size: int) -> None:
        self.size = size
        pinned = torch.cuda.is_available()
        self._pieces = [
            torch.empty(min(_PIECE_BYTES, size - at), dtype=torch.uint8, pin_memory=pinned)
            for at in range(0, size, _PIECE_BYTES)
        ]

    def copy_from(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Storages end to end into this memory. On CUDA the copy is only queued."""
        for here, there in self._pairs(storages):
            here.copy_(there, non_blocking=True)

    def copy_to(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """The inverse of copy_from."""
        for here, there in self._pairs(storages):
            there.copy_(here, non_blocking=True)

    def read(self, place: int, into: torch.Tensor) -> None:
        """Bytes of this memory from `place` on."""
        while len(into):
            piece, at = divmod(place, _PIECE_BYTES)
            size = min(len(into), _PIECE_BYTES - at)
            into[:size].copy_(self._pieces[piece][at : at + size])
            into, place = into[size:], place + size

    def _pairs(self, storages: Iterable[torch.UntypedStorage]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Equally long parts of this memory and of the storages, in order."""
        place = 0
        for storage in storages:
            left = _bytes_of(storage)
            while len(left):
                piece, at = divmod(place, _PIECE_BYTES)
                size = min(len(left), _PIECE_BYTES - at)
                yield self._pieces[piece][at : at + size], left[:size]
                left, place = left[size:], place + size


def _present(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Address -> storage, of the tensors whose memory is there."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _optimizer_tensors(trainable: Trainable) -> Iterator[torch.Tensor]:
    """Master weights and states of every optimizer; step counts, which are single numbers, stay where they are."""
    for optimizer in _torch_optimizers(trainable.optimizer):
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())


def _torch_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    if isinstance(optimizer, ChainedOptimizer):
        for part in optimizer.chained_optimizers:
            yield from _torch_optimizers(part)
    elif optimizer.optimizer is not None:  # None on a rank that trains nothing
        yield optimizer.optimizer


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """[bytes] uint8 view of a storage."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[arg-type]


def synchronize() -> None:
    """Wait until queued copies are done on the device; nothing on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
