from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.stream import MixedStream, Stream, open_stream, steps_per_epoch
from megatron_rl.errors import DataError


def make(num_items: int = 10, batch_size: int = 3, shuffle: bool = True, seed: int = 0) -> Stream:
    return Stream(num_items=num_items, batch_size=batch_size, shuffle=shuffle, seed=seed)


def flat(stream: Stream, batches: int) -> list[int]:
    return [item for _ in range(batches) for item in stream.next()]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.booleans(), st.integers(0, 5))
def test_each_epoch_visits_each_item_once_and_every_batch_is_full(n: int, batch: int, shuffle: bool, seed: int):
    """R4"""
    batch = min(n, batch)
    stream = make(n, batch, shuffle, seed)
    items = flat(stream, 3 * steps_per_epoch(n, batch))
    for epoch in range(len(items) // n):
        assert Counter(items[epoch * n : (epoch + 1) * n]) == Counter(range(n))


def test_a_batch_reaches_into_the_next_epoch():
    stream = make(3, 2, shuffle=False)
    assert [stream.next() for _ in range(4)] == [[0, 1], [2, 0], [1, 2], [0, 1]]


def test_epochs_have_orders_of_their_own_that_depend_on_the_seed_alone():
    first, second = flat(make(50, 50), 1), flat(make(50, 50, seed=1), 1)
    assert first != second and first != sorted(first)
    stream = make(50, 50)
    assert stream.next() != stream.next()
    # The batch size does not change the order.
    assert flat(make(50, 7), 50) == flat(make(50, 50), 7)


def test_the_order_is_the_same_on_every_machine_and_python():
    assert flat(make(8, 8), 2) == [0, 3, 7, 4, 1, 5, 2, 6, 6, 3, 1, 2, 0, 4, 5, 7]


def test_epoch_and_position_say_where_the_stream_is():
    stream = make(4, 3)
    places = []
    for _ in range(4):
        places.append((stream.epoch, stream.position))
        stream.next()
    assert places == [(0, 0), (0, 3), (1, 2), (2, 1)]
    assert (stream.epoch, stream.position) == (3, 0)


@pytest.mark.parametrize("taken", [0, 1, 3, 4, 9, 10])
def test_a_restored_stream_goes_on_with_the_identical_sequence(taken: int):
    """R1"""
    whole = make()
    flat(whole, taken)
    state = json.loads(json.dumps(whole.state()))
    resumed = make()
    resumed.restore(state)
    assert (resumed.epoch, resumed.position) == (whole.epoch, whole.position)
    assert flat(resumed, 20) == flat(whole, 20)


def test_a_stream_may_go_on_with_another_batch_size():
    whole = make(10, 5)
    whole.next()
    resumed = make(10, 2)
    resumed.restore(whole.state())
    assert flat(resumed, 10) == flat(whole, 4)


def test_other_data_or_another_seed_cannot_go_on():
    state = make(10, 3, seed=0).state()
    with pytest.raises(DataError, match=r"num_items was 10 and is 11, seed was 0 and is 4"):
        make(11, 3, seed=4).restore(state)
    with pytest.raises(DataError, match="shuffle"):
        make(10, 3, shuffle=False).restore(state)


def test_fewer_items_than_a_batch_is_an_error():
    with pytest.raises(DataError, match=r"data\.train_batch_size: 8 -- the training set has only 5"):
        make(5, 8)


def test_steps_per_epoch_rounds_up():
    assert [steps_per_epoch(n, 4) for n in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]


SOURCES = ["a"] * 6 + ["b"] * 3 + ["a"] * 4 + ["c"] * 7


def mix(weights: dict[str, float], sources: list[str] = SOURCES, batch_size: int = 2, **fields: Any) -> MixedStream:
    return MixedStream(sources, weights, batch_size=batch_size, **{"shuffle": True, "seed": 0, **fields})


def test_a_mix_takes_from_the_source_that_is_furthest_behind():
    stream = mix({"a": 2, "b": 1}, ["a", "a", "b"], 3, shuffle=False)
    assert [stream.next(), stream.next()] == [[0, 2, 1], [0, 2, 1]]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(1, 3), st.integers(0, 3))
def test_every_source_has_its_exact_share(weights: list[int], batch: int, seed: int):
    """R6: at each multiple of the weights' sum exactly, and near it at any moment."""
    names = "abcd"[: len(weights)]
    total = sum(weights)
    sources = [name for name in names for _ in range(5)]
    stream = mix(dict(zip(names, weights, strict=True)), sources, batch, seed=seed)
    taken: Counter[str] = Counter()
    for _ in range(2 * total):
        taken.update(sources[item] for item in stream.next())
        for name, weight in zip(names, weights, strict=True):
            ahead = taken[name] - taken.total() * weight / total
            assert -(len(names) - 1) < ahead < 1
    assert stream.counts == taken == {name: 2 * batch * w for name, w in zip(names, weights, strict=True)}


def test_within_a_source_each_row_comes_once_before_any_again():
    """R4"""
    stream = mix({"a": 0.5, "b": 0.2, "c": 0.3})
    items = [item for _ in range(500) for item in stream.next()]
    for name in "abc":
        rows = [i for i, source in enumerate(SOURCES) if source == name]
        seen = [item for item in items if SOURCES[item] == name]
        assert len(seen) == round(1000 * stream.shares[name])
        for start in range(0, len(seen) - len(rows), len(rows)):
            assert sorted(seen[start : start + len(rows)]) == rows


def test_weights_are_taken_as_written():
    """0.1 + 0.2 is 0.3 here: tenths, not the nearest binary numbers."""
    stream = mix({"a": 0.1, "b": 0.2, "c": 0.7}, batch_size=1)
    for _ in range(10):
        stream.next()
    assert stream.counts == {"a": 1, "b": 2, "c": 7}


@pytest.mark.parametrize("taken", [0, 1, 4, 11, 60])
def test_a_restored_mix_goes_on_with_the_identical_sequence(taken: int):
    """R1"""
    weights = {"a": 0.5, "b": 0.2, "c": 0.3}
    whole, resumed = mix(weights), mix(weights)
    for _ in range(taken):
        whole.next()
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert [resumed.next() for _ in range(30)] == [whole.next() for _ in range(30)]
    with pytest.raises(DataError, match=r"data mix cannot go on: .*data\.mix_weights"):
        mix({"a": 0.5, "b": 0.3, "c": 0.2}).restore(whole.state())
    with pytest.raises(DataError, match="num_items was 10 and is 9"):
        mix(weights, SOURCES[1:]).restore(whole.state())


def test_a_mix_that_does_not_fit_the_sources_is_an_error_that_names_them():
    with pytest.raises(DataError, match=r"'c' has 7 rows and no weight; 'd' has a weight and no rows .*: a, b, c"):
        mix({"a": 1, "b": 1, "d": 1})
    with pytest.raises(DataError, match=r"data\.mix_weights\.b: its share of a batch of 8 is 4 items, .* only 3"):
        mix({"a": 2, "b": 4, "c": 2}, batch_size=8)


def test_a_run_mixes_where_its_config_has_weights():
    cfg = DataConfig(train_files=["x"], train_batch_size=2)
    assert isinstance(open_stream(cfg, SOURCES, 0), Stream)
    mixed = open_stream(dataclasses.replace(cfg, mix_weights={"a": 1, "b": 1, "c": 2}), SOURCES, 0)
    assert isinstance(mixed, MixedStream) and mixed.shares == {"a": 0.25, "b": 0.25, "c": 0.5}
