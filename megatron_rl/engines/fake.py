"""A deterministic engine without a model, for tests of the loop."""

from __future__ import annotations

from megatron_rl.engines.record import Engine

ENGINE = Engine(
    name="fake",
    implementation="megatron_rl.rollout.fake:FakeEngine",
    parameters="none",
    stop_texts=False,
)
