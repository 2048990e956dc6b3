"""transformers' models, sampled token by token: slow, and the reference for the others."""

from __future__ import annotations

from megatron_rl.engines.record import Engine

ENGINE = Engine(
    name="hf",
    implementation="megatron_rl.rollout.hf_engine:HfEngine",
    parameters="checkpoint",
    returns_experts=True,
)
