"""Adapters in real vLLM engines, merged and by themselves, through updates; and a short run of GRPO."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.errors import ReshardError
from tests.e2e.test_vllm_rollout import _gaps
from tests.e2e.test_vllm_tp import _config, _tokens
from tests.helpers.run_ranks import run_ranks
from tests.helpers.stack import needs_cpu_engine
from tests.helpers.tiny import load_hf_model, random_batch, save_tiny
from tests.helpers.training import build, train_step

REPO = Path(__file__).resolve().parents[2]
ONE: tuple[str, ...] = ("cluster.n_gpus_per_node=1", "rollout.tp=1")
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "adapter": (1, (*ONE, "model.lora.sync=adapter")),
    "merged": (1, ONE),
}
MORE_CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "full": (1, (*ONE, "rollout.weight_sync=full")),
    "adapter-tp2": (2, ("actor.tp=2", "actor.sequence_parallel=true", "model.lora.sync=adapter")),
    "merged-tp2": (2, ("actor.tp=2",)),
    "adapter-some": (1, (*ONE, "model.lora.sync=adapter", "model.lora.target_modules=[q_proj,down_proj]")),
    "merged-dp2": (2, ("rollout.tp=1",)),
    "adapter-pp2": (2, ("actor.pp=2", "model.lora.sync=adapter")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("lora") / "model", "qwen2", tied=True, layers=2)


def _on_rank(rank: int, world: int, folder: str, cases: dict[str, tuple[str, ...]], out: str) -> dict[str, Any]:
    return {name: _case(rank, world, folder, overrides, out) for name, overrides in cases.items()}


def _case(rank: int, world: int, folder: str, overrides: tuple[str, ...], out: str) -> dict[str, Any]:
    """An actor with adapters and its engine, before and after two updates."""
    from megatron.core import parallel_state

    from megatron_rl.algos.token_losses import nll_loss
    from megatron_rl.config.checks.lora import adapters_of
    from megatron_rl.models.config_json import read_model_shape
    from megatron_rl.parallel.topology import topology_of
    from megatron_rl.trainers.placement import engine_order
    from megatron_rl.weights.peft_files import write_adapter
    from megatron_rl.workers.colocated import engine_layout, start_engine
    from megatron_rl.workers.model import TrainedModel
    from megatron_rl.workers.phases import RankMemory

    cfg = _config(folder, "model.lora.rank=4", "model.lora.alpha=32", *overrides)
    adapters = adapters_of(cfg.model.lora, read_model_shape(folder))
    assert adapters is not None
    trainable = build(folder, cfg.actor, world, adapters=adapters)
    actor = TrainedModel(trainable)
    layout = engine_layout(cfg, engine_order(cfg, trainable.model.shape, topology_of(cfg.actor, world)))
    engine, publisher = start_engine(cfg, actor, RankMemory(), layout, device="cpu", rank=rank)
    found: dict[str, Any] = {"shared": sorted(engine.shared)}
    for version in (0, 1, 2):
        found[f"sync {version}"] = publisher.publish(version, expect_change=version > 0)
        measured = cfg.actor.pp == 1
        found[f"gap {version}"] = _gaps(engine, trainable, 1.0) if measured else 0.0
        found[f"greedy {version}"] = _tokens(engine)
        if version < 2:
            train_step(trainable, [random_batch(version, (30, 41), 128)], nll_loss, 1.0)
    with pytest.raises(ReshardError, match="equal those published before"):
        publisher.publish(3, expect_change=True)
    tensors = actor.adapters()
    if rank == 0:
        write_adapter(Path(out), tensors.items(), adapters, folder)
    engine.close()
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    return found


def _check(found: dict[str, Any], folder: str, out: Path) -> None:
    import peft

    gaps = [found[f"gap {version}"] for version in (0, 1, 2)]
    assert max(gaps) < 1e-4, gaps
    assert found["greedy 0"] != found["greedy 2"], "two updates change what is sampled"
    for version, model in ((0, load_hf_model(folder)), (2, peft.PeftModel.from_pretrained(load_hf_model(folder), out))):
        for (prompt, *_), answer in zip(_prompts(), found[f"greedy {version}"], strict=True):
            ids = torch.tensor([prompt])
            wanted = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
            assert tuple(wanted[0, ids.shape[1] :].tolist()) == answer[0], "greedy text equals PEFT's"


def _prompts() -> list[tuple[tuple[int, ...]]]:
    from tests.e2e.test_vllm_tp import PROMPTS

    return [(prompt,) for prompt in PROMPTS]


@needs_cpu_engine
def test_w7_w8_adapters_reach_engines_alone_and_merged(folder: str, tmp_path: Path) -> None:
    cases = {name: overrides for name, (_, overrides) in CASES.items()}
    (results,) = run_ranks(1, _on_rank, folder, cases, str(tmp_path / "adapter"), timeout=400.0)
    for found in results.values():
        _check(found, folder, tmp_path / "adapter")
    first, later = results["adapter"]["sync 0"], results["adapter"]["sync 1"]
    whole = first.local_bytes + first.aliased_bytes
    assert (later.local_bytes, later.aliased_bytes) == (0, 0), "weights go to the engine once"
    assert 0 < later.adapter_bytes < whole / 10
    # An engine with adapters merged in has memory of its own for these weights; embedding and norms are shared.
    names = results["merged"]["shared"]
    assert "model.embed_tokens.weight" in names and not [name for name in names if "proj" in name]
    assert [name for name in results["adapter"]["shared"] if "down_proj" in name], "weights beside adapters are shared"


@needs_cpu_engine
@pytest.mark.slow
def test_w7_adapters_of_attention_beside_experts(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3_moe", layers=2, tied=False)
    (results,) = run_ranks(1, _on_rank, folder, {"merged": ONE}, str(tmp_path / "adapter"), timeout=400.0)
    _check(results["merged"], folder, tmp_path / "adapter")


@needs_cpu_engine
@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES)
def test_w7_adapters_reach_engines_of_every_layout(folder: str, tmp_path: Path, case: str) -> None:
    world, overrides = MORE_CASES[case]
    results = run_ranks(world, _on_rank, folder, {case: overrides}, str(tmp_path / "adapter"), timeout=400.0)
    for of_rank in results:
        _check(of_rank[case], folder, tmp_path / "adapter")


@needs_cpu_engine
def test_grpo_with_adapters_alone_then_export_merged(data: Path) -> None:
    """A run with vLLM and a KL term, its adapter, its checkpoint, and the model that both are merged to."""
    import peft

    base, runs = data.parent / "base", data.parent / "runs"
    common = ["cluster.backend=inline", f"data.train_files={data / 'train.parquet'}", f"model.path={base}"]
    config = str(REPO / "configs/grpo-add2-1n1g.yaml")
    save_tiny(base, "qwen2", vocab=json.loads((data / "model/config.json").read_text())["vocab_size"], layers=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(data / "model" / name, base / name)
    steps = ["trainer.total_training_steps=2", "trainer.test_freq=0", "data.val_files=[]", "checkpoint.freq=2"]
    sizes = ["data.train_batch_size=4", "actor.optim.lr_warmup_steps=0", "actor.use_kl_loss=true"]
    lora = ["model.lora.rank=4", "model.lora.sync=adapter"]
    place = [f"trainer.default_local_dir={runs}", "trainer.experiment_name=lora"]
    # Lengths differ, so that updates have a gradient whatever is answered.
    reward = ["algorithm.overlong_buffer.enable=true", "algorithm.overlong_buffer.len=8"]
    _run("train", config, *common, *steps, *sizes, *lora, *place, *reward)
    rows = [json.loads(line) for line in (runs / "lora/metrics.jsonl").read_text().splitlines()]
    assert all(row["sync/local_bytes"] == 0 < row["sync/adapter_bytes"] for row in rows)
    assert all(row["mismatch/logprob_abs_mean"] < 1e-4 for row in rows if "mismatch/logprob_abs_mean" in row)
    merged = data.parent / "merged"
    _run("export", config, *common, *lora, "--checkpoint", str(runs / "lora"), "--out", str(merged), "--merge")
    theirs = peft.PeftModel.from_pretrained(load_hf_model(str(base)), str(runs / "lora/final")).merge_and_unload()
    for name, tensor in load_hf_model(str(merged)).state_dict().items():
        torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=0, atol=1e-6, msg=name)


def _run(verb: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "megatron_rl", verb, *arguments]
    done = subprocess.run(command, cwd=REPO, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
