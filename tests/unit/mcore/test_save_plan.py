"""Which rank writes what of a saved model, and what the writers put together, without processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from megatron_rl.config.sections.actor import ParallelConfig
from megatron_rl.convert.layout import chunk_params
from megatron_rl.mcore.convert import lay
from megatron_rl.mcore.save_plan import SavePlan, plan_save
from megatron_rl.models import FAMILIES
from megatron_rl.models.known import known
from megatron_rl.models.rules import LocalParam, hf_shapes
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.stacks import stacked_shapes
from megatron_rl.parallel.topology import Topology, topology_of
from megatron_rl.weights.shard_files import TensorEntry

DENSE = known("Qwen2ForCausalLM", 32, 4, 4, 2, 48, 131, head_dim=8, tied=True)
EXPERTS = known("Qwen3MoeForCausalLM", 32, 4, 4, 2, 24, 131, head_dim=8, experts=(8, 2))
STACKS = replace(EXPERTS, architecture="GptOssForCausalLM")
CASES = {
    "one": (DENSE, 1, {}),
    "dp2-tp2-pp2": (DENSE, 8, {"tp": 2, "pp": 2}),
    "cp2-pp2-vpp2": (DENSE, 4, {"cp": 2, "pp": 2, "vpp": 2}),
    "ep2-tp2-etp2": (EXPERTS, 4, {"tp": 2, "ep": 2, "etp": 2}),
    "ep4-tp2-dp2": (EXPERTS, 8, {"tp": 2, "ep": 4, "pp": 1}),
    "stacks-ep2-tp2": (STACKS, 8, {"tp": 2, "ep": 2}),
    "ep2-pp2-dp4": (EXPERTS, 8, {"ep": 2, "pp": 2}),
}


def _shards(shape: ModelShape, layout: ParallelConfig, stage: int, chunk: int) -> list[tuple[LocalParam, ...]]:
    by_tp = [chunk_params(shape, layout, stage, chunk, rank, 0) for rank in range(layout.tp)]
    experts = layout.ep * layout.expert_tp if shape.num_experts else 1
    by_expert = [chunk_params(shape, layout, stage, chunk, 0, rank) for rank in range(experts)]
    pairs = zip(zip(*by_tp, strict=True), zip(*by_expert, strict=True), strict=True)
    return [of_expert if of_expert[0].expert else of_tp for of_tp, of_expert in pairs]


def _entries(shape: ModelShape) -> dict[str, TensorEntry]:
    shapes = hf_shapes(shape, FAMILIES[shape.architecture])
    return {name: TensorEntry(name, size, torch.float32) for name, size in shapes.items()}


def _plan(shape: ModelShape, world: int, layout: ParallelConfig, shard_bytes: int) -> tuple[Topology, SavePlan]:
    topology = topology_of(layout, world)
    shards = {
        (stage, chunk): _shards(shape, layout, stage, chunk)
        for stage in range(layout.pp)
        for chunk in range(layout.vpp)
    }
    plan = plan_save(topology, layout.vpp, lambda stage, chunk: shards[stage, chunk], _entries(shape), shard_bytes)
    return topology, plan


def _held(
    shape: ModelShape, layout: ParallelConfig, topology: Topology, rank: int, chunk: int
) -> dict[str, LocalParam]:
    """What a rank holds of a chunk, by the table of its own coordinates."""
    at, expert = topology.coords(rank), topology.expert_coords(rank)
    number = expert.ep * layout.expert_tp + expert.etp
    return {param.name: param for param in chunk_params(shape, layout, at.pp, chunk, at.tp, number)}


@pytest.mark.parametrize(("shape", "world", "sizes"), CASES.values(), ids=CASES)
def test_writers_put_every_tensor_together_once_from_what_ranks_hold(
    shape: ModelShape, world: int, sizes: dict[str, int]
):
    layout = ParallelConfig(**cast("dict[str, Any]", sizes))
    topology, plan = _plan(shape, world, layout, 30_000)
    wanted = {
        name: torch.arange(float(torch.Size(entry.shape).numel())).view(entry.shape) + number
        for number, (name, entry) in enumerate(_entries(shape).items())
    }
    written: dict[str, torch.Tensor] = {}
    for piece in plan.pieces:
        assert piece.writer in piece.holders or shape is STACKS
        whole = {entry: torch.full(entry.shape, torch.nan) for entry in piece.entries}
        for rank, shard in piece.holders.items():
            held = _held(shape, layout, topology, rank, piece.chunk)[shard.name]
            own = held.experts()[piece.number]
            assert own.blocks == shard.blocks, "the rank holds another shard than the plan says"
            rows = []
            for block in own.blocks:
                of = wanted[block.hf_name][slice(*block.rows)]
                rows.append(of if block.cols is None else of[:, slice(*block.cols)])
            values = torch.cat(rows)
            padding = own.shape[-2] - len(values) if len(own.shape) == 2 else 0
            values = torch.cat([values, torch.zeros(padding, *values.shape[1:])]).view(own.shape)
            lay(shard, values, {entry.name: tensor for entry, tensor in whole.items()})
        for entry, tensor in whole.items():
            assert entry.name not in written
            written[entry.name] = tensor
    assert written.keys() == wanted.keys() and all(torch.equal(written[name], wanted[name]) for name in wanted)
    # Each rank's files hold its pieces, in their order, and no file is larger than it may be.
    for rank, files in plan.files.items():
        entries = {e.name: e.shape for one in plan.pieces if one.writer == rank for e in one.entries}
        assert {e.name: e.shape for of_file in files.values() for e in of_file} == stacked_shapes(entries)
        assert all(sum(e.num_bytes for e in of_file) <= 30_000 or len(of_file) == 1 for of_file in files.values())


def test_bytes_are_dealt_evenly_to_as_many_ranks_as_there_are_files():
    layout = ParallelConfig(tp=2)
    _, plan = _plan(DENSE, 8, layout, 1 << 30)
    assert list(plan.all_files) == ["model.safetensors"] and list(plan.files) == [0]
    _, plan = _plan(DENSE, 8, layout, 20_000)
    bytes_of = [sum(e.num_bytes for of_file in files.values() for e in of_file) for files in plan.files.values()]
    assert len(bytes_of) == 8 and max(bytes_of) < 2 * min(bytes_of)
    # Experts are written where they are, however few files that would need.
    _, plan = _plan(EXPERTS, 4, ParallelConfig(ep=4), 1 << 30)
    assert sorted(plan.files) == [0, 1, 2, 3]
