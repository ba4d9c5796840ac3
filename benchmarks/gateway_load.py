# SPDX-License-Identifier: Apache-2.0
"""Simulated engines and the load on them, for benchmarks/gateway.py: each in a process of its own, and as little work as can be.

Token number 7 of a stream is the text `@NANOSECONDS.000007`: when the engine sent it, on the clock that all processes of the machine share.
It passes a proxy that writes the events anew, too.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import re
import time
from array import array
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
MARK_BYTES = 27
GRACE_S = 3.0
"""what comes later than this is lost"""
FORK = multiprocessing.get_context("fork")


def settle(cores: set[int] | None) -> None:
    """In a process of this file: where it runs, and no pauses of its own."""
    if cores:
        os.sched_setaffinity(0, cores)
    gc.disable()


def whole(given: bytes) -> tuple[bytes, int]:
    """The body of the message that `given` begins with, and the length of both; 0 while something is missing."""
    head = given.find(b"\r\n\r\n") + 4
    if head < 4:
        return b"", 0
    said = LENGTH.search(given, 0, head)
    end = head + (int(said[1]) if said else 0)
    return (given[head:end], end) if len(given) >= end else (b"", 0)


# ---------------------------------------------------------------------- engines


def _answer() -> bytes:
    message = {"index": 0, "message": {"role": "assistant", "content": "word"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    body = json.dumps(
        {"id": "c", "object": "chat.completion", "created": 1, "model": "chat", "choices": [message], "usage": usage}
    ).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def _event() -> bytes:
    choice = {"index": 0, "delta": {"content": "%b"}, "logprobs": None, "finish_reason": None}
    event = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1, "model": "chat", "choices": [choice]}
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    return b"%x\r\n" % (len(data) - 2 + MARK_BYTES) + data + b"\r\n"


ANSWER, EVENT = _answer(), _event()
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Engine(asyncio.Protocol):
    """One connection. Streams at a set pace, and answers at once what is not streamed."""

    def __init__(self, pace: float) -> None:
        self.pause_s = 1 / pace
        self.given = b""
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.loop = asyncio.get_running_loop()

    def connection_lost(self, error: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.given += data
        while True:
            body, end = whole(self.given)
            if not end:
                return
            asked, self.given = self.given[:4], self.given[end:]
            if asked == b"GET ":
                self.transport.write(HEALTHY)
            elif re.search(rb'"stream": ?true', body):
                self.number, self.tokens, self.start_s = 0, int(re.search(rb'"max_tokens": ?(\d+)', body)[1]), self.loop.time()
                self.transport.write(STREAM)
                self.token()
            else:
                self.transport.write(ANSWER)

    def token(self) -> None:
        self.transport.write(EVENT % (b"@%019d.%06d" % (time.monotonic_ns(), self.number)))
        self.number += 1
        if self.number < self.tokens:
            self.timer = self.loop.call_at(self.start_s + self.number * self.pause_s, self.token)
        else:
            self.transport.write(DONE)


def run_engine(pace: float, cores: set[int] | None, port) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Engine(pace), "127.0.0.1", 0, backlog=4096)
        port.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    settle(cores)
    with suppress(KeyboardInterrupt):
        asyncio.run(serve())


@contextmanager
def engines(count: int, pace: float, cores: list[set[int] | None]):
    """Their addresses."""
    started = []
    try:
        for number in range(count):
            ours, theirs = FORK.Pipe()
            process = FORK.Process(target=run_engine, args=(pace, cores[number % len(cores)], theirs), daemon=True)
            process.start()
            started.append((process, ours))
        yield [f"http://127.0.0.1:{port.recv()}" for _, port in started]
    finally:
        for process, _ in started:
            process.kill()
            process.join()


# ---------------------------------------------------------------------- load


@dataclass(frozen=True)
class Plan:
    """Streams begin within `ramp_s` after `start_s`, evenly, and end after `seconds` more; in these also `requests` short ones a second."""

    addresses: list[str]
    streams: int
    pace: float
    requests: float
    ramp_s: float
    seconds: float
    start_s: float
    headers: str = ""

    @property
    def begin_s(self) -> float:
        return self.start_s + self.ramp_s

    @property
    def end_s(self) -> float:
        return self.begin_s + self.seconds

    def request(self, given: dict) -> bytes:
        body = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "Say a word."}], **given}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{self.headers}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Seen:
    """What one process of the load saw. `lost`: streams that did not end with all their tokens in their order. `messages`: tokens and
    answers that came at any time."""

    tokens_ms: array = field(default_factory=lambda: array("f"))
    requests_ms: array = field(default_factory=lambda: array("f"))
    messages: int = 0
    lost: int = 0
    failed: int = 0

    def add(self, other: Seen) -> None:
        self.tokens_ms += other.tokens_ms
        self.requests_ms += other.requests_ms
        self.messages += other.messages
        self.lost += other.lost
        self.failed += other.failed


class Stream(asyncio.Protocol):
    """One stream on a connection of its own."""

    def __init__(self, plan: Plan, seen: Seen, tokens: int) -> None:
        self.begin_ns, self.end_ns = int(plan.begin_s * 1e9), int(plan.end_s * 1e9)
        self.asked, self.note, self.tokens = plan.request({"stream": True, "max_tokens": tokens}), seen.tokens_ms.append, tokens
        self.rest = b""
        self.number = 0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        transport.write(self.asked)

    def connection_lost(self, error: Exception | None) -> None:
        self.end(False)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        if self.rest:
            data = self.rest + data
        at = data.find(b"@")
        while at >= 0 and at + MARK_BYTES <= len(data):
            sent_ns = int(data[at + 1 : at + 20])
            if int(data[at + 21 : at + 27]) != self.number:
                self.end(False)
            self.number += 1
            if self.begin_ns <= sent_ns < self.end_ns:
                self.note((now_ns - sent_ns) / 1e6)
            at = data.find(b"@", at + MARK_BYTES)
        self.rest = data[at:] if at >= 0 else b""
        if self.number == self.tokens:
            self.rest = data[-64:]
            if b"[DONE]" in self.rest:
                self.end(True)

    def end(self, well: bool) -> None:
        if not self.ended.done():
            self.ended.set_result(well)
        self.transport.close()


class Short(asyncio.Protocol):
    """A connection for short requests, one after another."""

    def __init__(self, seen: Seen, idle: list[Short]) -> None:
        self.seen, self.idle = seen, idle
        self.given = b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self in self.idle:
            self.idle.remove(self)

    def ask(self, asked: bytes) -> None:
        self.start_ns = time.monotonic_ns()
        self.transport.write(asked)

    def data_received(self, data: bytes) -> None:
        self.given += data
        if not whole(self.given)[1]:
            return
        if self.given.startswith(b"HTTP/1.1 200"):
            self.seen.requests_ms.append((time.monotonic_ns() - self.start_ns) / 1e6)
        self.seen.messages += 1
        self.given = b""
        self.idle.append(self)


class Load:
    """The share of one process in a plan."""

    def __init__(self, plan: Plan, number: int, of: int) -> None:
        self.plan, self.number, self.of = plan, number, of
        self.seen = Seen()
        self.loop = asyncio.get_running_loop()

    async def connect(self, number: int, protocol: asyncio.Protocol) -> None:
        host, port = self.plan.addresses[number % len(self.plan.addresses)].removeprefix("http://").split(":")
        await self.loop.create_connection(lambda: protocol, host, int(port))

    async def run(self) -> Seen:
        streams = [self.stream(number) for number in range(self.number, self.plan.streams, self.of)]
        await asyncio.gather(*streams, self.short_requests())
        return self.seen

    async def stream(self, number: int) -> None:
        begin_s = self.plan.start_s + self.plan.ramp_s * number / self.plan.streams
        await asyncio.sleep(begin_s - self.loop.time())
        stream = Stream(self.plan, self.seen, int((self.plan.end_s + 0.2 - begin_s) * self.plan.pace))
        try:
            await asyncio.wait_for(self.connect(number, stream), self.plan.end_s + GRACE_S - self.loop.time())
            well = await asyncio.wait_for(stream.ended, self.plan.end_s + GRACE_S - self.loop.time())
        except (OSError, asyncio.TimeoutError):
            well = False
        self.seen.messages += stream.number
        self.seen.lost += not well

    async def short_requests(self) -> None:
        asked, idle = self.plan.request({}), []
        numbers = range(self.number, int(self.plan.seconds * self.plan.requests), self.of)
        for number in numbers:
            await asyncio.sleep(self.plan.begin_s + number / self.plan.requests - self.loop.time())
            if idle:
                idle.pop().ask(asked)
            else:
                self.loop.create_task(self.first(number, asked, idle))
        await asyncio.sleep(self.plan.end_s + 0.5 - self.loop.time())
        if len(self.seen.requests_ms) < len(numbers):
            await asyncio.sleep(self.plan.end_s + GRACE_S - self.loop.time())
        self.seen.failed = len(numbers) - len(self.seen.requests_ms)

    async def first(self, number: int, asked: bytes, idle: list[Short]) -> None:
        short = Short(self.seen, idle)
        with suppress(OSError):
            await self.connect(number // self.of, short)
            short.ask(asked)


def run_load(plan: Plan, number: int, of: int, cores: set[int] | None, result) -> None:
    async def go() -> Seen:
        return await Load(plan, number, of).run()

    settle(cores)
    result.send(asyncio.run(go()))


def start_load(plan: Plan, count: int, cores: list[set[int] | None]) -> list:
    """The ends of pipes that say `Seen` once each."""
    results = []
    for number in range(count):
        ours, theirs = FORK.Pipe(duplex=False)
        FORK.Process(target=run_load, args=(plan, number, count, cores[number % len(cores)], theirs), daemon=True).start()
        theirs.close()
        results.append(ours)
    return results
