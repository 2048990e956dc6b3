"""Section `reward`: what scores a response."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from megatron_rl.config.base import UserPath, section


@section
class RewardConfig:
    function: UserPath = "exact_match"
    """A name of megatron_rl.rewards.REWARDS, `package.module:function`, or `path/to/file.py:function`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keywords passed to the function with every sample."""
    num_workers: PositiveInt = 2
    """Reward processes."""
    timeout_s: PositiveFloat = 10.0
    """Seconds that one sample may take; a process over it is killed and replaced."""
    failed_score: float = 0.0
    """Score of a sample whose reward raised, crashed or ran out of time; such are counted and shown."""
    max_failed_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """The run stops when more than this share of a step's samples fail."""
