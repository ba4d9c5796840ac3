# SPDX-License-Identifier: Apache-2.0
"""Processes for the card's tests: each holds one entry and does what the test tells it."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

from deletion import delete_at_once

from kvcached.card import Card, CardIdentity, Entry, EntrySpec, Kind
from kvcached.errors import KVCachedError
from kvcached.testing.stopping import stop_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

IDENTITY = CardIdentity("GPU-8c1f", "a card", 1000)
BUDGET = 100
TIMEOUT_S = 60.0
CLONE_NEWPID = 0x20000000

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "kvcached.card", "card_workers"])  # what each worker would import anew


@dataclass(frozen=True)
class Plan:
    """How a worker starts."""

    run_dir: Path
    instance: str
    budget: int = BUDGET
    floor: int = 0
    endpoint: str = ""
    listens: bool = True
    settle_s: float = 0.0
    heartbeat_s: float = 0.0
    group_mode: bool = False
    uid: int | None = None
    gid: int | None = None
    pid_namespace: bool = False


@dataclass
class Worker:
    """The test's end of a worker process. `pid` is its number as the test sees it."""

    process: Any
    connection: Connection
    pid: int
    stopped: bool = field(default=False)

    def call(self, name: str, *args: object, **how: object) -> Any:
        self.send(name, *args, **how)
        return self.answer()

    def send(self, name: str, *args: object, **how: object) -> None:
        self.connection.send((name, args, how))

    def answer(self) -> Any:
        assert self.connection.poll(TIMEOUT_S), "the worker did not answer"
        answer = self.connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.join(TIMEOUT_S)
        self.connection.close()

    def stop(self) -> None:
        stop_process(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@contextmanager
def workers(*plans: Plan) -> Iterator[list[Worker]]:
    """Worker processes, all started at once; killed at the end."""
    started = [start(plan) for plan in plans]
    try:
        for worker in started:
            worker.pid = worker.answer()
        yield started
    finally:
        for worker in started:
            worker.kill()


def start(plan: Plan) -> Worker:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=serve, args=(theirs, plan), daemon=True)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # the fork server is started by the first worker
        process.start()
    theirs.close()
    return Worker(process, ours, process.pid or 0)


def serve(connection: Connection, plan: Plan) -> None:
    if plan.pid_namespace:
        _enter_pid_namespace(connection)
    try:
        if plan.gid is not None and plan.uid is not None:
            os.setgroups([])
            os.setresgid(plan.gid, plan.gid, plan.gid)
            os.setresuid(plan.uid, plan.uid, plan.uid)
        servant = Servant(connection, plan)
    except (KVCachedError, OSError) as error:
        connection.send(error)
        return
    if not plan.pid_namespace:
        connection.send(os.getpid())
    while True:
        try:
            name, args, how = connection.recv()
        except EOFError:
            return
        try:
            connection.send(getattr(servant, name)(*args, **how))
        except KVCachedError as error:
            connection.send(error)


def _enter_pid_namespace(connection: Connection) -> None:
    """Go on as process 1 of a new namespace; the outer process only waits for it."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID) != 0:
        connection.send(PermissionError(ctypes.get_errno(), "unshare"))
        os._exit(0)
    child = os.fork()
    if child:
        connection.send(child)
        os.waitpid(child, 0)
        os._exit(0)


class Servant:
    """What a worker can do, in the worker."""

    def __init__(self, connection: Connection, plan: Plan) -> None:
        self.connection = connection
        self.plan = plan
        self.card = self.open()
        self.entry = self.register(plan.instance)
        if plan.endpoint and plan.listens:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.bind(plan.endpoint)
            self.socket.listen()
        if plan.heartbeat_s:
            threading.Thread(target=self._beat, daemon=True).start()

    def open(self) -> Card:
        plan = self.plan
        return Card.open(plan.run_dir, IDENTITY, budget_bytes=plan.budget, settle_s=plan.settle_s, group_mode=plan.group_mode)

    def register(self, instance: str) -> Entry:
        return self.card.register(EntrySpec(Kind.KV, instance, endpoint=self.plan.endpoint, floor_bytes=self.plan.floor))

    def _beat(self) -> None:
        while True:
            with suppress(KVCachedError):
                self.entry.heartbeat()
            time.sleep(self.plan.heartbeat_s)

    def getpid(self) -> int:
        return os.getpid()

    def lease(self, delta: int, **how: Any) -> Any:
        return self.entry.lease(delta, owned=True, **how)

    def unlease(self, delta: int) -> None:
        self.entry.unlease(delta)

    def lease_bytes(self) -> int:
        return self.entry.lease_bytes

    def heartbeat(self) -> bool:
        return self.entry.heartbeat()

    def tools(self) -> int:
        """What a tool does, in a process that holds locks."""
        self.card.snapshot()
        Card.list_cards(self.plan.run_dir)
        Card.sweep(self.plan.run_dir)
        self.open().register(EntrySpec(Kind.OTHER, self.plan.instance)).close()
        return len(Card.list_cards(self.plan.run_dir))

    def close(self) -> None:
        self.card.close()

    def churn(self, rounds: int, target: int, seed: int) -> int:
        """Ask for one byte at a time up to `target`, with random frees; returns the grants."""
        luck = random.Random(seed)
        grants = 0
        for _ in range(rounds):
            if self.entry.lease_bytes < target:
                grants += self.entry.lease(1, owned=True, want=True).granted
            if luck.random() < 0.05:
                self.entry.unlease(luck.randint(0, self.entry.lease_bytes))
        self.entry.unwant()
        return grants

    def churn_for_ever(self, target: int) -> None:
        luck = random.Random(os.getpid())
        self.connection.send("churning")
        while True:
            self.churn(100, target, luck.randint(0, 1 << 30))

    def hold_ledger(self) -> None:
        """Take the card's lock and keep it until told otherwise."""
        with self.entry._segment.file.ledger(1.0) as held:
            self.connection.send(held)
            self.connection.recv()

    def die_at_write(self, nth: int, part: float) -> None:
        """Be killed in the `nth` next write, when `part` of its bytes have arrived, while leasing and giving back."""
        pwrite = os.pwrite
        writes = 0

        def deadly(fd: int, raw: bytes, offset: int) -> int:
            nonlocal writes
            writes += 1
            if writes == nth:
                pwrite(fd, raw[: int(len(raw) * part)], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return pwrite(fd, raw, offset)

        os.pwrite = deadly
        self.entry.lease(5, owned=True)
        self.entry.unlease(25)
        self.entry.lease(70, owned=True)
        self.register("another")
        raise AssertionError("still alive")

    def fork(self, *, close_all: bool) -> list[str]:
        """Fork, let the child try everything, wait for its end; returns what it met."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, "\n".join(self._in_child()).encode())
            if close_all:
                os.closerange(0, 1000)
            os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        with os.fdopen(reader) as answers:
            return answers.read().splitlines()

    def _in_child(self) -> list[str]:
        calls: list[Callable[[], object]] = [
            lambda: self.entry.lease(1, owned=True),
            lambda: self.entry.lease_bytes,
            lambda: self.entry.unlease(1),
            lambda: self.entry.heartbeat(),
            lambda: self.entry.close(),
            lambda: self.card.register(EntrySpec(Kind.KV, "child")),
            lambda: self.card.snapshot(),
            lambda: self.card.close(),
        ]
        met = [_name_of_error(call) for call in calls]
        entry = self.open().register(EntrySpec(Kind.KV, "child of its own"))
        met.append(f"own card: {entry.lease(BUDGET, owned=True).grantable_bytes}")
        del self.card, self.entry, calls
        gc.collect()
        met.append(f"without the parent's: {entry.lease(1, owned=True).grantable_bytes}")
        return met

    def remove_run_dir(self) -> None:
        delete_at_once(self.plan.run_dir)


def _name_of_error(call: Callable[[], object]) -> str:
    try:
        call()
    except KVCachedError as error:
        return type(error).__name__
    return "no error"
