#!/usr/bin/env bash
# Runs a command on a Ray cluster of bare machines: starts the head on the first host and a worker on each other one over
# ssh, waits until all nodes and GPUs are there, runs the command on the head with RAY_ADDRESS set, and ends everything.
# The checkout and the current folder must be at the same path on every host (a shared file system).
#
#   bash launch/ray_cluster.sh HOST ... -- COMMAND ...
#   bash launch/ray_cluster.sh gpu1 gpu2 -- .venv/bin/megatron-rl train my.yaml cluster.nnodes=2
#
# TERM, INT, HUP, USR1 and USR2 go to the command; the exit code is the command's. The variables of launch/ray_node.sh hold
# here too, for all hosts; those that the ranks take from the controller (NCCL_..., VLLM_..., see docs/cluster.md) go along.
#
#   RL_SSH       how to run a command on a host, default "ssh -o BatchMode=yes"; the host and the command come after it.
#                The host "local" is this machine and needs none.
#   RL_GPUS      GPUs of each host, which are waited for; default: what Ray counts, and only the hosts are waited for
#   RL_WAIT_S    longest wait for the hosts, default 600
#   RL_LOG_DIR   where each host's log goes, default logs/ray-JOB
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
node=$root/launch/ray_node.sh

say() { printf '[ray_cluster] %s\n' "$*"; }
fail() {
  say "$*" >&2
  exit 2
}
usage() {
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
}

hosts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  hosts+=("$1")
  shift
done
if [ "${#hosts[@]}" -eq 0 ] || [ $# -lt 2 ]; then usage; fi
shift
case $root in *[!A-Za-z0-9_./+-]*) fail "$root: a shell of another host would misread this path" ;; esac
read -ra ssh <<<"${RL_SSH:-ssh -o BatchMode=yes}"
export RL_JOB=${RL_JOB:-$(date +%m%d-%H%M%S)-$$}
logs=${RL_LOG_DIR:-logs/ray-$RL_JOB}
mkdir -p "$logs"
work=$(mktemp -d)
pids=()
pipes=()

# What every host is told before its verb: environment, folder, secret.
header() {
  local name
  while IFS= read -r name; do
    case $name in
      RL_SSH | RL_LOG_DIR | RL_WAIT_S | RL_NODE_IP | RL_ADDRESS_FILE | CUDA_VISIBLE_DEVICES) ;;
      RL_* | RAY_* | VLLM_* | NCCL_* | GLOO_* | OMP_* | TORCH* | PYTORCH_* | HF_* | TOKENIZERS_* | TRITON_* | CUDA_* | CUBLAS_* | \
        UCX_* | UCC_* | FI_* | OFI_* | NVSHMEM_* | MKL_* | KMP_* | LD_LIBRARY_PATH | XDG_CACHE_HOME | PYTHON | PYTHONPATH | WANDB_* | \
        TRAINER_* | MLFLOW_*)
        printf 'export %s=%q\n' "$name" "${!name}"
        ;;
    esac
  done < <(compgen -e)
  printf 'export RL_FOLDER=%q\n' "$PWD"
  if [ $# -gt 0 ]; then
    printf 'RL_NODES=%s RL_ALL_GPUS=%s\n' "${#hosts[@]}" "$((${RL_GPUS:-0} * ${#hosts[@]}))"
    printf 'RL_WAIT_S=%s RL_COMMAND=%q\n' "${RL_WAIT_S:-600}" "$(printf '%q ' "$@")"
  fi
  echo "#end"
}

# on NUMBER HOST OUTPUT VERB ...: starts a verb of ray_node.sh on a host. Its standard input is a pipe that this script
# holds: it ends with this script, however that goes.
on() {
  local number=$1 host=$2 output=$3 pipe prefix=("${ssh[@]}" "$2") closed
  shift 3
  [ "$host" != local ] || prefix=(env)
  pipe=$work/$number
  mkfifo "$pipe"
  exec {fd}<>"$pipe"
  # Opened here: in a child that is late the open would wait for a writer that is gone.
  exec {reader}<"$pipe"
  pipes[number]=$fd
  [ "$output" = - ] || : >"$output"
  header ${command[@]+"${command[@]}"} >&"$fd"
  (
    # Another host's pipe must not stay open in here.
    for closed in "${pipes[@]}" "$reader"; do exec {closed}>&-; done
    trap - TERM INT HUP USR1 USR2
    if [ "$output" = - ]; then exec "${prefix[@]}" bash "$node" --stdin "$@"; fi
    exec "${prefix[@]}" bash "$node" --stdin "$@" >"$output" 2>&1
  ) <&"$reader" &
  pids[number]=$!
  exec {reader}<&-
}

# shellcheck disable=SC2329
hang_up() {
  local number=$1 fd=${pipes[$1]:-}
  [ -n "$fd" ] || return 0
  exec {fd}>&-
  unset "pipes[$number]"
}

# shellcheck disable=SC2329
finish() {
  local number
  trap '' TERM INT HUP USR1 USR2
  # The command first, then the workers, the head last.
  for ((number = ${#hosts[@]}; number > 0; number--)); do hang_up "$number"; done
  for pid in "${pids[@]:1}"; do wait "$pid" 2>/dev/null || true; done
  hang_up 0
  for pid in "${pids[@]:0:1}"; do wait "$pid" 2>/dev/null || true; done
  rm -rf "$work"
}
trap finish EXIT

# shellcheck disable=SC2329
pass_on() {
  local fd=${pipes[$run]:-}
  heard=yes
  if [ -n "$fd" ]; then echo "$1" >&"$fd"; else exit 143; fi
}

command=()
run=${#hosts[@]}
heard=""
for signal in TERM INT HUP USR1 USR2; do
  # shellcheck disable=SC2064
  trap "pass_on $signal" "$signal"
done
if [ -z "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}${RAY_AUTH_MODE:-}" ]; then
  RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
  export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
fi

# Waits for the command; says it if a host ends before.
wait_for_command() {
  local code ended number
  while :; do
    code=0
    heard="" ended=""
    wait -n -p ended || code=$?
    # A signal ends the wait, not the command.
    [ -z "$heard" ] || continue
    [ "$ended" != "${pids[$run]}" ] || return "$code"
    for ((number = 0; number < ${#hosts[@]}; number++)); do
      [ "$ended" != "${pids[number]}" ] || say "${hosts[number]} has ended (code $code): $(tail -n 1 "$(log_of "$number")")"
    done
  done
}

log_of() { printf '%s/%02d-%s.log' "$logs" "$1" "${hosts[$1]}"; }

on 0 "${hosts[0]}" "$(log_of 0)" head
say "logs of the hosts: $logs"
address=""
for ((tries = 0; tries < ${RL_WAIT_S:-600}; tries++)); do
  address=$(sed -n 's/^\[ray_node .*\] head at //p' "$(log_of 0)")
  [ -z "$address" ] || break
  kill -0 "${pids[0]}" 2>/dev/null || fail "the head on ${hosts[0]} has ended: $(tail -n 3 "$(log_of 0)")"
  sleep 1
done
[ -n "$address" ] || fail "no head on ${hosts[0]} after ${RL_WAIT_S:-600} s: see $(log_of 0)"
say "head at $address on ${hosts[0]}"
for ((number = 1; number < ${#hosts[@]}; number++)); do
  on "$number" "${hosts[number]}" "$(log_of "$number")" worker "$address"
done
command=("$@")
on "$run" "${hosts[0]}" - run "$address"
code=0
wait_for_command || code=$?
say "the command ended with code $code"
exit "$code"
