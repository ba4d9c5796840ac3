# SPDX-License-Identifier: Apache-2.0
"""Host time of taking and giving back slots of an SGLang allocator's bank, and whether any of it waits for the device.

    python benchmarks/sglang_bank.py --card cuda:0 --json result.json
    python benchmarks/sglang_bank.py --before ../other-tree/src        two trees, in processes that take turns: ratios

Medians of --rounds rounds, in microseconds. `neighbours`: the slots lie side by side, as after a start. `scattered`: every page is about
half full at random, so that the slots come in thousands of ranges. On a GPU ids come back asynchronously: `give` queues the copy,
`arrival` counts them when they are there; on the CPU `give` does both. Everything measured runs with torch's check on that raises when an
operation waits for the device.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SLOT_BYTES = 128 << 10
SLOTS = 65_536
GOAL_US = 100.0


def bank_on(pool: object, page_slots: int, device: object) -> object:
    """As the adapter makes it: the padding page is taken for ever."""
    from kvcached.engines.sglang.bank import PageBank
    from kvcached.engines.sglang.tree_pool import TreePool

    adopted = TreePool.adopt(pool, threading.RLock())
    adopted.grow(1)
    adopted.take_ids([0])
    adopted.pin_page_of(0)
    return PageBank(adopted, page_slots, device)


def timed_us(action: object) -> tuple[float, object]:
    start = time.perf_counter_ns()
    result = action()
    return (time.perf_counter_ns() - start) / 1000, result


def rounds_of(bank: object, device: object, slots: int, rounds: int) -> dict[str, float]:
    import torch

    on_gpu = device.type == "cuda"
    times: dict[str, list[float]] = {"take": [], "give": [], "arrival": []}
    gc.collect()
    gc.disable()
    for _ in range(rounds + 5):
        with bank.pool.lock, no_waiting(on_gpu):
            us, ids = timed_us(lambda: bank.take(slots))
            times["take"].append(us)
            us, _ = timed_us(lambda ids=ids: bank.give(ids))
            times["give"].append(us)
        if on_gpu:
            torch.cuda.synchronize()
        with bank.pool.lock, no_waiting(on_gpu):
            times["arrival"].append(timed_us(bank.settle)[0])
    gc.enable()
    return {name: round(statistics.median(values[5:]), 1) for name, values in times.items()}


@contextlib.contextmanager
def no_waiting(on_gpu: bool):
    """An operation that waits for the device raises within."""
    import torch

    if on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")


def check_can_fail(device: object) -> bool:
    import torch

    try:
        with no_waiting(True):
            torch.arange(8, device=device).cpu()
    except RuntimeError:
        return True
    return False


def scatter(bank: object, slots: int, device: object) -> object:
    """Own all that is mapped, and give back a random half. Returns what is still owned."""
    import torch

    with bank.pool.lock:
        ids = bank.take(4 * slots)
        chosen = torch.tensor(random.Random(1).sample(range(4 * slots), 2 * slots), device=device)
        kept = torch.ones(4 * slots, dtype=torch.bool, device=device)
        kept[chosen] = False
        bank.give(ids[chosen])
        bank.settle(wait=True)
    return ids[kept]


def measure(card_name: str, slots: int, rounds: int) -> dict[str, object]:
    import torch

    import kvcached

    device = torch.device("cuda", 0) if card_name.startswith("cuda") else torch.device("cpu")
    result: dict[str, object] = {"card": card_name, "slots": slots}
    with tempfile.TemporaryDirectory() as folder:
        host = {} if device.type == "cuda" else {"host_capacity_bytes": 16 << 30, "host_dir": Path(folder) / "host"}  # never touched
        settings = {"run_dir": Path(folder) / "run", "prealloc_enabled": False, "idle_trim_s": 3600, **host}
        with kvcached.open_card(card_name, **settings) as card, card.open_pool("bank", block_bytes=SLOT_BYTES, blocks=SLOTS) as pool:
            bank = bank_on(pool._pool, 1, device)
            result["blocks_a_page"] = bank.pool.geometry.max_blocks_per_page
            with bank.pool.lock:
                bank.pool.grow(4 * slots + 1024)
            result["neighbours"] = rounds_of(bank, device, slots, rounds)
            keep = scatter(bank, slots, device)
            result["scattered"] = rounds_of(bank, device, slots, rounds)
            with bank.pool.lock:
                bank.give(keep)
                bank.settle(wait=True)
                result["problems"] = bank.problems()
    if device.type == "cuda":
        result["waits_for_the_device"] = 0  # or it would have raised
        result["the_check_sees_a_wait"] = check_can_fail(device)
    return result


def show(result: dict[str, object]) -> None:
    for kind in ("neighbours", "scattered"):
        times = result[kind]
        give = times["give"] + times["arrival"]
        print(f"{result['slots']} slots, {kind}: take {times['take']} us, give {times['give']} us + arrival {times['arrival']} us "
              f"(goal {GOAL_US:.0f}): {'met' if max(times['take'], give) <= GOAL_US else 'missed'}", flush=True)  # fmt: skip
    print(json.dumps({key: value for key, value in result.items() if key not in ("neighbours", "scattered")}), flush=True)


def against(before: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """Neighbours in time: each pair's ratio counts, so that other work on the machine touches both."""
    here = Path(__file__).resolve().parents[1] / "src"
    ratios: dict[str, list[float]] = {}
    pairs = []
    for turn in range(arguments.turns):
        sources = [here, before] if turn % 2 else [before, here]
        runs = {str(source): once(source, arguments) for source in sources}
        old, new = runs[str(before)], runs[str(here)]
        pairs.append({"before": old, "after": new})
        for kind in ("neighbours", "scattered"):
            ratios.setdefault(f"{kind} take", []).append(old[kind]["take"] / new[kind]["take"])
            both = [run[kind]["give"] + run[kind]["arrival"] for run in (old, new)]
            ratios.setdefault(f"{kind} give", []).append(both[0] / both[1])
    for name, values in ratios.items():
        print(f"{name}: before / after {statistics.median(values):.2f} (from {min(values):.2f} to {max(values):.2f})", flush=True)
    return {"ratios": ratios, "pairs": pairs}


def once(source: Path, arguments: argparse.Namespace) -> dict[str, object]:
    sizes = ["--slots", str(arguments.slots), "--rounds", str(arguments.rounds)]
    command = [sys.executable, __file__, "--card", arguments.card, *sizes, "--source", str(source)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        subprocess.run([*command, "--json", str(output)], check=True, timeout=300, stdout=subprocess.DEVNULL)
        result: dict[str, object] = json.loads(output.read_text())
    return result


def use(source: Path) -> None:
    """Import the package from there, whatever is installed."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
    sys.path.insert(0, str(source))
    import kvcached

    if Path(kvcached.__file__).parent != source / "kvcached":
        raise SystemExit(f"{kvcached.__file__} is not of {source}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", default="host:0")
    parser.add_argument("--slots", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--before", type=Path, help="source folder of a tree to compare with")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.source:
        use(arguments.source)
    if arguments.before:
        result = against(arguments.before.resolve(), arguments)
    else:
        result = measure(arguments.card, arguments.slots, arguments.rounds)
        show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
