"""Seconds, MB/s and peak memory of a conversion, against loading and saving with transformers.

    python -m benchmarks.convert --model qwen2.5/1.5b --folder /tmp/convert-benchmark

Random bfloat16 weights of a published shape; `--model qwen2.5/7b --steps hf_to_mcore mcore_to_hf` has 15 GB of them and
needs the disk for twice as much. Each step is a process of its own. Its memory is what it has beyond that before the
step began: `own` is what the system cannot take away, `mapped` has the pages of files in it that were read. On a
machine that others use too, seconds of CPU time say more than seconds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.convert.source import row_pieces
from megatron_rl.models import FAMILIES
from megatron_rl.models.rules import hf_shapes
from megatron_rl.models.shape import ModelShape
from megatron_rl.weights.safetensors import INDEX_NAME
from megatron_rl.weights.shard_files import ShardFile, TensorEntry, cut_to_size, index_of, shard_names

STEPS = ("hf_to_mcore", "mcore_to_hf", "transformers")
SAMPLE_S = 0.01


def shape_named(name: str) -> ModelShape:
    """A published model's shape."""
    return next(family.known[name] for family in FAMILIES.values() if name in family.known)


def make(shape: ModelShape, folder: Path) -> None:
    """A folder with random weights, written piece by piece."""
    folder.mkdir(parents=True)
    family = FAMILIES[shape.architecture]
    entries = [TensorEntry(name, size, torch.bfloat16) for name, size in hf_shapes(shape, family).items()]
    of_files = cut_to_size(entries, 5_000_000_000)
    files = dict(zip(shard_names(len(of_files)), of_files, strict=True))
    for name, of_file in files.items():
        file = ShardFile(folder / name, of_file)
        for entry in file.entries:
            for block in row_pieces(entry.shape, entry.name, 8192):
                # Any bits are a number of bfloat16 if the exponent is not all ones.
                bits = torch.randint(0x3000, 0x4000, (block.num_rows, *entry.shape[1:]), dtype=torch.int16)
                file.append(entry, bits.view(torch.bfloat16))
        file.finish()
    if len(files) > 1:
        (folder / INDEX_NAME).write_bytes(index_of(files))
    config = {
        "architectures": [shape.architecture],
        "model_type": family.fields.model_type,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.ffn_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def _transformers(source: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(out)


def _tool(name: str) -> Callable[[Path, Path], Any]:
    from tools.convert import hf_to_mcore, mcore_to_hf

    tool = {"hf_to_mcore": hf_to_mcore, "mcore_to_hf": mcore_to_hf}[name]
    return lambda source, out: tool.main([str(source), str(out)])


def _resident() -> dict[str, int]:
    """Bytes of this process: own (anonymous), and with mapped files."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    sizes = {
        name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }
    return {"own": sizes["RssAnon"], "mapped": sizes["VmRSS"]}


@contextmanager
def _peak() -> Generator[dict[str, int]]:
    """The most memory that the block takes beyond what there was before; complete when it is over."""
    before, most, ends = _resident(), dict[str, int](), threading.Event()

    def watch() -> None:
        while not ends.wait(SAMPLE_S):
            for name, size in _resident().items():
                most[name] = max(most.get(name, 0), size - before[name])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        ends.set()
        thread.join()


def measure(step: str, source: Path, out: Path) -> None:
    """Run one step in this process and print a line of JSON."""
    work = _transformers if step == "transformers" else _tool(step)
    start, cpu = time.perf_counter(), time.process_time()
    with _peak() as peak:
        work(source, out)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    print(json.dumps({"step": step, "seconds": seconds, "cpu": cpu, "bytes": size, **peak}))


def main() -> None:
    """Make the model, measure each step, and remove what it wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5/1.5b")
    parser.add_argument("--layers", type=int, help="cut the model to so many; its largest tensors stay")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/convert-benchmark"))
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--steps", nargs="*", choices=STEPS, default=("transformers", "hf_to_mcore", "mcore_to_hf"))
    options = parser.parse_args()
    folder: Path = options.folder
    places = {
        "hf_to_mcore": (folder / "hf", folder / "mcore"),
        "mcore_to_hf": (folder / "mcore", folder / "back"),
        "transformers": (folder / "hf", folder / "transformers"),
    }
    if options.step:
        measure(options.step, *places[options.step])
        return
    shape = shape_named(options.model)
    shape = replace(shape, num_layers=options.layers or shape.num_layers)
    try:
        make(shape, folder / "hf")
        largest = max(torch.Size(one).numel() for one in hf_shapes(shape, FAMILIES[shape.architecture]).values()) * 2
        print(f"{options.model}, {shape.num_layers} layers: largest tensor {largest / 2**30:.2f} GiB", flush=True)
        for step in options.steps:
            if step == "mcore_to_hf":
                # The disk need not have room for all forms at once.
                shutil.rmtree(folder / "hf", ignore_errors=True)
            argv = [sys.executable, "-m", "benchmarks.convert", "--folder", str(folder), "--step", step]
            done = subprocess.run(argv, check=True, capture_output=True, text=True)
            facts = json.loads(done.stdout.splitlines()[-1])
            rates = [facts["bytes"] / facts[kind] / 1e6 for kind in ("seconds", "cpu")]
            of_time = (
                f"{facts['seconds']:8.1f} s {rates[0]:6.0f} MB/s {facts['cpu']:8.1f} s of CPU {rates[1]:6.0f} MB/s"
            )
            own, mapped = facts["own"] / 2**30, facts["mapped"] / 2**30
            of_memory = f"peak: own {own:.2f} GiB, with mapped files {mapped:.2f} GiB"
            print(f"{step:<12}{of_time}   {of_memory}", flush=True)
            if step == "transformers":
                shutil.rmtree(folder / "transformers", ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
