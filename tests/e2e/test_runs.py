"""Whole runs through Ray, Megatron-Core and vLLM on the quick start's task, a few steps each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cluster import ray_runtime
from megatron_rl.config.load import load_config
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.runs import verbs
from tests.helpers.run_ranks import run_ranks
from tests.helpers.stack import needs_cpu_engine

REPO = Path(__file__).resolve().parents[2]
SFT, GRPO = (str(REPO / "configs" / f"{name}-add2-1n1g.yaml") for name in ("sft", "grpo"))
STEPS = 20
INLINE = ["cluster.backend=inline"]
DP2 = ["cluster.n_gpus_per_node=2", "cluster.num_cpus_per_rank=0.5"]
TP2 = [*DP2, "actor.tp=2"]
LONGER: dict[str, Any] = {
    "max_position_embeddings": 128,
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16},
}
OFFLOAD = [f"actor.{what}_offload=true" for what in ("param", "grad", "optimizer")]


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    """One Ray for all runs here: starting and ending one takes longer than their steps."""
    cluster = ClusterConfig(device="cpu", n_gpus_per_node=2, num_cpus_per_rank=0.5)
    ray_runtime.acquire(cluster, "cpu")
    yield
    ray_runtime.release()


def _run(config: str, data: Path, name: str, overrides: list[str]) -> list[dict[str, Any]]:
    """Train; returns the rows of metrics.jsonl."""
    sft = config == SFT
    own = [
        f"model.path={data / 'model'}",
        f"data.train_files={data / ('sft_train.parquet' if sft else 'train.parquet')}",
        f"data.val_files={data / ('sft_val.parquet' if sft else 'val.parquet')}",
        f"trainer.default_local_dir={data.parent}",
        f"trainer.experiment_name={name}",
    ]
    if overrides[0] == INLINE[0]:
        # One rank in the process itself: of its own, so that the CPU shim stays out of the tests' process.
        command = [sys.executable, "-m", "megatron_rl", "train", config, *own, *overrides]
        subprocess.run(command, check=True, cwd=REPO, timeout=300)
    else:
        verbs.train(load_config([config], [*own, *overrides]))
    return [json.loads(line) for line in (data.parent / name / "metrics.jsonl").read_text().splitlines()]


def _sft(data: Path, name: str, overrides: list[str]) -> list[float]:
    steps = [f"trainer.total_training_steps={STEPS}", "trainer.target_loss=null", "actor.optim.lr_warmup_steps=5"]
    rows = _run(SFT, data, name, [*overrides, *steps])
    assert all(row["perf/update_tflops"] > 0 for row in rows if "sft/loss" in row)
    return [row["sft/loss"] for row in rows if "sft/loss" in row]


@pytest.fixture(scope="module")
def one_rank(data: Path) -> list[float]:
    return _sft(data, "sft-one", INLINE)


@pytest.mark.parametrize("layout", ["dp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_n2_sft_on_two_ray_workers_equals_one_rank(data: Path, one_rank: list[float], layout: str) -> None:
    """N2: the same losses to 1e-4 over 20 steps, DP 2 and TP 2, through Ray."""
    assert len(one_rank) == STEPS and one_rank[-1] < one_rank[0] - 1.0
    losses = _sft(data, f"sft-{layout}", {"dp2": DP2, "tp2": TP2}[layout])
    assert losses == pytest.approx(one_rank, abs=1e-4)


@needs_cpu_engine
@pytest.mark.parametrize("layout", ["dp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_grpo_runs_on_two_ray_workers(data: Path, one_rank: list[float], layout: str) -> None:
    """GRPO with vLLM on DP 2 and TP 2, with every optional node of the flow: mini-batches, KL in loss and in reward. On
    DP 2 weights, gradients and optimizer live on the host while responses are generated. On TP 2 one engine spans both
    ranks, on the actor's memory. Trainer, reference, engine and the saved model have another RoPE than model.path.
    """
    # The 20-step model answers nothing right; this reward differs between its samples, so that there is something to
    # learn.
    reward = data.parent / "reward.py"
    reward.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': float(len(solution_str) % 2), 'length': len(solution_str)}\n"
    )
    options = [
        f"reward.function={reward}:score",
        f"model.path={data.parent / 'sft-one' / 'final'}",
        f"model.override_config={json.dumps(LONGER)}",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "actor.optim.lr_warmup_steps=0",
        "trainer.logger=[console,tensorboard]",
        "data.train_batch_size=16",
        "actor.ppo_mini_batch_size=8",
        "actor.use_kl_loss=true",
        "algorithm.use_kl_in_reward=true",
        "algorithm.drop_flat_groups=true",
        "algorithm.norm_adv_by_std_in_grpo=true",
        "rollout.val.temperature=0",
    ]
    name = f"grpo-{layout}"
    rows = _run(GRPO, data, name, [*options, *({"dp2": [*DP2, *OFFLOAD], "tp2": [*TP2, "rollout.tp=2"]}[layout])])
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["val/num_samples"] == 400 for row in rows if "val/accuracy" in row), "R4: each row exactly once"
    for row in rows[1:]:
        assert row["mismatch/abs_max"] < 1e-4, "N8: engine and trainer agree in float32"
        assert row["reward/failed"] == 0 and 0.0 <= row["reward/mean"] <= 1.0
        assert row["kl/ref"] == pytest.approx(0.0, abs=0.5)
    assert all(row["policy/updates"] == 2 and row["policy/grad_norm"] > 0 for row in rows[1:])
    assert rows[1]["policy/ratio_mean"] == pytest.approx(1.0, abs=0.1) and rows[1]["reward/length"] > 0
    moved = {key: value for key, value in rows[2].items() if key.startswith("offload/")}
    assert len(moved) == (3 if layout == "dp2" else 0) and ("time/offload" in rows[2]) == (layout == "dp2")
    if layout == "tp2":
        assert rows[2]["sync/aliased_bytes"] > rows[2]["sync/local_bytes"] and rows[2]["sync/moved_bytes"] == 0
    # AdamW's two means, shared by two ranks, are as large as the weights.
    assert all(size >= rows[2]["sync/local_bytes"] / 2 for size in moved.values()), moved
    folder = data.parent / name
    made = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "rollouts.jsonl", "curves.png", "final", "tensorboard"} <= made
    _has_entries(folder / "final", LONGER)
    rollout = json.loads((folder / "rollouts.jsonl").read_text().splitlines()[0])
    assert rollout["step"] == 1 and rollout["prompt"].endswith("=")
    resolved = load_config([str(folder / "config.yaml")], [])
    assert resolved.actor.ppo_mini_batch_size == 8


def _has_entries(folder: Path, changes: dict[str, Any]) -> None:
    """The folder's config.json, as transformers reads it, has the changes; and the base that model.path has."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    assert config.max_position_embeddings == changes["max_position_embeddings"]
    assert config.rope_parameters == changes["rope_scaling"] | {"rope_theta": 10000.0}


def _generate_with_vllm(rank: int, world: int, folder: str) -> list[int]:
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=2**26, gpu_memory_utilization=0.05)
    (output,) = llm.generate(["12+30="], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    return list(output.outputs[0].token_ids)


@needs_cpu_engine
def test_saved_weights_open_in_transformers_and_vllm_as_they_are(data: Path, one_rank: list[float]) -> None:
    from transformers import pipeline

    final = data.parent / "sft-one" / "final"
    generate = pipeline("text-generation", model=str(final))
    text = generate("12+30=", max_new_tokens=4, do_sample=False, return_full_text=False)[0]["generated_text"]
    (ids,) = run_ranks(1, _generate_with_vllm, str(final), timeout=180.0)
    assert generate.tokenizer.decode(ids, skip_special_tokens=True) == text  # type: ignore[union-attr]


def test_export_writes_the_same_weights(data: Path, one_rank: list[float]) -> None:
    """`megatron-rl export` of a trained model is that model, byte for byte; a folder in use is refused."""
    from safetensors.torch import load_file

    from megatron_rl.errors import CheckpointError

    final = data.parent / "sft-one" / "final"
    own = [f"model.path={final}", "model.init=pretrained", f"model.override_config={json.dumps(LONGER)}"]
    files = [f"data.train_files={data / 'sft_train.parquet'}", f"data.val_files={data / 'sft_val.parquet'}"]
    cfg = load_config([SFT], [*own, *files])
    out = data.parent / "exported"
    verbs.export(cfg, str(out))
    _has_entries(out, LONGER)
    one, two = (load_file(str(folder / "model.safetensors")) for folder in (final, out))
    assert one.keys() == two.keys() and all(bool((one[name] == two[name]).all()) for name in one)
    with pytest.raises(CheckpointError, match="not empty"):
        verbs.export(cfg, str(out))
