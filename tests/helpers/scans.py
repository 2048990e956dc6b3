"""Random inputs of a scan over tokens, and a loop over them, one token at a time, in Python's floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from megatron_rl.algos.scan import CreditKernels, KlPenalty, TokenScan


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments of CreditKernels.scan."""

    rewards: torch.Tensor
    values: torch.Tensor | None
    mask: torch.Tensor
    cu: torch.Tensor | None
    gamma: float
    lam: float | torch.Tensor
    critic_lam: float | torch.Tensor | None
    kept: torch.Tensor | None = None
    kl: KlPenalty | None = None

    def having(self, **changes: Any) -> Case:
        """With other arguments."""
        return replace(self, **changes)

    @property
    def known(self) -> torch.Tensor:
        """The values, which are there."""
        assert self.values is not None
        return self.values

    @property
    def starts(self) -> torch.Tensor:
        """cu_seqlens, which are there."""
        assert self.cu is not None
        return self.cu

    def columns(self) -> dict[str, torch.Tensor]:
        """Those of tokens, by the name of the argument."""
        return {"rewards": self.rewards, "values": self.known, "mask": self.mask}

    def padded(self, rows: int, length: int) -> Case:
        """The same tokens as [rows, length]."""
        shaped: dict[str, Any] = {name: one.view(rows, length) for name, one in self.columns().items()}
        if self.kl is not None:
            shaped["kl"] = replace(self.kl, terms=self.kl.terms.view(rows, length))
        return self.having(cu=None, **shaped)

    def to(self, device: str) -> Case:
        """Every tensor there."""
        moved = {name: one.to(device) for name, one in vars(self).items() if isinstance(one, torch.Tensor)}
        kl = self.kl
        if kl is not None:
            kl = replace(kl, terms=kl.terms.to(device), ref=None if kl.ref is None else kl.ref.to(device))
        return self.having(**moved, kl=kl)

    def run(self, kernels: CreditKernels) -> TokenScan:
        """What the kernels give."""
        return kernels.scan(
            self.rewards,
            self.values,
            self.mask,
            self.cu,
            gamma=self.gamma,
            lam=self.lam,
            critic_lam=self.critic_lam,
            kept=self.kept,
            kl=self.kl,
        )


def random_case(
    lens: Sequence[int],
    seed: int,
    *,
    own_lams: bool = False,
    with_kl: bool = False,
    half: bool = False,
    all_trained: bool = False,
) -> Case:
    """Packed sequences of these lengths, of which about two tokens in three are trained, by runs.

    own_lams: each sequence has its own lambdas. with_kl: terms of a penalty are given. half: bfloat16.
    """
    generator = torch.Generator().manual_seed(seed)
    total, dtype = sum(lens), torch.bfloat16 if half else torch.float32

    def uniform(count: int) -> torch.Tensor:
        return torch.rand(count, generator=generator)

    runs = uniform(total // 3 + 1).repeat_interleave(3)[:total]
    mask = runs < (2.0 if all_trained else 0.67)
    rewards, values = torch.randn(total, generator=generator) * mask, torch.randn(total, generator=generator)
    gamma, lam, critic_lam = (0.9 + 0.1 * uniform(3)).tolist()
    lams = [uniform(len(lens)).double() for _ in range(2)] if own_lams else [lam, critic_lam]
    kl = KlPenalty(0.1, torch.randn(total, generator=generator).to(dtype)) if with_kl else None
    cu = torch.tensor([0, *np.cumsum(np.array(lens, dtype=np.int64)).tolist()], dtype=torch.int64)
    return Case(rewards.to(dtype), values.to(dtype), mask, cu, gamma, lams[0], lams[1], kl=kl)


def slow_scan(case: Case, penalty: Sequence[float] | None = None) -> tuple[list[float], list[float]]:
    """Advantages and returns of packed sequences. penalty: of each token, in place of the case's own."""
    assert case.cu is not None and case.values is not None
    rewards, values, mask = case.rewards.tolist(), case.values.tolist(), case.mask.tolist()
    if penalty is None and case.kl is not None:
        penalty = [case.kl.coef * term for term in case.kl.terms.tolist()]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    lams = (case.lam, case.lam if case.critic_lam is None else case.critic_lam)
    for s, (begin, end) in enumerate(pairwise(case.cu.tolist())):
        lam, critic_lam = (float(one[s]) if isinstance(one, torch.Tensor) else one for one in lams)
        value_after = carried = critic_carried = 0.0
        for t in range(end - 1, begin - 1, -1):
            if not mask[t]:
                continue
            delta = rewards[t] - (penalty[t] if penalty else 0.0) + case.gamma * value_after - values[t]
            carried = delta + case.gamma * lam * carried
            critic_carried = delta + case.gamma * critic_lam * critic_carried
            value_after = values[t]
            advantages[t], returns[t] = carried, values[t] + critic_carried
    return advantages, returns


def assert_close(found: TokenScan, wanted: tuple[list[float], list[float]]) -> None:
    """Relative error at most 1e-5; what cancels to nothing may be off by float64's own rounding."""
    for column, one in zip((found.advantages, found.returns), wanted, strict=True):
        exact = np.array(one)
        error = np.abs(column.cpu().numpy().astype(np.float64).reshape(-1) - exact)
        assert column.dtype == torch.float32 and bool((error <= 1e-5 * np.abs(exact) + 1e-12).all()), error.max()
