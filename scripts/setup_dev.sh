#!/usr/bin/env bash
# Make the development environment: setup_dev.sh PYTHON VENV. Safe to run again.
set -euo pipefail
python=$1 venv=$2
cd "$(dirname "$0")/.."

if ! command -v g++ >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing g++ (needed to build the data plane)"
    apt-get update -qq && apt-get install -y -qq g++ >/dev/null
  else
    echo "setup: no C++ compiler found. Install one (Debian: apt-get install g++) and run this again." >&2
    exit 1
  fi
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  echo "setup: $python is older than 3.10. Name a newer one: make PYTHON=python3.11 ..." >&2
  exit 1
fi
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
  echo "setup: $python cannot make virtual environments. Debian: apt-get install python3-venv" >&2
  exit 1
fi
[ -x "$venv/bin/python" ] || { echo "setup: creating $venv"; "$python" -m venv "$venv"; }
echo "setup: installing the checkers and building the package (about a minute the first time)"
"$venv/bin/python" -m pip install -q --disable-pip-version-check "scikit-build-core>=0.10,<1" "cmake>=3.22" "ninja>=1.11"
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-build-isolation -e ".[dev,demo]"
echo "setup: done"
