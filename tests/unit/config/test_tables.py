"""The tables of `check`: what one step is made of, and where its ranks are."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.checks.unused import idle_settings
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections.actor import ActorConfig
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.model import ModelConfig
from megatron_rl.config.tables import (
    SHORTEST_SEQUENCE,
    TableRow,
    batch_table,
    format_table,
    layout_table,
    micro_batches,
)
from megatron_rl.models.config_json import read_model_shape
from tests.helpers.config import load, make_model

TWO_RANKS = ("cluster.n_gpus_per_node=2",)


def shown(rows: list[TableRow]) -> dict[str, str]:
    return {row.name: row.shown for row in rows}


def test_a_grpo_step_from_prompts_to_micro_batches(tmp_path: Path) -> None:
    """R5: 64 prompts * 8 in 4 mini-batches over 2 ranks; 240 tokens hold 10 sequences of 24."""
    cfg = load(
        tmp_path,
        *TWO_RANKS,
        "actor.ppo_mini_batch_size=16",
        "actor.ppo_epochs=2",
        "actor.max_tokens_per_gpu=240",
        "actor.ppo_micro_batch_size_per_gpu=32",
        "trainer.total_training_steps=100",
    )
    assert shown(batch_table(cfg)) == {
        "prompts of a step": "64",
        "samples of a prompt": "8",
        "sequences of a step": "512",
        "tokens of a sequence": "2 to 24",
        "prompts of a mini-batch": "16",
        "sequences of a mini-batch": "128",
        "mini-batches of a step": "4",
        "optimizer updates of a step": "8",
        "sequences of a rank per update": "64",
        "micro-batches of a rank per update": "2 to 7",
        "optimizer updates of the run": "800",
    }


def test_an_sft_step_has_rows_and_no_samples(tmp_path: Path) -> None:
    cfg = load(tmp_path, "algorithm.name=sft", "actor.ppo_epochs=3", "actor.ppo_mini_batch_size=7")
    assert shown(batch_table(cfg)) == {
        "rows of a step": "64",
        "tokens of a sequence": "2 to 24",
        "optimizer updates of a step": "1",
        "sequences of a rank per update": "64",
        "micro-batches of a rank per update": "1",
    }


def test_layout_of_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    cfg = load(tmp_path, "cluster.n_gpus_per_node=4", "actor.tp=2", "actor.use_kl_loss=true")
    table = shown(layout_table(cfg, read_model_shape(cfg.model.path)))
    assert table["ranks"] == "4" and table["tensor parallel (tp)"] == "2" and table["data parallel (dp)"] == "2"
    assert table["engines"] == "4" and table["reference model"] == "1"
    assert table["parameters"] == "534,144" and table["KV heads of a rank"] == "1"


def test_layout_of_experts(tmp_path: Path) -> None:
    fields = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2}
    folder = make_model(tmp_path / "experts", **fields, num_local_experts=4)
    cfg = load(tmp_path, f"model.path={folder}", "cluster.n_gpus_per_node=8", "actor.ep=2", "actor.etp=2")
    table = shown(layout_table(cfg, read_model_shape(cfg.model.path)))
    assert table["expert parallel (ep)"] == "2" and table["experts of a rank in a layer"] == "2"
    assert table["copies of each expert"] == "2" and table["columns of an expert on a rank"] == "160"


def test_a_table_is_aligned_text() -> None:
    text = format_table([TableRow("a", 1, "first"), TableRow("long name", 12, "second", least=3)])
    assert text == "  a                1  first\n  long name  3 to 12  second"


@given(lengths=st.lists(st.integers(SHORTEST_SEQUENCE, 24), min_size=1, max_size=60), budget=st.integers(24, 200))
def test_bounds_hold_for_first_fit_packing(lengths: list[int], budget: int) -> None:
    """The printed bounds enclose what a packer makes of any lengths within the limits."""
    data = DataConfig(train_files=[], max_prompt_length=16, max_response_length=8)
    cfg = RunConfig(model=ModelConfig(path=""), data=data, actor=ActorConfig(max_tokens_per_gpu=budget))
    bins: list[int] = []
    for length in lengths:
        place = next((number for number, used in enumerate(bins) if used + length <= budget), None)
        if place is None:
            bins.append(length)
        else:
            bins[place] += length
    least, most = (micro_batches(cfg, len(lengths), length) for length in (SHORTEST_SEQUENCE, 24))
    assert least <= len(bins) <= most


def test_changed_settings_without_effect_are_named(tmp_path: Path) -> None:
    cfg = load(
        tmp_path,
        "actor.kl_loss_coef=0.01",
        "algorithm.kl_ctrl.kl_coef=0.01",
        "actor.optim.min_lr_ratio=0.1",
        "actor.clip_ratio=0.3",
    )
    assert [one.key for one in idle_settings(cfg)] == [
        "actor.kl_loss_coef",
        "algorithm.kl_ctrl.kl_coef",
        "actor.optim.min_lr_ratio",
    ]
    assert idle_settings(load(tmp_path)) == []
    overlap = ("actor.overlap_grad_reduce=true", "actor.overlap_bucket_size=1000000")
    assert [one.key for one in idle_settings(load(tmp_path, *overlap))] == ["actor.overlap_grad_reduce"]
    two = ("actor.cp=2", "cluster.n_gpus_per_node=2", "cluster.backend=ray")
    assert idle_settings(load(tmp_path, *overlap, *two)) == []
    sft = load(tmp_path, "algorithm.name=sft", "actor.ppo_epochs=2", "actor.use_kl_loss=true")
    assert [one.key for one in idle_settings(sft)] == ["actor.ppo_epochs", "actor.use_kl_loss"]
