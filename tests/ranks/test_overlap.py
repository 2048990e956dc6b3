"""Gradients and weights that travel while the model computes: whoever reads weights sees whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl.algos.token_losses import nll_loss
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import random_batch, save_tiny
from tests.helpers.training import build, forward_logprobs, live_parameters, make_actor, my_micro_batches, train_step

LENGTHS = (5, 16, 9, 12, 4, 4, 4)
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "overlap_bucket_size": 20000}
Weights = dict[str, torch.Tensor]


def _raw(trainable: Any) -> Weights:
    """This rank's memory as it is."""
    named = [pair for chunk in trainable.model.chunks for pair in chunk.named_parameters()]
    return {name: param.detach().clone() for name, param in named}


def _exported(trainable: Any) -> Weights:
    from megatron_rl.mcore import convert

    return {name: tensor.clone() for name, tensor in convert.export_hf(trainable.model)}


def _published(trainable: Any) -> Weights:
    trainable.model.complete_params()
    return {name: tensor.clone() for name, tensor in live_parameters(trainable.model).items()}


def _after_offload(trainable: Any) -> Weights:
    from megatron_rl.mcore.offload import Offload

    offload = Offload(trainable, ["params"])
    offload.to_host()
    offload.to_device()
    return _raw(trainable)


READERS = {"export": _exported, "publish": _published, "offload": _after_offload}


def _read_after_each_step(rank: int, world: int, folder: str, layout: dict[str, Any], dtype: str) -> dict[str, Weights]:

    # Clipping would round: its factor comes from a norm that buckets add up in another order.
    actor = make_actor(grad_clip=0.0, **layout)
    trainable = build(folder, actor, world, dtype)
    found: dict[str, Weights] = {}
    for number, (name, read) in enumerate({"forward": None, **READERS}.items()):
        micros = my_micro_batches(random_batch(number, LENGTHS, 128), actor, rank, world)
        train_step(trainable, micros, nll_loss, 1.0)
        found[f"{name}, before"] = _raw(trainable)
        if read is None:
            columns = forward_logprobs(trainable.model, micros, 1.0)
            found[name] = {str(i): column["logprobs"] for i, column in enumerate(columns)}
        else:
            found[name] = read(trainable)
        whole = _exported(trainable)
        assert _same(_exported(trainable), whole), "whole weights stay what they are when another reader asks"
    return found


def _same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def _faults(rank: int, world: int, folders: dict[str, str], dtype: str) -> list[str]:
    """Where a run with overlap differs from the same run without."""
    faults = []
    for family, folder in folders.items():
        layout = {"ppo_micro_batch_size_per_gpu": 1}
        wanted = _read_after_each_step(rank, world, folder, layout, dtype)
        found = _read_after_each_step(rank, world, folder, {**layout, **OVERLAP}, dtype)
        for name in ("forward", *READERS):
            if not _same(found[name], wanted[name]):
                faults.append(f"{family}: {name} reads something else")
            if _same(found[f"{name}, before"], wanted[f"{name}, before"]):
                faults.append(f"{family}: nothing was left to gather before {name}")
    return faults


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("tiny")
    kinds = {"tied": "qwen2", "untied": "qwen2", "experts": "qwen3_moe"}
    return {name: save_tiny(root / name, kind, tied=name == "tied", layers=2) for name, kind in kinds.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_gathered_late_are_whole_for_every_reader(folders: dict[str, str], dtype: str) -> None:
    """Bit for bit those of the same run without overlap, though each rank has only its part after the update. Micro-
    batches of 4 tokens leave some of 8 experts without one, and their gradients are waited for all the same.
    """
    for of_rank in run_ranks(2, _faults, folders, dtype, timeout=180):
        assert of_rank == []
