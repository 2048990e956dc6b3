"""The samples of a step as rewards are given them: read one by one, so that texts are not all in memory at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import overload

from megatron_rl.rewards.base import Chosen, RewardSample
from megatron_rl.types import FINISH_REASONS, Handle, Prompt, Rollouts, Samples, Texts


class RolloutSamples(Sequence[RewardSample]):
    """[S] samples, made when they are read; the part that was read last is kept. Several threads may read them."""

    def __init__(self, rollouts: Rollouts, with_ids: bool) -> None:
        """with_ids: whether token ids are read as well; reward models want them."""
        self._rollouts, self._with_ids = rollouts, with_ids
        self._texts: tuple[Handle[Texts], Texts] | None = None
        self._samples: tuple[Handle[Samples], Samples] | None = None

    def __len__(self) -> int:
        return self._rollouts.num_sequences

    @overload
    def __getitem__(self, place: int) -> RewardSample: ...
    @overload
    def __getitem__(self, place: slice) -> Chosen: ...
    def __getitem__(self, place: int | slice) -> RewardSample | Chosen:
        if isinstance(place, slice):
            return Chosen(self, range(len(self))[place])
        if not 0 <= place < len(self):
            raise IndexError(place)
        rollouts = self._rollouts
        part, row = int(rollouts.part_of[place]), int(rollouts.row_of[place])
        return reward_sample(
            rollouts.prompts[place // rollouts.n],
            text=self._texts_of(part)[row],
            num_tokens=int(rollouts.lens[place]),
            finish=int(rollouts.finish[place]),
            response_ids=self._ids_of(part, row) if self._with_ids else (),
        )

    def _texts_of(self, part: int) -> Texts:
        handle, last = self._rollouts.texts[part], self._texts
        if last is None or last[0] is not handle:
            self._texts = last = (handle, handle.fetch())
        return last[1]

    def _ids_of(self, part: int, row: int) -> Sequence[int]:
        handle, last = self._rollouts.parts[part], self._samples
        if last is None or last[0] is not handle:
            self._samples = last = (handle, handle.fetch())
        samples = last[1]
        return array("i", samples.token_ids[samples.span(row)].tobytes())


def reward_sample(
    prompt: Prompt, *, text: str = "", num_tokens: int = 0, finish: int = 0, response_ids: Sequence[int] = ()
) -> RewardSample:
    """What rewards are given of a response; by default of an empty one. finish: an index into FINISH_REASONS."""
    return RewardSample(
        data_source=prompt.data_source,
        prompt_text=prompt.text,
        solution_str=text,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        num_tokens=num_tokens,
        finish_reason=FINISH_REASONS[finish],
        messages=prompt.messages,
        tools=prompt.tools,
        prompt_ids=prompt.token_ids,
        response_ids=response_ids,
        has_source=prompt.has_source,
        where=prompt.where,
    )
