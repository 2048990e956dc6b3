"""Handles without Ray; with it: tests/e2e/test_ray_backend.py."""

from __future__ import annotations

import pickle

import numpy as np

from megatron_rl.cluster.handles import InProcess, hand_over


def test_without_ray_a_handle_is_the_value_itself():
    value = np.arange(3)
    handle = hand_over(value)
    assert isinstance(handle, InProcess) and handle.fetch() is value
    assert pickle.loads(pickle.dumps(handle)).fetch().tolist() == [0, 1, 2]
