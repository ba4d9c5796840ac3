#!/usr/bin/env bash
# On a machine with two CUDA cards and a packed vLLM: two workers, elastic against unhooked. run_ranks.sh PACK_DIR WHEEL_DIR OUTDIR [PAIRS]
set -uo pipefail
cd "$(dirname "$0")/../.."
pack=$1 wheels=$2 out=$3 pairs=${4:-3}
# Multicast between cards can put a host's cards out of service: it stays off whatever the libraries prefer.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
engine=$(mktemp -d); cp "$pack"/* "$engine/" && bash "$engine/unpack.sh" || exit 1
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$engine/kv" "$wheels"/kvcached_elastic*.whl
export PYTHONPATH=$engine/kv:$engine/site
python3 -c "import importlib.metadata as m; print([e.name for e in m.entry_points(group='vllm.platform_plugins')])"
timeout 280 python3 benchmarks/ranks_vllm.py --tensor 2 --pairs "$pairs" --json "$out/ranks.json" 2>&1 | tee "$out/ranks.log" | grep -v "WARNING\|^$" | tail -150
