"""The nouns of a run, from prompt to update. Frozen records; flat arrays for what is known of each token or sequence.

Letters in names and comments: G groups (a prompt each), n samples of a prompt, S sequences (G x n of them, group after
group), T tokens of all sequences end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

FinishReason = Literal["stop", "length"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")
"""Samples and Rollouts hold a reason as its number here."""
Column = Literal[
    "rollout_logprobs", "old_logprobs", "ref_logprobs", "train_logprobs", "greedy", "kl", "values", "old_values",
    "advantages", "returns", "loss_weights", "critic_weights", "rollout_weights", "targets", "answers", "nll_weights",
]  # fmt: skip
"""What a batch on the ranks may know of each token, beside the token itself (workers/rank_batch.py)."""

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Value = TypeVar("Value", covariant=True)


class Handle(Protocol[Value]):
    """A value that may lie in another process's memory (cluster/handles.py). Picklable, and small to pass on."""

    def fetch(self) -> Value:
        """The value. Its arrays are shared with others that fetch it: read-only."""
        ...


@dataclass(frozen=True)
class Prompt:
    """One row of the RL data, rendered to tokens.

    Example: Prompt(index=7, token_ids=(5, 12, 6, 14), text="4+5=", data_source="add2", ground_truth="9")
    """

    index: int
    """Row number over all files of the data set, from 0."""
    token_ids: tuple[int, ...]
    text: str
    """What token_ids say: the prompt after the chat template."""
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict[str, Any])
    messages: tuple[dict[str, Any], ...] | None = None
    """The chat messages that were rendered; None where the prompt is a plain string."""
    tools: tuple[dict[str, Any], ...] | None = None
    """The tools that the chat template was given; None where there were none."""
    has_source: bool = True
    """Whether the row itself names its data_source; else that is its file's name."""
    where: str = field(default="", compare=False)
    """File and row, for messages."""


@dataclass(frozen=True)
class Rollout:
    """One sampled response as a person sees it; a run handles them as Rollouts."""

    token_ids: tuple[int, ...]
    """Sampled ids, the end-of-sequence token included when the engine stopped at one."""
    logprobs: tuple[float, ...]
    """Engine's log-probability of each id, at the sampling temperature."""
    finish_reason: FinishReason
    text: str
    """token_ids decoded, without end and pad tokens and with other special ones: for rewards and for reading."""


@dataclass(frozen=True)
class RolloutGroup:
    """The n samples of one prompt, all made with the same weights."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    weight_version: int


@dataclass(frozen=True, eq=False)
class Samples:
    """One engine's answer: the tokens of its samples end to end, and what is known of each. Request-major: with n
    samples a request, sample i of request r is row r * n + i.

    Example: responses [8, 1] (ended) and [9, 9, 3] (cut) give token_ids = [8 1 9 9 3], lens = [2 3], finish = [0 1]
    """

    token_ids: Int32
    """[T] what was sampled, the end token included where the engine stopped at one; never decoded and encoded again"""
    logprobs: Float32
    """[T] log softmax(logits / temperature) of each id, before top-p and top-k; greedy sampling (temperature 0)
    reports them at temperature 1"""
    lens: Int32
    """[S] tokens of each sample"""
    finish: npt.NDArray[np.uint8]
    """[S] why each ended: an index into FINISH_REASONS"""
    oldest_version: Int32
    """[S] oldest version of the weights that made any of the sample's tokens"""
    newest_version: Int32
    """[S] newest such version"""
    routed: npt.NDArray[np.uint8 | np.int16] | None = None
    routed_lens: Int32 | None = None
    """[R, layers, k] experts, from 1, of each sequence's first tokens (prompt, response), 0: not known; [S] its rows"""

    def __post_init__(self) -> None:
        assert self.token_ids.shape == self.logprobs.shape == (int(self.lens.sum()),), (
            self.token_ids.shape,
            self.logprobs.shape,
            self.lens.sum(),
        )
        per_sample = (self.finish, self.oldest_version, self.newest_version)
        assert all(values.shape == self.lens.shape for values in per_sample), [values.shape for values in per_sample]

    def __len__(self) -> int:
        return len(self.lens)

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """[S] number of tokens up to the end of each sample."""
        return np.cumsum(self.lens, dtype=np.int64)

    def span(self, row: int) -> slice:
        """Where the tokens of a sample are."""
        end = int(self.ends[row])
        return slice(end - int(self.lens[row]), end)

    def routed_rows(self, row: int) -> npt.NDArray[np.uint8 | np.int16] | None:
        """[rows, layers, k] of one sequence's tokens, a view."""
        if self.routed is None or self.routed_lens is None:
            return None
        return np.split(self.routed, np.cumsum(self.routed_lens))[row]

    def rollout(self, row: int, text: str) -> Rollout:
        """One sample for a person; text: its tokens decoded."""
        span = self.span(row)
        ids, logprobs = tuple(self.token_ids[span].tolist()), tuple(self.logprobs[span].tolist())
        return Rollout(ids, logprobs, FINISH_REASONS[int(self.finish[row])], text)

    def id_tuples(self) -> list[tuple[int, ...]]:
        """The ids of each sample as Python numbers: for few samples."""
        return [tuple(self.token_ids[self.span(row)].tolist()) for row in range(len(self))]

    @staticmethod
    def from_lists(
        token_ids: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
        finish: Sequence[str],
        version: int,
        routed: Sequence[npt.NDArray[np.uint8 | np.int16]] | None = None,
    ) -> Samples:
        """From the values of each sample, all made with the weights of one version."""
        lens = np.fromiter(map(len, token_ids), np.int32, len(token_ids))
        assert all(len(ids) == len(of_ids) for ids, of_ids in zip(token_ids, logprobs, strict=True))
        total = int(lens.sum())
        versions = np.full(len(lens), version, np.int32)
        return Samples(
            token_ids=np.fromiter(chain.from_iterable(token_ids), np.int32, total),
            logprobs=np.fromiter(chain.from_iterable(logprobs), np.float32, total),
            lens=lens,
            finish=np.fromiter(map(FINISH_REASONS.index, finish), np.uint8, len(lens)),
            oldest_version=versions,
            newest_version=versions,
            routed=np.concatenate(routed) if routed else None,
            routed_lens=np.fromiter(map(len, routed), np.int32, len(routed)) if routed else None,
        )


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts end to end as UTF-8, so that they travel without a copy; a text is made when it is read."""

    data: npt.NDArray[np.uint8]
    """[bytes of all texts]"""
    ends: npt.NDArray[np.int64]
    """[S] number of bytes up to the end of each text"""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> str:
        start = int(self.ends[row - 1]) if row else 0
        return self.data[start : int(self.ends[row])].tobytes().decode("utf-8")

    @staticmethod
    def of(texts: Sequence[str]) -> Texts:
        """From Python texts."""
        encoded = [text.encode("utf-8") for text in texts]
        lens = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return Texts(np.frombuffer(b"".join(encoded), np.uint8), np.cumsum(lens))


@dataclass(frozen=True, eq=False)
class EngineAnswer:
    """What a controller gets of an engine's Samples: a few numbers a sample, and where tokens and texts lie."""

    lens: Int32
    finish: npt.NDArray[np.uint8]
    oldest_version: Int32
    newest_version: Int32
    samples: Handle[Samples]
    texts: Handle[Texts]

    @staticmethod
    def of(samples: Samples, handle: Handle[Samples], texts: Handle[Texts]) -> EngineAnswer:
        """handle: to these samples."""
        return EngineAnswer(samples.lens, samples.finish, samples.oldest_version, samples.newest_version, handle, texts)


@dataclass(frozen=True, eq=False)
class SequenceRefs:
    """Some sequences of a step, by reference: what a data-parallel rank is told of its own."""

    numbers: tuple[int, ...]
    """[S] what each is called in the step"""
    prompts: tuple[Int32, ...]
    """Ids of the prompts, each once."""
    prompt_of: Int32
    """[S] the prompt of each sequence"""
    parts: tuple[Handle[Samples], ...]
    part_of: Int32
    """[S] the part that has the response"""
    row_of: Int32
    """[S] its row there"""

    def fetch(self) -> tuple[list[Int32], list[Float32]]:
        """[S] sampled ids and [S] the engine's log-probabilities: read-only views of memory that may be shared."""
        parts = [part.fetch() for part in self.parts]
        ids: list[Int32] = []
        logprobs: list[Float32] = []
        for part, row in zip(map(int, self.part_of), map(int, self.row_of), strict=True):
            span = parts[part].span(row)
            ids.append(parts[part].token_ids[span])
            logprobs.append(parts[part].logprobs[span])
        return ids, logprobs


@dataclass(frozen=True, eq=False)
class Rollouts:
    """The samples of a step as the controller sees them: n of each prompt, a few numbers a sample, no tokens.

    Sequence s is sample s % n of group s // n. Its tokens and its text are in row row_of[s] of part part_of[s].
    """

    prompts: tuple[Prompt, ...]
    """[G]"""
    n: int
    lens: Int32
    """[S] sampled tokens"""
    finish: npt.NDArray[np.uint8]
    """[S] index into FINISH_REASONS"""
    oldest_version: Int32
    """[S]"""
    newest_version: Int32
    """[S]"""
    parts: tuple[Handle[Samples], ...]
    texts: tuple[Handle[Texts], ...]
    """Of each part."""
    part_of: Int32
    """[S]"""
    row_of: Int32
    """[S]"""

    def __post_init__(self) -> None:
        wanted = (len(self.prompts) * self.n,)
        for name in ("lens", "finish", "oldest_version", "newest_version", "part_of", "row_of"):
            values: npt.NDArray[np.generic] = self.__dict__[name]
            assert values.shape == wanted, (name, values.shape, wanted)
        assert len(self.parts) == len(self.texts), (len(self.parts), len(self.texts))

    @property
    def num_groups(self) -> int:
        return len(self.prompts)

    @property
    def num_sequences(self) -> int:
        return len(self.lens)

    @property
    def group_ids(self) -> Int32:
        """[S] the group of each sequence."""
        return np.repeat(np.arange(self.num_groups, dtype=np.int32), self.n)

    @cached_property
    def prompt_lens(self) -> Int32:
        """[G] tokens of each prompt."""
        return np.fromiter((len(prompt.token_ids) for prompt in self.prompts), np.int32, self.num_groups)

    @property
    def seq_lens(self) -> Int32:
        """[S] tokens of prompt and response."""
        return np.repeat(self.prompt_lens, self.n) + self.lens

    @property
    def was_cut(self) -> npt.NDArray[np.bool_]:
        """[S] whether a response ended at the length limit."""
        return self.finish == FINISH_REASONS.index("length")

    def names(self) -> list[str]:
        """[S] what each sequence is called in messages: the file and row of its prompt, and its sample."""
        rows = [prompt.where or f"row {prompt.index}" for prompt in self.prompts]
        return [f"{row} sample {number}" for row in rows for number in range(1, self.n + 1)]

    def select(self, groups: Sequence[int]) -> Rollouts:
        """The given groups, in the given order. Parts that none of them is in are let go."""
        index = np.array(groups, np.int64)
        rows = (index[:, None] * self.n + np.arange(self.n)).reshape(-1)
        used, part_of = np.unique(self.part_of[rows], return_inverse=True)
        return Rollouts(
            prompts=tuple(self.prompts[group] for group in groups),
            n=self.n,
            lens=self.lens[rows],
            finish=self.finish[rows],
            oldest_version=self.oldest_version[rows],
            newest_version=self.newest_version[rows],
            parts=tuple(self.parts[int(part)] for part in used),
            texts=tuple(self.texts[int(part)] for part in used),
            part_of=part_of.astype(np.int32),
            row_of=self.row_of[rows],
        )

    @staticmethod
    def concat(several: Sequence[Rollouts]) -> Rollouts:
        """The groups of all, in order; one at least. All have the same n."""
        assert len({rollouts.n for rollouts in several}) == 1, [rollouts.n for rollouts in several]
        firsts = [0, *accumulate(len(rollouts.parts) for rollouts in several)]
        part_of = [rollouts.part_of + np.int32(first) for rollouts, first in zip(several, firsts[:-1], strict=True)]
        return Rollouts(
            prompts=tuple(prompt for rollouts in several for prompt in rollouts.prompts),
            n=several[0].n,
            lens=np.concatenate([rollouts.lens for rollouts in several]),
            finish=np.concatenate([rollouts.finish for rollouts in several]),
            oldest_version=np.concatenate([rollouts.oldest_version for rollouts in several]),
            newest_version=np.concatenate([rollouts.newest_version for rollouts in several]),
            parts=tuple(part for rollouts in several for part in rollouts.parts),
            texts=tuple(texts for rollouts in several for texts in rollouts.texts),
            part_of=np.concatenate(part_of),
            row_of=np.concatenate([rollouts.row_of for rollouts in several]),
        )

    @staticmethod
    def from_answers(prompts: Sequence[Prompt], n: int, answers: Sequence[EngineAnswer]) -> Rollouts:
        """From the answers of engines that prompts were dealt to in turn: prompt g to engine g % len(answers)."""
        engines = len(answers)
        groups = np.repeat(np.arange(len(prompts)), n)
        part_of = (groups % engines).astype(np.int32)
        row_of = (groups // engines * n + np.arange(len(groups)) % n).astype(np.int32)
        # In the order of the answers, each sequence is behind those of the engines before it and of its own.
        counts = [len(answer.lens) for answer in answers]
        place = np.array([0, *accumulate(counts)])[part_of] + row_of
        return Rollouts(
            prompts=tuple(prompts),
            n=n,
            lens=np.concatenate([answer.lens for answer in answers])[place],
            finish=np.concatenate([answer.finish for answer in answers])[place],
            oldest_version=np.concatenate([answer.oldest_version for answer in answers])[place],
            newest_version=np.concatenate([answer.newest_version for answer in answers])[place],
            parts=tuple(answer.samples for answer in answers),
            texts=tuple(answer.texts for answer in answers),
            part_of=part_of,
            row_of=row_of,
        )

    def refs(self, sequences: Sequence[int]) -> SequenceRefs:
        """What a rank needs to fetch the given sequences."""
        index = np.array(sequences, np.int64)
        groups, prompt_of = np.unique(index // self.n, return_inverse=True)
        used, part_of = np.unique(self.part_of[index], return_inverse=True)
        return SequenceRefs(
            numbers=tuple(sequences),
            prompts=tuple(np.array(self.prompts[int(group)].token_ids, np.int32) for group in groups),
            prompt_of=prompt_of.astype(np.int32),
            parts=tuple(self.parts[int(part)] for part in used),
            part_of=part_of.astype(np.int32),
            row_of=self.row_of[index],
        )

    def fetch_text(self, sequence: int) -> str:
        """A response as text."""
        return self.texts[int(self.part_of[sequence])].fetch()[int(self.row_of[sequence])]

    def fetch_group(self, group: int) -> RolloutGroup:
        """A group with its tokens and texts: for people, logs and tests."""
        sequences = range(group * self.n, (group + 1) * self.n)
        rollouts = tuple(
            self.parts[int(self.part_of[s])].fetch().rollout(int(self.row_of[s]), self.fetch_text(s)) for s in sequences
        )
        return RolloutGroup(self.prompts[group], rollouts, int(self.newest_version[sequences[0]]))


@dataclass(frozen=True)
class TrainBatch:
    """S sequences of tokens end to end, and per-token columns aligned with them.

    A column's entry at token t belongs to token t as it is *predicted*: logprobs[t] is log p(tokens[t] | tokens
    before t in its sequence). The first token of a sequence is predicted by nothing; its entries are 0 and its
    loss_mask is False.

    Example: prompts [5, 6] and [7], responses [8, 1] and [9, 9, 1] give
        tokens    = [5 6 8 1 | 7 9 9 1], seq_lens = [4, 4], loss_mask = [0 0 1 1 | 0 1 1 1]
    """

    tokens: torch.Tensor
    """[T] int64"""
    seq_lens: tuple[int, ...]
    """S lengths that sum to T"""
    loss_mask: torch.Tensor
    """[T] bool: tokens that the model is trained on (sampled tokens; response tokens in SFT)"""
    columns: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """name -> [T] float32, for instance old_logprobs, ref_logprobs, rollout_logprobs, advantages, loss_weights"""
    routed: torch.Tensor | None = None
    """[T, layers, k] experts that each layer's router is to choose, numbered from 1; 0 where it chooses by itself"""

    def __post_init__(self) -> None:
        total = sum(self.seq_lens)
        assert self.tokens.shape == (total,) == self.loss_mask.shape, (self.tokens.shape, total, self.loss_mask.shape)
        for name, column in self.columns.items():
            assert column.shape == (total,), (name, column.shape, total)

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    def with_(self, **columns: torch.Tensor) -> TrainBatch:
        """The same sequences with columns added or replaced. Each is [T]."""
        return replace(self, columns={**self.columns, **columns})

    @cached_property
    def segments(self) -> torch.Tensor:
        """[T] int64: the number of the sequence that each token belongs to, ascending. Made once."""
        lens = torch.tensor(self.seq_lens, dtype=torch.int64)
        return torch.repeat_interleave(torch.arange(self.num_sequences), lens)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First token of each sequence, and T at the end."""
        return (0, *accumulate(self.seq_lens))

    def select(self, sequences: Sequence[int]) -> TrainBatch:
        """The given sequences, in the given order."""
        starts = self.starts
        pieces = [torch.arange(starts[s], starts[s + 1]) for s in sequences]
        index = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)
        return TrainBatch(
            tokens=self.tokens[index],
            seq_lens=tuple(self.seq_lens[s] for s in sequences),
            loss_mask=self.loss_mask[index],
            columns={name: column[index] for name, column in self.columns.items()},
            routed=None if self.routed is None else self.routed[index],
        )


@dataclass(frozen=True)
class Metric:
    """A sum and a count, reduced apart over micro-batches and ranks and divided once."""

    total: float
    count: float

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else float("nan")

    def __add__(self, other: Metric) -> Metric:
        return Metric(self.total + other.total, self.count + other.count)


@dataclass(frozen=True)
class OffloadReport:
    """What went from the device to the host, and the seconds of both ways. Reports of several moves add up."""

    freed: dict[str, int] = field(default_factory=dict[str, int])
    """params, grads, optimizer -> bytes of device memory that were freed"""
    seconds: float = 0.0

    def __add__(self, other: OffloadReport) -> OffloadReport:
        kinds = {**self.freed, **other.freed}
        freed = {kind: self.freed.get(kind, 0) + other.freed.get(kind, 0) for kind in kinds}
        return OffloadReport(freed, self.seconds + other.seconds)

    def metrics(self) -> dict[str, float]:
        """offload/<what>_bytes and time/offload; empty where nothing moves."""
        if not self.freed and not self.seconds:
            return {}
        return {f"offload/{kind}_bytes": float(size) for kind, size in self.freed.items()} | {
            "time/offload": self.seconds
        }


@dataclass(frozen=True)
class FileMark:
    """What tells a whole file from a broken one."""

    size: int
    """bytes"""
    crc32: int


@dataclass(frozen=True)
class SyncReport:
    """What one weight sync did: of one rank, or of several added up.

    Bytes of engine parameters: aliased (they are the trainer's memory), local (copied within a rank), moved (received
    from other ranks). minimum: the least that had to be received, None where whole tensors were sent. full_gather: what
    gathering the whole model on every rank would have received. messages: between ranks. adapter: of adapters (LoRA),
    whole, on every rank.
    """

    local_bytes: int = 0
    aliased_bytes: int = 0
    moved_bytes: int = 0
    minimum_bytes: int | None = None
    full_gather_bytes: int = 0
    messages: int = 0
    adapter_bytes: int = 0
    staging_bytes: int = 0
    """Most memory for buckets on one rank."""
    seconds: float = 0.0
    """Of the slowest rank."""

    def __add__(self, other: SyncReport) -> SyncReport:
        least = (self.minimum_bytes, other.minimum_bytes)
        return SyncReport(
            local_bytes=self.local_bytes + other.local_bytes,
            aliased_bytes=self.aliased_bytes + other.aliased_bytes,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            minimum_bytes=None if None in least else sum(size or 0 for size in least),
            full_gather_bytes=self.full_gather_bytes + other.full_gather_bytes,
            messages=self.messages + other.messages,
            adapter_bytes=self.adapter_bytes + other.adapter_bytes,
            staging_bytes=max(self.staging_bytes, other.staging_bytes),
            seconds=max(self.seconds, other.seconds),
        )

    def metrics(self) -> dict[str, float]:
        """sync/<what>_bytes, sync/messages and sync/seconds."""
        found = {
            "sync/local_bytes": self.local_bytes,
            "sync/aliased_bytes": self.aliased_bytes,
            "sync/moved_bytes": self.moved_bytes,
            "sync/full_gather_bytes": self.full_gather_bytes,
            "sync/messages": self.messages,
            "sync/staging_bytes": self.staging_bytes,
            "sync/seconds": self.seconds,
        }
        if self.adapter_bytes:
            found["sync/adapter_bytes"] = self.adapter_bytes
        if self.minimum_bytes is not None:
            found["sync/minimum_bytes"] = self.minimum_bytes
        return {name: float(value) for name, value in found.items()}


@dataclass(frozen=True)
class BadMicroBatch:
    """A micro-batch whose loss or own gradient is not finite, as one rank saw it."""

    rank: int
    dp: int
    """Data-parallel rank whose micro-batch it is."""
    micro: int
    """Its number among that rank's micro-batches of the mini-batch."""
    sequences: tuple[int, ...] | None
    """Numbers of the sequences in it that are at fault; None where all may be."""
    what: Literal["loss", "gradient"]


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did. Equal on all ranks of the last pipeline stage; others lack loss and metrics."""

    loss: float
    grad_norm: float
    lr: float
    metrics: dict[str, Metric] = field(default_factory=dict[str, Metric])
    updated: bool = True
    """False where loss or gradient norm are not finite: weights, moments and learning-rate schedule are as before."""
    bad: tuple[BadMicroBatch, ...] = ()
    """Where that came from, by all ranks; empty where each micro-batch is finite by itself and their sum is not."""
