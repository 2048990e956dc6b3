"""Contracts W1 and W2: what a weight file may hold, what a saved folder holds, which layers a chunk holds."""

from __future__ import annotations

import json
import os
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.errors import CheckpointError, RolloutError
from megatron_rl.models.stages import stage_layers
from megatron_rl.rollout.engine import whole_update
from megatron_rl.weights.safetensors import SafetensorsSource
from megatron_rl.workers.saved import check_saved, rehearse, run_renderer
from tests.helpers.config import make_model, write
from tests.helpers.data import CHATML, chat_folder
from tests.helpers.save import write_model

SHAPES = {"model.norm.weight": (4,), "lm_head.weight": (2, 4)}
INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"
THETA = 777.0


def _freqs(theta: float = THETA, size: int = 32) -> torch.Tensor:
    return theta ** (-torch.arange(0, size, 2).float() / size)


def _folder(folder: Path, **extra: torch.Tensor) -> Path:
    make_model(folder, weights=False, rope_parameters={"rope_theta": THETA}, hidden_size=128, tie_word_embeddings=False)
    tensors = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    save_file(tensors | extra, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", [INV_FREQ, "model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_w2_frequencies_of_rope_are_checked_and_ignored(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    source = SafetensorsSource(_folder(tmp_path / "m", **{name: _freqs().to(dtype)}))
    source.check(SHAPES)
    assert [found for found, _ in source.tensors()] == sorted(SHAPES)


@pytest.mark.parametrize(
    "values", [_freqs(10000.0), _freqs(size=64), _freqs() * 1.5, torch.ones(16, dtype=torch.int64)], ids=str
)
def test_w2_frequencies_of_another_base_are_refused(tmp_path: Path, values: torch.Tensor) -> None:
    source = SafetensorsSource(_folder(tmp_path / "m", **{INV_FREQ: values}))
    with pytest.raises(CheckpointError, match=rf"{INV_FREQ} is not that of rope_theta 777 and head_dim 32"):
        source.check(SHAPES)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.int64, "I64"),
        (torch.bool, "BOOL"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
    ],
)
def test_w2_weights_that_need_scales_are_refused(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    folder = _folder(tmp_path / "m", **{"model.norm.weight": torch.ones(4).to(dtype)})
    with pytest.raises(CheckpointError, match=rf"model.norm.weight is stored as {name}.*without its scales"):
        SafetensorsSource(folder).check(SHAPES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_w2_weights_of_16_bits_and_more_are_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    SafetensorsSource(_folder(tmp_path / "m", **{"model.norm.weight": torch.ones(4, dtype=dtype)})).check(SHAPES)


UPDATES: list[tuple[str, list[tuple[str, tuple[int, ...]]], str]] = [
    ("missing", [("a", (2,))], "no value for b; copy the whole model to models/m"),
    ("none", [], "no value for a, b"),
    ("unknown", [("a", (2,)), ("c", (2,))], "c is no tensor of the model of models/m"),
    ("twice", [("a", (2,)), ("a", (2,))], "a came twice"),
    ("misshaped", [("a", (3,)), ("b", (1, 2))], r"a is \[3\], config.json says \[2\]"),
]


@pytest.mark.parametrize(("given", "reason"), [row[1:] for row in UPDATES], ids=[row[0] for row in UPDATES])
def test_w2_an_engines_update_is_whole(given: list[tuple[str, tuple[int, ...]]], reason: str) -> None:
    tensors = [(name, torch.zeros(shape)) for name, shape in given]
    with pytest.raises(RolloutError, match=f"update_weights: {reason}"):
        list(whole_update(tensors, {"a": (2,), "b": (1, 2)}, "models/m"))


@pytest.mark.parametrize(("layers", "pp", "vpp"), [(8, 1, 1), (8, 2, 1), (8, 2, 2), (12, 3, 2), (24, 4, 3), (7, 7, 1)])
def test_w1_chunks_hold_every_layer_once_in_the_order_of_the_pipeline(layers: int, pp: int, vpp: int) -> None:
    """A bijection, and the order in which a token passes: chunk 0 of all stages, then chunk 1 of all stages."""
    stages = stage_layers(layers, pp, vpp)
    assert [layer for chunk, stage in product(range(vpp), range(pp)) for layer in stages[stage][chunk]] == list(
        range(layers)
    )
    assert all(len(chunk) == layers // (pp * vpp) for stage in stages for chunk in stage)


@pytest.mark.parametrize(
    ("first", "last", "wanted"), [(1, None, [1, 3, 3]), (None, 1, [3, 3, 1]), (1, 2, [1, 4, 2]), (3, 1, [3, 3, 1])]
)
def test_w1_uneven_stages_have_the_layers_they_are_given(
    first: int | None, last: int | None, wanted: list[int]
) -> None:
    stages = stage_layers(7, 3, 1, first, last)
    assert [len(chunk) for (chunk,) in stages] == wanted
    assert [layer for (chunk,) in stages for layer in chunk] == list(range(7))


OWN = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def _two_folders(folder: Path, **data: Any) -> Any:
    """A run whose tokenizer stands apart, with a template inside tokenizer_config.json; the model's has files too."""
    from megatron_rl.config.load import load_config

    model = chat_folder(folder / "model", template=CHATML)
    (model / "chat_template.jinja").write_text(CHATML)
    (model / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (model / "added_tokens.json").write_text(json.dumps({"<|other|>": 5}))
    tokenizer = chat_folder(folder / "tok", template=OWN)
    for file in tokenizer.iterdir():
        if file.name not in ("tokenizer.json", "tokenizer_config.json"):
            file.unlink() if file.is_file() else shutil.rmtree(file)
    rows = write(folder / "rows.jsonl", "")
    settings = [f"data.{key}={value}" for key, value in data.items()]
    paths = [f"model.path={model}", f"model.tokenizer_path={tokenizer}", f"data.train_files={rows}"]
    return load_config(
        [], [*paths, "model.init=random", "data.max_prompt_length=16", "data.max_response_length=8", *settings]
    )


def _save(cfg: Any, folder: Path) -> Path:
    renderer = run_renderer(cfg, cfg.model.path)
    write_model(
        folder,
        [("model.norm.weight", torch.ones(4))],
        companions_from=cfg.model.path,
        tokenizer_from=cfg.model.tokenizer_path,
        chat_template=renderer.saved_template(),
        verify=lambda saved: check_saved(saved, renderer, cfg),
    )
    return folder


@pytest.mark.parametrize("template", ["tokenizer", "plain"])
def test_a_saved_folder_renders_as_the_run_did(tmp_path: Path, template: str) -> None:
    """Tokenizer files of tokenizer_path alone; a template of the run's own in place of all."""
    from megatron_rl.data.render import Renderer

    cfg = _two_folders(tmp_path, chat_template=template)
    rehearse(cfg)
    folder = _save(cfg, tmp_path / "final")
    names = {path.name for path in folder.iterdir()}
    assert not names & {"special_tokens_map.json", "added_tokens.json"}
    assert ("chat_template.jinja" in names) == (template == "plain")
    asked = [{"role": "user", "content": "12"}]
    answered = [*asked, {"role": "assistant", "content": "3"}, {"role": "user", "content": "4"}]
    saved, ran = Renderer(str(folder)), run_renderer(cfg, cfg.model.path)
    for messages in (asked, answered):
        assert saved.prompt_text(messages) == ran.prompt_text(messages)
        assert saved.prompt_ids(messages) == ran.prompt_ids(messages)
    assert saved.prompt_text(asked) == ("[user] 12<|im_end|>[assistant] " if template == "tokenizer" else "12")


def test_a_folder_that_renders_otherwise_is_not_a_save(tmp_path: Path) -> None:
    """The earlier save stays, what was written is kept, and the message says where and what differs."""
    cfg = _two_folders(tmp_path)
    folder = _save(cfg, tmp_path / "final")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    renderer = run_renderer(cfg, cfg.model.path)
    with pytest.raises(
        CheckpointError, match=r"not render as the run does: .*a question: .*; what was written is kept at"
    ):
        write_model(
            folder,
            [("model.norm.weight", torch.ones(4))],
            companions_from=cfg.model.path,
            tokenizer_from=cfg.model.path,
            verify=lambda saved: check_saved(saved, renderer, cfg),
        )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (kept,) = tmp_path.glob(".final.*.writing")
    assert (kept / "model.safetensors").is_file()


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_saved_files_follow_the_umask(tmp_path: Path, umask: int) -> None:
    model = _folder(tmp_path / "m")
    before = os.umask(umask)
    try:
        write_model(tmp_path / "final", [("a", torch.ones(2))], companions_from=model)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "final").iterdir()}
    assert set(modes.values()) == {0o666 & ~umask} and "model.safetensors" in modes, modes
