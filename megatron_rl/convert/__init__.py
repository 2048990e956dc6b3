"""Models from one form of files to another, tensor after tensor: Hugging Face folders, Megatron's checkpoints, GGUF."""
