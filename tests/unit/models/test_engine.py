"""The table of an engine's parameters, against the shapes of real vLLM engines and the tensors they come from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import ReshardError
from megatron_rl.models import FAMILIES
from megatron_rl.models.engine import engine_params, engine_tp_faults, live_params, whole_params
from megatron_rl.models.rules import LocalParam, hf_shapes
from megatron_rl.models.shape import ModelShape
from megatron_rl.reshard.plan import Shard
from tests.helpers.reshard_cases import QUIET, built, hf_arrays, shape_of
from tests.helpers.tiling import REPLICATED

ROOT = Path(__file__).resolve().parents[3]
LAYER = "model.layers.0."


def model(architecture: str, tied: bool = False, ffn: int = 96) -> ModelShape:
    return shape_of(
        architecture, layers=1, heads=2, kv=1, head_dim=32, hidden=64, ffn=ffn, vocab=100, tied=tied, experts=4
    )


def table(shape: ModelShape, tp: int = 1, tp_rank: int = 0, ep: int = 1, ep_rank: int = 0) -> tuple[LocalParam, ...]:
    family = FAMILIES[shape.architecture]
    return tuple(engine_params(shape, family, tp=tp, tp_rank=tp_rank, ep=ep, ep_rank=ep_rank))


def attention(tp: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{LAYER}self_attn.qkv_proj.weight": (64 // tp + 64, 64),
        f"{LAYER}self_attn.o_proj.weight": (64, 64 // tp),
        f"{LAYER}input_layernorm.weight": (64,),
        f"{LAYER}post_attention_layernorm.weight": (64,),
        "model.norm.weight": (64,),
        "model.embed_tokens.weight": (128 // tp, 64),
    }


HEAD = {"lm_head.weight": (128, 64)}
MLP = {f"{LAYER}mlp.gate_up_proj.weight": (192, 64), f"{LAYER}mlp.down_proj.weight": (64, 96)}
HEAD_NORMS = {f"{LAYER}self_attn.q_norm.weight": (32,), f"{LAYER}self_attn.k_norm.weight": (32,)}
QWEN_EXPERTS = f"{LAYER}mlp.experts.routed_experts."
MIXTRAL_EXPERTS = f"{LAYER}block_sparse_moe.experts.routed_experts."

# As read from engines of vLLM 0.32's CPU build: (shape, tp, tp rank, ep), the live parameters.
LIVE = [
    (model("LlamaForCausalLM"), 1, 0, 1, {**attention(1), **MLP, **HEAD}),
    (model("Qwen2ForCausalLM", tied=True), 1, 0, 1, {**attention(1), **MLP, f"{LAYER}self_attn.qkv_proj.bias": (128,)}),
    (
        model("Qwen2ForCausalLM", tied=True), 2, 1, 1,
        {
            **attention(2), f"{LAYER}self_attn.qkv_proj.bias": (96,), f"{LAYER}mlp.gate_up_proj.weight": (96, 64),
            f"{LAYER}mlp.down_proj.weight": (64, 48),
        },
    ),
    (model("Qwen3ForCausalLM"), 1, 0, 1, {**attention(1), **MLP, **HEAD_NORMS, **HEAD}),
    (
        model("Qwen3MoeForCausalLM", ffn=32), 1, 0, 1,
        {
            **attention(1), **HEAD_NORMS, **HEAD, f"{LAYER}mlp.gate.weight": (4, 64),
            f"{QWEN_EXPERTS}w13_weight": (4, 64, 64), f"{QWEN_EXPERTS}w2_weight": (4, 64, 32),
        },
    ),
    (
        model("Qwen3MoeForCausalLM", ffn=32), 2, 1, 2,
        {
            **attention(2), **HEAD_NORMS, "lm_head.weight": (64, 64), f"{LAYER}mlp.gate.weight": (4, 64),
            f"{QWEN_EXPERTS}w13_weight": (2, 64, 64), f"{QWEN_EXPERTS}w2_weight": (2, 64, 32),
        },
    ),
    (
        model("MixtralForCausalLM"), 1, 0, 1,
        {
            **attention(1), **HEAD, f"{LAYER}block_sparse_moe.gate.weight": (4, 64),
            f"{MIXTRAL_EXPERTS}w13_weight": (4, 192, 64), f"{MIXTRAL_EXPERTS}w2_weight": (4, 64, 96),
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "tp", "tp_rank", "ep", "live"), LIVE)
def test_names_and_shapes_are_those_of_live_engines(
    shape: ModelShape, tp: int, tp_rank: int, ep: int, live: dict[str, tuple[int, ...]]
) -> None:
    params = table(shape, tp, tp_rank, ep, tp_rank if ep > 1 else 0)
    assert {param.name: param.shape for param in live_params(params, live)} == live
    # Before vLLM 0.32 the stacks of experts have shorter names.
    older = {name.replace("routed_experts.", ""): size for name, size in live.items()}
    assert [param.name for param in live_params(params, older)] == [param.name for param in params]


def test_a_surplus_a_lacking_and_a_misshaped_parameter_are_each_named() -> None:
    params = table(model("LlamaForCausalLM"))
    live = {param.name: param.shape for param in params}
    live["lm_head.weight"] = (64, 64)
    live["model.vision.weight"] = (3,)
    del live["model.norm.weight"]
    with pytest.raises(ReshardError) as caught:
        live_params(params, live)
    for text in (
        "the engine lacks model.norm.weight",
        "lm_head.weight is [64, 64], the table says [128, 64]",
        "model.vision.weight is in no table",
    ):
        assert text in str(caught.value)


def test_tables_say_what_the_docstring_says() -> None:
    shape = shape_of(heads=8, kv=2, head_dim=8, hidden=64, layers=1)
    qkv = next(param for param in table(shape, tp=4, tp_rank=3) if param.name.endswith("qkv_proj.weight"))
    rows = [(block.hf_name.rpartition("self_attn.")[2], block.rows) for block in qkv.blocks]
    assert rows == [("q_proj.weight", (48, 64)), ("k_proj.weight", (8, 16)), ("v_proj.weight", (8, 16))]
    shape = shape_of("Qwen3MoeForCausalLM", ffn=24, hidden=16, experts=8, layers=1)
    stack = next(param for param in table(shape, tp=2, tp_rank=1) if param.name.endswith("experts.w13_weight"))
    assert stack.shape == (8, 24, 16)
    assert [(block.hf_name.rpartition("experts.")[2], block.rows) for block in stack.blocks[:3]] == [
        ("0.gate_proj.weight", (12, 24)), ("0.up_proj.weight", (12, 24)), ("1.gate_proj.weight", (12, 24)),
    ]  # fmt: skip


def test_64_query_and_2_kv_heads_on_8_ranks() -> None:
    """W3's named case: each KV head is whole on four ranks."""
    shape = shape_of(heads=64, kv=2, head_dim=4, hidden=32, ffn=64)
    for rank in range(8):
        qkv = next(param for param in table(shape, tp=8, tp_rank=rank) if "qkv" in param.name)
        assert qkv.shape == ((8 + 2) * 4, 32)
        assert [block.rows for block in qkv.blocks] == [
            (32 * rank, 32 * rank + 32),
            *[(4 * (rank // 4), 4 * (rank // 4) + 4)] * 2,
        ]


@settings(QUIET, max_examples=30)
@given(
    architecture=st.sampled_from(sorted(FAMILIES)),
    tp=st.sampled_from([1, 2, 4, 8]),
    kv=st.sampled_from([1, 2, 4, 8]),
    deal=st.booleans(),
    tied=st.booleans(),
    vocab=st.integers(60, 140),
)
def test_ranks_of_an_engine_hold_every_number_and_split_ones_once(
    architecture: str, tp: int, kv: int, deal: bool, tied: bool, vocab: int
) -> None:
    shape = shape_of(architecture, heads=8, kv=kv, vocab=vocab, tied=tied, layers=1, experts=8)
    ep = tp if deal and shape.num_experts else 1
    hf = hf_arrays(shape)
    counts = {name: np.zeros(values.size, np.int64) for name, values in hf.items()}
    first = {name: int(values.min()) for name, values in hf.items()}
    for rank in range(tp):
        params = table(shape, tp, rank, ep, rank if ep > 1 else 0)
        assert [param.name for param in params] == [param.name for param in table(shape, tp, 0, ep, 0)]
        local = built([Shard(rank, params)], hf)[id(params)]
        for param in params:
            assert local[param.name].size == np.prod(param.shape)
            numbers = local[param.name].ravel()
            for name in {block.hf_name for block in param.blocks}:
                mine = numbers[(numbers >= first[name]) & (numbers < first[name] + counts[name].size)]
                np.add.at(counts[name], mine - first[name], 1)
    for name, count in counts.items():
        copies = tp if name.endswith(REPLICATED) else 1
        if ".k_proj." in name or ".v_proj." in name:
            copies = max(1, tp // kv)
        assert (count == copies).all(), (name, set(count))
    assert ("lm_head.weight" in counts) is not tied


def test_what_vllm_cannot_split_is_refused_with_every_reason() -> None:
    shape = shape_of(heads=12, kv=2, ffn=10, vocab=70)
    faults = engine_tp_faults(shape, 8, 2)
    assert [text.split()[0] for text in faults] == ["12", "inner", "0"]
    with pytest.raises(
        ReshardError, match=r"tp 3, ep 1 cannot hold LlamaForCausalLM: 2 KV heads are neither .* 10 does"
    ):
        table(shape, tp=3)
    assert not engine_tp_faults(shape_of(heads=64, kv=2, ffn=64), 8)


def test_an_engine_of_whole_tensors_has_the_hf_tensors() -> None:
    shape = model("MixtralForCausalLM", tied=True)
    family = FAMILIES[shape.architecture]
    params = tuple(whole_params(shape, family))
    assert {param.name: param.shape for param in params} == hf_shapes(shape, family)
    hf = hf_arrays(shape)
    assert all(np.array_equal(values, hf[name]) for name, values in built([Shard(0, params)], hf)[id(params)].items())


PROBE = """
import sys
import vllm._custom_ops as ops
ops._supports_onednn = False
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as experts
experts.UnquantizedFusedMoEMethod.process_weights_after_loading = lambda self, layer: None
import numpy as np, torch
from vllm import LLM
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models import FAMILIES
from megatron_rl.models.engine import engine_params, live_params
from megatron_rl.reshard.plan import Shard
from tests.helpers.reshard_cases import QUIET, built, hf_arrays
folder = sys.argv[1]
llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
          max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes=2**26, gpu_memory_utilization=0.02)
engine = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
shape = read_model_shape(folder)
hf = hf_arrays(shape)
engine.load_weights((name, torch.from_numpy(values).float()) for name, values in hf.items())
live = {name: param.detach().numpy().astype(np.int32) for name, param in engine.named_parameters()}
family = FAMILIES[shape.architecture]
params = live_params(engine_params(shape, family, tp=1, tp_rank=0), {n: v.shape for n, v in live.items()})
for name, values in built([Shard(0, params)], hf)[id(params)].items():
    rows = sum(block.num_rows for param in params if param.name == name for block in param.blocks)
    assert np.array_equal(live[name].reshape(values.shape)[:rows], values[:rows]), name
print("equal")
"""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "MixtralForCausalLM"])
def test_vllms_own_loader_puts_every_number_where_the_table_says(architecture: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    config = (
        f'{{"architectures": ["{architecture}"], "model_type": "{architecture.removesuffix("ForCausalLM").lower()}", '
        '"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, '
        '"head_dim": 32, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 512, '
        '"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "num_local_experts": 4, '
        '"num_experts_per_tok": 2, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2}'
    )
    (tmp_path / "config.json").write_text(config)
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    command = [sys.executable, "-c", PROBE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr[-3000:]
