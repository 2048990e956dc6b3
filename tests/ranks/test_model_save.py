"""Each rank writes its part of a saved model: together the bytes of one rank's export, in files of a size."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_rl.config.load import load_config
from megatron_rl.errors import CheckpointError
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.lora import Adapters
from megatron_rl.weights.stacks import stacked
from tests.helpers.data import add_tokenizer
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import save_tiny
from tests.helpers.training import build, make_actor

SHARD_BYTES = 40_000
TP2 = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp2-pp2": ("qwen2", 4, {**TP2, "pp": 2}),
    "lora-tp2": ("qwen2", 2, {"tp": 2}),
    "ep2": ("deepseek_v3", 2, {"ep": 2}),
    "stacks-ep2": ("gpt_oss", 2, {"ep": 2}),
}
MORE_LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one": ("qwen2", 1, {}),
    "tp2": ("qwen2", 2, {"tp": 2}),
    "tp4-untied": ("llama", 4, {"tp": 4}),
    "pp2": ("qwen2", 2, {"pp": 2}),
    "pp2-vpp2": ("qwen3", 2, {"pp": 2, "vpp": 2}),
    "cp2-dp2": ("llama", 4, {"cp": 2}),
    "lora-tp2-pp2": ("llama", 4, {**TP2, "pp": 2}),
    "experts-ep2-tp2": ("qwen3_moe", 4, {**TP2, "ep": 2}),
    "experts-ep2-etp2": ("qwen3_moe", 4, {**TP2, "ep": 2, "etp": 2}),
    "experts-ep2-pp2": ("qwen3_moe", 4, {"ep": 2, "pp": 2}),
    "latent-tp2-pp2": ("deepseek_v3", 4, {**TP2, "pp": 2}),
    "lora-latent-ep2": ("moonlight", 2, {"ep": 2}),
}


def _model(folder: str, layout: dict[str, Any], world: int, lora: bool) -> Any:
    """The trained model; with adapters that add something, the same on every layout."""
    from megatron_rl.mcore import convert
    from megatron_rl.weights.safetensors import RandomSource
    from megatron_rl.workers.model import TrainedModel

    targets = frozenset({"q_proj", "down_proj"})
    adapters = Adapters(rank=4, alpha=8.0, dropout=0.0, targets=targets) if lora else None
    trainable = build(folder, make_actor(**layout), world, "bfloat16", adapters=adapters)
    if lora:
        convert.load_hf(trainable.model, lambda: RandomSource(3, 0.1), "adapters")
    return TrainedModel(trainable)


def _export(rank: int, world: int, folder: str, lora: bool) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in stacked(_model(folder, {}, world, lora).export())}


def _save(rank: int, world: int, folder: str, layout: dict[str, Any], out: str, lora: bool) -> dict[str, Any]:
    from megatron_rl.workers.model_save import ModelFiles
    from megatron_rl.workers.records import RolePlan

    model = _model(folder, layout, world, lora)
    pieces = model.save_plan("language_model", SHARD_BYTES)
    own = sum(tensor.nbytes for _, tensor in model.saved_tensors(pieces, 60.0))
    settings = ["model.dtype=bfloat16", f"trainer.save_shard_gb={SHARD_BYTES / 1e9}", "algorithm.name=sft"]
    settings += ["data.max_prompt_length=16", "data.max_response_length=16"]
    cfg = load_config([], [f"model.path={folder}", f"data.train_files={folder}/config.json", *settings])
    plan, files = RolePlan(read_model_shape(folder), make_actor(**layout), folder), ModelFiles(rank, cfg)

    def save(name: str, background: bool) -> str:
        files.begin(model, Path(out) / name, plan, "language_model", background)
        assert not (Path(out) / name / "config.json").exists() or name == "model", "it has its name when it is whole"
        # What is trained on changes nothing of the copy.
        for chunk in model.model.bare_chunks:
            for param in chunk.parameters():
                param.data.mul_(2.0)
        try:
            files.finish()
        except CheckpointError as error:
            return str(error)
        return ""

    faults = [save("model", background=True), save("twice", background=False)]
    if rank == max(pieces.files):
        # This rank's disk is full.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    faults.append(save("model", background=True))
    return {
        "own": own,
        "bytes": {of: sum(e.num_bytes for file in by.values() for e in file) for of, by in pieces.files.items()},
        "files": sorted(pieces.all_files),
        "faults": faults,
    }


def _check(tmp_path: Path, layout: str) -> None:
    family, world, axes = (LAYOUTS | MORE_LAYOUTS)[layout]
    lora, tied = layout.startswith("lora"), family == "qwen2"
    sizes = {"intermediate_size": 96, "num_key_value_heads": 4} if family in ("qwen2", "qwen3", "llama") else {}
    folder = save_tiny(tmp_path / "hf", family, tied=tied, layers=4, vocab=131, hidden_size=64, **sizes)
    add_tokenizer(folder)
    (out := tmp_path / "out").mkdir()
    ranks = run_ranks(world, _save, folder, axes, str(out), lora)
    wanted = run_ranks(1, _export, folder, lora)[0]

    model = out / "model"
    index = json.loads((model / "model.safetensors.index.json").read_text())
    stored = {file.name: load_file(file) for file in model.glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in stored.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for file in stored.values() for t in file.values())
    assert sorted(stored) == ranks[0]["files"] and len(index["weight_map"]) == sum(map(len, stored.values()))
    tensors = {name: tensor for file in stored.values() for name, tensor in file.items()}
    assert tensors.keys() == wanted.keys()
    assert all(t.dtype == wanted[name].dtype and torch.equal(t, wanted[name]) for name, t in tensors.items())
    assert all(len(file) == 1 or sum(t.nbytes for t in file.values()) <= SHARD_BYTES for file in stored.values())
    twice = {name: tensor for file in (out / "twice").glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert twice.keys() == wanted.keys() and (
        lora or all(torch.equal(t, 2 * wanted[name]) for name, t in twice.items())
    )
    opened: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto", output_loading_info=True)
    assert not opened[1]["missing_keys"] and not opened[1]["unexpected_keys"] and not opened[1]["mismatched_keys"]

    # No rank has more of the model than its share, nor another one than the plan says.
    total = sum(tensor.nbytes for tensor in tensors.values())
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert [rank["own"] for rank in ranks] == [rank["bytes"].get(number, 0) for number, rank in enumerate(ranks)]
    assert max(rank["own"] for rank in ranks) <= total / world * 1.2 + largest
    # The rank whose disk is full is named everywhere, the save before stays, and nothing else is left.
    *well, full = (set(faults) for faults in zip(*(rank["faults"] for rank in ranks), strict=True))
    assert well == [{""}, {""}]
    (text,) = full
    assert f"{model}: could not be written (rank {world - 1}: " in text and "File too large" in text
    assert {path.name for path in out.iterdir()} == {"model", "twice"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_w1_the_files_of_all_ranks_are_one_ranks_export(tmp_path: Path, layout: str) -> None:
    _check(tmp_path, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_w1_the_files_of_all_ranks_are_one_ranks_export_on_every_layout(tmp_path: Path, layout: str) -> None:
    _check(tmp_path, layout)
