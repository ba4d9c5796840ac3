#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# benchmarks/gateway.py where no package can be fetched: an environment of its own from a folder of wheels, then one run.
#
#   benchmarks/gateway.sh WHEELS [arguments of benchmarks/gateway.py]
#
# PYTHON: the interpreter that the wheels are for (python3.12). Run it in the repository's root: the gateway is the one in src.
set -eu
wheels=$1
shift
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3.12}" -m venv --without-pip "$place/venv"
# wheels of these packages are folders to be laid down; a machine without ensurepip can do that too
"$place/venv/bin/python" - "$wheels" <<'END'
import pathlib, sys, sysconfig, zipfile
for wheel in pathlib.Path(sys.argv[1]).glob("*.whl"):
    zipfile.ZipFile(wheel).extractall(sysconfig.get_path("purelib"))
END
PATH="$place/venv/bin:$PATH" PYTHONPATH="$PWD/src" python benchmarks/gateway.py "$@"
