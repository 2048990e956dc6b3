"""Kinds of RoPE: what is read of config.json, and what the trainer turns queries and keys by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_rl.mcore.packing import rotary
from megatron_rl.models.fields import Compute, Fields, rope_entries, rotary_factor, unsupported
from megatron_rl.models.known import known
from megatron_rl.models.rope import KINDS, Dynamic, Linear, Llama3, Rope, Yarn, read_rope

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
FAR = {"max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("entry", "model", "expected"),
    [
        (None, {}, Rope()),
        ({}, {}, Rope()),
        ({"rope_theta": 5.0, "factor": None, "partial_rotary_factor": 1}, {}, Rope()),
        ({"rope_type": "linear", "factor": 4.0}, {}, Linear(4.0)),
        ({"type": "linear", "factor": 4.0, "attention_factor": 1}, FAR, Linear(4.0)),
        ({"rope_type": "linear", "factor": 4}, FAR, "vLLM reads factor 4 of rope_type linear only as 4.0"),
        ({"rope_type": "linear"}, {}, "rope_type linear needs factor: a number above 0"),
        ({"rope_type": "linear", "factor": True}, {}, "needs factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta": 1}, {}, "beta is no part of rope_type linear"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, {}, "over a part of the head"),
        ({"rope_type": "default", "type": "linear", "factor": 4}, {}, "type, factor are no part of plain RoPE"),
        ({"rope_type": "dynamic", "factor": 2.0}, FAR, Dynamic(2.0)),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1e3}, FAR, "alpha is no part"),
        ({"rope_type": "llama3"} | LLAMA3, FAR, Llama3(8.0, 1.0, 4.0, 64)),
        ({"rope_type": "llama3"} | LLAMA3 | {"high_freq_factor": 1}, FAR, "must be below high_freq_factor 1"),
        # At the top of config.json, where transformers 5 looks first; and where neither has it.
        (
            {"rope_type": "yarn", "factor": 4.0},
            FAR | {"original_max_position_embeddings": 64},
            Yarn(4.0, 64),
        ),
        ({"rope_type": "yarn", "factor": 4.0}, FAR, Yarn(4.0, 256)),
        ({"rope_type": "yarn"} | YARN, FAR | {"original_max_position_embeddings": 64}, Yarn(4.0, 64)),
        ({"rope_type": "yarn"} | YARN, FAR | {"original_max_position_embeddings": 32}, "64 differs from 32"),
        ({"rope_type": "yarn"} | YARN, FAR | {"original_max_position_embeddings": None}, "is null"),
        ({"rope_type": "yarn", "factor": 4.0}, {}, "needs original_max_position_embeddings"),
        ({"rope_type": "yarn"} | YARN, {"max_position_embeddings": 257}, "where vLLM's table of cosines ends"),
        (
            {"rope_type": "yarn", "beta_fast": 16, "beta_slow": 2, "truncate": False, "mscale": 0} | YARN,
            FAR,
            Yarn(4.0, 64, mscale=0, beta_fast=16, beta_slow=2, truncate=False),
        ),
        ({"rope_type": "yarn", "attention_factor": None, "mscale_all_dim": None} | YARN, FAR, Yarn(4.0, 64)),
        ({"rope_type": "yarn", "truncate": None} | YARN, FAR, "truncate None of rope_type yarn must be true or false"),
        ({"rope_type": "yarn", "beta_fast": None} | YARN, FAR, "beta_fast None of rope_type yarn must be a number"),
        ({"rope_type": "yarn", "mrope_section": [1, 1]} | YARN, FAR, "mrope_section is no part"),
        ({"rope_type": "longrope", "factor": 4}, {}, "only plain RoPE (rope_type default) or rope_type linear or"),
        ({"full_attention": {"rope_theta": 1e4}}, {}, "differs by layer type"),
        ([], {}, "is not a mapping"),
    ],
)
def test_an_entry_is_one_kind_or_refused(entry: object, model: dict[str, Any], expected: Rope | str) -> None:
    kind = read_rope(KINDS, entry, model)
    if isinstance(expected, Rope):
        assert kind == expected
    else:
        assert isinstance(kind, str) and expected in kind, kind


def test_a_family_may_turn_a_part_of_the_head() -> None:
    shape = known("LlamaForCausalLM", 64, 1, 2, 1, 64, 64)
    half = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert read_rope((Rope,), half, {}, partial=True) == Rope()
    assert read_rope((Rope,), half | {"partial_rotary_factor": 1.5}, {}, partial=True) != Rope()
    spec = Fields("x", rotary_factor=0.25)
    for content, dim in (({"rope_parameters": half}, 16), ({"partial_rotary_factor": 0.75}, 24), ({}, 8)):
        assert not unsupported("X", spec, Compute(), content, "x")
        assert replace(shape, rotary_factor=rotary_factor(spec, content)).rotary_dim == dim
    assert unsupported("X", Fields("x"), Compute(), {"partial_rotary_factor": 0.75}, "x")
    assert unsupported("X", spec, Compute(), {"partial_rotary_factor": 0}, "x")


def test_a_family_without_plain_rope_wants_an_entry() -> None:
    assert read_rope((Linear,), None) == "does not say which of rope_type linear the model has"
    assert "only rope_type linear" in str(read_rope((Linear,), {"rope_type": "yarn"}))


def test_the_older_entry_stands_before_the_newer() -> None:
    older, newer = {"rope_type": "linear"}, {"rope_type": "default"}
    assert next(iter(rope_entries({"rope_scaling": older, "rope_parameters": newer}).values())) is older
    assert rope_entries({"rope_scaling": {}, "rope_parameters": newer}) == {"rope_parameters": newer}
    assert rope_entries({"rope_scaling": None}) == {"rope_parameters": None}
    assert rope_entries({"rope_scaling": []}) == {"rope_scaling": []}


@pytest.mark.parametrize("theta", [1e4, 777.0])
@pytest.mark.parametrize(
    "entry",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "llama3"} | LLAMA3,
        {"rope_type": "llama3"} | LLAMA3 | {"factor": 32.0, "low_freq_factor": 2.0},
        {"rope_type": "yarn"} | YARN,
        {"rope_type": "yarn"} | YARN | {"attention_factor": 0.7, "mscale": 2.0, "mscale_all_dim": 1.0},
        {"rope_type": "yarn"} | YARN | {"mscale": 1.5, "mscale_all_dim": 0.8, "beta_fast": 8.0, "beta_slow": 2.0},
        {"rope_type": "yarn"} | YARN | {"mscale": 2.0, "truncate": False},
        {"rope_type": "yarn"} | YARN | {"beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
    ],
    ids=str,
)
def test_queries_and_keys_turn_by_the_angles_of_transformers(entry: dict[str, Any], theta: float) -> None:
    """To the last position, far beyond the first context; larger or smaller by the same factor."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    entry = entry | {"rope_theta": theta}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=4, rope_parameters=dict(entry), max_position_embeddings=256
    )
    positions = torch.arange(256)
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    kind = read_rope(KINDS, entry, FAR)
    assert isinstance(kind, Rope)
    for one, wanted in zip(rotary(positions, 32, theta, kind), theirs, strict=True):
        assert (one[:, 0] - wanted[0]).abs().max() < 3e-5 * kind.amplitude
