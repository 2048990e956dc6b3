"""Contract N3 for every policy loss and aggregation: one batch, cut and spread in several ways, has one loss and one
gradient. Context parallelism cuts sequences themselves, which a loss over whole sequences must not notice.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl.algos.losses import LOSSES
from megatron_rl.algos.reduce import loss_weights
from megatron_rl.config.sections.actor import ActorConfig
from megatron_rl.types import TrainBatch
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import random_batch, save_tiny
from tests.helpers.training import build, forward_logprobs, make_actor, my_micro_batches, train_step

LENGTHS = (5, 22, 9, 14, 7, 7)
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# Losses with each aggregation, and with what enters the objective besides.
CASES = [(loss, mode) for loss in LOSSES for mode in MODES]
CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1-rank-2-a-micro-batch": (1, {"ppo_micro_batch_size_per_gpu": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"cp": 2}),
}


def _batch(mode: str) -> TrainBatch:
    """Off-policy: old log-probabilities so near the model's that some ratios are clipped and some are not."""
    batch = random_batch(0, LENGTHS, 128)
    generator = torch.Generator().manual_seed(1)

    def column(scale: float) -> torch.Tensor:
        return scale * torch.randn(batch.num_tokens, generator=generator) * batch.loss_mask

    segments = batch.segments
    return batch.with_(
        advantages=torch.randn(len(LENGTHS), generator=generator)[segments] * batch.loss_mask,
        # Whole sequences are off as well as single tokens, for losses that clip either.
        old_logprobs=column(0.3) + 0.3 * torch.randn(len(LENGTHS), generator=generator)[segments] * batch.loss_mask,
        ref_logprobs=column(0.5),
        rollout_weights=1.0 + column(0.1),
        loss_weights=loss_weights(mode, batch.loss_mask, segments, len(LENGTHS), norm_length=30),
    )


def _all_losses(rank: int, world: int, folder: str, layout: dict[str, Any]) -> list[dict[str, Any]]:
    from megatron_rl.mcore import convert
    from megatron_rl.workers.objectives import actor_loss

    # Plain optimizer: its all-reduce leaves the whole gradient on each rank. Learning rate and clipping change nothing.
    actor = make_actor(grad_clip=0.0, use_distributed_optimizer=False, **layout)
    trainable = build(folder, actor, world)
    for group in trainable.optimizer.param_groups:
        group["max_lr"] = group["min_lr"] = 0.0
    base = my_micro_batches(_batch(MODES[0]), actor, rank, world)
    found = forward_logprobs(trainable.model, base, 1.0)
    results = []
    for loss, mode in CASES:
        options = ActorConfig(
            loss=LOSSES[loss](),
            entropy_coeff=0.01,
            use_kl_loss=True,
            kl_loss_type="k3+",
            kl_loss_importance=True,
            **layout,
        )
        micros = my_micro_batches(_batch(mode), actor, rank, world)
        # The columns hold distances from the model's own log-probabilities, so that ratios are near 1.
        micros = [
            micro.with_(
                **{
                    name: micro.columns[name] + columns["logprobs"] * micro.loss_mask
                    for name in ("old_logprobs", "ref_logprobs")
                }
            )
            for micro, columns in zip(micros, found, strict=True)
        ]
        report, _ = train_step(trainable, micros, actor_loss(options), 1.0)
        grads = [p.clone() for _, p in convert.export_hf(trainable.model, of=lambda p: p.main_grad)]  # type: ignore[attr-defined]
        grad = torch.cat([g.flatten().float() for g in grads])
        results.append({"loss": report.loss, "metrics": report.metrics, "grad": grad})
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", layers=1)


@pytest.fixture(scope="module")
def whole(folder: str) -> list[dict[str, Any]]:
    """One rank, one micro-batch."""
    return run_ranks(1, _all_losses, folder, {})[0]


@pytest.mark.parametrize("cut", CUTS)
def test_n3_every_loss_and_aggregation_has_one_gradient(folder: str, whole: list[dict[str, Any]], cut: str) -> None:
    """N3: 5 losses x 4 aggregations with entropy, KL and rollout weights; loss, metrics and gradient to 2e-6."""
    world, layout = CUTS[cut]
    for of_rank in run_ranks(world, _all_losses, folder, layout):
        for case, result, wanted in zip(CASES, of_rank, whole, strict=True):
            assert result["loss"] == pytest.approx(wanted["loss"], rel=2e-6, abs=1e-7), case
            difference = (result["grad"] - wanted["grad"]).norm() / wanted["grad"].norm()
            assert difference < 2e-6, (case, float(difference))
            assert result["metrics"].keys() == wanted["metrics"].keys()
            for name, metric in wanted["metrics"].items():
                assert result["metrics"][name].mean == pytest.approx(metric.mean, rel=1e-5, abs=1e-6), (case, name)


def test_the_cases_differ(whole: list[dict[str, Any]]) -> None:
    """A cut cannot pass because all cases are alike: clipping happens, and each case has a gradient of its own."""
    metrics = {loss: of["metrics"] for (loss, _), of in zip(CASES, whole, strict=True)}
    clipped = {loss: of["clip_frac"].mean for loss, of in metrics.items() if "clip_frac" in of}
    assert all(0.0 < share < 1.0 for share in clipped.values()), clipped
    norms = [float(of["grad"].norm()) for of in whole]
    assert len({round(norm, 6) for norm in norms}) == len(norms)
