#!/usr/bin/env bash
# This machine as a node of a Ray cluster, in the foreground. sbatch, ssh (launch/ray_cluster.sh) and the tests start nodes
# in this one way. However the script ends, SIGKILL included, what it started ends and its temporary folder goes.
#
#   bash launch/ray_node.sh head                               starts the head; says its address once it answers
#   bash launch/ray_node.sh worker ADDRESS                     joins the head at host:port, or @FILE that will hold that
#   bash launch/ray_node.sh wait ADDRESS NODES GPUS [SECONDS]  waits until the cluster has so many nodes and GPUs (600 s)
#   bash launch/ray_node.sh run ADDRESS COMMAND ...            runs a command with RAY_ADDRESS set; with RL_NODES (and
#                                                              RL_ALL_GPUS, RL_WAIT_S), once the cluster has them
#
# A worker that loses the head (a cut cable, a new head) joins again when it is back, for up to RL_REJOIN_S seconds (600).
# With --stdin before the verb, a header of shell lines up to one that says "#end" is read from standard input and taken as
# environment; later lines are names of signals for the command of `run`; the end of standard input ends the script.
#
#   RL_JOB           name of the job, default SLURM_JOB_ID: its port block is tried first
#   RL_NODE_IP       address of this node; default: of the interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, else of
#                    the one that leads to the head
#   RL_PORTS         first of this node's 500 ports; default: the first free block from 10500 to 31999
#   RL_CPUS, RL_GPUS what this node has; default SLURM_CPUS_ON_NODE, and what Ray counts
#   RL_ADDRESS_FILE  where the head leaves its address, for instance in a folder that all nodes share
#   RL_DASHBOARD=1   starts Ray's dashboard with the head, for `ray job submit` (needs ray[default])
#   RAY_AUTH_TOKEN   a secret of the job, without which nobody else can use the cluster; the same on all nodes
#   RAY_TMPDIR       parent of the temporary folder, short, on a local disk; default /tmp
#   PYTHON           interpreter; default .venv/bin/python of the checkout, else python3
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
first_block=10500
num_blocks=43
block_size=500
port_lock=""

say() { printf '[ray_node %s] %s\n' "${HOSTNAME:-?}" "$*"; }
fail() {
  say "$*" >&2
  exit 2
}
usage() {
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
}

read_header() {
  local line header=""
  while IFS= read -r line; do
    [ "$line" != "#end" ] || break
    header+=$line$'\n'
  done
  eval "$header"
}

settle_environment() {
  # shellcheck source=launch/env.sh
  . "$root/launch/env.sh"
  [ -z "${RL_FOLDER:-}" ] || cd "$RL_FOLDER" || fail "RL_FOLDER: $RL_FOLDER is not on this node: use a shared folder"
  if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x "$root/.venv/bin/python" ] || PYTHON=$root/.venv/bin/python
  fi
  export PYTHON PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
  # Only `ray start --head` may make these; a value of another cluster must not reach this one.
  unset RAY_ADDRESS RAY_GCS_SERVER_PORT
  ulimit -Sn "$(ulimit -Hn)"
  # A head takes the token of RAY_AUTH_TOKEN or of the home folder by itself, a worker and a question to it do not.
  if [ -z "${RAY_AUTH_MODE:-}" ] && { [ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ] || [ -s ~/.ray/auth_token ]; }; then
    export RAY_AUTH_MODE=token
  fi
}

# Takes the first free block of ports from the job's own on, for as long as the script lives.
take_ports() {
  local number start lock name=${RL_JOB:-${SLURM_JOB_ID:-$$}}
  if [ -n "${RL_PORTS:-}" ]; then
    ports=$RL_PORTS
    return
  fi
  start=$(($(printf '%s' "$name" | cksum | cut -d ' ' -f 1) % num_blocks))
  for ((number = 0; number < num_blocks; number++)); do
    ports=$((first_block + (start + number) % num_blocks * block_size))
    lock=/tmp/.rl-ports-$ports
    # The file of another user can be locked, though not written.
    (set -o noclobber && : >"$lock") 2>/dev/null || true
    exec 8<"$lock"
    # One who ends removes the file, so the locked one must still be there.
    if flock -n 8 && [ "/proc/$$/fd/8" -ef "$lock" ] && ports_free; then
      port_lock=$lock
      return
    fi
    exec 8<&-
  done
  fail "all port blocks from $first_block to $((first_block + num_blocks * block_size - 1)) are in use: set RL_PORTS"
}

# Whether nothing listens on the block's fixed ports.
ports_free() {
  "$PYTHON" -S -c '
import socket, sys
for port in range(int(sys.argv[1]), int(sys.argv[1]) + 10):
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("", port))
' "$ports" 2>/dev/null
}

# A janitor beside this script kills what carries the mark once the script is gone, however it went.
start_janitor() {
  local parent=${RAY_TMPDIR:-/tmp} pipe
  [ "${#parent}" -le 20 ] || fail "RAY_TMPDIR: $parent is too long: Ray's sockets below it allow 20 bytes, such as /tmp"
  folder=$(mktemp -d "$parent/rl-XXXXXXXX")
  MEGATRON_RL_RUN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
  pipe=$folder/.janitor
  mkfifo "$pipe"
  exec 7<>"$pipe"
  # Opened here: in a child that is late the open would wait for a writer that is gone.
  exec 6<"$pipe"
  setsid "$PYTHON" -I -S "$root/megatron_rl/cluster/janitor.py" "$MEGATRON_RL_RUN" "$folder" <&6 >/dev/null 6<&- 7>&- 8<&- &
  janitor=$!
  exec 6<&-
  export MEGATRON_RL_RUN TMPDIR=$folder
}

end_janitor() {
  exec 7>&-
  wait "$janitor" || true
  [ -z "$port_lock" ] || rm -f "$port_lock"
}

child=""
ending=""
heard=""
# on_signal NAME HEARD: the child hears a signal as well, under the second name.
on_signal() {
  heard=yes
  case $1 in TERM | INT | HUP) ending=$1 ;; esac
  [ -z "$child" ] || kill -"$2" "$child" 2>/dev/null || true
}
run_child() {
  local code
  [ -z "$ending" ] || return 143
  "$@" 7>&- 8<&- &
  child=$!
  while :; do
    code=0
    heard=""
    # A signal ends the wait, not the child.
    wait "$child" || code=$?
    [ -n "$heard" ] || break
  done
  child=""
  return "$code"
}

# Signals that come by standard input go to the command; its end ends the script.
watch_stdin() {
  local line
  while IFS= read -r line; do
    case $line in TERM | INT | HUP | USR1 | USR2) kill -"$line" "$$" 2>/dev/null || true ;; esac
  done
  kill -TERM "$$" 2>/dev/null || true
}

ray_start() {
  local tries=$1
  shift
  mkdir -p "$folder/$tries"
  local options=(--node-ip-address "$ip" --temp-dir "$folder/$tries" --disable-usage-stats --log-style record --log-color false
    --node-manager-port "$((ports + 1))" --object-manager-port "$((ports + 2))"
    --dashboard-agent-listen-port "$((ports + 3))" --dashboard-agent-grpc-port "$((ports + 4))"
    --runtime-env-agent-port "$((ports + 5))" --metrics-export-port "$((ports + 6))"
    --min-worker-port "$((ports + 10))" --max-worker-port "$((ports + block_size - 1))")
  local cpus=${RL_CPUS:-${SLURM_CPUS_ON_NODE:-}}
  [ -z "$cpus" ] || options+=(--num-cpus "$cpus")
  [ -z "${RL_GPUS:-}" ] || options+=(--num-gpus "$RL_GPUS")
  run_child "$PYTHON" -m ray.scripts.scripts start "$@" "${options[@]}" --block
}

own_ip() {
  ip=${RL_NODE_IP:-$("$PYTHON" -m megatron_rl.cluster.addresses ${1:+"$1"})} || exit 2
}

announce() {
  "$PYTHON" -m megatron_rl.cluster.readiness "$1" 1 0 120 >/dev/null || exit 1
  if [ -n "${RL_ADDRESS_FILE:-}" ]; then
    echo "$1" >"$RL_ADDRESS_FILE.$$"
    mv "$RL_ADDRESS_FILE.$$" "$RL_ADDRESS_FILE"
  fi
  say "head at $1"
}

start_head() {
  local address code=0 dashboard=false
  own_ip
  take_ports
  address=$ip:$ports
  case $ip in *:*) address=[$ip]:$ports ;; esac
  [ "${RL_DASHBOARD:-0}" = 0 ] || dashboard=true
  start_janitor
  announce "$address" 7>&- 8<&- &
  ray_start 0 --head --port "$ports" --ray-client-server-port "$((ports + 7))" \
    --include-dashboard "$dashboard" --dashboard-port "$((ports + 8))" || code=$?
  end_janitor
  [ -z "$ending" ] || exit 0
  say "the head ended by itself (code $code); Ray's words are above" >&2
  exit 1
}

join_head() {
  local address=$1 tries=0 code since
  since=$SECONDS
  case $address in
    @*)
      until [ -s "${address#@}" ]; do
        [ $((SECONDS - since)) -lt "${RL_REJOIN_S:-600}" ] || fail "${address#@} has not come within ${RL_REJOIN_S:-600} s"
        [ -z "$ending" ] || exit 0
        sleep 1
      done
      address=$(cat "${address#@}")
      ;;
  esac
  own_ip "$address"
  take_ports
  start_janitor
  while [ -z "$ending" ]; do
    # The head is asked first: Ray's own tries would last minutes and end in a page of words.
    if ! reachable "$address"; then
      if [ $((SECONDS - since)) -ge "${RL_REJOIN_S:-600}" ]; then
        say "no head at $address for ${RL_REJOIN_S:-600} s: giving up" >&2
        break
      fi
      run_child sleep 2 || true
      continue
    fi
    say "joining $address as $ip (ports $ports to $((ports + block_size - 1)))"
    code=0
    ray_start "$tries" --address "$address" || code=$?
    [ -n "$ending" ] || say "the node left the cluster (code $code); joining again when the head answers"
    tries=$((tries + 1))
    since=$SECONDS
    run_child sleep 1 || true
  done
  end_janitor
  [ -n "$ending" ]
}

reachable() {
  "$PYTHON" -S -c '
import socket, sys
host, _, port = sys.argv[1].rpartition(":")
socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
' "$1" 2>/dev/null
}

run_command() {
  local address=$1 code=0
  shift
  # A command with blanks and quotes comes whole in the header.
  [ -z "${RL_COMMAND:-}" ] || eval "set -- $RL_COMMAND"
  [ $# -gt 0 ] || usage
  if [ -n "${RL_NODES:-}" ]; then
    run_child "$PYTHON" -m megatron_rl.cluster.readiness "$address" "$RL_NODES" "${RL_ALL_GPUS:-0}" "${RL_WAIT_S:-600}" || exit 1
  fi
  export RAY_ADDRESS=$address
  # Where `ray job submit` finds the server of jobs.
  [ "${RL_DASHBOARD:-0}" = 0 ] || export RAY_API_SERVER_ADDRESS=http://127.0.0.1:$((${address##*:} + 8))
  # The package's own command is this checkout's, installed or not.
  [ "$1" != megatron-rl ] || set -- "$PYTHON" -m megatron_rl "${@:2}"
  run_child "$@" || code=$?
  exit "$code"
}

from_stdin=no
if [ "${1:-}" = --stdin ]; then
  from_stdin=yes
  shift
  read_header
fi
[ $# -gt 0 ] || usage
verb=$1
shift
settle_environment
if [ "$verb" = run ]; then
  for signal in TERM INT HUP USR1 USR2; do
    # shellcheck disable=SC2064
    trap "on_signal $signal $signal" "$signal"
  done
else
  for signal in TERM INT HUP; do
    # shellcheck disable=SC2064
    trap "on_signal $signal TERM" "$signal"
  done
  # Slurm sends these to every process of a step; they are for the run, and must not end its nodes.
  trap '' USR1 USR2
fi
if [ "$from_stdin" = yes ]; then
  watch_stdin <&0 &
  watcher=$!
  trap 'kill "$watcher" 2>/dev/null || true' EXIT
  exec </dev/null
fi
case $verb:$# in
  head:0) start_head ;;
  worker:1) join_head "$1" ;;
  wait:3 | wait:4) exec "$PYTHON" -m megatron_rl.cluster.readiness "$1" "$2" "$3" "${4:-600}" ;;
  run:*) run_command "$@" ;;
  *) usage ;;
esac
