"""Checkpoints of a run become Hugging Face folders: the float32 masters, and what no update changes from the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_rl.algos.reduce import loss_weights
from megatron_rl.algos.token_losses import nll_loss
from megatron_rl.config.load import load_config
from megatron_rl.runs.resume import config_facts
from tests.helpers.checkpoints import read_all
from tests.helpers.data import add_tokenizer
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import random_batch, save_tiny
from tests.helpers.training import build, make_actor, my_micro_batches, train_step
from tests.unit.convert.test_round_trip import differing, written
from tools.convert import mcore_to_hf


def _trained(rank: int, world: int, source: str, layout: dict[str, Any], out: str) -> None:
    """One step in bfloat16, and its checkpoint as a run's workers write it."""
    from megatron_rl.workers.checkpoint import StateFiles
    from megatron_rl.workers.model import TrainedModel

    actor = make_actor(**layout)
    model = TrainedModel(build(source, actor, world, "bfloat16"))
    batch = random_batch(0, (9, 12, 7, 8), 128)
    weights = loss_weights("token-mean", batch.loss_mask, batch.segments, batch.num_sequences, norm_length=64)
    micros = my_micro_batches(batch.with_(loss_weights=weights), actor, rank, world)
    train_step(model.trainable, micros, nll_loss, 1.0)
    files = StateFiles(rank, world, actor)
    files.begin(Path(out), {"actor": model.saved}, background=False)
    files.finish()


@pytest.mark.parametrize(
    ("family", "world", "layout"),
    [
        ("deepseek_v3", 2, {"ep": 2}),
        pytest.param("qwen2", 2, {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 4, {"tp": 2, "sequence_parallel": True, "pp": 2}, marks=pytest.mark.slow),
    ],
)
def test_w1_a_runs_checkpoint_becomes_its_masters(
    tmp_path: Path, family: str, world: int, layout: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"intermediate_size": 96} if family == "qwen2" else {}
    source = save_tiny(tmp_path / "hf", family, tied=family == "qwen2", layers=2, hidden_size=64, **sizes)
    add_tokenizer(source)
    checkpoint = tmp_path / "step_000001"
    run_ranks(world, _trained, source, layout, str(checkpoint))
    settings = [f"model.path={source}", f"data.train_files={source}/config.json", "data.max_prompt_length=16"]
    settings += ["algorithm.name=sft", "model.dtype=bfloat16", "data.max_response_length=16"]
    settings += ["model.override_config.max_position_embeddings=256"]
    state = config_facts(load_config([], settings))
    (checkpoint / "state.json").write_text(json.dumps(state))

    before = load_file(f"{source}/model.safetensors")
    constant = {name: tensor for name, tensor in before.items() if name.endswith("e_score_correction_bias")}
    assert bool(constant) == family.startswith("deepseek")
    masters = {name[6:]: one for name, one in read_all(checkpoint / "actor").items() if name.startswith("param/")}
    assert masters.keys() == before.keys() - constant.keys()
    assert not all(torch.equal(one, before[name]) for name, one in masters.items()), "it has trained"
    for options, dtype in ((["--verify"], torch.bfloat16), (["--dtype", "float32"], torch.float32)):
        out = tmp_path / str(dtype)
        assert mcore_to_hf.main([str(checkpoint), str(out), *options]) == 0
        wanted = {name: one.to(dtype) for name, one in masters.items()} | constant
        assert not differing(written(out), wanted)
        config = json.loads((out / "config.json").read_text())
        assert (config["dtype"], config["max_position_embeddings"]) == (str(dtype).removeprefix("torch."), 256)
        opened: Any = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
        assert not opened[1]["missing_keys"] and not opened[1]["unexpected_keys"]
    if constant:
        # Drawn weights have no bias of routers, whatever the folder has.
        state["config"]["model"]["init"] = "random"
        (checkpoint / "state.json").write_text(json.dumps(state))
        assert mcore_to_hf.main([str(checkpoint), str(tmp_path / "drawn")]) == 0
        drawn = written(tmp_path / "drawn")
        assert all(drawn[name].dtype == torch.float32 and not drawn[name].any() for name in constant)
    state["config"]["model"]["lora"]["rank"] = 4
    (checkpoint / "state.json").write_text(json.dumps(state))
    assert mcore_to_hf.main([str(checkpoint), str(tmp_path / "adapters")]) == 2
    assert "is of adapters (model.lora)" in capsys.readouterr().err and not (tmp_path / "adapters").exists()
