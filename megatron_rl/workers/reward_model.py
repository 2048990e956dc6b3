"""A reward model: a sequence classifier of transformers that scores whole conversations, on CPU or GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.model import ModelConfig
from megatron_rl.config.sections.reward import RewardModelConfig
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.errors import CheckpointError, RewardError
from megatron_rl.observe.beat import beat
from megatron_rl.observe.log import setup_logging
from megatron_rl.rewards.base import RewardResult, RewardSample, checked
from megatron_rl.weights.dtypes import DTYPES
from megatron_rl.weights.safetensors import file_holding, is_finite, refuse_nonfinite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOO_LARGE = 10**9
"""What tokenizers say when they know no limit is above this."""


@dataclass(frozen=True)
class RewardModelPlan:
    """What a worker must know beside the config."""

    device: str
    failed_score: float
    same_rendering: bool
    """The policy's token ids are what this model would be given: they are taken as they are."""


class RewardModelWorker:
    """One copy of the model. Its methods are called on all copies at once, each with a part of the samples."""

    def __init__(self, rank: int, world: int, cfg: RewardModelConfig, plan: RewardModelPlan) -> None:
        """Raises CheckpointError where the folder's weights leave a part of the classifier unset."""
        setup_logging("reward_model", rank)
        assert cfg.path is not None
        self._cfg, self._plan = cfg, plan
        self._device = torch.device("cpu")
        if plan.device == "cuda":
            self._device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        self._tokenizer = load_tokenizer(cfg.tokenizer_path or cfg.path)
        self._model = _load(cfg).to(self._device)  # type: ignore[arg-type]
        self._max_length = self._find_max_length()

    def _find_max_length(self) -> int:
        known = [self._model.config.to_dict().get("max_position_embeddings"), self._tokenizer.model_max_length]
        limits = [int(limit) for limit in known if limit is not None and limit < _TOO_LARGE]
        asked = self._cfg.max_length
        if asked is not None and limits and asked > min(limits):
            raise RewardError(
                f"reward.model.max_length: {asked} -- the model of {self._cfg.path} takes {min(limits)} tokens "
                f"-- use at most that, or leave it out"
            )
        if asked is None and not limits:
            raise RewardError(
                f"reward.model.max_length: the model of {self._cfg.path} does not say what it takes -- set it"
            )
        return asked or min(limits)

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One result a sample, in order; extra model_truncated is 1 where only the last max_length tokens are read.

        A logit that is not finite is a failed sample.
        """
        results: list[RewardResult | None] = [None] * len(samples)
        rows: list[tuple[int, list[int], bool]] = []
        for number, sample in enumerate(samples):
            ids = self._ids(sample)
            cut = len(ids) > self._max_length
            if not ids or (cut and self._cfg.overlong == "fail"):
                reason = (
                    f"{len(ids)} tokens for the reward model, which takes 1 to {self._max_length} "
                    "(reward.model.max_length, reward.model.overlong)"
                )
                results[number] = RewardResult(self._plan.failed_score, failed=reason)
                continue
            rows.append((number, ids[-self._max_length :], cut))
        rows.sort(key=lambda row: len(row[1]))
        for at in range(0, len(rows), self._cfg.batch_size):
            part = rows[at : at + self._cfg.batch_size]
            beat(f"row {at} of {len(rows)}")
            values = self._forward([ids for _, ids, _ in part])
            for (number, _, cut), value in zip(part, values, strict=True):
                extra = {"model_truncated": float(cut)} if self._cfg.overlong == "truncate" else {}
                results[number] = checked(RewardResult(value, extra), "the reward model", self._plan.failed_score)
        return [result for result in results if result is not None]

    def _ids(self, sample: RewardSample) -> list[int]:
        """The token ids that the model reads: the policy's own, or its conversation written as this model knows it."""
        if self._plan.same_rendering and sample.response_ids:
            return [*sample.prompt_ids, *sample.response_ids]
        if sample.messages is None or self._cfg.chat_template == "plain":
            head = sample.prompt_text
            if sample.messages is not None:
                head = "".join(str(message.get("content") or "") for message in sample.messages)
            return list(self._tokenizer(head + sample.solution_str)["input_ids"])
        if not self._tokenizer.chat_template:
            raise RewardError(
                f"reward.model: the tokenizer of {self._cfg.tokenizer_path or self._cfg.path} has no chat template "
                "-- set reward.model.chat_template=plain"
            )
        conversation = [*sample.messages, {"role": "assistant", "content": sample.solution_str}]
        kwargs = self._cfg.apply_chat_template_kwargs
        tools = list(sample.tools) if sample.tools else None
        text = self._tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False, **kwargs)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.no_grad()
    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Scores of rows of ids, padded on the right to the longest."""
        pad = self._pad_id([row[-1] for row in rows])
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=self._device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self._device)
        self._model.config.pad_token_id = pad
        logits = self._model(input_ids=ids, attention_mask=mask).logits.float().squeeze(-1)
        return (torch.sigmoid(logits) if self._cfg.activation == "sigmoid" else logits).tolist()

    def _pad_id(self, last: Sequence[int]) -> int:
        """Decoders score the last token that is no padding, so the pad id must not be a row's last real one."""
        pad = self._tokenizer.pad_token_id
        if pad is not None and pad not in last:
            return pad
        return next(token for token in range(len(last) + 1) if token not in last)

    def close(self) -> None:
        """Drop the model."""
        del self._model


def _load(cfg: RewardModelConfig) -> PreTrainedModel:
    from transformers import AutoModelForSequenceClassification

    assert cfg.path is not None
    model, found = AutoModelForSequenceClassification.from_pretrained(
        cfg.path, dtype=DTYPES[cfg.dtype], output_loading_info=True
    )
    # transformers draws what a checkpoint lacks at random: a language model's folder would give random rewards.
    unset = sorted({*found["missing_keys"], *(name[0] for name in found["mismatched_keys"])})
    if unset:
        raise CheckpointError(
            f"reward.model.path: {cfg.path!r} has no weights for {', '.join(unset)} "
            "-- give the folder of a trained sequence classifier"
        )
    bad = [name for name, tensor in model.state_dict().items() if not is_finite(tensor)]
    refuse_nonfinite({name: file_holding(cfg.path, name) for name in bad})
    return model.eval()


def same_rendering(policy: ModelConfig, data: DataConfig, model: RewardModelConfig) -> bool:
    """Whether the policy's token ids are those that the reward model's own tokenizer and template would give."""
    ours, theirs = Path(policy.tokenizer_path or policy.path), Path(model.tokenizer_path or model.path or "")
    if (data.chat_template, data.apply_chat_template_kwargs) != (model.chat_template, model.apply_chat_template_kwargs):
        return False
    if policy.chat_template is not None or not all((one / "tokenizer.json").is_file() for one in (ours, theirs)):
        return False
    return _tokenizer_facts(ours) == _tokenizer_facts(theirs)


def _tokenizer_facts(folder: Path) -> tuple[object, object]:
    """(vocabulary and rules, chat template) of a tokenizer's folder."""
    rules = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    # How a text is cut or padded by default is no part of how it is written.
    rules = {name: value for name, value in rules.items() if name not in ("truncation", "padding")}
    template = folder / "chat_template.jinja"
    if template.is_file():
        return rules, template.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    return rules, json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
