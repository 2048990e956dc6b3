"""Checks of the batch: its mini-batches, what each rank gets, and whether the longest sequence fits."""

from __future__ import annotations

from megatron_rl.config.checks.model import ModelShapes
from megatron_rl.config.checks.words import divisors, listed, longest_sequence
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import Fault


def mini_batches(cfg: RunConfig) -> list[Fault]:
    """Mini-batches of equal size make up the batch of a step."""
    batch, mini = cfg.data.train_batch_size, cfg.mini_batch_size
    if batch % mini == 0:
        return []
    near = [part for part in divisors(batch) if part <= mini][-2:]
    cure = f"use a divisor of {batch}, for instance {listed(near)}"
    reason = f"does not divide data.train_batch_size {batch}"
    if mini > batch:
        reason = f"is more than data.train_batch_size {batch}: a step has no more prompts"
        cure = f"use {batch} or a divisor of it, or raise data.train_batch_size to a multiple of {mini}"
    return [Fault("actor.ppo_mini_batch_size", mini, reason, cure)]


def ranks_have_work(cfg: RunConfig) -> list[Fault]:
    """Each data-parallel rank has at least one sequence in each optimizer step."""
    # The sequences of a row of preferences stay on one rank.
    per_prompt = 1 if cfg.needs.preferences else cfg.samples_per_prompt
    sequences = cfg.mini_batch_size * per_prompt
    if cfg.world_size % cfg.model_parallel_size or sequences >= cfg.dp_size:
        return []
    own = cfg.needs.rollouts and cfg.actor.ppo_mini_batch_size is not None
    key = "actor.ppo_mini_batch_size" if own else "data.train_batch_size"
    noun = "rows" if cfg.needs.preferences else "sequences"
    reason = f"an optimizer step has {sequences} {noun} for {cfg.dp_size} data-parallel ranks: some have none"
    cure = f"use at least {-(-cfg.dp_size // per_prompt)}, or fewer ranks"
    return [Fault(key, cfg.mini_batch_size, reason, cure)]


def rows_stay_whole(cfg: RunConfig) -> list[Fault]:
    """The sequences of a row of preferences fit into one micro-batch."""
    size, together = cfg.actor.ppo_micro_batch_size_per_gpu, cfg.sequences_together
    if size is None or size >= together:
        return []
    reason = f"a row of preferences has {together} sequences, which stay in one forward pass"
    return [Fault("actor.ppo_micro_batch_size_per_gpu", size, reason, f"use {together} or more, or leave it out")]


def token_budget(cfg: RunConfig) -> list[Fault]:
    """The longest sequence fits into one forward pass."""
    cp = cfg.actor.cp
    # Context parallelism pads a sequence until 2 cp chunks of it are equal.
    # A reward model's score is read where one more token would be predicted.
    longest = cfg.max_sequence_length + (1 if cfg.needs.reward_head else 0)
    needed = longest if cp == 1 else -(-longest // (2 * cp)) * 2
    needed *= cfg.sequences_together
    if cfg.actor.max_tokens_per_gpu >= needed:
        return []
    if cfg.sequences_together > 1:
        reason = f"is less than {needed}, the tokens of the two sequences of a row, which stay in one forward pass"
        cure = f"raise it to at least {needed}, or lower the lengths"
        return [Fault("actor.max_tokens_per_gpu", cfg.actor.max_tokens_per_gpu, reason, cure)]
    share = "" if cp == 1 else f" (a rank holds 1 / {cp} of it, actor.cp)"
    reason = f"is less than the longest sequence, {longest_sequence(cfg)}{share}, which must fit into one forward pass"
    cure = f"raise it to at least {needed}, or lower the lengths"
    return [Fault("actor.max_tokens_per_gpu", cfg.actor.max_tokens_per_gpu, reason, cure)]


def positions(cfg: RunConfig, models: ModelShapes) -> list[Fault]:
    """The longest sequence lies within the positions that the model knows."""
    shape, longest = models.actor(cfg), cfg.max_sequence_length
    if shape is None or longest <= shape.max_position_embeddings:
        return []
    prompt, response = cfg.data.max_prompt_length, cfg.data.max_response_length
    reason = (
        f"with data.max_prompt_length {prompt} a sequence may have {longest} tokens, and the model knows "
        f"{shape.max_position_embeddings} positions (max_position_embeddings)"
    )
    cure = f"make the two sum to at most {shape.max_position_embeddings}"
    return [Fault("data.max_response_length", response, reason, cure)]
