"""Rank arithmetic: every rank has one place on each axis, in layers with experts too."""

from __future__ import annotations

import pytest

from megatron_rl.config.sections.actor import ActorConfig
from megatron_rl.parallel.topology import ExpertCoords, Topology, topology_of

LAYOUTS = [
    Topology(8, tp=2, pp=2),
    Topology(16, tp=2, cp=2, pp=2, ep=4, etp=1),
    Topology(16, tp=4, ep=2, etp=2),
    Topology(12, pp=3, ep=4, etp=1),
]


@pytest.mark.parametrize("topology", LAYOUTS)
def test_places_are_taken_once(topology: Topology) -> None:
    ranks = range(topology.world)
    assert [topology.rank(topology.coords(rank)) for rank in ranks] == list(ranks)
    places = {topology.expert_coords(rank) for rank in ranks}
    assert len(places) == topology.world
    assert all(topology.expert_coords(rank).pp == topology.coords(rank).pp for rank in ranks)
    assert topology.edp * topology.ep * topology.expert_tp * topology.pp == topology.world


def test_experts_take_the_ranks_of_tp_cp_and_dp() -> None:
    topology = Topology(8, tp=2, pp=2, ep=4, etp=1)
    assert topology.expert_coords(5) == ExpertCoords(etp=0, ep=1, edp=0, pp=1)


def test_ranks_that_the_axes_do_not_fill_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of tp 3"):
        Topology(8, tp=3)
    with pytest.raises(ValueError, match="no multiple of etp 1 x ep 3 x pp 2"):
        Topology(8, pp=2, ep=3, etp=1)


def test_single_experts_are_split_only_on_request_where_experts_are_dealt_out() -> None:
    assert topology_of(ActorConfig(tp=2), 4).expert_tp == 2
    assert topology_of(ActorConfig(tp=2, ep=2), 4).expert_tp == 1
    assert topology_of(ActorConfig(tp=2, ep=2, etp=2), 4).expert_tp == 2
