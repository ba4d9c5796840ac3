# SPDX-License-Identifier: Apache-2.0
"""The arena of `fake`: page states, handle cache and transactions over a driver without memory."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final

from kvcached.errors import DeviceError, KVCachedError, Misuse, StateUnknown
from kvcached.vmm.api import ArenaConfig, ArenaStats, Run, ZeroBacking
from kvcached.vmm.fake_driver import FakeDriver, Journal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_HISTORY: Final = 256


class _State(Enum):
    MAPPED = "mapped"
    PREPARED = "prepared for unmapping"
    QUARANTINED = "quarantined"


@dataclass
class _RunRecord:
    run: Run
    handles: list[int]  # one per plane
    state: _State


class _Outcome(Enum):
    PREPARED = "is prepared"
    FAILED = "could not be prepared"
    COMMITTED = "was committed"
    ABORTED = "was aborted"
    ABORTED_EARLY = "was aborted before this prepare came"


@dataclass
class _Transaction:
    outcome: _Outcome
    runs: list[Run]
    prepare_error: KVCachedError | None = None
    commit_error: KVCachedError | None = None


class FakeArena:
    """See `kvcached.vmm.api.Arena` for what the calls promise."""

    def __init__(self, driver: FakeDriver, config: ArenaConfig, granularity_bytes: int, on_close: Callable[[], None]) -> None:
        self._driver = driver
        self._config = config
        self._on_close = on_close
        self._stride_bytes = config.plane_stride_bytes if config.planes > 1 else 0
        self._range_bytes = (config.planes - 1) * self._stride_bytes + config.pages * config.page_bytes
        self._lock = threading.RLock()
        self._closed = False
        self._runs: dict[int, _RunRecord] = {}  # by first page
        self._owner: dict[int, _RunRecord] = {}  # by page
        self._used: set[int] = set()
        self._cache: dict[int, list[int]] = defaultdict(list)  # by run length
        self._lost: dict[int, int] = {}  # handle -> bytes
        self._transactions: OrderedDict[int, _Transaction] = OrderedDict()
        self._finished: OrderedDict[int, None] = OrderedDict()
        self._zero: int | None = None
        self._base_address = self._driver.reserve(self._range_bytes, granularity_bytes)
        self._open_zero()

    @property
    def base_address(self) -> int:
        return self._base_address

    @property
    def config(self) -> ArenaConfig:
        return self._config

    def stats(self) -> ArenaStats:
        with self._open():
            held = {state: self._bytes(state) for state in _State}
            return ArenaStats(
                mapped_bytes=held[_State.MAPPED],
                prepared_bytes=held[_State.PREPARED],
                cached_bytes=sum(self._run_bytes(pages) * len(handles) for pages, handles in self._cache.items()),
                zero_bytes=self._config.page_bytes if self._zero is not None else 0,
                quarantined_bytes=held[_State.QUARANTINED] + sum(self._lost.values()),
                mapped_pages=sum(record.run.count for record in self._runs.values() if record.state is _State.MAPPED),
                reserved_bytes=self._range_bytes,
            )

    def access(self, page: int, plane: int = 0) -> str:
        """What may be done at `page`, for tests: "" (it would fault), "r" (it reads as zero) or "rw"."""
        record = self._owner.get(page)
        whole = record is not None and record.state is _State.MAPPED
        return self._driver.access(self._address(record.run.first if record and whole else page, plane))

    def acquire(self, run_pages: int, runs: int) -> None:
        with self._open():
            if not 0 < run_pages <= self._config.pages or runs < 0 or runs > self._config.pages // run_pages:
                raise Misuse(f"run_pages, runs: {runs} runs of {run_pages} pages in a range of {self._config.pages}")
            journal, handles = Journal(self._driver, self._lost), list[int]()
            with self._undone(journal, ()):
                for _ in range(runs * self._config.planes):
                    handles.append(journal.create(None, self._run_bytes(run_pages)))
            self._cache[run_pages].extend(reversed(handles))

    def trim(self, run_pages: int = 0, runs: int = 2**63 - 1) -> int:
        with self._open():
            left, released_bytes = runs * self._config.planes, 0
            for pages in sorted(self._cache, reverse=True):
                while left and self._cache[pages] and run_pages in (0, pages):
                    handle = self._cache[pages].pop()
                    error = self._release(handle, pages)
                    if error:
                        raise _not_undone(error, self._fenced_pages())
                    left -= 1
                    released_bytes += self._run_bytes(pages)
            return released_bytes

    def map(self, runs: Sequence[Run]) -> None:
        with self._open():
            self._check(runs, None)
            records = {run: _RunRecord(run, [0] * self._config.planes, _State.MAPPED) for run in runs}
            journal = Journal(self._driver, self._lost)
            with self._undone(journal, records.values()):
                for plane in range(self._config.planes):
                    for record in records.values():
                        record.handles[plane] = self._handle(journal, record.run)
                self._place(journal, records.values())
            self._settle(records.values(), _State.MAPPED)

    def unmap(self, runs: Sequence[Run], keep: bool = False) -> None:
        with self._open():
            self._take_off(runs)
            error = self._let_go(runs, keep)
            if error:
                raise error

    def prepare(self, tx: int, runs: Sequence[Run]) -> None:
        with self._open():
            known = self._transactions.get(_checked(tx))
            if known:
                _answer_prepare(tx, known, runs)
                return
            try:
                self._take_off(runs)
            except KVCachedError as error:
                self._finish(tx, _Transaction(_Outcome.FAILED, [], prepare_error=error))
                raise
            self._transactions[tx] = _Transaction(_Outcome.PREPARED, list(runs))

    def commit(self, tx: int, keep: bool = False) -> None:
        with self._open():
            known = self._transactions.get(tx)
            if known and known.outcome is _Outcome.PREPARED:
                known.commit_error = self._let_go(known.runs, keep)
                known.outcome = _Outcome.COMMITTED
                self._finish(tx, known)
            elif not known or known.outcome is not _Outcome.COMMITTED:
                raise Misuse(f"tx: transaction {tx} {known.outcome.value if known else 'is not known'}")
            if known.commit_error:
                raise known.commit_error

    def abort(self, tx: int) -> None:
        with self._open():
            known = self._transactions.get(_checked(tx))
            if known is None:
                self._finish(tx, _Transaction(_Outcome.ABORTED_EARLY, []))
            elif known.outcome is _Outcome.COMMITTED:
                raise Misuse(f"tx: transaction {tx} was committed")
            elif known.outcome is _Outcome.PREPARED:
                self._put_back(known)
                known.outcome = _Outcome.ABORTED
                self._finish(tx, known)

    def quarantined(self) -> list[Run]:
        with self._open():
            return sorted(record.run for record in self._runs.values() if record.state is _State.QUARANTINED)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._on_close()
            errors = [error for error in self._take_down() if error]
            if errors:
                raise errors[0]

    # ---- checks and states ------------------------------------------------------------------------------------------

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise Misuse("the arena is closed")
            yield

    def _run_bytes(self, pages: int) -> int:
        return pages * self._config.page_bytes

    def _bytes(self, state: _State) -> int:
        return sum(self._run_bytes(record.run.count) for record in self._runs.values() if record.state is state) * self._config.planes

    def _address(self, page: int, plane: int) -> int:
        return self._base_address + plane * self._stride_bytes + page * self._config.page_bytes

    def _reads_zero(self, page: int) -> bool:
        return self._zero is not None and (self._config.zero_backing is ZeroBacking.ALL or page in self._used)

    def _fenced_pages(self) -> tuple[int, ...]:
        return tuple(page for run in self.quarantined() for page in range(run.first, run.first + run.count))

    def _check(self, runs: Sequence[Run], wanted: _State | None) -> None:
        named: set[int] = set()
        for run in runs:
            if run.count <= 0 or run.first < 0 or run.first + run.count > self._config.pages:
                raise Misuse(f"runs: pages {run.first} + {run.count} lie outside the {self._config.pages} pages of the arena")
            for page in range(run.first, run.first + run.count):
                record = self._owner.get(page)
                state = record.state if record else None
                if state is not wanted or page in named:
                    raise Misuse(f"runs: page {page} is {'named twice' if page in named else state.value if state else 'not mapped'}")
                named.add(page)
            if wanted and (run.first not in self._runs or self._runs[run.first].run != run):
                raise Misuse(f"runs: pages {run.first} + {run.count} are not one mapped run")

    def _settle(self, records: Iterable[_RunRecord], state: _State | None) -> None:
        for record in records:
            pages = range(record.run.first, record.run.first + record.run.count)
            if state is None:
                del self._runs[record.run.first]
                for page in pages:
                    del self._owner[page]
                continue
            record.state = state
            self._runs[record.run.first] = record
            self._owner.update(dict.fromkeys(pages, record))
            if state is _State.MAPPED:
                self._used.update(pages)

    @contextmanager
    def _undone(self, journal: Journal, records: Iterable[_RunRecord]) -> Iterator[None]:
        try:
            yield
        except DeviceError as error:
            journal.roll_back()
            self._settle((record for record in records if record.run in journal.stuck), _State.QUARANTINED)
            if journal.clean:
                raise
            raise _not_undone(error, self._fenced_pages()) from error

    # ---- driver work ------------------------------------------------------------------------------------------------

    def _open_zero(self) -> None:
        if self._config.zero_backing is ZeroBacking.NEVER:
            return
        journal = Journal(self._driver, self._lost)
        try:
            with self._undone(journal, ()):
                zero = journal.create(None, self._config.page_bytes)
                if self._config.zero_backing is ZeroBacking.ALL:
                    self._driver.grant(self._show_zero(journal, Run(0, self._config.pages), zero), "r")
        except KVCachedError:
            self._driver.free_range(self._range_bytes)
            raise
        self._zero = zero

    def _release(self, handle: int, pages: int) -> DeviceError | None:
        try:
            self._driver.release(handle)
        except DeviceError as error:
            self._lost[handle] = self._run_bytes(pages)
            return error
        return None

    def _handle(self, journal: Journal, run: Run) -> int:
        cached = self._cache[run.count]
        if not cached:
            return journal.create(run, self._run_bytes(run.count))
        handle = cached.pop()
        journal.add(run, partial(cached.append, handle))
        return handle

    def _places(self, run: Run) -> list[tuple[int, int]]:
        """(page, address) of every page of a run, plane by plane."""
        pages = range(run.first, run.first + run.count)
        return [(page, self._address(page, plane)) for plane in range(self._config.planes) for page in pages]

    def _show_zero(self, journal: Journal, run: Run, zero: int) -> list[tuple[int, int]]:
        for _, address in self._places(run):
            journal.map(run, address, zero)
        return [(address, self._config.page_bytes) for _, address in self._places(run)]

    def _place(self, journal: Journal, records: Iterable[_RunRecord]) -> None:
        spans = []
        for record in records:
            for page, address in self._places(record.run):
                if self._zero is not None and self._reads_zero(page):
                    journal.unmap(record.run, address, self._zero, self._config.page_bytes, "r")
            for plane, handle in enumerate(record.handles):
                spans.append((self._address(record.run.first, plane), self._run_bytes(record.run.count)))
                journal.map(record.run, spans[-1][0], handle)
        self._driver.grant(spans, "rw")

    def _take_off(self, runs: Sequence[Run]) -> None:
        self._check(runs, _State.MAPPED)
        records = [self._runs[run.first] for run in runs]
        journal, zeros = Journal(self._driver, self._lost), list[tuple[int, int]]()
        with self._undone(journal, records):
            for record in records:
                run_bytes = self._run_bytes(record.run.count)
                for plane, handle in enumerate(record.handles):
                    journal.unmap(record.run, self._address(record.run.first, plane), handle, run_bytes, "rw")
                if self._zero is not None:
                    zeros += self._show_zero(journal, record.run, self._zero)
            self._driver.grant(zeros, "r")
        self._settle(records, _State.PREPARED)

    def _let_go(self, runs: Sequence[Run], keep: bool) -> StateUnknown | None:
        records = [self._runs[run.first] for run in runs]
        errors = []
        for plane in reversed(range(self._config.planes)):
            for record in reversed(records):
                if keep:
                    self._cache[record.run.count].append(record.handles[plane])
                else:
                    errors.append(self._release(record.handles[plane], record.run.count))
        self._settle(records, None)
        first = next((error for error in errors if error), None)
        return _not_undone(first, self._fenced_pages()) if first else None

    def _put_back(self, known: _Transaction) -> None:
        records = [self._runs[run.first] for run in known.runs]
        journal = Journal(self._driver, self._lost)
        try:
            with self._undone(journal, records):
                self._place(journal, records)
        except KVCachedError:
            known.runs = [run for run in known.runs if run not in journal.stuck]
            raise
        self._settle(records, _State.MAPPED)

    def _finish(self, tx: int, transaction: _Transaction) -> None:
        transaction.runs = []
        self._transactions[tx] = transaction
        self._finished[tx] = None
        if len(self._finished) > _HISTORY:
            del self._transactions[self._finished.popitem(last=False)[0]]

    def _take_down(self) -> Iterator[DeviceError | None]:
        """Everything goes as far as the driver lets it. Yields what went wrong, fenced runs left out."""
        for record in self._runs.values():
            fenced = record.state is _State.QUARANTINED
            errors = [self._driver.attempt(self._driver.clear, address) for _, address in self._places(record.run)]
            if not any(errors):
                errors = [self._driver.attempt(self._driver.release, handle) for handle in record.handles]
            yield from () if fenced else errors
        for page in range(self._config.pages) if self._zero is not None else ():
            yield from (self._driver.attempt(self._driver.clear, self._address(page, plane)) for plane in range(self._config.planes))
        for handle in (handle for handles in self._cache.values() for handle in handles):
            yield self._driver.attempt(self._driver.release, handle)
        for handle in self._lost:
            self._driver.attempt(self._driver.release, handle)
        if self._zero is not None:
            yield self._driver.attempt(self._driver.release, self._zero)
        yield self._driver.attempt(self._driver.free_range, self._range_bytes)


def _checked(tx: int) -> int:
    if not 0 < tx < 2**64:
        raise Misuse(f"tx: {tx} is no transaction number")
    return tx


def _answer_prepare(tx: int, known: _Transaction, runs: Sequence[Run]) -> None:
    if known.outcome is _Outcome.ABORTED_EARLY:
        raise Misuse(f"tx: transaction {tx} {known.outcome.value}")
    if known.outcome is _Outcome.PREPARED and known.runs != list(runs):
        raise Misuse(f"tx: transaction {tx} is prepared with other runs")
    if known.prepare_error:
        raise known.prepare_error


def _not_undone(cause: DeviceError, pages: Iterable[int]) -> StateUnknown:
    return StateUnknown(f"undoing a failed call failed too, what it concerns is fenced off ({cause})", tuple(pages))
