"""Batched copies by torch; tests/gpu/test_kernels.py has the kernel."""

from __future__ import annotations

import torch

from megatron_rl.ops.copies import CopyBatch


def test_views_on_the_meta_device_stand_for_those_of_any_buffer() -> None:
    """Out of tensors into a buffer, and from there into others, whole rows, columns and another dtype; two buffers."""
    staging = torch.empty(12 * 2 + 8 * 2, dtype=torch.uint8, device="meta")
    matrix = staging[:24].view(torch.bfloat16).view(3, 4)
    vector = staging[24:].view(torch.bfloat16)
    source, values = torch.arange(40.0).view(5, 8).bfloat16(), torch.arange(8.0)
    target, copy = torch.full((4, 8), -1.0), torch.full((10,), -1.0).bfloat16()
    pack = CopyBatch([(matrix, source[1:4, 2:6]), (vector, values)])
    unpack = CopyBatch([(target[:3, 4:], matrix), (copy[1:9], vector)])
    for number in range(2):
        source.add_(number)
        buffer = torch.full((40,), 255, dtype=torch.uint8)
        pack.run(buffer)
        unpack.run(buffer)
        expected = torch.full((4, 8), -1.0)
        expected[:3, 4:] = source[1:4, 2:6].float()
        assert torch.equal(target, expected)
        assert copy.tolist() == [-1.0, *values.tolist(), -1.0]
