"""Odd config.json files: entries laid over a small model's, by family. REFUSED name the entry that is at fault; PASSING
are the same model for transformers and for vLLM.
"""

from __future__ import annotations

from typing import Any

Variant = tuple[str, dict[str, Any]]

FULL = ["full_attention"] * 2
SLIDING = ["sliding_attention"] * 2
ABSENT = "<absent>"
"""In place of a value: the file has no such entry."""


def laid_over(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The entries of a file with those of a variant in their place."""
    return {name: value for name, value in (fields | changes).items() if value != ABSENT}


_LATENT_YARN = {"rope_type": "yarn", "rope_theta": 777.0, "factor": 4.0, "original_max_position_embeddings": 128}

_SINKS_YARN = {
    "rope_type": "yarn", "rope_theta": 777.0, "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 4.0,
    "beta_slow": 1.0,
}  # fmt: skip

REFUSED: list[Variant] = [
    # What vLLM computes in this family whatever config.json says.
    ("gpt_oss", {"rms_norm_eps": 1e-6}),
    ("gpt_oss", {"attention_bias": False}),
    ("gpt_oss", {"swiglu_limit": 6.0}),
    ("gpt_oss", {"swiglu_alpha": 1.0}),
    ("gpt_oss", {"tie_word_embeddings": True}),
    ("gpt_oss", {"layer_types": FULL}),
    ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("gpt_oss", {"sliding_window": None}),
    ("gpt_oss", {"use_sliding_window": False}),
    ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}),
    ("gpt_oss", {"rope_parameters": _SINKS_YARN | {"attention_factor": 1.0}}),
    ("gpt_oss", {"rope_parameters": {name: _SINKS_YARN[name] for name in _SINKS_YARN if name != "beta_slow"}}),
    ("gpt_oss", {"experts_per_token": 2}),
    ("gpt_oss", {"head_dim": None}),
    ("gpt_oss", {"norm_topk_prob": False}),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}),
    # Entries that vLLM or transformers honours in this family.
    ("llama", {"sliding_window": 16}),
    ("llama", {"sliding_window": 0}),
    ("llama", {"use_sliding_window": True}),
    ("llama", {"logit_scale": 0.5}),
    ("llama", {"logit_scale": None}),
    ("llama", {"is_causal": False}),
    ("llama", {"is_causal": None}),
    ("llama", {"bias": True}),
    ("llama", {"qkv_bias": True}),
    ("llama", {"qk_norm": True}),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"hidden_act": None}),
    ("llama", {"attention_dropout": 0.1}),
    ("llama", {"per_layer_config": {"0": {"num_key_value_heads": 1}}}),
    ("llama", {"head_dtype": "float32"}),
    ("llama", {"attention_chunk_size": 8}),
    ("llama", {"num_experts": 4}),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}}),
    ("llama", {"rope_parameters": {"rope_type": "default", "factor": 8.0, "rope_theta": 1e4}}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}}),
    ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 8.0}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 8, "rope_theta": 1e4}}),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}}),
    (
        "qwen3",
        {"rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 16}}
        | {"original_max_position_embeddings": 32},
    ),
    ("llama", {"rope_parameters": [1e4]}),
    ("llama", {"partial_rotary_factor": 0.5}),
    ("llama", {"quantization_config": {"quant_method": "awq"}}),
    ("llama", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("llama", {"layer_types": ["full_attention"]}),
    ("llama", {"tie_word_embeddings": "false"}),
    ("llama", {"rms_norm_eps": float("inf")}),
    ("llama", {"rms_norm_eps": None}),
    ("llama", {"initializer_range": "small"}),
    ("llama", {"an_entry_of_next_year": {"depth": 3}}),
    ("qwen2", {"head_dim": None}),
    ("qwen2", {"qk_norm": True}),
    ("qwen2", {"qkv_bias": False}),
    ("qwen2", {"is_causal": False}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    ("qwen2", {"sliding_window": 0, "use_sliding_window": True, "max_window_layers": 0}),
    ("qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}),
    ("qwen2", {"max_window_layers": None, "use_sliding_window": True}),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    ("qwen2", {"use_sliding_window": None, "sliding_window": 4}),
    ("qwen2", {"use_mrope": True}),
    ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 64}}),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}),
    ("qwen3", {"is_causal": False}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3", {"use_qk_norm": False}),
    ("qwen3", {"use_sliding_window": True}),
    ("qwen3", {"attn_output_gate": True}),
    ("qwen3", {"final_logit_softcapping": 30.0}),
    ("qwen3_moe", {"layer_types": FULL, "use_sliding_window": True, "sliding_window": 8}),
    ("qwen3_moe", {"is_causal": False}),
    ("qwen3_moe", {"head_dim": None}),
    ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
    ("qwen3_moe", {"mlp_only_layers": 1}),
    ("qwen3_moe", {"decoder_sparse_step": 0}),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}),
    ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 0}),
    ("qwen2_moe", {"qkv_bias": False}),
    ("qwen3_moe", {"shared_expert_intermediate_size": 64}),
    ("qwen3_moe", {"scoring_func": "sigmoid"}),
    ("qwen3_moe", {"routed_scaling_factor": 2.5}),
    ("qwen3_moe", {"norm_topk_prob": "yes"}),
    ("qwen3_moe", {"norm_topk_prob": None}),
    ("qwen3_moe", {"num_nextn_predict_layers": 1}),
    ("mixtral", {"sliding_window": 0}),
    ("mixtral", {"sliding_window": "16"}),
    ("mixtral", {"layer_types": SLIDING, "sliding_window": 16}),
    ("mistral", {"layer_types": FULL, "sliding_window": 16}),
    ("mistral", {"layer_types": FULL, "sliding_window": None}),
    ("mistral", {"use_sliding_window": True}),
    ("mistral", {"sliding_window": 0}),
    ("mistral", {"attention_bias": True}),
    ("mixtral", {"router_jitter_noise": 0.01}),
    ("mixtral", {"norm_topk_prob": False}),
    ("mixtral", {"is_causal": False}),
    ("mixtral", {"attention_bias": True}),
    ("mixtral", {"clip_qkv": 8.0}),
    # Without these two entries vLLM would choose experts in another way than transformers.
    ("deepseek_v3", {"topk_method": "greedy"}),
    ("deepseek_v3", {"scoring_func": "softmax"}),
    ("deepseek_v3", {"rope_interleave": False}),
    ("deepseek_v3", {"num_key_value_heads": 2}),
    ("deepseek_v3", {"moe_layer_freq": 2}),
    ("deepseek_v3", {"n_group": 3}),
    ("deepseek_v3", {"topk_group": 9}),
    ("deepseek_v3", {"q_lora_rank": 0}),
    ("deepseek_v3", {"attention_bias": True}),
    ("deepseek_v3", {"num_experts_per_tok": 5}),
    ("deepseek_v3", {"index_topk": 2048}),
    ("deepseek_v3", {"rope_parameters": _LATENT_YARN | {"mscale": 0.7}}),
    ("deepseek_v3", {"rope_parameters": _LATENT_YARN | {"attention_factor": 1.0}}),
    ("deepseek_v2", {"norm_topk_prob": True}),
    ("deepseek_v2", {"topk_method": "noaux_tc"}),
    ("deepseek_v2", {"n_group": 2, "topk_method": "greedy"}),
    ("mixtral", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    ("glm4_moe", {"partial_rotary_factor": 1.5}),
    ("glm4_moe", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}),
    ("glm4_moe", {"scoring_func": "softmax"}),
    ("glm4_moe", {"use_qk_norm": None}),
    ("glm4_moe", {"attention_bias": "yes"}),
    ("glm4_moe", {"n_group": 3}),
    ("glm4_moe", {"sliding_window": 8}),
    ("glm4_moe", {"moe_layer_freq": 2}),
    ("gemma", {"use_bidirectional_attention": True}),
    ("gemma", {"hidden_activation": "gelu"}),
    ("gemma", {"hidden_act": "silu"}),
    ("gemma", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("gemma3_text", {"final_logit_softcapping": 30.0}),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}),
    ("gemma3_text", {"use_bidirectional_attention": True}),
    ("gemma3_text", {"hidden_activation": "silu"}),
    ("gemma3_text", {"sliding_window": None}),
    ("gemma3_text", {"layer_types": ["full_attention", "chunked_attention"]}),
    ("gemma3_text", {"sliding_window_pattern": 0, "layer_types": ABSENT}),
    ("gemma3_text", {"_sliding_window_pattern": 2, "layer_types": ABSENT}),
    ("gemma3_text", {"query_pre_attn_scalar": None}),
    ("gemma3_text", {"query_pre_attn_scalar": 0}),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    ("gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "default", "factor": 2.0}}}),
    ("gemma3_text", {"rope_parameters": {"full_attention": [1e4]}}),
    ("gemma3_text", {"rope_local_base_freq": 0, "rope_parameters": ABSENT}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8}, "rope_parameters": ABSENT}),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 2.5}, "rope_parameters": ABSENT}),
    ("gemma3_text", {"rope_local_base_freq": 5.0}),
    ("gemma3_text", {"rope_theta": 5.0}),
    ("gemma3_text", {"attention_bias": True}),
    ("gemma3_text", {"hidden_size": 65}),
]
"""The first entry is the one that is named."""

_PLAIN_LLAMA = {"sliding_window": None, "logit_scale": 1.0, "is_causal": True, "bias": False, "qk_norm": False}
_BASE_ABOVE = {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": None}

# Their first context is shorter than the sequences of the tests.
_SHORT = {"original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | _SHORT
YARN = {"rope_type": "yarn", "factor": 4.0} | _SHORT
LINEAR = {"type": "linear", "factor": 2.5}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
_TO_64 = {"max_position_embeddings": 64}


def _scaled(rope: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """As files of today have it: the base in the same entry."""
    return _TO_64 | {"rope_theta": ABSENT, "rope_parameters": rope | {"rope_theta": 777.0}} | changes


def _older(rope: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """As older files have it: the base at the top."""
    return _TO_64 | {"rope_theta": 5e3, "rope_scaling": rope, "rope_parameters": ABSENT} | changes


GEMMA3_OLDER: dict[str, Any] = {
    "rope_parameters": ABSENT, "rope_theta": 5e3, "rope_local_base_freq": 77.0, "layer_types": ABSENT,
    "_sliding_window_pattern": ABSENT, "sliding_window_pattern": 2, "sliding_window": 9,
    "final_logit_softcapping": None, "tie_word_embeddings": ABSENT,
}  # fmt: skip
"""As published files of Gemma 3 have it: windows by a pattern, and two bases at the top."""

SCALED = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Families that compute every kind of RoPE."""

FIRST: list[Variant] = [
    ("llama", _PLAIN_LLAMA | _older(LLAMA3) | {"head_dim": 96, "tie_word_embeddings": True}),
    (
        "qwen2",
        {"sliding_window": 4, "max_window_layers": 0, "use_sliding_window": False, "head_dim": ABSENT}
        | _older(YARN)
        | {"layer_types": None, "max_length": 64, "temperature": 0.6},
    ),
    (
        "qwen3",
        {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 9, "rms_norm_eps": 1e-2}
        | {"rope_parameters": {"rope_theta": 31.0}},
    ),
    ("mistral", {"sliding_window": 7, "rope_theta": 5e4, "rope_parameters": ABSENT, "rms_norm_eps": 1e-5}),
    (
        "qwen3_moe",
        {"norm_topk_prob": False, "head_dim": 96, "sliding_window": 4, "rms_norm_eps": ABSENT}
        | _scaled(YARN | {"mscale": 2.0, "mscale_all_dim": 0.5, "beta_fast": 4.0, "truncate": False}),
    ),
    ("mixtral", {"rope_parameters": None, "rms_norm_eps": 1e-3, "head_dim": None, "norm_topk_prob": True}),
    ("deepseek_v3", {"norm_topk_prob": False, "rms_norm_eps": 1e-2, "routed_scaling_factor": 0.6}),
    (
        "glm4_moe",
        {"rope_parameters": ABSENT, "rope_theta": 31.0, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-2}
        | {"rope_scaling": None, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
    (
        "gemma3_text",
        GEMMA3_OLDER
        | {"rope_scaling": {"rope_type": "linear", "factor": 2.5}, "rms_norm_eps": 1e-2, "query_pre_attn_scalar": 100},
    ),
    (
        "gpt_oss",
        _older(YARN | {"beta_fast": 4.0, "beta_slow": 1.0, "truncate": False})
        | {"sliding_window": 5, "layer_types": ABSENT, "experts_per_token": 3, "initial_context_length": 16},
    ),
]
"""With these the default suite starts vLLM: one of each family, or of those that are built alike."""

PASSING: list[Variant] = [
    *FIRST,
    ("llama", {"sliding_window": None, "logit_scale": 1.0, "is_causal": True, "bias": False, "qk_norm": False}),
    ("llama", {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": None}),
    ("llama", {"rms_norm_eps": 1e-3}),
    ("llama", {"torch_dtype": "bfloat16", "pretraining_tp": 2, "use_cache": False, "_name_or_path": "x/y"}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0, "factor": 1.0}}),
    ("llama", {"layer_types": FULL, "unsloth_fixed": True, "is_llama_config": True, "rope_interleaved": False}),
    ("llama", {"num_experts": 0, "quantization_config": None, "an_entry_of_next_year": None}),
    ("llama", dict.fromkeys(("head_dim", "rope_parameters", "rms_norm_eps", "tie_word_embeddings"), ABSENT)),
    ("qwen2", {"sliding_window": 4, "max_window_layers": 0, "use_sliding_window": False}),
    ("qwen2", {"tie_word_embeddings": True, "head_dim": ABSENT, "rope_theta": 33.0, "rope_parameters": ABSENT}),
    ("qwen2", {"sliding_window": 4, "layer_types": None}),
    ("qwen2", {"use_mrope": False, "qkv_bias": True, "rope_theta": 1e6, "rope_parameters": None}),
    ("qwen2", {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "max_length": 64}),
    ("qwen3", {"qk_norm": True, "sliding_window": 4, "rms_norm_eps": 1e-2}),
    ("qwen3", {"layer_types": FULL, "attn_logit_softcapping": None, "rope_parameters": {"rope_theta": 31.0}}),
    ("qwen3", {"head_dim": 96, "tie_word_embeddings": True, "rope_parameters": ABSENT, "rms_norm_eps": ABSENT}),
    ("qwen3_moe", {"decoder_sparse_step": 1, "mlp_only_layers": None, "router_aux_loss_coef": 0.9}),
    ("qwen3_moe", {"norm_topk_prob": True, "output_router_logits": True, "sliding_window": 4}),
    ("qwen3_moe", {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "scoring_func": "softmax"}),
    ("qwen3_moe", {"norm_topk_prob": False, "head_dim": 96}),
    ("qwen3_moe", dict.fromkeys(("norm_topk_prob", "rope_parameters", "rms_norm_eps", "head_dim"), ABSENT)),
    ("mixtral", {"norm_topk_prob": True, "router_jitter_noise": 0.0, "sliding_window": None}),
    ("mixtral", {"head_dim": 96, "tie_word_embeddings": True, "rope_parameters": ABSENT, "rms_norm_eps": ABSENT}),
    ("mixtral", {"rope_parameters": None, "rms_norm_eps": 1e-3, "head_dim": None, "norm_topk_prob": True}),
    *((family, _scaled(kind)) for family in SCALED for kind in (LLAMA3, YARN, LINEAR, DYNAMIC)),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": ABSENT, "head_dim": 96}),
    ("mistral", {"sliding_window": 1}),
    ("mistral", {"sliding_window": 20} | _scaled(YARN)),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": ABSENT}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "layer_types": SLIDING, "max_window_layers": 1}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": ABSENT}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
    ("mixtral", {"sliding_window": 8}),
    ("mixtral", _scaled(LLAMA3)),
    ("mixtral", _older(LINEAR)),
    ("llama", _older(YARN | {"attention_factor": 0.7})),
    ("llama", _older({"type": "yarn", "factor": 4.0}) | _SHORT),
    ("qwen2", _scaled(YARN | {"mscale": 2.0, "mscale_all_dim": 0.5, "beta_fast": 4.0, "beta_slow": 2.0})),
    ("deepseek_v3", {"n_group": 2, "topk_group": 1, "rope_parameters": {"rope_theta": 33.0, "rope_type": "default"}}),
    ("deepseek_v3", {"rope_parameters": _LATENT_YARN | {"mscale": 0.5, "mscale_all_dim": 1.0}}),
    ("deepseek_v3", {"rope_parameters": ABSENT, "rope_theta": 1e5, "rope_interleave": True, "aux_loss_alpha": 0.1}),
    (
        "qwen2_moe",
        {"rms_norm_eps": 1e-2, "use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}
        | _older(YARN | {"attention_factor": 0.7}),
    ),
    ("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": None, "rope_parameters": {"rope_theta": 33.0}}),
    ("qwen2_moe", {"tie_word_embeddings": True, "mlp_only_layers": [0], "decoder_sparse_step": 1, "qkv_bias": True}),
    ("gpt_oss", {"rope_parameters": _SINKS_YARN | {"factor": 8.0}, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}),
    ("gpt_oss", {"rope_parameters": _SINKS_YARN, "head_dim": 96}),
    ("gpt_oss", {"sliding_window": 40, "rms_norm_eps": ABSENT, "attention_bias": True}),
    ("deepseek_v2", {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-2}),
    ("deepseek_v2", {"rope_parameters": _LATENT_YARN, "routed_scaling_factor": 16.0, "moe_layer_freq": 1}),
    ("gemma3_text", GEMMA3_OLDER | {"rope_scaling": None, "rope_theta": ABSENT, "rope_local_base_freq": ABSENT}),
    ("gemma3_text", {"layer_types": ["full_attention"] * 2, "tie_word_embeddings": False}),
    ("gemma3_text", {"sliding_window": 1, "layer_types": SLIDING, "use_bidirectional_attention": False}),
    ("gemma3_text", {"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 55.0}}}),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2.5}}, "rope_theta": 44.0}),
    ("glm4_moe", {"partial_rotary_factor": ABSENT, "rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}}),
    ("glm4_moe", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}, "routed_scaling_factor": 0.6}),
    ("glm4_moe", {"num_nextn_predict_layers": 1, "rope_parameters": ABSENT, "partial_rotary_factor": 0.5}),
    ("gemma", {"rope_theta": 31.0, "rope_parameters": ABSENT, "hidden_act": "gelu", "cache_implementation": "hybrid"}),
    ("gemma", {"head_dim": 96, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}),
    ("gemma", {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}),
]
