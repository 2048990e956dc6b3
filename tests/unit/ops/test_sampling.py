"""Draws by seed and position: the generator is Philox, draws follow the distribution, and rows do not matter."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.ops.sampling import TILE, philox, sample, waiting_times


def _words(counter: tuple[int, int], key: tuple[int, int], high: int) -> list[int]:
    given = [torch.tensor([value]) for value in (*counter, *key)]
    return [int(word) for word in philox((given[0], given[1]), (given[2], given[3]), high)]


def test_philox_is_that_of_the_paper() -> None:
    """Known answers of Random123: philox 4x32, 10 rounds."""
    ones = 0xFFFFFFFF
    assert _words((0, 0), (0, 0), 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert _words((ones, ones), (ones, ones), ones) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_distribution_and_log_probabilities_are_its(temperature: float) -> None:
    """Counts of 40,000 draws over seeds, and over positions, within 4.5 standard deviations."""
    draws = 40_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 2.5, -6.0])
    wanted = (logits / temperature).log_softmax(0)
    zeros, counts = torch.zeros(draws, dtype=torch.int64), torch.arange(draws)
    for seeds, positions in ((counts, zeros), (zeros + 7, counts)):
        tokens, logprobs = sample(logits.expand(draws, -1), temperature, seeds, positions)
        assert torch.allclose(logprobs, wanted[tokens], atol=1e-6)
        expected = draws * wanted.exp()
        counted = torch.bincount(tokens, minlength=len(logits))
        assert ((counted - expected).abs() < 4.5 * expected.sqrt() + 1).all(), (counted, expected)


def test_a_draw_depends_on_its_row_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, TILE + 300, generator=generator)
    seeds, positions = torch.tensor([1, 1, -5, 2**62, 3, 3]), torch.tensor([0, 1, 0, 9, 4, 4])
    tokens, logprobs = sample(logits, 1.0, seeds, positions)
    order = torch.tensor([3, 0, 5, 2])
    again, values = sample(logits[order], 1.0, seeds[order], positions[order])
    assert torch.equal(again, tokens[order]) and torch.equal(values, logprobs[order])
    times = waiting_times(seeds, positions, TILE + 300)
    assert torch.equal(times[4], times[5]), "equal seeds and positions"
    assert all(not torch.isclose(times[i], times[j]).any() or i + j == 9 for i in range(6) for j in range(i))
    assert (times > 0).all() and abs(float(times[:5].mean()) - 1) < 0.05


def test_greedy_takes_the_first_of_the_largest() -> None:
    tokens, logprobs = sample(torch.tensor([[0.0, 3.0, 3.0]]), 0.0, torch.tensor([1]), torch.tensor([0]))
    assert tokens.tolist() == [1]
    assert torch.allclose(logprobs, torch.tensor([0.0, 3.0, 3.0]).log_softmax(0)[1:2])
