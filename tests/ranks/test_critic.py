"""The critic: its values and gradients are transformers' own, its head survives the round trip, layouts train alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.models.config_json import read_critic_shape
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import random_batch, save_tiny
from tests.helpers.training import make_actor, my_micro_batches

LENGTHS = (5, 40, 9, 12, 33)
CLIP = 0.5
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2-tp2": (4, {"pp": 2, "tp": 2, "ppo_micro_batch_size_per_gpu": 3}),
    "cp2": (2, {"cp": 2, "use_distributed_optimizer": False}),
    "padded": (1, {"packing": False, "ppo_micro_batch_size_per_gpu": 2}),
}


def save_classifier(folder: Path, kind: str, family: str, tied: bool) -> str:
    """A tiny model of transformers with a score head; "causal": without one."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    causal = save_tiny(folder / "causal", family, tied=tied)
    if kind == "causal":
        return causal
    by_kind = {"token": AutoModelForTokenClassification, "sequence": AutoModelForSequenceClassification}
    torch.manual_seed(3)
    model = by_kind[kind].from_pretrained(causal, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.score.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder / kind)
    return str(folder / kind)


def critic_batch() -> Any:
    """Sequences with the columns that a value loss reads."""
    batch = random_batch(0, LENGTHS, 128)
    generator = torch.Generator().manual_seed(7)
    old, returns = (torch.randn(batch.num_tokens, generator=generator) * batch.loss_mask for _ in range(2))
    return batch.with_(old_values=old, returns=returns)


def _critic_on_rank(rank: int, world: int, folder: str, layout: dict[str, Any]) -> dict[str, Any]:
    from megatron_rl.mcore import cpu

    cpu.install()
    from megatron_rl.mcore import build, convert
    from megatron_rl.mcore.heads import columns_reader
    from megatron_rl.mcore.step import forward_columns, optimizer_step
    from megatron_rl.parallel import groups
    from megatron_rl.parallel.topology import topology_of
    from megatron_rl.weights.heads import ValueHeadSource
    from megatron_rl.weights.safetensors import SafetensorsSource
    from megatron_rl.workers.objectives import ValueObjective

    actor = make_actor(grad_clip=0.0, **layout)
    groups.init_model_parallel(topology_of(actor, world), actor.vpp)
    shape, head = read_critic_shape(folder)
    policy = build.build_model(shape, actor, "float32", torch.device("cpu"), lm_head=False, value_head=True)
    unused = convert.lm_head_shapes(shape) if head == "causal" else {}
    convert.load_hf(policy, lambda: ValueHeadSource(SafetensorsSource(folder), head, unused))
    trainable = build.make_trainable(policy, actor.optim, 100)
    exported = {name: tensor.clone() for name, tensor in convert.export_hf(trainable.model)}
    micros = my_micro_batches(critic_batch(), actor, rank, world)
    columns = forward_columns(trainable.model, micros, columns_reader(trainable.model, ["values"], 1.0))
    found = [of_micro["values"] for of_micro in columns]
    report, _ = optimizer_step(trainable, micros, ValueObjective(CLIP).on(trainable.model))
    grads = dict(convert.export_hf(trainable.model, of=lambda p: p.main_grad.clone()))  # type: ignore[attr-defined]
    return {"exported": exported, "found": found, "grads": grads, "loss": report.loss}


def _transformers(folder: str, kind: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], Any]:
    """Values [T], loss, gradients and model by transformers' transformer and a plain torch head."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    model_of: Any = AutoModelForSequenceClassification if kind == "sequence" else AutoModelForTokenClassification
    model = model_of.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", num_labels=1).eval()
    if kind == "causal":
        torch.nn.init.zeros_(model.score.weight)
        torch.nn.init.zeros_(model.score.bias)
    batch, values, start = critic_batch(), [], 0
    for length in batch.seq_lens:
        hidden = model.model(batch.tokens[None, start : start + length]).last_hidden_state[0]
        # The value of the state before token t comes from the token before it.
        values.append(torch.cat([hidden.new_zeros(1), model.score(hidden)[:-1, 0]]))
        start += length
    found = torch.cat(values) * batch.loss_mask
    old, returns = batch.columns["old_values"], batch.columns["returns"]
    near = found.clamp(old - CLIP, old + CLIP)
    losses = 0.5 * torch.maximum((found - returns) ** 2, (near - returns) ** 2)
    loss = (losses * batch.columns["loss_weights"]).sum()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found.detach(), loss.detach(), grads, model


@pytest.mark.parametrize(
    ("kind", "family", "tied", "layout"),
    [
        ("token", "qwen2", True, "one"),
        ("sequence", "llama", False, "tp2-sp"),
        ("causal", "llama", False, "one"),
        pytest.param("token", "qwen2", True, "pp2-tp2", marks=pytest.mark.slow),
        pytest.param("token", "qwen3", False, "cp2", marks=pytest.mark.slow),
        pytest.param("sequence", "llama", False, "padded", marks=pytest.mark.slow),
    ],
)
def test_n1_values_and_gradients_equal_a_torch_head_on_transformers(
    tmp_path: Path, kind: str, family: str, tied: bool, layout: str
) -> None:
    """N1 of the critic: values within 1e-5, gradients within 1e-4 relative, weights bit for bit."""
    folder = save_classifier(tmp_path, kind, family, tied)
    values, loss, wanted, model = _transformers(folder, kind)
    world, axes = LAYOUTS[layout]
    results = run_ranks(world, _critic_on_rank, folder, axes, timeout=180.0)
    assert results[-1]["found"], "the last stage has the values"
    state = model.state_dict()
    for result in results:
        for name, tensor in result["exported"].items():
            # A sequence classifier has no bias: the critic's starts at 0.
            assert torch.equal(tensor, state.get(name, torch.zeros(1))), name
        assert set(result["exported"]) == {*state, "score.bias"}
        for name, grad in wanted.items():
            error = (result["grads"][name] - grad).norm() / grad.norm().clamp(min=1e-12)
            assert error < 1e-4, (name, float(error))
    if world == 1 and layout == "one":
        (column,) = results[0]["found"]
        assert (column - values).abs().max() < 1e-5
    assert results[-1]["loss"] == pytest.approx(float(loss), rel=1e-5)
    found = torch.cat(results[-1]["found"])
    assert torch.allclose(found.sort().values, values.sort().values, atol=1e-5), "as micro-batches order them"
