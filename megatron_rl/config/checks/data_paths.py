"""The data files that a config names: patterns, folders and kinds, as `check` and the loader both see them."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.run import RunConfig
from megatron_rl.errors import Fault
from megatron_rl.messages import first_of

KINDS = (".parquet", ".arrow", ".jsonl", ".json", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")
"""Endings of the files that are read, in any case."""
GIVE = "give a .parquet, .arrow, .jsonl, .json or .csv file (the last three also as .gz)"
CURES = {
    ".bz2": "pack it as .gz",
    ".ndjson": "name it .jsonl",
    ".tar": "unpack it",
    ".tsv": "write it with commas, as .csv",
    ".xz": "pack it as .gz",
    ".zip": "unpack it",
    ".zst": "pack it as .gz",
}
NUM_NAMED = 3


def kind_of(path: str | Path) -> str:
    """The ending that says how a file is read, one of KINDS; "" where none does."""
    name = os.path.basename(path).lower()
    return max((kind for kind in KINDS if name.endswith(kind)), key=len, default="")


def stem_of(path: str | Path) -> str:
    """A file's or folder's name without the ending that kind_of knows: "gsm8k.train" of "a/gsm8k.train.jsonl.gz"."""
    name = os.path.basename(os.path.normpath(path))
    return name[: len(name) - len(kind_of(name))] or name


def data_files(key: str, paths: Sequence[str]) -> tuple[list[Path], list[Fault]]:
    """(the files and data set folders that `paths` name, in order; every fault of the names).

    A path with *, ? or [ that is not there as it stands is a pattern (** stands for folders in between); its matches
    come in the order of their names. Nothing is opened but the state.json of a folder.
    """
    files: list[Path] = []
    faults: list[Fault] = []
    named: dict[tuple[int, int], str] = {}
    for number, path in enumerate(paths):
        name = key if len(paths) == 1 else f"{key}[{number}]"
        matches, reason, cure = _matches(path)
        if reason:
            faults.append(Fault(name, path, reason, cure))
        again: dict[str, str] = {}
        for found in matches:
            parts, reason, cure = _parts(found)
            if reason:
                by_pattern = "" if str(found) == path else f" (found by {path})"
                faults.append(Fault(name, str(found), reason + by_pattern, cure))
                continue
            marks = [(stat.st_dev, stat.st_ino) for stat in map(os.stat, parts)]
            before = next((named[mark] for mark in marks if mark in named), None)
            if before is not None:
                again[str(found)] = before
            named |= dict.fromkeys(marks, f"{found} of {name}")
            files.append(found)
        if again:
            faults.append(_named_again(name, path, again))
    return files, faults


def _named_again(name: str, path: str, again: dict[str, str]) -> Fault:
    shown = first_of((f"{found} is {before}" for found, before in again.items()), NUM_NAMED)
    reason = f"its rows would be read twice: {shown}"
    return Fault(name, path, reason, "name each file once; data.mix_weights gives a source more weight")


def _matches(path: str) -> tuple[list[Path], str, str]:
    """(what a path or pattern stands for, "", "") or ([], what is wrong, what to give instead)."""
    missing = f"{GIVE} that is there (relative paths start at the working directory)"
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
        return [], "only local files are read", "download it, and give the path of the copy"
    # The home folder, for callers whose paths no config has seen.
    local = os.path.expanduser(path)
    if local and os.path.exists(local):
        return [Path(local)], "", ""
    if local and os.path.islink(local):
        return [], f"it is a link to {os.readlink(local)}, which is not there", missing
    if glob.escape(local) == local:
        return [], "there is no such file", missing
    found = sorted(glob.glob(local, recursive=True))
    return [Path(name) for name in found], "" if found else "the pattern matches no file", missing


def _parts(path: Path) -> tuple[list[Path], str, str]:
    """(the files that hold the rows, "", "") or ([], what is wrong, what to give instead)."""
    if path.is_dir():
        return dataset_shards(path)
    if not kind_of(path):
        ending = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
        reason = f"files of kind {ending} are not read" if ending else "files without a suffix are not read"
        return [], reason, CURES.get(path.suffix.lower(), GIVE)
    if not path.is_file():
        return [], "it is no regular file", GIVE
    return [path], "", ""


def dataset_shards(folder: Path) -> tuple[list[Path], str, str]:
    """(Arrow files in order, "", "") of a folder that Hugging Face `datasets` wrote with save_to_disk.

    Of another folder: ([], what is wrong with it, what to give instead).
    """
    splits = folder / "dataset_dict.json"
    state = folder / "state.json"
    try:
        if splits.is_file():
            names = [str(folder / name) for name in json.loads(splits.read_text(encoding="utf-8"))["splits"]]
            return [], "this folder holds a data set of several splits", f"give one of {', '.join(names)}"
        if not state.is_file():
            kinds = sorted({kind for path in folder.iterdir() if (kind := kind_of(path))})
            cure = "give a file, a folder that datasets.save_to_disk wrote, or a pattern: "
            cure += " or ".join(f"{folder}/*{kind}" for kind in kinds or ["*/*.parquet"])
            return [], "this folder has no state.json of a saved data set", cure
        content = json.loads(state.read_text(encoding="utf-8"))
        shards = [folder / entry["filename"] for entry in content["_data_files"]]
    except (ValueError, KeyError, TypeError, OSError) as error:
        return [], f"its dataset_dict.json or state.json cannot be read ({error!r})", "save the data set again"
    if content.get("_indices_data_files"):
        return [], "its rows are picked by an index file, which is not read", "call flatten_indices before saving"
    if not shards:
        return [], "the data set holds no files", "save the data set again"
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        return [], f"{len(missing)} of its {len(shards)} files are missing: {', '.join(missing)}", "copy it again"
    return shards, "", ""


def train_files(cfg: RunConfig) -> list[Fault]:
    """The training files are there, of known kinds, and named once."""
    if not cfg.data.train_files:
        return [Fault("data.train_files", [], "is empty", GIVE)]
    return data_files("data.train_files", cfg.data.train_files)[1]


def val_files(cfg: RunConfig) -> list[Fault]:
    """The validation files are there, of known kinds, and named once."""
    return data_files("data.val_files", cfg.data.val_files)[1]


def val_prompt_files(cfg: RunConfig) -> list[Fault]:
    """The prompts of SFT's validation are there, and the run does sample them."""
    key, files = "data.val_prompt_files", cfg.data.val_prompt_files
    if files and not cfg.needs.samples_to_validate:
        cure = "put them into data.val_files" if cfg.needs.rollouts else "leave it out"
        return [Fault(key, files, f"is read by algorithm.name sft, and this run is {cfg.algorithm.name}", cure)]
    return data_files(key, files)[1]


def eval_files(cfg: RunConfig) -> list[Fault]:
    """There is something to score the model on."""
    if cfg.data.val_files or cfg.samples_prompts:
        return []
    reason = "eval scores the model on these files, and there are none"
    return [Fault("data.val_files", [], reason, "give at least one file")]
