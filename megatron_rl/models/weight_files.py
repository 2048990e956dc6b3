"""The safetensors of a model folder by their headers: which tensors there are, and what is wrong with them.

Torch-free: `megatron-rl check` reads the headers too, a few kilobytes a file. All faults of a folder come at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from megatron_rl.messages import first_of
from megatron_rl.models.broken import broken_reason
from megatron_rl.models.config_json import inspect_critic
from megatron_rl.models.stacks import members_of

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16}
_DERIVED = (".rotary_emb.inv_freq", ".rotary_emb.original_inv_freq")
_TIED = "lm_head.weight"
_SHOWN = 20


@dataclass(frozen=True)
class Header:
    """What a file says of one tensor. dtype: as safetensors names it (F32, BF16, I8, ...). file: its name."""

    dtype: str
    shape: tuple[int, ...]
    file: str

    def num_bytes(self, rows: int | None = None) -> int:
        """Bytes of so many rows in the file; None: of the tensor. Types that are not known here have 8 bits."""
        num_rows, *rest = self.shape or (1,)
        return (num_rows if rows is None else rows) * math.prod(rest) * _BITS.get(self.dtype, 8) // 8


@dataclass(frozen=True)
class FolderFault:
    """Something wrong with a folder's files: the folder or a file of it, why, and what to do."""

    path: Path
    reason: str
    cure: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason} -- {self.cure}"


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a folder, by name. With faults they may not be all."""

    tensors: Mapping[str, Header]
    faults: list[FolderFault] = field(default_factory=list[FolderFault])


def read_weight_files(folder: Path) -> WeightFiles:
    """Headers of all weight files of a folder, those that its index names, and every fault of files and index.

    Layers that predict further tokens (ModelShape.further_layers) are left out. A stack of experts is here the tensors
    that tables have in its place (models/stacks.py).
    """
    files = _read_weight_files(folder)
    left_out = _further_layers(folder)
    tensors = {name: one for name, one in files.tensors.items() if not name.startswith(left_out)}
    return replace(files, tensors=dict(pair for name, one in tensors.items() for pair in _unstacked(name, one)))


def _unstacked(name: str, header: Header) -> Iterator[tuple[str, Header]]:
    members = members_of(name, header.shape)
    yield from ((member, replace(header, shape=shape)) for member, shape in members.items())
    if not members:
        yield name, header


def _further_layers(folder: Path) -> tuple[str, ...]:
    """Beginnings of the names of tensors that only predict further tokens."""
    shape, _, _ = inspect_critic(str(folder))
    if shape is None:
        return ()
    return tuple(f"model.layers.{shape.num_layers + number}." for number in range(shape.further_layers))


def _read_weight_files(folder: Path) -> WeightFiles:
    index = folder / INDEX_NAME
    if not index.is_file():
        if not (folder / SINGLE_NAME).is_file():
            return WeightFiles({}, [_no_weights(folder)])
        headers, faults = _headers(folder, [SINGLE_NAME])
        return WeightFiles(headers.get(SINGLE_NAME, {}), faults)
    try:
        file_of = _weight_map(index)
    except ValueError as error:
        return WeightFiles({}, [FolderFault(index, str(error), "copy it again")])
    names = sorted(set(file_of.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    headers, faults = _headers(folder, [name for name in names if name not in missing])
    if missing:
        reason = f"{len(missing)} of {len(names)} weight files are missing: {first_of(missing, _SHOWN)}"
        faults.insert(0, FolderFault(folder, reason, "copy them into this folder"))
    faults += _index_faults(index, file_of, headers)
    return WeightFiles({name: one for file in headers.values() for name, one in file.items()}, faults)


def is_derived(name: str) -> bool:
    """Whether a tensor is a buffer derived from config.json: older writers saved RoPE's frequencies."""
    return name.endswith(_DERIVED)


def dtype_fault(name: str, dtype: str) -> str | None:
    """Why a tensor of safetensors' `dtype` cannot be loaded; None if it can."""
    if dtype in FLOATS:
        return None
    return f"{name} is stored as {dtype}, which means nothing without its scales (give the weights in 16 or 32 bits)"


def tensor_faults(tensors: Mapping[str, Header], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Tensors that are missing, surplus, misshaped or of a dtype that cannot be loaded. expected: name -> shape.

    Left to whoever reads numbers: buffers derived from config.json, and the output matrix of a tied model.
    """
    known = {name for name in tensors if not is_derived(name) and (name != _TIED or name in expected)}
    missing = [name for name in expected if name not in known]
    surplus = sorted(name for name in known if name not in expected)
    faults = _prefix_faults(missing, surplus)
    if not faults:
        faults = [f"missing {name}" for name in missing] + [f"surplus {name}" for name in surplus]
    for name in sorted(expected.keys() & known):
        odd = dtype_fault(name, tensors[name].dtype)
        faults += [odd] if odd else []
        if tensors[name].shape != expected[name]:
            faults.append(f"{name} is {list(tensors[name].shape)}, config.json says {list(expected[name])}")
    return faults


def misfit(faults: list[str]) -> str:
    """Faults of tensors as one text."""
    return f"weights do not fit config.json: {first_of(faults, _SHOWN, '; ')}"


def _no_weights(folder: Path) -> FolderFault:
    reason, cure = f"the folder has neither {SINGLE_NAME} nor {INDEX_NAME}", "put the weights there"
    others = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.safetensors"))
    if any(path.suffix == ".bin" for path in others):
        reason += ", only PyTorch .bin files"
        cure = "convert them: load with transformers and save_pretrained, which writes safetensors"
    elif others:
        reason += f", only {first_of([path.name for path in others], 5)}"
        cure = f"copy {INDEX_NAME} too, or give the one file the name {SINGLE_NAME}"
    return FolderFault(folder, reason, cure)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file, by a folder's index. Raises ValueError that says why, where it is none."""
    try:
        content: object = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(broken_reason(index, f"no index of weights, it is not valid JSON: {error}")) from error
    table: object = cast("dict[str, object]", content).get("weight_map") if isinstance(content, dict) else None
    if not isinstance(table, dict):
        raise ValueError("no index of weights: it has no weight_map")
    names = {str(tensor): str(file) for tensor, file in cast("dict[object, object]", table).items()}
    outside = sorted({file for file in names.values() if Path(file).name != file})
    if outside or not names:
        reason = f"files outside of the folder: {first_of(outside, _SHOWN)}" if outside else "no tensor"
        raise ValueError(f"no index of weights: it names {reason}")
    return names


def _headers(folder: Path, names: list[str]) -> tuple[dict[str, dict[str, Header]], list[FolderFault]]:
    """(file -> its tensors, faults of files)."""
    headers, faults = dict[str, dict[str, Header]](), list[FolderFault]()
    for name in names:
        try:
            headers[name] = _read_header(folder / name)
        except ValueError as error:
            reason = broken_reason(folder / name, f"not a complete safetensors file: {error}")
            faults.append(FolderFault(folder / name, reason, "copy it again"))
    return headers, faults


def _read_header(path: Path) -> dict[str, Header]:
    """A file's tensors: eight bytes say how long a JSON text is, which says where each tensor lies behind it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"it ends after {size} bytes, within its header")
        content: object = json.loads(file.read(length))
    if not isinstance(content, dict):
        raise ValueError("its header holds no JSON object")
    headers, end = dict[str, Header](), 0
    for name, entry in cast("dict[str, dict[str, object]]", content).items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = str(entry["dtype"]), tuple(cast("list[int]", entry["shape"]))
            start, stop = cast("list[int]", entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"its header does not say what {name} is ({error!r})") from error
        if dtype in _BITS and (stop - start) * 8 != math.prod(shape) * _BITS[dtype]:
            raise ValueError(f"{name} has {stop - start} bytes, which are not {list(shape)} of {dtype}")
        headers[name], end = Header(dtype, shape, path.name), max(end, stop)
    if size != 8 + length + end:
        raise ValueError(f"it has {size} bytes, and its header says {8 + length + end}")
    return headers


def _index_faults(
    index: Path, file_of: Mapping[str, str], headers: Mapping[str, Mapping[str, Header]]
) -> Iterator[FolderFault]:
    """Where an index and the files that it names say different things. headers: of the files that could be read."""
    absent = [f"{name} in {file}" for name, file in file_of.items() if file in headers and name not in headers[file]]
    holders: dict[str, list[str]] = {}
    for file, tensors in headers.items():
        for name in tensors:
            holders.setdefault(name, []).append(file)
    unnamed = [f"{name} in {files[0]}" for name, files in holders.items() if name not in file_of]
    twice = [f"{name} in {' and '.join(files)}" for name, files in holders.items() if len(files) > 1]
    cure = "copy index and files again, all from one save"
    if absent:
        yield FolderFault(index, f"names tensors that are not in their files: {first_of(absent, _SHOWN)}", cure)
    if unnamed:
        yield FolderFault(index, f"does not name tensors of its files: {first_of(unnamed, _SHOWN)}", cure)
    if twice:
        yield FolderFault(index, f"names files that both hold a tensor: {first_of(twice, _SHOWN)}", cure)


def _prefix_faults(missing: list[str], surplus: list[str]) -> list[str]:
    """One fault for all names that lack a prefix, or have one too many; none if that does not explain the most."""
    wanted, given = set(missing), set(surplus)
    extra, lacking = dict[str, list[str]](), dict[str, list[str]]()
    for name in surplus:
        for at in (place + 1 for place, letter in enumerate(name) if letter == "."):
            if name[at:] in wanted:
                extra.setdefault(name[:at], []).append(name)
    for name in missing:
        for at in (place + 1 for place, letter in enumerate(name) if letter == "."):
            if name[at:] in given:
                lacking.setdefault(name[:at], []).append(name[at:])
    for table, how in ((extra, "begin with {!r}, which is too much"), (lacking, "lack {!r} at their beginning")):
        for prefix, names in table.items():
            if len(names) * 2 > len(missing):
                cure = "save the causal language model itself (transformers' AutoModelForCausalLM, save_pretrained)"
                rest = f"; {len(missing) - len(names)} more are missing" if len(missing) > len(names) else ""
                return [f"{len(names)} names {how.format(prefix)} ({names[0]}): {cure}{rest}"]
    return []
