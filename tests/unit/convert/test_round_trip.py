"""Contract W1 through the tools: Hugging Face -> Megatron's files -> Hugging Face, without a process group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.convert.staging import RECORD
from tests.helpers.tiny import FAMILY_FIELDS, save_tiny
from tools.convert import hf_to_mcore, mcore_to_hf

LAYOUTS = {
    "tp1": "",
    "tp2": "--tp 2",
    "tp4": "--tp 4",
    "pp2": "--pp 2",
    "pp3-uneven": "--pp 3 --first-stage-layers 3 --last-stage-layers 1",
    "pp4-vpp2": "--pp 4 --vpp 2",
    "ep2": "--ep 2",
    "ep2-tp2": "--ep 2 --tp 2 --etp 2",
    "tp2-pp2": "--tp 2 --pp 2",
}
DEFAULT = {
    *(("qwen2", "tp2", "bfloat16"), ("llama", "pp3-uneven", "float32"), ("qwen3", "tp4", "bfloat16")),
    *(("qwen3_moe", "ep2-tp2", "bfloat16"), ("mixtral", "pp4-vpp2", "float32"), ("qwen3_moe_plain", "ep2", "float32")),
    *(("deepseek_v3", "ep2-tp2", "bfloat16"), ("deepseek_v2", "pp3-uneven", "float32")),
}
TOOLS_REFUSE = {"gpt_oss"}
"""Families whose parameters Megatron's own checkpoints have in another form: tests/unit/convert/test_mxfp4.py."""
WITH_EXPERTS = {family for family, (_, fields) in FAMILY_FIELDS.items() if "num_experts_per_tok" in fields}
CASES = [
    pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.slow, id="-".join(case))
    for case in ((f, layout, dtype) for f in FAMILY_FIELDS for layout in LAYOUTS for dtype in ("float32", "bfloat16"))
    if case[0] not in TOOLS_REFUSE and (case[0] in WITH_EXPERTS or "ep" not in LAYOUTS[case[1]])
]


def tiny(folder: Path, family: str, **fields: Any) -> str:
    """A model of 8 layers that TP 4 can split, its vocabulary odd."""
    sizes = {"num_key_value_heads": 4, "head_dim": 16, "hidden_size": 64}
    sizes |= {} if family in WITH_EXPERTS else {"intermediate_size": 96}
    settings: dict[str, Any] = {"tied": False, "layers": 8, "vocab": 131} | sizes | fields
    return save_tiny(folder, family, **settings)


def written(folder: Path | str) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    return {name: one for file in sorted(Path(folder).glob("*.safetensors")) for name, one in load_file(file).items()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names in one alone, and of tensors that are not the same bytes."""
    names = [name for name in {**one, **other} if name not in one or name not in other]
    return names + [
        name
        for name in one.keys() & other.keys()
        if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])
    ]


@pytest.mark.parametrize(("family", "layout", "dtype"), CASES)
def test_w1_every_layout_and_family_comes_back(tmp_path: Path, family: str, layout: str, dtype: str):
    source = tiny(tmp_path / "hf", family, tied=layout in ("tp2", "pp3-uneven", "tp1"))
    options = [*LAYOUTS[layout].split(), "--dtype", dtype, "--shard-gb", "0.0002", "--verify"]
    assert hf_to_mcore.main([source, str(tmp_path / "mcore"), *options]) == 0
    assert mcore_to_hf.main([str(tmp_path / "mcore"), str(tmp_path / "back"), "--shard-gb", "0.0003", "--verify"]) == 0
    wanted = {
        # A router's bias is float32 in every precision.
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(getattr(torch, dtype))
        for name, tensor in written(source).items()
    }
    assert not differing(written(tmp_path / "back"), wanted)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config == json.loads(Path(source, "config.json").read_text()) | {"dtype": dtype}
    assert json.loads((tmp_path / "back" / RECORD).read_text())["files"].keys() >= {"config.json"}
