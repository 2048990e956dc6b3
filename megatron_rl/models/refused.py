"""Well-known architectures that are not computed, and why. docs/models.md has the same reasons. Torch-free."""

from __future__ import annotations

REFUSED: dict[str, str] = {
    "Gemma2ForCausalLM": "the logits of its attention and of its head have a bound, which no kernel here computes",
    "Gemma3ForConditionalGeneration": (
        "images are not supported; save its text model alone, which is a Gemma3ForCausalLM (text_config is its config)"
    ),
    "Phi3ForCausalLM": "its RoPE of type longrope has other frequencies where a batch is longer",
    **dict.fromkeys(
        ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        "Megatron-Core's linear attention (Gated DeltaNet) needs the package flash-linear-attention, whose kernels are "
        "for GPUs alone, and refuses packed sequences without it",
    ),
    "DeepseekV32ForCausalLM": "attention to tokens that an index picks is not trained here",
    "Ministral3ForCausalLM": "its queries are scaled by their position",
}
"""HF architecture -> the reason."""
