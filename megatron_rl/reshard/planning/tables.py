"""A model's tensors as both sides hold them, one layer at a time: what the accounting of a sync reads. Pure.

Models that train here come from their family's tables; DeepSeek-V3 has a table of its own, for planning only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from megatron_rl.models.engine import engine_params, engine_tp_faults, experts_of
from megatron_rl.models.rules import Family, LocalParam, megatron_params
from megatron_rl.models.shape import ModelShape
from megatron_rl.reshard.solve import Rect, merge_rects

Held = dict[str, tuple[Rect, ...]]
"""HF name -> the rectangles of it that one process has"""


class ModelTable(Protocol):
    """Both sides' tables of one model."""

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        ...

    def variants(self) -> list[list[int]]:
        """The layers, grouped by those that have the same tensors."""
        ...

    def num_experts(self, layer: int) -> int:
        """Routed experts of a layer."""
        ...

    def trainer(self, layer: int, tp: int, rank: int) -> Held:
        """A trainer rank's part of a layer, without routed experts."""
        ...

    def trainer_expert(self, layer: int, expert: int, etp: int, rank: int) -> Held:
        """A trainer rank's part of one expert."""
        ...

    def trainer_ends(self, tp: int, rank: int, *, first: bool, last: bool) -> Held:
        """A trainer rank's part of the embedding (first stage), or of the final norm and the head (last stage)."""
        ...

    def engine(self, layer: int, tp: int, rank: int, ep: int, ep_rank: int) -> Held:
        """An engine rank's part of a layer, experts included."""
        ...

    def engine_ends(self, tp: int, rank: int) -> Held:
        """An engine rank's part of embedding, final norm and head."""
        ...

    def engine_faults(self, tp: int, ep: int) -> list[str]:
        """Why an engine cannot split the model so; empty when it can."""
        ...

    def trainer_faults(self, tp: int, ep: int, etp: int) -> list[str]:
        """Why a trainer cannot split the model so; empty when it can."""
        ...


def rects_of(params: Iterable[LocalParam]) -> Held:
    """The rectangles of parameters by HF name, merged."""
    found: dict[str, list[Rect]] = {}
    for param in params:
        for block in param.blocks:
            if block.num_rows:
                left, right = block.cols or (0, 1)
                found.setdefault(block.hf_name, []).append((*block.rows, left, right))
    return {name: merge_rects(rects) for name, rects in found.items()}


@dataclass(frozen=True)
class FamilyTable:
    """The tables of a family that trains here (models/rules.py, models/engine.py)."""

    shape: ModelShape
    family: Family

    @property
    def num_layers(self) -> int:
        """See ModelTable."""
        return self.shape.num_layers

    def variants(self) -> list[list[int]]:
        """See ModelTable."""
        return [list(range(self.shape.num_layers))]

    def num_experts(self, layer: int) -> int:
        """See ModelTable."""
        return self.shape.num_experts

    def _megatron(self, layers: range, **axes: Any) -> Iterator[LocalParam]:
        given = {"pre_process": False, "post_process": False, "tp": 1, "tp_rank": 0} | axes
        return megatron_params(self.shape, self.family, layers=layers, **given)

    def trainer(self, layer: int, tp: int, rank: int) -> Held:
        """See ModelTable."""
        # A share of one expert is the least that the table gives; it is left out.
        params = self._megatron(range(layer, layer + 1), tp=tp, tp_rank=rank, ep=max(self.shape.num_experts, 1))
        return rects_of(param for param in params if not param.expert)

    def trainer_expert(self, layer: int, expert: int, etp: int, rank: int) -> Held:
        """See ModelTable."""
        axes = {"ep": self.shape.num_experts, "ep_rank": expert, "etp": etp, "etp_rank": rank}
        return rects_of(param for param in self._megatron(range(layer, layer + 1), **axes) if param.expert)

    def trainer_ends(self, tp: int, rank: int, *, first: bool, last: bool) -> Held:
        """See ModelTable."""
        return rects_of(self._megatron(range(0), tp=tp, tp_rank=rank, pre_process=first, post_process=last))

    def engine(self, layer: int, tp: int, rank: int, ep: int, ep_rank: int) -> Held:
        """See ModelTable."""
        axes = {"tp": tp, "tp_rank": rank, "ep": ep, "ep_rank": ep_rank}
        return rects_of(engine_params(self.shape, self.family, layers=[layer], ends=False, **axes))

    def engine_ends(self, tp: int, rank: int) -> Held:
        """See ModelTable."""
        return rects_of(engine_params(self.shape, self.family, tp=tp, tp_rank=rank, layers=[]))

    def engine_faults(self, tp: int, ep: int) -> list[str]:
        """See ModelTable."""
        return engine_tp_faults(self.shape, tp, ep)

    def trainer_faults(self, tp: int, ep: int, etp: int) -> list[str]:
        """See ModelTable."""
        choices = self.shape.tp_choices()
        faults = [] if tp in choices else [f"tp {tp} does not split the model; possible: {choices}"]
        return faults + _expert_faults(self.shape.num_experts, self.shape.ffn_size, ep, etp)


def _expert_faults(num_experts: int, ffn_size: int, ep: int, etp: int) -> list[str]:
    if not num_experts:
        return [f"ep {ep}: the model has no experts"] if ep > 1 else []
    faults = [f"{num_experts} experts do not divide by ep {ep}"] if num_experts % ep else []
    return faults + ([f"experts of inner size {ffn_size} do not divide by etp {etp}"] if ffn_size % etp else [])


Split = Literal["whole", "rows", "cols", "vocab"]


@dataclass(frozen=True)
class Tensor:
    """One HF tensor: its shape, and how tensor parallelism splits it on both sides."""

    name: str
    shape: tuple[int, ...]
    split: Split

    def part(self, size: int, rank: int) -> tuple[Rect, ...]:
        """Rank's part of `size`."""
        rows, cols = self.shape[0], self.shape[1] if len(self.shape) == 2 else 1
        if self.split == "whole":
            return ((0, rows, 0, cols),)
        whole = cols if self.split == "cols" else rows
        share = -(-whole // size)
        first, last = min(rank * share, whole), min((rank + 1) * share, whole)
        return ((0, rows, first, last),) if self.split == "cols" else ((first, last, 0, cols),)


@dataclass(frozen=True)
class DeepSeekTable:
    """DeepSeek-V3 (DeepSeek-AI 2024), for planning only: multi-head latent attention, a shared expert, and plain MLPs
    in the first layers. Without its multi-token-prediction layer, which neither side needs for sampling: 671 B numbers.
    """

    num_layers: int = 61
    first_dense: int = 3
    hidden: int = 7168
    heads: int = 128
    q_rank: int = 1536
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    dense_ffn: int = 18432
    expert_ffn: int = 2048
    experts: int = 256
    vocab: int = 129280

    def _attention(self) -> list[Tensor]:
        heads, hidden = self.heads, self.hidden
        return [
            Tensor("input_layernorm.weight", (hidden,), "whole"),
            Tensor("self_attn.q_a_proj.weight", (self.q_rank, hidden), "whole"),
            Tensor("self_attn.q_a_layernorm.weight", (self.q_rank,), "whole"),
            Tensor("self_attn.q_b_proj.weight", (heads * (self.nope_dim + self.rope_dim), self.q_rank), "rows"),
            Tensor("self_attn.kv_a_proj_with_mqa.weight", (self.kv_rank + self.rope_dim, hidden), "whole"),
            Tensor("self_attn.kv_a_layernorm.weight", (self.kv_rank,), "whole"),
            Tensor("self_attn.kv_b_proj.weight", (heads * (self.nope_dim + self.v_dim), self.kv_rank), "rows"),
            Tensor("self_attn.o_proj.weight", (hidden, heads * self.v_dim), "cols"),
            Tensor("post_attention_layernorm.weight", (hidden,), "whole"),
        ]

    def _mlp(self, prefix: str, ffn: int) -> list[Tensor]:
        return [
            Tensor(f"{prefix}.gate_proj.weight", (ffn, self.hidden), "rows"),
            Tensor(f"{prefix}.up_proj.weight", (ffn, self.hidden), "rows"),
            Tensor(f"{prefix}.down_proj.weight", (self.hidden, ffn), "cols"),
        ]

    def _dense(self, layer: int) -> list[Tensor]:
        if layer < self.first_dense:
            return [*self._attention(), *self._mlp("mlp", self.dense_ffn)]
        router = [
            Tensor("mlp.gate.weight", (self.experts, self.hidden), "whole"),
            Tensor("mlp.gate.e_score_correction_bias", (self.experts,), "whole"),
        ]
        return [*self._attention(), *router, *self._mlp("mlp.shared_experts", self.expert_ffn)]

    def _ends(self, first: bool, last: bool) -> list[Tensor]:
        embedding = [Tensor("model.embed_tokens.weight", (self.vocab, self.hidden), "vocab")]
        head = [
            Tensor("model.norm.weight", (self.hidden,), "whole"),
            Tensor("lm_head.weight", (self.vocab, self.hidden), "vocab"),
        ]
        return (embedding if first else []) + (head if last else [])

    def variants(self) -> list[list[int]]:
        """See ModelTable."""
        return [list(range(self.first_dense)), list(range(self.first_dense, self.num_layers))]

    def num_experts(self, layer: int) -> int:
        """See ModelTable."""
        return self.experts if layer >= self.first_dense else 0

    def trainer(self, layer: int, tp: int, rank: int) -> Held:
        """See ModelTable."""
        return {f"model.layers.{layer}.{tensor.name}": tensor.part(tp, rank) for tensor in self._dense(layer)}

    def trainer_expert(self, layer: int, expert: int, etp: int, rank: int) -> Held:
        """See ModelTable."""
        parts = self._mlp(f"model.layers.{layer}.mlp.experts.{expert}", self.expert_ffn)
        return {tensor.name: tensor.part(etp, rank) for tensor in parts}

    def trainer_ends(self, tp: int, rank: int, *, first: bool, last: bool) -> Held:
        """See ModelTable."""
        return {tensor.name: tensor.part(tp, rank) for tensor in self._ends(first, last)}

    def engine(self, layer: int, tp: int, rank: int, ep: int, ep_rank: int) -> Held:
        """See ModelTable."""
        held = self.trainer(layer, tp, rank)
        split = (tp, rank) if ep == 1 else (1, 0)
        for expert in experts_of(self.num_experts(layer), ep, ep_rank):
            held |= self.trainer_expert(layer, expert, *split)
        return held

    def engine_ends(self, tp: int, rank: int) -> Held:
        """See ModelTable."""
        return self.trainer_ends(tp, rank, first=True, last=True)

    def engine_faults(self, tp: int, ep: int) -> list[str]:
        """See ModelTable."""
        return self.trainer_faults(tp, ep, 1 if ep > 1 else tp)

    def trainer_faults(self, tp: int, ep: int, etp: int) -> list[str]:
        """See ModelTable."""
        faults = [f"{self.heads} heads do not divide by tp {tp}"] if self.heads % tp else []
        faults += [f"inner size {self.dense_ffn} does not divide by tp {tp}"] if self.dense_ffn % tp else []
        return faults + _expert_faults(self.experts, self.expert_ffn, ep, etp)
