"""Tokens drawn from rows of logits, each by its own seed, with their log-probabilities.

A draw is a function of the row's logits, its seed and the position of the token alone: neither the other rows nor the
place of the row nor how often something was drawn before changes it. Each entry of the vocabulary gets an exponential
waiting time E of rate 1, from Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011);
the entry with the largest x - log E is the sample (the Gumbel-max trick), x = logits / temperature.

Philox gives four words a call. Entry v of tile v // TILE takes word w = v % TILE // WORD of the call whose counter is
(v // TILE * WORD + v % WORD, position, 0, 0) and whose key is the seed.

On CUDA one Triton kernel reads the logits once (sampling_triton.py). Elsewhere it is the torch code below, which is
also what the kernel is tested against.
"""

from __future__ import annotations

import torch

TILE = 4096
"""Entries of the vocabulary that one program of the kernel reads. Samples depend on it: it names their random words."""
WORD = TILE // 4
_MASK = 0xFFFFFFFF
_ROUNDS = 10
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def sample(
    logits: torch.Tensor, temperature: float, seeds: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, v] in any float type; seeds [n] int64; positions [n] int64, below 2^31 -> tokens [n] int64 and their
    log softmax(logits / temperature) [n], float32.

    temperature 0 takes the largest logit, the first of several, and its log-probability at temperature 1.
    """
    if logits.is_cuda:
        from megatron_rl.ops import sampling_triton

        return sampling_triton.sample(logits, temperature, seeds, positions, WORD)
    return sample_torch(logits, temperature, seeds, positions)


def sample_torch(
    logits: torch.Tensor, temperature: float, seeds: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See sample."""
    x = logits.float()
    scores = x
    if temperature > 0:
        x = x / temperature
        scores = x - waiting_times(seeds, positions, x.shape[1]).log()
    tokens = scores.argmax(dim=1)
    return tokens, x.log_softmax(dim=1).gather(1, tokens[:, None]).squeeze(1)


def waiting_times(seeds: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """[n, size] float32, exponential of rate 1: of each entry of the vocabulary, for each row's seed and position."""
    entries = torch.arange(size, device=seeds.device)
    counters = entries // TILE * WORD + entries % WORD
    words = philox((counters[None], positions[:, None]), (seeds[:, None] & _MASK, (seeds[:, None] >> 32) & _MASK))
    which = (entries % TILE // WORD)[None, None].expand(1, *words[0].shape)
    uniform = (torch.stack(words).gather(0, which)[0].float() + 0.5) * 2.0**-32
    # -log(1 - u): the series where 1 - u would lose what small times differ by, and those decide.
    series = uniform * (1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform / 4)))
    return torch.where(uniform < 0.05, series, -(1 - uniform).log())


def philox(
    counter: tuple[torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor], high: int = 0
) -> list[torch.Tensor]:
    """The four words of Philox-4x32-10, int64 from 0 to 2^32 - 1. counter: its two low words; high: the value of the
    other two; key: its low and its high word. All int64 that broadcast.
    """
    first, second = torch.broadcast_tensors(*counter)
    words = [first, second, torch.full_like(first, high), torch.full_like(first, high)]
    low, top = key
    for _ in range(_ROUNDS):
        # int64 products wrap, which keeps their bits.
        one, other = words[0] * _FACTORS[0], words[2] * _FACTORS[1]
        words = [
            ((other >> 32) & _MASK) ^ words[1] ^ low,
            other & _MASK,
            ((one >> 32) & _MASK) ^ words[3] ^ top,
            one & _MASK,
        ]
        low, top = (low + _KEY_STEPS[0]) & _MASK, (top + _KEY_STEPS[1]) & _MASK
    return words
