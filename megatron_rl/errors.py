"""Every error that megatron_rl raises on purpose. `megatron-rl check` loads this on a login node: import nothing heavy.

Adding an error:

- First see whether a class below fits. A class says who is at fault (data, weights, an engine, a reward, ...), not
  where it was noticed. A new one is for a new party, or for a caller that must catch this one alone.
- Derive from MegatronRLError, and from the built-in error that a reader would expect (ValueError, RuntimeError, ...).
- The message names the thing at fault (a key, or a file and row), its value, the reason and the cure:
  "actor.vpp: 2 -- <reason> -- set actor.vpp=1". Collect all faults and raise once, before work starts.
- It must survive pickling, so that an error in a Ray worker reaches the controller as itself: hand every argument of
  __init__ on to super().__init__ (tests/unit/test_errors.py tries each class).
- Raise it. Nothing catches an error and goes on: tests/house refuses a broad `except` that does.
"""

from __future__ import annotations

from dataclasses import dataclass


class MegatronRLError(Exception):
    """Root of the errors below; catching it catches what this package refuses, and no programming error."""


class DataError(MegatronRLError, ValueError):
    """A data file, row or tokenizer that cannot be used as it is."""


class CheckpointError(MegatronRLError, ValueError):
    """Weights or a checkpoint that are missing, surplus, misshaped or could not be written."""


class BrokenCheckpoint(CheckpointError):
    """A checkpoint whose files are not as they were written; the one before it may be whole."""


class NonFiniteError(MegatronRLError, ArithmeticError):
    """A loss, a gradient or weights with numbers that are not finite; training on them would destroy the model."""


class ReshardError(MegatronRLError, RuntimeError):
    """A weight transfer that would leave the engine different from the trainer."""


class P2PError(MegatronRLError, RuntimeError):
    """A message or a consensus check between ranks that did not finish in time: a rank is stuck, dead or elsewhere."""


class RolloutError(MegatronRLError, RuntimeError):
    """An engine that cannot serve a request as it was asked."""


class RewardError(MegatronRLError, RuntimeError):
    """A reward that cannot be loaded, or that fails on too many samples."""


class ClusterError(MegatronRLError, RuntimeError):
    """Processes or resources that cannot be had, or a worker that died or did not answer in time."""


class RankDied(ClusterError):
    """A rank's process ended in the middle of the run: a crash, a signal, or memory that ran out on its node."""


class RankHung(ClusterError):
    """Ranks that do not go on: a collective that one of them never reaches, a stopped process, a dead disk."""


class NodeLost(ClusterError):
    """A node of the cluster that does not answer any more, with all its ranks."""


class DeviceError(ClusterError):
    """A GPU that failed under a rank: the process cannot use it any more, a new one may."""


class OutOfMemory(ClusterError, MemoryError):
    """Memory of a GPU or of a process that did not suffice; the message says which settings need less."""


class FlowError(MegatronRLError, ValueError):
    """A flow whose nodes do not fit together."""


class MissingDependency(MegatronRLError, ImportError):
    """An optional package that is not installed; the message holds the pip command."""


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a config: which key, what it holds, why that cannot be, and what to write instead."""

    key: str
    value: object
    reason: str
    cure: str

    def __str__(self) -> str:
        return f"{self.key}: {self.value!r} -- {self.reason} -- {self.cure}"


class ConfigError(MegatronRLError, ValueError):
    """A config that cannot run. `faults` lists every fault found, not the first one."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__(faults)
        self.faults = list(faults)

    def __str__(self) -> str:
        count = len(self.faults)
        head = f"{count} fault{'s' if count != 1 else ''} in the configuration (key: value -- reason -- cure):"
        return "\n".join([head, *(f"  {fault}" for fault in self.faults)])
