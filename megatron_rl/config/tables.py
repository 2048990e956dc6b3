"""The arithmetic of a run as tables: how prompts become micro-batches, and how ranks are laid out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config.run import RunConfig
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import inspect_critic
from megatron_rl.models.rules import num_parameters
from megatron_rl.models.shape import ModelShape

SHORTEST_SEQUENCE = 2
"""Tokens of the shortest sequence that can be trained on: one of the prompt, one of the response."""


@dataclass(frozen=True)
class TableRow:
    """One line of a table. least: the value at its smallest where it varies, else None.

    Example: TableRow("micro-batches of a rank", 4, least=1, how="...") shows as "1 to 4".
    """

    name: str
    value: int | str
    how: str
    least: int | None = None

    @property
    def shown(self) -> str:
        """The value as text."""
        varies = self.least is not None and self.least != self.value
        return f"{self.least} to {self.value}" if varies else str(self.value)


def micro_batches(cfg: RunConfig, sequences: int, length: int) -> int:
    """Forward passes of one rank over `sequences` sequences of `length` tokens each."""
    per_pass = max(1, cfg.max_tokens_per_pass // length)
    if cfg.actor.ppo_micro_batch_size_per_gpu is not None:
        per_pass = min(per_pass, cfg.actor.ppo_micro_batch_size_per_gpu)
    return -(-sequences // per_pass)


def batch_table(cfg: RunConfig) -> list[TableRow]:
    """One training step: prompts x n -> sequences -> mini-batches -> micro-batches of a rank."""
    batch, mini, samples = cfg.data.train_batch_size, cfg.mini_batch_size, cfg.samples_per_prompt
    sequences, longest = mini * samples, cfg.max_sequence_length
    updates = cfg.updates_per_step
    least, most = sequences // cfg.dp_size, -(-sequences // cfg.dp_size)
    noun = "prompts" if cfg.needs.rollouts else "rows"
    rows = [TableRow(f"{noun} of a step", batch, "data.train_batch_size")]
    if cfg.needs.rollouts:
        rows += [
            TableRow("samples of a prompt", samples, "rollout.n"),
            TableRow("sequences of a step", batch * samples, f"{batch} prompts * {samples}"),
        ]
    rows.append(
        TableRow(
            "tokens of a sequence",
            longest,
            "at most max_prompt_length + max_response_length",
            SHORTEST_SEQUENCE,
        )
    )
    if cfg.needs.rollouts:
        rows += [
            TableRow("prompts of a mini-batch", mini, "actor.ppo_mini_batch_size, or all prompts of the step"),
            TableRow("sequences of a mini-batch", sequences, f"{mini} prompts * {samples}"),
            TableRow("mini-batches of a step", batch // mini, f"{batch} / {mini} prompts"),
        ]
    passes = f" * {cfg.actor.ppo_epochs} ppo_epochs" if cfg.needs.rollouts else ""
    rows += [
        TableRow("optimizer updates of a step", updates, f"{batch // mini}{passes}"),
        TableRow(
            "sequences of a rank per update",
            most,
            f"{sequences} / dp {cfg.dp_size}, balanced by tokens",
            least,
        ),
        TableRow(
            "micro-batches of a rank per update",
            micro_batches(cfg, most, longest),
            _budget(cfg) + "; all sequences at their shortest, to all at their longest",
            micro_batches(cfg, least, SHORTEST_SEQUENCE),
        ),
    ]
    if cfg.trainer.total_training_steps is not None:
        steps = cfg.trainer.total_training_steps
        # While the critic warms up the actor rests.
        steps -= cfg.trainer.critic_warmup if cfg.critic.enable else 0
        rows.append(TableRow("optimizer updates of the run", steps * updates, f"{steps} steps * {updates}"))
    return [*rows, *_critic_rows(cfg)]


def _critic_rows(cfg: RunConfig) -> list[TableRow]:
    """The critic's own updates; none where it has no transformer of its own."""
    if not cfg.critic.enable or cfg.critic.share_backbone:
        return []
    training, batch = cfg.critic_training, cfg.data.train_batch_size
    num_minis = batch // training.mini_batch_size
    how = f"{num_minis} mini-batches of {training.mini_batch_size} prompts * {training.epochs} ppo_epochs"
    return [TableRow("critic's updates of a step", cfg.critic_updates_per_step, how)]


def _budget(cfg: RunConfig) -> str:
    cap = cfg.actor.ppo_micro_batch_size_per_gpu
    sequences = "" if cap is None else f" and {cap} sequences"
    return f"at most {cfg.max_tokens_per_pass} tokens{sequences} each"


def layout_table(cfg: RunConfig, shape: ModelShape | None = None) -> list[TableRow]:
    """Ranks and what each holds. shape: adds the model's parts."""
    actor, cluster = cfg.actor, cfg.cluster
    rows = [
        TableRow(
            "ranks",
            cfg.world_size,
            f"cluster.nnodes {cluster.nnodes} * n_gpus_per_node {cluster.n_gpus_per_node}, {cluster.backend}",
        ),
        TableRow("tensor parallel (tp)", actor.tp, "actor.tp"),
        TableRow("pipeline parallel (pp)", actor.pp, "actor.pp"),
        TableRow("context parallel (cp)", actor.cp, "actor.cp"),
        TableRow("data parallel (dp)", cfg.dp_size, "ranks / (tp * pp * cp)"),
    ]
    if cfg.has_engine:
        engines = cfg.world_size // cfg.rollout.tp
        each = f"{cfg.rollout.tp} rank{'s' if cfg.rollout.tp > 1 else ''} each"
        rows.append(TableRow("engines", engines, f"{cfg.rollout.name}, {each}, on the actor's ranks"))
        rows += [_reference(cfg)] if cfg.needs.rollouts else []
        rows += [TableRow("critic", 1, _critic(cfg))] if cfg.critic.enable else []
    elif cfg.needs_reference:
        rows.append(_reference(cfg))
    if shape is not None:
        rows += [
            TableRow(
                "parameters",
                f"{num_parameters(shape, FAMILIES[shape.architecture]):,}",
                f"{shape.architecture}, {cfg.model.dtype}",
            ),
            TableRow("query heads of a rank", shape.num_heads // actor.tp, f"{shape.num_heads} / tp {actor.tp}"),
            TableRow("KV heads of a rank", shape.num_kv_heads // actor.tp, f"{shape.num_kv_heads} / tp {actor.tp}"),
        ]
        if shape.further_layers:
            note = "predict further tokens; left out of training, engines and saved models"
            rows.append(TableRow("further layers", shape.further_layers, note))
        rows += [_critic_parameters(cfg, shape)] if cfg.critic.enable else []
        rows += _expert_rows(cfg, shape) if shape.num_experts else []
        parts, axis = (actor.expert_tp, "etp") if shape.num_experts else (actor.tp, "tp")
        columns = "columns of an expert on a rank" if shape.num_experts else "MLP columns of a rank"
        rows.append(TableRow(columns, shape.ffn_size // parts, f"{shape.ffn_size} / {axis} {parts}"))
    return rows


def _reference(cfg: RunConfig) -> TableRow:
    reference = cfg.ref.path or "the actor's starting weights"
    if cfg.model.lora.rank and cfg.ref.path is None:
        reference = "the actor without its adapters"
    return TableRow("reference model", int(cfg.needs_reference), reference if cfg.needs_reference else "no KL term")


def _critic(cfg: RunConfig) -> str:
    if cfg.critic.share_backbone:
        return "a head on the actor's transformer"
    start = cfg.critic.path or "the actor's starting weights"
    return f"a model of its own, split as the actor is; starts from {start}"


def _critic_parameters(cfg: RunConfig, actor: ModelShape) -> TableRow:
    """What the critic adds to the actor, and the memory of it over the ranks that hold one copy."""
    shape = inspect_critic(cfg.critic.path)[0] if cfg.critic.path else actor
    shape = actor if shape is None else shape
    count = shape.hidden_size + 1
    if not cfg.critic.share_backbone:
        count += num_parameters(shape, FAMILIES[shape.architecture]) - (
            0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
        )
    # Weights, float32 gradients, AdamW's two means; float32 masters of half-precision weights.
    each = 16 if cfg.model.dtype == "float32" else 18
    how = f"{each} bytes each with gradients and AdamW: {count * each / 1e6:,.3f} MB a copy"
    return TableRow("critic's parameters", f"{count:,}", how)


def _expert_rows(cfg: RunConfig, shape: ModelShape) -> list[TableRow]:
    actor = cfg.actor
    replicas = cfg.world_size // (actor.expert_tp * actor.ep * actor.pp)
    return [
        TableRow("expert parallel (ep)", actor.ep, "actor.ep"),
        TableRow("expert tensor parallel (etp)", actor.expert_tp, "actor.etp, or 1 with ep above 1, or tp"),
        TableRow("copies of each expert", replicas, "ranks / (etp * ep * pp)"),
        TableRow("experts of a rank in a layer", shape.num_experts // actor.ep, f"{shape.num_experts} / ep {actor.ep}"),
    ]


def format_table(rows: Sequence[TableRow]) -> str:
    """Rows as aligned text, one line each."""
    names, values = max(len(row.name) for row in rows), max(len(row.shown) for row in rows)
    return "\n".join(f"  {row.name:<{names}}  {row.shown:>{values}}  {row.how}" for row in rows)
