"""The weight tables, and the reading and writing of model folders."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_rl.errors import CheckpointError
from megatron_rl.models import FAMILIES
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.models.layouts import Block
from megatron_rl.models.rules import hf_shapes, megatron_params
from megatron_rl.models.shape import ModelShape
from megatron_rl.weights.safetensors import INDEX_NAME, RandomSource, SafetensorsSource
from tests.helpers.oddities import oddities
from tests.helpers.save import write_model
from tests.helpers.tiling import check_tiling
from tests.helpers.tiny import save_tiny


def _shape(
    architecture: str = "Qwen2ForCausalLM", kv: int = 4, per_group: int = 2, tied: bool = True, vocab: int = 50
) -> ModelShape:
    return ModelShape(
        architecture=architecture,
        num_layers=2,
        hidden_size=16,
        num_heads=kv * per_group,
        num_kv_heads=kv,
        head_dim=4,
        ffn_size=24,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=64,
        initializer_range=0.02,
        num_experts=8 if FAMILIES[architecture].fields.experts else 0,
        num_experts_per_tok=2 if FAMILIES[architecture].fields.experts else 0,
        **oddities(architecture, 2, 24),
    )


@settings(max_examples=60, deadline=None)
@given(
    architecture=st.sampled_from(sorted(FAMILIES)),
    tp=st.sampled_from([1, 2, 4]),
    per_group=st.integers(1, 3),
    tied=st.booleans(),
    vocab=st.integers(40, 60),
)
def test_w1_blocks_of_all_ranks_tile_every_hf_tensor(
    architecture: str, tp: int, per_group: int, tied: bool, vocab: int
) -> None:
    """W1: each byte of each split HF tensor is on exactly one rank; replicated tensors are whole on each."""
    check_tiling(_shape(architecture, per_group=per_group, tied=tied, vocab=vocab), tp)


@given(
    architecture=st.sampled_from(["Qwen3MoeForCausalLM", "MixtralForCausalLM"]),
    tp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 4, 8]),
    etp=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=40, deadline=None)
def test_w1_each_byte_of_each_expert_is_on_one_expert_rank(architecture: str, tp: int, ep: int, etp: int) -> None:
    """W1: experts are dealt to (ep, etp) ranks, whatever tp is; all have equal parameters in order."""
    shape, family = _shape(architecture), FAMILIES[architecture]
    shapes = hf_shapes(shape, family)
    cover = {name: torch.zeros(size, dtype=torch.int64) for name, size in shapes.items() if ".experts." in name}
    assert len(cover) == 2 * 8 * 3
    forms: set[tuple[tuple[str, tuple[int, ...]], ...]] = set()
    for ep_rank in range(ep):
        for etp_rank in range(etp):
            params = list(
                megatron_params(
                    shape, family, tp=tp, tp_rank=0, layers=range(2), pre_process=True, post_process=True,
                    ep=ep, ep_rank=ep_rank, etp=etp, etp_rank=etp_rank,
                )
            )  # fmt: skip
            forms.add(tuple((param.name, param.shape) for param in params))
            for block in (block for param in params if param.expert for block in param.blocks):
                part = cover[block.hf_name][slice(*block.rows)]
                part = part if block.cols is None else part[:, slice(*block.cols)]
                part += 1
            assert all(param.expert == (".experts." in param.name) for param in params)
    assert len(forms) == 1
    for name, count in cover.items():
        assert bool((count == 1).all()), name


def test_tables_of_experts_say_what_the_docstring_says() -> None:
    shape = _shape("Qwen3MoeForCausalLM")
    params = megatron_params(
        shape, FAMILIES["Qwen3MoeForCausalLM"], tp=1, tp_rank=0, layers=range(1), pre_process=False, post_process=False,
        ep=4, ep_rank=1, etp=2, etp_rank=1,
    )  # fmt: skip
    found = {param.name: param for param in params}["decoder.layers.0.mlp.experts.linear_fc1.weight"]
    assert found.shape == (2, 24, 16) and (found.width, found.num_rows) == (16, 48)
    assert found.blocks == tuple(
        Block(f"model.layers.0.mlp.experts.{number}.{name}_proj.weight", (12, 24), (0, 16))
        for number in (2, 3)
        for name in ("gate", "up")
    )
    assert [(one.shape, one.blocks) for one in found.experts()] == [
        ((1, 24, 16), found.blocks[:2]),
        ((1, 24, 16), found.blocks[2:]),
    ]


def _write(folder: Path, shape: ModelShape, shards: int = 1) -> dict[str, torch.Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    tensors = {name: torch.randn(size) for name, size in hf_shapes(shape, FAMILIES[shape.architecture]).items()}
    if shards == 1:
        save_file(tensors, str(folder / "model.safetensors"))
        return tensors
    names = list(tensors)
    files = {name: f"part-{i % shards}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, str(folder / file))
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": files}))
    return tensors


@pytest.mark.parametrize("shards", [1, 3])
def test_source_reads_blocks(tmp_path: Path, shards: int) -> None:
    shape = _shape()
    tensors = _write(tmp_path, shape, shards)
    source = SafetensorsSource(tmp_path)
    source.check(hf_shapes(shape, FAMILIES[shape.architecture]))
    name = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(source.read(Block(name, (2, 7), (4, 12))), tensors[name][2:7, 4:12])
    assert torch.equal(source.read(Block("model.norm.weight", (0, 16))), tensors["model.norm.weight"])


def test_w2_missing_surplus_and_misshaped_tensors_are_named(tmp_path: Path) -> None:
    """W2: a checkpoint that does not hold exactly the model is refused, by name, all at once."""
    shape = _shape()
    tensors = _write(tmp_path, shape)
    del tensors["model.norm.weight"]
    tensors["extra.weight"] = torch.zeros(2)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(5, 16)
    save_file(tensors, str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError) as caught:
        SafetensorsSource(tmp_path).check(hf_shapes(shape, FAMILIES[shape.architecture]))
    message = str(caught.value)
    assert "missing model.norm.weight" in message and "surplus extra.weight" in message
    assert "model.layers.0.mlp.up_proj.weight is [5, 16], config.json says [24, 16]" in message


def test_missing_shard_and_torn_file_are_named(tmp_path: Path) -> None:
    _write(tmp_path / "a", _shape(), shards=3)
    (tmp_path / "a" / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors"):
        SafetensorsSource(tmp_path / "a")
    _write(tmp_path / "b", _shape())
    file = tmp_path / "b" / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        SafetensorsSource(tmp_path / "b")


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_an_index_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: no index of weights"):
        SafetensorsSource(tmp_path)


def test_tied_checkpoint_may_repeat_the_embedding_but_not_change_it(tmp_path: Path) -> None:
    shape = _shape(tied=True)
    tensors = _write(tmp_path, shape)
    expected = hf_shapes(shape, FAMILIES[shape.architecture])
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, str(tmp_path / "model.safetensors")
    )
    SafetensorsSource(tmp_path).check(expected)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, str(tmp_path / "model.safetensors")
    )
    with pytest.raises(CheckpointError, match=r"surplus lm_head\.weight"):
        SafetensorsSource(tmp_path).check(expected)


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    shapes = hf_shapes(_shape(), FAMILIES["Qwen2ForCausalLM"])
    one, two, other = RandomSource(3, 0.02), RandomSource(3, 0.02), RandomSource(4, 0.02)
    for source in (one, two, other):
        source.check(shapes)
    name = "model.layers.0.mlp.up_proj.weight"
    whole = one.read(Block(name, (0, 24), (0, 16)))
    assert torch.equal(two.read(Block(name, (5, 9), (3, 16))), whole[5:9, 3:16])
    assert not torch.equal(other.read(Block(name, (0, 24), (0, 16))), whole)
    assert bool((one.read(Block("model.norm.weight", (0, 16))) == 1).all())
    assert bool((one.read(Block("model.layers.0.self_attn.q_proj.bias", (0, 32))) == 0).all())
    centered = RandomSource(3, 0.02, norm=0.0)
    centered.check(shapes)
    assert bool((centered.read(Block("model.norm.weight", (0, 16))) == 0).all())


def test_written_folder_reads_back_in_shards(tmp_path: Path) -> None:
    tensors = _write(tmp_path / "model", _shape())
    write_model(
        tmp_path / "out", tensors.items(), companions_from=tmp_path / "model", dtype=torch.float32, max_shard_bytes=4000
    )
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())
    found: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        found |= load_file(str(tmp_path / "out" / file))
    assert found.keys() == tensors.keys() and all(torch.equal(found[n], t) for n, t in tensors.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_a_failed_save_leaves_the_old_one(tmp_path: Path) -> None:
    """Disk full while saving: an error that says so, the earlier save byte for byte as it was, nothing left over."""
    tensors = _write(tmp_path / "model", _shape())
    out = tmp_path / "out"
    write_model(out, tensors.items(), companions_from=tmp_path / "model")
    before = (out / "model.safetensors").read_bytes()

    def fills_the_disk():
        yield next(iter(tensors.items()))
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device"):
        write_model(out, fills_the_disk(), companions_from=tmp_path / "model")
    assert (out / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]


def test_layers_that_predict_further_tokens_are_left_out_and_saved_models_say_so(tmp_path: Path) -> None:
    folder = Path(save_tiny(tmp_path / "model", "deepseek_v3", tied=False, layers=2))
    held = load_file(folder / "model.safetensors")
    further = {"model.layers.2.eh_proj.weight": torch.ones(3, 2), "model.layers.2.enorm.weight": torch.ones(2)}
    save_file(held | further, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    shape = read_model_shape(str(folder))
    expected = hf_shapes(shape, FAMILIES[shape.architecture])
    with pytest.raises(CheckpointError, match=r"surplus model\.layers\.2\.eh_proj\.weight"):
        SafetensorsSource(folder).check(expected)
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    source = SafetensorsSource(folder)
    source.check(expected)
    assert {name for name, _ in source.tensors()} == held.keys()
    assert read_model_shape(str(folder)).further_layers == 1
    write_model(tmp_path / "saved", source.tensors(), companions_from=folder)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    loading = opened[1]
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
