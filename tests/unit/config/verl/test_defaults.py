"""verl's own defaults, leaf by leaf (docs/verl-keys.tsv): nothing is refused, nothing is called unknown."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.load import resolve, run_schema
from megatron_rl.config.text.reader import Entry
from megatron_rl.config.verl import translate
from tests.helpers.config import make_model, write

TABLE = Path(__file__).resolve().parents[4] / "docs/verl-keys.tsv"
TRAINERS = ("ppo", "megatron", "sft", "old-sft")


def verdicts(tree: dict[str, Any]) -> dict[str, str]:
    """verl's key -> what becomes of it, in the words of the table, for the leaves of one config."""
    entries = [Entry(key, value, "in verl.yaml", 0) for key, value in tree.items()]
    found = translate(entries, run_schema())
    words = {one.key: f"accepted: {one.why}" for one in found.accepted}
    words |= {fault.key: f"refused: {fault.reason}" for fault in found.faults}
    words |= {one.key: f"differs: {one.why}" for one in found.differs if one.key not in words}
    for one in found.mapped:
        known = words.get(one.verl_key, "")
        if not known.startswith("refused"):
            words[one.verl_key] = f"{known}, {one.key}" if known.startswith("mapped: ") else f"mapped: {one.key}"
    own = {entry.key for entry in found.entries}
    return {key: words.get(key, "the same key" if key in own else "LOST") for key in tree}


@cache
def table() -> list[tuple[str, tuple[str, ...], Any, str]]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    return [(key, tuple(trainers.split(",")), json.loads(value), verdict) for key, trainers, value, verdict in rows]


def tree_of(trainer: str) -> dict[str, Any]:
    return {key: value for key, trainers, value, _ in table() if trainer in trainers}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *above, leaf = key.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[leaf] = value
    return tree


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_leaf_has_the_verdict_of_the_table(trainer: str) -> None:
    found = verdicts(tree_of(trainer))
    wrong = [
        f"{key}: {found[key]} (table: {verdict})"
        for key, trainers, _, verdict in table()
        if trainer in trainers and found[key] != verdict
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_has_every_part_of_verl_and_refuses_none_of_its_defaults() -> None:
    assert [len(tree_of(trainer)) for trainer in TRAINERS] > [900, 900, 150, 70]
    bad = [row for row in table() if row[3].startswith("refused") or row[3] == "LOST"]
    assert not bad


@pytest.mark.parametrize("trainer", TRAINERS)
def test_verls_resolved_defaults_have_no_fault_but_the_paths(trainer: str, tmp_path: Path) -> None:
    tree = nested(tree_of(trainer))
    path = write(tmp_path / "verl.yaml", json.dumps(tree))
    with pytest.raises(Exception, match="no such") as caught:
        resolve([path])
    keys = {fault.key for fault in caught.value.faults}  # type: ignore[attr-defined]
    assert keys <= {"data.train_files", "data.val_files", "model.path", "critic.path"}
    model = make_model(tmp_path / "model", max_position_embeddings=4096)
    rows = write(tmp_path / "rows.parquet", "")
    folder = f"trainer.default_local_dir={tmp_path}/runs"
    paths = [f"data.train_files={rows}", f"data.val_files={rows}", folder]
    if trainer in ("ppo", "megatron"):
        resolved = resolve([path], [*paths, f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}"])
        assert (resolved.config.algorithm.name, resolved.config.critic.enable) == ("ppo", True)
        assert resolved.config.actor.recompute == ("full" if trainer == "ppo" else "none")
    else:
        name = "partial_pretrain" if trainer == "old-sft" else "path"
        resolved = resolve([path], [*paths, f"model.{name}={model}"])
        assert resolved.config.algorithm.name == "sft"
        optim = resolved.config.actor.optim
        assert (optim.lr, optim.lr_warmup_steps_ratio) == ((1e-5, 0.1) if trainer == "old-sft" else (1e-3, 0.0))
    assert resolved.config.trainer.resume_mode == "auto"
