"""The buffer between sampler and learner: bounded in number and in age, in order, nothing lost uncounted."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import RolloutError
from megatron_rl.experience.buffer import RolloutBuffer


@dataclass
class Simulation:
    """Engines that sample and a learner that trains, on a virtual clock. One seed, one history."""

    buffer: RolloutBuffer[int]
    sample_s: list[float]
    """seconds of entry n, repeated"""
    learn_s: float
    engines: int
    clock: float = 0.0
    version: int = 0
    taken: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(number, staleness) of each update"""
    refused: int = 0

    def run(self, updates: int) -> None:
        under_way: list[tuple[float, int, int]] = []
        learner_free = 0.0
        learning = False
        while self.version < updates:
            while len(under_way) < self.engines and (number := self.buffer.reserve()) is not None:
                seconds = self.sample_s[number % len(self.sample_s)]
                heapq.heappush(under_way, (self.clock + seconds, number, self.version))
                assert len(under_way) + len(self.buffer) <= self.buffer.capacity
            if not learning and len(self.buffer):
                taken = self.buffer.take()
                assert taken is not None
                number, version = divmod(taken, 1000)
                self.taken.append((number, self.version - version))
                learning, learner_free = True, self.clock + self.learn_s
                continue
            ends = [end for end, _, _ in under_way[:1]] + ([learner_free] if learning else [])
            assert ends, "nobody can go on"
            self.clock = min(ends)
            if learning and learner_free <= self.clock:
                learning = False
                self.version += 1
                before = len(self.buffer)
                self.buffer.advance(self.version)
                self.refused += before - len(self.buffer)
            elif under_way and under_way[0][0] <= self.clock:
                _, number, version = heapq.heappop(under_way)
                self.refused += not self.buffer.put(number, version, number * 1000 + version)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3),
    st.lists(st.floats(0.01, 5.0), min_size=1, max_size=5),
    st.floats(0.01, 5.0),
    st.integers(1, 4),
)
def test_no_update_is_from_older_weights_than_allowed_and_nothing_is_lost(
    max_staleness: int, sample_s: list[float], learn_s: float, engines: int
) -> None:
    """Whatever takes how long: it goes on, stays within its room, and each entry is learned from once or counted."""
    simulation = Simulation(RolloutBuffer(max_staleness), sample_s, learn_s, engines)
    simulation.run(12)
    assert all(staleness <= max_staleness for _, staleness in simulation.taken)
    assert simulation.buffer.num_dropped == simulation.refused
    numbers = [number for number, _ in simulation.taken]
    assert len(set(numbers)) == len(numbers) == 12


@pytest.mark.parametrize("sample_s", [[0.1], [4.0, 0.1]])
def test_at_staleness_0_entries_come_one_by_one_in_order(sample_s: list[float]) -> None:
    """The synchronous loop: entry k is sampled with version k, and learned from as the next thing."""
    simulation = Simulation(RolloutBuffer(0), sample_s, 1.0, engines=3)
    simulation.run(5)
    assert simulation.taken == [(number, 0) for number in range(5)] and simulation.buffer.num_dropped == 0


def test_entries_are_taken_by_version_and_then_by_number() -> None:
    buffer = RolloutBuffer[str](2)
    assert [buffer.reserve() for _ in range(4)] == [0, 1, 2, None]
    assert buffer.put(2, 0, "c") and buffer.put(0, 0, "a")
    buffer.advance(1)
    assert buffer.put(1, 1, "newer")
    assert [buffer.take() for _ in range(4)] == ["a", "c", "newer", None]


def test_what_has_become_too_old_is_refused_counted_and_replaced() -> None:
    buffer = RolloutBuffer[str](0)
    assert buffer.reserve() == 0 and buffer.reserve() is None
    buffer.advance(1)
    assert not buffer.put(0, 0, "late") and buffer.num_dropped == 1 and buffer.take() is None
    assert buffer.reserve() == 1 and buffer.put(1, 1, "in time") and buffer.take() == "in time"
    buffer.advance(2)
    assert buffer.reserve() == 2 and buffer.put(2, 2, "waits")
    buffer.advance(3)
    assert buffer.take() is None and buffer.num_dropped == 2


def test_a_restored_buffer_goes_on_where_it_was() -> None:
    """Entries that wait are kept; what was only reserved is sampled again under its number."""
    buffer = RolloutBuffer[str](2)
    assert [buffer.reserve() for _ in range(3)] == [0, 1, 2]
    buffer.put(0, 0, "a")
    resumed = RolloutBuffer[str](2)
    resumed.restore(buffer.state())
    assert resumed.take() == "a" and resumed.reserve() == 1
    stricter = RolloutBuffer[str](0)
    stricter.restore(buffer.state() | {"version": 1})
    assert stricter.take() is None and stricter.num_dropped == 1


def test_misuse_is_named() -> None:
    buffer = RolloutBuffer[str](0, version=3)
    with pytest.raises(RolloutError, match="entry 7 has no place in the buffer -- reserve one first"):
        buffer.put(7, 3, "x")
    number = buffer.reserve()
    assert number == 0
    with pytest.raises(RolloutError, match="has version 4, but the weights have 3"):
        buffer.put(number, 4, "x")
    with pytest.raises(RolloutError, match="goes back from 3 to 2"):
        buffer.advance(2)
    with pytest.raises(ValueError, match="max_staleness is -1"):
        RolloutBuffer[str](-1)


def test_slow_samples_are_dropped_and_others_take_their_place() -> None:
    """Each dropped entry gives its place back; else the run would wait for ever after a few of them."""
    simulation = Simulation(RolloutBuffer(1), [0.1, 2.0, 0.1, 0.1], 0.5, engines=2)
    simulation.run(20)
    assert simulation.buffer.num_dropped >= 3 and len(simulation.taken) == 20
