"""Megatron's older checkpoints: a folder for each model-parallel rank, with one file of torch.save.

    mp_rank_TT/model_optim_rng.pt               tensor-parallel rank TT
    mp_rank_TT_PPP/model_optim_rng.pt           and pipeline stage PPP
    mp_rank_TT_PPP_EEE/ or mp_rank_TT_EEE/      and expert-parallel rank EEE

A file has the rank's parameters under `model`, or under `model0`, `model1` ... for each chunk of an interleaved
pipeline, and the arguments of the run that wrote it under `args`. Numbers stay on the disk until they are read.
"""

from __future__ import annotations

import pickle
import re
from argparse import Namespace
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from megatron_rl.config.sections.actor import ParallelConfig
from megatron_rl.convert.layout import chunk_params, layout_faults
from megatron_rl.convert.megatron_keys import refuse_form
from megatron_rl.convert.places import PlacedSource, Unit, places_of, units_of
from megatron_rl.errors import CheckpointError
from megatron_rl.messages import first_of
from megatron_rl.models import FAMILIES
from megatron_rl.models.rules import LocalParam
from megatron_rl.models.shape import ModelShape

_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_OTHER_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Of norms that Transformer Engine fuses with the projection behind them."""
Rank = tuple[int, int, int]
"""tensor-parallel rank, pipeline stage, expert-parallel rank"""


def rank_folders(path: Path) -> dict[Rank, Path]:
    """Rank -> its file; empty if the folder is no such checkpoint. An iteration's folder, or the one above it."""
    tracker = path / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        text = tracker.read_text(encoding="utf-8").strip()
        path = path / (f"iter_{int(text):07d}" if text.isdecimal() else text)
    found: dict[tuple[int, int | None, int | None], Path] = {}
    for folder in sorted(path.glob("mp_rank_*")):
        name = _FOLDER.fullmatch(folder.name)
        file = next((folder / one for one in _FILES if (folder / one).is_file()), None)
        if name and file:
            tp, second, third = (None if one is None else int(one) for one in name.groups())
            assert tp is not None
            found[tp, second, third] = file
    if not found:
        return {}
    # With one number behind tp it is the stage, unless the files' arguments say that there is one stage alone.
    first = next(iter(found.values()))
    args = _arguments(first)
    only_experts = args.get("pipeline_model_parallel_size") == 1
    ranks: dict[Rank, Path] = {}
    for (tp, second, third), file in found.items():
        stage, expert = (0, second or 0) if only_experts and third is None else (second or 0, third or 0)
        ranks[tp, stage, expert] = file
    return ranks


def _opened(file: Path) -> dict[str, Any]:
    """A rank's file, its numbers mapped."""
    safe = [Namespace, torch.Size]
    try:
        with torch.serialization.safe_globals(safe):
            content: object = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(
            f"{file}: holds objects beside tensors that only Megatron's own code may open ({reason}) -- convert it to "
            "torch_dist with Megatron-LM (--ckpt-format torch_dist), and that folder here"
        ) from error
    except (RuntimeError, OSError, EOFError) as error:
        raise CheckpointError(f"{file}: is no complete file of torch.save ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: does not hold a mapping")
    return cast("dict[str, Any]", content)


def _arguments(file: Path) -> dict[str, Any]:
    args: object = _opened(file).get("args")
    return dict(vars(args)) if isinstance(args, Namespace) else {}


class ClassicSource(PlacedSource):
    """The weights of mp_rank folders. Raises CheckpointError with every fault: ranks that are missing, parameters that
    are missing, surplus or of another shape.
    """

    def __init__(self, ranks: Mapping[Rank, Path], shape: ModelShape) -> None:
        refuse_form(FAMILIES[shape.architecture])
        self._ranks = ranks
        self._layout = _layout(ranks, shape)
        self._models: dict[Rank, list[dict[str, torch.Tensor]]] = {}
        self._units: dict[Hashable, tuple[Rank, torch.Tensor]] = {}
        faults: list[str] = []
        params: list[tuple[Rank, int, LocalParam]] = []
        for rank, file in sorted(ranks.items()):
            models = _models(file, self._layout.vpp)
            for chunk, model in enumerate(models):
                table = self._table(shape, rank, chunk)
                params.extend((rank, chunk, param) for param in table)
                faults += self._take(file, model, table, rank, chunk)
        if faults:
            raise CheckpointError(first_of(faults, 20, "; "))
        places: dict[str, list[Any]] = {}
        for rank, chunk, param in params:
            key = lambda one, unit, rank=rank, chunk=chunk: (rank, chunk, one.name, unit.expert)  # noqa: E731
            for name, of in places_of([param], key).items():
                there = places.setdefault(name, [])
                there.extend(place for place in of if all(place.block != other.block for other in there))
        super().__init__(places, {name: self._units[of[0].unit][1].dtype for name, of in places.items()})

    def _table(self, shape: ModelShape, rank: Rank, chunk: int) -> list[LocalParam]:
        tp, stage, ep = rank
        etp = self._layout.expert_tp
        return chunk_params(shape, self._layout, stage, chunk, tp, ep * etp + tp % etp)

    def _take(
        self, file: Path, model: Mapping[str, torch.Tensor], table: list[LocalParam], rank: Rank, chunk: int
    ) -> list[str]:
        """Note where the units of a file are; what is wrong with it."""
        faults: list[str] = []
        used: set[str] = set()
        for param in table:
            for unit in units_of(param):
                name = next((name for name in _names(unit) if name in model), None)
                if name is None:
                    faults.append(f"{file}: missing {_names(unit)[0]}")
                    continue
                used.add(name)
                stored = tuple(model[name].shape)
                padded = stored[0] >= unit.shape[0] and stored[1:] == unit.shape[1:] and "embedding" in name
                padded |= stored[0] >= unit.shape[0] and stored[1:] == unit.shape[1:] and name == "output_layer.weight"
                if stored != unit.shape and not (padded and self._layout.tp == 1):
                    faults.append(f"{file}: {name} is {list(stored)}, config.json says {list(unit.shape)}")
                self._units[rank, chunk, param.name, unit.expert] = rank, model[name]
        surplus = [name for name in model if name not in used and not name.endswith("_extra_state")]
        return faults + [f"{file}: surplus {name}" for name in surplus]

    def unit(self, unit: Hashable) -> torch.Tensor:
        """See PlacedSource."""
        return self._units[unit][1]

    def file(self, unit: Hashable) -> str:
        """See PlacedSource."""
        return str(self._ranks[self._units[unit][0]])


def _names(unit: Unit) -> list[str]:
    """The names that a rank's file may have for a unit."""
    if unit.expert is not None:
        stem, _, last = unit.name.rpartition("mlp.experts.")
        return [f"{stem}mlp.experts.local_experts.{unit.expert}.{last}", f"{stem}mlp.experts.{last}{unit.expert}"]
    for name, other in _OTHER_NAMES.items():
        if unit.name.endswith("." + name):
            return [unit.name, unit.name.removesuffix(name) + other]
    return [unit.name]


def _models(file: Path, vpp: int) -> list[dict[str, torch.Tensor]]:
    content = _opened(file)
    names = ["model"] if vpp == 1 else [f"model{number}" for number in range(vpp)]
    missing = [name for name in names if not isinstance(content.get(name), dict)]
    if missing:
        raise CheckpointError(f"{file}: has no {', '.join(missing)}; it has {', '.join(map(str, content))}")
    return [
        {name: value for name, value in content[model].items() if isinstance(value, torch.Tensor)} for model in names
    ]


def _layout(ranks: Mapping[Rank, Path], shape: ModelShape) -> ParallelConfig:
    """The layout that wrote the folders: by their names, and by the arguments in a file for what these do not say."""
    tp, pp, ep = (max(rank[axis] for rank in ranks) + 1 for axis in range(3))
    file = next(iter(ranks.values()))
    content, args = _opened(file), _arguments(file)
    vpp = max(1, sum(re.fullmatch(r"model\d+", name) is not None for name in content))
    layout = ParallelConfig(
        tp=tp,
        pp=pp,
        vpp=vpp,
        ep=ep,
        etp=args.get("expert_tensor_parallel_size") if shape.num_experts else None,
        num_layers_in_first_pipeline_stage=args.get("decoder_first_pipeline_num_layers"),
        num_layers_in_last_pipeline_stage=args.get("decoder_last_pipeline_num_layers"),
    )
    faults = [str(fault) for fault in layout_faults(shape, layout)]
    wanted = {(t, p, e) for t in range(tp) for p in range(pp) for e in range(ep)}
    # With ep the ranks of tp and ep are the same ones: not every pair has a folder.
    absent = sorted(wanted - ranks.keys()) if ep == 1 else []
    faults += [f"the folder of (tp rank, stage, ep rank) {rank} is missing" for rank in absent]
    if faults:
        raise CheckpointError(f"{file.parent.parent}: " + "; ".join(faults))
    return layout
