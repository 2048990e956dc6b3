"""Contract W1 of a family's table: the blocks of all trainer ranks cover each HF tensor."""

from __future__ import annotations

import torch

from megatron_rl.models import FAMILIES
from megatron_rl.models.rules import hf_shapes, megatron_params
from megatron_rl.models.shape import ModelShape

REPLICATED = (
    *("norm.weight", "gate.weight", "gate.e_score_correction_bias", "router.weight", "router.bias", "o_proj.bias"),
    "shared_expert_gate.weight",
    *("q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
)
"""Ends of the names of HF tensors that every tensor-parallel rank holds whole, on both sides"""


def check_tiling(shape: ModelShape, tp: int) -> None:
    """Each number of each split HF tensor is on exactly one of tp ranks; replicated tensors and experts, which other
    ranks split, are whole on each.
    """
    family = FAMILIES[shape.architecture]
    cover = {name: torch.zeros(size, dtype=torch.int64) for name, size in hf_shapes(shape, family).items()}
    layers = range(shape.num_layers)
    for rank in range(tp):
        params = megatron_params(shape, family, tp=tp, tp_rank=rank, layers=layers, pre_process=True, post_process=True)
        for param in params:
            assert sum(block.num_rows for block in param.blocks) <= param.num_rows
            for block in param.blocks:
                part = cover[block.hf_name][slice(*block.rows)]
                part = part if block.cols is None else part[:, slice(*block.cols)]
                part += 1
    for name, count in cover.items():
        whole = ".experts." in name or name.endswith(REPLICATED)
        assert bool((count == (tp if whole else 1)).all()), name
