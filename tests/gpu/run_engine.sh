#!/usr/bin/env bash
# On a machine with a CUDA card and a packed vLLM: elastic against unhooked. run_engine.sh PACK_DIR WHEEL_DIR OUTDIR [PAIRS]
set -uo pipefail
cd "$(dirname "$0")/../.."
pack=$1 wheels=$2 out=$3 pairs=${4:-5}
engine=$(mktemp -d); cp "$pack"/* "$engine/" && bash "$engine/unpack.sh" || exit 1
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$engine/kv" "$wheels"/kvcached_elastic*.whl
export PYTHONPATH=$engine/kv:$engine/site
python3 -c "import importlib.metadata as m; print([e.name for e in m.entry_points(group='vllm.platform_plugins')])"
timeout 540 python3 benchmarks/engine_vllm.py --pairs "$pairs" --json "$out/engine.json" 2>&1 | tee "$out/engine.log" | grep -v "WARNING\|^$" | tail -150
