"""The command lines of tools/convert: what they share."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from megatron_rl.config.sections.actor import ParallelConfig
from megatron_rl.convert.hf_folder import HfPlan, compare, plan_hf, write_hf
from megatron_rl.convert.layout import ranks_of
from megatron_rl.convert.megatron_source import from_megatron
from megatron_rl.convert.source import Conversion, from_hf
from megatron_rl.convert.staging import Staging, facts_of
from megatron_rl.convert.torch_dist import (
    COMPANIONS,
    RELEASE,
    DistPlan,
    TorchDistSource,
    plan_torch_dist,
    write_torch_dist,
)
from megatron_rl.errors import MegatronRLError
from megatron_rl.models.config_json import read_model_shape
from megatron_rl.observe.progress import Advance, Progress
from megatron_rl.weights.dtypes import DTYPES
from megatron_rl.weights.safetensors import SafetensorsSource
from megatron_rl.weights.shard_files import TensorEntry

REFUSED = 2
"""Exit code if the source cannot be converted; the reasons are on stderr."""


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all conversions have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("source", type=Path, help="what is converted")
    made.add_argument("out", type=Path, help="a new folder; a conversion that was broken off goes on")
    made.add_argument(
        "--dtype", choices=("keep", *DTYPES), help="precision of the output; keep: of each tensor in the source"
    )
    made.add_argument("--shard-gb", type=_size, default=5.0, metavar="GB", help="largest size of a file (5)")
    made.add_argument("--verify", action="store_true", help="read the output again and compare it, bit for bit")
    made.add_argument("--dry-run", action="store_true", help="print tensors, bytes and files; write nothing")
    return made


def _size(text: str) -> float:
    size = float(text)
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return size


def add_layout(made: argparse.ArgumentParser) -> None:
    """Options of the Megatron layout that is written."""
    sizes = made.add_argument_group("layout: how files are cut; Megatron loads them on any other one too")
    for name in ("tp", "pp", "vpp", "ep"):
        sizes.add_argument(f"--{name}", type=int, default=1, metavar="N")
    sizes.add_argument("--etp", type=int, metavar="N", help="1 with ep above 1, else tp")
    sizes.add_argument("--first-stage-layers", type=int, metavar="N")
    sizes.add_argument("--last-stage-layers", type=int, metavar="N")
    made.add_argument(
        "--numbered-layers",
        action="store_true",
        help="keys with the number of each layer, as Megatron has them where moe_layer_freq is a list",
    )
    sizes.add_argument(
        "--vocab-multiple",
        type=int,
        default=128,
        metavar="N",
        help="the vocabulary is padded to a multiple of N x tp (128, as --make-vocab-size-divisible-by in Megatron-LM)",
    )


def layout_of(options: argparse.Namespace) -> ParallelConfig:
    """The layout that the options name."""
    return ParallelConfig(
        tp=options.tp,
        pp=options.pp,
        vpp=options.vpp,
        ep=options.ep,
        etp=options.etp,
        num_layers_in_first_pipeline_stage=options.first_stage_layers,
        num_layers_in_last_pipeline_stage=options.last_stage_layers,
    )


def run(
    verb: Callable[[argparse.Namespace, Progress], None], made: argparse.ArgumentParser, argv: Sequence[str] | None
) -> int:
    """Parse and convert; the exit code. What is refused is one message on stderr."""
    options = made.parse_args(argv)
    try:
        verb(options, Progress())
    except MegatronRLError as error:
        print(f"{made.prog}: {error}", file=sys.stderr)
        return REFUSED
    return 0


def hf_to_mcore(options: argparse.Namespace, progress: Progress) -> None:
    """A Hugging Face folder as a torch_dist checkpoint."""
    conversion = from_hf(options.source)
    layout = layout_of(options)
    shards = ranks_of(conversion.shape, layout)
    multiple = options.vocab_multiple * layout.tp
    dtype, size = _dtype(options, conversion), _bytes(options)
    plan = plan_torch_dist(conversion, shards, dtype, multiple, size, options.numbered_layers)
    files = {name: len(chunks) for name, chunks in plan.files.items()}
    _say(progress, conversion, files, plan.num_bytes)
    if options.dry_run:
        _show(progress, [(name, shape, str(dtype)) for name, (shape, dtype) in plan.tensors.items()], "Megatron key")
        return
    with _staged(options, conversion, progress) as staging:
        with progress.bar(f"write {options.out}, MiB", plan.num_bytes >> 20) as advance:
            write_torch_dist(conversion, plan, staging, in_mib(advance))
        if options.verify:
            _verify_dist(conversion, plan, staging, progress)


def to_hf(conversion: Conversion, options: argparse.Namespace, progress: Progress) -> None:
    """A Hugging Face folder of any model."""
    plan = plan_hf(conversion, _dtype(options, conversion), _bytes(options))
    _say(progress, conversion, {name: len(entries) for name, entries in plan.files.items()}, plan.num_bytes)
    if options.dry_run:
        entries = [entry for of_file in plan.files.values() for entry in of_file]
        _show(progress, [(entry.name, entry.shape, str(entry.dtype)) for entry in entries], "tensor")
        return
    with _staged(options, conversion, progress) as staging:
        with progress.bar(f"write {options.out}, MiB", plan.num_bytes >> 20) as advance:
            write_hf(conversion, plan, staging, in_mib(advance))
        if options.verify:
            _verify_hf(conversion, plan, staging, progress)


@contextlib.contextmanager
def _staged(options: argparse.Namespace, conversion: Conversion, progress: Progress) -> Iterator[Staging]:
    """The folder that the output is written to; it gets its name once all is written and compared."""
    staging = Staging(options.out, _job(options, conversion))
    yield staging
    staging.finish({"source": conversion.what})
    progress.say(f"{options.out}: written; conversion.json has sizes and checksums")


def mcore_to_hf(options: argparse.Namespace, progress: Progress) -> None:
    """A checkpoint of Megatron's side as a Hugging Face folder."""
    to_hf(from_megatron(options.source, options.hf), options, progress)


def gguf_to_hf(options: argparse.Namespace, progress: Progress) -> None:
    """A GGUF file as a Hugging Face folder."""
    from megatron_rl.convert.gguf_file import from_gguf

    to_hf(from_gguf(options.source, options.tokenizer), options, progress)


def in_mib(advance: Advance) -> Advance:
    """Counts bytes, and advances by whole MiB."""
    rest = 0

    def count(size: int) -> None:
        nonlocal rest
        whole, rest = divmod(rest + size, 1 << 20)
        if whole:
            advance(whole)

    return count


def _dtype(options: argparse.Namespace, conversion: Conversion) -> torch.dtype | None:
    """None: as the source says. keep overrides a source's choice only where it has one precision."""
    if options.dtype == "keep":
        kinds = {conversion.weights.dtype(name) for name in conversion.shapes}
        return next(iter(kinds)) if len(kinds) == 1 else None
    return DTYPES.get(options.dtype)


def _bytes(options: argparse.Namespace) -> int:
    return max(1, int(options.shard_gb * 1e9))


def _job(options: argparse.Namespace, conversion: Conversion) -> dict[str, object]:
    """What the output depends on."""
    unlike = ("out", "verify", "dry_run", "source", "hf", "tokenizer")
    settings = {name: value for name, value in vars(options).items() if name not in unlike}
    return {"what": conversion.what, "files": facts_of(conversion.files), **settings}


def _say(progress: Progress, conversion: Conversion, files: dict[str, int], num_bytes: int) -> None:
    progress.say(f"{conversion.what}: {conversion.shape.architecture}, {len(conversion.shapes)} tensors")
    for note in conversion.notes:
        progress.say(f"note: {note}")
    progress.say(f"output: {num_bytes / 1e9:,.3f} GB in {len(files)} files")


def _show(progress: Progress, rows: Sequence[tuple[str, tuple[int, ...], str]], title: str) -> None:
    table = Table(title, "shape", "precision", "bytes")
    for name, shape, dtype in rows:
        named = dtype.removeprefix("torch.")
        size = torch.Size(shape).numel() * DTYPES[named].itemsize if named in DTYPES else 8 * torch.Size(shape).numel()
        table.add_row(name, " x ".join(map(str, shape)), named, f"{size:,}")
    console = Console(width=140, soft_wrap=True)
    with console.capture() as capture:
        console.print(table)
    progress.say(capture.get())


def _verify_hf(conversion: Conversion, plan: HfPlan, staging: Staging, progress: Progress) -> None:
    written = SafetensorsSource(staging.folder)
    written.check(conversion.shapes)
    entries = [entry for of_file in plan.files.values() for entry in of_file]
    with progress.bar("verify, MiB", plan.num_bytes >> 20) as advance:
        compare(conversion, entries, written.read, in_mib(advance))


def _verify_dist(conversion: Conversion, plan: DistPlan, staging: Staging, progress: Progress) -> None:
    """By the reader of the way back, from the files alone."""
    written = TorchDistSource(staging.folder / RELEASE, read_model_shape(str(staging.folder / COMPANIONS)))
    entries = [TensorEntry(name, shape, written.dtype(name)) for name, shape in conversion.shapes.items()]
    with progress.bar("verify, MiB", sum(entry.num_bytes for entry in entries) >> 20) as advance:
        compare(conversion, entries, written.read, in_mib(advance))
