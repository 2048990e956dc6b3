"""Contract N1, N7: what a config.json asks for is computed, or refused by the entry's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import inspect_model
from megatron_rl.models.rope import Llama3, Rope, Rotation, Yarn
from tests.helpers.odd_configs import ABSENT, PASSING, REFUSED, laid_over
from tests.helpers.tiny import FAMILY_FIELDS

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}


def _base(family: str) -> dict[str, Any]:
    """Entries of a small model; of families that need more, all of it."""
    if family == "gpt_oss":
        small = {name: value for name, value in BASE.items() if name != "moe_intermediate_size"}
        return small | FAMILY_FIELDS[family][1]
    if family == "qwen2_moe":
        return BASE | EXPERTS | {"shared_expert_intermediate_size": 96}
    if family.startswith("deepseek"):
        small = {name: value for name, value in BASE.items() if name != "head_dim"}
        return small | {"num_attention_heads": 4} | FAMILY_FIELDS[family][1]
    own = BASE | (EXPERTS if family in ("qwen3_moe", "mixtral") else {})
    if family == "glm4_moe":
        return BASE | FAMILY_FIELDS[family][1] | {"head_dim": 32}
    if family == "gemma3_text":
        own |= FAMILY_FIELDS[family][1] | {"layer_types": ["full_attention"] * 2}
    return {name: value for name, value in own.items() if name != "moe_intermediate_size" or family == "qwen3_moe"}


def write_config(folder: Path, family: str, changes: dict[str, Any]) -> str:
    name = next(name for name, found in FAMILIES.items() if found.fields.model_type == family)
    fields = _base(family) | {"architectures": [name], "model_type": family}
    (folder / "config.json").write_text(json.dumps(laid_over(fields, changes)))
    return str(folder)


def _id(variant: tuple[str, dict[str, Any]]) -> str:
    return f"{variant[0]}-{json.dumps(variant[1])[:60]}"


@pytest.mark.parametrize("variant", REFUSED, ids=_id)
def test_an_entry_that_is_not_computed_is_refused_by_name(tmp_path: Path, variant: tuple[str, dict[str, Any]]) -> None:
    family, changes = variant
    shape, faults = inspect_model(write_config(tmp_path, family, changes))
    assert shape is None
    (fault,) = faults
    field = next(iter(changes))
    assert fault.key == f"{tmp_path / 'config.json'}: {field}"
    assert fault.value == changes[field]
    assert len(fault.reason) > 15 and "config.json" in fault.cure + fault.key


@pytest.mark.parametrize("variant", PASSING, ids=_id)
def test_values_that_change_nothing_pass(tmp_path: Path, variant: tuple[str, dict[str, Any]]) -> None:
    shape, faults = inspect_model(write_config(tmp_path, *variant))
    assert shape is not None, [str(fault) for fault in faults]


def test_all_odd_entries_are_named_at_once(tmp_path: Path) -> None:
    changes = {"sliding_window": 4, "logit_scale": 2, "whatever": 1, "rope_parameters": {"rope_type": "yarn"}}
    _, faults = inspect_model(write_config(tmp_path, "llama", changes))
    assert {fault.key.rpartition(": ")[2] for fault in faults} == set(changes)


@pytest.mark.parametrize("family", [found.fields.model_type for found in FAMILIES.values()])
def test_what_transformers_writes_for_a_family_passes(tmp_path: Path, family: str) -> None:
    """Its own defaults, and everything that another version or program notes in them."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **_base(family))
    written = json.loads(config.to_json_string(use_diff=False))
    older = {"torch_dtype": "float16", "rope_theta": 1e4, "rope_scaling": None, "output_attentions": False}
    if family == "gemma3_text":
        # Its bases are those of rope_parameters, and another one at the top is refused.
        del older["rope_theta"]
    shape, faults = inspect_model(write_config(tmp_path, family, written | older | _named(family)))
    assert shape is not None, [str(fault) for fault in faults]


def _named(family: str) -> dict[str, Any]:
    return {"architectures": [name for name, found in FAMILIES.items() if found.fields.model_type == family]}


_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
_LONG = {"max_position_embeddings": 131072}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
_BIASES = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "attention_dropout": 0.0}
_QWEN = {"use_sliding_window": False, "max_window_layers": 28, "attention_dropout": 0.0, "hidden_act": "silu"}
PUBLISHED: dict[str, tuple[str, dict[str, Any], Rope, int]] = {
    "Llama-3.1-8B": (
        "llama",
        _LONG | _BIASES | {"rope_theta": 500000.0, "rope_scaling": _LLAMA3 | {"factor": 8.0}},
        Llama3(8.0, 1.0, 4.0, 8192),
        0,
    ),
    "Llama-3.2-1B": (
        "llama",
        _LONG | _BIASES | {"head_dim": 64, "tie_word_embeddings": True, "rope_scaling": _LLAMA3 | {"factor": 32.0}},
        Llama3(32.0, 1.0, 4.0, 8192),
        0,
    ),
    "SmolLM2-135M-Instruct": (
        "llama",
        _BIASES
        | {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000}
        | {"transformers.js_config": {"dtype": "q4"}, "max_position_embeddings": 8192},
        Rope(),
        0,
    ),
    "Qwen2.5-7B-Instruct, 32k": ("qwen2", _QWEN | {"sliding_window": 131072, "rope_theta": 1e6}, Rope(), 0),
    "Qwen2.5-7B-Instruct, 128k": (
        "qwen2",
        _QWEN | _LONG | {"sliding_window": 131072, "rope_theta": 1e6, "rope_scaling": _YARN},
        Yarn(4.0, 32768),
        0,
    ),
    "Qwen3-8B, 128k": (
        "qwen3",
        _QWEN | _LONG | {"sliding_window": None, "rope_theta": 1e6, "rope_scaling": _YARN, "attention_bias": False},
        Yarn(4.0, 32768),
        0,
    ),
    "Mistral-7B-v0.1": ("mistral", {"sliding_window": 4096, "max_position_embeddings": 32768}, Rope(), 4096),
    "Mistral-Nemo": ("mistral", _LONG | {"sliding_window": None, "head_dim": 128, "rope_theta": 1e6}, Rope(), 0),
}
"""What the files of published models say beside their sizes: (family, entries, RoPE, window of every layer)."""

GEMMA3_1B: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None, "cache_implementation": "hybrid",
    "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
    "sliding_window_pattern": 6, "rope_parameters": ABSENT, "layer_types": ABSENT, "num_hidden_layers": 13,
    "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_published_models_say_is_computed(tmp_path: Path, name: str) -> None:
    family, entries, rope, window = PUBLISHED[name]
    shape, faults = inspect_model(write_config(tmp_path, family, entries))
    assert shape is not None, [str(fault) for fault in faults]
    assert (shape.rope, shape.windows) == (rope, (window,) * 2 if window else ())


def test_gemma_3_has_windows_and_rope_by_layer_and_its_output_matrix_is_the_embedding(tmp_path: Path) -> None:
    shape, faults = inspect_model(write_config(tmp_path, "gemma3_text", GEMMA3_1B))
    assert shape is not None, [str(fault) for fault in faults]
    assert shape.windows == ((512,) * 5 + (0,)) * 2 + (512,)
    assert (shape.rotation(5), shape.rotation(6)) == (Rotation(1e6, Rope()), Rotation(1e4, Rope()))
    assert shape.tie_word_embeddings and shape.query_pre_attn_scalar == 256
