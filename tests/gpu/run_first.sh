#!/usr/bin/env bash
# On a machine with a CUDA card: build, run the contract program with the real driver, then the benchmarks. run_first.sh OUTDIR
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-/tmp}
export PYTHONPATH=src:${PYTHONPATH:-}
cmake -S native -B /tmp/kvc -DCMAKE_BUILD_TYPE=Release -DKVCACHED_TESTS=ON >/dev/null && cmake --build /tmp/kvc --parallel 16 2>&1 | tail -2
cp "$(find /tmp/kvc src -name libkvcached.so | head -1)" src/kvcached/vmm/ 2>/dev/null
contract=$(find /tmp/kvc -name contract -type f | head -1)
timeout 120 "$contract" cuda; echo "contract: exit $?"
timeout 120 python3 benchmarks/pool.py --card cuda:0 --json "$out/pool.json"; echo "pool: exit $?"
timeout 60 python3 benchmarks/ledger.py; echo "ledger: exit $?"
timeout 240 python3 benchmarks/layout.py --json "$out/layout.json"; echo "layout: exit $?"
