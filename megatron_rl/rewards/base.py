"""What a reward is given and what it gives. Standard library only, so that reward processes start fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_rl.errors import RewardError


@dataclass(frozen=True)
class RewardSample:
    """One response to score.

    Example: RewardSample(data_source="add2", prompt_text="4+5=", solution_str="9", ground_truth="9",
    num_tokens=2)
    """

    data_source: str
    prompt_text: str
    """The prompt as the model was given it, after the chat template."""
    solution_str: str
    """The response, decoded without special tokens."""
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    num_tokens: int = 0
    """Tokens of the response, the end token included."""
    finish_reason: Literal["stop", "length"] = "stop"
    """Whether the response ended by itself or was cut at its length limit."""
    messages: tuple[dict[str, Any], ...] | None = None
    """The prompt's chat messages; None where the prompt is a plain string."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt's token ids. Reward models read ids; reward processes are not sent any."""
    response_ids: tuple[int, ...] = ()
    """The response's token ids as they were sampled; not sent to reward processes either."""


@dataclass(frozen=True)
class RewardResult:
    """What a reward said of one sample."""

    value: float
    """Finite; the configured failed_score where the reward failed."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further numbers that the reward returned beside its score; each is logged as reward/<name>."""
    failed: str | None = None
    """None, or why the reward gave no score."""


RewardFn = Callable[[RewardSample], object]
"""A loaded reward: one sample in; a number, a dict with a number under "score", or None (does not apply) out."""
BatchRewardFn = Callable[[Sequence[RewardSample]], object]
"""A loaded reward of a whole batch: one answer for each sample, as a list, an array or a tensor."""


def to_result(returned: object, name: str) -> RewardResult | None:
    """The result that a reward's return value stands for; None where the reward says that it does not apply.

    Accepted: None, a bool or a finite number (of numpy or torch as well), or a dict that holds one under "score";
    other numbers of the dict become `extra`, its other entries (texts for a reader, say) are not kept.

    Raises RewardError naming the reward and the value.
    """
    if returned is None:
        return None
    if not isinstance(returned, dict):
        return RewardResult(_number(returned, name, "returned"))
    if "score" not in returned:
        raise RewardError(
            f"reward {name} returned a dict without 'score', keys {list(returned)} -- add 'score': number"
        )
    value = _number(returned["score"], name, "returned as 'score'")
    plain = {str(key): _plain(entry) for key, entry in returned.items() if key != "score"}
    return RewardResult(
        value, {key: float(entry) for key, entry in plain.items() if isinstance(entry, bool | int | float)}
    )


def to_results(returned: object, count: int, name: str) -> list[RewardResult | None]:
    """The results of a batch reward: one entry for each of `count` samples, each as `to_result` takes it.

    Raises RewardError where there is no such list.
    """
    tolist = getattr(returned, "tolist", None)
    answers = tolist() if callable(tolist) else returned
    if not isinstance(answers, list | tuple):
        raise RewardError(
            f"reward {name} returned {_short(returned)} ({type(returned).__name__}) for a batch of {count} "
            "-- return a list, an array or a tensor with one score for each sample"
        )
    if len(answers) != count:
        raise RewardError(f"reward {name} returned {len(answers)} scores for a batch of {count} -- return one for each")
    return [to_result(answer, name) for answer in answers]


def _plain(value: object) -> object:
    """numpy and torch scalars as Python numbers; anything else as it is."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value


def _number(value: object, name: str, verb: str) -> float:
    plain = _plain(value)
    if plain is None:
        raise RewardError(f"reward {name} {verb} None, which is no score -- return a number for every sample")
    if not isinstance(plain, bool | int | float):
        raise RewardError(f"reward {name} {verb} {_short(value)} ({type(value).__name__}) -- return a number")
    if not math.isfinite(plain):
        raise RewardError(f"reward {name} {verb} {plain} -- return a finite number")
    return float(plain)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
