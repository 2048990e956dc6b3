"""model.lora: what is refused, and verl's keys of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from megatron_rl.config.checks.lora import adapters_of
from megatron_rl.config.load import run_schema
from megatron_rl.config.sections.lora import LoraConfig
from megatron_rl.config.text.reader import Entry
from megatron_rl.config.verl import translate
from megatron_rl.models.config_json import read_model_shape
from tests.helpers.config import faults, make_model

LORA = "model.lora.rank=8"
NAMES = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"


def found(folder: Path, *overrides: str) -> dict[str, str]:
    return {one.key: f"{one.reason} -- {one.cure}" for one in faults(folder, *overrides)}


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["model.lora.path=/adapter"], "model.lora.path", "set model.lora.rank to the adapter's rank"),
        ([LORA, "model.init=random"], "model.init", "write them first"),
        ([LORA, "model.lora.target_modules=[q_prj]"], "model.lora.target_modules", f"mean q_proj? there are: {NAMES}"),
        ([LORA, "model.lora.target_modules=[lm_head]"], "model.lora.target_modules", "is called so"),
        ([LORA, "model.lora.target_modules=[all-linear,q_proj]"], "model.lora.target_modules", "keep one"),
        ([LORA, "model.lora.exclude_modules=[wq]"], "model.lora.exclude_modules", "is called so"),
        ([LORA, "model.lora.target_modules=q_proj", "model.lora.exclude_modules=q_proj"], "model.lora.target_modules",
         "nothing would be trained"),
        ([LORA, "model.lora.sync=adapter", "rollout.name=hf"], "model.lora.sync", "the engine hf holds no adapters"),
        ([LORA, "model.lora.sync=adapter", "rollout.weight_sync=full"], "model.lora.sync", "whole weights"),
        (["model.lora.rank=1024", "model.lora.sync=adapter"], "model.lora.rank", "rank 512 at most"),
        ([LORA, "model.lora.path=/no/such"], "model.lora.path", "there is no adapter_config.json"),
        (["model.lora.rank=-1"], "model.lora.rank", ""),
        ([LORA, "model.lora.dropout=1.0"], "model.lora.dropout", ""),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, overrides: list[str], key: str, words: str) -> None:
    wrong = found(tmp_path, *overrides)
    assert list(wrong) == [key], wrong
    assert words in wrong[key]


def test_engines_of_models_with_experts_get_merged_weights(tmp_path: Path) -> None:
    model = make_model(
        tmp_path / "moe",
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        norm_topk_prob=True,
        mlp_only_layers=[],
        decoder_sparse_step=1,
    )
    wrong = found(tmp_path, f"model.path={model}", LORA, "model.lora.sync=adapter")
    assert "kernels of its own" in wrong["model.lora.sync"]
    assert (
        "experts and routers have none"
        in found(tmp_path, f"model.path={model}", LORA, "model.lora.target_modules=gate_proj")[
            "model.lora.target_modules"
        ]
    )


def test_all_linear_is_a_name_and_no_list_of_letters(tmp_path: Path) -> None:
    shape = read_model_shape(make_model(tmp_path / "model"))
    assert adapters_of(LoraConfig(), shape) is None
    every = adapters_of(LoraConfig(rank=4, target_modules=["all-linear"], exclude_modules=["down_proj"]), shape)
    assert every is not None and every.targets == frozenset(NAMES.split(", ")) - {"down_proj"}
    one = adapters_of(TypeAdapter(LoraConfig).validate_python({"rank": 4, "target_modules": "q_proj"}), shape)
    assert one is not None and one.targets == {"q_proj"}


def test_verls_keys() -> None:
    model = "actor_rollout_ref.model."
    fsdp = {"lora_rank": 16, "lora_alpha": 32, "target_modules": "all-linear", "exclude_modules": None}
    assert placed({model + key: value for key, value in fsdp.items()}) == {
        "model.lora.rank": 16, "model.lora.alpha": 32, "model.lora.target_modules": "all-linear",
    }  # fmt: skip
    megatron = {
        "rank": 8,
        "target_modules": ["linear_qkv", "linear_fc2"],
        "merge": True,
        "lora_A_init_method": "xavier",
    }
    assert placed({f"{model}lora.{key}": value for key, value in megatron.items()}) == {
        "model.lora.rank": 8, "model.lora.alpha": 32, "model.lora.sync": "merged",
        "model.lora.target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"],
    }  # fmt: skip
    assert placed({model + "lora_rank": 0, model + "target_modules": "all-linear"}) == {}


def placed(tree: dict[str, object]) -> dict[str, object]:
    entries = [Entry(key, value, "in verl.yaml", 0) for key, value in tree.items()]
    done = translate(entries, run_schema())
    assert done.faults == []
    return {one.key: one.value for one in done.entries if one.key.startswith("model.lora.")}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora.dropout_position", "post"),
        ("lora.type", "dora"),
        ("target_parameters", ["x"]),
        ("lora.lora_B_init_method", "normal"),
    ],
)
def test_what_verl_can_and_is_not_offered(key: str, value: object) -> None:
    model = "actor_rollout_ref.model."
    on = {model + "lora_rank": 8, model + "lora.rank": 8, model + "lora.alpha": 16, model + key: value}
    done = translate([Entry(name, one, "in verl.yaml", 0) for name, one in on.items()], run_schema())
    assert [fault.key for fault in done.faults] == [model + key]
