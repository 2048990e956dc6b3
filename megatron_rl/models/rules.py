"""Where every byte of a Megatron parameter lies in the Hugging Face tensors. Pure integers, no tensors.

A local parameter (one rank's shard) is a stack of blocks along dim 0; a block is a rectangle of one HF tensor. Loading,
exporting and resharding all read this one table.

Example: TP 2, rank 1, 4 query heads and 2 KV heads of head_dim 8, hidden 32. Megatron's linear_qkv.weight on
that rank is
    q_proj rows 16:32, k_proj rows 8:16, v_proj rows 8:16       (group 1 of 2: its 2 query heads, its key, its value)

Experts have a split of their own: ep ranks hold different experts, etp ranks hold parts of the same ones.

Example: 8 experts of inner size 24, ep 4, etp 2, expert rank (1, 1): local_experts.0.linear_fc1.weight is
    experts.2.gate_proj rows 12:24, experts.2.up_proj rows 12:24
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_rl.models.shape import ModelShape

Kind = Literal["whole", "rows", "cols", "qkv", "gate_up", "vocab"]


@dataclass(frozen=True)
class Block:
    """Rows (and columns, for matrices) of one HF tensor."""

    hf_name: str
    rows: tuple[int, int]
    cols: tuple[int, int] | None = None

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True)
class LocalParam:
    """One rank's parameter: its Megatron name, its shape, and its blocks from top to bottom.

    Rows past the last block are padding (a vocabulary that TP does not divide) and hold zeros. expert: the ranks that
    share it are those of ep and etp, else those of tp.
    """

    name: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    expert: bool = False


@dataclass(frozen=True)
class Rule:
    """One line of a family's table: a Megatron parameter, how it is fused and split, and the HF tensors it is made of.

    A `*` in the names stands for an expert: in HF names its number, in Megatron's its number among its rank's experts.
    """

    megatron: str
    kind: Kind
    hf: tuple[str, ...]

    @property
    def expert(self) -> bool:
        """There is one such parameter for each expert."""
        return "*" in self.megatron

    def of_expert(self, number: int, local: int) -> Rule:
        """The rule of one expert; itself where it has none."""
        hf = tuple(name.replace("*", str(number)) for name in self.hf)
        return Rule(self.megatron.replace("*", str(local)), self.kind, hf)


@dataclass(frozen=True)
class Family:
    """A model family: the rules of one layer (HF names below `model.layers.N.`) and of the rest."""

    name: str
    layer: tuple[Rule, ...]
    embedding: Rule
    final_norm: Rule
    output: Rule


def padded_vocab(shape: ModelShape, tp: int) -> int:
    """Vocabulary rows over all ranks: the least multiple of tp that holds the vocabulary."""
    return -(-shape.vocab_size // tp) * tp


def hf_shapes(shape: ModelShape, family: Family) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor of the model, in export order. Tied models have no output tensor."""
    shapes: dict[str, tuple[int, ...]] = {family.embedding.hf[0]: (shape.vocab_size, shape.hidden_size)}
    for layer in range(shape.num_layers):
        for rule, _ in _layer_rules(family, range(shape.num_experts)):
            for hf_name, hf_shape in zip(rule.hf, _rule_shapes(rule, shape), strict=True):
                shapes[f"model.layers.{layer}.{hf_name}"] = hf_shape
    shapes[family.final_norm.hf[0]] = (shape.hidden_size,)
    if not shape.tie_word_embeddings:
        shapes[family.output.hf[0]] = (shape.vocab_size, shape.hidden_size)
    return shapes


def _layer_rules(family: Family, experts: range) -> Iterator[tuple[Rule, bool]]:
    """The rules of a layer, those of experts once for each of `experts`; and whether it is one of these."""
    for rule in family.layer:
        if not rule.expert:
            yield rule, False
    for local, number in enumerate(experts):
        for rule in family.layer:
            if rule.expert:
                yield rule.of_expert(number, local), True


def _rule_shapes(rule: Rule, shape: ModelShape) -> list[tuple[int, ...]]:
    """Whole HF shapes of a layer rule's tensors."""
    q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if rule.kind == "qkv":
        bias = rule.megatron.endswith(".bias")
        return [(rows,) if bias else (rows, shape.hidden_size) for rows in (q_rows, kv_rows, kv_rows)]
    if rule.kind == "gate_up":
        return [(shape.ffn_size, shape.hidden_size)] * 2
    if rule.kind == "cols":
        inner = q_rows if "self_attention" in rule.megatron else shape.ffn_size
        return [(shape.hidden_size, inner)]
    assert rule.kind == "whole", rule
    if "router" in rule.megatron:
        return [(shape.num_experts, shape.hidden_size)]
    of_head = "q_layernorm" in rule.megatron or "k_layernorm" in rule.megatron
    return [(shape.head_dim if of_head else shape.hidden_size,)]


def _share(size: int, tp: int, rank: int) -> tuple[int, int]:
    assert size % tp == 0, (size, tp)
    return rank * (size // tp), (rank + 1) * (size // tp)


def _layer_blocks(rule: Rule, names: list[str], shape: ModelShape, tp: int, rank: int) -> tuple[Block, ...]:
    """Blocks of a layer's parameter on rank `rank` of the tp ranks that share it."""
    shapes = _rule_shapes(rule, shape)
    cols = [(0, hf_shape[1]) if len(hf_shape) == 2 else None for hf_shape in shapes]
    if rule.kind == "whole":
        return (Block(names[0], (0, shapes[0][0]), cols[0]),)
    if rule.kind == "cols":
        return (Block(names[0], (0, shapes[0][0]), _share(shapes[0][1], tp, rank)),)
    if rule.kind == "gate_up":
        return tuple(Block(name, _share(shape.ffn_size, tp, rank), col) for name, col in zip(names, cols, strict=True))
    # qkv: one block triple a KV group; Megatron keeps a group's queries, key and value together.
    head, per_group = shape.head_dim, shape.num_heads // shape.num_kv_heads * shape.head_dim
    first, last = _share(shape.num_kv_heads, tp, rank)
    blocks = []
    for group in range(first, last):
        blocks.append(Block(names[0], (group * per_group, (group + 1) * per_group), cols[0]))
        blocks.extend(Block(name, (group * head, (group + 1) * head), cols[1]) for name in names[1:])
    return tuple(blocks)


def _local(name: str, blocks: tuple[Block, ...], rows: int | None = None, expert: bool = False) -> LocalParam:
    rows = sum(block.num_rows for block in blocks) if rows is None else rows
    cols = blocks[0].cols
    return LocalParam(name, (rows,) if cols is None else (rows, cols[1] - cols[0]), blocks, expert)


def _vocab(rule: Rule, shape: ModelShape, tp: int, rank: int) -> LocalParam:
    rows = padded_vocab(shape, tp) // tp
    real = (min(rank * rows, shape.vocab_size), min((rank + 1) * rows, shape.vocab_size))
    blocks = (Block(rule.hf[0], real, (0, shape.hidden_size)),)
    return _local(rule.megatron, blocks, rows)


def megatron_params(
    shape: ModelShape,
    family: Family,
    *,
    tp: int,
    tp_rank: int,
    layers: range,
    pre_process: bool,
    post_process: bool,
    ep: int = 1,
    ep_rank: int = 0,
    etp: int = 1,
    etp_rank: int = 0,
) -> Iterator[LocalParam]:
    """Every parameter of one model chunk on one rank, in HF order.

    layers: the chunk's layers by global number; Megatron numbers them from 0 within the chunk.
    pre_process, post_process: whether the chunk holds the embedding and the head. A tied model that spans several
    pipeline stages keeps a copy of the embedding as the last stage's output layer.
    ep, etp: ranks that the experts are dealt to, and ranks that share each expert. All ranks have equally many
    parameters, in the same order.
    """
    experts = range(*_share(shape.num_experts, ep, ep_rank))
    if pre_process:
        yield _vocab(family.embedding, shape, tp, tp_rank)
    for local, layer in enumerate(layers):
        for rule, expert in _layer_rules(family, experts):
            names = [f"model.layers.{layer}.{hf_name}" for hf_name in rule.hf]
            size, rank = (etp, etp_rank) if expert else (tp, tp_rank)
            blocks = _layer_blocks(rule, names, shape, size, rank)
            yield _local(f"decoder.layers.{local}.{rule.megatron}", blocks, expert=expert)
    if post_process:
        yield _local(family.final_norm.megatron, (Block(family.final_norm.hf[0], (0, shape.hidden_size)),))
        if not shape.tie_word_embeddings:
            yield _vocab(family.output, shape, tp, tp_rank)
        elif not pre_process:
            copy = Rule(family.output.megatron, "vocab", family.embedding.hf)
            yield _vocab(copy, shape, tp, tp_rank)
