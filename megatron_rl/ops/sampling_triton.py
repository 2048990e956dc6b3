"""The kernel of sampling.py: a program reads one tile of one row, and torch joins the tiles of a row."""

from __future__ import annotations

import torch

from megatron_rl.errors import MissingDependency

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingDependency("sampling on CUDA needs triton -- pip install triton") from error


def sample(
    logits: torch.Tensor, temperature: float, seeds: torch.Tensor, positions: torch.Tensor, word: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See sampling.sample. word: entries of a tile that share a word of the random numbers, sampling.WORD."""
    rows, size = logits.shape
    tiles = triton.cdiv(size, 4 * word)
    assert logits.stride(1) == 1, "logits whose rows are not contiguous"
    floats = torch.empty(4, rows, tiles, dtype=torch.float32, device=logits.device)
    index = torch.empty(rows, tiles, dtype=torch.int64, device=logits.device)
    _read_tile[rows, tiles](  # pyright: ignore[reportIndexIssue]
        logits,
        logits.stride(0),
        size,
        seeds,
        positions,
        temperature or 1.0,
        floats,
        index,
        GREEDY=temperature == 0,
        WORD=word,
        num_warps=4,
    )
    score, value, peak, total = floats
    # The first of equal tiles, as the kernel takes the first of equal entries.
    best = score.argmax(dim=1, keepdim=True)
    top = peak.amax(dim=1, keepdim=True)
    log_total = ((peak - top).exp() * total).sum(dim=1).log() + top.squeeze(1)
    return index.gather(1, best).squeeze(1), value.gather(1, best).squeeze(1) - log_total


@triton.jit
def _wait(word):
    """A random word -> log of an exponential time (sampling.waiting_times)."""
    uniform = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = uniform * (1 + uniform * (0.5 + uniform * (0.3333333333333333 + uniform * 0.25)))
    return tl.log(tl.where(uniform < 0.05, series, -tl.log(1 - uniform)))


@triton.jit
def _read_tile(
    logits, stride, size, seeds, positions, temperature, floats, index, GREEDY: tl.constexpr, WORD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    lane = tl.arange(0, WORD)
    first = tile * 4 * WORD
    line = logits + row * stride
    offset = first + lane
    x0 = tl.load(line + offset, mask=offset < size, other=-float("inf")).to(tl.float32) / temperature
    x1 = tl.load(line + offset + WORD, mask=offset + WORD < size, other=-float("inf")).to(tl.float32) / temperature
    x2 = tl.load(line + offset + 2 * WORD, mask=offset + 2 * WORD < size, other=-float("inf")).to(tl.float32)
    x3 = tl.load(line + offset + 3 * WORD, mask=offset + 3 * WORD < size, other=-float("inf")).to(tl.float32)
    x2 = x2 / temperature
    x3 = x3 / temperature
    s0, s1, s2, s3 = x0, x1, x2, x3
    if not GREEDY:
        seed = tl.load(seeds + row)
        position = tl.load(positions + row).to(tl.int32)
        zeros = lane * 0
        w0, w1, w2, w3 = tl.philox(seed, tile * WORD + lane, zeros + position, zeros, zeros)
        s0 -= _wait(w0)
        s1 -= _wait(w1)
        s2 -= _wait(w2)
        s3 -= _wait(w3)
    # The first of equal entries: a later word must be larger to win.
    best = tl.max(s0, axis=0)
    at = tl.argmax(s0, axis=0)
    top = tl.max(s1, axis=0)
    at = tl.where(top > best, tl.argmax(s1, axis=0) + WORD, at)
    best = tl.maximum(top, best)
    top = tl.max(s2, axis=0)
    at = tl.where(top > best, tl.argmax(s2, axis=0) + 2 * WORD, at)
    best = tl.maximum(top, best)
    top = tl.max(s3, axis=0)
    at = tl.where(top > best, tl.argmax(s3, axis=0) + 3 * WORD, at)
    best = tl.maximum(top, best)
    peak = tl.maximum(
        tl.maximum(tl.max(x0, axis=0), tl.max(x1, axis=0)), tl.maximum(tl.max(x2, axis=0), tl.max(x3, axis=0))
    )
    safe = tl.maximum(peak, -1e30)
    total = tl.sum(tl.exp(x0 - safe) + tl.exp(x1 - safe) + tl.exp(x2 - safe) + tl.exp(x3 - safe), axis=0)
    tiles = tl.num_programs(1)
    rows = tl.num_programs(0).to(tl.int64)
    place = row * tiles + tile
    token = first + at
    tl.store(index + place, token.to(tl.int64))
    tl.store(floats + place, best)
    tl.store(floats + rows * tiles + place, tl.load(line + token).to(tl.float32) / temperature)
    tl.store(floats + 2 * rows * tiles + place, safe)
    tl.store(floats + 3 * rows * tiles + place, total)
