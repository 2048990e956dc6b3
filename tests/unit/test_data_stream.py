from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.stream import Stream, steps_per_epoch
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
