"""A warm-up given as a share of the run is as long as that share."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.config.sections.actor import OptimConfig
from megatron_rl.mcore import build


@pytest.mark.parametrize(
    ("steps", "share", "expected"), [(0, 0.1, 10), (0, 0.0, 0), (4, 0.1, 4), (0, 0.015, 1), (0, 1.0, 100)]
)
def test_the_rate_rises_over_the_share_of_the_run(steps: int, share: float, expected: int) -> None:
    optim = OptimConfig(lr=1e-3, lr_warmup_steps=steps, lr_warmup_steps_ratio=share)
    assert optim.warmup_steps(100) == expected
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    optimizer.param_groups[0].update(max_lr=1e-3, min_lr=0.0, wd_mult=1.0, lr_mult=1.0)
    schedule = build._scheduler(optimizer, optim, 100)  # type: ignore[arg-type]  # pyright: ignore
    rates: list[float] = []
    for _ in range(100):
        schedule.step(increment=1)
        rates.append(optimizer.param_groups[0]["lr"])
    first_at_peak = next(place for place, rate in enumerate(rates, 1) if rate == pytest.approx(1e-3))
    assert first_at_peak == max(expected, 1)
