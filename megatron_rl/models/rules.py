"""Where every byte of a Megatron parameter lies in the Hugging Face tensors. Pure integers, no tensors.

A local parameter (one rank's shard) is a stack of blocks along dim 0; a block is a rectangle of one HF tensor. Loading,
exporting and resharding all read this one table.

Example: TP 2, rank 1, 4 query heads and 2 KV heads of head_dim 8, hidden 32. There, Megatron's linear_qkv.weight is
    q_proj rows 16:32, k_proj rows 8:16, v_proj rows 8:16       (group 1 of 2: its 2 query heads, its key, its value)

Experts have a split of their own: ep ranks hold different experts, etp ranks hold parts of the same ones.

Example: 8 experts of inner size 24, hidden 16, ep 4, etp 2, expert rank (1, 1): experts.linear_fc1.weight [2, 24, 16]
is seen as 48 rows, which are
    experts.2.gate_proj rows 12:24, experts.2.up_proj rows 12:24, experts.3.gate_proj rows 12:24, experts.3.up_proj ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

from megatron_rl.models.fields import Compute, Fields
from megatron_rl.models.layouts import Block, Layout, share
from megatron_rl.models.shape import ModelShape


@dataclass(frozen=True)
class LocalParam:
    """One rank's parameter: its Megatron name, its shape, and its blocks from top to bottom.

    Rows past the last block are padding (a vocabulary that TP does not divide) and hold zeros. expert: a stack of
    experts [number, rows, columns] or of their biases [number, columns], whose ranks are those of ep and etp; ranks of
    other parameters are those of tp.
    constant, float32: see Rule.
    """

    name: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    expert: bool = False
    constant: bool = False
    float32: bool = False

    @property
    def width(self) -> int:
        """Numbers of a row; a stack [E, r, c] has E * r rows."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def num_rows(self) -> int:
        """Rows, with padding."""
        return prod(self.shape) // self.width

    def experts(self) -> list[LocalParam]:
        """A stack's experts [1, rows, columns] one by one; a parameter that is no stack, as it is."""
        if not self.expert:
            return [self]
        count = len(self.blocks) // self.shape[0]
        parts = (self.blocks[at : at + count] for at in range(0, len(self.blocks), count))
        return [replace(self, shape=(1, *self.shape[1:]), blocks=blocks) for blocks in parts]


@dataclass(frozen=True)
class Rule:
    """One line of a family's table: a Megatron parameter, its layout, and the HF tensors it is made of.

    A `*` in the HF names stands for an expert's number; the parameter is then the stack of all of a rank's experts.
    engine: the vLLM parameter that the tensors lie in; rules of a layer that name the same one are fused there, end to
    end. live: the name in a model that transformers has loaded, of all experts together, if a checkpoint has another.
    constant: float32 in every model, and no update changes it: no checkpoint of a run and no sync's plan has it.
    float32: vLLM keeps it in float32, whatever precision the engine has.
    """

    megatron: str
    layout: Layout
    hf: tuple[str, ...]
    engine: str = ""
    live: str = ""
    constant: bool = False
    float32: bool = False

    @property
    def expert(self) -> bool:
        """There are such tensors for each expert."""
        return "*" in self.hf[0]

    @property
    def engine_name(self) -> str:
        """The vLLM parameter below `model.layers.N.`."""
        return self.engine or self.hf[0]

    def of_expert(self, number: int) -> Rule:
        """The rule with the tensors of one expert."""
        return replace(self, hf=tuple(name.replace("*", str(number)) for name in self.hf))


LayerRules = Callable[[ModelShape, int], tuple[Rule, ...]]
"""(shape, layer's number) -> the rules of that layer; HF names below `model.layers.N.`"""


@dataclass(frozen=True)
class Family:
    """A model family: all that this package knows of an architecture.

    known: well-known models by name, as `megatron-rl plan` takes them.
    """

    architecture: str
    fields: Fields
    layer: LayerRules
    embedding: Rule
    final_norm: Rule
    output: Rule
    compute: Compute = field(default_factory=Compute)
    known: Mapping[str, ModelShape] = field(default_factory=dict[str, ModelShape])


def same_layers(*rules: Rule) -> LayerRules:
    """All layers have the same rules."""
    return lambda shape, layer: rules


def padded_vocab(shape: ModelShape, tp: int) -> int:
    """Vocabulary rows over all ranks: the least multiple of tp that holds the vocabulary."""
    return -(-shape.vocab_size // tp) * tp


def hf_shapes(shape: ModelShape, family: Family) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor of the model, in export order. Tied models have no output tensor."""
    shapes: dict[str, tuple[int, ...]] = {family.embedding.hf[0]: (shape.vocab_size, shape.hidden_size)}
    for layer in range(shape.num_layers):
        for rule in _by_expert(family.layer(shape, layer), range(shape.num_experts)):
            for name, size in zip(rule.hf, rule.layout.sizes(shape), strict=True):
                shapes[f"model.layers.{layer}.{name}"] = size
    shapes[family.final_norm.hf[0]] = (shape.hidden_size,)
    if not shape.tie_word_embeddings:
        shapes[family.output.hf[0]] = (shape.vocab_size, shape.hidden_size)
    return shapes


def constants(shape: ModelShape, family: Family) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of the tensors that no update changes."""
    return {
        f"model.layers.{layer}.{name}": size
        for layer in range(shape.num_layers)
        for rule in family.layer(shape, layer)
        if rule.constant
        for name, size in zip(rule.hf, rule.layout.sizes(shape), strict=True)
    }


def in_float32(shape: ModelShape, family: Family) -> bool:
    """Some parameters are float32 in vLLM whatever its precision is."""
    return any(rule.float32 for layer in range(shape.num_layers) for rule in family.layer(shape, layer))


def num_parameters(shape: ModelShape, family: Family) -> int:
    """Trained numbers of the whole model; tied embeddings count once."""
    count = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2) + shape.hidden_size
    for layer in range(shape.num_layers):
        for rule in family.layer(shape, layer):
            copies = shape.num_experts if rule.expert else 1
            count += copies * sum(prod(size) for size in rule.layout.sizes(shape))
    return count


def _by_expert(rules: tuple[Rule, ...], experts: range) -> Iterator[Rule]:
    """The rules of a layer, then those of its experts, once for each of `experts`."""
    yield from (rule for rule in rules if not rule.expert)
    for number in experts:
        yield from (rule.of_expert(number) for rule in rules if rule.expert)


def expert_stack(
    name: str, rules: Sequence[Rule], shape: ModelShape, experts: range, blocks_of: Callable[[Rule], list[Block]]
) -> LocalParam:
    """All of a rank's experts in one parameter [experts, rows, columns], one after the other; of each, the tensors of
    `rules` end to end. Biases [1, columns] make [experts, columns]. blocks_of: the rank's blocks of an expert's rule.
    """
    blocks = [block for number in experts for rule in rules for block in blocks_of(rule.of_expert(number))]
    rows, cols = sum(block.num_rows for block in blocks) // len(experts), blocks[0].cols
    assert cols is not None, f"experts are matrices: {name}"
    is_bias = rules[0].layout.sizes(shape)[0][0] == 1
    size = (cols[1] - cols[0],) if is_bias else (rows, cols[1] - cols[0])
    return LocalParam(name, (len(experts), *size), tuple(blocks), expert=True)


def _local(name: str, blocks: list[Block], rows: int | None = None) -> LocalParam:
    rows = sum(block.num_rows for block in blocks) if rows is None else rows
    cols = blocks[0].cols
    return LocalParam(name, (rows,) if cols is None else (rows, cols[1] - cols[0]), tuple(blocks))


def _vocab(rule: Rule, shape: ModelShape, tp: int, rank: int) -> LocalParam:
    rows = padded_vocab(shape, tp) // tp
    real = (min(rank * rows, shape.vocab_size), min((rank + 1) * rows, shape.vocab_size))
    return _local(rule.megatron, [Block(rule.hf[0], real, (0, shape.hidden_size))], rows)


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
    experts = range(*share(shape.num_experts, ep, ep_rank))
    if pre_process:
        yield _vocab(family.embedding, shape, tp, tp_rank)
    for local, layer in enumerate(layers):
        rules = family.layer(shape, layer)

        def blocks_of(rule: Rule, split: tuple[int, int], layer: int = layer) -> list[Block]:
            return rule.layout.trainer([f"model.layers.{layer}.{name}" for name in rule.hf], shape, *split)

        for rule in sorted(rules, key=lambda rule: rule.expert):
            name = f"decoder.layers.{local}.{rule.megatron}"
            if rule.expert:
                yield expert_stack(name, [rule], shape, experts, partial(blocks_of, split=(etp, etp_rank)))
            else:
                yield replace(_local(name, blocks_of(rule, (tp, tp_rank))), constant=rule.constant)
    if post_process:
        yield _local(family.final_norm.megatron, [Block(family.final_norm.hf[0], (0, shape.hidden_size))])
        if not shape.tie_word_embeddings:
            yield _vocab(family.output, shape, tp, tp_rank)
        elif not pre_process:
            yield _vocab(replace(family.output, hf=family.embedding.hf), shape, tp, tp_rank)
