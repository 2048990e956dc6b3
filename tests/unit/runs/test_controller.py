"""What passes through the controller in a step: facts of sequences, and no tokens. What it does for many ranks."""

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


def test_what_the_controller_does_of_a_checkpoint_grows_with_the_ranks_and_no_faster() -> None:
    few, many = (measure(prompts=256, n=4, tokens=16, dp=dp) for dp in (64, 256))
    # A line in the list of files for each of two files a rank; the state is the same.
    a_rank = (many.checkpoint_bytes - few.checkpoint_bytes) / (256 - 64)
    assert 100 < a_rank < 300
    assert few.checkpoint_bytes < 64 * a_rank + 20_000
    # Four times the ranks, and the same samples: the work that goes with samples stays as it is.
    assert many.checkpoint_s < 4 * few.checkpoint_s + 0.1
    assert many.total_s < 3 * few.total_s + 0.1
