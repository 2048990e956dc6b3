"""A deterministic stand-in for an engine: unit tests of the loop, with no model."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch

from megatron_rl.rollout.engine import EnginePart, EngineSettings, Request, Sample, Sampling, check_requests


class FakeEngine:
    """Samples uniform ids from a generator seeded by the request, so that any layout gives the same responses."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._version = -1

    @property
    def weight_version(self) -> int:
        return self._version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Sample]]:
        check_requests(requests, sampling, self._settings, self._version)
        return [[self._sample(request, sampling, i) for i in range(sampling.n)] for request in requests]

    def _sample(self, request: Request, sampling: Sampling, number: int) -> Sample:
        seed = (request.seed or 0) + (number if sampling.temperature else 0)
        draw = random.Random(f"{seed} {request.token_ids}")
        length = draw.randint(1, sampling.max_tokens)
        ids = tuple(draw.randrange(self._settings.vocab_size) for _ in range(length))
        end = next((i for i, token in enumerate(ids) if token in sampling.stop_token_ids), None)
        ids = ids if end is None else ids[: end + 1]
        logprob = -float(torch.log(torch.tensor(float(self._settings.vocab_size))))
        stopped = ids[-1] in sampling.stop_token_ids
        return Sample(ids, (logprob,) * len(ids), "stop" if stopped else "length")

    @property
    def part(self) -> EnginePart | None:
        return None

    @property
    def shared(self) -> frozenset[str]:
        return frozenset()

    def parameters(self) -> dict[str, torch.Tensor]:
        return {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def begin_update(self) -> None: ...

    def end_update(self, version: int) -> None:
        self._version = version

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        for _ in tensors:
            pass
        self._version = version

    def reset_prefix_cache(self) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
