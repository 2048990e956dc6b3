"""The shards of a model's tensors on both sides, one layer at a time. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_rl.models.engine import engine_params, engine_tp_faults
from megatron_rl.models.rules import Family, LocalParam, megatron_params
from megatron_rl.models.shape import ModelShape
from megatron_rl.reshard.solve import Rect, merge_rects

Held = dict[str, tuple[Rect, ...]]
"""HF name -> the rectangles of it that one rank has"""


def rects_of(params: Iterable[LocalParam]) -> Held:
    """The rectangles of parameters by HF name, merged."""
    rects: dict[str, list[Rect]] = {}
    for param in params:
        for block in param.blocks:
            if block.num_rows:
                left, right = block.cols or (0, 1)
                rects.setdefault(block.hf_name, []).append((*block.rows, left, right))
    return {name: merge_rects(of_name) for name, of_name in rects.items()}


@dataclass(frozen=True)
class ModelTable:
    """The shards of one model on trainer and engine, derived from its family."""

    shape: ModelShape
    family: Family

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        return self.shape.num_layers

    def variants(self) -> list[list[int]]:
        """The layers in groups; those of a group have the same tensors."""
        groups: dict[object, list[int]] = {}
        for layer in range(self.shape.num_layers):
            groups.setdefault(self.family.layer(self.shape, layer), []).append(layer)
        return list(groups.values())

    def num_experts(self, layer: int) -> int:
        """Routed experts of a layer."""
        return self.shape.num_experts if any(rule.expert for rule in self.family.layer(self.shape, layer)) else 0

    def trainer(self, layer: int, tp: int, rank: int) -> Held:
        """A trainer rank's shard of a layer, without routed experts and what no update changes."""
        # ep as large as can be: the table then lists one expert only, which the filter below drops.
        params = megatron_params(
            self.shape, self.family, tp=tp, tp_rank=rank, layers=range(layer, layer + 1),
            pre_process=False, post_process=False, ep=max(self.shape.num_experts, 1),
        )  # fmt: skip
        return rects_of(param for param in params if not param.expert and not param.constant)

    def trainer_expert(self, layer: int, expert: int, etp: int, rank: int) -> Held:
        """A trainer rank's shard of one expert."""
        params = megatron_params(
            self.shape, self.family, tp=1, tp_rank=0, layers=range(layer, layer + 1),
            pre_process=False, post_process=False, ep=self.shape.num_experts, ep_rank=expert, etp=etp, etp_rank=rank,
        )  # fmt: skip
        return rects_of(param for param in params if param.expert)

    def trainer_ends(self, tp: int, rank: int, *, first: bool, last: bool) -> Held:
        """A trainer rank's shard of the embedding (first stage), or of the final norm and the head (last stage)."""
        params = megatron_params(
            self.shape, self.family, tp=tp, tp_rank=rank, layers=range(0), pre_process=first, post_process=last
        )
        return rects_of(params)

    def engine(self, layer: int, tp: int, rank: int, ep: int, ep_rank: int) -> Held:
        """An engine rank's shard of a layer, experts included."""
        params = engine_params(
            self.shape, self.family, tp=tp, tp_rank=rank, ep=ep, ep_rank=ep_rank, layers=[layer], ends=False
        )
        return rects_of(params)

    def engine_ends(self, tp: int, rank: int) -> Held:
        """An engine rank's shard of embedding, final norm and head."""
        return rects_of(engine_params(self.shape, self.family, tp=tp, tp_rank=rank, layers=[]))

    def engine_faults(self, tp: int, ep: int) -> list[str]:
        """Why an engine cannot shard the model so; empty if it can."""
        return engine_tp_faults(self.shape, tp, ep)

    def trainer_faults(self, tp: int, ep: int, etp: int) -> list[str]:
        """Why a trainer cannot shard the model so; empty if it can."""
        choices = self.shape.tp_choices()
        faults = [] if tp in choices else [f"tp {tp} does not split the model; possible: {choices}"]
        return faults + _expert_faults(self.shape.num_experts, self.shape.ffn_size, ep, etp)


def _expert_faults(num_experts: int, ffn_size: int, ep: int, etp: int) -> list[str]:
    if not num_experts:
        return [f"ep {ep}: the model has no experts"] if ep > 1 else []
    faults = [f"{num_experts} experts do not divide by ep {ep}"] if num_experts % ep else []
    return faults + ([f"experts of inner size {ffn_size} do not divide by etp {etp}"] if ffn_size % etp else [])
