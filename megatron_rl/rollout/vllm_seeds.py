"""Seeded samples that do not depend on how vLLM cuts prompts into steps.

A call whose prompts pass max_num_batched_tokens computes some of them in parts, and so does a request that is resumed
after it lost its place in the KV cache. Of a part vLLM draws a token like of any other request and throws it away. Its
model runner then sets the request's generator back by one draw, in a way that CPU generators do not have (an error) and
that holds on GPUs only where a row of the vocabulary is drawn in one round of the kernel. Here such a request does not
draw from its generator at all.

(vLLM's second model runner needs nothing: there a draw is a function of seed and position.)
"""

from __future__ import annotations

from typing import Any


def draw_only_what_is_kept() -> None:
    """Make vLLM's model runner leave the generator of a request alone whose sampled token is thrown away."""
    from vllm.v1.worker import gpu_model_runner

    runner: Any = gpu_model_runner.GPUModelRunner
    assert hasattr(runner, "sample_tokens"), "this vLLM build samples in a way that is not known here"
    sample_tokens = runner.sample_tokens
    if getattr(sample_tokens, "draws_only_what_is_kept", False):
        return

    def sample_kept_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        (thrown_away,) = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()
        resting = {row: generators.pop(row) for row in thrown_away.tolist() if row in generators}
        try:
            return sample_tokens(self, *args, **kwargs)
        finally:
            generators.update(resting)

    sample_kept_tokens.draws_only_what_is_kept = True  # type: ignore[attr-defined]
    runner.sample_tokens = sample_kept_tokens
