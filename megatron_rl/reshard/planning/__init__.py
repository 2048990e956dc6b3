"""The estimates behind `megatron-rl plan`: bytes, seconds and memory of a weight sync."""
