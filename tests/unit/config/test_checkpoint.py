"""Keys of checkpoints and of resuming, and verl's for the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.durations import seconds_of
from megatron_rl.config.load import load_config
from megatron_rl.config.metrics import better_mode
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import ConfigError
from tests.helpers.config import load, make_model, only_fault, write


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("3:50:00", 13800),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-00:00:01", 86401),
        ("", None),
        ("1:2:3:4", None),
        ("-5", None),
        ("2h", None),
    ],
)
def test_a_length_of_time_is_read_as_slurm_reads_it(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["two hours", "0:00:00", "'0'"])
def test_a_limit_that_is_no_length_of_time_is_refused(tmp_path: Path, text: str) -> None:
    fault = only_fault(tmp_path, f"trainer.max_time={text}")
    assert fault.key == "trainer.max_time" and "3:50:00" in fault.cure


def test_a_best_metric_of_a_validation_that_never_is_is_refused(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "checkpoint.keep_best=val/accuracy")
    assert fault.key == "checkpoint.keep_best" and "does not validate" in fault.reason


def test_defaults(tmp_path: Path) -> None:
    cfg = load(tmp_path)
    assert (cfg.trainer.resume_mode, cfg.checkpoint.freq, cfg.checkpoint.keep_last) == ("auto", None, 2)


def test_restarts_need_workers_in_processes_of_their_own(tmp_path: Path) -> None:
    assert load(tmp_path, "trainer.max_restarts=2").trainer.max_restarts == 2
    fault = only_fault(tmp_path, "trainer.max_restarts=2", "cluster.backend=inline")
    assert fault.key == "trainer.max_restarts" and "cluster.backend=inline" in fault.reason


VERL = [
    "actor_rollout_ref.rollout.n=8",
    "algorithm.adv_estimator=grpo",
    "data.max_prompt_length=16",
    "data.max_response_length=8",
]


def verl(folder: Path, *more: str) -> RunConfig:
    make_model(folder / "model")
    rows = write(folder / "rows.jsonl", "")
    paths = [f"actor_rollout_ref.model.path={folder / 'model'}", f"data.train_files={rows}", f"data.val_files={rows}"]
    return load_config([], [*VERL, *paths, *more])


@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_verls_modes_are_ours(tmp_path: Path, mode: str) -> None:
    assert verl(tmp_path, f"trainer.resume_mode={mode}").trainer.resume_mode == mode
    assert verl(tmp_path).trainer.resume_mode == "auto"


def test_verls_path_to_go_on_from_is_the_mode_here(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a" / "checkpoints" / "step_000010"
    folder.mkdir(parents=True)
    for name in ("state.json", "manifest.json"):
        (folder / name).write_text("{}")
    given = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"]
    assert verl(tmp_path, *given).trainer.resume_mode == str(folder)
    with pytest.raises(ConfigError, match="is neither a checkpoint of megatron_rl nor a run"):
        verl(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}")
    assert verl(tmp_path, f"trainer.resume_from_path={folder}").trainer.resume_mode == "auto", "verl reads it so"


def test_verls_numbers_of_saves_are_one(tmp_path: Path) -> None:
    both = ["trainer.max_actor_ckpt_to_keep=3", "trainer.max_critic_ckpt_to_keep=3"]
    assert verl(tmp_path, *both).checkpoint.keep_last == 3


SFT = ["algorithm.name=sft"]


@pytest.mark.parametrize(
    ("metric", "mode", "said"),
    [
        ("val/los", None, "is no metric of this run's validation"),
        ("val/loss/math", None, "is no metric of this run's validation"),
        ("val/num_samples", None, "more or less of val/num_samples is better"),
        ("loss", "min", "is no metric of validation"),
        ("val/loss", None, ""),
        ("val/accuracy", "min", ""),
        ("val/num_samples", "max", ""),
    ],
)
def test_what_ends_a_run_is_a_metric_of_its_validation(
    tmp_path: Path, metric: str, mode: str | None, said: str
) -> None:
    given = [*SFT, f"data.val_files={write(tmp_path / 'val.jsonl', '')}", f"trainer.early_stop.metric={metric}"]
    given += [] if mode is None else [f"trainer.early_stop.mode={mode}"]
    if not said:
        assert load(tmp_path, *given).trainer.early_stop.metric == metric
        return
    fault = only_fault(tmp_path, *given)
    assert said in fault.reason and ("val/loss, val/token_accuracy" in fault.cure or "max or min" in fault.cure)


def test_the_best_mode_follows_from_the_name() -> None:
    modes = {
        name: better_mode(name, None) for name in ("val/loss", "val/pass@4/math", "reward/mean", "val/length", "loss")
    }
    assert list(modes.values()) == ["min", "max", "max", None, None]


def test_a_best_checkpoint_without_checkpoints_is_refused(tmp_path: Path) -> None:
    val = f"data.val_files={write(tmp_path / 'val.jsonl', '')}"
    fault = only_fault(tmp_path, val, "checkpoint.keep_best=val/accuracy", "checkpoint.freq=0")
    assert "no checkpoint is written" in fault.reason
    assert only_fault(tmp_path, "checkpoint.best_mode=max").key == "checkpoint.best_mode"


def test_sft_with_prompts_has_an_engine_and_their_metrics(tmp_path: Path) -> None:
    prompts = f"data.val_prompt_files={write(tmp_path / 'val.jsonl', '')}"
    more = ["reward.function=exact_match", "rollout.val.n=4", "rollout.val.temperature=1.0"]
    cfg = load(tmp_path, *SFT, prompts, *more, "checkpoint.keep_best=val/pass@4/math", "trainer.test_freq=5")
    assert cfg.has_engine and cfg.has_rewards and not cfg.needs.rollouts
    assert not load(tmp_path, *SFT).has_engine
    assert only_fault(tmp_path, *SFT, prompts, "rollout.val.n=2", more[0]).key == "rollout.val.n"
    assert only_fault(tmp_path, *SFT, prompts, *more, "reward.function=exact_mach").key == "reward.function"
    assert only_fault(tmp_path, *SFT, prompts, *more, "checkpoint.keep_best=val/loss").key == "checkpoint.keep_best"
    fault = only_fault(tmp_path, prompts)
    assert fault.key == "data.val_prompt_files" and fault.cure == "put them into data.val_files"
