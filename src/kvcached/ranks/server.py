# SPDX-License-Identifier: Apache-2.0
"""The mapper's end: one owner, one kept connection, and the participant that says what is performed and when.

    engine's thread   the maps that a step brings, before the step runs
    reading thread    maps and acquisitions, limits, reports, status, tallies
    slow lane         waits for the engine's stream; unmaps and releases

A map never waits behind a fence, and the engine's thread waits for nothing but maps.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from kvcached.core.tally import Histogram
from kvcached.errors import PeerError, PeerLost, PeerRefused, StateUnknown
from kvcached.ranks.actions import AcquireHandles, Action, MapFresh, MapHeld
from kvcached.ranks.api import LimitsRequest, MapperStatus, MapperTally, Outcome, Report, Verdict
from kvcached.ranks.frames import FrameReader, close_in_forked_child, listen_private, trusted_peer_of
from kvcached.ranks.messages import Goodbye, Hello, Message, StatusRequest, TallyRequest, check_hello, encode
from kvcached.ranks.participant import AwaitStep, Effect, Participant, Perform, Reply
from kvcached.ranks.transactions import RankMessage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcached.ranks.operations import Op

_log = logging.getLogger("kvcached.ranks")
_GREETING_TIMEOUT_S: Final = 5.0
_STOP_TIMEOUT_S: Final = 5.0
_SEND_TIMEOUT_S: Final = 1  # an owner that has not read for so long, with its buffer full, is as good as gone
_MAP_TIMEOUT_S: Final = 60.0


class RankPort(Protocol):
    """The memory of a rank. No call raises what the device or the card's record did."""

    def perform(self, action: Action) -> Outcome: ...

    def set_limits(self, limits: LimitsRequest) -> Outcome: ...

    def report(self, report: Report) -> None: ...

    def status(self) -> MapperStatus: ...

    def tally(self) -> MapperTally: ...


class Gate(Protocol):
    """Knows which steps the engine's streams have passed."""

    def wait(self, step: int, timeout_s: float) -> bool:
        """Whether the streams have passed the step within the timeout."""

    def drain(self, timeout_s: float) -> bool:
        """Whether everything that was submitted has finished within the timeout."""

    def close(self) -> None:
        """No more steps will be submitted: wait for none that was not."""


class RankServer:
    """Serves one rank to the owner that connects first. `on_owner_lost` is called once when that owner has gone, whether it said
    goodbye or not, after what was under way has ended. Raises `PeerRefused` when a live process listens at `path`.

    `hello`: as `hello_of_rank` makes it. `fence_timeout_s`: how long an unmap waits for work in flight before it answers BUSY.
    """

    def __init__(
        self, path: Path, memory: RankPort, gate: Gate, hello: Hello, on_owner_lost: Callable[[], None], *, fence_timeout_s: float = 5.0
    ) -> None:
        self._path = path
        self._memory = memory
        self._gate = gate
        self._hello = hello
        self._on_owner_lost = on_owner_lost
        self._fence_timeout_s = fence_timeout_s
        self._participant = Participant()
        self._step_waits = Histogram()  # counted by the engine's thread alone
        self._lock = threading.Lock()  # the participant and the lanes
        self._maps: deque[tuple[int, MapHeld]] = deque()
        self._mapping = 0
        self._orphaned = False
        self._maps_done = threading.Condition(self._lock)
        self._fast: deque[tuple[int, Action]] = deque()  # for the reading thread
        self._slow: queue.SimpleQueue[Perform | AwaitStep | None] = queue.SimpleQueue()
        self._replies: deque[Reply] = deque()
        self._send_lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._stopping = threading.Event()
        self._listener = listen_private(path)
        close_in_forked_child(self._listener)
        self._lane = threading.Thread(target=self._run_slow_lane, name="kvcached-unmap", daemon=True)
        self._lane.start()
        self._thread = threading.Thread(target=self._serve, name="kvcached-mapper", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the engine's thread

    def apply_step_ops(self, ops: tuple[Op, ...]) -> None:
        """Perform the maps that a step needs, before it runs; unmaps follow behind it. Also what another thread is mapping just
        now is mapped when this returns. Raises `StateUnknown` when something that was promised could not be mapped, or the owner that
        promised it is gone."""
        if ops:
            begun_ns = time.monotonic_ns()
            with self._lock:
                if self._orphaned:
                    raise StateUnknown(f"the owner of {self._path} is gone, and with it the pages that this step reads")
                self._take(self._participant.step_ops(ops))
            self._run_maps()
            self._send_replies()
            with self._lock:
                ended = self._maps_done.wait_for(lambda: not self._maps and not self._mapping, _MAP_TIMEOUT_S)
            self._step_waits.observe(time.monotonic_ns() - begun_ns)
            if not ended:
                raise StateUnknown(f"pages that this step reads were not mapped within {_MAP_TIMEOUT_S:g} s")
        if self._participant.broken is not None:
            raise StateUnknown(self._participant.broken.reason, self._participant.broken.pages)

    # ------------------------------------------------------------------ the lanes

    def _take(self, effects: list[Effect]) -> None:
        """Hand every effect to whoever carries it out, in order. With the lock held."""
        for effect in effects:
            if isinstance(effect, Reply):
                self._replies.append(effect)
            elif isinstance(effect, AwaitStep):
                self._slow.put(effect)
            elif isinstance(effect.action, MapHeld):
                self._maps.append((effect.id, effect.action))
            elif isinstance(effect.action, AcquireHandles | MapFresh):
                self._fast.append((effect.id, effect.action))
            else:
                self._slow.put(effect)

    def _run_maps(self) -> None:
        """Whoever comes first maps; nobody returns while another is at it without `apply_step_ops` waiting for that."""
        while True:
            with self._lock:
                if not self._maps:
                    return
                id, action = self._maps.popleft()
                self._mapping += 1
            outcome = self._memory.perform(action)
            with self._lock:
                self._take(self._participant.performed(id, outcome))
                self._mapping -= 1
                self._maps_done.notify_all()

    def _run_fast(self) -> None:
        self._run_maps()
        while self._fast:
            id, action = self._fast.popleft()
            outcome = self._memory.perform(action)
            with self._lock:
                self._take(self._participant.performed(id, outcome))
            self._send_replies()
            self._run_maps()

    def _run_slow_lane(self) -> None:
        try:
            self._work_slowly()
        except BaseException:  # raised again: the owner must not wait for what nobody does any more
            self._hang_up()
            raise

    def _work_slowly(self) -> None:
        while (effect := self._slow.get()) is not None and not self._stopping.is_set():
            if isinstance(effect, AwaitStep):  # without an owner what has not passed has not begun: one wait at most is still to end
                passed = self._gate.wait(effect.step, 0.0 if self._orphaned else self._fence_timeout_s)
                with self._lock:
                    self._take(self._participant.step_passed(effect.id, passed))
            else:
                outcome = self._memory.perform(effect.action)
                with self._lock:
                    self._take(self._participant.performed(effect.id, outcome))
            self._send_replies()

    def _send_replies(self) -> None:
        """In their order, whichever thread sends them."""
        with self._send_lock:
            while self._replies:
                self._transmit(self._replies.popleft().answer, 0)

    def _send(self, message: Message, number: int) -> None:
        with self._send_lock:
            self._transmit(message, number)

    def _transmit(self, message: Message, number: int) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            connection.sendall(encode(message, number))
        except OSError:  # part of a frame may have been sent: nothing more can follow it
            self._hang_up()

    def _hang_up(self) -> None:
        """The reading thread notices."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------ the reading thread

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # stop() woke it
                return
            reader = self._admit(connection)
            if reader is not None:
                try:
                    self._answer_until_gone(reader)
                finally:
                    self._let_go()
                return

    def _admit(self, connection: socket.socket) -> FrameReader | None:
        connection.settimeout(_GREETING_TIMEOUT_S)
        reader = FrameReader(connection)
        try:
            trusted_peer_of(connection)
            theirs, number = reader.receive()
            if not isinstance(theirs, Hello):
                raise PeerRefused("its first message was no greeting")
            connection.sendall(encode(self._hello, number))
            check_hello(self._hello, theirs)
        except (PeerError, OSError) as error:
            _log.warning("refused an owner at %s: %s", self._path, error)
            connection.close()
            return None
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0))
        close_in_forked_child(connection)
        self._connection = connection
        return None if self._stopping.is_set() else reader  # stop() may have looked before there was a connection

    def _answer_until_gone(self, reader: FrameReader) -> None:
        while True:
            try:
                message, number = reader.receive()
                if isinstance(message, Goodbye):
                    _log.info("the owner of %s said goodbye", self._path)
                    return
                self._dispatch(message, number)
            except (PeerError, StateUnknown) as error:
                if not self._stopping.is_set():
                    log = _log.warning if isinstance(error, PeerLost) else _log.error
                    log("the owner of %s is lost: %s", self._path, error)
                return

    def _dispatch(self, message: Message, number: int) -> None:
        match message:
            case LimitsRequest():
                self._send(self._memory.set_limits(message), number)
            case Report():
                self._memory.report(message)
                self._send(Outcome(Verdict.DONE), number)
            case StatusRequest():
                self._send(self._memory.status(), number)
            case TallyRequest():
                self._send(replace(self._memory.tally(), step=self._step_waits.numbers()), number)
            case _ if isinstance(message, RankMessage):
                with self._lock:
                    self._take(self._participant.received(message))
                self._run_fast()
                self._send_replies()
            case _:
                raise PeerRefused(f"it sent {type(message).__name__}, which an owner may not")

    def _let_go(self) -> None:
        """The owner is gone. What was begun ends first: the slow lane, and what the engine has queued."""
        with self._lock:
            self._orphaned = True
            self._participant.owner_lost()
        if self._stopping.is_set():
            return
        self._gate.close()
        self._slow.put(None)
        self._lane.join()
        told = False
        while not self._gate.drain(_STOP_TIMEOUT_S):
            if not told:
                _log.error("work in flight has not finished; the memory behind %s is kept until it has", self._path)
                told = True
            if self._stopping.is_set():
                return
        self._on_owner_lost()
        self._disconnect()

    def _disconnect(self) -> None:
        """For an owner that says goodbye this is the word that the memory is given back."""
        if self._connection is not None:
            self._connection.close()

    # ------------------------------------------------------------------ stopping

    def stop(self) -> bool:
        """Refuse new work, wake blocked reads, let a driver call that runs end. The owner hears that the rank stops, and stays connected:
        give the memory back, then `close`. False: something has not ended within 5 s; it was reported, it goes on, and the memory must
        not be taken away underneath. May be called again."""
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        if not self._stopping.is_set():
            self._stopping.set()
            self._send(Goodbye(), 0)
            self._gate.close()
            self._slow.put(None)
            for sock, how in ((self._listener, socket.SHUT_RDWR), (self._connection, socket.SHUT_RD)):
                if sock is not None:
                    with contextlib.suppress(OSError):
                        sock.shutdown(how)
        others = [thread for thread in (self._thread, self._lane) if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in others):
            _log.error("a call behind %s has not ended within %g s: its memory is kept", self._path, _STOP_TIMEOUT_S)
            return False
        return True

    def close(self) -> bool:
        """`stop`, then let the owner go, and remove the socket last. May be called again."""
        if not self.stop():
            return False
        self._disconnect()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        return True
