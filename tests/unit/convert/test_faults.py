"""Conversions that cannot be, that are broken off, and what is left of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.convert import hf_folder, torch_dist
from megatron_rl.convert.source import from_hf
from megatron_rl.weights.safetensors import INDEX_NAME
from tests.helpers.tiny import save_tiny
from tests.unit.convert.test_round_trip import differing, written
from tools.convert import hf_to_mcore, mcore_to_hf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    save_tiny(folder / "hf", "llama", tied=False, layers=2, **sizes)
    assert hf_to_mcore.main([str(folder / "hf"), str(folder / "mcore"), "--shard-gb", "0.00002"]) == 0
    assert mcore_to_hf.main([str(folder / "mcore"), str(folder / "sharded"), "--shard-gb", "0.00003"]) == 0
    return folder


def _refused(argv: list[str], capsys: pytest.CaptureFixture[str], tool=hf_to_mcore) -> str:
    out = Path(argv[1])
    assert tool.main(argv) == 2
    assert not out.exists() and not out.with_name(out.name + ".converting").exists()
    return capsys.readouterr().err


def test_broken_folders_are_refused_with_every_fault(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(model / "hf", tmp_path / "odd")
    tensors = load_file(tmp_path / "odd/model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.surplus.weight"] = torch.zeros(2)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
    save_file(tensors, tmp_path / "odd/model.safetensors")
    text = _refused([str(tmp_path / "odd"), str(tmp_path / "out")], capsys)
    assert "missing model.norm.weight" in text and "surplus model.surplus.weight" in text
    assert "lm_head.weight is [127, 32], config.json says [128, 32]" in text

    config = json.loads((model / "hf/config.json").read_text())
    (tmp_path / "odd/config.json").write_text(json.dumps(config | {"architectures": ["FooForCausalLM"]}))
    assert "FooForCausalLM" in _refused([str(tmp_path / "odd"), str(tmp_path / "out")], capsys)

    shutil.copytree(model / "sharded", tmp_path / "sharded")
    files = sorted((tmp_path / "sharded").glob("*.safetensors"))
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[: len(whole) // 2])
    assert files[0].name in _refused([str(tmp_path / "sharded"), str(tmp_path / "out")], capsys)
    files[0].unlink()
    assert files[0].name in _refused([str(tmp_path / "sharded"), str(tmp_path / "out")], capsys)
    (tmp_path / "sharded" / INDEX_NAME).write_text("{}")
    assert INDEX_NAME in _refused([str(tmp_path / "sharded"), str(tmp_path / "out")], capsys)


def test_broken_checkpoints_are_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = str(tmp_path / "out")
    shutil.copytree(model / "mcore", tmp_path / "mcore")
    config = json.loads((model / "hf/config.json").read_text())
    (tmp_path / "mcore/huggingface/config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    text = _refused([str(tmp_path / "mcore"), out], capsys, mcore_to_hf)
    assert "decoder.layers.mlp.linear_fc1.weight is [2, 96, 32], config.json says [2, 128, 32]" in text
    shutil.rmtree(tmp_path / "mcore/huggingface")
    assert "--hf DIR" in _refused([str(tmp_path / "mcore"), out], capsys, mcore_to_hf)
    (tmp_path / "mcore/release/.metadata").write_bytes(b"no pickle")
    text = _refused([str(tmp_path / "mcore"), out, "--hf", str(model / "hf")], capsys, mcore_to_hf)
    assert ".metadata" in text
    (tmp_path / "empty").mkdir()
    assert "is no checkpoint of" in _refused([str(tmp_path / "empty"), out], capsys, mcore_to_hf)
    assert "--tp: 3" in _refused([str(model / "hf"), out, "--tp", "3"], capsys)


def test_numbers_that_are_not_finite_are_named_and_nothing_is_left(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(model / "hf", tmp_path / "odd")
    tensors = load_file(tmp_path / "odd/model.safetensors")
    tensors["model.norm.weight"][3] = 1e30
    tensors["model.layers.1.self_attn.k_proj.weight"][1, 1] = float("nan")
    save_file(tensors, tmp_path / "odd/model.safetensors")
    text = _refused([str(tmp_path / "odd"), str(tmp_path / "out"), "--dtype", "float16"], capsys)
    assert "2 tensors" in text and "model.norm.weight" in text and "model.layers.1.self_attn.k_proj.weight" in text


@pytest.mark.parametrize("tool", [hf_to_mcore, mcore_to_hf])
def test_a_conversion_that_is_broken_off_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool
):
    source, out = str(model / ("hf" if tool is hf_to_mcore else "mcore")), tmp_path / "out"
    argv = [source, str(out), "--shard-gb", "0.00002"]
    staging = out.with_name("out.converting")
    where, count = (hf_folder, 0) if tool is mcore_to_hf else (torch_dist, 0)
    whole = where.is_finite

    def fails(piece: torch.Tensor) -> bool:
        nonlocal count
        count += 1
        if count == (16 if tool is hf_to_mcore else 9):
            raise KeyboardInterrupt
        return whole(piece)

    monkeypatch.setattr(where, "is_finite", fails)
    with pytest.raises(KeyboardInterrupt):
        tool.main(argv)
    assert not out.exists() and staging.is_dir()
    # Another job does not go on with it.
    assert tool.main([*argv, "--dtype", "bfloat16"]) == 2
    assert "differs from this one in dtype" in capsys.readouterr().err
    # A file whose bytes have changed since is written again.
    done = [json.loads(line)["name"] for line in (staging / ".journal").read_text().splitlines()[1:]]
    assert len(done) >= 2
    times = {name: (staging / name).stat().st_mtime_ns for name in done}
    (staging / done[0]).write_bytes(b"broken")
    count = 100
    assert tool.main([*argv, "--verify"]) == 0 and not staging.exists()
    assert all((out / name).stat().st_mtime_ns == times[name] for name in done[1:])
    if tool is hf_to_mcore:
        assert mcore_to_hf.main([str(out), str(tmp_path / "back")]) == 0
    back = tmp_path / "back" if tool is hf_to_mcore else out
    assert not differing(written(back), written(model / "hf"))
    assert tool.main(argv) == 2 and "is there already" in capsys.readouterr().err


def test_verify_sees_a_bit(model: Path, tmp_path: Path):
    """What was written is compared, not what was to be written."""
    conversion = from_hf(model / "hf")
    plan = hf_folder.plan_hf(conversion, None, 1 << 30)
    other = {name: tensor.clone() for name, tensor in written(model / "hf").items()}
    other["model.norm.weight"].view(torch.int32)[5] ^= 1
    entries = [entry for of_file in plan.files.values() for entry in of_file]
    read = lambda block: other[block.hf_name][slice(*block.rows)]  # noqa: E731
    with pytest.raises(hf_folder.CheckpointError, match=r"1 tensors of the output.*model\.norm\.weight"):
        hf_folder.compare(conversion, entries, read, lambda size: None)


def test_dry_run_prints_the_table_and_writes_nothing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert hf_to_mcore.main([str(model / "hf"), str(tmp_path / "out"), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "decoder.layers.self_attention.linear_qkv.weight" in text and "2 x 64 x 32" in text
    assert mcore_to_hf.main([str(model / "mcore"), str(tmp_path / "out"), "--dry-run"]) == 0
    assert "model.embed_tokens.weight" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def _block_scaled(model: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The model with its projections in 8 bits, scales for blocks of 16 x 8; what these stand for."""
    shutil.copytree(model / "hf", folder)
    config = json.loads((folder / "config.json").read_text())
    kind = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 8]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": kind}))
    tensors = load_file(folder / "model.safetensors")
    wanted: dict[str, torch.Tensor] = {}
    for name, tensor in list(tensors.items()):
        wanted[name] = tensor.bfloat16()
        if not name.endswith("proj.weight"):
            tensors[name] = tensor.bfloat16()
            continue
        # Rows that no block divides: the last block is a part of one.
        scales = torch.rand(-(-tensor.shape[0] // 16), -(-tensor.shape[1] // 8)) + 0.1
        stored = tensor.to(torch.float8_e4m3fn)
        tensors[name], tensors[name + "_scale_inv"] = stored, scales
        whole = torch.empty_like(tensor)
        for row in range(tensor.shape[0]):
            for col in range(tensor.shape[1]):
                whole[row, col] = stored[row, col].float() * scales[row // 16, col // 8]
        wanted[name] = whole.bfloat16()
    save_file(tensors, folder / "model.safetensors")
    return wanted


def test_weights_with_block_scales_are_read_as_their_product(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    wanted = _block_scaled(model, tmp_path / "fp8")
    assert hf_to_mcore.main([str(tmp_path / "fp8"), str(tmp_path / "mcore"), "--tp", "2", "--verify"]) == 0
    assert "become bfloat16" in capsys.readouterr().out
    assert mcore_to_hf.main([str(tmp_path / "mcore"), str(tmp_path / "back")]) == 0
    assert not differing(written(tmp_path / "back"), wanted)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    # Without an intermediate form.
    assert mcore_to_hf.main([str(tmp_path / "fp8"), str(tmp_path / "direct")]) == 0
    assert not differing(written(tmp_path / "direct"), wanted)

    tensors = load_file(tmp_path / "fp8/model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name + "_scale_inv"] = tensors[name + "_scale_inv"][:-1].clone()
    tensors["odd_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / "fp8/model.safetensors")
    text = _refused([str(tmp_path / "fp8"), str(tmp_path / "out")], capsys)
    assert f"{name}_scale_inv is F32 [2, 4]" in text and "odd_scale_inv is a scale of no tensor" in text
    del tensors["odd_scale_inv"], tensors[name + "_scale_inv"]
    save_file(tensors, tmp_path / "fp8/model.safetensors")
    assert f"{name} is stored as F8_E4M3" in _refused([str(tmp_path / "fp8"), str(tmp_path / "out")], capsys)
