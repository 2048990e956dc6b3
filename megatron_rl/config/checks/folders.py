"""Checks of the run's folder: its name stays in the root and fits the file system, and the root can be written.

Nothing is written to find out, so that a refused run leaves no trace; whether the folder holds a run already is
looked at when training starts (runs/folder.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.run import RunConfig
from megatron_rl.errors import Fault

ROOT_KEY, NAME_KEY = "trainer.default_local_dir", "trainer.experiment_name"
LONGEST_NUMBER = len("-9999")
"""What trainer.overwrite=number adds to the name."""
LONGEST_BESIDE = len("..01234567.writing")
"""What a save adds to the name of its folder while it is written."""
LONGEST_INSIDE = 200
"""Bytes of the longest path below a run's folder: weights of a step, and what services such as wandb keep there."""


def run_folder(cfg: RunConfig) -> list[Fault]:
    """The run's folder can be made where the config says."""
    root, name = cfg.trainer.default_local_dir, cfg.trainer.experiment_name
    faults = [Fault(ROOT_KEY, root, reason, cure) for reason, cure in _root_faults(root)]
    faults += [Fault(NAME_KEY, name, reason, cure) for reason, cure in _name_faults(name)]
    if faults:
        return faults
    faults = _length_faults(root, name)
    return faults or _place_faults(root, name, Path(cfg.trainer.run_dir))


def export_faults(out: str) -> list[tuple[str, str]]:
    """(reason, cure) of each thing that keeps a model from being written as the folder `out`, all of which is its own.

    Files are written beside `out` and take its place at the end.
    """
    faults = list(_root_faults(out))
    if not faults:
        longest_name, longest_path = _limits(out)
        lengths = [len(os.fsencode(part)) for part in Path(out).parts]
        if max(lengths, default=0) > longest_name - LONGEST_BESIDE:
            faults.append((f"a part of it has more than {longest_name - LONGEST_BESIDE} bytes", "shorten it"))
        elif len(os.fsencode(os.path.abspath(out))) > longest_path - LONGEST_INSIDE:
            faults.append((f"has more than {longest_path - LONGEST_INSIDE} bytes", "shorten it"))
    if not faults:
        try:
            faults += _export_place_faults(Path(out))
        except OSError as error:
            faults.append((f"cannot be looked at ({error.strerror})", "name another folder"))
    return faults


def _export_place_faults(folder: Path) -> Iterator[tuple[str, str]]:
    place = nearest_folder(folder)
    if not place.is_dir():
        what = "is a link that leads nowhere" if place.is_symlink() else "is a file"
        yield f"{place} {what}", "name a folder"
    elif place == folder and any(folder.iterdir()):
        yield "the folder is not empty", "give a new one"
    elif not os.access(folder.parent if place == folder else place, os.W_OK | os.X_OK):
        yield f"{place} cannot be written", "name a folder that can be, or change its rights"


def nearest_folder(path: Path) -> Path:
    """The path, or the nearest of its parents that exists (a link that leads nowhere exists)."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _root_faults(root: str) -> Iterator[tuple[str, str]]:
    if not root.strip():
        yield "is empty", "name the folder that holds all runs, such as runs"
    yield from _letter_faults(root)


def _name_faults(name: str) -> Iterator[tuple[str, str]]:
    cure = "give a plain name; the folder around it is trainer.default_local_dir"
    if not name.strip():
        yield "is empty", "give the run a name"
    elif name != name.strip():
        yield "starts or ends with white space, which nobody sees in a folder's name", f"write {name.strip()!r}"
    elif name in (".", ".."):
        yield "is no name: it means the folder of all runs itself, or the one above it", cure
    elif "/" in name:
        yield "holds a slash, so that the run would lie elsewhere than in the folder of all runs", cure
    yield from _letter_faults(name)


def _letter_faults(text: str) -> Iterator[tuple[str, str]]:
    """Letters that a file system cannot store, or that no reader can see or type."""
    odd = sorted({letter for letter in text if letter != " " and not letter.isprintable()})
    if odd:
        yield f"holds {', '.join(f'U+{ord(letter):04X}' for letter in odd)}, which is no visible letter", "take it out"


def _length_faults(root: str, name: str) -> list[Fault]:
    longest_name, longest_path = _limits(root)
    faults: list[Fault] = []
    for part in Path(root).parts:
        if len(os.fsencode(part)) > longest_name:
            reason = (
                f"its part {part[:20]}... has {len(os.fsencode(part))} bytes, and a name has at most {longest_name}"
            )
            faults.append(Fault(ROOT_KEY, root, reason, "shorten it"))
    room = longest_name - LONGEST_NUMBER
    if len(os.fsencode(name)) > room:
        reason = f"has {len(os.fsencode(name))} bytes, and the name of a run's folder may have {room}"
        faults.append(Fault(NAME_KEY, name, reason, "shorten it"))
    room = longest_path - LONGEST_INSIDE
    length = len(os.fsencode(os.path.join(os.path.abspath(root), name))) + LONGEST_NUMBER
    if not faults and length > room:
        reason = f"the run's folder would have a path of {length} bytes, and {room} leave room for the files in it"
        faults.append(Fault(ROOT_KEY, root, reason, "name a folder nearer to the root of the disk"))
    return faults


def _limits(root: str) -> tuple[int, int]:
    """Most bytes of a name and of a path on the root's file system; Linux's own where it does not say."""
    parts = Path(os.path.abspath(root)).parts
    place = Path(parts[0])
    for part in parts[1:]:
        if len(os.fsencode(part)) > 255 or not (place / part).is_dir():
            break
        place /= part
    try:
        return os.pathconf(place, "PC_NAME_MAX"), os.pathconf(place, "PC_PATH_MAX")
    except OSError:
        return 255, 4096


def _place_faults(root: str, name: str, folder: Path) -> list[Fault]:
    try:
        is_made = os.path.lexists(folder)
        place = nearest_folder(folder)
        is_folder = place.is_dir()
    except OSError as error:
        return [Fault(ROOT_KEY, root, f"cannot be looked at ({error.strerror})", "name another folder")]
    key, value = (NAME_KEY, name) if is_made else (ROOT_KEY, root)
    if not is_folder:
        what = "is a link that leads nowhere" if place.is_symlink() else "is a file"
        cure = "give the run another name" if is_made else "name a folder"
        return [Fault(key, value, f"{place} {what}", cure)]
    if not os.access(place, os.W_OK | os.X_OK):
        return [Fault(key, value, f"{place} cannot be written", "name a folder that can be, or change its rights")]
    return []
