"""model.override_config: entries laid over config.json, read by every reader alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.models.changes import describe_changes, laid_over
from megatron_rl.models.config_json import inspect_model, read_model_shape
from megatron_rl.models.rope import Linear, Yarn
from megatron_rl.weights.companions import copy_companions, model_folder
from tests.unit.models.test_model_config import write_config

YARN = {"rope_type": "yarn", "factor": 4.0}
OTHER = YARN | {"rope_theta": 3.0}
BY_TYPE = {"full_attention": OTHER, "sliding_attention": {"rope_theta": 5.0}}
ODD_TYPES = BY_TYPE | {"rope_theta": 7.0}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("content", "changes", "merged"),
    [
        ({"a": 1, "b": 2}, {"b": 3, "c": None}, {"a": 1, "b": 3, "c": None}),
        # The base stays, wherever the file has it.
        ({"rope_parameters": PLAIN}, {"rope_parameters": YARN}, {"rope_parameters": YARN | {"rope_theta": 5e5}}),
        ({"rope_parameters": PLAIN}, {"rope_scaling": YARN}, {"rope_scaling": YARN | {"rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": None},
            {"rope_scaling": YARN},
            {"rope_theta": 5e5, "rope_scaling": YARN | {"rope_theta": 5e5}},
        ),
        # The older entry would stand before the newer.
        (
            {"rope_theta": 7.0, "rope_scaling": YARN},
            {"rope_parameters": {"rope_type": "default"}},
            {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        ),
        ({"rope_parameters": PLAIN}, {"rope_parameters": None}, {"rope_parameters": None, "rope_theta": 5e5}),
        (
            {"rope_parameters": PLAIN},
            {"rope_theta": 9.0},
            {"rope_theta": 9.0, "rope_parameters": PLAIN | {"rope_theta": 9.0}},
        ),
        ({"rope_parameters": PLAIN}, {"rope_parameters": OTHER}, {"rope_parameters": OTHER}),
        # Each layer type has its own base.
        ({"rope_theta": 7.0}, {"rope_parameters": BY_TYPE}, {"rope_theta": 7.0, "rope_parameters": BY_TYPE}),
        ({"rope_parameters": BY_TYPE}, {"rope_theta": 7.0}, {"rope_theta": 7.0, "rope_parameters": ODD_TYPES}),
    ],
)
def test_the_changes_are_what_is_read(content: dict[str, Any], changes: dict[str, Any], merged: dict[str, Any]) -> None:
    before = json.dumps([content, changes])
    assert laid_over(content, changes) == merged
    assert json.dumps([content, changes]) == before, "neither is changed"


def test_a_shape_has_the_changes_and_the_files_written_beside_it_too(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "qwen2", {"rope_parameters": PLAIN, "eos_token_id": 1})
    changes = {"max_position_embeddings": 512, "rope_parameters": YARN | {"original_max_position_embeddings": 128}}
    shape = read_model_shape(folder, changes=changes)
    assert (shape.max_position_embeddings, shape.rope_theta) == (512, 5e5)
    assert shape.rope == Yarn(4.0, 128)
    (tmp_path / "saved").mkdir()
    copy_companions(tmp_path / "saved", Path(folder), Path(folder), changes | {"dtype": "bfloat16"})
    for written in (str(tmp_path / "saved"), model_folder(folder, changes)):
        assert read_model_shape(written) == shape
        assert json.loads((Path(written) / "config.json").read_text())["eos_token_id"] == 1
    assert model_folder(folder, {}) == folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_parametres": YARN}, "no field that is known"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "RoPE of type 'longrope' is not supported"),
        ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, "vLLM slides all or none"),
        ({"max_position_embeddings": "512"}, "must be a whole number"),
        ({"vocab_size": 100}, "is a size of the weights"),
        ({"eos_token_id": 7}, "belongs to the tokenizer"),
    ],
)
def test_a_change_that_is_not_computed_is_refused_by_its_key(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    shape, faults = inspect_model(write_config(tmp_path, "qwen2", {}), changes=changes)
    assert shape is None
    (fault,) = faults
    assert fault.key.startswith("model.override_config.") and reason in fault.reason


def test_a_fault_of_the_file_that_a_change_does_away_with_is_none(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 4, "rope_theta": 1e4}
    folder = write_config(tmp_path, "llama", {"rope_parameters": linear})
    assert inspect_model(folder)[0] is None
    shape = read_model_shape(folder, changes={"rope_parameters": linear | {"factor": 4.0}})
    assert shape.rope == Linear(4.0)


def test_what_is_changed_is_told_with_the_value_of_the_file() -> None:
    content = {"max_position_embeddings": 32, "a": 1, "rope_scaling": YARN}
    lines = describe_changes(content, {"max_position_embeddings": 64, "rope_parameters": YARN, "a": 1})
    assert lines == [
        "max_position_embeddings: 64 (config.json: 32)",
        f"rope_parameters: {YARN} (config.json: absent)",
        f"rope_scaling: absent (config.json: {YARN})",
    ]
    assert describe_changes(content, {}) == []
