"""Contracts N1 to N3 of reward models: scores, losses and gradients are transformers' own, on every layout; a saved one
opens in transformers as a sequence classifier.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.algos.preference.scores import BradleyTerry, Regression, ScoreLoss
from tests.helpers.data import quickstart
from tests.helpers.run_ranks import run_ranks
from tests.helpers.spmd import start_here
from tests.ranks.test_critic import save_classifier
from tests.ranks.test_preferences import rows_of

LOSSES: dict[str, ScoreLoss] = {"bradley_terry": BradleyTerry(center_coef=0.03), "regression": Regression()}
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "cp2": (2, ["actor.cp=2"]),
    "pp2-tp2": (
        4,
        ["actor.pp=2", "actor.tp=2", "actor.sequence_parallel=true", "actor.ppo_micro_batch_size_per_gpu=4"],
    ),
    "one": (1, []),
    "dp2": (2, ["actor.ppo_micro_batch_size_per_gpu=3"]),
}
LONG = ("one", "dp2")


def judged_rows(loss: ScoreLoss) -> list[Any]:
    """Pairs with margins, or single answers with a number."""
    rows = [replace(row, target=0.25 * row.index) for row in rows_of("pairs")]
    return rows if loss.rows == "pairs" else [replace(row, answers=row.answers[:1]) for row in rows]


def main_grad(parameter: Any) -> Any:
    """Megatron's gradient buffer of a parameter."""
    return parameter.main_grad


def train_on_rank(rank: int, world: int, folder: str, overrides: list[str], out: str) -> dict[str, Any]:
    """Scores, loss and gradient of each loss, from one step that changes nothing."""
    from megatron_rl.config.load import load_config
    from megatron_rl.learning.passes import Models
    from megatron_rl.mcore import convert
    from megatron_rl.trainers import placement
    from megatron_rl.trainers.reward_model import assemble, update
    from megatron_rl.workers.train import TrainWorker

    own = ["algorithm.name=reward_model", f"model.path={folder}", f"model.tokenizer_path={quickstart() / 'model'}"]
    own += [
        "model.dtype=float32",
        f"data.train_files={quickstart() / 'train.parquet'}",
        "data.train_batch_size=8",
        "cluster.device=cpu",
    ]
    own += ["actor.optim.lr=1e-30", "actor.optim.grad_clip=0", "actor.use_distributed_optimizer=false"]
    own += ["data.max_prompt_length=16", "data.max_response_length=16", f"cluster.n_gpus_per_node={world}"]
    own += ["data.chat_template=plain"]
    cfg = load_config([], [*own, *overrides])
    workers = start_here(rank, world)
    models = Models(cfg)
    models.start(placement.start_workers(cfg, optimizer_steps=100, with_engine=False).train)
    found: dict[str, Any] = {}
    for name, loss in LOSSES.items():
        models.cfg = replace(cfg, algorithm=replace(cfg.algorithm, reward_loss=loss))
        judged = update(models, assemble(models, judged_rows(loss)))
        model = workers[0].trained["actor"].model
        grads = {one: grad.clone() for one, grad in convert.export_hf(model, of=main_grad)}
        found[name] = {"scores": judged.answers.values, "loss": judged.updates[0].report.loss, "grads": grads}
    if out:
        models.group.rank0(TrainWorker.save, "actor", out, "reward_model")
    return found


def by_transformers(folder: str, loss: ScoreLoss) -> dict[str, Any]:
    """The same of transformers' model, one sequence at a time."""
    from torch.nn.functional import logsigmoid, mse_loss
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rows = judged_rows(loss)
    scores = torch.stack([model(torch.tensor([a.token_ids])).logits[0, 0] for row in rows for a in row.answers])
    targets = torch.tensor([row.target for row in rows])
    if loss.rows == "pairs":
        chosen, rejected = scores[0::2], scores[1::2]
        total = (-logsigmoid(chosen - rejected - targets) + 0.03 * (chosen + rejected) ** 2).mean()
    else:
        total = mse_loss(scores, targets)
    total.backward()
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"scores": scores.detach(), "loss": float(total.detach()), "grads": grads}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With the end token of the quick start's tokenizer, which pads with another one."""
    made = Path(save_classifier(tmp_path_factory.mktemp("rm"), "sequence", "qwen2", tied=False))
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    return str(made)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in LAYOUTS]
)
def test_n1_n2_scores_losses_and_gradients_equal_transformers(tmp_path: Path, folder: str, layout: str) -> None:
    """N1, N2, N3: to 1e-5 and 1e-4 in float32, Bradley-Terry with margins and centering, and regression."""
    from transformers import AutoModelForSequenceClassification

    world, overrides = LAYOUTS[layout]
    out = str(tmp_path / "saved")
    found = run_ranks(world, train_on_rank, folder, overrides, out, timeout=120.0)[-1]
    for name, loss in LOSSES.items():
        wanted = by_transformers(folder, loss)
        assert torch.allclose(found[name]["scores"].float(), wanted["scores"], atol=1e-5), name
        assert found[name]["loss"] == pytest.approx(wanted["loss"], rel=1e-5), name
        assert found[name]["grads"].keys() == wanted["grads"].keys(), "no bias, no output matrix"
        for one, grad in wanted["grads"].items():
            difference = (found[name]["grads"][one] - grad).norm() / (grad.norm() + 1e-6)
            assert difference < 1e-4, (name, one)
    # R4 of the export: the same classifier, for one sequence and for a padded batch.
    saved = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
    rows = judged_rows(LOSSES["bradley_terry"])
    first, second = (torch.tensor(answer.token_ids) for answer in rows[0].answers)
    pad = saved.config.pad_token_id
    ids = torch.full((2, max(len(first), len(second))), pad)
    ids[0, : len(first)], ids[1, : len(second)] = first, second
    with torch.no_grad():
        scores = saved(ids, attention_mask=(ids != pad).long()).logits[:, 0]
    assert torch.allclose(scores, found["bradley_terry"]["scores"][:2].float(), atol=1e-5)
