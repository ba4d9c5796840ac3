# SPDX-License-Identifier: Apache-2.0
"""What the gateway adds: the same load on a simulated engine, directly and through `kvcached serve`, in alternating pairs.

    python benchmarks/gateway.py                                  20 streams of 20 tokens a second, and 50 short requests a second
    python benchmarks/gateway.py --streams 200 --requests 200     more of both

Engine, gateway and load are three processes. An event of a stream carries the time at which the engine sent it, on the clock that all
processes of the machine share, so that its delay is measured for each token; a short request is measured from sending it to its last byte.
Prints delays at the median and at 95 % for both ways and what is between them, in milliseconds, and what the gateway's process used of a
core, which counts where the machine has other work too. `--json FILE`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

EVENT = re.compile(rb'"sent_ns": (\d+)')
WARM_UP_S = 1.0


# ---------------------------------------------------------------------- the engine


class Engine:
    """Streams at a set pace, and answers at once what is not streamed."""

    def __init__(self, tokens_per_s: float) -> None:
        self.pause_s = 1 / tokens_per_s

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/health", self.health), web.post("/v1/chat/completions", self.answer)])
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        given = await request.json()
        if not given.get("stream"):
            return web.json_response({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        for number in range(given["max_tokens"]):
            await asyncio.sleep(start_s + number * self.pause_s - loop.time())
            event = {"choices": [{"delta": {"content": "word"}}], "sent_ns": time.monotonic_ns()}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def run_engine(tokens_per_s: float, port: multiprocessing.Queue[int]) -> None:
    async def serve() -> None:
        runner = web.AppRunner(Engine(tokens_per_s).app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        port.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())


@contextmanager
def engine(tokens_per_s: float):
    port: multiprocessing.Queue[int] = multiprocessing.Queue()
    process = multiprocessing.Process(target=run_engine, args=(tokens_per_s, port), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port.get(timeout=60)}"
    finally:
        process.kill()
        process.join()


# ---------------------------------------------------------------------- the gateway


@contextmanager
def gateway(address: str, folder: Path):
    """Its process and its address."""
    file = folder / "models.yaml"
    chat = {"engine": "remote", "address": address, "concurrency": 100_000, "queue": 100_000}
    file.write_text(json.dumps({"listen": "127.0.0.1:0", "log_dir": str(folder / "logs"), "models": {"chat": chat}}))
    command = [sys.executable, "-m", "kvcached.cli.main", "serve", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        found = re.search(rb"http://\S+:\d+", process.stdout.readline())
        if found is None:
            raise SystemExit("the gateway did not start")
        yield process, found[0].decode()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def cpu_s(pid: int) -> float:
    """Seconds of processor time so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------------- the load


class Load:
    """Streams and short requests at one address for `seconds`; delays in milliseconds."""

    def __init__(self, address: str, options: argparse.Namespace) -> None:
        self.url = f"{address}/v1/chat/completions"
        self.options = options
        self.tokens_ms: list[float] = []
        self.requests_ms: list[float] = []

    async def run(self) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            begin_s = asyncio.get_running_loop().time() + WARM_UP_S
            streams = [self.stream(session, begin_s) for _ in range(self.options.streams)]
            await asyncio.gather(*streams, self.short_requests(session, begin_s))

    async def stream(self, session: aiohttp.ClientSession, begin_s: float) -> None:
        tokens = int((self.options.seconds + WARM_UP_S) * self.options.pace)
        given = {"model": "chat", "stream": True, "max_tokens": tokens, "messages": []}
        seen = 0
        async with session.post(self.url, json=given) as response:
            async for chunk in response.content.iter_any():
                now_ns, now_s = time.monotonic_ns(), asyncio.get_running_loop().time()
                events = [int(sent_ns) for sent_ns in EVENT.findall(chunk)]
                seen += len(events)
                if now_s >= begin_s:
                    self.tokens_ms += [(now_ns - sent_ns) / 1e6 for sent_ns in events]
        if seen != tokens:
            raise SystemExit(f"a stream of {tokens} tokens had {seen}")

    async def short_requests(self, session: aiohttp.ClientSession, begin_s: float) -> None:
        loop = asyncio.get_running_loop()
        asking: set[asyncio.Task[None]] = set()
        for number in range(int(self.options.seconds * self.options.requests)):
            await asyncio.sleep(begin_s + number / self.options.requests - loop.time())
            asking.add(loop.create_task(self.ask(session)))
        await asyncio.gather(*asking)

    async def ask(self, session: aiohttp.ClientSession) -> None:
        start_ns = time.monotonic_ns()
        async with session.post(self.url, json={"model": "chat", "messages": []}) as response:
            await response.read()
            if response.status != 200:
                raise SystemExit(f"a request was answered with {response.status}")
        self.requests_ms.append((time.monotonic_ns() - start_ns) / 1e6)


def quantiles(values: list[float]) -> tuple[float, float]:
    """Median and 95 %."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))]


def measure(address: str, options: argparse.Namespace) -> dict[str, float]:
    load = Load(address, options)
    asyncio.run(load.run())
    found = {"messages": float(len(load.tokens_ms) + len(load.requests_ms))}
    for name, values in (("token", load.tokens_ms), ("request", load.requests_ms)):
        if values:
            found[f"{name}_p50_ms"], found[f"{name}_p95_ms"] = quantiles(values)
    return found


def pairs(options: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """Both ways in turn; the one that begins changes from pair to pair."""
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        engine(options.pace) as direct,
        gateway(direct, Path(folder)) as (process, through),
    ):
        for number in range(options.pairs):
            row = {}
            for name, address in (("direct", direct), ("gateway", through))[:: 1 if number % 2 else -1]:
                used_s = cpu_s(process.pid)
                row[name] = measure(address, options)
                row[name]["gateway_cpu_s"] = cpu_s(process.pid) - used_s
            rows.append(row)
    return rows


def report(rows: list[dict[str, dict[str, float]]]) -> dict[str, object]:
    figures: dict[str, object] = {}
    for name in [key for key in rows[0]["direct"] if key.endswith("_ms")]:
        direct_ms, through_ms = (statistics.median(row[way][name] for row in rows) for way in ("direct", "gateway"))
        added = [row["gateway"][name] - row["direct"][name] for row in rows]
        figures[name] = {"direct": direct_ms, "gateway": through_ms, "added": added}
        spread = f"added {statistics.median(added):+8.2f}  ({min(added):+.2f} to {max(added):+.2f})"
        print(f"{name:<16} direct {direct_ms:8.2f}  gateway {through_ms:8.2f}  {spread}")
    cost_us = statistics.median(row["gateway"]["gateway_cpu_s"] / row["gateway"]["messages"] * 1e6 for row in rows)
    figures["gateway_cpu_us"] = cost_us
    print(f"the gateway's process used {cost_us:.0f} us of a core for each token or request")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=20, help="open at once (%(default)s)")
    parser.add_argument("--pace", type=float, default=20.0, help="tokens a second of each stream (%(default)s)")
    parser.add_argument("--requests", type=float, default=50.0, help="short ones a second (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one measurement (%(default)s)")
    parser.add_argument("--pairs", type=int, default=5, help="direct and through the gateway (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    rows = pairs(options)
    load = f"{options.streams} streams of {options.pace:g} tokens/s, {options.requests:g} requests/s, {options.pairs} pairs"
    print(f"{load}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    figures = report(rows)
    if options.json:
        options.json.write_text(json.dumps({"options": {**vars(options), "json": None}, "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
