"""Numbers and engine keywords of a config that would pass unseen: infinity, NaN, and keywords that change the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.load import run_schema
from megatron_rl.engines.vllm import SPEED, why_refused
from tests.helpers.config import faults as faults_of
from tests.helpers.config import load, only_fault

FLOATS = sorted(key.name for key in run_schema().keys.values() if key.number == "float" and not key.free)
WRITTEN = ["inf", "'inf'", ".inf", "-.INF", "nan", ".NaN", "Infinity", "' -infinity '", "1e999", "-1e400", "+.inf"]


@pytest.mark.parametrize("text", WRITTEN)
@pytest.mark.parametrize(
    "key", ["actor.optim.lr", "actor.clip_ratio_high", "trainer.target_loss", "reward.failed_score", "algorithm.lam"]
)
def test_no_spelling_of_infinity_or_nan_passes_a_bound(tmp_path: Path, key: str, text: str) -> None:
    fault = only_fault(tmp_path, f"{key}={text}")
    assert fault.key == key and "finite" in fault.reason and "command line" in fault.reason
    assert "write a number" in fault.cure


def _types_with(key: str) -> list[str]:
    """What chooses a loss or an estimator that has this setting."""
    choice = run_schema().choices.get(key.rpartition(".")[0])
    return [] if choice is None else [f"{choice.type_key}={choice.types_with(key.rpartition('.')[2])[0]}"]


@pytest.mark.parametrize("key", FLOATS)
def test_every_number_of_the_config_refuses_them(tmp_path: Path, key: str) -> None:
    """Whatever its bounds are, and as text too. Other keys may be at fault as well when this one is not readable."""
    for text in ("inf", ".nan", "1e999"):
        found = [fault for fault in faults_of(tmp_path, *_types_with(key), f"{key}={text}") if fault.key == key]
        assert len(found) == 1 and "finite" in found[0].reason, (key, text)
        assert "write a number" in found[0].cure


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("data.mix_weights={train: inf}", "data.mix_weights[train]"),
        ("data.mix_weights={train: .inf}", "data.mix_weights"),
        ("reward.kwargs={a: {b: [1, .nan]}}", "reward.kwargs"),
        ("data.apply_chat_template_kwargs={t: -.inf}", "data.apply_chat_template_kwargs"),
        ("rollout.n=.inf", "rollout.n"),
        ("rollout.n=1e999", "rollout.n"),
    ],
)
def test_nor_do_numbers_inside_mappings_and_lists(tmp_path: Path, setting: str, shown: str) -> None:
    faults = faults_of(tmp_path, setting)
    assert any(fault.key == shown and "finite" in fault.reason for fault in faults), [str(fault) for fault in faults]


@pytest.mark.parametrize("text", ["1e39", "'1e300'", "-4e38", "9" * 400, "1" + "0" * 60])
def test_numbers_that_no_float32_holds_are_refused(tmp_path: Path, text: str) -> None:
    (fault,) = [fault for fault in faults_of(tmp_path, f"actor.optim.lr={text}") if fault.key == "actor.optim.lr"]
    assert "too large for a number of 32 bits" in fault.reason and "below 3.4e38" in fault.cure


@pytest.mark.parametrize("key", ["actor.optim.lr", "rollout.n", "trainer.seed"])
def test_numbers_longer_than_python_reads_are_faults_and_no_traceback(tmp_path: Path, key: str) -> None:
    (fault,) = [fault for fault in faults_of(tmp_path, f"{key}={'9' * 5000}") if fault.key == key]
    assert "number" in fault.reason and "write" in fault.cure


def test_a_file_is_read_as_the_command_line_is(tmp_path: Path) -> None:
    from megatron_rl.config.load import load_config
    from megatron_rl.errors import ConfigError
    from tests.helpers.config import base_settings, write

    path = write(tmp_path / "run.yaml", "actor:\n  optim: {lr: Infinity, weight_decay: .nan}\n")
    with pytest.raises(ConfigError) as caught:
        load_config([path], base_settings(tmp_path))
    found = {fault.key: fault for fault in caught.value.faults}
    assert found.keys() == {"actor.optim.lr", "actor.optim.weight_decay"}
    assert all("finite" in fault.reason and f"{path}:2" in fault.reason for fault in found.values())


@pytest.mark.parametrize(
    ("keyword", "value", "reason", "cure"),
    [
        ("logprobs_mode", "raw_logprobs", "log-probabilities would no longer mean", "remove it"),
        ("max_logprobs", "20", "log-probabilities", "remove it"),
        ("quantization", "fp8", "changes what the engine computes", "remove it"),
        ("kv_cache_dtype", "fp8", "changes what the engine computes", "precision of rollout.dtype"),
        ("hf_overrides", "{sliding_window: 4}", "changes what the engine computes", "remove it"),
        ("enable_lora", "true", "changes what the engine computes", "remove it"),
        ("lora_modules", "[a]", "changes what the engine computes", "remove it"),
        ("speculative_config", "{model: m}", "changes what the engine computes", "remove it"),
        ("logits_processors", "[a.b]", "changes what the engine computes", "remove it"),
        ("load_format", "dummy", "changes what the engine computes", "remove it"),
        ("rope_scaling", "{type: yarn}", "changes what the engine computes", "remove it"),
        ("disable_sliding_window", "true", "changes what the engine computes", "remove it"),
        ("trust_remote_code", "true", "changes what the engine computes", "remove it"),
        ("model_impl", "transformers", "changes what the engine computes", "remove it"),
        ("dtype", "float16", "rollout.dtype sets this", "set rollout.dtype"),
        ("seed", "1", "trainer.seed sets this", "set trainer.seed"),
        ("model", "other", "model.path sets this", "set model.path"),
        ("tokenizer", "other", "model.tokenizer_path", "set model.tokenizer_path"),
        ("max_model_len", "99", "rollout.max_model_len", "set rollout.max_model_len"),
        ("max_num_seqs", "9", "rollout.max_num_seqs", "set rollout.max_num_seqs"),
        ("gpu_memory_utilization", "0.9", "rollout.gpu_memory_utilization", "set rollout.gpu_memory_utilization"),
        ("kv_cache_memory_bytes", "9", "rollout.kv_cache_gb", "set rollout.kv_cache_gb"),
        ("enforce_eager", "true", "rollout.enforce_eager", "set rollout.enforce_eager"),
        ("enable_sleep_mode", "false", "rollout.free_cache_engine", "set rollout.free_cache_engine"),
        ("override_generation_config", "{top_k: 1}", "rollout.temperature", "set rollout.temperature"),
        ("tensor_parallel_size", "2", "rollout.tp", "rollout.tp"),
        ("pipeline_parallel_size", "2", "engine's layout", "rollout.tp decides"),
        ("data_parallel_size_local", "2", "engine's layout", "rollout.tp decides"),
        ("enable_eplb", "true", "engine's layout", "rollout.tp decides"),
        ("worker_cls", "a.b", "engine's layout", "rollout.tp decides"),
        ("a_keyword_to_come", "1", "not among the keywords", "block_size"),
    ],
)
def test_engine_keywords_cannot_change_what_is_computed_or_what_is_ours(
    tmp_path: Path, keyword: str, value: str, reason: str, cure: str
) -> None:
    fault = only_fault(tmp_path, f"rollout.engine_kwargs.{keyword}={value}")
    assert fault.key == f"rollout.engine_kwargs.{keyword}"
    assert reason in fault.reason and cure in fault.cure


def test_engine_keywords_of_speed_pass(tmp_path: Path) -> None:
    cfg = load(tmp_path, "rollout.engine_kwargs={block_size: 32, enable_prefix_caching: false}")
    assert cfg.rollout.engine_kwargs == {"block_size": 32, "enable_prefix_caching": False}
    assert all(why_refused(keyword) is None for keyword in SPEED)


def test_an_engine_without_keywords_refuses_them(tmp_path: Path) -> None:
    fault = only_fault(tmp_path, "rollout.name=hf", "rollout.engine_kwargs.block_size=32")
    assert fault.key == "rollout.engine_kwargs" and "engine hf takes no keywords" in fault.reason
