"""gpt-oss through the tools: experts in 4 bits become the bfloat16 that transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_rl.models.config_json import inspect_model
from tests.helpers.tiny import save_tiny
from tests.unit.convert.test_round_trip import differing, written
from tools.convert import hf_to_mcore, mcore_to_hf


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder as gpt-oss is published, and the tensors that transformers makes of it."""
    folder = Path(save_tiny(tmp_path / "packed", "gpt_oss", tied=False, layers=2))
    tensors, wanted = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in written(folder).items():
        if not name.endswith((".gate_up_proj", ".down_proj")):
            tensors[name] = wanted[name] = tensor.bfloat16()
            continue
        experts, width, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, (experts, rows, width // 32), dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        wanted[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
        assert wanted[name].shape == tensor.shape
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, wanted


def test_packed_experts_become_what_transformers_makes_of_them(
    packed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, wanted = packed
    shape, faults = inspect_model(str(folder))
    assert shape is None and "docs/convert.md says which are converted" in faults[0].reason
    out = tmp_path / "out"
    assert mcore_to_hf.main([str(folder), str(out), "--shard-gb", "0.0005", "--verify"]) == 0
    assert "4 bits (MXFP4) become bfloat16; quantization_config is removed" in capsys.readouterr().out
    assert not differing(written(out), wanted)
    shape, faults = inspect_model(str(out))
    assert shape is not None and not faults
    # From there no further conversion is needed, and Megatron's files would have another form.
    assert hf_to_mcore.main([str(out), str(tmp_path / "mcore")]) == 2
    assert "rows of the gate before those of the up projection" in capsys.readouterr().err


def test_scales_that_do_not_fit_are_named(
    packed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = packed
    tensors = written(folder)
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_scales"] = tensors[f"{name}_scales"][:, :-1].clone()
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, folder / "model.safetensors")
    assert mcore_to_hf.main([str(folder), str(tmp_path / "out")]) == 2
    assert f"{name}_blocks is U8 [8, 128, 2, 16], its scales U8 [8, 127, 2]" in capsys.readouterr().err
    tensors[f"{name}_scales"] = torch.full((8, 128, 2), 120, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    assert mcore_to_hf.main([str(folder), str(tmp_path / "out")]) == 2
    assert "surplus model.layers.0.mlp.experts.down_proj_blocks" in capsys.readouterr().err
