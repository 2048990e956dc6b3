"""What ships runs: every command of every example's README, and with them every file in configs/, in a short form.

The commands are the README's own. What is added to them is below: fewer steps and rows, and a CPU in place of a GPU.
GSM8K's rows and the chat model are small ones of the same layout, made here.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.preferences.make_pairs import pairs_of
from tests.helpers.config import make_model
from tests.helpers.data import chat_folder
from tests.helpers.readme import commands_of, filled
from tests.helpers.stack import needs_cpu_engine

REPO = Path(__file__).resolve().parents[2]
# In the order in which their commands build on each other.
EXAMPLES = ("quickstart", "preferences", "teach", "reasoning_gym", "gsm8k", "customer_service")
# The README's words in capital letters.
PLACES = {
    "MODEL": "models/chat",
    "DIR": "runs/countdown",
    "VERLS": "runs/gsm8k/data",
    "RAW_TRAIN.parquet": "raw/train.parquet",
    "RAW_TEST.parquet": "raw/test.parquet",
}
# No answer of a model that has seen ten batches is right: what its samples differ in makes the pairs.
PAIRS = [
    "data.val_files=runs/quickstart/data/val.parquet", "reward.function=raw/reward.py:last_token", "rollout.val.n=4"
]  # fmt: skip
ROWS = ["--num-train", "600", "--num-val", "8"]
SHORT = ["trainer.total_training_steps=1", "actor.optim.lr_warmup_steps=0"]
NO_WARMUP = ["critic.optim.lr_warmup_steps=0"]
# Of a run of a chat model, which a GPU makes: its device, precision, batches and responses.
SMALL = [
    "cluster.device=cpu",
    "model.dtype=float32",
    "data.max_prompt_length=512",  # one token a character
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=2",
    "data.max_response_length=8",
    "rollout.max_num_seqs=32",
]
SHORTER: dict[str, list[str]] = {
    "sft-add2-1n1g": ["trainer.total_training_steps=10"],
    # No group of a model that has seen ten batches differs: all four batches are drawn.
    "grpo-add2-1n1g-dapo": ["data.train_batch_size=8"],
    "sft-gym-1n1g": ["trainer.total_training_steps=3"],
    # The prompts of a batch are more than the engine computes at once.
    "grpo-gym-1n1g": ["rollout.max_num_batched_tokens=256"],
    "ppo-gym-1n1g": ["data.train_batch_size=64", "actor.ppo_mini_batch_size=32"],
    "ppo-add2-1n1g": ["data.train_batch_size=64", "actor.ppo_mini_batch_size=32"],
}
# An engine of vLLM starts in 10 s of CPU time: some commands sample from the engine of transformers in its place.
WITH_VLLM = ("grpo-add2-1n1g", "ppo-add2-1n1g", "grpo-gym-1n1g", "grpo-gsm8k-1n1g", "grpo-service-1n1g")
# One process for all: starting one takes longer than most of the commands.
SCRIPT = """
import json, runpy, sys, traceback
from megatron_rl import cli
codes = []
for words in json.load(sys.stdin):
    print("$", *words, flush=True)
    try:
        if words[0] == "python":
            sys.argv = words[1:]
            runpy.run_path(words[1], run_name="__main__")
            codes.append(0)
        else:
            codes.append(cli.main(words[1:]))
    except Exception:
        traceback.print_exc(file=sys.stdout)
        codes.append(1)
print("codes", json.dumps(codes), flush=True)
"""


def shortened(words: list[str]) -> list[str]:
    """A command of a README, short."""
    if words[0] == "python":
        fewer = {"reasoning_gym": ROWS, "customer_service": ROWS, "teach": ["--steps", "2"]}
        return words + fewer.get(Path(words[1]).parent.name, [])
    stem, chat = Path(words[2]).stem, f"model.path={PLACES['MODEL']}" in words
    more = SMALL if chat else SHORTER.get(stem, [])
    with_vllm = words[1] == "train" and stem in WITH_VLLM and not any("=model" in word for word in words)
    if not with_vllm and stem.startswith(("grpo-", "ppo-")):
        more = [*(one for one in more if not one.startswith("rollout.max_num")), "rollout.name=hf"]
    if any(word.startswith("runs/preferences/answers") for word in words):
        return [*words, "cluster.backend=inline", "rollout.name=hf", *PAIRS]
    if words[1] == "eval":
        return [*words, "cluster.backend=inline", "rollout.name=hf"]
    if words[1] != "train":
        return [*words, *more]
    return [*words, "cluster.backend=inline", *SHORT, *(NO_WARMUP if "ppo-" in words[2] else []), *more]


def commands(example: str) -> list[list[str]]:
    """The README's commands, as they stand there; installing packages is not ours to try."""
    text = (REPO / "examples" / example / "README.md").read_text(encoding="utf-8")
    return [words for words in commands_of(text) if words[0] in ("python", "megatron-rl")]


def write_raw_gsm8k(folder: Path) -> None:
    """Two files in the layout of GSM8K as it is published, and a reward."""
    folder.mkdir()
    (folder / "reward.py").write_text("def last_token(sample):\n    return float(sample.solution_str[-1:] > '7')\n")
    for name, count in (("train", 40), ("test", 4)):
        rows = [
            {
                "question": f"Ann has {i} red and 1,0{i:02d} green apples. How many are that?",
                "answer": f"She has {i}+10{i:02d}=<<{i}+10{i:02d}={1000 + 2 * i}>>{1000 + 2 * i}.\n#### 1,{2 * i:03d}",
            }
            for i in range(10, 10 + count)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def save_chat_model(folder: Path) -> None:
    """A tiny model that writes ChatML, with weights drawn at random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    chat_folder(folder)
    kept = {name: (folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    make_model(folder, max_position_embeddings=1024)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().save_pretrained(folder)
    for name, content in kept.items():
        (folder / name).write_bytes(content)


def run_all(folder: Path, todo: list[list[str]], timeout_s: float) -> None:
    """Run commands in a folder like a checkout, which gets links to configs and examples."""
    for name in ("configs", "examples"):
        (folder / name).symlink_to(REPO / name)
    gym = [] if importlib.util.find_spec("reasoning_gym") else [str(REPO / "tests" / "e2e" / "stand_in")]
    path = os.pathsep.join([str(REPO), *gym, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(todo),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    print(done.stdout)
    _, _, codes = done.stdout.rpartition("codes ")
    failed = [" ".join(words) for words, code in zip(todo, json.loads(codes), strict=True) if code != 0]
    assert not failed, "\n".join(failed)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a checkout in which all commands of all READMEs ran."""
    folder = tmp_path_factory.mktemp("examples")
    write_raw_gsm8k(folder / "raw")
    save_chat_model(folder / "models" / "chat")
    run_all(folder, [shortened(filled(words, PLACES)) for example in EXAMPLES for words in commands(example)], 600)
    return folder


def test_every_config_is_in_a_readme_and_every_readme_is_tried() -> None:
    """Those of models too large for one machine are in docs/cluster.md; tests/house/test_configs.py checks them.
    Pipelines are in docs/pipelines.md; test_pipelines.py runs them.
    """
    named = {word for example in EXAMPLES for words in commands(example) for word in words if word.endswith(".yaml")}
    page = (REPO / "docs" / "cluster.md").read_text(encoding="utf-8")
    of_clusters = set(re.findall(r"`(configs/[^`]+\.yaml)`", page))
    assert not named & of_clusters
    files = {f"configs/{path.name}" for path in (REPO / "configs").glob("*.yaml")}
    assert named | of_clusters == {file for file in files if not file.startswith("configs/pipeline-")}
    assert set(EXAMPLES) == {path.parent.name for path in (REPO / "examples").glob("*/README.md")}


def test_commands_are_read_as_a_shell_reads_them() -> None:
    text = (
        "Do\n\n    python make.py DIR --args '{\"a\": 1}'   # twice\n    megatron-rl train A.yaml \\\n        b=DIR/c\n"
    )
    commands = [filled(words, {"DIR": "x"}) for words in commands_of(text)]
    assert commands == [["python", "make.py", "x", "--args", '{"a": 1}'], ["megatron-rl", "train", "A.yaml", "b=x/c"]]
    with pytest.raises(ValueError, match="start with torchrun, which is none of bash"):
        commands_of("    torchrun train.py")


def test_edits_are_other_numbers_that_fit() -> None:
    samples = [
        {"prompt": "1+2=", "response": text, "reward": float(text == "3"), "finish_reason": "stop", "failed": None}
        for text in ("3", "4", "3", "5")
    ]
    pairs = pairs_of([{**one, "data_source": "add2"} for one in samples], per_prompt=1, edits=200)
    assert [pair["data_source"] for pair in pairs] == ["add2"] + ["edits"] * 200
    assert {pair["chosen"] for pair in pairs} == {"3"} and pairs[0]["rejected"] in ("4", "5")
    edits = {pair["rejected"] for pair in pairs[1:]}
    assert "3" not in edits and all(re.fullmatch("[0-9]{1,7}", one) for one in edits)
    assert {len(one) for one in edits} == set(range(1, 8))


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


RUNS = {
    "preferences": ("dpo", "rm"),
    "quickstart": ("sft", "grpo", "dapo", "ppo"),
    "reasoning_gym": ("sft", "grpo", "ppo", "countdown"),
    "gsm8k": ("grpo", "ppo"),
    "customer_service": ("grpo",),
}


@needs_cpu_engine
@pytest.mark.parametrize(("example", "name"), [(example, name) for example, names in RUNS.items() for name in names])
def test_what_a_readme_runs_trains_validates_and_saves(checkout: Path, example: str, name: str) -> None:
    """N8, R4: engine and trainer agree, no reward fails, every validation row is scored."""
    run = checkout / "runs" / example / name
    rows = rows_of(run)
    assert (run / "final" / "model.safetensors").is_file()
    steps = [row for row in rows if row["step"] > 0]
    if name == "sft":
        assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
        assert steps[-1]["sft/loss"] < steps[0]["sft/loss"]
        return
    assert [row["step"] for row in steps] == [1]
    (row,) = steps
    if example == "preferences":
        assert row["preference/loss"] > 0.0 and all("val/num_samples" in one for one in rows)
        return
    # All groups of the DAPO run are flat: it keeps nothing that it would compare.
    assert row.get("mismatch/abs_max", 0.0 if name == "dapo" else 1.0) < 1e-3
    assert row["reward/failed"] == 0
    assert all("val/num_samples" in one for one in rows)
    assert (row.get("critic/updates", 0) > 0) == (name == "ppo")
    assert ("reward/facts" in row) == (example == "customer_service")


@needs_cpu_engine
@pytest.mark.slow
def test_the_reward_model_ranks_held_out_pairs_right_and_grpo_learns_from_it(tmp_path: Path) -> None:
    """The README's commands as they stand: about twenty minutes on two cores."""
    # A test that goes on for a quarter of an hour is ended; this one may.
    faulthandler.cancel_dump_traceback_later()
    words_of = {"quickstart": ("make_data", "sft-"), "preferences": ("answers16", "rm_data", "rm-", "grpo-rm")}
    todo = [
        [*words, *(["cluster.backend=inline"] if words[0] == "megatron-rl" else [])]
        for example, names in words_of.items()
        for words in commands(example)
        if any(name in " ".join(words) for name in names)
    ]
    before = ["runs/quickstart/sft/final", "--out", "runs/preferences/eval-sft", "cluster.backend=inline"]
    todo.append(["megatron-rl", "eval", "configs/grpo-add2-1n1g.yaml", f"model.path={before[0]}", *before[1:]])
    run_all(tmp_path, todo, 3600)
    runs = tmp_path / "runs" / "preferences"
    assert [row["val/accuracy"] for row in rows_of(runs / "rm") if "val/accuracy" in row][-1] >= 0.9
    sft, grpo = (
        json.loads((runs / name / "metrics.json").read_text())["val/accuracy"] for name in ("eval-sft", "eval-grpo-rm")
    )
    assert grpo > sft + 0.05
