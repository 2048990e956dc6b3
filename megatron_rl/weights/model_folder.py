"""A complete folder of a model, written aside: it takes its place once everything is there and has been looked at."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from megatron_rl.errors import CheckpointError
from megatron_rl.models.stacks import unstacked_shapes
from megatron_rl.weights.companions import copy_companions, open_to_umask, set_chat_template
from megatron_rl.weights.end_token import name_end_token
from megatron_rl.weights.safetensors import INDEX_NAME, SafetensorsSource
from megatron_rl.weights.shard_files import Files, index_of


@dataclass(frozen=True)
class Beside:
    """What stands in a Hugging Face folder beside the weights."""

    companions_from: Path
    tokenizer_from: Path | None = None
    """companions_from, if None."""
    dtype: torch.dtype | None = None
    """What config.json shall name."""
    config_changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Entries of config.json that differ from companions_from's."""
    eos_token: str | None = None
    """The end token that all files name, in place of the tokenizer's."""
    chat_template: str | None = None
    """In place of the tokenizer's."""
    verify: Callable[[Path], None] | None = None
    """Looks at the folder before it takes its place; a CheckpointError of it leaves the folder where it is, and is
    raised with the place."""


def staging_of(path: Path) -> Path:
    """A folder beside `path` to write into, with a name of its own: what others call NAME.writing is theirs."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.writing")


@contextmanager
def cleared(path: Path, staging: Path) -> Generator[None]:
    """Remove the staging folder if what is done inside fails; errors of the disk become a CheckpointError."""
    try:
        yield
    except _UnverifiedError:
        raise
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise unwritten(path, error) from error
        raise


def unwritten(path: Path, reason: object) -> CheckpointError:
    """The error of a save that failed."""
    return CheckpointError(f"{path}: could not be written ({reason}); an earlier save there is intact")


def complete(path: Path, staging: Path, files: Files, beside: Beside) -> None:
    """Put index and other files beside the weights in `staging`, look at all, and move the folder to `path`.

    files: those of weights, which have been written. Raises CheckpointError if the folder is no complete model.
    """
    if len(files) > 1:
        (staging / INDEX_NAME).write_bytes(index_of(files))
    tokenizer = beside.tokenizer_from or beside.companions_from
    dtype = {} if beside.dtype is None else {"dtype": str(beside.dtype).removeprefix("torch.")}
    copy_companions(staging, beside.companions_from, tokenizer, {**beside.config_changes, **dtype})
    if beside.chat_template is not None:
        set_chat_template(staging, beside.chat_template)
    if beside.eos_token is not None:
        name_end_token(staging, beside.eos_token)
    open_to_umask(staging)
    written = {entry.name: entry.shape for entries in files.values() for entry in entries}
    SafetensorsSource(staging).check(unstacked_shapes(written))
    if beside.verify is not None:
        _verified(staging, beside.verify)
    replace_folder(staging, path)


class _UnverifiedError(CheckpointError):
    """The folder was written completely, but its verification failed."""


def _verified(staging: Path, verify: Callable[[Path], None]) -> None:
    try:
        verify(staging)
    except CheckpointError as error:
        raise _UnverifiedError(f"{error}; what was written is kept at {staging}") from error


def replace_folder(staging: Path, path: Path) -> None:
    """Move `staging` to `path` after a sync to disk: some disks report only then that they are full."""
    for file in filter(Path.is_file, staging.rglob("*")):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    if not path.exists() or not any(path.iterdir()):
        staging.rename(path)
        return
    old = staging.with_suffix(".old")
    path.rename(old)
    try:
        staging.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
