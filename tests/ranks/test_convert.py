"""Checkpoints of Megatron itself: it loads what the tools write, and they read what it writes."""

from __future__ import annotations

from argparse import Namespace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import save_tiny
from tests.helpers.training import make_actor
from tests.unit.convert.test_round_trip import differing, written
from tools.convert import hf_to_mcore, mcore_to_hf


def _through_megatron(rank: int, world: int, folder: str, source: str, layout: dict[str, Any]) -> None:
    from tests.helpers import megatron_dist

    actor, out = make_actor(**layout), Path(folder)
    models = megatron_dist.chunks(source, actor, world, "float32")
    megatron_dist.load_torch_dist(models, out / "mcore/release")
    megatron_dist.save_torch_dist(megatron_dist.sharded(models), out / "iter_0000007")
    megatron_dist.save_mp_rank(models, out / "classic", actor)


@pytest.mark.parametrize(
    ("family", "world", "layout"),
    [
        ("qwen3_moe", 2, {"tp": 2, "sequence_parallel": True, "ep": 2}),
        pytest.param("qwen2", 2, {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("llama", 4, {"tp": 2, "pp": 2, "vpp": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 4, {"ep": 2, "pp": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3", 1, {}, marks=pytest.mark.slow),
    ],
)
def test_megatron_and_the_tools_read_each_others_files(tmp_path: Path, family: str, world: int, layout: dict[str, Any]):
    sizes = {} if family == "qwen3_moe" else {"intermediate_size": 96}
    source = save_tiny(tmp_path / "hf", family, tied=False, layers=4, vocab=130, hidden_size=64, head_dim=16, **sizes)
    assert hf_to_mcore.main([source, str(tmp_path / "mcore"), "--pp", "2", "--vocab-multiple", "8"]) == 0
    run_ranks(world, _through_megatron, str(tmp_path), source, layout)
    wanted = load_file(f"{source}/model.safetensors")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    for name, folder in (("dist", tmp_path), ("ranks", tmp_path / "classic")):
        argv = [str(folder), str(tmp_path / name), "--hf", source, "--verify"]
        assert mcore_to_hf.main(argv) == 0
        assert not differing(written(tmp_path / name), wanted)


def test_files_with_objects_of_megatron_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = save_tiny(tmp_path / "hf", "llama", layers=2, hidden_size=32, intermediate_size=48, head_dim=8)
    folder = tmp_path / "old/mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"model": {}, "args": Namespace(odd=Fraction(1, 2))}, folder / "model_optim_rng.pt")
    assert mcore_to_hf.main([str(tmp_path / "old"), str(tmp_path / "out"), "--hf", source]) == 2
    assert "only Megatron's own code may open" in capsys.readouterr().err and not (tmp_path / "out").exists()
