"""An oracle for the tables of the families: which Hugging Face tensors NVIDIA's Megatron-Bridge makes a Megatron
parameter of, and how it fuses queries, keys and values.

Megatron-Bridge is no dependency, and importing it needs Transformer Engine. Its tables are read from its files:

    pip download --no-deps megatron-bridge==0.6.2; unzip megatron_bridge-*.whl -d BRIDGE
    MEGATRON_RL_BRIDGE=BRIDGE pytest -m slow tests/unit/models/test_megatron_bridge.py
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.models import FAMILIES
from megatron_rl.models.layouts import Qkv
from megatron_rl.models.rules import Rule
from tests.helpers.reshard_cases import shape_of

pytestmark = pytest.mark.slow
BRIDGES = {
    "DeepseekV2ForCausalLM": "deepseek/deepseek_v2_bridge.py",
    "DeepseekV3ForCausalLM": "deepseek/deepseek_v3_bridge.py",
    "Gemma3ForCausalLM": "gemma/gemma3_bridge.py",
    "GemmaForCausalLM": "gemma/gemma_bridge.py",
    "Glm4MoeForCausalLM": "glm/glm45_bridge.py",
    "GptOssForCausalLM": "gpt_oss/gpt_oss_bridge.py",
    "LlamaForCausalLM": "llama/llama_bridge.py",
    "MistralForCausalLM": "mistral/mistral_bridge.py",
    "Qwen2ForCausalLM": "qwen/qwen2_bridge.py",
    "Qwen3ForCausalLM": "qwen/qwen3_bridge.py",
    "Qwen3MoeForCausalLM": "qwen/qwen3_moe_bridge.py",
}
# A norm lies in the linear layer after (or before) it where Transformer Engine computes both.
OF_TE = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "post_attention_layernorm.weight": "self_attention.linear_proj.post_layernorm.weight",
    "post_mlp_layernorm.weight": "mlp.linear_fc2.post_layernorm.weight",
}


@pytest.fixture(scope="module")
def bridge() -> Path:
    """The folder of Megatron-Bridge's models."""
    folder = os.environ.get("MEGATRON_RL_BRIDGE")
    if not folder:
        pytest.skip("needs MEGATRON_RL_BRIDGE, the folder of an unpacked wheel of megatron-bridge")
    return Path(folder) / "megatron" / "bridge" / "models"


def _functions(file: Path) -> dict[str, ast.FunctionDef]:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


def _compiled(function: ast.FunctionDef, names: dict[str, Any]) -> Callable[..., Any]:
    """One function of a file, with nothing of the file but `names` around it."""
    function.returns = None
    function.decorator_list = []
    for argument in function.args.args:
        argument.annotation = None
    module = ast.fix_missing_locations(ast.Module([function], []))
    exec(compile(module, "bridge", "exec"), names)
    return names[function.name]


class _Names(dict[str, Any]):
    """What a mapping_registry names: each class of mappings becomes its (Megatron parameter, HF tensors)."""

    def __missing__(self, name: str) -> Any:
        if name.endswith("Registry"):
            return lambda *mappings: list(mappings)
        if name.endswith("Mapping"):
            return _recorded
        raise KeyError(name)


def _recorded(*given: str, **named: Any) -> tuple[str, tuple[str, ...]]:
    names = dict(zip(("megatron_param", "hf_param"), given, strict=False)) | named
    megatron = names.pop("megatron_param")
    return megatron, tuple(name for name in names.values() if isinstance(name, str))


def mappings(models: Path, file: str) -> dict[str, set[tuple[str, ...]]]:
    """Megatron parameter -> the HF tensors that a bridge of a dense or a MoE model makes it of; `*` is any number."""
    names = _Names(__builtins__=__builtins__)
    if file.startswith("deepseek"):
        common = _functions(models / "deepseek" / "common.py")["get_common_mapping_list"]
        _compiled(common, names)
    registry = _compiled(_functions(models / file)["mapping_registry"], names)
    bridge = SimpleNamespace(
        hf_config=SimpleNamespace(num_hidden_layers=4, num_nextn_predict_layers=0),
        _uses_fused_experts=lambda: False,
        _hf_expert_suffix=lambda name: "",
    )
    table: dict[str, set[tuple[str, ...]]] = {}
    for megatron, hf in registry(bridge):
        table.setdefault(megatron, set()).add(hf)
    return table


def _rules(architecture: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Megatron parameter and its HF tensors, of every kind of layer, by this package."""
    family, shape = FAMILIES[architecture], shape_of(architecture, layers=4)
    # All Gemmas that are published have their embedding as their head.
    ends = (family.embedding, family.final_norm, *(() if architecture.startswith("Gemma") else (family.output,)))
    for rule in ends:
        yield rule.megatron, rule.hf
    rules: dict[Rule, None] = {}
    for layer in range(shape.num_layers):
        rules |= dict.fromkeys(family.layer(shape, layer))
    for rule in rules:
        yield f"decoder.layers.*.{rule.megatron}", tuple(f"model.layers.*.{name}" for name in rule.hf)


def _names_there(megatron: str) -> tuple[str, ...]:
    """The names that a bridge may give to a parameter."""
    layer, star, name = megatron.partition(".*.")
    te = layer + star + OF_TE[name] if name in OF_TE else megatron
    return megatron, te, f"{megatron}*"


@pytest.mark.parametrize("architecture", BRIDGES)
def test_a_family_is_made_of_the_tensors_that_megatron_bridge_says(bridge: Path, architecture: str) -> None:
    table = mappings(bridge, BRIDGES[architecture])
    others: list[tuple[str, object, object]] = []
    for megatron, hf in _rules(architecture):
        # Where transformers' files hold all experts of a layer in one tensor, a bridge names that tensor.
        stacked = tuple(name.replace(".experts.*.", ".experts.") for name in hf)
        theirs = set[tuple[str, ...]]().union(*(table.get(name, set()) for name in _names_there(megatron)))
        if not theirs & {hf, stacked}:
            others.append((megatron, hf, theirs))
    assert not others, others


def test_queries_keys_and_values_are_fused_as_megatron_bridge_does(bridge: Path) -> None:
    shape = shape_of(heads=6, kv=3, head_dim=4, hidden=5)
    sizes = {"q": 24, "k": 12, "v": 12}
    rows, start = {}, 0
    for name, size in sizes.items():
        rows[name] = torch.arange(start, start + size, dtype=torch.float32)[:, None].expand(size, 5).contiguous()
        start += size
    merge = _compiled(_functions(bridge / "conversion" / "param_mapping.py")["merge_qkv_weights"], {"torch": torch})
    provider = SimpleNamespace(
        num_attention_heads=6, num_query_groups=3, kv_channels=4, hidden_size=5, attention_output_gate=False
    )
    theirs = merge(provider, rows["q"], rows["k"], rows["v"])
    blocks = Qkv().trainer(tuple(sizes), shape, 1, 0)
    ours = torch.cat([rows[block.hf_name][slice(*block.rows)] for block in blocks])
    assert torch.equal(ours, theirs)
