"""What passes through the controller in a step: facts of sequences, and no tokens."""

from __future__ import annotations

from benchmarks.controller import measure

MOST_BYTES = 600
"""Of a sample, in all calls and answers of a GRPO step with a reference and several mini-batches (415 when written)."""


def test_what_the_controller_sends_and_gets_of_a_sample_is_bounded_whatever_its_length() -> None:
    short, long = (measure(prompts=64, n=16, tokens=tokens, dp=16) for tokens in (64, 4096))
    assert long.tokens > 32 * short.tokens
    assert long.bytes_a_sample < MOST_BYTES
    # Longer sequences take more micro-batches to name, and nothing else.
    assert long.bytes_a_sample < 1.5 * short.bytes_a_sample
    # A few numbers a sample are held; the tokens alone would be 25 MB.
    assert long.peak_bytes < 20_000_000
