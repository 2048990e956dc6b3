"""Executes one rank's part of a plan on live tensors: local copies, and messages from rank to rank.

Nothing is decided here: the plan (plan.py) says what goes where, the schedule (rounds.py) what is sent together.
Ranks are the plan's process numbers, which are positions in the process group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_rl.models.rules import LocalParam
from megatron_rl.ops.copies import CopyBatch
from megatron_rl.parallel.p2p import P2PGroup, Pending
from megatron_rl.reshard.plan import BlockIndex, Move, Plan, RankBytes
from megatron_rl.reshard.rounds import Round, rounds_of_rank
from megatron_rl.reshard.views import Copy, Tensors, common_slice, each_once, flat_rows, part_of, slots_of, view_of


@dataclass(frozen=True)
class Moved:
    """What one run did on this rank, in bytes. received, sent: between ranks, as they travelled. staging: the most
    staging memory at a time. messages: sent.
    """

    local: int = 0
    aliased: int = 0
    received: int = 0
    sent: int = 0
    messages: int = 0
    staging: int = 0


Fingerprint = tuple[tuple[object, ...], ...]
"""Identity of a set of tensors: names, addresses, shapes, strides and dtypes, not values."""


def fingerprint_of(tensors: Tensors) -> Fingerprint:
    """Unchanged as long as every tensor keeps its address, shape, stride and dtype."""
    values = tensors.values()
    read = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride
    return (tuple(tensors), *(tuple(map(what, values)) for what in read), tuple(tensor.dtype for tensor in values))


@dataclass(frozen=True)
class TensorSet:
    """This rank's tensors of the trainer or of the engine, during one sync.

    The fingerprint is computed once per sync: it costs as much as the copies that remain after aliasing.
    """

    tensors: Tensors
    fingerprint: Fingerprint

    @staticmethod
    def of(tensors: Tensors) -> TensorSet:
        return TensorSet(tensors, fingerprint_of(tensors))


@dataclass
class _BoundRound:
    """A round's copies into and out of its staging memory: the message to the peer, then the one from it."""

    round: Round
    pack: CopyBatch
    unpack: CopyBatch


@dataclass
class _Bound:
    """Views into the live tensors, valid as long as both sides keep these fingerprints.

    written: storages that local copies write to; received: that messages are unpacked into. local, aliased: bytes.
    """

    fingerprints: tuple[Fingerprint, Fingerprint]
    padding: list[torch.Tensor]
    copies: CopyBatch
    rounds: list[_BoundRound]
    written: set[int]
    received: set[int]
    local: int
    aliased: int


class Transfer:
    """Executes a plan, once per sync: call `faults` on every rank first, and `run` if no rank has any."""

    def __init__(
        self,
        plan: Plan,
        group: P2PGroup,
        trainer: Sequence[LocalParam],
        engine: Sequence[LocalParam],
        *,
        trainer_dtype: torch.dtype,
        engine_dtype: torch.dtype,
        cap_bytes: int,
    ) -> None:
        """trainer, engine: this rank's parameters on each side, empty where it has no such side; all of a side have
        its dtype, but those of the engine that are float32 in any case (Rule.float32). cap_bytes: of staging memory.
        Raises ReshardError where the cap does not hold a row of some tensor.
        """
        self.plan, self.group = plan, group
        self._trainer, self._engine = tuple(trainer), tuple(engine)
        self._trainer_dtype, self._engine_dtype = trainer_dtype, engine_dtype
        self._cap_bytes = cap_bytes
        self._from_trainer, self._from_engine = BlockIndex(self._trainer), BlockIndex(self._engine)
        part = plan.of_rank(group.rank)
        self._local = part.local
        self.rounds = rounds_of_rank(
            part, group.world, element_size=lambda wave: self._wire_dtype(wave).itemsize, cap_bytes=cap_bytes
        )
        self._bound: _Bound | None = None
        self._faultless: tuple[tuple[Fingerprint, Fingerprint], frozenset[str]] | None = None

    @property
    def key(self) -> str:
        """What must be the same on all ranks, besides the plan."""
        return f"{self._trainer_dtype} {self._engine_dtype} {self._cap_bytes}"

    def planned(self) -> RankBytes:
        """Byte counts of this rank by the plan."""
        return self.plan.bytes_of(self.group.rank, self._wire_dtype(0).itemsize)

    def _wire_dtype(self, wave: int) -> torch.dtype:
        """Values are cast before they are sent if that makes them smaller; engines forward their own values."""
        smaller = self._trainer_dtype.itemsize < self._engine_dtype.itemsize
        return self._trainer_dtype if wave == 0 and smaller else self._engine_dtype

    def faults(self, sources: TensorSet, targets: TensorSet, shared: Collection[str] = ()) -> list[str]:
        """Everything that keeps this rank from carrying out the plan: missing, surplus, misshaped or mistyped tensors,
        and memory shared where it must not be, or no longer where it must. Reads no values.

        shared: engine parameters that were made views of the trainer's.
        """
        seen = (sources.fingerprint, targets.fingerprint), frozenset(shared)
        if seen == self._faultless:
            return []
        faults = _differences("trainer", self._trainer, self._trainer_dtype, sources.tensors)
        faults += _differences("engine", self._engine, self._engine_dtype, targets.tensors)
        faults = faults or self._no_longer_aliased(sources, targets, shared) + self._overlaps(sources, targets)
        if not faults:
            self._faultless = seen
        return faults

    def _no_longer_aliased(self, sources: TensorSet, targets: TensorSet, shared: Collection[str]) -> list[str]:
        """Parameters that no longer alias the trainer's memory, though the engine was built on it."""
        written = self._bind(sources, targets).written
        return [
            f"the engine's {name} was a view of the trainer's weights, and the trainer's were allocated anew since: "
            "what the engine captured reads the old memory"
            for name in shared
            if _storage(targets.tensors[name]) in written
        ]

    def _overlaps(self, sources: TensorSet, targets: TensorSet) -> list[str]:
        """Engine parameters in the trainer's memory that the plan would write to."""
        bound = self._bind(sources, targets)
        shared = (bound.written | bound.received) & {_storage(tensor) for tensor in sources.tensors.values()}
        return [
            f"the engine's {name} lies in the trainer's memory, and not where its values are: a sync would overwrite "
            "the trainer's weights"
            for name, tensor in targets.tensors.items()
            if _storage(tensor) in shared
        ]

    @torch.no_grad()
    def run(self, sources: TensorSet, targets: TensorSet, phase: str) -> Moved:
        """Every byte of the engine's parameters on this rank, from trainers' and other engines' ranks.

        Rows of an engine parameter past its blocks (a padded vocabulary) become 0. Raises ReshardError at a deadline.
        On a GPU the last of it is queued, not done: see wait().
        """
        bound = self._bind(sources, targets)
        for rows in bound.padding:
            rows.zero_()
        bound.copies.run()
        staging = self._travel(bound.rounds, phase)
        return Moved(
            local=bound.local,
            aliased=bound.aliased,
            received=sum(rnd.received_bytes for rnd in self.rounds),
            sent=sum(rnd.sent_bytes for rnd in self.rounds),
            messages=sum(bool(rnd.sends) for rnd in self.rounds),
            staging=staging,
        )

    def wait(self, targets: TensorSet) -> None:
        """Wait until a run is done on the device: an engine may read on another stream."""
        if any(tensor.is_cuda for tensor in targets.tensors.values()):
            torch.cuda.current_stream().synchronize()

    @torch.no_grad()
    def _bind(self, sources: TensorSet, targets: TensorSet) -> _Bound:
        fingerprints = sources.fingerprint, targets.fingerprint
        if self._bound is None or self._bound.fingerprints != fingerprints:
            pairs = [
                copy for move in self._local for copy in self._local_copies(move, sources.tensors, targets.tensors)
            ]
            copies = [(to, source) for to, source in pairs if not _same_memory(to, source)]
            written = {_storage(to) for to, _ in copies}
            padding = [
                flat_rows(targets.tensors[param.name])[sum(block.num_rows for block in param.blocks) :]
                for param in self._engine
            ]
            # Padding of a parameter that is the trainer's own is the trainer's to keep.
            trained = {_storage(tensor) for tensor in sources.tensors.values()} - written
            local = sum(to.nbytes for to, _ in copies)
            received: set[int] = set()
            self._bound = _Bound(
                fingerprints,
                [rows for rows in padding if len(rows) and _storage(rows) not in trained],
                CopyBatch(copies),
                [self._bind_round(rnd, sources.tensors, targets.tensors, received) for rnd in self.rounds],
                written,
                received,
                local,
                sum(to.nbytes for to, _ in pairs) - local,
            )
        return self._bound

    def _local_copies(self, move: Move, sources: Tensors, targets: Tensors) -> Iterator[Copy]:
        reads = each_once(self._from_trainer.places(move))
        for write in self._from_engine.places(move):
            to = view_of(targets, write)
            for read in reads:
                rows = common_slice(write.at_rows, read.at_rows)
                cols = (
                    common_slice(write.at_cols, read.at_cols)
                    if write.at_cols is not None and read.at_cols is not None
                    else None
                )
                if rows is not None and (cols is not None or write.at_cols is None):
                    source = view_of(sources, read)
                    yield part_of(to, write, rows, cols), part_of(source, read, rows, cols)

    def _bind_round(self, rnd: Round, sources: Tensors, targets: Tensors, received: set[int]) -> _BoundRound:
        """Also adds to `received` the storages that the round writes to."""
        dtype = self._wire_dtype(rnd.wave)
        index, tensors = (self._from_trainer, sources) if rnd.wave == 0 else (self._from_engine, targets)
        # Staging memory is new in each sync: here it is its sizes and offsets alone.
        staging = torch.empty(rnd.num_bytes, dtype=torch.uint8, device="meta")
        sent, got = staging[: rnd.sent_bytes], staging[rnd.sent_bytes :]
        pack = CopyBatch(slots_of(rnd.sends, sent, dtype, index, tensors, each_once), self.group.device)
        unpack = [(there, slot) for slot, there in slots_of(rnd.receives, got, dtype, self._from_engine, targets, list)]
        received.update(_storage(there) for there, _ in unpack)
        return _BoundRound(rnd, pack, CopyBatch(unpack, self.group.device))

    def _travel(self, rounds: Sequence[_BoundRound], phase: str) -> int:
        """All rounds, two in flight; the bytes of staging memory."""
        sizes = [max((one.round.num_bytes for one in rounds[parity::2]), default=0) for parity in (0, 1)]
        arenas = [torch.empty(size, dtype=torch.uint8, device=self.group.device) for size in sizes]
        before: tuple[_BoundRound, torch.Tensor, Pending] | None = None
        for number, bound in enumerate(rounds):
            rnd = bound.round
            if before is not None and before[0].round.wave != rnd.wave:
                # Engines forward values of the wave before: these must be in their parameters first.
                _unpack(*before)
                before = None
            staging = arenas[number % 2][: rnd.num_bytes]
            bound.pack.run(staging)
            sends = [(rnd.peer, staging[: rnd.sent_bytes])] if rnd.sends else []
            receives = [(rnd.peer, staging[rnd.sent_bytes :])] if rnd.receives else []
            place = f"{phase}, wave {rnd.wave}, round {number} of {len(rounds)}"
            pending = self.group.post(sends, receives, place)
            if before is not None:
                _unpack(*before)
            before = bound, staging, pending
        if before is not None:
            _unpack(*before)
        return sum(sizes)


def _unpack(bound: _BoundRound, staging: torch.Tensor, pending: Pending) -> None:
    pending.wait()
    bound.unpack.run(staging)


def _differences(side: str, params: Sequence[LocalParam], dtype: torch.dtype, tensors: Tensors) -> list[str]:
    expected = {param.name: param.shape for param in params}
    in_float32 = {param.name for param in params if param.float32}
    faults = [f"the {side} has no {name}, which the plan was made with" for name in expected if name not in tensors]
    faults += [f"the {side} has {name}, which the plan does not know" for name in tensors if name not in expected]
    for name in expected.keys() & tensors.keys():
        tensor = tensors[name]
        wanted = torch.float32 if name in in_float32 else dtype
        if tuple(tensor.shape) != expected[name]:
            faults.append(f"the {side}'s {name} is {list(tensor.shape)}, the plan was made for {list(expected[name])}")
        elif tensor.dtype != wanted:
            faults.append(f"the {side}'s {name} is {tensor.dtype}, the plan was made for {wanted}")
        elif not tensor.is_contiguous():
            faults.append(f"the {side}'s {name} is not contiguous")
    return sorted(faults)


def _storage(tensor: torch.Tensor) -> int:
    """Address of the memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Both views are the same values in the same place."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )
