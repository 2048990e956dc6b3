#!/usr/bin/env bash
# Runs the tests, after setting up .venv if needed. Arguments go to pytest:
#   bash launch/test.sh                  the default suite       bash launch/test.sh tests/unit -k config
#   bash launch/test.sh -m slow          the long tests          bash launch/test.sh -m gpu   (on a machine with a GPU)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/launch/install.sh"
cd "$root"
# shellcheck source=launch/env.sh
. launch/env.sh
echo "[test] pytest $*"
exec .venv/bin/python -m pytest "$@"
