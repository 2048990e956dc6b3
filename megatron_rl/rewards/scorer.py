"""A run's rewards as one object: compositions over reward processes and over models that score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from megatron_rl.config.checks.reward import WORKER_NAMES, RewardPlan, plan_rewards
from megatron_rl.config.checks.reward_terms import Reward
from megatron_rl.config.sections.reward import RewardConfig
from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.rewards.base import RewardResult, RewardSample, shown
from megatron_rl.rewards.compose import Results, score_by_source
from megatron_rl.rewards.pool import FailureLimit, RewardPool, RewardRule, TooManyFailed
from megatron_rl.rewards.truths import refuse_unscorable, source_notes

ModelFn = Callable[[Sequence[RewardSample]], Results]
"""Scores samples by a model: a result each."""


class SamplePool(Protocol):
    """Reward processes, as a scorer sees them: those of this machine (RewardPool), or of several nodes."""

    def score(self, samples: Sequence[RewardSample], reward: int, limit: FailureLimit | None) -> Results:
        """See RewardPool.score."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


def local_pool(cfg: RewardConfig, rules: Sequence[RewardRule]) -> RewardPool:
    """The processes of section `reward` on this machine."""
    limit = cfg.memory_limit_gb
    return RewardPool(
        rules,
        num_workers=cfg.num_workers,
        timeout_s=cfg.timeout_s,
        failed_score=cfg.failed_score,
        memory_limit=None if limit is None else int(limit * 2**30),
    )


StartPool = Callable[[RewardConfig, Sequence[RewardRule]], SamplePool]
"""(section reward, its rewards) -> the processes"""


class RewardScorer:
    """Scores samples as section `reward` says. Close it, or use it in a `with`.

    Its own are the reward processes; models come from outside, as functions, and stay the caller's.
    """

    def __init__(
        self,
        cfg: RewardConfig,
        models: Mapping[str, ModelFn] | None = None,
        plan: RewardPlan | None = None,
        start_pool: StartPool = local_pool,
    ) -> None:
        """models: what answers for `model` and `judge`. plan: compositions made in Python, in place of those that
        cfg.function and cfg.by_source say. start_pool: starts the reward processes, if a reward needs any.

        Raises ConfigError where the section cannot be read, RewardError where a model has nothing to answer for it.
        """
        if plan is None:
            plan, faults = plan_rewards(cfg)
            if plan is None:
                raise ConfigError(faults)
        self.cfg, self.plan, self._models = cfg, plan, dict(models or {})
        rewards = plan.rewards()
        missing = [reward.spec for reward in rewards if reward.spec in WORKER_NAMES and reward.spec not in self._models]
        if missing:
            raise RewardError(f"reward.function names {', '.join(missing)}, which nothing gives -- pass it in `models`")
        self._rules = [reward for reward in rewards if reward.spec not in self._models]
        rules = [RewardRule(reward.spec, reward.kwargs) for reward in self._rules]
        self._pool = start_pool(cfg, rules) if rules else None

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One result a sample, in order; `failed` says why where there is no score."""
        return self._scored(samples, None)

    def score_or_stop(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """As `score`; RewardError as soon as more than reward.max_failed_share of the samples have failed for certain,
        naming the first. A reward that always hangs is not waited for to the end.
        """
        limit = FailureLimit(int(self.cfg.max_failed_share * len(samples)))
        try:
            results = self._scored(samples, limit)
        except TooManyFailed as error:
            sample, reason = limit.failed[0]
            raise RewardError(
                f"reward.function {self.cfg.function!r} failed on {len(limit.failed)} of {len(samples)} samples, "
                f"more than reward.max_failed_share {self.cfg.max_failed_share}, and the rest is not waited for; "
                f"the first ({shown(sample)}): {reason}"
            ) from error
        self.require_few_failures(results, samples)
        return results

    def _scored(self, samples: Sequence[RewardSample], limit: FailureLimit | None) -> list[RewardResult]:
        def score(reward: Reward, part: Sequence[RewardSample]) -> Results:
            if reward.spec in self._models:
                return self._models[reward.spec](part)
            assert self._pool is not None
            return self._pool.score(part, self._rules.index(reward), limit)

        plan = self.plan
        return score_by_source(plan.default, plan.by_source, samples, score, self.cfg.failed_score)

    def check_rows(self, samples: Sequence[RewardSample]) -> None:
        """Look at every sample's data source and ground truth before the run starts; no reward is asked.

        Raises DataError where a data source has no reward, or a built-in reward cannot use a ground truth: all of them.
        """
        refuse_unscorable(self.plan.default, self.plan.by_source, samples, self.cfg.function)

    def notes(self, samples: Sequence[RewardSample]) -> list[str]:
        """By which rule each data source is scored, where reward.function does not say it; a line each."""
        return source_notes(self.plan.default, self.plan.by_source, samples)

    def preflight(self, samples: Sequence[RewardSample]) -> None:
        """Score one sample of each data source before the run starts.

        Raises RewardError where a reward cannot be loaded, or fails on one of them.
        """
        firsts: dict[tuple[str, bool], RewardSample] = {}
        for sample in samples:
            firsts.setdefault((sample.data_source, sample.has_source), sample)
        for sample, result in zip(firsts.values(), self.score(list(firsts.values())), strict=True):
            if result.failed is not None:
                source = f"reward.by_source.{sample.data_source}"
                key = source if sample.data_source in self.plan.by_source else "reward.function"
                spec = self.cfg.by_source.get(sample.data_source, self.cfg.function)
                raise RewardError(f"{key}: {spec!r} fails on a first sample ({shown(sample)}): {result.failed}")

    def require_few_failures(
        self, results: Sequence[RewardResult], samples: Sequence[RewardSample] | None = None
    ) -> None:
        """RewardError where more than reward.max_failed_share of the results have failed; names the first's sample."""
        failed = [number for number, result in enumerate(results) if result.failed is not None]
        if len(failed) > self.cfg.max_failed_share * len(results):
            first = results[failed[0]].failed
            which = f" ({shown(samples[failed[0]])})" if samples else ""
            raise RewardError(
                f"reward.function {self.cfg.function!r} failed on {len(failed)} of {len(results)} samples, "
                f"more than reward.max_failed_share {self.cfg.max_failed_share}; the first{which}: {first}"
            )

    def close(self) -> None:
        """End the reward processes."""
        if self._pool is not None:
            self._pool.close()
