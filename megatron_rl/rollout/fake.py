"""A deterministic stand-in for an engine: unit tests of the loop, with no model."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence

import torch

from megatron_rl.rollout.engine import EnginePart, EngineSettings, Request, Sampling, check_requests
from megatron_rl.types import Samples


class FakeEngine:
    """Samples uniform ids from a generator seeded by the request, so that any layout gives the same responses."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._version = -1

    @property
    def weight_version(self) -> int:
        return self._version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Samples:
        """See RolloutEngine."""
        check_requests(requests, sampling, self._settings, self._version)
        ids = [self._sample(request, sampling, number) for request in requests for number in range(sampling.n)]
        logprob = -math.log(self._settings.vocab_size)
        return Samples.from_lists(
            ids,
            [[logprob] * len(of_sample) for of_sample in ids],
            ["stop" if of_sample[-1] in sampling.stop_token_ids else "length" for of_sample in ids],
            self._version,
        )

    def _sample(self, request: Request, sampling: Sampling, number: int) -> list[int]:
        """The ids of one response, up to the first that ends it."""
        seed = (request.seed or 0) + (number if sampling.temperature else 0)
        draw = random.Random(f"{seed} {request.token_ids}")
        length = draw.randint(1, sampling.max_tokens)
        ids = [draw.randrange(self._settings.vocab_size) for _ in range(length)]
        end = next((i for i, token in enumerate(ids) if token in sampling.stop_token_ids), None)
        return ids if end is None else ids[: end + 1]

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

    def hold(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

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
