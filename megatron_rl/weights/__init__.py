"""Weights in Hugging Face coordinates: readers and writers of safetensors."""
