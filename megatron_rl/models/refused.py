"""Well-known architectures that are not computed, and why. docs/models.md has the same reasons. Torch-free."""

from __future__ import annotations

_GEMMA = (
    "its norms multiply by weight + 1 and stand after attention and MLP too, embeddings are scaled, and layers with a "
    "sliding window have another RoPE base: Megatron's local layer has no place for them"
)
REFUSED: dict[str, str] = {
    "GemmaForCausalLM": "its norms multiply by weight + 1, and embeddings are scaled",
    "Gemma2ForCausalLM": f"{_GEMMA}; logits have a bound",
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma3ForConditionalGeneration": f"images are not supported, and of its text model {_GEMMA}",
    "Phi3ForCausalLM": "its RoPE of type longrope has other frequencies where a batch is longer",
    "Glm4MoeForCausalLM": "vLLM keeps its router in float32 in every precision, which a sync does not write yet",
    "GptOssForCausalLM": "attention sinks, biases of experts and their clamped activation are not trained here",
    **dict.fromkeys(
        ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        "layers of linear attention (Gated DeltaNet) are not trained here",
    ),
    "DeepseekV32ForCausalLM": "attention to tokens that an index picks is not trained here",
    "Ministral3ForCausalLM": "its queries are scaled by their position",
}
"""HF architecture -> the reason."""
