"""Contracts N1, N2 and W1 for models with experts, over expert-parallel ranks and mixes with the other axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.algos.token_losses import nll_loss
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.rollout.hf_engine import checkpoint_views
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import hf_logprobs, load_hf_model, random_batch, save_tiny
from tests.helpers.training import build, forward_logprobs, make_actor, my_micro_batches, train_step

TEMPERATURE = 0.7
LENGTHS = (5, 40, 9, 12, 33, 7, 7, 21)
ENTROPY = 0.3
STEPS = 8
Layout = tuple[int, dict[str, Any]]

PARITY_LAYOUTS: dict[str, Layout] = {
    "one-rank": (1, {}),
    "ep2": (2, {"ep": 2}),
    "ep2-tp2": (2, {"ep": 2, "tp": 2, "sequence_parallel": True}),
    "ep2-tp2-etp2": (4, {"ep": 2, "etp": 2, "tp": 2, "sequence_parallel": True}),
    "tp2": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2-ep2": (4, {"pp": 2, "ep": 2}),
    "cp2": (2, {"cp": 2}),
}
LATENT = ("deepseek_v2", "deepseek_v3", "moonlight")
FIRST_PAIRS = (("deepseek_v2", "one-rank"), ("deepseek_v3", "ep2-tp2"), ("gpt_oss", "tp2"), ("glm4_moe", "ep2-tp2"))
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "overlap_bucket_size": 20000}
# Tied and untied, packed and padded.
TRAINING_LAYOUTS: dict[str, Layout] = {
    "ep2": (2, {"ep": 2}),
    "ep2-tp2": (2, {"ep": 2, "tp": 2, "sequence_parallel": True}),
}
# Untied and packed.
MORE_TRAINING_LAYOUTS: dict[str, Layout] = {
    "tp2": (2, {"tp": 2, "sequence_parallel": True}),
    "ep2-plain-optimizer": (2, {"ep": 2, "use_distributed_optimizer": False}),
    "ep2-etp2-of-dp": (4, {"ep": 2, "etp": 2}),
    "ep2-micro-batches-of-one": (2, {"ep": 2, "ppo_micro_batch_size_per_gpu": 1}),
    # Experts without a token in the last micro-batch: their gradients are waited for all the same.
    "ep2-overlap-of-one": (4, {"ep": 2, "ppo_micro_batch_size_per_gpu": 1, **OVERLAP}),
    "ep4": (4, {"ep": 4}),
    "ep2-tp2-dp2": (4, {"ep": 2, "tp": 2, "sequence_parallel": True}),
    "ep2-tp2-etp2": (4, {"ep": 2, "etp": 2, "tp": 2, "sequence_parallel": True}),
    "ep2-cp2": (2, {"ep": 2, "cp": 2}),
    "pp2-ep2": (4, {"pp": 2, "ep": 2, "ppo_micro_batch_size_per_gpu": 2}),
    "ep2-recompute": (2, {"ep": 2, "recompute": "full"}),
}


def _loss(logprobs: torch.Tensor, entropy: torch.Tensor, columns: Any) -> Any:
    return -logprobs - ENTROPY * entropy, {"nll": -logprobs}


def _coords_on_rank(rank: int, world: int, layout: dict[str, Any]) -> tuple[list[int], list[int]]:
    from megatron.core import parallel_state

    from megatron_rl.parallel import groups
    from megatron_rl.parallel.topology import topology_of

    actor = make_actor(**layout)
    topology = topology_of(actor, world)
    groups.init_model_parallel(topology, actor.vpp)
    at = topology.expert_coords(rank)
    peers = torch.distributed.get_process_group_ranks(groups.expert_group())
    by_place = sorted(peers, key=lambda peer: (topology.expert_coords(peer).ep, topology.expert_coords(peer).etp))
    assert (at.edp, at.pp) == (
        parallel_state.get_expert_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    assert topology.edp == parallel_state.get_expert_data_parallel_world_size()
    assert all(topology.expert_coords(peer).edp == at.edp for peer in peers)
    return peers, by_place


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "cp": 2, "ep": 4, "sequence_parallel": True},
        {"tp": 2, "pp": 2, "ep": 2, "etp": 2, "sequence_parallel": True},
        {"tp": 4, "ep": 2, "etp": 2, "sequence_parallel": True},
    ],
)
def test_experts_are_where_megatron_places_them(layout: dict[str, Any]) -> None:
    """init_model_parallel compares coordinates; here the order of the group that an export gathers over."""
    for peers, by_place in run_ranks(8, _coords_on_rank, layout):
        assert peers == by_place


Sequences = dict[tuple[int, ...], torch.Tensor]


def _by_sequence(batches: list[Any], columns: list[torch.Tensor]) -> Sequences:
    """Tokens of each sequence -> its values."""
    found: Sequences = {}
    for batch, column in zip(batches, columns, strict=True):
        sizes = list(batch.seq_lens)
        for tokens, values in zip(batch.tokens.split(sizes), column.split(sizes), strict=True):
            found[tuple(tokens.tolist())] = values
    return found


def _gradient(param: torch.nn.Parameter) -> torch.Tensor:
    """A parameter's gradient as the optimizer has it; the values of one that no update changes."""
    return param.main_grad.clone() if param.requires_grad else param.detach()  # type: ignore[attr-defined]


def _parity_on_rank(rank: int, world: int, folder: str, layout: dict[str, Any]) -> dict[str, Any]:
    from megatron_rl.mcore import convert

    # Clipping would scale the gradients that are compared; a sharded optimizer would leave each rank a part of them.
    actor = make_actor(grad_clip=0.0, use_distributed_optimizer=False, **layout)
    trainable = build(folder, actor, world)
    exported = {name: tensor.clone() for name, tensor in convert.export_hf(trainable.model)}
    micros = my_micro_batches(random_batch(0, LENGTHS, 128), actor, rank, world)
    columns = [found["logprobs"] for found in forward_logprobs(trainable.model, micros, TEMPERATURE)]
    report, _ = train_step(trainable, micros, _loss, TEMPERATURE)
    grads = dict(convert.export_hf(trainable.model, of=_gradient))
    # Only the last pipeline stage has log-probabilities and a loss.
    logprobs = _by_sequence(micros, columns) if columns else None
    return {"exported": exported, "logprobs": logprobs, "report": report, "grads": grads}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("qwen3_moe", layout) for layout in PARITY_LAYOUTS),
        *((family, layout) for family in ("qwen3_moe_plain", "mixtral") for layout in ("one-rank", "ep2", "ep2-tp2")),
        *FIRST_PAIRS,
        *(
            pytest.param(family, layout, marks=pytest.mark.slow)
            for family in (*LATENT, "gpt_oss", "glm4_moe", "qwen2_moe")
            for layout in PARITY_LAYOUTS
            if (family, layout) not in FIRST_PAIRS
        ),
    ],
)
def test_n1_experts_equal_transformers(tmp_path: Path, family: str, layout: str) -> None:
    """N1, W1: log-probabilities within 1e-5, gradients within 1e-4 relative (router's too), export bit-exact."""
    folder = save_tiny(tmp_path / "model", family, tied=False)
    world, axes = PARITY_LAYOUTS[layout]
    model = load_hf_model(folder)
    batch = random_batch(0, LENGTHS, 128)
    logprobs, entropy = hf_logprobs(model, batch, TEMPERATURE)
    loss = ((-logprobs - ENTROPY * entropy) * batch.columns["loss_weights"]).sum()
    loss.backward()
    shape = read_model_shape(folder)
    table = (shape, FAMILIES[shape.architecture])
    state = checkpoint_views(model.state_dict(), *table)
    wanted = checkpoint_views({name: p.grad for name, p in model.named_parameters()}, *table)
    norm = torch.stack([grad.norm() for grad in wanted.values()]).norm()
    expected = _by_sequence([batch], [logprobs.detach()])
    seen: set[tuple[int, ...]] = set()
    for result in run_ranks(world, _parity_on_rank, folder, axes):
        if result["logprobs"] is not None:
            seen.update(result["logprobs"])
            for sequence, values in result["logprobs"].items():
                assert (values - expected[sequence]).abs().max() < 1e-5
            assert result["report"].loss == pytest.approx(loss.item(), rel=1e-5)
        assert result["report"].grad_norm == pytest.approx(norm.item(), rel=1e-4)
        assert result["exported"].keys() == state.keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in result["exported"].items())
        for name, grad in wanted.items():
            # An expert that no token goes to has a gradient of zeros.
            error = (result["grads"][name] - grad).norm()
            assert error <= 1e-4 * grad.norm(), (name, float(error))
    assert seen == expected.keys()


Variant = tuple[str, bool]
"""The model's name (tied or untied), and whether its batches are packed (padded otherwise)."""
EVERY: tuple[Variant, ...] = (("untied", True), ("tied", True), ("untied", False), ("tied", False))
Trajectory = list[tuple[float, float]]


def _train_on_rank(
    rank: int, world: int, folders: dict[str, str], layout: dict[str, Any], variants: Sequence[Variant]
) -> list[Trajectory]:
    return [_trajectory(rank, world, folders[name], {**layout, "packing": packed}) for name, packed in variants]


def _trajectory(rank: int, world: int, folder: str, layout: dict[str, Any]) -> Trajectory:

    actor = make_actor(**layout)
    trainable = build(folder, actor, world)
    found = []
    for number in range(STEPS):
        micros = my_micro_batches(random_batch(number % 2, LENGTHS, 128), actor, rank, world)
        report, _ = train_step(trainable, micros, nll_loss, 1.0)
        found.append((report.loss, report.grad_norm))
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("moe")
    small = {"hidden_size": 64, "head_dim": 32, "layers": 2}
    return {name: save_tiny(root / name, "qwen3_moe", tied=name == "tied", **small) for name in ("tied", "untied")}


@pytest.fixture(scope="module")
def one_rank(folders: dict[str, str]) -> dict[str, Trajectory]:
    trajectories = run_ranks(1, _train_on_rank, folders, {}, EVERY[:2])[0]
    for trajectory in trajectories:
        assert trajectory[-1][0] < trajectory[0][0], "the run that everything is compared with must learn"
    return {name: trajectory for (name, _), trajectory in zip(EVERY, trajectories, strict=False)}


@pytest.mark.parametrize("layout", [*TRAINING_LAYOUTS, *MORE_TRAINING_LAYOUTS])
def test_n2_experts_train_like_one_rank(folders: dict[str, str], one_rank: dict[str, Trajectory], layout: str) -> None:
    """N2: loss within 2e-5 and grad norm within 1e-4 relative over 8 optimizer steps, on every rank."""
    world, axes = (TRAINING_LAYOUTS | MORE_TRAINING_LAYOUTS)[layout]
    variants = EVERY if layout in TRAINING_LAYOUTS else EVERY[:1]
    last_stage = range(world - world // axes.get("pp", 1), world)
    for rank, trajectories in enumerate(run_ranks(world, _train_on_rank, folders, axes, variants, timeout=180)):
        for (name, _), trajectory in zip(variants, trajectories, strict=True):
            for (loss, norm), (wanted_loss, wanted_norm) in zip(trajectory, one_rank[name], strict=True):
                if rank in last_stage:
                    assert loss == pytest.approx(wanted_loss, rel=2e-5, abs=2e-5)
                assert norm == pytest.approx(wanted_norm, rel=1e-4)


ODD_LAYOUTS: dict[str, Layout] = {
    "tp2": (2, {"tp": 2, "sequence_parallel": True}),
    "dp2": (2, {}),
    "ep2": (2, {"ep": 2}),
    "pp2": (2, {"pp": 2, "ppo_micro_batch_size_per_gpu": 2}),
    "ep2-tp2": (2, {"ep": 2, "tp": 2, "sequence_parallel": True}),
    "cp2-recompute": (2, {"cp": 2, "recompute": "selective"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "glm4_moe", "qwen2_moe"])
def test_n2_odd_families_train_like_one_rank(tmp_path: Path, family: str) -> None:
    """N2, of experts with shared ones, a router with a bias, and a first layer without experts; of sinks, and of biases
    of experts, which ranks that share experts hold copies of.
    """
    folder = {"untied": save_tiny(tmp_path / "model", family, tied=False, hidden_size=64, layers=2)}
    (wanted,) = run_ranks(1, _train_on_rank, folder, {}, EVERY[:1])[0]
    assert wanted[-1][0] < wanted[0][0]
    for name, (world, axes) in ODD_LAYOUTS.items():
        (trained,) = run_ranks(world, _train_on_rank, folder, axes, EVERY[:1], timeout=180)[-1]
        for (loss, norm), (wanted_loss, wanted_norm) in zip(trained, wanted, strict=True):
            assert loss == pytest.approx(wanted_loss, rel=2e-5, abs=2e-5), name
            assert norm == pytest.approx(wanted_norm, rel=1e-4), name
