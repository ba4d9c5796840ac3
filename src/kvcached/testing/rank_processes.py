# SPDX-License-Identifier: Apache-2.0
"""Real mapper processes and owners for tests and benchmarks: made in milliseconds, killed and stopped at will.

A nursery is a process without threads that has imported everything and forks on demand. A child obeys one call at a time over a
connection of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcached import processes
from kvcached.config import Settings, load_settings, override
from kvcached.core.geometry import BlockGeometry
from kvcached.errors import KVCachedError
from kvcached.ranks.actions import AbortRuns, Action, MapFresh, MapHeld, PrepareRuns, UnmapKeep, UnmapRelease
from kvcached.ranks.api import Outcome, Verdict
from kvcached.ranks.frames import hello_of_rank
from kvcached.ranks.group import RankGroup
from kvcached.ranks.messages import Hello
from kvcached.ranks.operations import pages_of
from kvcached.ranks.server import RankServer
from kvcached.runtime.cards import OpenCard, rank_socket
from kvcached.runtime.step_gate import StepGate

if TYPE_CHECKING:
    from kvcached.ranks.operations import Op
    from kvcached.runtime.rank_memory import RankMemory

_ANSWER_TIMEOUT_S: Final = 60.0
_CONNECT_TIMEOUT_S: Final = 20.0
_RETRY_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Place:
    """Where everything is, and how large: `pages` pages of `page_bytes` in each rank's range, cards of `card_pages` pages."""

    folder: str
    page_bytes: int
    pages: int
    card_pages: int

    def settings(self) -> Settings:
        return override(
            load_settings({}, Path(os.devnull)),
            {
                "run_dir": f"{self.folder}/run",
                "host_dir": f"{self.folder}/host",
                "host_capacity_bytes": self.card_pages * self.page_bytes,
                "host_granularity_bytes": self.page_bytes,
                "budget": str(self.card_pages * self.page_bytes),
            },
        )

    def geometry(self) -> BlockGeometry:
        return BlockGeometry(self.page_bytes, self.page_bytes, self.page_bytes, self.pages, 1, self.pages)


def hello(instance: str) -> Hello:
    return Hello("1", instance, "")


# ---------------------------------------------------------------------- in a child


class _Recorder:
    """A rank's memory that also knows which pages are mapped."""

    def __init__(self, memory: RankMemory) -> None:
        self.memory = memory
        self.set_limits = memory.set_limits
        self.report = memory.report
        self.status = memory.status
        self.tally = memory.tally
        self._mapped: set[int] = set()
        self._prepared: dict[int, set[int]] = {}
        self._lock = threading.Lock()

    def perform(self, action: Action) -> Outcome:
        outcome = self.memory.perform(action)
        if outcome.verdict is Verdict.DONE:
            with self._lock:
                self._note(action)
        return outcome

    def _note(self, action: Action) -> None:
        match action:
            case MapHeld(runs) | MapFresh(runs, _, _):
                self._mapped.update(pages_of(runs))
            case UnmapKeep(runs) | UnmapRelease(runs, _):
                self._mapped.difference_update(pages_of(runs))
            case PrepareRuns(tx, runs):
                self._prepared[tx] = set(pages_of(runs))
                self._mapped.difference_update(pages_of(runs))
            case AbortRuns(tx):
                self._mapped |= self._prepared.pop(tx, set())

    def mapped(self) -> list[int]:
        with self._lock:
            return sorted(self._mapped)


class RankChild:
    """A worker process without an engine."""

    def __init__(self, place: Place, instance: str, rank: int, card: str) -> None:
        settings = place.settings()
        self._card = OpenCard.open(settings, card)
        memory = self._card.open_rank(place.geometry(), instance=instance, name=instance, rank=rank)
        self._memory = _Recorder(memory)
        self._gate = StepGate()
        greeting = hello_of_rank(replace(hello(instance), facts=memory.facts.to_text()), rank)
        self._server = RankServer(rank_socket(settings.run_dir, instance, rank), self._memory, self._gate, greeting, memory.close)

    def step(self, number: int, ops: tuple[Op, ...]) -> None:
        self._server.apply_step_ops(ops)
        self._gate.submitted(number)

    def timed_step(self, number: int, ops: tuple[Op, ...]) -> float:
        """The same; the seconds that the step waited for its maps."""
        start = time.perf_counter()
        self.step(number, ops)
        return time.perf_counter() - start

    def mapped(self) -> list[int]:
        return self._memory.mapped()

    def status(self) -> tuple[int, int]:
        """(bytes leased, bytes held)."""
        status = self._memory.status()
        return status.lease_bytes, status.held_bytes

    def close(self) -> bool:
        if not self._server.stop():
            return False
        self._memory.memory.close()
        self._server.close()
        self._card.close()
        return True


class OwnerChild:
    """An owner whose only work is to map and to unmap."""

    def __init__(self, place: Place, instance: str, ranks: int) -> None:
        settings = place.settings()
        self.group = RankGroup(
            [rank_socket(settings.run_dir, instance, rank) for rank in range(ranks)], hello(instance), _CONNECT_TIMEOUT_S
        )

    def map(self, pages: int) -> str:
        return self.group.map([(page, 1) for page in range(pages)], urgent=True).result(_ANSWER_TIMEOUT_S).verdict.name

    def play(self, pages: int, rounds_file: str, rounds: int, hold_s: float) -> dict[str, Any]:
        """Map `pages` pages and give them back, again and again, until `rounds` rounds have been played together with the others that
        use the same file. Each round adds one byte to it: this owner's."""
        runs = [(page, 1) for page in range(pages)]
        mine, longest_s, tries = 0, 0.0, 0
        with Path(rounds_file).open("ab", buffering=0) as played:
            while os.fstat(played.fileno()).st_size < rounds:
                start = time.monotonic()
                while not self._takes(runs):
                    tries += 1
                    time.sleep(_RETRY_S)
                longest_s = max(longest_s, time.monotonic() - start)
                time.sleep(hold_s)
                outcome = self.group.unmap(runs, 0).result(_ANSWER_TIMEOUT_S)
                if outcome.verdict is not Verdict.DONE:
                    raise AssertionError(outcome)
                played.write(b".")
                mine += 1
        return {"rounds": mine, "longest_s": longest_s, "refused": tries}

    def _takes(self, runs: list[tuple[int, int]]) -> bool:
        outcome = self.group.map(runs, urgent=True).result(_ANSWER_TIMEOUT_S)
        if outcome.verdict not in (Verdict.DONE, Verdict.EXHAUSTED):
            raise AssertionError(outcome)
        return outcome.verdict is Verdict.DONE

    def close(self) -> bool:
        self.group.close()
        return True


_KINDS: Final = {"rank": RankChild, "owner": OwnerChild}


def _live(order: dict[str, Any]) -> None:
    with Client(order["address"], "AF_UNIX") as connection:
        try:
            child = _KINDS[order["kind"]](Place(**order["place"]), **order["options"])
        except KVCachedError:
            connection.send(("error", traceback.format_exc()))
            return
        connection.send(("ok", None))
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                name, arguments = connection.recv()
                try:
                    answer = ("ok", getattr(child, name)(*arguments))
                except (KVCachedError, AssertionError, TimeoutError):
                    answer = ("error", traceback.format_exc())
                connection.send(answer)


def nurse() -> None:
    """Fork a child for each line on standard input; print its pid."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                _live(json.loads(line))
            finally:
                sys.stderr.flush()
                os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


# ---------------------------------------------------------------------- in the test


class Child:
    """A process that obeys calls. Use `Nursery.rank` or `Nursery.owner`."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        self._connection = connection

    def begin(self, name: str, *arguments: Any) -> None:
        """Call without waiting for the answer: `end` returns it."""
        self._connection.send((name, arguments))

    def end(self, timeout_s: float = _ANSWER_TIMEOUT_S) -> Any:
        """Raises `AssertionError` with the child's traceback, or when it is dead or does not answer."""
        try:
            if not self._connection.poll(timeout_s):
                raise AssertionError(f"process {self.pid} did not answer within {timeout_s:g} s")
            kind, answer = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise AssertionError(f"process {self.pid} is dead") from error
        if kind == "error":
            raise AssertionError(answer)
        return answer

    def ask(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        return self.end()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """And wait until the kernel has closed all that it had open, which it does one after another: this connection is not the last."""
        start = processes.start_of(self.pid)
        self.signal(signal.SIGKILL)
        self._connection.close()
        end_s = time.monotonic() + _ANSWER_TIMEOUT_S
        while processes.is_there(self.pid) and processes.start_of(self.pid) == start:
            if time.monotonic() > end_s:
                raise AssertionError(f"process {self.pid} was killed {_ANSWER_TIMEOUT_S:g} s ago, and is still there")
            time.sleep(_RETRY_S)


class Nursery:
    """Makes children. Closing it kills all that still live."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._children: list[Child] = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from kvcached.testing.rank_processes import nurse; nurse()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def rank(self, instance: str, rank: int, card: str = "host:0") -> Child:
        """A mapper that serves. Raises `AssertionError` with its traceback when it does not start."""
        return self._make("rank", instance=instance, rank=rank, card=card)

    def owner(self, instance: str, ranks: int) -> Child:
        return self._make("owner", instance=instance, ranks=ranks)

    def _make(self, kind: str, **options: Any) -> Child:
        with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/child", "AF_UNIX") as listener:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            order = {"kind": kind, "address": str(listener.address), "place": asdict(self.place), "options": options}
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            child = Child(int(self._process.stdout.readline()), listener.accept())
        self._children.append(child)
        child.end()
        return child

    def close(self) -> None:
        for child in self._children:
            child.signal(signal.SIGKILL)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
        for child in self._children:
            child._connection.close()
