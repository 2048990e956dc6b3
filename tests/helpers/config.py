"""A tiny model folder, a data file and a config that is right, for tests that then break one thing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import ConfigError, Fault
from megatron_rl.models.config_json import inspect_model
from megatron_rl.models.families import FAMILIES
from megatron_rl.models.rules import hf_shapes
from megatron_rl.models.sizes import KNOWN_SHAPES

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 320,
    "max_position_embeddings": 256,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 128,
}

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


def make_model(folder: Path, *, weights: bool = True, **changes: Any) -> str:
    """Write a model folder; `changes` replace fields of its config.json (None removes one)."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {key: value for key, value in {**QWEN2, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "tokenizer.json").write_text("{}")
    if weights:
        write_headers(folder)
    return str(folder)


def write_headers(folder: Path) -> None:
    """A model.safetensors of the tensors that config.json names; the numbers are a hole in the file."""
    shape, _ = inspect_model(str(folder))
    sizes = {} if shape is None else hf_shapes(shape, FAMILIES[shape.architecture])
    entries, at = dict[str, Any](), 0
    for name, size in sizes.items():
        entries[name] = {"dtype": "BF16", "shape": size, "data_offsets": [at, at + 2 * math.prod(size)]}
        at += 2 * math.prod(size)
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + at)


def make_published_model(folder: Path, name: str) -> str:
    """The config.json of a published model, with empty files in place of its tokenizer and its weights."""
    shape = KNOWN_SHAPES[name]
    fields = {
        "architectures": [shape.architecture],
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_size,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "max_position_embeddings": shape.max_position_embeddings,
    }
    experts = {
        "model_type": "qwen3_moe",
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "moe_intermediate_size": shape.ffn_size,
        "norm_topk_prob": shape.norm_topk_prob,
    }
    return make_model(folder, **fields, **(experts if shape.num_experts else {}))


def write(path: Path, text: str) -> str:
    """Write a file and return its path."""
    path.write_text(text)
    return str(path)


def base_settings(folder: Path) -> list[str]:
    """Overrides of a run that is right as it stands: 24 tokens at most, 64 prompts, 8 samples, one rank."""
    model = make_model(folder / "model")
    data = write(folder / "train.jsonl", "")
    return [
        f"model.path={model}",
        f"data.train_files={data}",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
    ]


def load(folder: Path, *overrides: str, paths: tuple[str, ...] = ()) -> RunConfig:
    """The right run with `overrides`."""
    return load_config(list(paths), [*base_settings(folder), *overrides])


def faults(folder: Path, *overrides: str, paths: tuple[str, ...] = ()) -> list[Fault]:
    """What is wrong with the run once `overrides` are laid over it."""
    with pytest.raises(ConfigError) as caught:
        load(folder, *overrides, paths=paths)
    return caught.value.faults


def only_fault(folder: Path, *overrides: str, paths: tuple[str, ...] = ()) -> Fault:
    """As faults, where there is one."""
    found = faults(folder, *overrides, paths=paths)
    assert len(found) == 1, [str(fault) for fault in found]
    return found[0]


def one_step(data: Path, runs: Path, *, engine: str) -> list[str]:
    """Overrides of a GRPO run of one step, inline, on the quick start's data and model (random weights)."""
    settings = {
        "model.path": data / "model",
        "model.init": "random",
        "model.dtype": "float32",
        "data.train_files": data / "train.parquet",
        "data.chat_template": "plain",
        "data.max_prompt_length": 12,
        "data.max_response_length": 8,
        "data.train_batch_size": 2,
        "rollout.name": engine,
        "rollout.n": 2,
        "reward.function": "exact_match",
        "reward.num_workers": 1,
        "trainer.total_training_steps": 1,
        "trainer.test_freq": 0,
        "trainer.default_local_dir": runs,
        "cluster.backend": "inline",
        "cluster.device": "cpu",
    }
    return [f"{key}={value}" for key, value in settings.items()]
