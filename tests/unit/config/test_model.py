"""What a model's folder must hold, and what its config.json may ask for."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.errors import ConfigError, Fault
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import inspect_model, read_model_shape
from megatron_rl.models.refused import REFUSED
from megatron_rl.models.rules import hf_shapes, num_parameters
from megatron_rl.models.shape import ModelShape
from tests.helpers.config import QWEN3_MOE, faults, load, make_model, only_fault, write_headers
from tests.helpers.tiny import FAMILY_FIELDS

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_parameters": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64}
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": None,
    "rms_norm_eps": None,
    "sliding_window": None,
}


def shape_of(folder: Path, **changes: Any) -> ModelShape:
    return read_model_shape(make_model(folder / "shape", weights=False, **changes))


def refused(folder: Path, **changes: Any) -> Fault:
    with pytest.raises(ConfigError) as caught:
        shape_of(folder, **changes)
    assert len(caught.value.faults) == 1, str(caught.value)
    return caught.value.faults[0]


def test_shape_of_qwen2(tmp_path: Path) -> None:
    shape = shape_of(tmp_path)
    assert shape == ModelShape(
        architecture="Qwen2ForCausalLM",
        num_layers=3,
        hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        ffn_size=320,
        vocab_size=128,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=256,
        initializer_range=0.02,
    )
    assert num_parameters(shape, FAMILIES[shape.architecture]) == 534_144
    assert shape.tp_choices() == [1, 2]


def test_shape_of_llama_with_the_fields_of_older_files(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, **LLAMA, num_key_value_heads=None, head_dim=64, rope_scaling=None)
    assert (shape.rope_theta, shape.num_kv_heads, shape.head_dim) == (500000.0, 4, 64)


def test_parameters_are_those_of_the_tensors(tmp_path: Path) -> None:
    for changes in ({}, {**LLAMA, "num_key_value_heads": 1, "head_dim": 64}, QWEN3, QWEN3_MOE, MIXTRAL):
        shape = shape_of(tmp_path, **changes)
        shapes = hf_shapes(shape, FAMILIES[shape.architecture])
        assert num_parameters(shape, FAMILIES[shape.architecture]) == sum(prod(size) for size in shapes.values())


def test_shape_of_qwen3_has_norms_on_heads(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, **QWEN3)
    assert (shape.head_dim, shape.num_experts) == (64, 0)
    # transformers would take 128 where the entry is absent.
    assert refused(tmp_path, **(QWEN3 | {"head_dim": None})).key.endswith("config.json: head_dim")


def test_shape_of_qwen3_moe_and_of_mixtral(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, **QWEN3_MOE)
    assert (shape.num_experts, shape.num_experts_per_tok, shape.norm_topk_prob) == (8, 2, True)
    assert shape.ffn_size == 96
    assert shape_of(tmp_path, **(QWEN3_MOE | {"num_experts": None, "num_local_experts": 8})) == shape
    assert not shape_of(tmp_path, **(QWEN3_MOE | {"norm_topk_prob": None})).norm_topk_prob
    shape = shape_of(tmp_path, **MIXTRAL)
    assert (shape.num_experts, shape.num_experts_per_tok, shape.norm_topk_prob) == (4, 2, True)
    assert (shape.ffn_size, shape.rope_theta, shape.rms_norm_eps) == (320, 1e6, 1e-5)


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("QWEN3_MOE", {"shared_expert_intermediate_size": 64}),
        ("QWEN3_MOE", {"attention_bias": True}),
        ("QWEN3_MOE", {"num_experts_per_tok": 9}),
        ("QWEN3_MOE", {"num_experts_per_tok": 1}),
        ("QWEN3_MOE", {"num_experts_per_tok": None}),
        ("QWEN3_MOE", {"moe_intermediate_size": None}),
        ("QWEN3_MOE", {"num_local_experts": 4}),
        ("MIXTRAL", {"sliding_window": 0}),
        ("MIXTRAL", {"router_jitter_noise": 0.1}),
        ("MIXTRAL", {"num_local_experts": None}),
        ("QWEN3", {"use_sliding_window": True}),
    ],
)
def test_experts_that_are_not_computed_are_refused(tmp_path: Path, base: str, changes: dict[str, Any]) -> None:
    fields = {"QWEN3": QWEN3, "QWEN3_MOE": QWEN3_MOE, "MIXTRAL": MIXTRAL}[base]
    (field,) = changes
    assert refused(tmp_path, **(fields | changes)).key.endswith(f"config.json: {field}")


def test_experts_whose_weights_are_not_scaled_may_be_single(tmp_path: Path) -> None:
    assert shape_of(tmp_path, **(QWEN3_MOE | {"num_experts_per_tok": 1, "norm_topk_prob": False})).num_experts == 8


def test_rope_theta_is_read_from_new_and_old_places(tmp_path: Path) -> None:
    new = {"rope_theta": 1e6, "rope_type": "default"}
    assert shape_of(tmp_path, rope_parameters=new, rope_theta=5.0).rope_theta == 1e6
    assert shape_of(tmp_path, rope_parameters=None, rope_theta=5.0).rope_theta == 5.0
    assert shape_of(tmp_path, rope_parameters=None).rope_theta == 10000.0
    assert shape_of(tmp_path, rope_parameters={"rope_type": "default"}, rope_theta=7.0).rope_theta == 7.0


def test_unsupported_architecture_lists_the_supported(tmp_path: Path) -> None:
    fault = refused(tmp_path, architectures=["MambaForCausalLM"])
    assert fault.key.endswith("config.json: architectures") and fault.value == ["MambaForCausalLM"]
    assert "LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM" in fault.cure and "Qwen3Next" not in fault.cure


def test_a_well_known_architecture_is_refused_with_the_reason(tmp_path: Path) -> None:
    assert not REFUSED.keys() & FAMILIES.keys()
    for name, reason in REFUSED.items():
        assert refused(tmp_path, architectures=[name]).reason == f"this architecture is not supported: {reason}"


def test_what_is_no_architecture_or_another_models_is_refused(tmp_path: Path) -> None:
    assert "does not say" in refused(tmp_path, architectures=[]).reason
    assert refused(tmp_path, model_type="qwen3").key.endswith("config.json: model_type")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}},
        {"rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_parameters": "linear"},
        {"partial_rotary_factor": 0.5},
        {"use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"layer_types": 3},
        {"hidden_act": "gelu"},
        {"attention_dropout": 0.1},
        {"quantization_config": {"quant_method": "awq"}},
        {**LLAMA, "attention_bias": True},
        {**LLAMA, "mlp_bias": True},
    ],
)
def test_features_that_are_not_computed_are_refused_not_ignored(tmp_path: Path, changes: dict[str, Any]) -> None:
    field = next(name for name in reversed(changes))
    fault = refused(tmp_path, **changes)
    assert fault.key.endswith(f"config.json: {field}") and fault.value == changes[field]


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "default"}},
        {"layer_types": ["full_attention"] * 3},
        {"sliding_window": 4096},
        {"attention_dropout": 0.0},
        {**LLAMA, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
    ],
)
def test_features_that_are_off_are_fine(tmp_path: Path, changes: dict[str, Any]) -> None:
    shape_of(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": None}, "num_key_value_heads"),
        ({"num_attention_heads": 6}, "hidden_size"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_parameters.rope_theta"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ],
)
def test_sizes_that_are_missing_or_do_not_fit(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    assert refused(tmp_path, **changes).key.endswith(f"config.json: {field}")


def test_several_faults_of_a_config_json_come_together(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", use_sliding_window=True, hidden_act="gelu", vocab_size=None)
    assert len(inspect_model(folder)[1]) == 3


def test_missing_model_folder_and_names_of_a_hub(tmp_path: Path) -> None:
    found = {fault.key: fault for fault in faults(tmp_path, "model.path=Qwen/Qwen2-7B-Instruct")}
    assert set(found) == {"model.path"}
    assert "download it first" in found["model.path"].cure and "models/Qwen2-7B-Instruct" in found["model.path"].cure


def test_model_folder_without_config_json(tmp_path: Path) -> None:
    make_model(tmp_path / "bare")
    (tmp_path / "bare" / "config.json").unlink()
    fault = only_fault(tmp_path, f"model.path={tmp_path / 'bare'}")
    assert fault.key == "model.path" and "has no config.json" in fault.reason


def test_config_json_that_is_not_json(tmp_path: Path) -> None:
    make_model(tmp_path / "bad")
    (tmp_path / "bad" / "config.json").write_text("{")
    assert "not valid JSON" in only_fault(tmp_path, f"model.path={tmp_path / 'bad'}").reason


def test_model_folder_without_weights(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "empty", weights=False)
    fault = only_fault(tmp_path, f"model.path={folder}")
    assert "neither model.safetensors nor" in fault.reason and "model.init=random" in fault.cure
    load(tmp_path, f"model.path={folder}", "model.init=random")
    (Path(folder) / "pytorch_model.bin").write_bytes(b"")
    assert "convert them" in only_fault(tmp_path, f"model.path={folder}").cure


def test_model_folder_with_missing_shards_names_them(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "sharded", weights=False)
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = {"weight_map": {"a": shards[0], "b": shards[2], "c": shards[2], "model.norm.weight": shards[1]}}
    (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))
    write_headers(Path(folder))
    (Path(folder) / "model.safetensors").rename(Path(folder) / shards[1])
    missing, unnamed = faults(tmp_path, f"model.path={folder}")
    assert missing.key == unnamed.key == "model.path"
    assert f"2 of 3 weight files are missing: {shards[0]}, {shards[2]}" in missing.reason
    assert "does not name tensors of its files: model.embed_tokens.weight in " in unnamed.reason
    (Path(folder) / "model.safetensors.index.json").write_text("[]")
    assert "has no weight_map" in only_fault(tmp_path, f"model.path={folder}").reason


def test_missing_tokenizer(tmp_path: Path) -> None:
    folder = Path(make_model(tmp_path / "mute"))
    (folder / "tokenizer.json").unlink()
    fault = only_fault(tmp_path, f"model.path={folder}")
    assert fault.key == "model.path" and "has no tokenizer" in fault.reason and "tokenizer.model" in fault.cure
    load(tmp_path, f"model.path={folder}", f"model.tokenizer_path={tmp_path / 'model'}")
    assert only_fault(tmp_path, "model.tokenizer_path=absent").reason.startswith("there is no such folder")
    (folder / "tokenizer.model").write_bytes(b"")
    assert "tokenizer.model: is empty" in only_fault(tmp_path, f"model.tokenizer_path={folder}").reason
    (folder / "tokenizer.model").unlink()
    (folder / "vocab.json").write_text("{}")
    assert "save_pretrained" in only_fault(tmp_path, f"model.tokenizer_path={folder}").cure


def test_tp_that_does_not_divide_the_kv_heads_says_which_tp_does(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "actor.tp=4", "cluster.n_gpus_per_node=4")
    assert fault.key == "actor.tp" and "does not divide num_key_value_heads 2 of" in fault.reason
    assert fault.cure == "use 1 or 2"


def test_tp_that_divides_neither_heads_nor_mlp_names_all(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "odd", intermediate_size=321, num_attention_heads=4, num_key_value_heads=4)
    fault = only_fault(tmp_path, f"model.path={folder}", "actor.tp=8", "cluster.n_gpus_per_node=8")
    assert "num_attention_heads 4 and num_key_value_heads 4 and intermediate_size 321" in fault.reason
    assert fault.cure == "use 1"


def test_tp_may_split_a_model_with_experts_whose_mlp_it_does_not_divide(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "experts", **{**QWEN3_MOE, "moe_intermediate_size": 97})
    layout = (f"model.path={folder}", "actor.tp=2", "actor.sequence_parallel=true", "cluster.n_gpus_per_node=2")
    assert only_fault(tmp_path, *layout).key == "actor.tp"
    assert load(tmp_path, *layout, "actor.ep=2").actor.expert_tp == 1


def test_layouts_of_experts(tmp_path: Path) -> None:
    model = f"model.path={make_model(tmp_path / 'experts', **QWEN3_MOE)}"
    four = (model, "cluster.n_gpus_per_node=4")
    fault = only_fault(tmp_path, *four, "actor.ep=8")
    assert fault.key == "actor.ep" and "does not divide the 4 ranks" in fault.reason and "1, 2 or 4" in fault.cure
    fault = only_fault(tmp_path, model, "cluster.n_gpus_per_node=6", "actor.ep=3")
    assert "does not divide the 8 experts" in fault.reason and fault.cure == "use 1, 2, 4 or 8"
    fault = only_fault(tmp_path, *four, "actor.tp=2")
    assert fault.key == "actor.sequence_parallel" and "Megatron-Core" in fault.reason
    fault = only_fault(tmp_path, *four, "actor.etp=2")
    assert fault.key == "actor.etp" and "wrong ranks" in fault.reason
    fault = only_fault(tmp_path, *four, "actor.ep=2", "actor.etp=5", "cluster.n_gpus_per_node=10")
    assert fault.key == "actor.etp" and "inner size 96" in fault.reason
    cfg = load(tmp_path, *four, "actor.ep=2", "actor.etp=2", "actor.tp=2", "actor.sequence_parallel=true")
    assert (cfg.dp_size, cfg.actor.expert_tp) == (2, 2)


def test_head_dim_that_vllm_lacks(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "thin", num_attention_heads=8)
    fault = only_fault(tmp_path, f"model.path={folder}")
    assert "no attention kernels for head_dim 16" in fault.reason and "32, 64, 80" in fault.cure
    load(tmp_path, f"model.path={folder}", "rollout.name=hf")
    load(tmp_path, f"model.path={folder}", "algorithm.name=sft")


def test_latent_attention_that_vllm_lacks(tmp_path: Path) -> None:
    def folder(name: str, **changes: Any) -> str:
        named = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "use_sliding_window": None}
        fields = FAMILY_FIELDS["deepseek_v3"][1] | named | changes
        return f"model.path={make_model(tmp_path / name, **fields)}"

    cpu = "cluster.device=cpu"
    load(tmp_path, folder("right"), cpu)
    fault = only_fault(tmp_path, folder("plain", rope_parameters={"rope_theta": 777.0}), cpu)
    assert "RoPE of type default wrong on CPUs" in fault.reason and "rollout.name=hf" in fault.cure
    load(tmp_path, folder("plain", rope_parameters={"rope_theta": 777.0}), cpu, "rollout.name=hf")
    small = folder("small", kv_lora_rank=256)
    assert "320 numbers on CPUs" in only_fault(tmp_path, small, cpu).reason
    load(tmp_path, small, "cluster.device=cuda")


def test_routers_that_vllm_has_in_float32_beside_bfloat16(tmp_path: Path) -> None:
    named = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "use_sliding_window": None}
    folder = f"model.path={make_model(tmp_path / 'glm', **(FAMILY_FIELDS['glm4_moe'][1] | named))}"
    load(tmp_path, folder)
    mixed = (folder, "model.dtype=float32", "rollout.dtype=bfloat16")
    fault = only_fault(tmp_path, *mixed)
    assert fault.key == "rollout.dtype" and "Glm4MoeForCausalLM in float32" in fault.reason
    load(tmp_path, *mixed, "rollout.weight_sync=full")
    load(tmp_path, "model.dtype=float32", "rollout.dtype=bfloat16")


def test_sequences_beyond_the_positions_of_the_model(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "data.max_prompt_length=200", "data.max_response_length=57")
    assert fault.key == "data.max_response_length" and "257 tokens, and the model knows 256" in fault.reason
    load(tmp_path, "data.max_prompt_length=200", "data.max_response_length=56")
    assert only_fault(tmp_path, "rollout.max_model_len=257").key == "rollout.max_model_len"


def test_a_reference_must_be_the_same_model(tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", num_hidden_layers=2, rope_parameters=None, rope_theta=5.0)
    fault = only_fault(tmp_path, f"ref.path={other}", "actor.use_kl_loss=true")
    assert fault.key == "ref.path"
    assert "num_layers 2 (actor: 3), rope_theta 5.0 (actor: 10000.0)" in fault.reason
    empty = make_model(tmp_path / "weightless", weights=False)
    assert "neither model.safetensors" in only_fault(tmp_path, f"ref.path={empty}", "actor.use_kl_loss=true").reason
    assert only_fault(tmp_path, "ref.path=absent", "actor.use_kl_loss=true").key == "ref.path"
