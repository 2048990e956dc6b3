#!/usr/bin/env bash
# Runs a command on a Ray cluster of this machine alone, started in the way of launch/ray_cluster.sh and ended with the
# command. `megatron-rl train` by itself starts a Ray of its own; this is for several runs that share one, and for trying
# what a cluster will do.
#
#   bash launch/local.sh COMMAND ...
#   bash launch/local.sh .venv/bin/megatron-rl train configs/grpo-add2-1n1g.yaml
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ $# -eq 0 ]; then
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
exec bash "$root/launch/ray_cluster.sh" local -- "$@"
