"""Contracts N1 and W1: Megatron's model equals transformers', and weights survive the round trip bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import hf_logprobs, load_hf_model, random_batch, save_tiny
from tests.helpers.training import build, forward_logprobs, make_actor, my_micro_batches, train_step

TEMPERATURE = 0.7
LENGTHS = (5, 40, 9, 12, 33)
ENTROPY = 0.3
LAYOUTS = {
    "tp1": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2, "num_layers_in_last_pipeline_stage": 1}),
    "pp4-tp2": (8, {"pp": 4, "tp": 2}),
    # The distributed optimizer would leave each rank with the sums of its own part of the gradients.
    "cp2": (2, {"cp": 2, "use_distributed_optimizer": False}),
}


def _loss(logprobs: torch.Tensor, entropy: torch.Tensor, columns: Any) -> Any:
    return -logprobs - ENTROPY * entropy, {"nll": -logprobs}


def _parity_on_rank(rank: int, world: int, folder: str, layout: dict[str, Any], vocab: int) -> dict[str, Any]:
    from megatron_rl.mcore import convert

    actor = make_actor(grad_clip=0.0, **layout)  # clipping would scale the gradients that are compared
    trainable = build(folder, actor, world)
    exported = {name: tensor.clone() for name, tensor in convert.export_hf(trainable.model)}
    batch = random_batch(0, LENGTHS, vocab)
    micros = my_micro_batches(batch, actor, rank, world)
    found = forward_logprobs(trainable.model, micros, TEMPERATURE)
    # The gradients stay in main_grad after the update.
    report, _ = train_step(trainable, micros, _loss, TEMPERATURE)
    grads = dict(convert.export_hf(trainable.model, of=lambda p: p.main_grad.clone()))  # type: ignore[attr-defined]
    return {"exported": exported, "found": found[0] if found else None, "report": report, "grads": grads}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "tied", "vocab"),
    [
        ("qwen2", True, 128),
        ("qwen2", False, 128),
        ("mistral", False, 127),
        ("qwen3", True, 128),
        ("gemma3_text", True, 127),
        pytest.param("gemma3_text", False, 128, marks=pytest.mark.slow),
        pytest.param("gemma", True, 127, marks=pytest.mark.slow),
        pytest.param("llama", True, 128, marks=pytest.mark.slow),
        pytest.param("llama", False, 127, marks=pytest.mark.slow),
    ],
)
def test_n1_mcore_equals_transformers(tmp_path: Path, family: str, tied: bool, vocab: int, layout: str) -> None:
    """N1, W1: log-probabilities within 1e-5, gradients within 1e-4 relative, export bit-exact; odd vocabularies too."""
    folder = save_tiny(tmp_path / "model", family, tied=tied, vocab=vocab)
    world, axes = LAYOUTS[layout]
    model = load_hf_model(folder)
    batch = random_batch(0, LENGTHS, vocab)
    logprobs, entropy = hf_logprobs(model, batch, TEMPERATURE)
    loss = ((-logprobs - ENTROPY * entropy) * batch.columns["loss_weights"]).sum()
    loss.backward()
    state = model.state_dict()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([grad.norm() for grad in wanted.values()]).norm()
    results = run_ranks(world, _parity_on_rank, folder, axes, vocab)
    assert results[-1]["found"] is not None, "the last stage has the log-probabilities"
    for result in results:
        if result["found"] is not None:
            assert (result["found"]["logprobs"] - logprobs).abs().max() < 1e-5
            assert (result["found"]["entropy"] - entropy).abs().max() < 1e-5
            assert result["report"].loss == pytest.approx(loss.item(), rel=1e-5)
        assert result["exported"].keys() == wanted.keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in result["exported"].items())
        assert result["report"].grad_norm == pytest.approx(norm.item(), rel=1e-4)
        for name, grad in wanted.items():
            error = (result["grads"][name] - grad).norm() / grad.norm()
            assert error < 1e-4, (name, float(error))


def _ids_on_rank(rank: int, world: int, folder: str, odd: int) -> list[str]:
    from megatron_rl.errors import DataError

    trainable = build(folder, make_actor(tp=world), world)
    batch = random_batch(0, (5, 9), 127)
    batch.tokens[7] = odd
    said: list[str] = []
    for call in (
        lambda: forward_logprobs(trainable.model, [batch], 1.0),
        lambda: train_step(trainable, [batch], _loss, 1.0),
    ):
        try:
            call()
        except DataError as error:
            said.append(str(error))
    return said


# With tp 2 the vocabulary has a row of padding, 127.
@pytest.mark.parametrize("odd", [127, 128, -1])
def test_a_step_on_an_id_that_is_no_token_of_the_model_is_refused(tmp_path: Path, odd: int) -> None:
    folder = save_tiny(tmp_path / "model", "llama", tied=False, vocab=127, layers=1)
    for said in run_ranks(2, _ids_on_rank, folder, odd):
        assert len(said) == 2, said
        assert all(f"no tokens of the model: {odd}; config.json says vocab_size 127" in text for text in said)
