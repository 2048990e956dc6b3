"""The command line: what it takes, what it prints, how it refuses, and that `check` stays light."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import VERBS, main, split_arguments
from megatron_rl.errors import DataError
from megatron_rl.runs import verbs
from tests.helpers.config import base_settings, write
from tests.unit.config.verl.test_translate import tutorial

ROOT = Path(__file__).resolve().parents[3]

YAML = """
model: {{path: {folder}/model}}
data:
  train_files: {folder}/train.jsonl
  max_prompt_length: 16
  max_response_length: 8
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    base_settings(tmp_path)
    return write(tmp_path / "run.yaml", YAML.format(folder=tmp_path))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_check_prints_run_batch_arithmetic_and_layout(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", config, "actor.optim.lr=5e-4")
    assert (code, err) == (0, "")
    for text in (
        "run (keys that differ",
        "lr: 0.0005",
        "batch arithmetic",
        "sequences of a step",
        "layout",
        "534,144",
    ):
        assert text in out
    assert "grad_clip" not in out
    assert "grad_clip: 1.0" in run(capsys, "check", config, "--all")[1]


def test_options_and_files_and_overrides_come_in_any_order(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = write(tmp_path / "more.yaml", "rollout: {n: 4}\n")
    for arguments in (
        ("--json", config, "rollout.temperature=0.5", more),
        (config, more, "--json", "rollout.temperature=0.5"),
        ("--config", config, "--config", more, "rollout.temperature=0.5", "--json"),
    ):
        code, out, _ = run(capsys, "check", *arguments)
        rollout = json.loads(out)["config"]["rollout"]
        assert (code, rollout["n"], rollout["temperature"]) == (0, 4, 0.5)


def test_check_json_is_for_programs(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", config, "--json", "actor.kl_loss_coef=0.5")
    told = json.loads(out)
    assert code == 0 and told["ok"] is True
    assert {row["name"]: row["value"] for row in told["batch"]}["sequences of a step"] == 512
    assert {row["name"]: row["value"] for row in told["layout"]}["ranks"] == 1
    assert told["idle"][0]["key"] == "actor.kl_loss_coef"
    keys = {key["key"]: key for key in told["keys"]}
    assert keys["rollout.n"] == {"key": "rollout.n", "value": 8, "default": 8, "doc": "Samples per prompt."}
    assert told["verl_mapped"] == []


def test_check_shows_the_flow_of_a_step(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", config, "--flow")
    flow = out.partition("flow of a step")[2].splitlines()
    assert (code, err) == (0, "") and [line.split()[1] for line in flow[3:6]] == ["generate", "reward", "assemble"]
    code, out, _ = run(capsys, "check", config, "--flow", "--json")
    assert code == 0 and json.loads(out)["flow"] == [line.strip() for line in flow[1:]]


def test_faults_go_to_stderr_without_a_traceback_and_the_exit_code_is_2(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "check", config, "trainer.lr=1", "rollout.n=1")
    assert (code, out) == (2, "")
    assert err.startswith("megatron-rl check: 2 faults in the configuration") and "Traceback" not in err
    assert "did you mean actor.optim.lr" in err and "rollout.n: 1" in err


def test_faults_as_json(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", config, "--json", "rollout.n=1")
    told = json.loads(out)
    assert code == 2 and told["ok"] is False
    assert told["faults"][0]["key"] == "rollout.n" and set(told["faults"][0]) == {
        "key",
        "value",
        "reason",
        "cure",
    }


def test_each_mapped_key_of_verl_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", tutorial(tmp_path))
    assert code == 0
    assert "actor_rollout_ref.actor.kl_loss_type -> actor.kl_loss_type = k3" in out
    assert "trainer.critic_warmup -> trainer.critic_warmup = 0" in out


@pytest.mark.parametrize(
    ("argument", "is_override"),
    [
        ("a.b=c", True),
        ("reward.function=dir/x.py:f", True),
        ("runs/a=b.yaml", False),
        ("a.yaml", False),
        ("+a.b=1", True),
    ],
)
def test_an_override_has_its_equals_sign_before_any_path(argument: str, is_override: bool) -> None:
    assert split_arguments([argument]) == (([], [argument]) if is_override else ([argument], []))


def test_train_eval_and_export_hand_the_config_to_runs(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(verbs, "train", lambda cfg: calls.append(("run", cfg.rollout.n)), raising=False)
    monkeypatch.setattr(
        verbs, "evaluate", lambda cfg, out, checkpoint: calls.append(("evaluate", cfg.rollout.n)), raising=False
    )
    monkeypatch.setattr(
        verbs, "export", lambda cfg, out, checkpoint, merge: calls.append(("export", out)), raising=False
    )
    assert run(capsys, "train", config, "rollout.n=3")[0] == 0
    code, _, err = run(capsys, "eval", config)
    assert code == 2 and "data.val_files: []" in err
    assert run(capsys, "eval", config, "rollout.n=4", f"data.val_files={tmp_path / 'train.jsonl'}")[0] == 0
    assert run(capsys, "export", config, "--out", str(tmp_path / "hf"))[0] == 0
    assert calls == [("run", 3), ("evaluate", 4), ("export", str(tmp_path / "hf"))]


@pytest.mark.parametrize("verb", ["eval", "export"])
def test_eval_and_export_need_no_training_data(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base_settings(tmp_path)
    calls: list[str] = []
    monkeypatch.setattr(verbs, "evaluate", lambda cfg, out, checkpoint: calls.append("eval"), raising=False)
    monkeypatch.setattr(verbs, "export", lambda cfg, out, checkpoint, merge: calls.append("export"), raising=False)
    settings = [f"model.path={tmp_path / 'model'}", *(["--out", "hf"] if verb == "export" else [])]
    if verb == "eval":
        lengths = ["data.max_prompt_length=16", "data.max_response_length=8"]
        settings += [f"data.val_files={tmp_path / 'train.jsonl'}", *lengths]
    assert run(capsys, verb, *settings) == (0, "", "") and calls == [verb]
    moved = "data.train_files=moved/away.parquet"
    assert run(capsys, verb, *settings, moved)[0] == 0
    code, _, err = run(capsys, "train", *(text for text in settings if "=" in text))
    assert code == 2 and "data.train_files: [] -- is empty -- give " in err


def test_export_needs_neither_validation_data_nor_a_reward(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verbs, "export", lambda cfg, out, checkpoint, merge: None, raising=False)
    gone = ["data.val_files=gone.parquet", "reward.function=gone.py:score", "trainer.test_freq=5"]
    assert run(capsys, "export", config, *gone, "--out", str(tmp_path / "hf"))[0] == 0
    code, _, err = run(capsys, "train", config, *gone)
    assert code == 2 and "gone.parquet" in err and "gone.py" in err


def test_a_refusal_of_the_run_is_a_message_and_a_bug_is_a_traceback(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(cfg: object) -> None:
        raise DataError("train.jsonl row 3: no prompt -- add one")

    def crash(cfg: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(verbs, "train", refuse, raising=False)
    code, _, err = run(capsys, "train", config)
    assert code == 2 and err == "megatron-rl train: train.jsonl row 3: no prompt -- add one\n"
    monkeypatch.setattr(verbs, "train", crash, raising=False)
    with pytest.raises(ZeroDivisionError):
        main(["train", config])


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(f"  {verb}" in out for verb in VERBS)
    assert run(capsys)[0] == 2


def test_a_verb_that_does_not_exist_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "chekc")
    assert code == 2 and "did you mean check?" in err


def test_check_without_a_config_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "check")
    assert code == 2 and "megatron-rl check CONFIG.yaml [key=value ...]" in err


def test_export_needs_a_folder(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["export", config])
    assert caught.value.code == 2 and "--out" in capsys.readouterr().err


def test_check_takes_no_torch_and_little_time(config: str) -> None:
    """R5: on a quiet machine it takes under a second; the limit, of CPU time, allows for a busy one."""
    script = (
        "import sys; from megatron_rl.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'ray', 'megatron', 'vllm', 'transformers', 'numpy'} & set(sys.modules); "
        "sys.exit(f'imported: {heavy}' if heavy else code)"
    )
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", script, "check", config], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
    assert done.returncode == 0, done.stderr
    assert "batch arithmetic" in done.stdout
    assert seconds < 3, seconds


def test_python_dash_m_is_the_same_command(config: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl", "check", config, "rollout.n=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stderr.startswith("megatron-rl check: 1 fault") and not done.stdout
