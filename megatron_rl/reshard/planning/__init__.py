"""The estimates behind `megatron-rl plan`."""
