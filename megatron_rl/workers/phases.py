"""Which memory is where in each phase of a step: one table, and what moves a rank's memory from phase to phase.

Nothing else moves parameters, gradients or optimizer state between device and host, or puts an engine to sleep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from megatron_rl.observe.beat import beat
from megatron_rl.types import OffloadReport

Where = Literal["device", "host", "stays"]
"""stays: wherever the phase before has left it."""
PhaseName = Literal["generate", "forward", "update", "publish", "save", "load", "between"]
MemoryKind = Literal["params", "grads", "optimizer"]


@dataclass(frozen=True)
class Memory:
    """Where the memory of one trained model is. "host" applies to what the config offloads; the rest never moves."""

    params: Where = "stays"
    grads: Where = "stays"
    optimizer: Where = "stays"

    def kinds(self, where: Where) -> tuple[MemoryKind, ...]:
        """The kinds of memory that belong there."""
        places: dict[MemoryKind, Where] = {
            "params": self.params,
            "grads": self.grads,
            "optimizer": self.optimizer,
        }
        return tuple(kind for kind, place in places.items() if place == where)


STAYS = Memory()
DEVICE = Memory("device", "device", "device")
HOST = Memory("host", "host", "host")


@dataclass(frozen=True)
class Phase:
    """Where memory is in a phase, by role. working: of the role that the phase is for. actor: of the actor, if another
    role works; it has more to do in this step. others: of all other trained models, which wait.
    """

    engine: Literal["awake", "asleep", "stays"]
    """asleep: its KV cache, and on a GPU its own copies of weights, are given up until the next publish."""
    working: Memory = STAYS
    actor: Memory = STAYS
    others: Memory = HOST


PHASES: dict[PhaseName, Phase] = {
    "generate": Phase("awake", actor=HOST),
    "forward": Phase("asleep", working=Memory(params="device")),
    "update": Phase("asleep", working=DEVICE),
    # The publisher wakes the engine part by part: its weights, then, once those of the actor may leave, its KV cache.
    "publish": Phase("stays", working=Memory(params="device", grads="host", optimizer="host")),
    "save": Phase("stays", working=Memory(params="device")),
    # A checkpoint is saved in no phase: it is read from where the memory is.
    "load": Phase("asleep", working=Memory(params="device", optimizer="device"), actor=HOST),
    # After each pass: a critic leaves at once, so that actor and critic need not fit together.
    "between": Phase("stays"),
}


class Movable(Protocol):
    """The memory of one trained model (mcore.offload.Offload)."""

    def to_host(self, *kinds: MemoryKind) -> OffloadReport: ...

    def to_device(self, *kinds: MemoryKind) -> OffloadReport: ...


class Sleeper(Protocol):
    """What of an engine a phase moves."""

    def sleep(self) -> None: ...


class Marked(Protocol):
    """What is told in which phase a rank is (workers/profile.py)."""

    def mark(self, phase: str) -> None: ...


class RankMemory:
    """The memory that the workers of one process share: trained models by role, and an engine if there is one."""

    def __init__(self) -> None:
        self._models: dict[str, Movable] = {}
        self._engine: Sleeper | None = None
        self.trace: Marked | None = None
        """what is told of each phase while a step is profiled"""
        self.engine_awake = True
        """False from the first phase that needs its memory until it has been woken by a publish."""

    def add_model(self, role: str, memory: Movable) -> None:
        """From now on phases move it."""
        self._models[role] = memory

    def add_engine(self, engine: Sleeper) -> None:
        """From now on phases put it to sleep."""
        self._engine = engine

    def enter(self, phase: PhaseName, role: str | None = None) -> None:
        """Bring all memory where PHASES says. role: whose phase it is; one that is not trained has nothing to move.
        Entering a phase twice moves nothing the second time.
        """
        beat(f"memory for {phase}")
        if self.trace is not None:
            self.trace.mark(phase)
        row = PHASES[phase]
        if row.engine == "asleep" and self._engine is not None:
            self._engine.sleep()
            self.engine_awake = False
        places = {name: self._place(row, name, role) for name in self._models}
        # What leaves goes first: both may not fit.
        for name, place in places.items():
            if leaving := place.kinds("host"):
                self._models[name].to_host(*leaving)
        for name, place in places.items():
            if coming := place.kinds("device"):
                self._models[name].to_device(*coming)

    @staticmethod
    def _place(row: Phase, name: str, role: str | None) -> Memory:
        if name == role:
            return row.working
        return row.actor if name == "actor" else row.others
