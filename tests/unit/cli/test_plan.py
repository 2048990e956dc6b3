"""`megatron-rl plan`: the published comparison, 671B parameters on 1,024 GPUs, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main
from megatron_rl.errors import ConfigError
from megatron_rl.models import FAMILIES
from megatron_rl.models.rules import num_parameters
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.sizes import KNOWN_SHAPES, named_shape
from megatron_rl.parallel.topology import Topology
from megatron_rl.reshard.plan import make_plan
from megatron_rl.reshard.planning.report import make_report
from megatron_rl.reshard.planning.request import KEYS, parse, request, table_of
from megatron_rl.reshard.shards import EngineLayout, engine_shards, trainer_shards
from tests.helpers.config import base_settings, write

DEEPSEEK_V3 = "deepseek-v3/671b"
ROOT = Path(__file__).resolve().parents[3]
ENDS_11 = "train.num_layers_in_first_pipeline_stage=11 train.num_layers_in_last_pipeline_stage=11"

# model, layouts, GB received by a GPU: full gather, least by the formula M (1 / g - 1 / (t p)), least exactly.
# Two of the exact ones differ from the formula, which counts all weights as split and the trainer's shard as part of
# what the engine needs: TP 4 shards are wider than TP 8 ones, and DeepSeek's latent projections are whole on each rank.
COMPARISON = [
    ("qwen2.5/7b", "train.tp=4 train.pp=2 rollout.tp=2", 13.3, 5.7, 5.71),
    ("qwen2.5/32b", "train.tp=8 rollout.tp=4", 57.3, 8.2, 8.19),
    ("qwen2.5/32b", "train.tp=4 train.pp=4 rollout.tp=8", 61.4, 4.1, 6.14),
    ("llama3.1/70b", "train.tp=8 train.pp=4 rollout.tp=8", 136.6, 13.2, 13.23),
    ("llama3.1/70b", "train.tp=8 train.pp=8 rollout.tp=8", 138.8, 15.4, 15.44),
    ("qwen3/30b-a3b", "train.ep=8 rollout.tp=2", 50.7, 25.3, 25.37),
    ("qwen3/235b-a22b", f"train.tp=4 train.pp=8 train.ep=16 rollout.tp=8 {ENDS_11}", 466.0, 58.0, 58.24),
    (
        "deepseek-v3/671b",
        "train.pp=16 train.ep=16 rollout.tp=32 train.num_layers_in_last_pipeline_stage=1",
        1335.0,
        41.0,
        43.59,
    ),
]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def told(capsys: pytest.CaptureFixture[str], model: str, keys: str) -> dict[str, Any]:
    code, out, err = run(capsys, "--model", model, *keys.split(), "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.parametrize(("model", "keys", "full", "formula", "least"), COMPARISON)
def test_w4_the_published_comparison_is_reproduced_and_the_minimum_reached(
    model: str, keys: str, full: float, formula: float, least: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """W4: what is moved is the minimum on each row, and both columns are the table's within rounding."""
    answer = told(capsys, model, keys)
    sizes = {name: one["mean"] / 1e9 for name, one in answer["bytes"].items()}
    assert answer["ratio_moved_to_minimum"] == 1.0 and sizes["moved"] == sizes["minimum"]
    assert sizes["full_gather"] == pytest.approx(full, rel=0.0025)
    assert sizes["minimum"] == pytest.approx(least, abs=0.006)
    if least not in (6.14, 43.59):
        assert sizes["minimum"] == pytest.approx(formula, rel=0.006)
    assert all(one["moved"] == one["minimum"] for one in answer["ranks"])
    assert answer["natural_order_moved"] >= answer["bytes"]["moved"]["total"]


def test_whole_engines_can_save_nothing_and_the_answer_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model", "qwen2.5/7b", "train.tp=4", "rollout.tp=1")
    assert code == 0 and "nothing can be saved" in out and "times as much" not in out
    answer = told(capsys, "qwen2.5/7b", "train.tp=4 rollout.tp=1")
    assert answer["nothing_can_be_saved"] is True
    assert answer["bytes"]["minimum"] == answer["bytes"]["full_gather"]
    assert answer["bytes"]["moved"]["mean"] / 1e9 == pytest.approx(11.4, abs=0.05)


def test_equal_layouts_move_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model", "qwen2.5/7b", "train.tp=4", "rollout.tp=4", "train.dp=2")
    assert code == 0 and "nothing to send" in out


def test_671b_on_1024_gpus_is_planned_and_proved_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """The limit allows for a busy machine; a quiet one takes about 5 s."""
    start = time.process_time()
    keys = "train.pp=16 train.ep=16 rollout.tp=32 gpus=1024 train.num_layers_in_last_pipeline_stage=1"
    answer = told(capsys, DEEPSEEK_V3, keys)
    assert time.process_time() - start < 30
    assert answer["gpus"] == 1024 and answer["parameters"] == 671_026_404_352 and answer["train"]["dp"] == 64
    assert answer["ratio_moved_to_minimum"] == 1.0
    assert sorted(answer["order"]) == list(range(1024))


def test_disaggregated_engines_share_one_copy(capsys: pytest.CaptureFixture[str]) -> None:
    keys = "train.tp=4 train.pp=2 rollout.tp=2 placement=disaggregated"
    for engines in (1, 4):
        answer = told(capsys, "qwen2.5/7b", f"{keys} rollout.dp={engines}")
        assert answer["gpus"] == 8 + 2 * engines
        sent = [one["sent"] for one in answer["ranks"]]
        model = 2 * answer["parameters"]
        assert sum(sent[:8]) == pytest.approx(model, rel=0.001)
        assert sum(sent[8:]) == pytest.approx((engines - 1) * model, rel=0.001)
        assert max(sent[8:]) <= 1.05 * (engines - 1) / engines * model / 2 + 1e7


def test_the_text_has_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model", "qwen2.5/7b", "train.tp=4", "train.pp=2", "rollout.tp=2", "network_gb_s=25")
    assert code == 0
    for text in (
        "7,615,616,512 parameters", "train tp 4 pp 2 vpp 1 cp 1 dp 1; 4 engines of tp 2", "minimum to receive",
        "moved / minimum: 1.00", "a full gather receives 2.3 times", "(0, 2) (1, 3) (4, 6) (5, 7)",
        "the natural order would receive", "busiest link", "expected seconds", "25 between nodes", "publish", "staging",
    ):  # fmt: skip
        assert text in out, text


def test_a_run_config_and_a_folder_are_taken_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base_settings(tmp_path)
    lines = f"model: {{path: {tmp_path}/model}}\ndata: {{train_files: {tmp_path}/train.jsonl, max_prompt_length: 16,\n"
    config = write(tmp_path / "run.yaml", lines + "  max_response_length: 8}\n")
    code, out, err = run(capsys, config, "actor.optim.lr=1e-5", "nvlink_gb_s=100")
    assert (code, err) == (0, "") and "nothing to send" in out and "MB in" in out and "100 GB/s within a node" in out
    folder = str(tmp_path / "model")
    for model in (folder, f"{folder}/config.json"):
        assert told(capsys, model, "")["parameters"] == 534_144
    code, _, err = run(capsys, config, "--model", folder)
    assert code == 2 and "stands beside the config" in err
    code, _, err = run(capsys, config, "algorithm.name=sft")
    assert code == 2 and "has no engine to send weights to" in err


@pytest.mark.parametrize(
    ("keys", "reasons"),
    [
        ("train.pt=4 rollout.tp=x dtype=int8", ("did you mean train.tp?", "above 0", "one of bfloat16")),
        ("train.tp=3 rollout.tp=3", ("possible: [1, 2, 4]", "28 query heads do not divide by tp 3")),
        ("train.pp=3", ("28 of 28 layers are left for 3",)),
        ("train.ep=2 rollout.ep=2", ("ep 2: the model has no experts", "0 experts cannot be dealt")),
        ("train.tp=4 rollout.tp=2 rollout.dp=3", ("4 GPUs take 2 engines of 2 GPUs",)),
        ("train.tp=4 gpus=6", ("leaves 6 GPUs for the trainer, not a multiple of tp * pp * cp = 4",)),
        ("train.tp=4 train.dp=1 gpus=8", ("the other keys make 4",)),
        ("train.tp=1 rollout.tp=2 train.dp=1", ("1 GPUs are not a multiple of an engine's 2",)),
    ],
)
def test_r5_what_cannot_be_is_refused_with_reason_and_cure(
    keys: str, reasons: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """R5."""
    code, _, err = run(capsys, "--model", "qwen2.5/7b", *keys.split())
    assert code == 2
    assert all(reason in err for reason in reasons), err


def test_an_unknown_model_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--model", "qwen3/235b", "--json")
    assert code == 2 and "qwen3/235b-a22b" in err and json.loads(out)["faults"][0]["key"] == "model"


# Numbers of each model, as its publisher states them (billions).
STATED = {
    "qwen2.5/0.5b": 0.494, "qwen2.5/1.5b": 1.544, "qwen2.5/3b": 3.086, "qwen2.5/7b": 7.616, "qwen2.5/14b": 14.77,
    "qwen2.5/32b": 32.76, "qwen2.5/72b": 72.71, "qwen3/0.6b": 0.596, "qwen3/1.7b": 1.72, "qwen3/4b": 4.02,
    "qwen3/8b": 8.19, "qwen3/14b": 14.77, "qwen3/32b": 32.76, "qwen3/30b-a3b": 30.53, "qwen3/235b-a22b": 235.1,
    "llama3.1/8b": 8.03, "llama3.1/70b": 70.55, "mixtral/8x7b": 46.70, DEEPSEEK_V3: 671.0,
    "deepseek-v2-lite": 15.71, "moonlight-16b-a3b": 15.96, "mistral/7b": 7.248, "mistral/nemo-12b": 12.25,
    "gemma/2b": 2.506, "gemma/7b": 8.538, "gemma3/270m": 0.268, "gemma3/1b": 1.0,
    "qwen1.5-moe-a2.7b": 14.32, "qwen2/57b-a14b": 57.41, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83,
    # 358.2 and 110.4 with the layer that predicts further tokens, and its own embedding and head.
    "glm-4.5/355b": 352.8, "glm-4.5/air": 106.85,
}  # fmt: skip


def test_named_sizes_have_the_numbers_that_their_publishers_state() -> None:
    assert set(STATED) == set(KNOWN_SHAPES)
    for name, billions in STATED.items():
        shape = named_shape(name.upper())
        count = num_parameters(shape, FAMILIES[shape.architecture])
        assert count / 1e9 == pytest.approx(billions, rel=0.002), name
    assert table_of(DEEPSEEK_V3).variants() == [[0, 1, 2], list(range(3, 61))]
    with pytest.raises(ConfigError, match=r"did you mean .*llama3\.1/70b"):
        named_shape("llama/70b")


def test_the_reckoned_sync_is_the_exact_plan_of_a_real_model() -> None:
    """Every tensor of Qwen2.5 0.5B planned one by one gives the bytes that the bundles gave."""
    found = make_report(request("qwen2.5/0.5b", parse(["train.tp=2", "train.pp=2", "rollout.tp=2", "gpus_per_node=2"])))
    shape = named_shape("qwen2.5/0.5b")
    assert isinstance(shape, ModelShape)
    family = FAMILIES[shape.architecture]
    trainers = trainer_shards(shape, family, Topology(4, tp=2, pp=2), [[range(12)], [range(12, 24)]])
    layout = EngineLayout(2, 1, found.cost.engine.ranks)
    plan = make_plan(trainers, engine_shards(shape, family, layout), node_of=lambda rank: rank // 2)
    assert plan.loads == found.cost.loads
    assert len(plan.moves) == found.cost.num_moves


def test_plan_takes_no_torch_and_every_key_is_explained() -> None:
    script = (
        "import sys; from megatron_rl.cli import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'ray', 'megatron', 'vllm', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    keys = ["train.tp=8", "train.pp=4", "rollout.tp=8"]
    command = [sys.executable, "-c", script, "plan", "--model", "llama3.1/70b", *keys]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert all((len(text) > 1 and ";" in text) or key == "gpus" for key, text in KEYS.items())
