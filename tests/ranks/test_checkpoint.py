"""Contract R2: a checkpoint loaded is the state that was saved, on any layout; going on from it is going on."""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algos.reduce import loss_weights
from megatron_rl.algos.token_losses import nll_loss
from megatron_rl.errors import CheckpointError
from megatron_rl.models.rectangles import padding
from megatron_rl.types import FileMark
from tests.helpers.checkpoints import differing, read_all
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import random_batch, save_tiny
from tests.helpers.training import build, make_actor, my_micro_batches, train_step

STEPS = 2
LENGTHS = (5, 36, 9, 12, 20, 7, 7, 16)
# The vocabulary does not divide by tp, so that the last rank has padding.
SHAPE: dict[str, Any] = {
    "vocab": 129,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TWO_EACH = {"ppo_micro_batch_size_per_gpu": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "overlap_bucket_size": 20000}
Tensors = dict[str, torch.Tensor]
Case = tuple[str, str]

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2-overlap": (2, {**OVERLAP, **TWO_EACH}),
    "dp2-plain-optimizer": (2, {"use_distributed_optimizer": False}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2, **TWO_EACH}),
    "pp4-vpp2": (4, {"pp": 4, "vpp": 2, **TWO_EACH}),
    "cp2": (2, {"cp": 2}),
    "tp2-pp2-dp2": (8, {"tp": 2, "pp": 2, "sequence_parallel": True, **TWO_EACH}),
    "ep2": (2, {"ep": 2}),
    "ep2-etp2": (4, {"ep": 2, "etp": 2}),
    "moe-one": (1, {}),
    "moe-plain-optimizer": (4, {"ep": 2, "use_distributed_optimizer": False}),
}
MOE = ("ep2", "ep2-etp2", "moe-one", "moe-plain-optimizer")
SAME: list[tuple[str, str, bool]] = [
    (layout, dtype, (layout, dtype) in (("dp2", "float32"), ("tp2", "bfloat16")))
    for layout in LAYOUTS
    for dtype in ("float32", "bfloat16")
]
"""(layout, precision, whether the default suite runs it)"""
OTHER: list[tuple[str, str, str, bool]] = [
    ("dp2", "tp2", "float32", True),
    ("ep2", "moe-one", "float32", True),
    ("tp2", "one", "float32", False),
    ("one", "cp2", "float32", False),
    ("pp2", "tp2", "float32", False),
    ("pp4-vpp2", "dp2-overlap", "float32", False),
    ("dp2-plain-optimizer", "pp4-vpp2", "float32", False),
    ("tp2-pp2-dp2", "dp2-plain-optimizer", "float32", False),
    ("moe-one", "ep2", "float32", False),
    ("ep2", "ep2-etp2", "float32", False),
    ("ep2-etp2", "moe-plain-optimizer", "float32", False),
    ("tp2", "dp2", "bfloat16", False),
    ("dp2-overlap", "pp2", "bfloat16", False),
]


def _default_or_slow(cases: list[Any]) -> list[Any]:
    return [pytest.param(*case[:-1], marks=[] if case[-1] else pytest.mark.slow) for case in cases]


class _Run:
    """A model that trains on batches by their number, with its checkpoints."""

    def __init__(
        self, folder: str, rank: int, world: int, layout: Mapping[str, Any], dtype: str, std: float | None = None
    ) -> None:
        self.actor = make_actor(**layout)
        self.trainable = build(folder, self.actor, world, dtype, init_std=std)
        from megatron_rl.mcore.checkpoint import SavedState
        from megatron_rl.mcore.offload import Offload
        from megatron_rl.workers.checkpoint import StateFiles

        self.rank, self.world = rank, world
        self.saved = SavedState(self.trainable, Offload(self.trainable, ()))
        self.files = StateFiles(rank, world, self.actor)

    def train(self, first: int, count: int = STEPS) -> list[tuple[float, float]]:
        """(loss, learning rate) of each step."""
        reports: list[tuple[float, float]] = []
        for number in range(first, first + count):
            batch = random_batch(number, LENGTHS, 128)
            weights = loss_weights("token-mean", batch.loss_mask, batch.segments, batch.num_sequences, norm_length=64)
            micros = my_micro_batches(batch.with_(loss_weights=weights), self.actor, self.rank, self.world)
            report, _ = train_step(self.trainable, micros, nll_loss, 1.0)
            reports.append((report.loss, report.lr))
        return reports

    def step_without_effect(self) -> None:
        """An update at a learning rate of 0: weights that do not follow from their masters change."""
        for chunk in self.trainable.model.chunks:
            chunk.zero_grad_buffer()
        optimizer = self.trainable.optimizer
        optimizer.zero_grad()
        optimizer.prepare_grads()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step_with_ready_grads()

    def spoil(self, seed: int) -> None:
        """Other masters, padding included, other random generators, and a gather of parameters that is under way."""
        for param in self.saved._owned:
            param.master.detach().fill_(0.7)
        _seed(seed)
        for chunk in self.trainable.model.chunks:
            if chunk.ddp_config.overlap_param_gather:
                self.trainable.model.complete_params()
                chunk.start_param_sync()

    def padding_is_zero(self) -> bool:
        for param in self.saved._owned:
            first, end = (edge - param.owned[0] for edge in padding(param.local, param.owned))
            if param.master.detach().view(-1)[first:end].any():
                return False
        return True

    def save(self, folder: Path, background: bool = False) -> dict[str, FileMark]:
        self.files.begin(folder, {"actor": self.saved}, background)
        return self.files.finish()

    def load(self, folder: Path) -> list[str]:
        return self.files.load(folder, {"actor": self.saved}, lambda role: None)

    def export(self) -> Tensors:
        from megatron_rl.mcore.convert import export_hf

        return {name: tensor.cpu() for name, tensor in export_hf(self.trainable.model)}


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _random_numbers() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def _save_on_rank(rank: int, world: int, folder: str, layout: dict[str, Any], dtype: str, out: str) -> dict[str, Any]:
    run = _Run(folder, rank, world, layout, dtype)
    run.train(0)
    _seed(rank)
    run.save(Path(out) / "saved")
    numbers, weights = _random_numbers(), run.export()
    chunks = run.saved.snapshot()
    copies = [chunk.tensor.clone() for chunk in chunks]
    steps = run.train(STEPS)
    kept = all(torch.equal(chunk.tensor, copy) for chunk, copy in zip(chunks, copies, strict=True))
    run.save(Path(out) / "end")
    return {"steps": steps, "weights": weights, "numbers": numbers, "kept": kept}


def _load_on_rank(
    rank: int, world: int, folder: str, layout: dict[str, Any], dtype: str, saved: str, out: str
) -> dict[str, Any]:
    run = _Run(folder, rank, world, layout, dtype, 0.3)
    run.spoil(99)
    notes = run.load(Path(saved))
    numbers, weights = _random_numbers(), run.export()
    run.save(Path(out) / "loaded")
    steps = run.train(STEPS)
    run.save(Path(out) / "gone-on")
    run.spoil(98)
    run.load(Path(saved))
    again = run.export()
    run.step_without_effect()
    return {
        "notes": notes,
        "numbers": numbers,
        "weights": weights,
        "steps": steps,
        "again": differing(weights, again),
        "padding": run.padding_is_zero(),
        "unmoved": differing(weights, run.export()),
    }


@dataclass(frozen=True)
class _Saved:
    """A run that was saved in its middle and at its end, and what its ranks saw."""

    folder: Path
    model: str
    ranks: list[dict[str, Any]]


Saves = Callable[[str, str], _Saved]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """(layout, precision) -> a run of it, made once."""
    root = tmp_path_factory.mktemp("saves")
    models: dict[bool, str] = {}
    known: dict[Case, _Saved] = {}

    def saved(layout: str, dtype: str) -> _Saved:
        moe = layout in MOE
        if moe not in models:
            of_family = ("qwen3_moe", {"tied": False, "layers": 2}) if moe else ("qwen2", {"layers": 8, **SHAPE})
            models[moe] = save_tiny(root / of_family[0], of_family[0], **of_family[1])
        if (layout, dtype) not in known:
            world, axes = LAYOUTS[layout]
            out = root / layout / dtype
            ranks = run_ranks(world, _save_on_rank, models[moe], axes, dtype, str(out), timeout=120)
            known[layout, dtype] = _Saved(out, models[moe], ranks)
        return known[layout, dtype]

    return saved


def _loaded(saved: _Saved, layout: str, dtype: str, out: Path) -> list[dict[str, Any]]:
    world, axes = LAYOUTS[layout]
    return run_ranks(world, _load_on_rank, saved.model, axes, dtype, str(saved.folder / "saved"), str(out), timeout=120)


@pytest.mark.parametrize(("layout", "dtype"), _default_or_slow(SAME))
def test_r2_going_on_from_a_checkpoint_is_going_on(saves: Saves, layout: str, dtype: str, tmp_path: Path) -> None:
    """Bit for bit: weights, masters, moments, losses, learning rates; and the next random numbers of each rank."""
    saved = saves(layout, dtype)
    loaded = _loaded(saved, layout, dtype, tmp_path)
    for before, after in zip(saved.ranks, loaded, strict=True):
        assert after["notes"] == []
        assert before["kept"], "training goes on while a snapshot is written"
        assert before["numbers"] == after["numbers"]
        assert str(before["steps"]) == str(after["steps"])
        assert not differing(before["weights"], after["weights"])
        assert not after["again"], "a load onto a model that has trained"
        assert after["padding"]
        assert not after["unmoved"]
    assert len({str(of_rank["numbers"]) for of_rank in loaded}) == len(loaded), "ranks draw different numbers"
    assert not differing(read_all(saved.folder / "saved/actor"), read_all(tmp_path / "loaded/actor"))
    assert not differing(read_all(saved.folder / "end/actor"), read_all(tmp_path / "gone-on/actor"))


@pytest.mark.parametrize(("layout", "other", "dtype"), _default_or_slow(OTHER))
def test_r2_another_layout_has_the_same_state_and_goes_on_alike(
    saves: Saves, layout: str, other: str, dtype: str, tmp_path: Path
) -> None:
    """Weights, masters and moments bit for bit; the next losses to five digits in float32."""
    saved = saves(layout, dtype)
    loaded = _loaded(saved, other, dtype, tmp_path)
    assert not differing(read_all(saved.folder / "saved/actor"), read_all(tmp_path / "loaded/actor"))
    for after in loaded:
        assert not differing(saved.ranks[0]["weights"], after["weights"])
        assert not after["again"] and not after["unmoved"] and after["padding"]
        assert len(after["notes"]) == 1 and after["notes"][0].startswith("random generators"), after["notes"]
    precision = 2e-5 if dtype == "float32" else 2e-2
    for (loss, lr), (wanted, wanted_lr) in zip(loaded[-1]["steps"], saved.ranks[-1]["steps"], strict=True):
        assert loss == pytest.approx(wanted, rel=precision)
        assert lr == wanted_lr


def _faults_on_rank(rank: int, world: int, folder: str, out: str) -> dict[str, Any]:
    """What is refused, and what is possible after it."""
    run = _Run(folder, rank, world, {}, "float32")
    run.train(0, 1)
    messages: dict[str, str] = {}

    def refused(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except CheckpointError as error:
            messages[name] = str(error)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        # A write beyond the limit fails as on a full disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    refused("full", lambda: run.save(Path(out) / "full", background=True))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    marks = run.save(Path(out) / "good")
    weights = run.export()
    other = _Run(str(Path(folder).parent / "other"), rank, world, {}, "float32")
    refused("other", lambda: other.load(Path(out) / "good"))
    untouched = other.export()
    refused("absent", lambda: run.load(Path(out) / "absent"))
    refused("incomplete", lambda: run.load(Path(out) / "full"))
    again = _Run(str(Path(folder).parent / "other"), rank, world, {}, "float32").export()
    return {
        "messages": messages,
        "marks": marks,
        "faults": run.files.faults(Path(out) / "good", marks),
        "finished": run.files.finish(),
        "kept": not differing(weights, run.export()) and not differing(untouched, again),
    }


def test_r2_faults_of_one_rank_or_of_a_checkpoint_are_raised_on_all_ranks_and_change_nothing(tmp_path: Path) -> None:
    """A disk that is full for one rank; tensors of another model; no checkpoint; one whose save has failed."""
    folder = save_tiny(tmp_path / "model", layers=1, **SHAPE)
    save_tiny(tmp_path / "other", layers=2, **{**SHAPE, "intermediate_size": 64})
    ranks = run_ranks(2, _faults_on_rank, folder, str(tmp_path / "out"))
    for of_rank in ranks:
        messages = of_rank["messages"]
        assert messages["full"].startswith(f"rank 1: {tmp_path}/out/full/actor/rank_00001.distcp: cannot be written: ")
        assert messages["other"].startswith(f"{tmp_path}/out/good/actor is of another model than this actor: ")
        assert "; model.layers.1.mlp.up_proj.weight is not in the checkpoint; " in messages["other"]
        assert "down_proj.weight is [64, 96] in the checkpoint, [64, 64] in the model" in messages["other"]
        assert messages["absent"].startswith(f"{tmp_path}/out/absent/actor/.metadata: cannot be read: No such file")
        assert f"{tmp_path}/out/full/actor/.metadata: cannot be read: No such file" in messages["incomplete"]
        assert of_rank["finished"] == {}
        assert of_rank["kept"]
        assert of_rank["faults"] == []
    names = [sorted(of_rank["marks"]) for of_rank in ranks]
    assert names == [
        ["actor/.metadata", "actor/rank_00000.distcp", "ranks/rank_00000.pt"],
        ["actor/rank_00001.distcp", "ranks/rank_00001.pt"],
    ]
    shares = [of_rank["marks"][f"actor/rank_{rank:05d}.distcp"].size for rank, of_rank in enumerate(ranks)]
    assert max(shares) < 1.1 * min(shares), "ranks write equally much"
    for name, mark in (ranks[0]["marks"] | ranks[1]["marks"]).items():
        assert (tmp_path / "out/good" / name).stat().st_size == mark.size
