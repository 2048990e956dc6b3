"""Contract W1: Hugging Face -> Megatron -> Hugging Face, bit for bit, where chunks and precision make it hard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.weights.safetensors import SafetensorsSource
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import save_tiny
from tests.helpers.training import build, make_actor


def _export(rank: int, world: int, folder: str, layout: dict[str, Any], dtype: str) -> dict[str, torch.Tensor]:
    from megatron_rl.mcore import convert

    policy = build(folder, make_actor(**layout), world, dtype).model
    return {name: tensor.clone() for name, tensor in convert.export_hf(policy)}


SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
WIDE: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp4": (4, {"tp": 4}),
    "pp2": (2, {"pp": 2}),
    "pp3-uneven": (3, {"pp": 3, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1}),
    "pp4-vpp2": (4, {"pp": 4, "vpp": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", WIDE)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text"])
def test_w1_dense_families_come_back_from_every_layout(tmp_path: Path, family: str, layout: str) -> None:
    """Tied and untied, in both precisions; a vocabulary that TP pads."""
    world, axes = WIDE[layout]
    for tied in (False, True):
        sizes = SMALL | {"num_key_value_heads": 4}
        folder = save_tiny(tmp_path / str(tied), family, tied=tied, vocab=125, layers=8, **sizes)
        stored = load_file(f"{folder}/model.safetensors")
        for dtype in ("float32", "bfloat16"):
            wanted = {name: tensor.to(getattr(torch, dtype)) for name, tensor in stored.items()}
            for exported in run_ranks(world, _export, folder, axes, dtype):
                assert exported.keys() == wanted.keys()
                assert all(torch.equal(tensor, wanted[name]) for name, tensor in exported.items())


def _in_precision(stored: dict[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """The tensors of a folder as a model of a precision exports them: a router's bias stays float32."""
    return {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(getattr(torch, dtype))
        for name, tensor in stored.items()
    }


SPLIT = {"tp": 2, "sequence_parallel": True}
WIDE_EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (world, axes | {"sequence_parallel": "tp" in axes}) for name, (world, axes) in WIDE.items()},
    "ep2": (2, {"ep": 2}),
    "ep2-tp2": (2, {"ep": 2, **SPLIT}),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", WIDE_EXPERTS)
@pytest.mark.parametrize(
    "family", [*("qwen2_moe", "qwen3_moe", "gpt_oss"), *("deepseek_v2", "deepseek_v3", "moonlight", "glm4_moe")]
)
def test_w1_families_with_experts_come_back_from_every_layout(tmp_path: Path, family: str, layout: str) -> None:
    world, axes = WIDE_EXPERTS[layout]
    folder = save_tiny(tmp_path / "model", family, tied=False, vocab=125, layers=8, num_key_value_heads=4)
    stored = dict(SafetensorsSource(folder).tensors())
    for dtype in ("float32", "bfloat16"):
        wanted = _in_precision(stored, dtype)
        for exported in run_ranks(world, _export, folder, axes, dtype):
            assert exported.keys() == wanted.keys()
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in exported.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "layers", "world", "layout"),
    [
        ("qwen2", 8, 4, {"pp": 4, "vpp": 2}),
        ("llama", 7, 3, {"pp": 3, "num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 1}),
        ("qwen3_moe", 3, 4, {"pp": 2, "ep": 2, "num_layers_in_last_pipeline_stage": 1}),
        ("deepseek_v3", 3, 4, {"pp": 2, **SPLIT, "num_layers_in_last_pipeline_stage": 1}),
    ],
    ids=["pp4-vpp2", "pp3-uneven", "pp2-ep2-uneven", "latent-tp2-pp2-uneven"],
)
def test_w1_every_tensor_comes_back_on_every_rank(
    tmp_path: Path, family: str, layers: int, world: int, layout: dict[str, Any], dtype: str
) -> None:
    sizes = SMALL if family in ("qwen2", "llama") else {}
    folder = save_tiny(tmp_path / "model", family, tied=False, layers=layers, **sizes)
    wanted = _in_precision(load_file(f"{folder}/model.safetensors"), dtype)
    for exported in run_ranks(world, _export, folder, layout, dtype):
        assert exported.keys() == wanted.keys()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in exported.items())
