"""The reward model and the judge, as workers called directly: tiny models of transformers on the CPU."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config.checks.table import cross_faults
from megatron_rl.config.checks.unused import idle_settings
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.model import ModelConfig
from megatron_rl.config.sections.reward import JudgeConfig, RewardModelConfig
from megatron_rl.data.render import Renderer
from megatron_rl.errors import CheckpointError, RewardError
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.rewards.base import RewardResult, RewardSample
from megatron_rl.workers.judge import JudgePlan, JudgeWorker, read_score
from megatron_rl.workers.reward_model import RewardModelPlan, RewardModelWorker, same_rendering
from tests.helpers.data import chat_folder, model_folder

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1,
         "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 64}  # fmt: skip


def classifier(folder: Path, labels: int = 1, **settings: Any) -> Path:
    """A folder with the quick start's tokenizer and a random Qwen2 classifier."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    model_folder(folder, **settings)
    sizes: dict[str, Any] = {**SIZES, "num_labels": labels}
    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification(Qwen2Config(**sizes))
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return folder


def worker(folder: Path, same: bool = True, **fields: Any) -> RewardModelWorker:
    cfg = RewardModelConfig(path=str(folder), **fields)
    return RewardModelWorker(0, 1, cfg, RewardModelPlan("cpu", -1.0, same))


def sample(prompt: str, response: str, renderer: Renderer) -> RewardSample:
    messages = ({"role": "user", "content": prompt},)
    ids = renderer.prompt_ids(list(messages))
    end = (renderer.eos_token_ids[0],)
    response_ids = (*renderer.encode(response), *end)
    return RewardSample("s", prompt, response, "", messages=messages, prompt_ids=tuple(ids), response_ids=response_ids)


def samples(folder: Path) -> list[RewardSample]:
    renderer = Renderer(str(folder))
    pairs = [("1+2=", "3"), ("10+20=", "30 or 31"), ("4+4=", "8"), ("9+9=", "eighteen it is")]
    return [sample(prompt, response, renderer) for prompt, response in pairs]


def alone(folder: Path, ids: Sequence[int]) -> float:
    """transformers' score of one row, without padding."""
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([list(ids)])).logits[0, 0])


@pytest.mark.parametrize("pad", ["<|pad|>", "<|endoftext|>"])
def test_a_batch_scores_like_each_row_alone_whatever_the_pad_token(tmp_path: Path, pad: str):
    folder = classifier(tmp_path / "rm", pad_token=pad)
    batch = samples(folder)
    expected = [alone(folder, [*s.prompt_ids, *s.response_ids]) for s in batch]
    for size in (1, 3, 8):
        results = worker(folder, batch_size=size).score(batch)
        assert [result.value for result in results] == pytest.approx(expected, abs=1e-5)
        assert not any(result.failed for result in results)
    squashed = [result.value for result in worker(folder, activation="sigmoid").score(batch)]
    assert squashed == pytest.approx(torch.sigmoid(torch.tensor(expected)).tolist(), abs=1e-5)


def test_a_model_with_another_tokenizer_reads_the_conversation_in_its_own_words(tmp_path: Path):
    policy = model_folder(tmp_path / "policy")
    folder = classifier(tmp_path / "rm")
    theirs = chat_folder(tmp_path / "chat")
    cfg = RewardModelConfig(path=str(folder), tokenizer_path=str(theirs))
    assert not same_rendering(ModelConfig(path=str(policy)), DataConfig(train_files=[]), cfg)
    (one, *_) = samples(policy)
    scorer = RewardModelWorker(0, 1, cfg, RewardModelPlan("cpu", -1.0, same_rendering=False))
    text = "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
    expected = alone(folder, Renderer(str(theirs)).encode(text))
    assert scorer.score([one])[0].value == pytest.approx(expected, abs=1e-5)


def test_rendering_is_the_same_only_where_tokenizer_and_template_are(tmp_path: Path):
    policy, folder = model_folder(tmp_path / "policy"), model_folder(tmp_path / "rm", model_max_length=32)
    model, data = ModelConfig(path=str(policy)), DataConfig(train_files=[])
    assert same_rendering(model, data, RewardModelConfig(path=str(folder)))
    assert not same_rendering(model, data, RewardModelConfig(path=str(folder), chat_template="plain"))
    other = model_folder(tmp_path / "other", chat_template="{{ messages }}")
    assert not same_rendering(model, data, RewardModelConfig(path=str(other)))


def test_what_is_too_long_fails_or_is_cut_and_is_counted_either_way(tmp_path: Path):
    """R6"""
    folder = classifier(tmp_path / "rm")
    batch = samples(folder)
    limit = len(batch[0].prompt_ids) + len(batch[0].response_ids)
    results = worker(folder, max_length=limit).score(batch)
    assert [result.failed is None for result in results] == [True, False, True, False]
    assert results[1].value == -1.0 and f"takes 1 to {limit} (reward.model.max_length" in str(results[1].failed)
    results = worker(folder, max_length=limit, overlong="truncate").score(batch)
    assert [result.extra["model_truncated"] for result in results] == [0.0, 1.0, 0.0, 1.0]
    last = [*batch[1].prompt_ids, *batch[1].response_ids][-limit:]
    assert results[1].value == pytest.approx(alone(folder, last), abs=1e-5)
    with pytest.raises(RewardError, match="max_length: 65"):
        worker(folder, max_length=65)


def test_a_folder_without_a_trained_head_is_refused(tmp_path: Path):
    """W2: transformers would draw the head at random."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = model_folder(tmp_path / "lm")
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"has no weights for score\.weight"):
        worker(folder)


def spoil(folder: Path, name: str, value: float) -> None:
    """Put a number that is not finite into one of the folder's tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[3] = value
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_reward_model_or_judge_with_weights_that_are_not_finite_is_refused(tmp_path: Path, value: float):
    name = "model.layers.1.mlp.up_proj.weight"
    scorer, judge = classifier(tmp_path / "scorer"), sevens(tmp_path / "judge")
    spoil(scorer, name, value)
    spoil(judge, name, value)
    with pytest.raises(CheckpointError, match=rf"{scorer}/model\.safetensors: {re.escape(name)}.* -- copy the folder"):
        worker(scorer)
    plan = JudgePlan("cpu", -1.0, read_model_shape(str(judge)), seed=0)
    with pytest.raises(CheckpointError, match=rf"{judge}/model\.safetensors: {re.escape(name)}.* -- copy the folder"):
        JudgeWorker(0, 1, judge_config(judge, engine="hf", max_tokens=4), plan)


def judge_config(path: Path | None, **fields: Any) -> JudgeConfig:
    return JudgeConfig(path=None if path is None else str(path), **fields)


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        ("All right. Score: 10", 1.0, None),
        ("Score: 3, no: score = 5", 0.5, None),
        ("**Score:** 7.5/10", 0.75, None),
        ("good", -1.0, "has no score"),
        ("Score: 11", -1.0, "is not from 0 to 10"),
    ],
)
def test_a_judges_score_is_read_from_its_answer(text: str, value: float, reason: str | None):
    cfg = judge_config(None)
    result = read_score(text, re.compile(cfg.score_pattern, re.DOTALL), cfg, -1.0)
    assert result.value == value and (result.failed is None if reason is None else reason in str(result.failed))


def sevens(folder: Path) -> Path:
    """A language model that writes 7 and nothing else."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model_folder(folder)
    model: Any = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[Renderer(str(folder)).encode("7")[0]] = 1.0
    model.save_pretrained(folder)
    return folder


def test_a_judge_is_asked_by_its_template_and_its_answer_is_scored(tmp_path: Path):
    folder = sevens(tmp_path / "judge")
    length = len("Rate: 9+9= eighteen it is")
    cfg = JudgeConfig(
        path=str(folder), engine="hf", template="Rate: {prompt} {response}", score_pattern=r"^(\d)", max_tokens=4,
        max_length=length + 3,
    )  # fmt: skip
    plan = JudgePlan("cpu", -1.0, read_model_shape(str(folder)), seed=0)
    results = JudgeWorker(0, 1, cfg, plan).score(samples(folder))
    assert results[:3] == [RewardResult(0.7)] * 3
    assert results[3].value == -1.0 and str(results[3].failed) == (
        f"{length} tokens for the judge, which takes {length - 1} beside its answer (reward.judge.max_length)"
    )
    silent = dataclasses.replace(cfg, score_pattern="(x)", max_length=64)
    (result, *_) = JudgeWorker(0, 1, silent, plan).score(samples(folder))
    assert "has no score (reward.judge.score_pattern): '7777'" in str(result.failed)


def run_config(folder: Path, reward: dict[str, Any]) -> RunConfig:
    sections: dict[str, Any] = {
        "model": {"path": str(folder), "init": "random"},
        "data": {"train_files": [str(folder / "config.json")]},
        "reward": reward,
    }
    return RunConfig(**sections)


def faults(folder: Path, **reward: Any) -> dict[str, str]:
    cfg = run_config(folder, reward)
    return {fault.key: fault.reason for fault in cross_faults(cfg) if fault.key.startswith("reward")}


def test_models_that_rewards_name_are_checked_before_anything_starts(tmp_path: Path):
    """R5"""
    policy, two = model_folder(tmp_path / "policy"), classifier(tmp_path / "two", labels=2)
    assert faults(policy, function="model | 0") == {"reward.model.path": "a reward names `model`"}
    assert "no reward names `model`" in faults(policy, model={"path": str(two)})["reward.model.path"]
    assert "2 labels" in faults(policy, function="model", model={"path": str(two)})["reward.model.path"]
    assert "Qwen2ForCausalLM" in faults(policy, function="model", model={"path": str(policy)})["reward.model.path"]
    wrong = {"path": str(policy), "template": "{question}", "score_pattern": "x", "highest": 0.0}
    assert set(faults(policy, function="judge", judge=wrong)) == {
        "reward.judge.template",
        "reward.judge.score_pattern",
        "reward.judge.highest",
    }
    assert not faults(policy, function="judge", judge={"path": str(policy)})


def test_settings_of_models_that_no_reward_names_are_told(tmp_path: Path):
    folder = model_folder(tmp_path / "policy")

    def idle(**reward: Any) -> set[str]:
        return {one.key for one in idle_settings(run_config(folder, reward)) if one.key.startswith("reward")}

    judge = {"path": str(folder), "engine": "hf", "kv_cache_gb": 1.0, "max_tokens": 7}
    assert idle(judge=judge) == {"reward.judge.engine", "reward.judge.kv_cache_gb", "reward.judge.max_tokens"}
    assert idle(function="judge + numeric", judge=judge) == {"reward.judge.kv_cache_gb"}
    assert idle(function="model", timeout_s=3.0, model={"path": str(folder)}) == {"reward.timeout_s"}
