"""PPO on the quick start's task: greedy held-out accuracy before and after, and peak memory, with both kinds of critic.

    python benchmarks/ppo_quickstart.py [--seeds 0 1 2] [--folder runs/ppo-quickstart] [key=value ...]

For each seed a model is trained by SFT (configs/sft-add2-1n1g.yaml) and then by PPO twice from there: with a critic of
its own, and with critic.share_backbone=true. key=value goes to the PPO runs (trainer.total_training_steps=20, say).
Memory is the largest proportional set size (shared pages counted once) of the run's processes, four times a second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parents[1]
if str(REPO) not in sys.path:
    sys.path.insert(0, str(REPO))

from examples.quickstart.make_data import make  # noqa: E402  the script runs from anywhere


def _train(config: str, folder: Path, name: str, overrides: Sequence[str]) -> dict[str, float]:
    """Run to the end; seconds and peak memory. Raises CalledProcessError where it fails."""
    own = [f"trainer.default_local_dir={folder}", f"trainer.experiment_name={name}", "cluster.backend=inline"]
    own.append("trainer.overwrite=replace")
    command = [sys.executable, "-m", "megatron_rl", "train", str(REPO / "configs" / config), *own, *overrides]
    start, peak = time.perf_counter(), 0
    child = subprocess.Popen(command, cwd=REPO)
    root = psutil.Process(child.pid)
    while child.poll() is None:
        total = 0
        try:
            for process in (root, *root.children(recursive=True)):
                total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass  # one ended between the two looks: this one counts for less
        peak = max(peak, total)
        time.sleep(0.25)
    if child.wait() != 0:
        raise subprocess.CalledProcessError(child.returncode, command)
    return {"seconds": time.perf_counter() - start, "peak_gib": peak / 2**30}


def train_sft(data: Path, seed: int) -> None:
    """The model that PPO starts from, beside `data` (a folder made by make_data.py); one that is there is kept."""
    if (data.parent / f"sft{seed}" / "final").is_dir():
        return
    files = [f"data.train_files={data / 'sft_train.parquet'}", "data.val_files=[]", "trainer.test_freq=0"]
    own = [f"model.path={data / 'model'}", f"trainer.seed={seed}"]
    _train("sft-add2-1n1g.yaml", data.parent, f"sft{seed}", [*own, *files])


def train_ppo(data: Path, seed: int, shared: bool, overrides: Sequence[str] = ()) -> dict[str, float]:
    """One PPO run from that model; accuracy before and after, and the run's own figures."""
    name = f"ppo{seed}-{'shared' if shared else 'own'}"
    files = [f"data.train_files={data / 'train.parquet'}", f"data.val_files={data / 'val.parquet'}"]
    own = [f"model.path={data.parent / f'sft{seed}' / 'final'}", f"trainer.seed={seed}"]
    kind = [f"critic.share_backbone={str(shared).lower()}"]
    figures = _train("ppo-add2-1n1g.yaml", data.parent, name, [*own, *files, *kind, *overrides])
    rows = [json.loads(line) for line in (data.parent / name / "metrics.jsonl").read_text().splitlines()]
    accuracy = [row["val/accuracy"] for row in rows if "val/accuracy" in row]
    last = [row["critic/explained_variance"] for row in rows[1:][-5:]]
    figures |= {"before": accuracy[0], "after": accuracy[-1], "rise": accuracy[-1] - accuracy[0]}
    return figures | {"explained_variance": sum(last) / len(last)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", default=str(REPO / "runs" / "ppo-quickstart"))
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    data = Path(options.folder).resolve() / "data"
    make(data, seed=0)
    results = []
    for seed in options.seeds:
        train_sft(data, seed)
        for shared in (False, True):
            found = train_ppo(data, seed, shared, options.overrides)
            results.append({"seed": seed, "critic": "shared" if shared else "own"} | found)
    print("".join(f"{name:>20}" for name in results[0]))
    for result in results:
        print("".join(f"{value:>20.3f}" if isinstance(value, float) else f"{value:>20}" for value in result.values()))


if __name__ == "__main__":
    main()
