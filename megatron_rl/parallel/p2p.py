"""Point-to-point messages and a consensus check over a process group, with timeouts.

Ranks are positions in the group, which may be the default one or any other that holds trainers and engines together.
"""

# torch leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.errors import P2PError
from megatron_rl.observe.beat import beat

_POLL_S = 0.0005
_EAGER_S = 0.005

PeerMessage = tuple[int, torch.Tensor]
"""(the other rank, a contiguous tensor)"""


@dataclass(frozen=True)
class RankStatus:
    """What one rank reports before data moves.

    fingerprint: of what it is about to do. fault: what is wrong on it; empty if nothing is.
    """

    fingerprint: bytes
    flag: bool
    fault: str


class P2PGroup:
    """Point-to-point messages and consensus over one process group.

    Every wait ends after `timeout_s` with a P2PError that names this rank, the phase and what it waited for. With gloo
    tensors are on the CPU, with nccl on the GPU.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = 600.0) -> None:
        """group: the default group when not given."""
        self._group = dist.group.WORLD if group is None else group
        assert self._group is not None, "torch.distributed is not initialized"
        self._nccl = dist.get_backend(self._group) == "nccl"
        self.timeout_s = timeout_s

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self._group)

    @property
    def world(self) -> int:
        """Ranks of the group."""
        return dist.get_world_size(self._group)

    @property
    def device(self) -> torch.device:
        """Where tensors that travel must be."""
        return torch.device("cuda", torch.cuda.current_device()) if self._nccl else torch.device("cpu")

    def post(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage], phase: str) -> Pending:
        """Start all messages at once; their tensors are in use until `Pending.wait`. Messages between two ranks arrive
        in the order they are posted, so both sides list theirs in one order.
        """
        beat(phase)
        ops = [dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=peer) for peer, tensor in receives]
        ops += [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=peer) for peer, tensor in sends]
        what = f"messages to ranks {[peer for peer, _ in sends]} and from ranks {[peer for peer, _ in receives]}"
        try:
            # One batch: nccl would deadlock where two ranks send to each other one message after another.
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise P2PError(f"rank {self.rank}: {phase}: {what} could not start: {error}") from error
        return Pending(self, works, phase, what)

    def agree(self, phase: str, key: str, *, flag: bool = False, fault: str = "") -> list[RankStatus]:
        """Every rank's status, in order of rank. A collective: all ranks must call it.

        key: what must be the same on all ranks; only its fingerprint travels. One small all-gather, and a second one
        only if a rank has a fault.
        """
        beat(phase)
        fingerprint = hashlib.sha256(key.encode()).digest()
        if self.world == 1:
            return [RankStatus(fingerprint, flag, fault)]
        text = fault.encode()
        head = fingerprint + bytes([flag]) + len(text).to_bytes(4, "little")
        heads = self._all_gather(head, len(head), phase)
        lengths = [int.from_bytes(head[-4:], "little") for head in heads]
        longest = max(lengths)
        texts = self._all_gather(text.ljust(longest, b" "), longest, phase) if longest else [b""] * len(heads)
        return [
            RankStatus(head[:-5], bool(head[-5]), padded[:length].decode())
            for head, padded, length in zip(heads, texts, lengths, strict=True)
        ]

    def _all_gather(self, data: bytes, size: int, phase: str) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        gathered = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(self.world)]
        what = f"a status from each of {self.world} ranks"
        try:
            # A rank with a fault comes too, and reports it: the others would wait for it until the timeout.
            work = dist.all_gather(gathered, mine, group=self._group, async_op=True)
        except RuntimeError as error:
            raise P2PError(f"rank {self.rank}: {phase}: {what} could not start: {error}") from error
        self.finish(work, phase, what, time.monotonic() + self.timeout_s)
        return [bytes(one.tolist()) for one in gathered]

    def finish(self, work: Any, phase: str, what: str, deadline: float) -> None:
        """Wait for one piece of work of the group. Raises P2PError after `deadline` (time.monotonic)."""
        failed = f"rank {self.rank}: {phase}: {what} did not finish within {self.timeout_s:g} s"
        try:
            if self._nccl:
                # nccl's own wait only orders streams; the watchdog would end the process without a name.
                eager = time.monotonic() + _EAGER_S
                while not work.is_completed():
                    now = time.monotonic()
                    if now > deadline:
                        raise P2PError(failed + "; a rank is stuck, dead or at another step")
                    time.sleep(0.0 if now < eager else _POLL_S)
                work.wait()
            else:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            if isinstance(error, P2PError):
                raise
            raise P2PError(f"{failed}: {error}") from error


class Pending:
    """Messages in flight."""

    def __init__(self, group: P2PGroup, works: Sequence[Any], phase: str, what: str) -> None:
        self._group, self._works, self._phase, self._what = group, works, phase, what

    def wait(self) -> None:
        """Until all have arrived and gone. Raises P2PError at the deadline, or where a rank has died."""
        deadline = time.monotonic() + self._group.timeout_s
        for work in self._works:
            self._group.finish(work, self._phase, self._what, deadline)
