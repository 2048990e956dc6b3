#!/usr/bin/env bash
# A tiny language model learns to add: first from examples (SFT), then by reinforcement (GRPO), through Megatron-Core,
# vLLM and Ray, as a large one would on a cluster. Sets up .venv if needed; some minutes on two cores.
#
#   bash launch/quickstart.sh [--fresh] [key=value ...]
#
#   key=value   goes to both runs, for instance trainer.seed=1; the last quick start's files are replaced, other files
#               in its folders stay
#   --fresh     trains the SFT model again; without it, one that was trained with the same settings is used again
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=runs/quickstart
sft_config=configs/sft-add2-1n1g.yaml
grpo_config=configs/grpo-add2-1n1g.yaml

say() { printf '[quickstart] %s\n' "$*"; }
usage() {
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
  exit "$1"
}

fresh=no
overrides=()
for argument in "$@"; do
  case $argument in
    --fresh) fresh=yes ;;
    -h | --help) usage 0 ;;
    trainer.default_local_dir=* | trainer.experiment_name=*)
      say "$argument: the quick start's folders are fixed, since GRPO starts from what SFT wrote;" \
        "use megatron-rl train with a config of your own instead" >&2
      exit 2
      ;;
    *=*) overrides+=("$argument") ;;
    *)
      say "$argument: not understood" >&2
      usage 2 >&2
      ;;
  esac
done

# step WHAT COMMAND...: runs the command and says how long it took.
step() {
  local what=$1 started=$SECONDS
  shift
  say "$what: $*"
  if ! "$@"; then
    say "$what FAILED after $((SECONDS - started)) s; the reason is above" >&2
    exit 1
  fi
  say "$what: $((SECONDS - started)) s"
}

# What an SFT run depends on; a finished one keeps it beside its results.
sft_inputs() {
  cat "$sft_config" examples/quickstart/make_data.py | cksum
  printf '%s\n' ${overrides[@]+"${overrides[@]}"}
}

train_sft() {
  local record=$out/sft/.quickstart
  if [ "$fresh" = no ] && [ -f "$record" ] && [ "$(cat "$record")" = "$(sft_inputs)" ]; then
    say "SFT: using the finished run in $out/sft (--fresh trains it again)"
    return
  fi
  rm -f "$record"
  step SFT .venv/bin/megatron-rl train "$sft_config" trainer.overwrite=replace ${overrides[@]+"${overrides[@]}"}
  sft_inputs >"$record"
}

train_grpo() {
  step GRPO .venv/bin/megatron-rl train "$grpo_config" trainer.overwrite=replace ${overrides[@]+"${overrides[@]}"}
}

show_accuracy() {
  .venv/bin/python - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path


def accuracies(run):
    lines = (Path(sys.argv[1]) / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [row["val/accuracy"] for row in map(json.loads, lines) if "val/accuracy" in row]
    if not found:
        sys.exit(f"[quickstart] {run}/metrics.jsonl holds no val/accuracy: was validation turned off?")
    return found


sft, grpo = accuracies("sft"), accuracies("grpo")
print("[quickstart] greedy accuracy on held-out sums")
print(f"[quickstart]   after SFT     {sft[-1]:.3f}")
print(f"[quickstart]   before GRPO   {grpo[0]:.3f}")
print(f"[quickstart]   after GRPO    {grpo[-1]:.3f}   ({grpo[-1] - grpo[0]:+.3f})")
PYTHON
}

bash "$root/launch/install.sh"
SECONDS=0
cd "$root"
# shellcheck source=launch/env.sh
. launch/env.sh
step Data .venv/bin/python examples/quickstart/make_data.py "$out/data"
train_sft
train_grpo
show_accuracy
say "runs: $out/sft and $out/grpo (metrics.jsonl, curves, sample rollouts, weights in Hugging Face form)"
say "done in $SECONDS s, install apart"
