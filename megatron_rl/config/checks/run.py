"""Checks that span sections and need nothing but the config. Each takes the run and returns its faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.config.checks.words import divisors, listed, longest_sequence, ranks
from megatron_rl.config.sections.data import RESERVED_KEYWORDS
from megatron_rl.errors import Fault

if TYPE_CHECKING:
    from megatron_rl.config.run import RunConfig


def virtual_pipeline(cfg: RunConfig) -> list[Fault]:
    """Model chunks interleave over pipeline stages, and not over two (contract R8)."""
    actor = cfg.actor
    if actor.vpp == 1:
        return []
    if actor.pp == 1:
        return [Fault("actor.vpp", actor.vpp, "interleaves pipeline stages, and actor.pp is 1", "set actor.vpp=1")]
    if actor.pp == 2:
        reason = "with two stages Megatron-Core pairs its messages up wrongly and trains on wrong gradients"
        return [Fault("actor.vpp", actor.vpp, reason, "set actor.vpp=1, or actor.pp to 3 or more")]
    return []


def uneven_pipeline(cfg: RunConfig) -> list[Fault]:
    """Sizes of the first and last stage are given only where there are stages."""
    if cfg.actor.pp > 1:
        return []
    given = {
        "actor.num_layers_in_first_pipeline_stage": cfg.actor.num_layers_in_first_pipeline_stage,
        "actor.num_layers_in_last_pipeline_stage": cfg.actor.num_layers_in_last_pipeline_stage,
    }
    reason = "there is one stage: actor.pp is 1"
    return [Fault(key, value, reason, "leave it out") for key, value in given.items() if value is not None]


def expert_layout(cfg: RunConfig) -> list[Fault]:
    """etp * ep * pp divides the ranks, and a split of single experts comes with a split of the experts."""
    actor, world = cfg.actor, cfg.world_size
    if actor.ep == 1:
        if actor.expert_tp == actor.tp:
            return []
        reason = (
            f"differs from actor.tp {actor.tp} while actor.ep is 1: Megatron-Core would add the experts' gradients up "
            "over the wrong ranks"
        )
        return [Fault("actor.etp", actor.etp, reason, "leave it out, or set actor.ep above 1")]
    parts = actor.expert_tp * actor.ep * actor.pp
    if world % parts == 0:
        return []
    reason = f"etp * ep * pp = {actor.expert_tp} * {actor.ep} * {actor.pp} = {parts} does not divide the {ranks(cfg)}"
    cure = f"make etp * ep * pp one of {listed(divisors(world))}, or the number of ranks a multiple of {parts}"
    return [Fault("actor.ep", actor.ep, reason, cure)]


def actor_layout(cfg: RunConfig) -> list[Fault]:
    """tp * pp * cp divides the ranks."""
    world, parts = cfg.world_size, cfg.model_parallel_size
    if world % parts == 0:
        return []
    reason = f"tp * pp * cp = {parts} does not divide the {ranks(cfg)}"
    fitting = listed(divisors(world))
    cure = f"make tp * pp * cp one of {fitting}, or the number of ranks a multiple of {parts}"
    return [Fault("actor.tp", cfg.actor.tp, reason, cure)]


def template_keywords(cfg: RunConfig) -> list[Fault]:
    """What the run itself decides is no keyword of a chat template."""
    given = {
        "data": cfg.data.apply_chat_template_kwargs,
        "reward.model": cfg.reward.model.apply_chat_template_kwargs,
        "reward.judge": cfg.reward.judge.apply_chat_template_kwargs,
    }
    return [
        Fault(
            f"{section}.apply_chat_template_kwargs.{name}",
            value,
            "is no keyword that a template can be given here",
            RESERVED_KEYWORDS[name],
        )
        for section, keywords in given.items()
        for name, value in keywords.items()
        if name in RESERVED_KEYWORDS
    ]


def inline_backend(cfg: RunConfig) -> list[Fault]:
    """The inline backend has one rank."""
    if cfg.cluster.backend != "inline" or cfg.world_size == 1:
        return []
    reason = f"runs one rank in this process, and there are {ranks(cfg)}"
    cure = "set cluster.backend=ray, or cluster.nnodes=1 and cluster.n_gpus_per_node=1"
    return [Fault("cluster.backend", "inline", reason, cure)]


def ray_address(cfg: RunConfig) -> list[Fault]:
    """ray_address and ray_port have an effect, or are not given."""
    cluster = cfg.cluster
    given = {"ray_address": cluster.ray_address, "ray_port": cluster.ray_port}
    if cluster.backend == "inline":
        return [
            Fault(f"cluster.{key}", value, "has no effect: cluster.backend inline starts no Ray", "leave it out")
            for key, value in given.items()
            if value is not None
        ]
    if cluster.ray_address is None or cluster.ray_port is None:
        return []
    reason = f"is the port of a local Ray, and cluster.ray_address {cluster.ray_address!r} joins a running one"
    return [Fault("cluster.ray_port", cluster.ray_port, reason, "leave one of the two out")]


def sequence_parallel(cfg: RunConfig) -> list[Fault]:
    """Sequence parallelism splits over tensor-parallel ranks."""
    if not cfg.actor.sequence_parallel or cfg.actor.tp > 1:
        return []
    reason = "splits activations between tensor-parallel ranks, and actor.tp is 1"
    return [Fault("actor.sequence_parallel", True, reason, "set it to false, or actor.tp above 1")]


def overlapped_gather(cfg: RunConfig) -> list[Fault]:
    """Weights are gathered late only where an optimizer of parts leaves them to be, and bucket by bucket."""
    actor = cfg.actor
    if not actor.overlap_param_gather:
        return []
    missing: dict[str, str] = {}
    if not actor.use_distributed_optimizer:
        missing["use_distributed_optimizer"] = "each rank updates whole weights, so that there is nothing to gather"
    if not actor.overlap_grad_reduce:
        missing["overlap_grad_reduce"] = "all weights then make one bucket, and its first layer would wait for all"
    return [
        Fault(
            "actor.overlap_param_gather",
            True,
            f"actor.{key} is off: {reason}",
            f"set actor.{key}=true, or overlap_param_gather to false",
        )
        for key, reason in missing.items()
    ]


def overlapped_chunks(cfg: RunConfig) -> list[Fault]:
    """Chunks of an interleaved pipeline would each need its own turn to send gradients and to wait for weights."""
    actor = cfg.actor
    if actor.vpp == 1:
        return []
    reason = f"does not go with the interleaved schedule of actor.vpp={actor.vpp}: its chunks would wait for each other"
    return [
        Fault(f"actor.{key}", True, reason, f"set actor.{key}=false, or actor.vpp=1")
        for key in ("overlap_grad_reduce", "overlap_param_gather")
        if getattr(actor, key)
    ]


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
    sequences = cfg.mini_batch_size * cfg.samples_per_prompt
    if cfg.world_size % cfg.model_parallel_size or sequences >= cfg.dp_size:
        return []
    own = cfg.needs.rollouts and cfg.actor.ppo_mini_batch_size is not None
    key = "actor.ppo_mini_batch_size" if own else "data.train_batch_size"
    reason = f"an optimizer step has {sequences} sequences for {cfg.dp_size} data-parallel ranks: some have none"
    per_prompt = cfg.samples_per_prompt
    cure = f"use at least {-(-cfg.dp_size // per_prompt)}, or fewer ranks"
    return [Fault(key, cfg.mini_batch_size, reason, cure)]


def token_budget(cfg: RunConfig) -> list[Fault]:
    """The longest sequence fits into one forward pass."""
    cp = cfg.actor.cp
    # Context parallelism pads a sequence until 2 cp chunks of it are equal.
    needed = cfg.max_sequence_length if cp == 1 else -(-cfg.max_sequence_length // (2 * cp)) * 2
    if cfg.actor.max_tokens_per_gpu >= needed:
        return []
    share = "" if cp == 1 else f" (a rank holds 1 / {cp} of it, actor.cp)"
    reason = f"is less than the longest sequence, {longest_sequence(cfg)}{share}, which must fit into one forward pass"
    cure = f"raise it to at least {needed}, or lower the lengths"
    return [Fault("actor.max_tokens_per_gpu", cfg.actor.max_tokens_per_gpu, reason, cure)]


def _resampled(key: str, value: object, neutral: object) -> Fault:
    reason = "the engine would renormalise the probabilities, the trainer does not: policy ratios would be wrong"
    cure = f"set {key}={neutral} for training (rollout.val may differ)"
    return Fault(key, value, reason, cure)


def top_p(cfg: RunConfig) -> list[Fault]:
    """Training samples from the whole distribution."""
    bad = cfg.needs.rollouts and cfg.rollout.top_p < 1
    return [_resampled("rollout.top_p", cfg.rollout.top_p, 1.0)] if bad else []


def validation_samples(cfg: RunConfig) -> list[Fault]:
    """Several validation samples of a prompt can differ."""
    val = cfg.rollout.val
    if not cfg.needs.rollouts or not cfg.data.val_files or val.n == 1 or val.temperature > 0:
        return []
    reason = f"{val.n} samples of each prompt would all be the same: rollout.val.temperature 0 is greedy"
    cure = "set rollout.val.temperature=1.0 (or another above 0), or rollout.val.n=1"
    return [Fault("rollout.val.n", val.n, reason, cure)]


def top_k(cfg: RunConfig) -> list[Fault]:
    """Training samples from the whole distribution."""
    bad = cfg.needs.rollouts and cfg.rollout.top_k != -1
    return [_resampled("rollout.top_k", cfg.rollout.top_k, -1)] if bad else []


def target_loss(cfg: RunConfig) -> list[Fault]:
    """Only some algorithms stop at a loss."""
    target = cfg.trainer.target_loss
    if target is None or cfg.needs.stops_at_loss:
        return []
    reason = f"only algorithm.name sft stops at a loss, and this run is {cfg.algorithm.name}"
    return [Fault("trainer.target_loss", target, reason, "leave it out, or set algorithm.name=sft")]


def validation(cfg: RunConfig) -> list[Fault]:
    """Validation that was asked for has data."""
    if cfg.trainer.test_freq <= 0 or cfg.data.val_files:
        return []
    reason = "asks for validation, and data.val_files is empty"
    return [Fault("trainer.test_freq", cfg.trainer.test_freq, reason, "give data.val_files, or set test_freq=0")]


def reference(cfg: RunConfig) -> list[Fault]:
    """A reference model that is named is used."""
    if cfg.ref.path is None or cfg.needs_reference:
        return []
    reason = "nothing in this run reads the reference: actor.use_kl_loss and algorithm.use_kl_in_reward are off"
    if not cfg.needs.rollouts:
        reason = f"algorithm.name {cfg.algorithm.name} has no reference model"
    return [Fault("ref.path", cfg.ref.path, reason, "leave it out, or turn one of the two on in a GRPO run")]


def decay_after_warmup(cfg: RunConfig) -> list[Fault]:
    """The decay of the learning rate ends after its warm-up."""
    optim = cfg.actor.optim
    if optim.lr_decay_steps is None or optim.lr_decay_steps > optim.lr_warmup_steps:
        return []
    reason = f"the decay would end before the warm-up of {optim.lr_warmup_steps} steps does"
    cure = f"use more than {optim.lr_warmup_steps}, or leave it out (the whole run)"
    return [Fault("actor.optim.lr_decay_steps", optim.lr_decay_steps, reason, cure)]


def warmup_ends(cfg: RunConfig) -> list[Fault]:
    """The learning rate reaches its peak within the run, where the run's length is given."""
    steps, warmup = cfg.trainer.total_training_steps, cfg.actor.optim.lr_warmup_steps
    if steps is None or cfg.data.train_batch_size % cfg.mini_batch_size:
        return []
    epochs = cfg.actor.ppo_epochs if cfg.needs.rollouts else 1
    updates = steps * (cfg.data.train_batch_size // cfg.mini_batch_size) * epochs
    if warmup <= updates:
        return []
    reason = f"the run has {updates} optimizer steps (trainer.total_training_steps {steps}): lr is never reached"
    return [Fault("actor.optim.lr_warmup_steps", warmup, reason, f"use at most {updates}, or a longer run")]
