"""Operations of training: against counts by hand, and against torch's counter on transformers' models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.flops import peak_of, training_flops
from tests.helpers.tiny import load_hf_model, save_tiny


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v2"])
def test_flops_are_those_that_torch_counts(tmp_path: Path, family: str) -> None:
    """Of products and attention, whose masked half torch computes too; all tokens but the last have a loss."""
    folder, length = save_tiny(tmp_path / "model", family, tied=False, layers=2), 40
    shape = read_model_shape(folder)
    model = load_hf_model(folder)
    # Its grouped products are not among what torch counts.
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        hidden = model.model(torch.arange(2, 2 + length)[None]).last_hidden_state
        model.lm_head(hidden[:, :-1]).sum().backward()
    found = training_flops(shape, FAMILIES[shape.architecture], [length], length - 1)
    whole = training_flops(replace(shape, windows=()), FAMILIES[shape.architecture], [length], length - 1)
    assert found == whole
    masked = _attention(shape, length * length) - _attention(shape, length * (length + 1) // 2)
    # transformers weighs experts and computes cosines by small products.
    assert found + masked == pytest.approx(counter.get_total_flops(), rel=0.02)


def _attention(shape, pairs: int) -> float:
    latent = shape.latent
    widths = 2 * shape.head_dim if latent is None else latent.nope_dim + latent.rope_dim + latent.value_dim
    return 3 * 2.0 * shape.num_layers * shape.num_heads * widths * pairs


def test_windows_frozen_weights_and_sequences_count(tmp_path: Path) -> None:
    shape = read_model_shape(save_tiny(tmp_path / "model", "qwen2", tied=False, layers=1))
    family = FAMILIES[shape.architecture]
    whole = training_flops(shape, family, [10, 7], 0)
    assert whole == training_flops(shape, family, [10], 0) + training_flops(shape, family, [7], 0)
    windowed = training_flops(replace(shape, windows=(3,)), family, [10], 0)
    # Of 55 pairs, 1 + 2 + 8 x 3 are seen.
    assert training_flops(shape, family, [10], 0) - windowed == _attention(shape, 55 - 27)
    products = training_flops(shape, family, [10], 4) - _attention(shape, 55)
    assert training_flops(shape, family, [10], 4, frozen=True) == pytest.approx(
        products * 2 / 3 + _attention(shape, 55)
    )


def test_devices_are_known_by_a_part_of_their_name() -> None:
    assert peak_of("NVIDIA H200") == peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("a device of next year") is None
