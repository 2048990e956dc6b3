"""Replayed choices of experts, what routers report, and their balancing loss: against transformers, on any layout."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.rollout.hf_engine import checkpoint_views
from megatron_rl.types import TrainBatch
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import hf_logprobs, load_hf_model, random_batch, save_tiny
from tests.helpers.training import build, forward_logprobs, make_actor, my_micro_batches

TEMPERATURE, COEF = 0.7, 0.5
LENGTHS = (5, 40, 9, 12, 33, 7, 7, 21)
LAYERS, EXPERTS, TOPK = 2, 8, 2
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one-rank": (1, {}),
    "ep2-tp2": (2, {"ep": 2, "tp": 2, "sequence_parallel": True, "ppo_micro_batch_size_per_gpu": 3}),
}
MORE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "micro-batches-of-one": (1, {"ppo_micro_batch_size_per_gpu": 1}),
    "dp2-ep2": (2, {"ep": 2, "ppo_micro_batch_size_per_gpu": 1}),
    "cp2": (2, {"cp": 2}),
    "pp2": (2, {"pp": 2, "ppo_micro_batch_size_per_gpu": 2}),
    "recompute": (1, {"recompute": "full", "ppo_micro_batch_size_per_gpu": 2}),
    "padded": (2, {"packing": False, "ep": 2}),
}


def _batch() -> TrainBatch:
    """Sequences whose tokens are to go to experts drawn at random, but for the last token of each."""
    batch = random_batch(0, LENGTHS, 128)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.rand(batch.num_tokens, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :TOPK] + 1
    drawn[[end - 1 for end in batch.starts[1:]]] = 0
    return replace(batch, routed=drawn.to(torch.uint8))


def _on_rank(rank: int, world: int, folder: str, layout: dict[str, Any]) -> dict[str, Any]:
    from megatron_rl.algos.token_losses import nll_loss
    from megatron_rl.mcore import convert
    from megatron_rl.mcore.heads import columns_reader
    from megatron_rl.mcore.objectives import token_objective
    from megatron_rl.mcore.step import forward, optimizer_step

    actor = make_actor(grad_clip=0.0, use_distributed_optimizer=False, **layout)
    trainable = build(folder, actor, world)
    model = trainable.model
    micros = my_micro_batches(_batch(), actor, rank, world)
    free = [replace(micro, routed=None) for micro in micros]
    plain = [columns["logprobs"] for columns in forward_logprobs(model, free, TEMPERATURE)]
    routed = forward(model, free, columns_reader(model, ("logprobs",), TEMPERATURE), records=True).routed
    again = [replace(micro, routed=table) for micro, table in zip(free, routed, strict=True)]
    repeated = [columns["logprobs"] for columns in forward_logprobs(model, again, TEMPERATURE)]
    drawn = [columns["logprobs"] for columns in forward_logprobs(model, micros, TEMPERATURE)]
    report, _ = optimizer_step(trainable, micros, token_objective(model, nll_loss, TEMPERATURE), COEF)
    grads = dict(convert.export_hf(model, of=lambda p: p.main_grad.clone()))  # type: ignore[attr-defined]
    tokens = [tuple(one.tolist()) for micro in micros for one in micro.tokens.split(list(micro.seq_lens))]
    split = [list(micro.seq_lens) for micro in micros]

    def of_sequences(columns: list[torch.Tensor]) -> dict[tuple[int, ...], torch.Tensor]:
        pieces = [one for column, lens in zip(columns, split, strict=True) for one in column.split(lens)]
        return dict(zip(tokens, pieces, strict=True))

    same = all(torch.equal(one, other) for one, other in zip(plain, repeated, strict=True))
    return {
        "same": same,
        "routed": of_sequences(routed),
        "drawn": of_sequences(drawn) if drawn else {},
        "grads": grads,
        "metrics": {name: metric.mean for name, metric in report.metrics.items()},
    }


class _Reference:
    """The transformers model, whose routers are told their experts, one sequence at a time."""

    def __init__(self, folder: str, batch: TrainBatch) -> None:
        self.model = load_hf_model(folder)
        self.probs: dict[int, list[torch.Tensor]] = {}
        self.counts = torch.zeros(LAYERS, EXPERTS)
        self.own: dict[int, list[torch.Tensor]] = {}
        assert batch.routed is not None
        tables = list(batch.routed.split(list(batch.seq_lens)))
        with ExitStack() as stack:
            for layer, block in enumerate(self.model.model.layers):
                parts = dict(block.mlp.named_children())
                router = parts["router"] if "router" in parts else parts["gate"]
                hook = router.register_forward_hook(self._tell(layer, tables))
                stack.callback(hook.remove)
            self.logprobs, _ = hf_logprobs(self.model, batch, TEMPERATURE)

    def _tell(self, layer: int, tables: list[torch.Tensor]) -> Any:
        calls = iter(tables)

        def hook(module: Any, inputs: Any, output: Any) -> Any:
            logits, _, own = output
            given = next(calls)[:, layer].long() - 1
            chosen = torch.where(given >= 0, given, own)
            self.own.setdefault(layer, []).append(own)
            self.probs.setdefault(layer, []).append(logits.softmax(-1))
            self.counts[layer] += torch.bincount(chosen.reshape(-1), minlength=EXPERTS)
            return logits, logits.gather(1, chosen).softmax(-1), chosen

        return hook

    def balance(self) -> torch.Tensor:
        """[layers] Switch's loss over all tokens, with coefficient 1."""
        tokens = sum(LENGTHS)
        shares = self.counts / (TOPK * tokens)
        return torch.stack([EXPERTS * (shares[n] * torch.cat(self.probs[n]).sum(0) / tokens).sum() for n in self.probs])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    fields = {"hidden_size": 64, "head_dim": 32, "layers": LAYERS, "num_experts": EXPERTS}
    return save_tiny(tmp_path_factory.mktemp("routing") / "model", "qwen3_moe", tied=False, **fields)


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_LAYOUTS)])
def test_n1_n3_replay_and_balancing_loss_equal_transformers(folder: str, layout: str) -> None:
    """N1, N2, N3: log-probabilities with drawn experts, gradients of loss and balancing loss, what is recorded and what
    is reported, whatever the split into ranks and micro-batches.
    """
    _check_layout(folder, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_n1_n3_replay_of_experts_with_biases(tmp_path: Path, layout: str) -> None:
    fields = {"hidden_size": 64, "head_dim": 32, "layers": LAYERS, "num_local_experts": EXPERTS}
    folder = save_tiny(tmp_path / "model", "gpt_oss", tied=False, num_experts_per_tok=TOPK, **fields)
    _check_layout(folder, layout)


def _check_layout(folder: str, layout: str) -> None:
    batch = _batch()
    reference = _Reference(folder, batch)
    balance = reference.balance()
    loss = (-reference.logprobs * batch.columns["loss_weights"]).sum() + COEF * balance.sum()
    loss.backward()
    shape = read_model_shape(folder)
    named = {name: p.grad for name, p in reference.model.named_parameters()}
    wanted = checkpoint_views(named, shape, FAMILIES[shape.architecture])
    free = _Reference(folder, replace(batch, routed=torch.zeros_like(batch.routed)))  # type: ignore[arg-type]
    world, axes = LAYOUTS[layout] if layout in LAYOUTS else MORE_LAYOUTS[layout]
    sequences = batch.tokens.split(list(batch.seq_lens))
    expected = dict(zip((tuple(one.tolist()) for one in sequences), reference.logprobs.split(LENGTHS), strict=True))
    own = {
        tuple(one.tolist()): torch.stack([free.own[layer][s] for layer in range(LAYERS)], 1)
        for s, one in enumerate(sequences)
    }
    metrics: dict[str, float] = {}
    for result in run_ranks(world, _on_rank, folder, axes):
        assert result["same"], "repeating its own choices changes no bit"
        for tokens, logprobs in result["drawn"].items():
            assert (logprobs - expected[tokens].detach()).abs().max() < 1e-5
        for tokens, routed in result["routed"].items():
            # Ranks of a pipeline stage know their own layers.
            mine = routed.long() - 1
            assert torch.equal(mine.sort(-1).values[mine >= 0], own[tokens].sort(-1).values[mine >= 0])
            assert bool((mine >= 0).any())
        for name, grad in wanted.items():
            assert (result["grads"][name] - grad).norm() / grad.norm() < 1e-4, name
        metrics |= result["metrics"]
    tables = batch.routed.split(LENGTHS)  # type: ignore[union-attr]
    changed = [
        (reference.own[layer][s][:-1, :, None] != tables[s][:-1, layer, None].long() - 1).all(1).sum()
        for layer in range(LAYERS)
        for s in range(len(LENGTHS))
    ]
    known = LAYERS * TOPK * (sum(LENGTHS) - len(LENGTHS))
    probs = torch.stack([torch.cat(reference.probs[layer]) for layer in range(LAYERS)]).detach()
    load = reference.counts.amax(1) / reference.counts.mean(1)
    assert metrics["router_changed"] == pytest.approx(int(sum(changed)) / known)
    assert metrics["router_unknown"] == pytest.approx(len(LENGTHS) / sum(LENGTHS))
    assert metrics["router_balance"] == pytest.approx(float(balance.mean()), rel=1e-5)
    assert metrics["router_entropy"] == pytest.approx(float(-(probs * probs.log()).sum(-1).mean()), rel=1e-5)
    assert metrics["router_load_max"] == pytest.approx(float(load.max()))
    assert metrics["router_load_mean"] == pytest.approx(float(load.mean()))
