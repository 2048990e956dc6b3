"""What a reward is given and what it gives. Standard library only, so that reward processes start fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, overload, runtime_checkable

from megatron_rl.config.checks.reward_terms import LARGEST_SCORE
from megatron_rl.errors import RewardError
from megatron_rl.messages import short


@runtime_checkable
class _Array(Protocol):
    """An array of numpy, torch or another library. None of them is imported here."""

    def tolist(self) -> object: ...


@runtime_checkable
class _Scalar(Protocol):
    """An array of one number, if ndim is 0."""

    @property
    def ndim(self) -> int: ...

    def item(self) -> object: ...


@dataclass(frozen=True)
class RewardSample:
    """One response to score.

    Example: RewardSample(data_source="add2", prompt_text="4+5=", solution_str="9", ground_truth="9", num_tokens=2)
    """

    data_source: str
    prompt_text: str
    """The prompt as the model was given it, after the chat template."""
    solution_str: str
    """The response, decoded without end and pad tokens; other special tokens are in it."""
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    num_tokens: int = 0
    """Tokens of the response, the end token included."""
    finish_reason: Literal["stop", "length"] = "stop"
    """Whether the response ended by itself or was cut at its length limit."""
    messages: tuple[dict[str, Any], ...] | None = None
    """The prompt's chat messages; None where the prompt is a plain string."""
    tools: tuple[dict[str, Any], ...] | None = None
    """The tools that the chat template was given with them; None where there were none."""
    prompt_ids: Sequence[int] = ()
    """The prompt's token ids. Reward models read ids; reward processes are not sent any."""
    response_ids: Sequence[int] = ()
    """The response's token ids as they were sampled, for reward models alone."""
    has_source: bool = True
    """Whether the row itself names its data_source; else that is its file's name."""
    where: str = ""
    """File and row of the prompt, for messages."""


@dataclass(frozen=True)
class RewardResult:
    """What a reward said of one sample."""

    value: float
    """Finite and at most LARGEST_SCORE; the configured failed_score where the reward failed."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further numbers that the reward returned beside its score; each is logged as reward/<name>."""
    failed: str | None = None
    """None, or why the reward gave no score."""


RewardFn = Callable[[RewardSample], object]
"""A loaded reward: one sample in; a number, a dict with a number under "score", or None (does not apply) out."""
BatchRewardFn = Callable[[Sequence[RewardSample]], object]
"""A loaded reward of a whole batch: one answer for each sample, as a list, an array or a tensor."""


class Chosen(Sequence[RewardSample]):
    """Some of many samples, read one by one: they may lie elsewhere, and together be more than fits in memory."""

    def __init__(self, samples: Sequence[RewardSample], numbers: Sequence[int]) -> None:
        """numbers: of the samples that are chosen, in the order wanted."""
        self._samples = samples
        self.numbers = numbers
        if isinstance(samples, Chosen):
            self._samples, self.numbers = samples._samples, [samples.numbers[number] for number in numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, place: int) -> RewardSample: ...
    @overload
    def __getitem__(self, place: slice) -> Chosen: ...
    def __getitem__(self, place: int | slice) -> RewardSample | Chosen:
        if isinstance(place, slice):
            return Chosen(self._samples, self.numbers[place])
        return self._samples[self.numbers[place]]


def number_of(samples: Sequence[RewardSample], place: int) -> int:
    """The number of a sample among all of which `samples` are some."""
    return samples.numbers[place] if isinstance(samples, Chosen) else place


def shown(sample: RewardSample) -> str:
    """A sample in a few words: where its row is, its data source, and the start of its texts."""
    place = f"{sample.where}, " if sample.where else ""
    return (
        f"{place}data source {sample.data_source!r}, response {short(sample.solution_str, 80)}, "
        f"ground truth {short(sample.ground_truth, 80)}"
    )


def to_result(returned: object, name: str) -> RewardResult | None:
    """The result that a reward's return value stands for; None where the reward says that it does not apply.

    Accepted: None, a bool or a finite number (of numpy or torch as well) of at most LARGEST_SCORE, or a dict that holds
    one under "score"; other numbers of the dict become `extra`, under the same bound, its other entries (texts for a
    reader, say) are not kept.

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
    numbers = {key: entry for key, entry in plain.items() if isinstance(entry, bool | int | float)}
    return RewardResult(value, {key: _number(entry, name, f"returned as {key!r}") for key, entry in numbers.items()})


def to_results(returned: object, count: int, name: str, failed_score: float | None = None) -> list[RewardResult | None]:
    """The results of a batch reward: one entry for each of `count` samples, each as `to_result` takes it.

    failed_score: an answer that is no score fails its sample with this value, and not the others; without it, it is an
    error. Raises RewardError where there is no list of one answer for each sample.
    """
    answers = returned.tolist() if isinstance(returned, _Array) else returned
    if not isinstance(answers, list | tuple):
        raise RewardError(
            f"reward {name} returned {short(returned, 80)} ({type(returned).__name__}) for a batch of {count} "
            "-- return a list, an array or a tensor with one score for each sample"
        )
    if len(answers) != count:
        raise RewardError(f"reward {name} returned {len(answers)} scores for a batch of {count} -- return one for each")
    results: list[RewardResult | None] = []
    for answer in answers:
        try:
            results.append(to_result(answer, name))
        except RewardError as error:
            if failed_score is None:
                raise
            results.append(RewardResult(failed_score, failed=str(error)))
    return results


def checked(result: RewardResult, name: str, failed_score: float) -> RewardResult:
    """The result where its numbers are finite and at most LARGEST_SCORE; else a failed one that names the number."""
    for what, number in (("gave", result.value), *((f"gave {key!r} as", entry) for key, entry in result.extra.items())):
        reason = None if result.failed is not None else number_fault(number)
        if reason is not None:
            return RewardResult(failed_score, failed=f"{name} {what} {number!r} -- {reason}")
    return result


def number_fault(number: float) -> str | None:
    """Why a number cannot be a score; None where it can."""
    # Compared, not converted: an int may be too large for a float.
    if number != number or number in (float("inf"), float("-inf")):
        return "return a finite number"
    if abs(number) > LARGEST_SCORE:
        return f"return a number of at most {LARGEST_SCORE:g} in magnitude: beyond that, gradients overflow"
    return None


def _plain(value: object) -> object:
    """numpy and torch scalars as Python numbers; anything else as it is."""
    return value.item() if isinstance(value, _Scalar) and value.ndim == 0 else value


def _number(value: object, name: str, verb: str) -> float:
    plain = _plain(value)
    if plain is None:
        raise RewardError(f"reward {name} {verb} None, which is no score -- return a number for every sample")
    if not isinstance(plain, bool | int | float):
        raise RewardError(f"reward {name} {verb} {short(value, 80)} ({type(value).__name__}) -- return a number")
    reason = number_fault(plain)
    if reason is not None:
        raise RewardError(f"reward {name} {verb} {short(plain, 80)} -- {reason}")
    return float(plain)
