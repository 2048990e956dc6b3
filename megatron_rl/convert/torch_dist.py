"""Megatron's torch_dist checkpoints: files of torch.distributed.checkpoint with Megatron's keys (megatron_keys.py).

OUT/latest_checkpointed_iteration.txt     "release", as Megatron-LM calls weights without a state of training
OUT/release/                              .metadata, *.distcp, common.pt, metadata.json
OUT/huggingface/                          config.json, tokenizer: what the way back needs
"""

from __future__ import annotations

import io
import json
from collections.abc import Hashable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.convert.hf_folder import refuse_bad, write_companions
from megatron_rl.convert.megatron_keys import DistKey, extra_states, key_of, layers_alike, refuse_form, whole_params
from megatron_rl.convert.places import PlacedSource, Unit, places_of, units_of
from megatron_rl.convert.source import Conversion, precisions
from megatron_rl.convert.staging import Staging
from megatron_rl.errors import CheckpointError
from megatron_rl.messages import first_of
from megatron_rl.models import FAMILIES
from megatron_rl.models.layouts import Block
from megatron_rl.models.rules import LocalParam
from megatron_rl.models.shape import ModelShape
from megatron_rl.observe.progress import Advance
from megatron_rl.weights.dcp import METADATA, Chunk, SavedTensors, WrittenChunk, metadata_of, write_chunks
from megatron_rl.weights.marked_files import MarkedFile, naming, write_file
from megatron_rl.weights.safetensors import is_finite

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
COMPANIONS = "huggingface"
_FORM = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_FORM |= {"common_backend": "torch", "common_backend_version": 1}
_OTHERS = ("_extra_state", "optimizer.", "rng_state", "common_state", "rerun_state", "opt_param_scheduler")


def checkpoint_folder(path: Path) -> Path | None:
    """The folder with the files: `path`, or the iteration that its tracker names; None if it is no such checkpoint."""
    tracker = path / TRACKER
    if tracker.is_file():
        text = tracker.read_text(encoding="utf-8").strip()
        path = path / (text if text == RELEASE else f"iter_{int(text):07d}" if text.isdecimal() else text)
    return path if (path / METADATA).is_file() else None


class TorchDistSource(PlacedSource):
    """The weights of a torch_dist checkpoint. Raises CheckpointError with every tensor that is missing, surplus or of
    another shape; the padding of a vocabulary may be of any size.
    """

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        family = FAMILIES[shape.architecture]
        refuse_form(family)
        self._saved = SavedTensors(folder)
        shapes, dtypes = self._saved.shapes, self._saved.dtypes
        stem = family.embedding.megatron
        prefix = next(
            (name.removesuffix(stem) for name in shapes if name.endswith(stem) and "optimizer" not in name), ""
        )
        alike = layers_alike(shape, family) and not any(
            name.startswith(f"{prefix}decoder.layers.0.") for name in shapes
        )
        params = whole_params(shape, family)
        self._units: dict[Hashable, tuple[str, DistKey, Unit]] = {}
        used: set[str] = set()
        faults: list[str] = []
        of_unit: dict[Hashable, torch.dtype] = {}
        for param in params:
            for unit in units_of(param):
                key = key_of(param, unit, shape, alike, unit.expert)
                stored = [prefix + name for name in key.names if prefix + name in shapes]
                used.update(stored)
                if not stored:
                    faults.append(f"missing {prefix}{key.names[0]}")
                    continue
                fault = _misfit(shapes[stored[0]], key, unit, param.name in (stem, family.output.megatron))
                if fault:
                    faults.append(f"{stored[0]} {fault}")
                self._units[param.name, unit.expert] = stored[0], key, unit
                of_unit[param.name, unit.expert] = dtypes[stored[0]]
        faults += [f"surplus {name}" for name in shapes if name not in used and not _is_other(name, prefix)]
        if faults:
            shown = first_of(dict.fromkeys(faults), 20, "; ")
            raise CheckpointError(f"{folder}: the tensors are not those of config.json: {shown}")
        places = places_of(params, lambda param, unit: (param.name, unit.expert))
        super().__init__(places, {name: of_unit[of[0].unit] for name, of in places.items()})

    def unit(self, unit: Hashable) -> torch.Tensor:
        """See PlacedSource."""
        name, key, one = self._units[unit]
        sizes = self._saved.shapes[name][len(key.lead) :]
        # Rows of padding are not read.
        values = torch.empty((one.shape[0], *sizes[1:]), dtype=self._saved.dtypes[name])
        offsets = (*key.lead, *(0 for _ in sizes))
        self._saved.read([Chunk(name, offsets, values.view(*(1 for _ in key.lead), *values.shape))])
        return values

    def file(self, unit: Hashable) -> str:
        """See PlacedSource."""
        return str(self._saved.folder)


def _is_other(name: str, prefix: str) -> bool:
    """What a checkpoint has beside weights."""
    rest = name.removeprefix(prefix)
    return any(other in rest for other in _OTHERS)


def _misfit(stored: tuple[int, ...], key: DistKey, unit: Unit, padded: bool) -> str:
    wanted = (*key.lead_sizes, *unit.shape)
    if stored == wanted:
        return ""
    if padded and len(stored) == len(wanted) and stored[0] >= wanted[0] and stored[1:] == wanted[1:]:
        return ""
    return f"is {list(stored)}, config.json says {list(wanted)}"


@dataclass(frozen=True)
class PlannedChunk:
    """A rectangle of a checkpoint's tensor, and the blocks in it from top to bottom; without blocks it is padding."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class DistPlan:
    """Which rectangles go into which file."""

    files: Mapping[str, tuple[PlannedChunk, ...]]
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    objects: tuple[str, ...]
    num_bytes: int


def plan_torch_dist(
    conversion: Conversion,
    shards: list[tuple[str, list[LocalParam]]],
    dtype: torch.dtype | None,
    vocab_multiple: int,
    file_bytes: int,
    numbered: bool = False,
) -> DistPlan:
    """The files of a checkpoint. shards: of each rank of the layout (layout.py) its name and its parameters, with
    layers and experts by their numbers in the whole model. vocab_multiple: what the rows of embeddings are padded to.
    numbered: each layer has keys of its own although all are alike.
    """
    shape, family = conversion.shape, FAMILIES[conversion.shape.architecture]
    refuse_form(family)
    alike, vocab = layers_alike(shape, family) and not numbered, -(-shape.vocab_size // vocab_multiple) * vocab_multiple
    tops: dict[str, list[tuple[DistKey, int, Block]]] = {}
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    keys, kinds = list[DistKey](), precisions(conversion, dtype)
    for param in whole_params(shape, family):
        rows = vocab if param.name in (family.embedding.megatron, family.output.megatron) else 0
        kind = kinds[param.blocks[0].hf_name]
        of_units: dict[Hashable, DistKey] = {
            unit: key_of(param, unit, shape, alike, unit.expert) for unit in units_of(param)
        }
        for unit, key in zip(units_of(param), of_units.values(), strict=True):
            keys.append(key)
            for name in key.names:
                tensors[name] = (*key.lead_sizes, rows or unit.shape[0], *unit.shape[1:]), kind
        for name, places in places_of([param], lambda param, unit: unit).items():
            tops.setdefault(name, []).extend((of_units[place.unit], place.row, place.block) for place in places)
    files: dict[str, tuple[PlannedChunk, ...]] = {}
    total, done = 0, set[tuple[str, tuple[int, ...]]]()
    for rank, params in shards:
        chunks: list[PlannedChunk] = []
        for param in params:
            for chunk in _chunks(param, tops):
                if (chunk.name, chunk.offsets) not in done:
                    done.add((chunk.name, chunk.offsets))
                    chunks.append(chunk)
        sizes = [_bytes(chunk, tensors) for chunk in chunks]
        total += sum(sizes)
        for number, of_file in enumerate(_cut(chunks, sizes, file_bytes)):
            files[f"{RELEASE}/__{rank}_{number}.distcp"] = of_file
    if vocab > shape.vocab_size:
        names = [rule.megatron for rule in (family.embedding, family.output) if rule.megatron in tensors]
        padding = (vocab - shape.vocab_size, shape.hidden_size)
        files[f"{RELEASE}/__padding.distcp"] = tuple(
            PlannedChunk(name, (shape.vocab_size, 0), padding, ()) for name in names
        )
        total += sum(_bytes(chunk, tensors) for chunk in files[f"{RELEASE}/__padding.distcp"])
    return DistPlan(files, tensors, tuple(extra_states(iter(keys))), total)


def _bytes(chunk: PlannedChunk, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    return torch.Size(chunk.shape).numel() * tensors[chunk.name][1].itemsize


def _cut(chunks: list[PlannedChunk], sizes: list[int], most: int) -> Iterator[tuple[PlannedChunk, ...]]:
    of_file: list[PlannedChunk] = []
    total = 0
    for chunk, size in zip(chunks, sizes, strict=True):
        if of_file and total + size > most:
            yield tuple(of_file)
            of_file, total = [], 0
        of_file.append(chunk)
        total += size
    if of_file:
        yield tuple(of_file)


def _chunks(
    param: LocalParam,
    tops: Mapping[str, list[tuple[DistKey, int, Block]]],
) -> Iterator[PlannedChunk]:
    """The rectangles of a rank's parameter: blocks that follow each other in the checkpoint's tensor too are one."""
    run: list[Block] = []
    key, first, end, cols = None, 0, 0, 0
    for block in param.blocks:
        of, row, col = _top(block, tops[block.hf_name])
        if key is not None and (of, col) == (key, cols) and row == end:
            run.append(block)
            end += block.num_rows
            continue
        if key is not None:
            yield from _of_run(key, first, end, cols, run)
        key, first, end, cols, run = of, row, row + block.num_rows, col, [block]
    if key is not None:
        yield from _of_run(key, first, end, cols, run)


def _top(block: Block, places: list[tuple[DistKey, int, Block]]) -> tuple[DistKey, int, int]:
    """(key, first row, first column) of a block in the checkpoint's tensor."""
    for key, row, whole in places:
        if whole.rows[0] <= block.rows[0] and block.rows[1] <= whole.rows[1]:
            start = (whole.cols or (0, 0))[0]
            return key, row + block.rows[0] - whole.rows[0], (block.cols or (0, 0))[0] - start
    raise AssertionError(f"{block} lies in no parameter of the whole model")


def _of_run(
    key: DistKey,
    first: int,
    end: int,
    col: int,
    blocks: list[Block],
) -> Iterator[PlannedChunk]:
    cols = blocks[0].cols
    size = (end - first,) if cols is None else (end - first, cols[1] - cols[0])
    offsets = (first,) if cols is None else (first, col)
    for name in key.names:
        yield PlannedChunk(name, (*key.lead, *offsets), (*(1 for _ in key.lead), *size), tuple(blocks))


def write_torch_dist(conversion: Conversion, plan: DistPlan, staging: Staging, advance: Advance) -> None:
    """Write what is not there yet. advance: takes the bytes of each rectangle.

    Raises CheckpointError that names every tensor with numbers that are not finite, in the output's precision.
    """
    for name, chunks in plan.files.items():
        if name in staging.records:
            advance(sum(_bytes(chunk, plan.tensors) for chunk in chunks))
            continue
        bad: dict[str, None] = {}
        path = staging.partial(name)
        written, mark = write_chunks(path, _filled(conversion, plan, chunks, bad, advance))
        places = [[one.name, one.offsets, one.size, one.place] for one in written]
        staging.complete(name, mark, chunks=places, not_finite=sorted(bad))
    refuse_bad(conversion, staging)
    chunks = [
        WrittenChunk(name, tuple(offsets), tuple(size), Path(file).name, (place[0], place[1]))
        for file, record in staging.records.items()
        for name, offsets, size, place in record.get("chunks", ())
    ]
    objects = _write_objects(staging.folder / RELEASE / "__objects.distcp", plan.objects)
    folder = staging.folder / RELEASE
    write_file(folder / METADATA, metadata_of(plan.tensors, chunks, objects))
    common = io.BytesIO()
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, common)
    write_file(folder / "common.pt", common.getvalue())
    write_file(folder / "metadata.json", json.dumps(_FORM).encode())
    write_file(staging.folder / TRACKER, RELEASE.encode())
    write_companions(conversion, conversion.config, staging.folder / COMPANIONS)


def _filled(
    conversion: Conversion,
    plan: DistPlan,
    chunks: tuple[PlannedChunk, ...],
    bad: dict[str, None],
    advance: Advance,
) -> Iterator[Chunk]:
    """The rectangles with their numbers, one at a time. bad: takes the names of tensors that are not finite."""
    for chunk in chunks:
        values = torch.zeros(chunk.shape, dtype=plan.tensors[chunk.name][1])
        rows = values.view(chunk.shape[len(chunk.shape) - _dims(chunk) :])
        at = 0
        for block in chunk.blocks:
            piece = rows[at : at + block.num_rows].copy_(conversion.weights.read(block))
            if not is_finite(piece):
                bad[block.hf_name] = None
            at += block.num_rows
        yield Chunk(chunk.name, chunk.offsets, values)
        advance(values.numel() * values.element_size())


def _dims(chunk: PlannedChunk) -> int:
    """Dimensions of the parameter itself, without those of layers and experts."""
    return 2 if not chunk.blocks or chunk.blocks[0].cols is not None else 1


def _write_objects(path: Path, names: tuple[str, ...]) -> list[WrittenChunk]:
    """Objects that say nothing: what Megatron's linear layers save without FP8."""
    written: list[WrittenChunk] = []
    with naming(path, "written"), closing(MarkedFile(path)) as file:
        for name in names:
            first = file.tell()
            torch.save([None], file)
            written.append(WrittenChunk(name, (), (), path.name, (first, file.tell() - first)))
        file.finish()
    return written
