"""LoRA on N ranks trains like on one; the weights stay as they were, bit by bit; merged equals weights and adapters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.algos.reduce import loss_weights
from megatron_rl.algos.token_losses import nll_loss
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.lora import Adapters, linear_names
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import hf_logprobs, random_batch, save_tiny
from tests.helpers.training import build, forward_logprobs, make_actor, my_micro_batches, train_step

STEPS = 4
LENGTHS = (5, 36, 9, 12, 20, 7, 7, 16)
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
EVERY = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
# Of fused layers some alone, and none in the first half of a layer.
SOME = frozenset({"q_proj", "v_proj", "down_proj"})
TWO_EACH = {"ppo_micro_batch_size_per_gpu": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "overlap_bucket_size": 2000}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2-recompute": (2, {"pp": 2, "recompute": "full", **TWO_EACH}),
    "dp2-overlap": (2, {**OVERLAP, "ppo_micro_batch_size_per_gpu": 3}),
}
MORE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "cp2": (2, {"cp": 2}),
    "tp4-sp": (4, {"tp": 4, "sequence_parallel": True}),
    "dp2-plain-optimizer": (2, {"use_distributed_optimizer": False}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2, **TWO_EACH}),
    "recompute-selective-cp2": (2, {"cp": 2, "recompute": "selective"}),
    "tp2-pp2-dp2": (8, {"tp": 2, "pp": 2, "sequence_parallel": True, **TWO_EACH}),
    "dp2-pp2-overlap": (4, {"pp": 2, **OVERLAP, **TWO_EACH}),
}


def adapters(targets: frozenset[str] = EVERY, **fields: Any) -> Adapters:
    return Adapters(**({"rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": targets} | fields))


def _train(rank: int, world: int, folder: str, layout: dict[str, Any], targets: frozenset[str]) -> dict[str, Any]:
    from megatron_rl.mcore.convert import export_hf

    actor = make_actor(**layout)
    trainable = build(folder, actor, world, adapters=adapters(targets))
    model = trainable.model
    before = dict(export_hf(model))
    steps = []
    for number in range(STEPS):
        batch = random_batch(number % 2, LENGTHS, 128)
        weights = loss_weights("token-mean", batch.loss_mask, batch.segments, batch.num_sequences, norm_length=64)
        micros = my_micro_batches(batch.with_(loss_weights=weights), actor, rank, world)
        report, _ = train_step(trainable, micros, nll_loss, 1.0)
        steps.append((report.loss, report.grad_norm))
    unequal = [name for name, tensor in export_hf(model) if not torch.equal(tensor, before[name])]
    trained = {name: tensor.clone() for name, tensor in export_hf(model, part="adapters")}
    buffers = sum(p.numel() for chunk in model.chunks for p in chunk.parameters() if p.requires_grad)
    return {"steps": steps, "unequal": unequal, "trained": trained, "numbers": buffers}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("lora") / "model", layers=4, tied=True, **SHAPE)


@pytest.fixture(scope="module")
def one_rank(folder: str) -> dict[frozenset[str], dict[str, Any]]:
    return {targets: run_ranks(1, _train, folder, {}, targets)[0] for targets in (EVERY, SOME)}


def _assert_like_one_rank(folder: str, wanted: dict[str, Any], layout: str, targets: frozenset[str]) -> None:
    world, axes = (LAYOUTS | MORE_LAYOUTS)[layout]
    assert wanted["steps"][-1][0] < wanted["steps"][0][0], "it must learn"
    for found in run_ranks(world, _train, folder, axes, targets, timeout=180):
        assert found["unequal"] == [], "weights beside adapters are frozen"
        for (loss, norm), (wanted_loss, wanted_norm) in zip(found["steps"], wanted["steps"], strict=True):
            assert norm == pytest.approx(wanted_norm, rel=1e-4)
            assert math.isnan(loss) or loss == pytest.approx(wanted_loss, rel=2e-5, abs=2e-5)
        assert found["trained"].keys() == wanted["trained"].keys()
        for name, tensor in found["trained"].items():
            torch.testing.assert_close(tensor, wanted["trained"][name], rtol=1e-3, atol=2e-5, msg=name)
            assert bool(tensor.any()), f"{name} was trained"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_n2_adapters_train_like_one_rank(folder: str, one_rank: dict[Any, dict[str, Any]], layout: str) -> None:
    _assert_like_one_rank(folder, one_rank[EVERY], layout, EVERY)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [EVERY, SOME], ids=["every", "some"])
@pytest.mark.parametrize("layout", [*LAYOUTS, *MORE_LAYOUTS])
def test_n2_adapters_train_like_one_rank_on_every_layout(
    folder: str, one_rank: dict[Any, dict[str, Any]], layout: str, targets: frozenset[str]
) -> None:
    _assert_like_one_rank(folder, one_rank[targets], layout, targets)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"ep": 2}, {"tp": 2, "sequence_parallel": True}], ids=["ep2", "tp2-sp"])
@pytest.mark.parametrize("family", ["qwen3_moe", "moonlight", "glm4_moe"])
def test_n2_adapters_train_beside_experts(tmp_path: Path, family: str, layout: dict[str, Any]) -> None:
    """Of moonlight, those of latent attention, of the first dense layer and of shared experts."""
    folder = save_tiny(tmp_path, family, layers=2, tied=False)
    shape = read_model_shape(folder)
    attention = frozenset(linear_names(shape, FAMILIES[shape.architecture]))
    wanted = run_ranks(1, _train, folder, {}, attention)[0]
    for found in run_ranks(2, _train, folder, layout, attention, timeout=120):
        assert found["unequal"] == [], "routers and experts are frozen"
        for (loss, norm), (wanted_loss, wanted_norm) in zip(found["steps"], wanted["steps"], strict=True):
            assert (loss, norm) == (pytest.approx(wanted_loss, rel=2e-5), pytest.approx(wanted_norm, rel=1e-4))


def test_only_adapters_have_gradients_and_optimizer_state(one_rank: dict[Any, dict[str, Any]]) -> None:
    for found in one_rank.values():
        assert found["numbers"] == sum(tensor.numel() for tensor in found["trained"].values())


def _forms(rank: int, world: int, folder: str, layout: dict[str, Any], out: str) -> dict[str, Any]:
    """One model with adapters that are not 0, three times: as it runs, merged, and switched off."""
    from megatron_rl.mcore import convert, lora
    from megatron_rl.weights.peft_files import AdapterFile, NewAdapters, write_adapter_files

    actor = make_actor(**layout)
    trainable = build(folder, actor, world, adapters=adapters(SOME, use_rslora=True))
    model = trainable.model
    with torch.no_grad():
        for chunk in model.bare_chunks:
            for name, param in chunk.named_parameters():
                if name.endswith(".b"):
                    param.normal_(std=0.05)
    exported = dict(convert.export_hf(model, part="adapters"))
    if rank == 0:
        write_adapter_files(Path(out), exported.items(), adapters(SOME, use_rslora=True), folder)
    torch.distributed.barrier()
    # Ranks of a group that hold the same tensor drew it apart: from here on all have what the file has.
    convert.load_hf(model, lambda: AdapterFile(out), "adapters")
    micros = [random_batch(0, LENGTHS, 128)]
    runs = forward_logprobs(model, micros, 1.0)
    with lora.without_adapters(model):
        off = forward_logprobs(model, micros, 1.0)
    merged = {name: tensor.clone() for name, tensor in convert.export_hf(model, of=lora.merged_values(model))}
    again = dict(convert.export_hf(model, part="adapters"))
    convert.load_hf(model, lambda: NewAdapters(1), "adapters")
    new = forward_logprobs(model, micros, 1.0)
    columns = [[one["logprobs"] for one in of] for of in (runs, off, new)]
    return {"columns": columns, "merged": merged, "again": again, "exported": exported}


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sequence_parallel": True}], ids=["one", "tp2-sp"])
def test_merged_peft_and_switched_off(folder: str, tmp_path: Path, layout: dict[str, Any]) -> None:
    """W10: PEFT reads what the ranks write, and computes what they do; merged equals weights and adapters."""
    _assert_forms(folder, tmp_path, layout)


@pytest.mark.slow
def test_adapters_stand_before_the_norms_behind_attention_and_mlp(tmp_path: Path) -> None:
    """W10, of Gemma 3."""
    folder = save_tiny(tmp_path / "model", "gemma3_text", layers=2)
    _assert_forms(folder, tmp_path, {"tp": 2, "sequence_parallel": True})


def _assert_forms(folder: str, tmp_path: Path, layout: dict[str, Any]) -> None:
    import peft
    import transformers

    found = run_ranks(layout.get("tp", 1), _forms, folder, layout, str(tmp_path))[0]
    runs, off, new = found["columns"]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(torch.cat(off), torch.cat(new), rtol=0, atol=0)
    torch.testing.assert_close(torch.cat(off), _of_transformers(base), rtol=0, atol=2e-5)
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path)).eval()
    torch.testing.assert_close(torch.cat(runs), _of_transformers(theirs), rtol=0, atol=2e-5)
    assert float((torch.cat(runs) - torch.cat(off)).abs().max()) > 0.01, "the adapters do something"
    merged = theirs.merge_and_unload().state_dict()
    for name, tensor in found["merged"].items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6, msg=name)
    assert all(torch.equal(found["again"][name], found["exported"][name]) for name in found["exported"])


def _of_transformers(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return hf_logprobs(model, random_batch(0, LENGTHS, 128), 1.0)[0]


def _one_layer_fewer(rank: int, world: int, folder: str) -> str:
    from megatron_rl.errors import CheckpointError
    from megatron_rl.mcore import cpu

    cpu.install()
    from megatron_rl.mcore import lora

    every = lora.adapted_linears
    lora.adapted_linears = lambda *args, **kwargs: list(every(*args, **kwargs))[1:]  # type: ignore[assignment]
    with pytest.raises(CheckpointError) as caught:
        build(folder, make_actor(), world, adapters=adapters(SOME))
    return str(caught.value)


def test_w10_a_layer_without_its_adapter_is_seen(folder: str) -> None:
    (found,) = run_ranks(1, _one_layer_fewer, folder)
    assert "'q_proj': 3" in found and "'q_proj': 4" in found


def _saved_and_loaded(rank: int, world: int, folder: str, layouts: list[dict[str, Any]], out: str) -> dict[str, Any]:
    """Two updates, a checkpoint, a third; then that checkpoint on another layout, and its third update."""
    from megatron.core import parallel_state

    from megatron_rl.mcore.convert import export_hf
    from megatron_rl.workers.checkpoint import StateFiles
    from megatron_rl.workers.model import TrainedModel

    found: dict[str, Any] = {}
    for number, layout in enumerate(layouts):
        actor = make_actor(**layout)
        trained = TrainedModel(build(folder, actor, world, adapters=adapters()))
        files = StateFiles(rank, world, actor)
        for step in range(3):
            if step == 2 and number == 0:
                files.begin(Path(out), {"actor": trained.saved}, background=False)
                found["files"] = files.finish()
            elif step == 2:
                files.load(Path(out), {"actor": trained.saved}, lambda role: None)
            elif number == 1:
                continue
            micros = my_micro_batches(random_batch(step, LENGTHS, 128), actor, rank, world)
            report, _ = train_step(trained.trainable, micros, nll_loss, 1.0)
            found[f"{number} {step}"] = report.grad_norm
        found[f"adapters {number}"] = dict(export_hf(trained.model, part="adapters"))
        found[f"tensors {number}"] = set(trained.saved.tensors())
        parallel_state.destroy_model_parallel()
    return found


def test_r1_a_checkpoint_holds_adapters_alone_and_loads_on_another_layout(folder: str, tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [{"tp": 2, "sequence_parallel": True}, {"pp": 2, **TWO_EACH}]
    found, other = run_ranks(2, _saved_and_loaded, folder, layouts, str(tmp_path), timeout=120)
    names = {name.partition("/")[2] for name in found["tensors 0"] if "/" in name}
    assert names == set(found["adapters 0"]) and all(".lora_" in name for name in names)
    assert found["1 2"] == pytest.approx(found["0 2"], rel=1e-4)
    for name, tensor in found["adapters 0"].items():
        torch.testing.assert_close(found["adapters 1"][name], tensor, rtol=1e-4, atol=1e-6, msg=name)
    size = sum(mark.size for rank in (found, other) for mark in rank["files"].values())
    trained = sum(tensor.numel() for tensor in found["adapters 0"].values())
    assert 12 * trained <= size < 24 * trained + (1 << 20), "three numbers of float32 for each that trains"


def _dropped(rank: int, world: int, folder: str) -> dict[str, Any]:
    """What two tensor-parallel ranks drop, and a step whose activations are computed again."""
    from megatron.core import parallel_state

    from megatron_rl.mcore.lora import Dropout

    found: dict[str, Any] = {}
    for recompute in ("none", "full"):
        actor = make_actor(tp=2, recompute=recompute)
        trainable = build(folder, actor, world, adapters=adapters(dropout=0.3))
        with torch.no_grad():
            for chunk in trainable.model.bare_chunks:
                for name, param in chunk.named_parameters():
                    if name.endswith(".b"):
                        param.fill_(0.1)
        report, _ = train_step(trainable, [random_batch(0, LENGTHS, 128)], nll_loss, 1.0)
        found[recompute] = (report.loss, report.grad_norm)
        dropout, ones = Dropout(0.5, 1), torch.ones(256)
        found["alike"] = [dropout(ones, alike=True) for _ in range(2)]
        found["apart"] = dropout(ones, alike=False)
        parallel_state.destroy_model_parallel()
    return found


def test_tensor_parallel_ranks_drop_the_same_inputs(folder: str) -> None:
    here, there = run_ranks(2, _dropped, folder, timeout=120)
    assert torch.equal(here["alike"][0], there["alike"][0]) and not torch.equal(*here["alike"])
    assert not torch.equal(here["apart"], there["apart"])
    assert {float(value) for value in here["alike"][0]} == {0.0, 2.0}
    assert here["full"] == pytest.approx(here["none"], rel=1e-5), "what is computed again drops the same inputs"
