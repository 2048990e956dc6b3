"""Which rank takes which slot of which engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.cluster.dispatch import Replicas
from megatron_rl.errors import ReshardError
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.parallel.topology import Topology, topology_of
from megatron_rl.reshard.shards import EngineLayout
from megatron_rl.rollout.engine import EnginePart
from megatron_rl.trainers.placement import engine_order, rank_grid
from megatron_rl.workers.colocated import check_part, engine_layout, engine_settings
from tests.helpers.config import load, make_model


def test_engines_take_the_ranks_of_their_order() -> None:
    grid = rank_grid(Topology(world=4, tp=2), 2, (0, 2, 3, 1))
    assert grid.engines == Replicas((0, 1, 0, 1), (True, False, False, True))
    neighbours = Replicas((0, 0, 1, 1), (True, False, True, False))
    assert rank_grid(Topology(world=4), 2).engines == neighbours, "where no order is given"
    assert rank_grid(Topology(world=4), None).engines is None


def test_slots_go_to_the_ranks_that_hold_most_of_them(tmp_path: Path) -> None:
    """Actor tp 4 on engines of tp 2: ranks 0 and 1 hold the first halves, 2 and 3 the second. The settings of an
    engine's ranks are alike, seed included, and the engines' seeds differ.
    """
    options = ["actor.tp=4", "rollout.tp=2", "cluster.n_gpus_per_node=4"]
    model = make_model(tmp_path / "wide", num_key_value_heads=4)
    cfg = load(tmp_path, f"model.path={model}", *options)
    shape = read_model_shape(cfg.model.path)
    order = engine_order(cfg, shape, topology_of(cfg.actor, 4))
    assert order == (0, 2, 1, 3)
    layout = engine_layout(cfg, order)
    settings = [engine_settings(cfg, shape, "cpu", layout, rank) for rank in range(4)]
    assert [one.ranks for one in settings] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert settings[0] == settings[2] and settings[1] == settings[3] and settings[0].seed != settings[1].seed
    plain = load(tmp_path, "cluster.n_gpus_per_node=4")
    assert engine_order(plain, shape, topology_of(plain.actor, 4)) == (0, 1, 2, 3)


def test_an_engine_of_another_part_than_the_plans_is_refused() -> None:
    """The shapes of both parts are the same: only the engine's own word tells them apart."""
    dense, experts = EngineLayout(2, 1, (2, 0, 3, 1)), EngineLayout(2, 2, (0, 1))
    check_part(EnginePart(2, 1), dense, rank=1)
    check_part(EnginePart(2, 1, 2, 1), experts, rank=1)
    check_part(None, dense, rank=0)
    for part, layout, rank in ((EnginePart(2, 0), dense, 0), (EnginePart(2, 1), experts, 1), (EnginePart(), dense, 2)):
        with pytest.raises(ReshardError, match=rf"rank {rank}: the engine holds .* the plan was made for"):
            check_part(part, layout, rank)
