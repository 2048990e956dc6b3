"""Low-rank adapters (LoRA, Hu et al. 2021) of a model: which linear layers get them, their shapes and their shards.
Pure integers, no tensors.

A linear layer W [out, in] of Hugging Face gets A [r, in] and B [out, r], and computes W x + scale * B A x. Megatron
fuses some of them (queries, keys and values; gate and up): there, each keeps an A and a B of its own, as PEFT has it.

Tensor parallelism: where W is split along its rows, so is B, and A is whole on each rank; where W is split along its
columns, so is A, and B is whole.

Example: TP 2, rank 1, 4 query heads and 2 KV heads of head_dim 8, hidden 32, rank 4. Beside linear_qkv.weight there are
    lora.q_proj.a: rows 0:4, cols 0:32     lora.q_proj.b: rows 16:32, cols 0:4     (k_proj, v_proj: rows 8:16)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod, sqrt

from megatron_rl.models.layouts import Block
from megatron_rl.models.rules import Family, LocalParam, Rule
from megatron_rl.models.shape import ModelShape


@dataclass(frozen=True)
class Adapters:
    """The adapters of a run. targets: the linear layers that have one, by the last part of their names."""

    rank: int
    alpha: float
    dropout: float
    targets: frozenset[str]
    use_rslora: bool = False

    @property
    def scale(self) -> float:
        """What the product of B and A is multiplied by."""
        return self.alpha / (sqrt(self.rank) if self.use_rslora else self.rank)


def linear_names(shape: ModelShape, family: Family) -> tuple[str, ...]:
    """Last parts of the names of all linear layers that an adapter can be added to, in the model's order. Not among
    them: the head, routers, and experts, which transformers stacks.
    """
    rules = (rule for layer in range(shape.num_layers) for rule in _linears(family.layer(shape, layer), shape))
    return tuple(dict.fromkeys(_leaf(name) for rule in rules for name in rule.hf))


def _linears(rules: tuple[Rule, ...], shape: ModelShape) -> Iterator[Rule]:
    for rule in rules:
        is_matrix = all(len(size) == 2 for size in rule.layout.sizes(shape))
        if is_matrix and not rule.expert and ".router." not in rule.megatron and rule.megatron.endswith(".weight"):
            yield rule


def _leaf(name: str) -> str:
    """model.layers.0.self_attn.q_proj.weight -> q_proj"""
    return name.removesuffix(".weight").rpartition(".")[2]


@dataclass(frozen=True)
class OutputRows:
    """Rows first:end of the output of a linear layer's B on this rank; name: None if it has no adapter."""

    name: str | None
    first: int
    end: int


@dataclass(frozen=True)
class AdaptedLinear:
    """One of Megatron's linear layers on one rank, with the adapters of the Hugging Face layers that it is made of.

    module: its name in the chunk. split: what tensor parallelism splits of the weight. names: Hugging Face layers with
    adapters, name -> (A's shape here, B's shape here). pieces: its output from top to bottom.
    """

    module: str
    split: str
    names: dict[str, tuple[tuple[int, int], tuple[int, int]]]
    pieces: tuple[OutputRows, ...]
    params: tuple[LocalParam, ...]

    @property
    def is_plain(self) -> bool:
        """Its output is that of one Hugging Face layer, in its order."""
        return len(self.pieces) == 1


def a_name(linear: str) -> str:
    """The tensor A of a Hugging Face layer."""
    return f"{linear}.lora_A.weight"


def b_name(linear: str) -> str:
    """The tensor B of a Hugging Face layer."""
    return f"{linear}.lora_B.weight"


def adapted_linears(
    shape: ModelShape, family: Family, adapters: Adapters, *, tp: int, tp_rank: int, layers: range
) -> Iterator[AdaptedLinear]:
    """Megatron's linear layers of one model chunk on one rank that have adapters, in the model's order."""
    for local, layer in enumerate(layers):
        for rule in _linears(family.layer(shape, layer), shape):
            if any(_leaf(name) in adapters.targets for name in rule.hf):
                yield _adapted(rule, shape, adapters, (tp, tp_rank), (local, layer))


def _adapted(
    rule: Rule, shape: ModelShape, adapters: Adapters, split: tuple[int, int], layer: tuple[int, int]
) -> AdaptedLinear:
    module = f"decoder.layers.{layer[0]}.{rule.megatron.removesuffix('.weight')}"
    weights = [f"model.layers.{layer[1]}.{name}" for name in rule.hf]
    blocks = rule.layout.trainer(weights, shape, *split)
    whole = dict(zip(weights, rule.layout.sizes(shape), strict=True))
    names: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
    params: list[LocalParam] = []
    for weight in weights:
        if _leaf(weight) not in adapters.targets:
            continue
        linear, rank = weight.removesuffix(".weight"), adapters.rank
        own = [block for block in blocks if block.hf_name == weight]
        cols = own[0].cols
        assert cols is not None, weight
        a = Block(a_name(linear), (0, rank), cols)
        b = [Block(b_name(linear), block.rows, (0, rank)) for block in own]
        rows = sum(block.num_rows for block in b)
        names[linear] = (rank, cols[1] - cols[0]), (rows, rank)
        prefix = f"{module}.lora.{_leaf(weight)}"
        params.append(LocalParam(f"{prefix}.a", names[linear][0], (a,)))
        params.append(LocalParam(f"{prefix}.b", names[linear][1], tuple(b)))
    kind = "none"
    if any(block.cols != (0, whole[block.hf_name][1]) for block in blocks):
        kind = "cols"
    elif sum(block.num_rows for block in blocks) < sum(size[0] for size in whole.values()):
        kind = "rows"
    return AdaptedLinear(module, kind, names, tuple(_pieces(blocks, names)), tuple(params))


def _pieces(blocks: list[Block], names: Collection[str]) -> Iterator[OutputRows]:
    done: dict[str, int] = {}
    for block in blocks:
        linear = block.hf_name.removesuffix(".weight")
        first = done.get(linear, 0)
        done[linear] = first + block.num_rows
        yield OutputRows(linear if linear in names else None, first, done[linear])


def adapter_params(
    shape: ModelShape, family: Family, adapters: Adapters, *, tp: int, tp_rank: int, layers: range
) -> Iterator[LocalParam]:
    """Every parameter of the adapters of one model chunk on one rank, in export order."""
    for linear in adapted_linears(shape, family, adapters, tp=tp, tp_rank=tp_rank, layers=layers):
        yield from linear.params


def adapter_shapes(shape: ModelShape, family: Family, adapters: Adapters) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the adapters, in export order: PEFT's names without their first part."""
    linears = adapted_linears(shape, family, adapters, tp=1, tp_rank=0, layers=range(shape.num_layers))
    shapes: dict[str, tuple[int, ...]] = {}
    for linear in linears:
        for name, (a, b) in linear.names.items():
            shapes[a_name(name)], shapes[b_name(name)] = a, b
    return shapes


def adapted_weights(shape: ModelShape, family: Family, adapters: Adapters | None) -> frozenset[str]:
    """The weights that have adapters, by their Hugging Face names."""
    names = adapter_shapes(shape, family, adapters) if adapters is not None else {}
    return frozenset(name.removesuffix("lora_A.weight") + "weight" for name in names if name.endswith("lora_A.weight"))


def bound_counts(shapes: Collection[str]) -> dict[str, int]:
    """Last part of a layer's name -> how many have an adapter. shapes: names of tensors of adapters."""
    counts: dict[str, int] = {}
    for name in shapes:
        if name.endswith(".lora_A.weight"):
            leaf = _leaf(name.removesuffix(".lora_A.weight"))
            counts[leaf] = counts.get(leaf, 0) + 1
    return counts


def num_adapter_parameters(shape: ModelShape, family: Family, adapters: Adapters) -> int:
    """Trained numbers of all adapters."""
    return sum(prod(size) for size in adapter_shapes(shape, family, adapters).values())
