"""A generative judge: a language model that is shown a prompt and a response, and writes a score."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.config.sections.reward import JudgeConfig
from megatron_rl.data.render import Renderer
from megatron_rl.models import FAMILIES
from megatron_rl.models.rules import hf_shapes
from megatron_rl.models.shape import ModelShape
from megatron_rl.observe.log import setup_logging
from megatron_rl.rewards.base import RewardResult, RewardSample
from megatron_rl.rollout.engine import EngineSettings, Request, Sampling, make_engine
from megatron_rl.weights.dtypes import DTYPES
from megatron_rl.weights.safetensors import SafetensorsSource, finite_tensors

LONGEST_SHOWN = 200


@dataclass(frozen=True)
class JudgePlan:
    """What a worker must know beside the config."""

    device: str
    failed_score: float
    shape: ModelShape
    seed: int


class JudgeWorker:
    """One engine with the judge's weights. Its methods are called on all copies at once, each with its samples."""

    def __init__(self, rank: int, world: int, cfg: JudgeConfig, plan: JudgePlan) -> None:
        setup_logging("judge", rank)
        assert cfg.path is not None
        self._cfg, self._plan = cfg, plan
        if plan.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self._renderer = Renderer(
            tokenizer_path=cfg.tokenizer_path or cfg.path,
            chat_template=cfg.chat_template,
            template_kwargs=cfg.apply_chat_template_kwargs,
            model_path=cfg.path,
        )
        self._stop_ids, _ = self._renderer.stops(())
        self._pattern = re.compile(cfg.score_pattern, re.DOTALL)
        self._max_length = cfg.max_length or plan.shape.max_position_embeddings
        settings = EngineSettings(
            name=cfg.engine,
            model_path=cfg.path,
            tokenizer_path=cfg.tokenizer_path or cfg.path,
            vocab_size=plan.shape.vocab_size,
            max_model_len=self._max_length,
            dtype=cfg.dtype,
            device=plan.device,
            gpu_memory_utilization=cfg.gpu_memory_utilization,
            kv_cache_gb=cfg.kv_cache_gb,
            max_num_seqs=cfg.max_num_seqs,
            max_num_batched_tokens=None,
            enforce_eager=False,
            free_cache_engine=False,
            seed=plan.seed + rank,
            needs_text=False,
        )
        self._engine = make_engine(settings)
        source = SafetensorsSource(Path(cfg.path))
        source.check(hf_shapes(plan.shape, FAMILIES[plan.shape.architecture]))
        tensors = finite_tensors(source, DTYPES[cfg.dtype])
        # A tied output layer may stand in the file as well; engines take it from the embedding.
        tied = plan.shape.tie_word_embeddings
        self._engine.update_weights(((n, t) for n, t in tensors if not (tied and n == "lm_head.weight")), 0)

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One result a sample, in order. It fails where the question is too long or no score is in the answer."""
        results: list[RewardResult | None] = [None] * len(samples)
        requests: list[Request] = []
        asked: list[int] = []
        for number, sample in enumerate(samples):
            ids = self._renderer.prompt_ids([{"role": "user", "content": self._question(sample)}])
            room = self._max_length - self._cfg.max_tokens
            if len(ids) > room:
                reason = (
                    f"{len(ids)} tokens for the judge, which takes {room} beside its answer (reward.judge.max_length)"
                )
                results[number] = RewardResult(self._plan.failed_score, failed=reason)
                continue
            requests.append(Request(tuple(ids), self._plan.seed))
            asked.append(number)
        sampling = Sampling(
            n=1,
            temperature=self._cfg.temperature,
            top_p=1.0,
            top_k=-1,
            max_tokens=self._cfg.max_tokens,
            stop_token_ids=self._stop_ids,
        )
        answers = self._engine.generate(requests, sampling).id_tuples() if requests else []
        for number, ids in zip(asked, answers, strict=True):
            text = self._renderer.decode(ids)
            results[number] = read_score(text, self._pattern, self._cfg, self._plan.failed_score)
        return [result for result in results if result is not None]

    def _question(self, sample: RewardSample) -> str:
        prompt = sample.prompt_text
        if sample.messages is not None:
            contents = [(str(message.get("role")), str(message.get("content") or "")) for message in sample.messages]
            prompt = contents[0][1] if len(contents) == 1 else "\n".join(f"{role}: {text}" for role, text in contents)
        return self._cfg.template.format(prompt=prompt, response=sample.solution_str, ground_truth=sample.ground_truth)

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


def read_score(text: str, pattern: re.Pattern[str], cfg: JudgeConfig, failed_score: float) -> RewardResult:
    """The score in a judge's answer, from cfg.lowest to cfg.highest, as a number from 0 to 1."""
    found = pattern.findall(text)
    shown = text if len(text) <= LONGEST_SHOWN else "..." + text[-LONGEST_SHOWN:]
    if not found:
        return RewardResult(
            failed_score, failed=f"the judge's answer has no score (reward.judge.score_pattern): {shown!r}"
        )
    try:
        number = float(found[-1])
    except ValueError:
        return RewardResult(failed_score, failed=f"the judge's score {found[-1]!r} is no number: {shown!r}")
    # Written so that what is no number at all (nan) is outside as well.
    if not cfg.lowest <= number <= cfg.highest:
        reason = f"the judge's score {number:g} is not from {cfg.lowest:g} to {cfg.highest:g} (reward.judge): {shown!r}"
        return RewardResult(failed_score, failed=reason)
    return RewardResult((number - cfg.lowest) / (cfg.highest - cfg.lowest))
