"""Where every byte of an engine's parameter lies in the Hugging Face tensors: vLLM's fused layers, and HF's own.

The counterpart of rules.py for the side that generates. It reads the same table of a family: its rules name the
parameter of vLLM in which their tensors lie.

Example: TP 4, rank 3, 8 query heads and 2 KV heads of head_dim 8, hidden 64. vLLM's qkv_proj.weight on that rank is
    q_proj rows 48:64, k_proj rows 8:16, v_proj rows 8:16        (each KV head is on two ranks)

Example: 8 experts of inner size 24, hidden 16, TP 2, rank 1: experts.w13_weight has the shape [8, 24, 16], which is
seen as 192 rows: experts.0.gate_proj rows 12:24, experts.0.up_proj rows 12:24, experts.1.gate_proj rows 12:24, ...
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace

from megatron_rl.errors import ReshardError
from megatron_rl.messages import first_of
from megatron_rl.models.layouts import Block
from megatron_rl.models.rules import Family, LocalParam, Rule, constants, expert_stack, hf_shapes
from megatron_rl.models.shape import ModelShape

VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this, whatever tp is."""
_STACKS = tuple(f"routed_experts.{name}" for name in ("w13_weight", "w2_weight", "w13_bias", "w2_bias"))
"""Expert stacks as vLLM 0.32 names them; 0.26 leaves `routed_experts.` out, and so do the tables here."""


def engine_tp_faults(shape: ModelShape, tp: int, ep: int = 1) -> list[str]:
    """Why vLLM cannot split the model over tp ranks (ep: ranks that experts are dealt to); empty when it can."""
    faults: list[str] = []
    if shape.num_heads % tp:
        faults.append(f"{shape.num_heads} query heads do not divide by tp {tp}")
    if shape.num_kv_heads % tp and tp % shape.num_kv_heads:
        faults.append(f"{shape.num_kv_heads} KV heads are neither a multiple nor a divisor of tp {tp}")
    sizes = shape.split_ffn_sizes() + ([shape.ffn_size] if shape.num_experts and ep == 1 else [])
    faults += [f"inner size {size} does not divide by tp {tp}" for size in sizes if size % tp]
    if engine_vocab(shape) % tp:
        faults.append(f"the padded vocabulary {engine_vocab(shape)} does not divide by tp {tp}")
    if ep > max(shape.num_experts, 1):
        faults.append(f"{shape.num_experts} experts cannot be dealt to ep {ep} ranks")
    return faults


def engine_tp_choices(shape: ModelShape, whole_experts: bool = False) -> list[int]:
    """Tensor-parallel sizes of a vLLM engine, ascending. whole_experts: its ranks hold these, not parts of each."""
    choices = range(1, shape.num_heads + 1)
    return [tp for tp in choices if not engine_tp_faults(shape, tp, tp if whole_experts else 1)]


def engine_vocab(shape: ModelShape) -> int:
    """Vocabulary rows of vLLM's embedding over all tp ranks."""
    return -(-shape.vocab_size // VOCAB_PADDING) * VOCAB_PADDING


def experts_of(num_experts: int, ep: int, ep_rank: int) -> range:
    """The experts of one engine rank: dealt in order, the first ranks have one more where they do not divide."""
    share, extra = divmod(num_experts, ep)
    first = ep_rank * share + min(ep_rank, extra)
    return range(first, first + share + (ep_rank < extra))


def engine_params(
    shape: ModelShape,
    family: Family,
    *,
    tp: int,
    tp_rank: int,
    ep: int = 1,
    ep_rank: int = 0,
    layers: Iterable[int] | None = None,
    ends: bool = True,
) -> Iterator[LocalParam]:
    """Every parameter of one rank of a vLLM engine that updates change: its name, shape and blocks, in HF order.

    ep: ranks that the experts are dealt to (vLLM's enable_expert_parallel; they then hold whole experts); 1 splits each
    expert over the tp ranks. layers: only these; all when not given. ends: with embedding, final norm and head.
    Rows past the last block are padding. A tied model has no lm_head parameter.
    Raises ReshardError where vLLM cannot split the model so.
    """
    faults = engine_tp_faults(shape, tp, ep)
    if faults:
        raise ReshardError(f"a vLLM engine of tp {tp}, ep {ep} cannot hold {shape.architecture}: " + "; ".join(faults))
    if ends:
        yield _vocab(family.embedding.engine_name, family.embedding, shape, tp, tp_rank)
    experts = experts_of(shape.num_experts, ep, ep_rank)
    for layer in range(shape.num_layers) if layers is None else layers:
        prefix = f"model.layers.{layer}."
        fused: dict[str, list[Rule]] = {}
        for rule in (one for one in family.layer(shape, layer) if not one.constant):
            fused.setdefault(rule.engine_name, []).append(rule)
        for name, rules in fused.items():
            if rules[0].expert:
                split = (tp, tp_rank) if ep == 1 else (1, 0)

                def blocks_of(rule: Rule, prefix: str = prefix, split: tuple[int, int] = split) -> list[Block]:
                    return _blocks(rule, prefix, shape, *split)

                yield expert_stack(prefix + name, rules, shape, experts, blocks_of)
            else:
                blocks = [one for rule in rules for one in _blocks(rule, prefix, shape, tp, tp_rank)]
                yield replace(_param(prefix + name, blocks), float32=rules[0].float32)
    if ends:
        norm = family.final_norm.hf[0]
        yield _param(norm, [Block(norm, (0, shape.hidden_size))])
        if not shape.tie_word_embeddings:
            yield _vocab("lm_head.weight", family.output, shape, tp, tp_rank)


def whole_params(shape: ModelShape, family: Family) -> Iterator[LocalParam]:
    """Every parameter of an engine that holds the HF tensors as they are (rollout.name=hf), in HF order; those that
    no update changes are left out.
    """
    constant = constants(shape, family)
    for name, size in hf_shapes(shape, family).items():
        if name in constant:
            continue
        yield LocalParam(name, size, (Block(name, (0, size[0]), (0, size[1]) if len(size) == 2 else None),))


def live_params(params: Iterable[LocalParam], live: Mapping[str, tuple[int, ...]]) -> tuple[LocalParam, ...]:
    """The table's parameters under the names of a live engine, checked against it.

    live: name -> shape of every parameter of the engine. Raises ReshardError naming each parameter that the engine has
    and the table lacks, the other way round, and each of another shape.
    """
    renamed: list[LocalParam] = []
    faults: list[str] = []
    for param in params:
        name = live_name(param.name, live)
        if name not in live:
            faults.append(f"the engine lacks {param.name}")
        elif tuple(live[name]) != param.shape:
            faults.append(f"the engine's {name} is {list(live[name])}, the table says {list(param.shape)}")
        renamed.append(replace(param, name=name))
    known = {param.name for param in renamed}
    faults += [f"the engine's {name} is in no table" for name in live if name not in known]
    if faults:
        raise ReshardError(f"the engine's parameters are not those of its table: {first_of(faults, 20, '; ')}")
    return tuple(renamed)


def live_name(name: str, live: Container[str]) -> str:
    """A parameter's name in an engine whose parameters are `live`."""
    for stack in _STACKS:
        short = stack.removeprefix("routed_experts.")
        if name.endswith("." + short):
            longer = name.removesuffix(short) + stack
            return longer if longer in live else name
    return name


def _param(name: str, blocks: list[Block], shape: tuple[int, ...] | None = None) -> LocalParam:
    rows, cols = sum(block.num_rows for block in blocks), blocks[0].cols
    local = (rows,) if cols is None else (rows, cols[1] - cols[0])
    return LocalParam(name, shape or local, tuple(blocks))


def _vocab(name: str, rule: Rule, shape: ModelShape, tp: int, tp_rank: int) -> LocalParam:
    rows = engine_vocab(shape) // tp
    first, last = (min(edge * rows, shape.vocab_size) for edge in (tp_rank, tp_rank + 1))
    return _param(name, [Block(rule.hf[0], (first, last), (0, shape.hidden_size))], (rows, shape.hidden_size))


def _blocks(rule: Rule, prefix: str, shape: ModelShape, parts: int, rank: int) -> list[Block]:
    return rule.layout.engine([prefix + name for name in rule.hf], shape, parts, rank)
