# SPDX-License-Identifier: Apache-2.0
"""A small pool in a process of its own, for the tests of the control endpoint and of the command line.

It really holds memory (a bytearray per parked MiB), so that trimming and limiting are visible in its status.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
from typing import TYPE_CHECKING
from unittest import mock

from kvcached.card import NO_LIMIT_BYTES, Card, CardIdentity, Entry, EntrySpec, Kind, Usage
from kvcached.errors import Misuse, PoolExhausted, StateUnknown
from kvcached.runtime.control import (
    BytesAnswer,
    ChangeAnswer,
    ControlServer,
    ExplainRow,
    Explanation,
    PoolMetrics,
    PoolStatus,
    WeightAnswer,
    endpoint_path,
)
from kvcached.units import MIB

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

CAPACITY_BYTES = 64 * MIB
BUDGET_BYTES = 100 * MIB
_WAIT_S = 60.0


class SmallPool:
    """`owned` MiB that nothing takes away, and parked ones that a trim gives back."""

    def __init__(self, instance: str, owned: int = 4, parked: int = 8, cached: int = 6) -> None:
        self.instance = instance
        self._lock = threading.Lock()
        self._owned = [bytearray(MIB) for _ in range(owned)]
        self._parked = [bytearray(MIB) for _ in range(parked)]
        self._cached = [bytearray(MIB) for _ in range(cached)]
        self._limit_bytes = CAPACITY_BYTES
        self._floor_bytes = 0
        self._weight = 1.0
        self._revision = 0
        self._entry: Entry | None = None

    def attach(self, entry: Entry) -> None:
        """Lease what is held and keep the card's record true from now on."""
        assert entry.lease(self._held_bytes(), owned=True, deadline_s=_WAIT_S).granted  # others start beside it
        self._entry = entry
        self._publish()

    def _publish(self) -> None:
        if self._entry is None:
            return
        owned, cached, parked = (len(part) * MIB for part in (self._owned, self._cached, self._parked))
        self._entry.publish(Usage(mapped_bytes=self._held_bytes(), owned_bytes=owned, cached_bytes=cached, parked_bytes=parked))
        self._entry.unlease(self._entry.lease_bytes - self._held_bytes())
        self._entry.set_limits(limit_bytes=self._limit_bytes, floor_bytes=self._floor_bytes, weight=self._weight, revision=self._revision)

    def _held_bytes(self) -> int:
        return sum(len(page) for part in (self._owned, self._parked, self._cached) for page in part)

    def status(self) -> PoolStatus:
        with self._lock:
            return PoolStatus(
                instance=self.instance,
                lease_bytes=self._held_bytes(),
                held_bytes=self._held_bytes(),
                mapped_bytes=self._held_bytes(),
                capacity_bytes=CAPACITY_BYTES,
                limit_bytes=self._limit_bytes,
                limit_revision=self._revision,
                floor_bytes=self._floor_bytes,
                weight=self._weight,
                owned_bytes=len(self._owned) * MIB,
                cached_bytes=len(self._cached) * MIB,
                parked_bytes=len(self._parked) * MIB,
            )

    def metrics(self) -> PoolMetrics:
        return PoolMetrics(misses=3)

    def limit(self, limit_bytes: int, revision: int | None = None) -> ChangeAnswer:
        with self._lock:
            number = self._revision + 1 if revision is None else revision
            if number < self._revision:
                return self._change("stale", limit_bytes, self._limit_bytes)
            self._revision = number
            is_limit = limit_bytes < NO_LIMIT_BYTES
            self._limit_bytes = min(limit_bytes, CAPACITY_BYTES) if is_limit else NO_LIMIT_BYTES
            for part in (self._parked, self._cached):
                while part and self._held_bytes() > self._limit_bytes:
                    part.pop()
            self._publish()
            outcome = "clamped" if limit_bytes > self._limit_bytes else "deferred" if self._held_bytes() > self._limit_bytes else "applied"
            return self._change(outcome, limit_bytes, self._limit_bytes)

    def _change(self, outcome: str, asked_bytes: int, in_force_bytes: int) -> ChangeAnswer:
        return ChangeAnswer.model_validate(
            {
                "outcome": outcome,
                "asked_bytes": asked_bytes,
                "in_force_bytes": in_force_bytes,
                "overage_bytes": max(0, self._held_bytes() - in_force_bytes),
                "revision": self._revision,
                "reason": "" if outcome == "applied" else f"the small pool says {outcome}",
            }
        )

    def floor(self, floor_bytes: int) -> ChangeAnswer:
        if floor_bytes > CAPACITY_BYTES:
            raise Misuse(f"a floor of {floor_bytes} bytes is above the capacity of {CAPACITY_BYTES}")
        with self._lock:
            self._floor_bytes = floor_bytes
            self._publish()
            return self._change("applied", floor_bytes, floor_bytes)

    def weight(self, weight: float) -> WeightAnswer:
        if weight == 13:
            raise StateUnknown("the state of page 13 is not known", [13])
        if weight == 14:
            raise ZeroDivisionError("a bug")
        self._weight = weight
        self._publish()
        return WeightAnswer(weight=weight)

    def trim(self, size_bytes: int | None = None) -> BytesAnswer:
        with self._lock:
            return BytesAnswer(given_bytes=self._give(self._parked, sys.maxsize if size_bytes is None else size_bytes))

    def evict(self, size_bytes: int) -> BytesAnswer:
        with self._lock:
            return BytesAnswer(given_bytes=self._give(self._cached, size_bytes))

    def _give(self, pages: list[bytearray], size_bytes: int) -> int:
        given_bytes = 0
        while pages and given_bytes < size_bytes:
            given_bytes += len(pages.pop())
        self._publish()
        return given_bytes

    def explain(self) -> Explanation:
        status = self.status()
        return Explanation(
            rows=(
                ExplainRow(reason="owned by running requests", size_bytes=status.owned_bytes, freed_by="the end of the requests"),
                ExplainRow(reason="cached prefixes", size_bytes=status.cached_bytes, freed_by=f"kvctl evict {self.instance} SIZE"),
                ExplainRow(reason="parked", size_bytes=status.parked_bytes, freed_by=f"kvctl trim {self.instance}"),
            )
        )

    def pressure(self, wanted_bytes: int) -> BytesAnswer:
        if not self._parked:
            raise PoolExhausted(wanted_bytes, 0, "bytes", "nothing is parked")
        return self.trim(wanted_bytes)


class SlowPool(SmallPool):
    """Each status takes as long as the test says, by an event that another operation sets."""

    def __init__(self, instance: str) -> None:
        super().__init__(instance)
        self.entered = threading.Event()
        self.release = threading.Event()

    def status(self) -> PoolStatus:
        self.entered.set()
        self.release.wait(30)
        return super().status()


class Served:
    """A process that serves `instance` until it is closed or killed. It is forked from a server that has everything loaded."""

    def __init__(self, run_dir: Path, instance: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "pytest"])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(run_dir, instance, theirs), daemon=True)
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # the server is started by the first process
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait_ready(self) -> None:
        assert self._connection.poll(_WAIT_S)
        assert self._connection.recv() == "ready"

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        self._process.join(_WAIT_S)
        assert self._process.exitcode is not None
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def close(self) -> None:
        self.kill()
        self._process.close()
        self._connection.close()


def _serve(run_dir: Path, instance: str, connection: Connection) -> None:
    """Serve, with an entry in the record of a real card, until the other end of `connection` closes."""
    path = endpoint_path(run_dir, instance)
    pool = SmallPool(instance)
    identity = CardIdentity("TEST-0", "a card for tests", BUDGET_BYTES)
    with (
        ControlServer(path, pool, io_timeout_s=_WAIT_S),
        Card.open(run_dir, identity, budget_bytes=BUDGET_BYTES, settle_s=0) as card,
        contextlib.suppress(EOFError),
    ):
        spec = EntrySpec(Kind.KV, instance, name="small-model", endpoint=str(path), limit_bytes=CAPACITY_BYTES)
        pool.attach(card.register(spec))
        connection.send("ready")
        connection.recv()
