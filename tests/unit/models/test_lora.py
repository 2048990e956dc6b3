"""Which linear layers get adapters, and what of them each rank holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.layouts import Block
from megatron_rl.models.lora import (
    Adapters,
    adapted_linears,
    adapter_shapes,
    bound_counts,
    linear_names,
    num_adapter_parameters,
)
from megatron_rl.models.peft_config import adapter_config, adapter_faults
from megatron_rl.models.rules import padded_vocab
from megatron_rl.models.sizes import named_shape
from tests.helpers.tiny import save_tiny

DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapters(*targets: str, rank: int = 4, **fields: Any) -> Adapters:
    return Adapters(rank, 8.0, 0.0, frozenset(targets or DENSE), **fields)


def test_all_linear_is_what_peft_takes_but_routers_and_experts(tmp_path: Path) -> None:
    import peft
    import transformers

    for family in ("qwen2", "llama", "qwen3", "qwen3_moe", "mixtral"):
        folder = save_tiny(tmp_path / family, family, layers=2, tied=False)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        theirs = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
        state = peft.get_peft_model_state_dict(theirs)
        shape = read_model_shape(folder)
        table = FAMILIES[shape.architecture]
        ours = adapter_shapes(shape, table, adapters(*linear_names(shape, table)))
        # PEFT adds adapters to routers and, in newer versions, to stacks of experts, which have none here.
        state = {name: tensor for name, tensor in state.items() if ".experts." not in name and ".gate." not in name}
        named = {f"base_model.model.{name}": size for name, size in ours.items()}
        assert named == {name: tuple(tensor.shape) for name, tensor in state.items()}, family


@pytest.mark.parametrize("name", ["qwen2.5/7b", "llama3.1/8b", "qwen3/30b-a3b"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_cover_each_tensor_once_or_hold_it_whole(name: str, tp: int) -> None:
    shape = named_shape(name)
    family = FAMILIES[shape.architecture]
    wanted = adapter_shapes(shape, family, adapters(*linear_names(shape, family)))
    covered: dict[str, list[int]] = {}
    for rank in range(tp):
        linears = adapted_linears(
            shape, family, adapters(*linear_names(shape, family)), tp=tp, tp_rank=rank, layers=range(shape.num_layers)
        )
        for linear in linears:
            for param in linear.params:
                numbers = sum(block.num_rows * (block.cols[1] - block.cols[0]) for block in param.blocks if block.cols)
                assert numbers == param.shape[0] * param.shape[1]
                covered.setdefault(param.blocks[0].hf_name, []).append(numbers)
    assert covered.keys() == wanted.keys()
    for tensor, numbers in covered.items():
        whole = wanted[tensor][0] * wanted[tensor][1]
        assert sum(numbers) == whole or numbers == [whole] * tp, tensor
    assert padded_vocab(shape, tp) >= shape.vocab_size


def test_a_fused_layer_has_an_a_and_a_b_for_each_of_its_own() -> None:
    shape = named_shape("qwen2.5/7b")  # 28 query heads and 4 KV heads of head_dim 128, hidden 3584
    qkv, out, *_ = adapted_linears(
        shape, FAMILIES[shape.architecture], adapters("q_proj", "v_proj", "o_proj"), tp=2, tp_rank=1, layers=range(3, 5)
    )
    assert (qkv.module, qkv.split) == ("decoder.layers.0.self_attention.linear_qkv", "rows")
    attention = "model.layers.3.self_attn."
    assert [param.name.removeprefix(qkv.module) for param in qkv.params] == [
        f".lora.{name}.{part}" for name in ("q_proj", "v_proj") for part in "ab"
    ]
    a, b = qkv.params[2].blocks[0], qkv.params[3].blocks
    assert a == Block(attention + "v_proj.lora_A.weight", (0, 4), (0, 3584))
    assert b == tuple(Block(attention + "v_proj.lora_B.weight", (at, at + 128), (0, 4)) for at in (256, 384))
    # 7 query heads, a key, which has no adapter, a value: twice.
    assert [(piece.name and piece.name[-6:], piece.first, piece.end) for piece in qkv.pieces] == [
        ("q_proj", 0, 896), (None, 0, 128), ("v_proj", 0, 128),
        ("q_proj", 896, 1792), (None, 128, 256), ("v_proj", 128, 256),
    ]  # fmt: skip
    assert (out.module, out.split) == ("decoder.layers.0.self_attention.linear_proj", "cols")
    assert out.params[0].blocks == (Block(attention + "o_proj.lora_A.weight", (0, 4), (1792, 3584)),)
    assert out.params[1].blocks == (Block(attention + "o_proj.lora_B.weight", (0, 3584), (0, 4)),)


def test_scale_and_counts() -> None:
    assert adapters(rank=16).scale == 0.5
    assert adapters(rank=16, use_rslora=True).scale == 2.0
    shape = named_shape("qwen2.5/7b")
    family = FAMILIES[shape.architecture]
    shapes = adapter_shapes(shape, family, adapters(rank=32))
    assert bound_counts(shapes) == dict.fromkeys(DENSE, 28)
    # Of each layer: attention 4 r h + r (4 * 128 + 4 * 128) + r * 3584 * 2 ..., as PEFT counts them.
    assert num_adapter_parameters(shape, family, adapters(rank=32)) == 80_740_352
    moe = named_shape("qwen3/30b-a3b")
    assert linear_names(moe, FAMILIES[moe.architecture]) == DENSE[:4], "no router, no experts"


def test_an_adapters_config_is_read_again_and_what_it_asks_for_beyond_is_refused(tmp_path: Path) -> None:
    ours = adapters("q_proj", "v_proj")
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config(ours, "base")))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert adapter_faults(str(tmp_path), ours, "model.lora.path") == []
    other = Adapters(8, 16.0, 0.0, frozenset({"q_proj"}), True)
    found = adapter_faults(str(tmp_path), other, "model.lora.path")
    assert [fault.cure for fault in found] == [
        "set model.lora.rank=4",
        "set model.lora.alpha=8",
        "set model.lora.use_rslora=False",
        "set model.lora.target_modules=[q_proj,v_proj]",
    ]
    changed = adapter_config(ours, "base") | {"use_dora": True, "modules_to_save": ["lm_head"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(changed))
    found = adapter_faults(str(tmp_path), ours, "model.lora.path")
    assert ["use_dora" in found[0].reason, "modules_to_save" in found[1].reason] == [True, True]
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config(ours, "base")))
    assert "adapter_model.safetensors" in adapter_faults(str(tmp_path), ours, "model.lora.path")[0].reason
    assert adapter_faults(str(tmp_path / "none"), ours, "model.lora.path")[0].key == "model.lora.path"


def test_peft_reads_the_config(tmp_path: Path) -> None:
    import peft

    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config(adapters(), "base")))
    config = peft.PeftConfig.from_pretrained(str(tmp_path))
    assert isinstance(config, peft.LoraConfig)
    assert (config.r, config.lora_alpha, config.target_modules) == (4, 8, set(DENSE))
    assert torch.is_tensor(torch.zeros(1))
