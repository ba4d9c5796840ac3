# SPDX-License-Identifier: Apache-2.0
"""The port of an owner to all its ranks: one coordinator under one lock, a link to each rank, one thread that listens.

map       warm-up, or an engine without step messages: on all ranks now. Else from credit, with the next step
unmap     never sent: taken back. While steps run: with the next step, then the credit is released. Idle: prepared, then committed
the rest  asked of every rank; limits hold on all of them or on none
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from kvcached.errors import Misuse, PeerError, PeerLost, PeerTimeout
from kvcached.ranks.api import LimitsRequest, MapperStatus, MapperTally, Outcome, Report, Runs, Verdict
from kvcached.ranks.coordinator import Coordinator, Effect, Fail, Remind, Send, Settle
from kvcached.ranks.credit import CreditAccount
from kvcached.ranks.facts import MapperFacts, agreed
from kvcached.ranks.inquiry import Answers, Inquiries
from kvcached.ranks.limits import SharedLimits
from kvcached.ranks.link import Link, connect_all
from kvcached.ranks.loop import Loop
from kvcached.ranks.messages import Goodbye, Hello, Message, StatusRequest, TallyRequest
from kvcached.ranks.operations import pages_of
from kvcached.ranks.scale import Scale
from kvcached.ranks.transactions import Answer, classes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvcached.ranks.operations import Op

_log = logging.getLogger("kvcached.ranks")
_STEPPING_S: Final = 0.05
"""An engine whose last step message is younger takes steps: what can wait for the next one does."""
_CLOSE_TIMEOUT_S: Final = 5.0
_CLOSED: Final = "the pool is closed"
_DONE: Final = Outcome(Verdict.DONE)
_A = TypeVar("_A", MapperStatus, MapperTally)


class RankGroup:
    """Implements `kvcached.ranks.api.MapperPort` over the ranks whose sockets are `paths`, in rank order. Safe to use from any thread.

    Mappers may start later than their owner. Raises `PeerTimeout` when one does not answer within `timeout_s`, `HandshakeMismatch`
    when one differs or its pages are numbered otherwise, `PeerRefused` for a mapper of another user.
    `ahead_pages`: so many pages of credit are held ahead of need while maps go with steps, and the ranks hear of promised maps before
    their step, which so finds them mapped. 0: neither.
    Bytes are those of the rank that needs most for a page (`shared_facts.geometry`), also in reports and limits.
    """

    def __init__(self, paths: Sequence[Path], hello: Hello, timeout_s: float, *, ahead_pages: int = 0) -> None:
        self._links = connect_all(list(paths), hello, timeout_s)
        try:
            self.facts = [MapperFacts.from_text(link.hello.facts) for link in self._links]
            self.shared_facts = agreed(self.facts)
        except PeerError:
            for link in self._links:
                link.close()
            raise
        steps_bytes = [facts.geometry.release_step_bytes for facts in self.facts]
        self._scale = Scale(steps_bytes, self.shared_facts.geometry.release_step_bytes)
        self._coordinator = Coordinator(len(self._links), names=[link.name for link in self._links])
        self._credit = CreditAccount(
            self._coordinator, self._begin, time.monotonic, unit_bytes=self._scale.unit_bytes, ahead_pages=ahead_pages
        )
        self._tells_at_once = ahead_pages > 0
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._then: dict[int, Callable[[Outcome], None]] = {}  # by transaction
        self._unsent: set[tuple[int, int]] = set()  # promised runs that no rank was told of
        self._recalled: list[tuple[int, Runs, Future[Outcome]]] = []  # until the operation is complete everywhere
        self._inquiries = Inquiries()
        self._limits = SharedLimits([link.name for link in self._links], self._ask_limits)
        self._reporting: set[int] = set()  # ranks whose last report is on its way
        self._tallies: Future[Answers] | None = None  # asked for last
        self._in_band = False
        self._last_step_s = float("-inf")
        self._failure = ""
        self._tell: Callable[[str], None] | None = None
        self._deliveries: list[Callable[[], None]] = []
        self._lost: list[tuple[Link, str]] = []
        self._closing = False
        self._gone = threading.Condition(self._lock)
        self._loop = Loop(self._ready)
        for link in self._links:
            self._loop.watch(link)
        self._loop.start()

    # ------------------------------------------------------------------ steps

    def begin_steps(self) -> None:
        """From here on step messages carry `step_ops` to every rank: maps are promised from credit."""
        with self._turn():
            self._in_band = True

    def step_ops(self) -> tuple[Op, ...]:
        """What rides on the step message that is being made. Every rank must get it before it runs the step."""
        with self._turn():
            self._last_step_s = time.monotonic()
            self._unsent.clear()
            return self._coordinator.tail()

    # ------------------------------------------------------------------ the port

    def map(self, runs: Runs, *, urgent: bool) -> Future[Outcome]:
        runs = tuple((first, count) for first, count in runs)
        future: Future[Outcome] = Future()
        with self._turn():
            if self._in_band:
                self._map_in_band(runs, urgent, future)
            else:
                self._begin(self._coordinator.map_now(runs, urgent), lambda outcome: self._finish(future, outcome))
        return future

    def unmap(self, runs: Runs, after_step: int) -> Future[Outcome]:
        runs = tuple((first, count) for first, count in runs)
        future: Future[Outcome] = Future()
        with self._turn():
            stepping = time.monotonic() - self._last_step_s < _STEPPING_S
            number = self._coordinator.recall(runs, after_step) if stepping or self._unsent.issuperset(runs) else None
            if number is None:
                self._begin(self._coordinator.shrink(runs, after_step), lambda outcome: self._finish(future, outcome))
            else:
                self._unsent.difference_update(runs)
                self._recalled.append((number, runs, future))
                self._release_recalled()
                self._loop.after(_STEPPING_S, self._flush_recalled)
        return future

    def trim(self) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        with self._turn():
            self._credit.trim(lambda outcome: self._finish(future, outcome))
        return future

    def set_limits(self, limits: LimitsRequest) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        with self._turn():
            self._limits.change(limits, lambda outcome: self._finish(future, outcome))
        return future

    def report(self, report: Report) -> None:
        with self._turn():
            for link in self._links:
                if link.rank not in self._reporting and not self._failure:
                    self._reporting.add(link.rank)
                    self._ask([link.rank], lambda rank: self._scale.report_of(rank, report), self._reporting.difference_update)

    def when_lost(self, tell: Callable[[str], None]) -> None:
        with self._turn():
            self._tell = tell
            if self._failure:
                reason = self._failure
                self._deliveries.append(lambda: tell(reason))

    def status(self, timeout_s: float) -> MapperStatus:
        """The sums over all ranks. Raises `PeerTimeout`, `PeerLost`."""
        by_rank = self.status_by_rank(timeout_s)
        return MapperStatus(*(sum(getattr(status, name) for status in by_rank) for name in MapperStatus.__slots__))

    def status_by_rank(self, timeout_s: float) -> list[MapperStatus]:
        """What each rank's arena holds, in that rank's bytes. Raises `PeerTimeout`, `PeerLost`."""
        return self._await(self._ask_all(StatusRequest()), MapperStatus, timeout_s)

    def tally(self, timeout_s: float) -> list[MapperTally]:
        """What each rank's work took. Ranks that owe an answer are not asked again. Raises `PeerTimeout`, `PeerLost`."""
        if self._tallies is None or self._tallies.done():
            self._tallies = self._ask_all(TallyRequest())
        return self._await(self._tallies, MapperTally, timeout_s)

    def _ask_all(self, request: StatusRequest | TallyRequest) -> Future[Answers]:
        answered: Future[Answers] = Future()
        with self._turn():
            if self._failure:
                raise PeerLost(self._failure)
            self._ask(range(len(self._links)), lambda _: request, answered.set_result)
        return answered

    def _await(self, answered: Future[Answers], kind: type[_A], timeout_s: float) -> list[_A]:
        try:
            by_rank = answered.result(timeout_s)
        except FutureTimeout as error:
            raise PeerTimeout(f"not every one of {len(self._links)} ranks answered within {timeout_s:g} s") from error
        answers = [answer for _, answer in sorted(by_rank.items()) if isinstance(answer, kind)]
        if len(answers) < len(self._links):
            raise PeerLost(self._failure or "a rank is gone")
        return answers

    def close(self) -> None:
        """Say goodbye, and wait, bounded, until every rank has given its memory back. A second call does nothing."""
        with self._turn():
            if self._closing:
                return
            self._closing = True
            for link in self._links:
                self._transmit(link, Goodbye())
            self._lose_all()
            self._gone.wait_for(lambda: all(link.gone for link in self._links), _CLOSE_TIMEOUT_S)
            self._end_waiting(_CLOSED)
            for link in self._links:
                link.gone = True
        self._loop.stop(_CLOSE_TIMEOUT_S)
        for link in self._links:
            link.close()

    # ------------------------------------------------------------------ with the steps

    def _map_in_band(self, runs: tuple[tuple[int, int], ...], urgent: bool, future: Future[Outcome]) -> None:
        need = classes_of(runs)

        def claimed(outcome: Outcome) -> None:
            if outcome.verdict is Verdict.DONE:
                outcome = self._promise(runs, urgent)
                if urgent:
                    self._credit.fill_up(need)
            self._finish(future, outcome)

        self._credit.claim(need, urgent, claimed)

    def _promise(self, runs: tuple[tuple[int, int], ...], urgent: bool) -> Outcome:
        if not self._coordinator.promise(runs):
            return Outcome(Verdict.BUSY, reason=self._failure or "a rank is too far behind with what it was told to map and unmap")
        self._unsent.update(runs)
        if not urgent:  # nobody's step waits for it: the ranks map it before one does
            self._carry_out(self._coordinator.flush())
        elif self._tells_at_once:  # by the loop's thread: the caller, which is making a step, has no time for it
            self._loop.after(0.0, self._tell_of_promises)
        return _DONE

    def _tell_of_promises(self) -> None:
        """So that the step finds mapped what it reads. What it was told of, or what was taken back, needs no word."""
        with self._turn():
            if self._unsent and not self._closing:
                self._carry_out(self._coordinator.flush())

    def _release_recalled(self) -> None:
        """What is complete on every rank is unmapped and credit now, and nobody has a claim on it. Credit that cannot be released
        just now changes nothing about that: it goes with the next trim."""
        complete = self._coordinator.completed_everywhere
        due = [item for item in self._recalled if item[0] <= complete]
        self._recalled = [item for item in self._recalled if item[0] > complete]
        for number, runs, future in due:
            reason = self._coordinator.stranded(number)
            if reason:
                _log.error("quarantined: %s", reason)
                self._finish(future, Outcome(Verdict.UNKNOWN, pages=pages_of(runs), reason=reason))
            else:
                self._credit.release(classes_of(runs), lambda outcome, future=future: self._finish(future, _unmapped(outcome)))  # type: ignore[misc]

    def _flush_recalled(self) -> None:
        """No step came for a while."""
        with self._turn():
            if self._recalled and not self._closing:
                self._carry_out(self._coordinator.flush())

    # ------------------------------------------------------------------ turns

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One event under the lock. What it ends is told afterwards without it."""
        if os.getpid() != self._pid:
            raise Misuse("this process was forked from the one that owns this pool; open a pool of its own")
        with self._lock:
            yield
            self._lose_all()
            deliveries, self._deliveries = self._deliveries, []
        for deliver in deliveries:
            deliver()

    def _begin(self, asked: tuple[int, list[Effect]], then: Callable[[Outcome], None]) -> None:
        if self._closing:
            then(Outcome(Verdict.BROKEN, reason=_CLOSED))
            return
        tx, effects = asked
        self._then[tx] = then
        self._carry_out(effects)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(rank, message):
                    self._unsent.clear()  # every message carries the tail
                    self._transmit(self._links[rank], message)
                case Settle(tx, outcome):
                    self._then.pop(tx, _nothing)(outcome)
                case Remind(tx, attempt, after_s):
                    self._loop.after(after_s, lambda tx=tx, attempt=attempt: self._remind(tx, attempt))  # type: ignore[misc]
                case Fail(reason):
                    self._fail(reason)

    def _remind(self, tx: int, attempt: int) -> None:
        with self._turn():
            if not self._closing:
                self._carry_out(self._coordinator.reminded(tx, attempt))

    def _transmit(self, link: Link, message: Message, number: int = 0) -> None:
        if not link.listens:
            return
        had_waiting = link.has_waiting
        try:
            link.send(message, number)
            if link.has_waiting is not had_waiting:
                self._loop.watch_writing(link, wanted=link.has_waiting)
        except PeerError as error:
            self._lost.append((link, str(error)))

    def _finish(self, future: Future[Outcome], outcome: Outcome) -> None:
        self._deliveries.append(lambda: future.set_result(outcome))

    def _ask(self, ranks: Sequence[int], make: Callable[[int], Message], then: Callable[[Answers], object]) -> None:
        """Ask these ranks something outside the transactions, and go on when all have answered; None for those that are gone."""
        asked = [rank for rank in ranks if self._links[rank].listens]
        number = self._inquiries.open(asked, {rank: None for rank in ranks}, then)
        for rank in asked:
            self._transmit(self._links[rank], make(rank), number)

    def _ask_limits(self, limits: LimitsRequest, ranks: Sequence[int], then: Callable[[Answers], None]) -> None:
        self._ask(ranks, lambda rank: self._scale.limits_of(rank, limits), then)

    # ------------------------------------------------------------------ what comes from the ranks

    def _ready(self, link: Link) -> None:
        with self._turn():
            if link.gone:
                return
            try:
                if link.has_waiting:
                    link.flush()
                    self._loop.watch_writing(link, wanted=link.has_waiting)
                for message, number in link.receive():
                    self._received(link, message, number)
            except PeerError as error:
                self._lost.append((link, str(error)))

    def _received(self, link: Link, message: Message, number: int) -> None:
        if isinstance(message, Answer):
            answer = replace(message, outcome=self._scale.to_owner(link.rank, message.outcome))
            self._carry_out(self._coordinator.answered(link.rank, answer))
            self._release_recalled()
        elif isinstance(message, Goodbye):
            link.said_goodbye = True
            self._miss(link, "its engine's worker has stopped")
        else:
            self._inquiries.answered(link.rank, number, message)

    def _lose_all(self) -> None:
        while self._lost:
            self._lose(*self._lost.pop(0))

    def _lose(self, link: Link, reason: str) -> None:
        """The rank is gone. While closing that is what is waited for; else the whole pool fails."""
        if link.gone:
            return
        link.gone = True
        self._loop.forget(link)
        self._gone.notify_all()
        self._miss(link, f"it is gone: {reason}")

    def _miss(self, link: Link, reason: str) -> None:
        """It answers nothing any more."""
        self._inquiries.lost(link.rank)
        if not self._closing:
            self._carry_out(self._coordinator.lost(link.rank, reason))

    def _fail(self, reason: str) -> None:
        self._failure = reason
        orderly = any(link.said_goodbye for link in self._links)
        _log.log(logging.INFO if orderly else logging.ERROR, "%s", reason)
        self._end_waiting(reason)
        if self._tell is not None:
            tell = self._tell
            self._deliveries.append(lambda: tell(reason))

    def _end_waiting(self, reason: str) -> None:
        """Every future ends."""
        outcome = Outcome(Verdict.BROKEN, reason=reason)
        for _, _, future in self._recalled:
            self._finish(future, outcome)
        self._recalled.clear()
        while self._then:
            self._then.popitem()[1](outcome)
        for link in self._links:
            self._inquiries.lost(link.rank)


def _unmapped(release: Outcome) -> Outcome:
    return _DONE if release.verdict in (Verdict.EXHAUSTED, Verdict.REFUSED, Verdict.BUSY) else release


def _nothing(_: Outcome) -> None:
    """Whoever waited was told already, when the group was closed."""
