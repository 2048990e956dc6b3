#!/usr/bin/env bash
# Runs the tests, after setting up .venv if needed. Arguments go to pytest:
#   bash launch/test.sh                  the default suite       bash launch/test.sh tests/unit -k config
#   bash launch/test.sh -m slow          the long tests          bash launch/test.sh -m gpu   (on a machine with a GPU)
# The default suite runs on two processes, file by file: many of its tests wait, for Ray above all. The longest files are
# in tests/e2e and come first. It keeps its slowest tests in tests/durations.txt and prints them at its end.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/launch/install.sh"
cd "$root"
# shellcheck source=launch/env.sh
. launch/env.sh
if [ $# -eq 0 ]; then set -- -n 2 --dist loadfile --no-loadscope-reorder --durations-file tests/durations.txt; fi
echo "[test] pytest $*"
exec .venv/bin/python -m pytest "$@"
