# SPDX-License-Identifier: Apache-2.0
"""What the gateway adds: the same load on simulated engines, directly and through `kvcached serve`, in alternating pairs.

    python benchmarks/gateway.py                                    2,000 streams of 20 tokens a second and 1,000 short requests a second;
                                                                    a tenth of that on fewer than eight cores
    python benchmarks/gateway.py --streams 200 --requests 100       another load
    python benchmarks/gateway.py --processes 2 --saturate           several processes of the gateway; then more load until it is too much
    python benchmarks/gateway.py --proxy litellm=/opt/litellm/bin/python --proxy kvcached        the same load on LiteLLM's proxy too

Engines, load and gateway are processes of their own; with eight cores or more the gateway has the first two for itself. A token carries the
time at which its engine sent it, so that its delay is measured; a short request is measured from sending it to its last byte. Prints delays
at the median and at 95 % both ways and what is between them, in milliseconds; what the proxy used of cores and memory, with all its
processes; and what was lost. Saturation: the last load at which no more than `--most-ms` are added at 95 %, and nothing comes late.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway_load import GRACE_S, Plan, Seen, engines, start_load

ENOUGH_CORES = 8
STEPS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
START_S = 120.0
OPEN_TO_ALL = {"general_settings": {"dangerously_permit_weak_or_unset_master_key": True}}
"""what LiteLLM's proxy calls an address that needs no key"""


@dataclass
class Cores:
    """Where what runs; None: anywhere."""

    proxy: set[int] | None
    others: list[set[int] | None]

    @classmethod
    def of(cls, options: argparse.Namespace) -> Cores:
        if options.cores < ENOUGH_CORES:
            return cls(None, [None])
        numbers = sorted(os.sched_getaffinity(0))[: options.cores]
        proxy = numbers[: options.proxy_cores]
        return cls(set(proxy), [{number} for number in numbers[options.proxy_cores :]])

    @property
    def turned(self) -> list[set[int] | None]:
        """Engines from one end, the load from the other."""
        return self.others[::-1]


# ---------------------------------------------------------------------- proxies


@contextmanager
def _process(command: list[str], cores: Cores, folder: Path, env: dict[str, str] | None = None):
    """Standard output goes to the file `out` in `folder`."""
    pin = (lambda: os.sched_setaffinity(0, cores.proxy)) if cores.proxy else None
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, preexec_fn=pin, env={**os.environ, **(env or {})}, cwd=folder
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen, folder: Path, said) -> object:
    """What `said()` returns once it is true."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        if found := said():
            return found
        time.sleep(0.1)
    raise SystemExit(f"the proxy did not start:\n{(folder / 'out').read_text()[-3000:]}")


@contextmanager
def kvcached(python: str, addresses: list[str], folder: Path, cores: Cores, processes: int):
    """Its process and its address."""
    chat = {"engine": "remote", "address": addresses, "concurrency": 100_000, "queue": 100_000}
    given = {"listen": "127.0.0.1:0", "log_dir": str(folder / "logs"), "models": {"chat": chat}}
    if processes > 1:
        given["processes"] = processes
    file = folder / "models.yaml"
    file.write_text(json.dumps(given))
    command = [python, "-m", "kvcached.cli.main", "serve", str(file)]
    with _process(command, cores, folder, {"PYTHONUNBUFFERED": "1"}) as process:
        found = _wait(process, folder, lambda: re.search(r"http://[^\s/]+:\d+", (folder / "out").read_text()))
        yield process, found[0]


@contextmanager
def litellm(python: str, addresses: list[str], folder: Path, cores: Cores, processes: int):
    """LiteLLM's proxy, with as many workers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    deployments = [
        {"model_name": "chat", "litellm_params": {"model": "openai/chat", "api_base": f"{address}/v1", "api_key": "none"}}
        for address in addresses
    ]
    file = folder / "config.yaml"
    file.write_text(json.dumps({"model_list": deployments, "litellm_settings": {"num_retries": 0, "request_timeout": 600}, **OPEN_TO_ALL}))
    command = [str(Path(python).with_name("litellm")), "--config", str(file), "--host", "127.0.0.1", "--port", str(port)]
    quiet = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "NO_PROXY": "127.0.0.1"}
    with _process([*command, "--num_workers", str(processes)], cores, folder, quiet) as process:
        address = f"http://127.0.0.1:{port}"
        _wait(process, folder, lambda: _answers(f"{address}/health/liveliness"))
        yield process, address


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


PROXIES = {"kvcached": kvcached, "litellm": litellm}


@dataclass
class Use:
    """Of a process and all below it."""

    cpu_s: float
    rss_mib: float

    @classmethod
    def of(cls, pid: int) -> Use:
        fields = {int(path.parent.name): path.read_text().rpartition(")")[2].split() for path in _stats()}
        family, grown = {pid}, True
        while grown:
            more = {child for child, said in fields.items() if int(said[1]) in family} - family
            family, grown = family | more, bool(more)
        rows = [fields[member] for member in family if member in fields]
        ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        return cls(sum(int(row[11]) + int(row[12]) for row in rows) / ticks, sum(int(row[21]) for row in rows) * page / 2**20)


def _stats():
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            path.read_text()
        except OSError:
            continue
        yield path


# ---------------------------------------------------------------------- measuring


@dataclass
class Way:
    """One measurement."""

    seen: Seen
    plan: Plan
    cores: float = 0.0
    cpu_s: float = 0.0
    """with what comes before and after the measured time"""
    rss_mib: tuple[float, ...] = ()

    @property
    def arrived(self) -> float:
        """Tokens of the measured time that came, of those that were due."""
        due = self.plan.streams * self.plan.pace * self.plan.seconds
        return len(self.seen.tokens_ms) / due if due else 1.0

    def figures(self) -> dict[str, float]:
        found = {"arrived": self.arrived, "lost": self.seen.lost, "failed": self.seen.failed, "cores": self.cores}
        found["cpu_us"] = self.cpu_s / max(1, self.seen.messages) * 1e6
        for name, values in (("token", self.seen.tokens_ms), ("request", self.seen.requests_ms)):
            ordered = sorted(values)
            if ordered:
                found |= {f"{name}_p{share}_ms": ordered[int(share / 100 * (len(ordered) - 1))] for share in (50, 95, 99)}
        return found


def measure(addresses: list[str], options: argparse.Namespace, cores: Cores, scale: float, pid: int | None) -> Way:
    """The load at these addresses; what the proxy `pid` uses meanwhile is measured after all streams have begun."""
    ramp_s = options.ramp * scale
    streams, requests = int(options.streams * scale), options.requests * scale
    plan = Plan(addresses, streams, options.pace, requests, ramp_s, options.seconds, time.monotonic() + 0.5)
    before_s = Use.of(pid).cpu_s if pid is not None else 0.0
    results = start_load(plan, options.generators, cores.turned)
    time.sleep(max(0.0, plan.begin_s - time.monotonic()))
    way = Way(Seen(), plan)
    if pid is not None:
        first, memory = Use.of(pid), []
        while (left_s := plan.end_s - time.monotonic()) > 0:
            time.sleep(min(1.0, left_s))
            memory.append(Use.of(pid).rss_mib)
        way.cores = (Use.of(pid).cpu_s - first.cpu_s) / plan.seconds
        way.rss_mib = (first.rss_mib, max(memory), memory[-1])
    for result in results:
        if not result.poll(plan.end_s + 10 * GRACE_S - time.monotonic()):
            raise SystemExit("the load did not end")
        way.seen.add(result.recv())
    way.cpu_s = Use.of(pid).cpu_s - before_s if pid is not None else 0.0
    return way


def pairs(direct: list[str], through: str, pid: int, options: argparse.Namespace, cores: Cores) -> list[dict[str, Way]]:
    """Both ways in turn; the one that begins changes from pair to pair."""
    rows = []
    for number in range(options.pairs):
        row = {}
        for name in ("direct", "through")[:: 1 if number % 2 else -1]:
            row[name] = measure(direct if name == "direct" else [through], options, cores, 1.0, None if name == "direct" else pid)
        rows.append(row)
    return rows


def report(rows: list[dict[str, Way]]) -> dict[str, object]:
    kept: dict[str, object] = {}
    figures = [{name: way.figures() for name, way in row.items()} for row in rows]
    for name in [key for key in figures[0]["direct"] if key.endswith("_ms") and key in figures[0]["through"]]:
        ways = {way: statistics.median(row[way][name] for row in figures) for way in ("direct", "through")}
        added = [row["through"][name] - row["direct"][name] for row in figures]
        kept[name] = {**ways, "added": added}
        spread = f"added {statistics.median(added):+8.2f}  ({min(added):+.2f} to {max(added):+.2f})"
        print(f"  {name:<15} direct {ways['direct']:8.2f}  through {ways['through']:8.2f}  {spread}")
    kept["cores"] = [row["through"]["cores"] for row in figures]
    kept["rss_mib"] = [row["through"].rss_mib for row in rows]
    kept["cpu_us"] = [row["through"]["cpu_us"] for row in figures]
    cpu_us = statistics.median(kept["cpu_us"])
    print(f"  the proxy used {statistics.median(kept['cores']):.2f} cores, {cpu_us:.0f} us for each token or request")
    print("  its memory, first, most, last: " + "; ".join(" ".join(f"{mib:.0f}" for mib in row) for row in kept["rss_mib"]) + " MiB")
    for way in ("direct", "through"):
        told = {name: [row[way][name] for row in figures] for name in ("arrived", "lost", "failed")}
        kept[way] = told
        share = " ".join(f"{value:.1%}" for value in told["arrived"])
        print(f"  {way}: tokens that came {share}; streams lost {told['lost']}; requests failed {told['failed']}", flush=True)
    return kept


def saturation(direct: list[str], through: str, pid: int, options: argparse.Namespace, cores: Cores) -> float:
    """The last of the steps that went well, as a multiple of the load; 0: none."""
    last = 0.0
    for scale in (step * options.first_step for step in STEPS):
        rows = {"direct": measure(direct, options, cores, scale, None), "through": measure([through], options, cores, scale, pid)}
        figures = {name: way.figures() for name, way in rows.items()}
        names = [f"{what}_p95_ms" for what in ("token", "request") if f"{what}_p95_ms" in figures["through"]]
        added = {name: figures["through"][name] - figures["direct"][name] for name in names}
        well = figures["through"]["arrived"] > 0.98 and not figures["through"]["lost"] and not figures["through"]["failed"]
        load = f"{options.streams * scale:6.0f} streams, {options.requests * scale:6.0f} requests/s"
        told = ", ".join(f"{name} {value:+.2f}" for name, value in added.items())
        print(
            f"  x{scale:<5g} {load}: added {told}; {figures['through']['cores']:.2f} cores; came {figures['through']['arrived']:.1%}",
            flush=True,
        )
        if not well or max(added.values(), default=0.0) > options.most_ms:
            break
        last = scale
    print(f"  saturation: {last:g} times the load went well" if last else "  saturation: below the first step")
    return last


def run(options: argparse.Namespace) -> dict[str, object]:
    kept: dict[str, object] = {}
    cores = Cores.of(options)
    with engines(options.engines, options.pace, cores.others) as direct:
        for text in options.proxy or ["kvcached"]:
            kind, _, python = text.partition("=")
            processes = options.processes if kind == "kvcached" else options.workers
            with tempfile.TemporaryDirectory() as folder:
                with PROXIES[kind](str(Path(python).absolute()) if python else sys.executable, direct, Path(folder), cores, processes) as (
                    process,
                    through,
                ):
                    print(f"{text}, {processes} process{'' if processes == 1 else 'es'}", flush=True)
                    measure([through], argparse.Namespace(**{**vars(options), "seconds": 1.0}), cores, 0.05, None)  # warm up
                    kept[text] = report(pairs(direct, through, process.pid, options, cores))
                    if options.saturate and kind == "kvcached":
                        kept["saturation"] = saturation(direct, through, process.pid, options, cores)
    return kept


def main() -> None:
    here = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cores", type=int, default=here, help="the first so many of this process (%(default)s)")
    parser.add_argument("--proxy-cores", type=int, default=2, help="of them for the proxy, if there are eight or more (%(default)s)")
    parser.add_argument("--streams", type=int, help="open at once (2000, or 200)")
    parser.add_argument("--pace", type=float, default=20.0, help="tokens a second of each stream (%(default)s)")
    parser.add_argument("--requests", type=float, help="short ones a second (1000, or 100)")
    parser.add_argument("--ramp", type=float, default=3.0, help="seconds in which all streams begin (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one measurement (%(default)s)")
    parser.add_argument("--pairs", type=int, default=3, help="direct and through the proxy (%(default)s)")
    parser.add_argument("--engines", type=int, help="processes (half of the other cores)")
    parser.add_argument("--generators", type=int, help="processes of the load (half of the other cores)")
    parser.add_argument("--processes", type=int, default=1, help="of the gateway (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="of LiteLLM's proxy (%(default)s)")
    parser.add_argument("--proxy", action="append", help="kvcached or litellm, and =PYTHON that has it; several in turn (kvcached)")
    parser.add_argument("--saturate", action="store_true", help="then raise the load step by step")
    parser.add_argument("--first-step", type=float, default=1.0, help="of the load (%(default)s)")
    parser.add_argument("--most-ms", type=float, default=3.0, help="that may be added at 95 %% (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # for all processes: each stream is a connection or two
    few = options.cores < ENOUGH_CORES
    half = max(1, (options.cores - options.proxy_cores) // 2) if not few else 1
    options.engines, options.generators = options.engines or half, options.generators or half
    options.streams = options.streams if options.streams is not None else 200 if few else 2000
    options.requests = options.requests if options.requests is not None else 100.0 if few else 1000.0
    load = f"{options.streams} streams of {options.pace:g} tokens/s, {options.requests:g} requests/s, {options.pairs} pairs"
    print(f"{load}; {options.engines} engines, {options.generators} processes of load; Python {platform.python_version()}")
    place = "few: proxy, engines and load share them" if few else f"{options.proxy_cores} of them for the proxy"
    print(f"{options.cores} cores, {place}; load average {os.getloadavg()[0]:.1f}", flush=True)
    figures = run(options)
    if options.json:
        kept = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(json.dumps({"options": kept, "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
