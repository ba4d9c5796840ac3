#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# On a machine with a CUDA card and a packed SGLang: take and give of slots, then elastic against unhooked. Results are printed and
# written as they come. run_sglang.sh PACK_DIR WHEEL_DIR OUTDIR [PAIRS] [OPTIONS of engine_sglang.py ...]
set -uo pipefail
cd "$(dirname "$0")/../.."
pack=$1 wheels=$2 out=$3 pairs=${4:-4} started=$SECONDS
engine=$(mktemp -d)
cp "$pack"/* "$engine/" && bash "$engine/unpack.sh" || exit 1
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$engine/kv" "$wheels"/kvcached_elastic*.whl || exit 1
export PYTHONPATH=$engine/kv:$engine/site PYTHONUNBUFFERED=1
python3 -c "import importlib.metadata as m; print([e.name for e in m.entry_points(group='sglang.srt.plugins')])"
echo "set up in $((SECONDS - started)) s"
timeout 60 python3 benchmarks/sglang_bank.py --card cuda:0 --json "$out/sglang_bank.json" 2>&1 | tee "$out/sglang_bank.txt"
rest=$((545 - (SECONDS - started)))
timeout -k 5 "$rest" python3 benchmarks/engine_sglang.py --pairs "$pairs" --deadline-s $((rest - 10)) --json "$out/sglang.json" "${@:5}" 2>&1 |
  tee "$out/sglang.txt" | cut -c1-1500
