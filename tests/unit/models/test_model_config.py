"""Contract N1, N7: what a config.json asks for is computed, or refused by the entry's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.models import TRAINED
from megatron_rl.models.config_json import inspect_model
from tests.helpers.odd_configs import PASSING, REFUSED, laid_over

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


def write_config(folder: Path, family: str, changes: dict[str, Any]) -> str:
    name = next(name for name, found in TRAINED.items() if found.fields.model_type == family)
    fields = BASE | {"architectures": [name], "model_type": family}
    if TRAINED[name].fields.experts:
        fields |= EXPERTS
    if family != "qwen3_moe":
        del fields["moe_intermediate_size"]
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


@pytest.mark.parametrize("family", [found.fields.model_type for found in TRAINED.values()])
def test_what_transformers_writes_for_a_family_passes(tmp_path: Path, family: str) -> None:
    """Its own defaults, and everything that another version or program notes in them."""
    from transformers import AutoConfig

    own = BASE | (EXPERTS if family in ("qwen3_moe", "mixtral") else {})
    if family != "qwen3_moe":
        own = {name: value for name, value in own.items() if name != "moe_intermediate_size"}
    config = AutoConfig.for_model(family, **own)
    written = json.loads(config.to_json_string(use_diff=False))
    older = {"torch_dtype": "float16", "rope_theta": 1e4, "rope_scaling": None, "output_attentions": False}
    shape, faults = inspect_model(write_config(tmp_path, family, written | older | _named(family)))
    assert shape is not None, [str(fault) for fault in faults]


def _named(family: str) -> dict[str, Any]:
    return {"architectures": [name for name, found in TRAINED.items() if found.fields.model_type == family]}
