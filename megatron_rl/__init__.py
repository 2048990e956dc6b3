"""Post-training of large language models: SFT and GRPO with Megatron-Core actors and vLLM rollouts."""

__version__ = "0.1.0"
