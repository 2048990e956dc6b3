"""What an engine can share with the trainer: decided by tables alone."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_rl.engines import ENGINES
from megatron_rl.models import FAMILIES
from megatron_rl.models.engine import engine_params
from megatron_rl.models.rules import megatron_params
from megatron_rl.models.shape import ModelShape
from megatron_rl.reshard.alias import Sharing, find_sharing, sharing_off

SHAPE = ModelShape(
    architecture="Qwen2ForCausalLM",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    vocab_size=128,
    tie_word_embeddings=True,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=64,
    initializer_range=0.02,
)
MOE = dataclasses.replace(SHAPE, architecture="MixtralForCausalLM", num_experts=4, num_experts_per_tok=2)


def _sharing(shape: ModelShape, *, tp: int, engine_tp: int, rank: int = 0, pp: int = 1, stage: int = 0) -> Sharing:
    family = FAMILIES[shape.architecture]
    per_stage = shape.num_layers // pp
    trained = megatron_params(
        shape,
        family,
        tp=tp,
        tp_rank=rank % tp,
        layers=range(stage * per_stage, (stage + 1) * per_stage),
        pre_process=stage == 0,
        post_process=stage == pp - 1,
    )
    needed = engine_params(shape, family, tp=engine_tp, tp_rank=rank % engine_tp)
    return find_sharing(list(needed), list(trained))


@pytest.mark.parametrize("tp", [1, 2])
def test_all_but_qkv_is_shared_where_layouts_agree(tp: int) -> None:
    shape = dataclasses.replace(SHAPE, num_heads=8, head_dim=4, num_kv_heads=4)
    sharing = _sharing(shape, tp=tp, engine_tp=tp, rank=tp - 1)
    fused = {f"model.layers.{i}.self_attn.qkv_proj.{leaf}" for i in range(2) for leaf in ("weight", "bias")}
    assert set(sharing.copied) == fused
    assert set(sharing.copied.values()) == {"has the trainer's rows in another order"}
    assert sharing.shared["model.layers.1.mlp.gate_up_proj.weight"] == "decoder.layers.1.mlp.linear_fc1.weight"
    assert sharing.shared["model.embed_tokens.weight"] == "embedding.word_embeddings.weight"


def test_everything_is_shared_where_a_rank_has_one_kv_head() -> None:
    """One group of queries, key and value is in the same order on both sides: nothing is left to move."""
    assert not _sharing(SHAPE, tp=2, engine_tp=2, rank=1).copied
    assert not _sharing(dataclasses.replace(SHAPE, num_kv_heads=1), tp=1, engine_tp=1).copied


def test_norms_alone_are_shared_where_tp_differs() -> None:
    sharing = _sharing(SHAPE, tp=2, engine_tp=1)
    assert {name.split(".")[-2] for name in sharing.shared} == {"input_layernorm", "post_attention_layernorm", "norm"}
    assert sharing.copied["model.layers.0.mlp.gate_up_proj.weight"] == "is not one trained parameter of this rank"


def test_layers_of_other_stages_are_copied_and_say_so() -> None:
    sharing = _sharing(SHAPE, tp=1, engine_tp=1, pp=2, stage=1)
    assert sharing.copied["model.layers.0.mlp.down_proj.weight"] == "some of its values are on other ranks"
    assert sharing.shared["model.layers.1.mlp.down_proj.weight"] == "decoder.layers.0.mlp.linear_fc2.weight"
    assert sharing.shared["model.embed_tokens.weight"] == "output_layer.weight", "a tied stage's copy of the embedding"


def test_what_the_engine_has_in_float32_is_shared_with_a_trainer_of_float32_alone() -> None:
    shape = dataclasses.replace(MOE, architecture="Glm4MoeForCausalLM", shared_ffn_size=48)
    family = FAMILIES[shape.architecture]
    trained = list(
        megatron_params(shape, family, tp=1, tp_rank=0, layers=range(2), pre_process=True, post_process=True)
    )
    needed = list(engine_params(shape, family, tp=1, tp_rank=0))
    routers = {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)}
    assert {param.name for param in needed if param.float32} == routers
    assert find_sharing(needed, trained).shared.keys() >= routers
    half = find_sharing(needed, trained, half=True)
    assert {name for name, why in half.copied.items() if why.startswith("is float32")} == routers


def test_a_padded_vocabulary_is_shared_only_with_the_same_padding() -> None:
    odd = dataclasses.replace(SHAPE, vocab_size=100, tie_word_embeddings=False)
    sharing = _sharing(odd, tp=1, engine_tp=1)
    reason = "has 128 rows with padding, the trainer's embedding.word_embeddings.weight 100"
    assert sharing.copied["model.embed_tokens.weight"] == reason
    assert "lm_head.weight" in sharing.copied
    assert "lm_head.weight" in _sharing(dataclasses.replace(odd, vocab_size=128), tp=2, engine_tp=2).shared


def test_experts_and_their_router_are_shared() -> None:
    sharing = _sharing(MOE, tp=1, engine_tp=1)
    names = {name: name for name in sharing.shared if "block_sparse_moe" in name}
    assert {name.rpartition("block_sparse_moe.")[2] for name in names} == {
        "gate.weight", "experts.w13_weight", "experts.w2_weight",
    }  # fmt: skip
    assert sharing.shared["model.layers.0.block_sparse_moe.gate.weight"] == "decoder.layers.0.mlp.router.weight"
    first = "decoder.layers.0.mlp.experts.linear_fc1.weight"
    assert sharing.shared["model.layers.0.block_sparse_moe.experts.w13_weight"] == first


def test_experts_are_copied_where_the_engine_splits_each_and_the_trainer_deals_them() -> None:
    family = FAMILIES[MOE.architecture]
    for ep, shared in ((2, True), (1, False)):
        engine = list(engine_params(MOE, family, tp=2, tp_rank=1, ep=ep, ep_rank=1 % ep))
        trainer = list(
            megatron_params(
                MOE, family, tp=2, tp_rank=1, layers=range(2), pre_process=True, post_process=True, ep=2, ep_rank=1
            )
        )
        sharing = find_sharing(engine, trainer)
        experts = [name for name in (sharing.shared if shared else sharing.copied) if ".experts." in name]
        assert len(experts) == 4, ep


def test_no_trained_parameter_is_the_memory_of_two() -> None:
    for shape in (SHAPE, MOE, dataclasses.replace(SHAPE, tie_word_embeddings=False)):
        shared = list(_sharing(shape, tp=2, engine_tp=2).shared.values())
        assert len(shared) == len(set(shared))


def test_reasons_to_share_nothing() -> None:
    def off(**changes: object) -> str | None:
        values: dict[str, object] = {
            "wanted": True,
            "engine": ENGINES["vllm"],
            "dtypes": ("bfloat16", "bfloat16"),
            "params_leave": False,
        }
        return sharing_off(**(values | changes))  # type: ignore[arg-type]

    assert off() is None
    assert "rollout.share_weights is off" in str(off(wanted=False))
    assert "engine hf keeps" in str(off(engine=ENGINES["hf"]))
    assert "are float32, the engine's bfloat16" in str(off(dtypes=("float32", "bfloat16")))
    assert "actor.param_offload" in str(off(params_leave=True))
    needed = list(engine_params(SHAPE, FAMILIES[SHAPE.architecture], tp=1, tp_rank=0))
    sharing = find_sharing(needed, needed, off(wanted=False))
    assert not sharing.shared and set(sharing.copied) == {param.name for param in needed}
