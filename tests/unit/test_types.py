"""Flat answers of engines."""

from __future__ import annotations

import numpy as np

from megatron_rl.types import Rollout, Samples


def test_samples_are_flat_and_know_their_rows():
    samples = Samples.from_lists(
        [(8, 1), (), (9, 9, 3)], [(-0.5, -1.0), (), (-2.0,) * 3], ["stop", "stop", "length"], 4
    )
    assert samples.token_ids.tolist() == [8, 1, 9, 9, 3] and samples.token_ids.dtype == np.int32
    assert samples.logprobs.tolist() == [-0.5, -1.0, -2.0, -2.0, -2.0] and samples.logprobs.dtype == np.float32
    assert samples.lens.tolist() == [2, 0, 3] and samples.finish.tolist() == [0, 0, 1]
    assert samples.oldest_version.tolist() == samples.newest_version.tolist() == [4, 4, 4]
    assert samples.id_tuples() == [(8, 1), (), (9, 9, 3)] and len(samples) == 3
    assert samples.rollout(2, "c") == Rollout((9, 9, 3), (-2.0, -2.0, -2.0), "length", "c")
    assert len(Samples.from_lists([], [], [], 0)) == 0
