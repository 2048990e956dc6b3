"""The table of phases, and what moves when a rank walks through the phases of a step."""

from __future__ import annotations

from typing import get_args

import pytest

from megatron_rl.types import OffloadReport
from megatron_rl.workers.phases import DEVICE, HOST, PHASES, Memory, MemoryKind, Phase, PhaseName, RankMemory

KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


class Shelf:
    """A model's memory that only knows where it is; both ways are written to `moves`."""

    def __init__(self, name: str, moves: list[str]) -> None:
        self.name, self.moves = name, moves
        self.on_device = set(KINDS)

    def to_host(self, *kinds: MemoryKind) -> OffloadReport:
        assert kinds, "no kind means all of them"
        self.moves += [f"{self.name} {kind} out" for kind in kinds if kind in self.on_device]
        self.on_device -= set(kinds)
        return OffloadReport()

    def to_device(self, *kinds: MemoryKind) -> OffloadReport:
        assert kinds, "no kind means all of them"
        self.moves += [f"{self.name} {kind} in" for kind in kinds if kind not in self.on_device]
        self.on_device |= set(kinds)
        return OffloadReport()


class Bed:
    """An engine that can only sleep."""

    def __init__(self) -> None:
        self.awake = True

    def sleep(self) -> None:
        self.awake = False


class Rank:
    """Actor, critic and engine on one rank."""

    def __init__(self) -> None:
        self.moves: list[str] = []
        self.actor, self.critic, self.engine = Shelf("actor", self.moves), Shelf("critic", self.moves), Bed()
        self.memory = RankMemory()
        self.memory.add_model("actor", self.actor)
        self.memory.add_model("critic", self.critic)
        self.memory.add_engine(self.engine)

    def enter(self, phase: PhaseName, role: str | None = None) -> None:
        self.memory.enter(phase, role)


def walk() -> list[str]:
    """The faults of a PPO step by the table that is in force: what a phase needs and does not have."""
    rank, faults = Rank(), list[str]()
    rank.enter("between")

    def need(phase: str, **facts: bool) -> None:
        faults.extend(f"{phase}: {name}" for name, holds in facts.items() if not holds)

    def rests(shelf: Shelf) -> bool:
        return not shelf.on_device

    rank.enter("generate")
    need("generate", actor_gone=rests(rank.actor), critic_gone=rests(rank.critic), awake=rank.engine.awake)
    rank.enter("forward", "actor")
    need("actor's pass", params="params" in rank.actor.on_device, asleep=not rank.engine.awake)
    need("actor's pass", critic_gone=rests(rank.critic))
    rank.enter("between")
    rank.enter("forward", "critic")
    need("critic's pass", params="params" in rank.critic.on_device, no_optimizer=rank.critic.on_device == {"params"})
    rank.enter("between")
    need("after the critic's pass", critic_gone=rests(rank.critic), actor_stays="params" in rank.actor.on_device)
    rank.enter("update", "critic")
    need("critic's update", everything=rank.critic.on_device == set(KINDS))
    rank.enter("between")
    rank.enter("update", "actor")
    need("actor's update", everything=rank.actor.on_device == set(KINDS), critic_gone=rests(rank.critic))
    rank.enter("between")
    rank.enter("publish", "actor")
    need("publish", params_alone=rank.actor.on_device == {"params"}, critic_gone=rests(rank.critic))
    rank.enter("save", "critic")
    need("save", params="params" in rank.critic.on_device)
    return faults


def test_a_step_finds_its_memory_where_it_needs_it():
    assert walk() == []


@pytest.mark.parametrize(
    ("phase", "broken", "fault"),
    [
        ("generate", Phase("awake"), "generate: actor_gone"),
        ("forward", Phase("stays", working=Memory(params="device")), "actor's pass: asleep"),
        ("forward", Phase("asleep"), "actor's pass: params"),
        ("forward", Phase("asleep", working=DEVICE), "critic's pass: no_optimizer"),
        ("update", Phase("asleep", working=Memory(params="device")), "critic's update: everything"),
        ("publish", Phase("stays", working=Memory(params="device")), "publish: params_alone"),
        ("between", Phase("stays", others=Memory()), "after the critic's pass: critic_gone"),
        ("between", Phase("stays", actor=HOST), "after the critic's pass: actor_stays"),
    ],
)
def test_a_broken_table_is_seen(monkeypatch: pytest.MonkeyPatch, phase: PhaseName, broken: Phase, fault: str):
    monkeypatch.setitem(PHASES, phase, broken)
    assert fault in walk()


def test_every_phase_is_in_the_table():
    assert set(PHASES) == set(get_args(PhaseName))


def test_what_leaves_goes_before_what_comes_and_a_phase_entered_twice_moves_nothing():
    rank = Rank()
    rank.enter("generate")
    rank.enter("update", "actor")
    rank.enter("update", "critic")
    rank.moves.clear()
    rank.enter("update", "actor")
    assert rank.moves == [f"critic {kind} out" for kind in KINDS]
    rank.moves.clear()
    rank.enter("forward", "critic")
    rank.enter("publish", "actor")
    assert rank.moves == ["critic params in", "actor grads out", "actor optimizer out", "critic params out"]
    rank.moves.clear()
    rank.enter("publish", "actor")
    assert rank.moves == []


def test_a_frozen_models_pass_moves_no_trained_model_in():
    rank = Rank()
    rank.enter("generate")
    rank.moves.clear()
    rank.enter("forward", "reference")
    assert (rank.moves, rank.engine.awake, rank.memory.engine_awake) == ([], False, False)
