#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Build libkvcached.so into src/kvcached/vmm, where Python finds it in a source tree. Needs cmake and a C++17 compiler.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
cmake -S "$root/native" -B "$root/build/dev" -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$root/build/dev" --parallel 2
