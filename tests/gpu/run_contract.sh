#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# On a machine with a CUDA (or, with the argument hip, a ROCm) card: build libkvcached.so and the contract program with g++
# alone, run the program with the real driver, then measure the driver calls. run_contract.sh [cuda|hip] [OUTDIR]
set -euo pipefail
cd "$(dirname "$0")/../.."
backend=${1:-cuda}
out=${2:-/tmp}
build=${TMPDIR:-/tmp}/kvcached-contract
mkdir -p "$build"
flags=(-std=c++17 -O2 -Wall -Wextra -Werror -D_GNU_SOURCE -fPIC -fvisibility=hidden -Inative/include -pthread)
g++ "${flags[@]}" -shared native/src/*.cpp -Wl,--version-script=native/kvcached.map -static-libstdc++ -static-libgcc -ldl \
  -o src/kvcached/vmm/libkvcached.so
mapfile -t program < <(ls native/src/*.cpp native/tests/*.cpp | grep -v stub_)
g++ "${flags[@]}" "${program[@]}" -ldl -o "$build/contract"
timeout 300 "$build/contract" "$backend"
PYTHONPATH=src timeout 200 python3 benchmarks/vmm_calls.py "$backend:0" --json "$out/vmm_calls.json"
