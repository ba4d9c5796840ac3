# SPDX-License-Identifier: Apache-2.0
"""Which KV layout for this GPU? A paged decode attention kernel, timed over both layouts, in plain memory and in an elastic arena.

    python benchmarks/layout.py                    about three minutes on an H200; uses most of the free memory
    python benchmarks/layout.py --quick            fewer rounds, 128 sequences only
    python benchmarks/layout.py --check            no GPU needed: the kernel in Triton's interpreter over a small host card

Each cell (layout x memory) is allocated, filled with random numbers, checked against torch and timed in turn, in an order that is reversed
every other round, so that neither heat nor order favours one. Blocks of a sequence are scattered at random. The figure is the median time
of one layer; `ratio` is against [layer][K|V][block] in plain memory, above 1 is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import exp, log, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcached.errors import KVCachedError
from kvcached.units import GIB, MIB, ceil_div, format_size
from kvcached.views.dlpack import DeviceType, DLPackView
from kvcached.views.layout import Layout, LayoutKind, LayoutSpec, choose_layout
from kvcached.vmm.api import ArenaConfig, Device, Run
from kvcached.vmm.native import open_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

if "--check" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is imported
try:
    import torch
    import triton
    import triton.language as tl
except ImportError as error:
    raise SystemExit(f"this benchmark needs torch and triton, as in an engine's environment: {error}") from error

PLAIN, ARENA = "plain", "arena"
CELLS = [(kind, memory) for memory in (PLAIN, ARENA) for kind in (LayoutKind.PER_LAYER, LayoutKind.INTERLEAVED)]
DRAWN = {LayoutKind.PER_LAYER: "[layer][K|V][block]", LayoutKind.INTERLEAVED: "[block][layer][K|V]"}
SAME = 0.01  # ratios nearer to 1 than this are no difference


@triton.jit
def decode_attention(
    q,  # [sequences, kv_heads, GROUP, HEAD_SIZE], dense
    k,  # one layer's keys: [blocks, BLOCK_TOKENS, kv_heads, HEAD_SIZE] by the strides below, innermost dense
    v,  # one layer's values, same strides
    out,  # as q
    tables,  # [sequences, table_stride] block ids, int32
    scale_log2,  # softmax scale x log2(e)
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    GROUP: tl.constexpr,  # query heads per KV head
    GROUP_PADDED: tl.constexpr,  # tl.dot wants 16 rows
    HEAD_SIZE: tl.constexpr,
    CONTEXT: tl.constexpr,  # tokens of every sequence
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program does one sequence and KV head: an online softmax over tiles of TILE tokens."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    dims = tl.arange(0, HEAD_SIZE)
    heads = tl.arange(0, GROUP_PADDED)
    q_rows = (sequence * tl.num_programs(1) + kv_head) * GROUP + heads
    q_offsets = q_rows[:, None] * HEAD_SIZE + dims[None, :]
    q_mask = (heads < GROUP)[:, None]
    query = tl.load(q + q_offsets, mask=q_mask, other=0.0)
    highest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    result = tl.zeros([GROUP_PADDED, HEAD_SIZE], tl.float32)
    for start in range(0, CONTEXT, TILE):
        tokens = start + tl.arange(0, TILE)
        inside = tokens < CONTEXT
        blocks = tl.load(tables + sequence * table_stride + tokens // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
        rows = blocks * block_stride + (tokens % BLOCK_TOKENS) * token_stride + kv_head * head_stride
        offsets = rows[:, None] + dims[None, :]
        keys = tl.load(k + offsets, mask=inside[:, None], other=0.0)
        values = tl.load(v + offsets, mask=inside[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(keys)) * scale_log2
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        decay = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * decay + tl.sum(weights, 1)
        result = result * decay[:, None] + tl.dot(weights.to(values.dtype), values)
        highest = higher
    tl.store(out + q_offsets, (result / total[:, None]).to(out.dtype.element_ty), mask=q_mask)


@dataclass(frozen=True)
class Shape:
    sequences: int
    context: int
    block_tokens: int
    layers: int
    kv_heads: int
    group: int
    head_size: int

    @property
    def blocks(self) -> int:
        return self.sequences * ceil_div(self.context, self.block_tokens)

    @property
    def kv_bytes_per_layer(self) -> int:
        """What one pass over one layer reads."""
        return self.sequences * self.context * 2 * self.kv_heads * self.head_size * 2

    def layout(self, kind: LayoutKind, granularity_bytes: int) -> Layout:
        spec = LayoutSpec(self.layers, 2, self.kv_heads, self.head_size, 2, self.block_tokens)
        return choose_layout(spec, kind, self.blocks, granularity_bytes, can_pad_stride=True)


@dataclass(frozen=True)
class Row:
    shape: Shape
    layout: str
    memory: str
    page_bytes: int
    release_step_bytes: int
    us_per_layer: float
    gb_per_s: float
    ratio: float  # to per layer in plain memory


class Machine:
    """Where the tensors live: a GPU, or for --check the host with Triton's interpreter."""

    def __init__(self, device: Device, torch_device: str) -> None:
        self.device = device
        self.torch_device = torch_device
        self.on_gpu = torch_device != "cpu"
        self.dtype = "bfloat16" if self.on_gpu else "float16"  # Triton's interpreter cannot multiply bfloat16
        self.granularity_bytes = device.info.granularity_bytes
        kinds = {"host": DeviceType.CPU, "cuda": DeviceType.CUDA, "hip": DeviceType.ROCM}
        self.dlpack_device = (kinds[device.info.backend], device.info.ordinal if self.on_gpu else 0)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def times_us(self, action: Callable[[], None], repeats: int) -> list[float]:
        """Time of each of `repeats` actions, by CUDA events; two more go before as warm-up."""
        if not self.on_gpu:
            start = time.perf_counter()
            action()
            return [(time.perf_counter() - start) * 1e6]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        for _ in range(2):
            action()
        marks[0].record()
        for mark in marks[1:]:
            action()
            mark.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) * 1000 for before, after in pairwise(marks)]

    @contextmanager
    def memory_for(self, memory: str, layout: Layout, run_pages: int) -> Iterator[Any]:
        """A flat tensor of two-byte elements over the whole range of `layout`."""
        geometry = layout.geometry
        elements = geometry.range_bytes // 2
        if memory == PLAIN:
            yield torch.empty(elements, dtype=getattr(torch, self.dtype), device=self.torch_device)
        else:
            arena = self.device.create_arena(ArenaConfig(geometry.page_bytes, geometry.pages, geometry.planes, geometry.plane_bytes))
            try:
                arena.map([Run(first, min(run_pages, geometry.pages - first)) for first in range(0, geometry.pages, run_pages)])
                view = DLPackView(arena.base_address, (elements,), (1,), self.dtype, *self.dlpack_device, arena)
                yield torch.from_dlpack(view)
            finally:
                self.synchronize()
                arena.close()
        if self.on_gpu:
            torch.cuda.empty_cache()  # the next cell needs the memory


class Cell:
    """One layout in one kind of memory, filled, with scattered block tables."""

    def __init__(self, shape: Shape, layout: Layout, flat: Any, seed: int) -> None:
        self.shape = shape
        self.scale = 1 / sqrt(shape.head_size)
        for part in flat.split(1 << 30):
            part.normal_()
        self.tensors = [[self._tensor(layout, flat, layer, buffer) for buffer in (0, 1)] for layer in range(shape.layers)]
        generator = torch.Generator().manual_seed(seed)
        pages = range(layout.geometry.pages)
        usable = torch.tensor([block for page in pages for block in layout.geometry.blocks_of(page)], dtype=torch.int32)
        scattered = usable[torch.randperm(len(usable), generator=generator)]
        order = torch.arange(shape.blocks) % len(scattered)  # where the layout loses ids, a few blocks serve two sequences
        self.tables = scattered[order].reshape(shape.sequences, -1).to(flat.device)
        q_shape = (shape.sequences, shape.kv_heads, shape.group, shape.head_size)
        self.q = torch.randn(q_shape, generator=generator).to(flat)  # the type and place of `flat`
        self.out = torch.empty_like(self.q)

    @staticmethod
    def _tensor(layout: Layout, flat: Any, layer: int, buffer: int) -> Any:
        tensor = layout.tensor(layer, buffer)
        return torch.as_strided(flat, tensor.shape, tensor.strides, tensor.offset_bytes // tensor.element_bytes)

    def run_layer(self, layer: int) -> None:
        shape = self.shape
        keys, values = self.tensors[layer]
        decode_attention[(shape.sequences, shape.kv_heads)](
            self.q, keys, values, self.out, self.tables, self.scale * 1.4426950408889634,
            keys.stride(0), keys.stride(1), keys.stride(2), self.tables.stride(0),
            GROUP=shape.group, GROUP_PADDED=max(16, triton.next_power_of_2(shape.group)), HEAD_SIZE=shape.head_size,
            CONTEXT=shape.context, BLOCK_TOKENS=shape.block_tokens, TILE=64, num_warps=4, num_stages=3,
        )  # fmt: skip

    def run(self) -> None:
        for layer in range(self.shape.layers):
            self.run_layer(layer)

    def worst_error(self) -> float:
        """Largest difference from torch's attention, over the first and last layer and sequence."""
        worst = 0.0
        for layer in {0, self.shape.layers - 1}:
            self.run_layer(layer)
            for sequence in {0, self.shape.sequences - 1}:
                wanted = self._reference(layer, sequence)
                worst = max(worst, (self.out[sequence].float() - wanted).abs().max().item())
        return worst

    def _reference(self, layer: int, sequence: int) -> Any:
        blocks = self.tables[sequence].long()
        keys, values = (part[blocks].flatten(0, 1)[: self.shape.context].float().transpose(0, 1) for part in self.tensors[layer])
        scores = self.q[sequence].float() @ keys.transpose(1, 2) * self.scale  # [kv_heads, group, context]
        return scores.softmax(-1) @ values


def measure(machine: Machine, shape: Shape, rounds: int, repeats: int, run_pages: int) -> list[Row]:
    times: dict[tuple[LayoutKind, str], list[float]] = {cell: [] for cell in CELLS}
    layouts = {kind: shape.layout(kind, machine.granularity_bytes) for kind in LayoutKind}
    for number in range(rounds):
        for kind, memory in CELLS if number % 2 == 0 else CELLS[::-1]:
            with machine.memory_for(memory, layouts[kind], run_pages) as flat:
                cell = Cell(shape, layouts[kind], flat, seed=number)
                error = cell.worst_error()
                if not error < 0.02:
                    raise SystemExit(f"{DRAWN[kind]} in {memory} memory: attention differs from torch's by {error}")
                times[kind, memory] += [time_us / shape.layers for time_us in machine.times_us(cell.run, repeats)]
                del cell, flat
    medians = {cell: statistics.median(values) for cell, values in times.items()}
    return [
        Row(
            shape=shape,
            layout=kind.value,
            memory=memory,
            page_bytes=layouts[kind].geometry.page_bytes,
            release_step_bytes=layouts[kind].geometry.release_step_bytes,
            us_per_layer=median,
            gb_per_s=shape.kv_bytes_per_layer / median / 1000,
            ratio=median / medians[LayoutKind.PER_LAYER, PLAIN],
        )
        for (kind, memory), median in medians.items()
    ]


def layers_that_fit(free_bytes: int, shape: Shape, most: int) -> int:
    """Half the layers until one copy of the cache fits: the more layers, the more the block stride is like a real model's."""
    while most > 1 and shape.kv_bytes_per_layer * most > 0.9 * free_bytes - GIB:
        most //= 2
    return most


def verdict(rows: list[Row]) -> str:
    """The better layout in arenas, by the geometric mean over all shapes."""

    def mean(kind: LayoutKind, memory: str) -> float:
        ratios = [row.ratio for row in rows if (row.layout, row.memory) == (kind.value, memory)]
        return exp(statistics.fmean(log(ratio) for ratio in ratios))

    interleaved, per_layer = mean(LayoutKind.INTERLEAVED, ARENA), mean(LayoutKind.PER_LAYER, ARENA)
    ratio = interleaved / per_layer
    shown = f"interleaved / per layer = {ratio:.3f} in arenas (against plain per layer {interleaved:.3f} and {per_layer:.3f})"
    if ratio > 1 + SAME:
        return f"use the per-layer layout on this GPU: {shown}"
    gain = "it is faster" if ratio < 1 - SAME else "it costs nothing, and the smaller release step comes free"
    return f"use the interleaved layout on this GPU: {gain}: {shown}"


def show(rows: list[Row]) -> None:
    for row in rows:
        shape = row.shape
        sizes = f"{format_size(row.page_bytes):>9} {format_size(row.release_step_bytes):>9}"
        print(
            f"{shape.sequences:4} x {shape.context:5} {shape.block_tokens:6} {shape.layers:7}  {DRAWN[LayoutKind(row.layout)]:20} "
            f"{row.memory:6} {sizes} {row.us_per_layer:10.1f} {row.gb_per_s:7.0f} {row.ratio:7.3f}",
            flush=True,
        )


HEADER = "seqs x tokens  block  layers  layout               memory      page   release   us/layer    GB/s   ratio"


def gpu_machine(ordinal: int) -> Machine:
    if not torch.cuda.is_available():
        raise SystemExit(
            "no GPU that torch can use: there is nothing to time here. On a machine with one, run this in an engine's environment; "
            "--check tries the kernel and the views without a GPU."
        )
    torch.cuda.set_device(ordinal)
    torch.empty(1, device="cuda")  # torch makes the primary context, which the arena then shares
    return Machine(open_device("hip" if torch.version.hip else "cuda", ordinal), f"cuda:{ordinal}")


def shapes_of(arguments: argparse.Namespace, machine: Machine) -> list[Shape]:
    shapes = []
    for sequences in arguments.sequences:
        for block_tokens in arguments.block_tokens:
            one = Shape(sequences, arguments.context, block_tokens, 1, arguments.kv_heads, arguments.group, arguments.head_size)
            layers = layers_that_fit(machine.device.memory()[0], one, arguments.layers) if machine.on_gpu else arguments.layers
            shapes.append(Shape(**{**asdict(one), "layers": layers}))
    return shapes


def describe(machine: Machine) -> dict[str, object]:
    info = machine.device.info
    sizes = {"total_bytes": info.total_bytes, "granularity_bytes": info.granularity_bytes, "driver": info.driver_version}
    return {"device": info.name, "uuid": info.uuid, **sizes, "torch": torch.__version__, "triton": triton.__version__}


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=int, default=0, help="number of the GPU, as torch counts (default 0)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--block-tokens", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--context", type=int, default=2048, help="tokens of each sequence (default 2048)")
    parser.add_argument("--layers", type=int, default=32, help="halved until the cache fits the free memory (default 32)")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head (default 4)")
    parser.add_argument("--head-size", type=int, choices=[64, 128, 256], default=128)
    parser.add_argument("--rounds", type=int, default=4, help="times that each cell is allocated and timed anew (default 4)")
    parser.add_argument("--repeats", type=int, default=15, help="timed passes over all layers per round (default 15)")
    parser.add_argument("--run-pages", type=int, default=1, help="pages per physical handle in the arena (default 1)")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--quick", action="store_true", help="128 sequences, 2 rounds")
    parser.add_argument("--check", action="store_true", help="no GPU: small shapes in Triton's interpreter, times mean nothing")
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.sequences, arguments.rounds = [128], 2
    if arguments.check:
        arguments.sequences, arguments.context, arguments.layers, arguments.kv_heads, arguments.rounds = [2], 100, 3, 2, 2
    return arguments


@contextmanager
def machine_of(arguments: argparse.Namespace) -> Iterator[Machine]:
    with tempfile.TemporaryDirectory() as folder:
        if arguments.check:
            host = open_device("host", 0, host_capacity_bytes=64 * MIB, host_granularity_bytes=64 << 10, host_dir=Path(folder))
            machine = Machine(host, "cpu")
        else:
            machine = gpu_machine(arguments.device)
        try:
            yield machine
        finally:
            machine.device.close()


def main(words: list[str]) -> None:
    arguments = parse(words)
    torch.manual_seed(0)
    with machine_of(arguments) as machine:
        about = describe(machine)
        print(", ".join(f"{name}: {value}" for name, value in about.items()))
        print(HEADER)
        rows: list[Row] = []
        for shape in shapes_of(arguments, machine):
            new = measure(machine, shape, arguments.rounds, arguments.repeats, arguments.run_pages)
            show(new)
            rows += new
        conclusion = "check passed: all cells agree with torch's attention" if arguments.check else verdict(rows)
        print(conclusion)
        if arguments.json:
            report = {"machine": about, "verdict": conclusion, "rows": [asdict(row) for row in rows]}
            arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KVCachedError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
