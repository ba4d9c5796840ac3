# SPDX-License-Identifier: Apache-2.0
"""KV pools whose values are stored in another type than the model's. On a CPU SGLang runs none, so the pool is made beside an engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_harness.scenarios import start

if TYPE_CHECKING:
    from sglang_harness.scenarios import Case, Release

PAGE, HEADS, SIZE, LAYERS, SLOTS = 16, 2, 64, 2, 1024


def eight_bits(release: Release, case: Case) -> dict[str, Any]:
    """SGLang's own pool class, through the functions that are put around it; what is written on the padding page is read again."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    engine = start(release, case)
    seen: dict[str, Any] = {}
    for name, dtype in (("float8_e4m3fn", torch.float8_e4m3fn), ("float8_e5m2", torch.float8_e5m2), ("float16", torch.float16)):
        pool = MHATokenToKVPool(SLOTS, PAGE, dtype, HEADS, SIZE, LAYERS, "cpu", False)
        part = part_of(engine, pool)
        values = torch.linspace(-4, 4, PAGE * HEADS * SIZE).reshape(PAGE, HEADS, SIZE).to(dtype)
        for layer in range(LAYERS):
            pool.get_key_buffer(layer)[:PAGE] = values
            pool.get_value_buffer(layer)[:PAGE] = values.flip(0)
        read = [pool.get_key_buffer(layer)[:PAGE].float() for layer in range(LAYERS)]
        read += [pool.get_value_buffer(layer)[:PAGE].flip(0).float() for layer in range(LAYERS)]
        seen[name] = {
            "block_bytes": part.placement.geometry.block_bytes,
            "slot_bytes": part.placement.slot_bytes,
            "strides": sorted({buffer.stride(0) * buffer.element_size() for buffer in (*pool.k_buffer, *pool.v_buffer)}),
            "stored": str(pool.k_buffer[0].dtype),
            "same": all(torch.equal(buffer, values.float()) for buffer in read),
        }
        part.close()
        part.engine.parts.remove(part)
    return seen


def part_of(engine: Any, pool: Any) -> Any:
    """What the adapter has made for a pool: its tensors hold the mapper that their memory is from, which the part holds too."""
    import gc

    from kvcached.engines.sglang.memory import TokenMemory

    return next(part for part in gc.get_objects() if isinstance(part, TokenMemory) and part.kv_pool is pool)
