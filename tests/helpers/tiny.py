"""Tiny models of each family, as transformers builds them, for comparison with this package's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megatron_rl.types import TrainBatch
from tests.helpers.odd_configs import ABSENT, laid_over

YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 777.0, "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 4.0,
    "beta_slow": 1.0,
}  # fmt: skip
# vLLM's kernel for CPUs takes these two sizes of latent attention, and no others: kv_lora_rank and qk_rope_head_dim.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 48, "n_shared_experts": 2,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1, "kv_lora_rank": 512, "qk_nope_head_dim": 24, "qk_rope_head_dim": 64, "v_head_dim": 20,
    "rms_norm_eps": 3e-4,
}  # fmt: skip
# Family -> its name in transformers, and the fields that it has besides the common ones.
FAMILY_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 11}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
            "intermediate_size": 96,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3_moe_plain": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": False,
            "mlp_only_layers": [2],
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        LATENT
        | {
            "topk_method": "group_limited_greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "q_lora_rank": None,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        LATENT
        | {
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "q_lora_rank": 40,
            "num_nextn_predict_layers": 0,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "moonlight": (
        "DeepseekV3",
        LATENT
        | {
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
            "rope_theta": 50000.0,
        },
    ),
    # transformers gives the embedding of pad_token_id no gradient, and Gemma has one by default.
    "gemma": ("Gemma", {"head_dim": 64, "rms_norm_eps": 3e-4, "pad_token_id": None}),
    "gemma3_text": (
        "Gemma3",
        {
            "head_dim": 64,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "query_pre_attn_scalar": 40,
            "pad_token_id": None,
            "rms_norm_eps": 3e-4,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 64,
            "sliding_window": 11,
            "rope_theta": 777.0,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 64,
            "moe_intermediate_size": 48,
            "intermediate_size": 96,
            "n_shared_experts": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 0,
            "rms_norm_eps": 3e-4,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}),
}


def save_tiny(
    folder: Path, family: str = "qwen2", *, tied: bool = True, vocab: int = 128, layers: int = 4, **fields: Any
) -> str:
    """Write a small model of the family with clearly non-trivial weights (biases and norms too); returns its
    folder. fields: entries of its config that differ from those here.
    """
    import transformers

    name, own = FAMILY_FIELDS[family]
    model_of = getattr(transformers, name + "ForCausalLM")
    torch.manual_seed(1)
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 128,
        "intermediate_size": 224,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "rope_theta": 10000.0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    entries = common | own | fields
    if "layer_types" in entries:
        entries["layer_types"] = entries["layer_types"][:layers]
    config = model_of.config_class(**entries)
    model = model_of(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj_bias"):
                # Experts': large enough that gate and up projections reach their bounds.
                parameter.copy_(4.0 * torch.randn_like(parameter))
            elif name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter))
            elif parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(3.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                # Large enough to change which experts are chosen.
                buffer.copy_(0.3 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return str(folder)


def save_odd(folder: Path, family: str, changes: dict[str, Any]) -> str:
    """A small model of two layers whose config.json has the entries of a variant (tests/helpers/odd_configs.py), and
    weights of the sizes that these say: the same weights where the sizes are the same.
    """
    sizes: dict[str, Any] = {}
    if "head_dim" in changes:
        given = changes["head_dim"]
        # hidden_size / num_attention_heads
        sizes["head_dim"] = 32 if given in (None, ABSENT) else given
    tied = changes.get("tie_word_embeddings", False)
    tied = family.startswith("gemma") if tied == ABSENT else tied
    save_tiny(folder, family, layers=2, tied=tied, **sizes)
    path = folder / "config.json"
    path.write_text(json.dumps(laid_over(json.loads(path.read_text()), changes)))
    return str(folder)


def load_hf_model(folder: str) -> Any:
    """The transformers model in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def random_batch(seed: int, lengths: tuple[int, ...], vocab: int, prompt: int = 3) -> TrainBatch:
    """Sequences of the given lengths; the first `prompt` tokens of each are not trained on; token-mean weights."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = torch.ones(total, dtype=torch.bool)
    start = 0
    for length in lengths:
        mask[start : start + prompt] = False
        start += length
    return TrainBatch(
        tokens=torch.randint(0, vocab, (total,), generator=generator),
        seq_lens=lengths,
        loss_mask=mask,
        columns={"loss_weights": mask.float() / mask.sum()},
    )


def hf_logprobs(model: Any, batch: TrainBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] log-probabilities and entropies by transformers, one sequence at a time, 0 off the mask; differentiable."""
    logprobs, entropies = [], []
    start = 0
    for length in batch.seq_lens:
        tokens = batch.tokens[start : start + length]
        log_p = torch.log_softmax(model(tokens[None]).logits[0].float() / temperature, dim=-1)[:-1]
        zero = log_p.new_zeros(1)
        logprobs.append(torch.cat([zero, log_p.gather(1, tokens[1:, None]).squeeze(1)]))
        entropies.append(torch.cat([zero, -(log_p.exp() * log_p).sum(-1)]))
        start += length
    mask = batch.loss_mask
    return torch.cat(logprobs) * mask, torch.cat(entropies) * mask
