"""Contract N1: whatever config.json passes, the trainer computes what transformers computes from the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.odd_configs import ABSENT, PASSING
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import hf_logprobs, load_hf_model, random_batch, save_odd
from tests.helpers.training import folder_logprobs

VOCAB = 128
# Entries that another family's value would show: the rotary base, the epsilon.
NUMBERS = ("rope_parameters", "rope_theta", "rms_norm_eps", "norm_topk_prob")


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen2_moe",
        "qwen3_moe",
        "mixtral",
        "deepseek_v2",
        "deepseek_v3",
        "gemma",
        "gemma3_text",
        "gpt_oss",
        "glm4_moe",
    ],
)
def test_n1_the_trainer_computes_what_transformers_does(tmp_path: Path, family: str) -> None:
    """Every passing variant of the table; and those that name numbers are another model than the plain one, so that a
    trainer that ignores them (a base or an epsilon of its own) is seen.
    """
    variants = [{}, *(changes for of, changes in PASSING if of == family)]
    folders = [save_odd(tmp_path / str(number), family, changes) for number, changes in enumerate(variants)]
    batch = random_batch(0, (40, 9, 17), VOCAB)
    (trained,) = run_ranks(1, folder_logprobs, folders, batch)
    wanted = []
    for folder in folders:
        with torch.no_grad():
            wanted.append(hf_logprobs(load_hf_model(folder), batch, 1.0)[0])
    for changes, ours, theirs in zip(variants, trained, wanted, strict=True):
        assert (ours - theirs).abs().max() < 2e-5, changes
    # The plain model has base 10000 and epsilon 1e-6 (Mixtral: 1e6 and 1e-5).
    moved = [
        float((theirs - wanted[0]).abs().max())
        for changes, theirs in zip(variants, wanted, strict=True)
        if any(changes.get(name, ABSENT) not in (None, ABSENT) for name in NUMBERS)
    ]
    assert family == "mixtral" or (moved and max(moved) > 1e-3), moved
