"""Losses, gradients and weights that are not finite: every rank of every layout sees them, and nothing is changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.errors import CheckpointError, NonFiniteError
from megatron_rl.types import BadMicroBatch, StepReport
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import random_batch, save_tiny
from tests.helpers.training import build, make_actor, my_micro_batches, train_step

LENGTHS = (5, 40, 9, 12, 33, 7, 7, 21)
BAD = 4
"""The sequence that breaks a step."""
SMALL = {"max_tokens_per_gpu": 64}
"""So that a mini-batch is several micro-batches."""

PLAIN = {"use_distributed_optimizer": False}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "overlap_bucket_size": 100_000}
LAYOUTS: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "data": ("qwen2", [(dtype, SMALL | how) for how in ({}, PLAIN) for dtype in ("float32", "bfloat16")]),
    "overlapped": ("qwen2", [("float32", SMALL | OVERLAPPED)]),
    "clip 0": ("qwen2", [("float32", SMALL | {"grad_clip": 0.0})]),
    "tensor": ("qwen2", [("float32", SMALL | {"tp": 2, "sequence_parallel": sp}) for sp in (False, True)]),
    "pipeline": ("qwen2", [("float32", SMALL | {"pp": 2}), ("bfloat16", SMALL | {"pp": 2} | PLAIN)]),
    "context": ("qwen2", [("float32", {"max_tokens_per_gpu": 32, "cp": 2})]),
    "experts": ("qwen3_moe", [("float32", SMALL | {"ep": 2}), ("float32", SMALL | {"ep": 2} | PLAIN)]),
}


def _loss(logprobs: torch.Tensor, entropy: torch.Tensor, columns: Any) -> Any:
    """-log p; where `broken` is set the loss is as finite as elsewhere, and its gradient is infinite."""
    root = torch.where(columns["broken"] > 0, logprobs - logprobs.detach(), torch.ones_like(logprobs)).sqrt()
    return -logprobs + root - root.detach(), {"nll": -logprobs}


def _batch(number: int, kind: str | None = None) -> Any:
    """A batch; kind: what is wrong with sequence BAD, on its last token."""
    batch = random_batch(number, LENGTHS, 128)
    broken, weights = torch.zeros(batch.num_tokens), batch.columns["loss_weights"].clone()
    at = batch.starts[BAD + 1] - 1
    if kind == "gradient":
        broken[at] = 1.0
    elif kind is not None:
        weights[at] = {"nan": float("nan"), "inf": float("inf")}[kind]
    return batch.with_(broken=broken, loss_weights=weights)


def _state(trainable: Any) -> dict[str, Any]:
    """Everything that a step may change."""
    trainable.model.complete_params()
    state: dict[str, Any] = {
        f"{c} {name}": param.detach().clone()
        for c, model in enumerate(trainable.model.bare_chunks)
        for name, param in model.named_parameters()
    }
    for o, part in enumerate(trainable.optimizer.chained_optimizers):
        for g, group in enumerate(part.param_groups):
            state |= {f"{o} {g} {k}": v for k, v in group.items() if k != "params"}
            for p, param in enumerate(group["params"]):
                moments = part.optimizer.state.get(param, {})
                state |= {f"{o} {g} {p} {k}": v.clone() for k, v in moments.items() if torch.is_tensor(v)}
                state[f"{o} {g} {p} master"] = param.detach().clone()
    state["schedule"] = trainable.scheduler.num_steps
    return state


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [
        key
        for key, value in one.items()
        if not (torch.equal(value, other[key]) if torch.is_tensor(value) else value == other[key])
    ]


def _run(rank: int, world: int, folder: str, kinds: list[str], cases: list[Any]) -> list[Any]:
    """For each case: (report, what a broken step changed, what the end of the run differs in from one without it)."""

    found = []
    for dtype, layout in cases:
        actor = make_actor(**layout)

        def go(trainable: Any, batch: Any, actor: Any = actor) -> StepReport:
            return train_step(trainable, my_micro_batches(batch, actor, rank, world), _loss, 1.0)[0]

        calm, struck = build(folder, actor, world, dtype), build(folder, actor, world, dtype)
        for trainable in (calm, struck):
            go(trainable, _batch(0))
        for kind in kinds:
            before = _state(struck)
            report = go(struck, _batch(7, kind))
            found.append((kind, report, _differences(before, _state(struck))))
        for trainable in (calm, struck):
            assert go(trainable, _batch(1)).updated
        found.append(("end", None, _differences(_state(calm), _state(struck))))
    return found


def _place(layout: dict[str, Any], world: int) -> tuple[int, int, int]:
    """(data-parallel rank, micro-batch, number in it) of sequence BAD, as the controller plans it."""
    from megatron_rl.data.batching import plan_batches

    actor = make_actor(**layout)
    dp = world // (actor.tp * actor.pp * actor.cp)
    plan = plan_batches(LENGTHS, [0] * len(LENGTHS), dp=dp, max_tokens=actor.max_tokens_per_gpu * actor.cp)
    return next(
        (d, j, micro.index(BAD)) for d, rank in enumerate(plan.minis[0]) for j, micro in enumerate(rank) if BAD in micro
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank_and_is_traced_to_its_sequence(
    name: str, tmp_path: Path
) -> None:
    """NaN and infinity in the loss, and a gradient that is infinite while the loss is finite; the next step is made
    as if nothing had been, bit by bit.
    """
    family, cases = LAYOUTS[name]
    folder = save_tiny(tmp_path / "model", family, layers=2)
    kinds = ["nan", "inf", "gradient"]
    by_rank = run_ranks(2, _run, folder, kinds, cases, timeout=240)
    assert len(by_rank) == 2
    for found in by_rank:
        assert len(found) == len(cases) * (len(kinds) + 1)
        for kind, report, changed in found:
            assert changed == [], (name, kind, changed[:5])
            assert kind == "end" or not report.updated
    for number, (_, layout) in enumerate(cases):
        dp, micro, place = _place(layout, 2)
        for at, kind in enumerate(kinds):
            reports = [found[number * (len(kinds) + 1) + at][1] for found in by_rank]
            assert reports[0].bad == reports[1].bad
            bad: tuple[BadMicroBatch, ...] = reports[0].bad
            assert (bad and {(one.dp, one.micro) for one in bad} == {(dp, micro)}) or name == "experts", (layout, bad)
            assert (dp, micro) in {(one.dp, one.micro) for one in bad}
            assert all(one.what == ("gradient" if kind == "gradient" else "loss") for one in bad)
            assert {one.sequences for one in bad} == ({None} if kind == "gradient" else {(place,)}), (layout, bad)


def _weights(rank: int, world: int, folder: str, layout: dict[str, Any], dtype: str) -> list[str]:
    """What is said of weights with one NaN; on the rank that holds it, an export would be wrong on all."""
    from megatron_rl.mcore.finite import refuse_bad_weights

    trainable = build(folder, make_actor(**layout), world, dtype)
    refuse_bad_weights(trainable.model, what="the actor's weights", consequence="nothing is done")
    said = []
    for value, limit in ((float("nan"), torch.finfo(torch.float32).max), (float("-inf"), 1e30), (70000.0, 65504.0)):
        if rank == world - 1:
            model = trainable.model.bare_chunks[-1]
            param = next(p for name, p in model.named_parameters() if "linear_fc2" in name)
            with torch.no_grad():
                kept = param.view(-1)[5].clone()
                param.view(-1)[5] = value
        try:
            refuse_bad_weights(trainable.model, what="the actor's weights", consequence="nothing is done", limit=limit)
        except NonFiniteError as error:
            said.append(str(error))
        if rank == world - 1:
            with torch.no_grad():
                param.view(-1)[5] = kept
    return said


@pytest.mark.parametrize(
    ("layout", "dtype", "tensor"),
    [
        ({"tp": 2}, "float32", "model.layers.0.mlp.down_proj.weight"),
        ({"pp": 2}, "bfloat16", "model.layers.1.mlp.down_proj.weight"),
    ],
)
def test_weights_that_are_not_finite_are_named_on_all_ranks_before_they_leave(
    layout: dict[str, Any], dtype: str, tensor: str, tmp_path: Path
) -> None:
    """Also numbers that only the engine's precision cannot hold (float16: 65504)."""
    folder = save_tiny(tmp_path / "model", layers=2)
    first, second = run_ranks(2, _weights, folder, layout, dtype, timeout=120)
    assert first == second and len(first) == 3
    for text in first:
        assert tensor in text and "(ranks 1)" in text and "nothing is done" in text and "1 tensors" in text


def _load(rank: int, world: int, folder: str, layout: dict[str, Any], dtype: str) -> str:
    try:
        build(folder, make_actor(**layout), world, dtype)
    except CheckpointError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("layout", "name", "value"),
    [
        ({}, "model.embed_tokens.weight", float("nan")),
        ({"tp": 2}, "model.layers.1.self_attn.q_proj.bias", float("inf")),
        ({"tp": 2}, "model.layers.0.mlp.up_proj.weight", float("-inf")),
        ({"pp": 2}, "model.norm.weight", float("nan")),
        ({"pp": 2}, "model.layers.0.input_layernorm.weight", 1e300),
    ],
)
def test_a_folder_with_weights_that_are_not_finite_is_refused_on_all_ranks(
    layout: dict[str, Any], name: str, value: float, tmp_path: Path
) -> None:
    """Naming tensor and file, though one rank alone may hold the number; 1e300 is finite in its file (float64) and
    infinite in the model.
    """
    folder = save_tiny(tmp_path / "model", layers=2)
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors[name].double() if value == 1e300 else tensors[name]
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    texts = run_ranks(2, _load, folder, layout, "bfloat16", timeout=120)
    assert texts[0] == texts[1]
    assert name in texts[0] and str(file) in texts[0] and "not finite" in texts[0] and "copy the folder" in texts[0]
    assert texts[0].startswith("1 tensors")


def test_shards_are_named_by_their_own_files(tmp_path: Path) -> None:
    """A folder of several files: each tensor with its file, both faults at once."""
    folder = Path(save_tiny(tmp_path / "model", layers=2))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    bad = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    for name in bad:
        tensors[name].view(-1)[0] = float("nan")
    weight_map = {name: ("a.safetensors" if "layers.0" in name else "b.safetensors") for name in tensors}
    for file in ("a.safetensors", "b.safetensors"):
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (text,) = run_ranks(1, _load, str(folder), {}, "float32", timeout=120)
    assert f"a.safetensors: {bad[0]}" in text and f"b.safetensors: {bad[1]}" in text


def test_a_huge_rate_ends_in_a_refused_step_not_in_broken_weights(tmp_path: Path) -> None:
    """lr 1e19: finite weights that overflow in the forward pass; the step after is not made."""
    folder = save_tiny(tmp_path / "model", layers=2)
    for updated, finite in run_ranks(1, _huge, folder, timeout=120):
        assert updated[0] and not updated[-1]
        assert finite


def _huge(rank: int, world: int, folder: str) -> tuple[list[bool], bool]:
    from megatron_rl.mcore import convert

    actor = make_actor()
    actor = replace(actor, optim=replace(actor.optim, lr=1e19, weight_decay=0.0))
    trainable = build(folder, actor, world)
    updated = []
    for number in range(4):
        micros = my_micro_batches(_batch(number), actor, rank, world)
        updated.append(train_step(trainable, micros, _loss, 1.0)[0].updated)
    weights = [tensor for _, tensor in convert.export_hf(trainable.model)]
    return updated, all(bool(torch.isfinite(tensor).all()) for tensor in weights)
