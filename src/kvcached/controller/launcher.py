# SPDX-License-Identifier: Apache-2.0
"""The servers of one model that we run ourselves: started, put to sleep, woken, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcached import processes
from kvcached.controller.adoption import why_not
from kvcached.controller.backends import BackendFailed, answers
from kvcached.controller.choice import Replica
from kvcached.controller.config import server_name
from kvcached.controller.engine_command import command_of, environment_of, purpose_of
from kvcached.controller.fleet import FIRST_PAUSE_S, LONGEST_PAUSE_S
from kvcached.controller.journal import Journal
from kvcached.controller.ports import free_port, is_refused, port_of
from kvcached.controller.process import EngineProcess, Job, Listener
from kvcached.controller.states import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import aiohttp

    from kvcached.controller.adoption import Purpose, Record
    from kvcached.controller.config import Model
    from kvcached.controller.controls import EngineControls, KvMemory
    from kvcached.setting_types import Amount

_log = logging.getLogger("kvcached.controller")
POLL_S: Final = 0.2
_ADOPTION_TIMEOUT_S: Final = 20.0
_ADVICE: Final = {"Sleep mode is not supported": "the engine found no GPU: write `card: host:0`, or `sleep: kv` or `stop`"}
"""What an engine may say in the end, and what to do about it."""


class EngineBackend:
    """`controls`: for sleep that the engine does itself; `kv_memory`: of each replica, if it is elastic.

    `on_ended(reason)`: told when the last of its servers ended by itself. One that ended while others run is started again here,
    after a pause that doubles.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        environ: Mapping[str, str],
        log_dir: Path,
        session: aiohttp.ClientSession,
        controls: EngineControls | None,
        kv_memory: list[KvMemory],
    ) -> None:
        self._name = name
        self._model = model
        self._environ = environ
        self._log_dir = log_dir
        self._session = session
        self._controls = controls
        self._kv_memory = kv_memory
        self._processes: dict[str, EngineProcess] = {}
        self._replicas: list[Replica] = []
        self._revivals: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Lock()
        self.journal = Journal()
        self.on_ended: Callable[[str], None] = lambda reason: None

    @property
    def replicas(self) -> list[Replica]:
        return self._replicas

    @property
    def run_dir(self) -> Path | None:
        return self._kv_memory[0].run_dir if self._kv_memory else None

    def processes(self) -> list[EngineProcess]:
        return list(self._processes.values())

    # ------------------------------------------------------------------ start and end

    async def start(self) -> None:
        await self.stop()
        try:
            await asyncio.wait_for(self._start(), self._model.start_timeout_s)
        except asyncio.TimeoutError:
            await self.stop()
            raise BackendFailed(f"was not ready within {self._model.start_timeout_s:g} s") from None
        except (BackendFailed, OSError):
            await self.stop()
            raise

    async def _start(self) -> None:
        for number in range(self._model.replicas):
            self._launch(number)
        await asyncio.gather(*(self._until_ready(replica) for replica in self._replicas))

    def _launch(self, number: int) -> None:
        port = free_port(besides={port_of(address) for address in self._processes})
        command = command_of(self._name, self._model, port)
        environment = environment_of(self._name, self._model, number, self._environ)
        job = Job(self._title(number), self._log_of(number), command, environment, self._purpose(number), port, self._model.sleeps)
        replica = Replica(_address(port), up=False)
        self._enter(number, replica, EngineProcess.launch(job, self._listener(number, replica)))
        _log.info("%s: started as process %d", job.title, replica.pid)

    def _enter(self, number: int, replica: Replica, process: EngineProcess) -> None:
        replica.pid = process.pid
        self._processes[replica.address] = process
        self._replicas[number : number + 1] = [replica]

    def _title(self, number: int) -> str:
        return self._name if self._model.replicas == 1 else f"{self._name}/{number}"

    def _log_of(self, number: int) -> Path:
        return self._log_dir / f"{server_name(self._name, self._model.replicas, number)}.log"

    def _purpose(self, number: int) -> Purpose:
        return purpose_of(self._name, self._model, number, self._environ, Path.cwd(), self._log_of(number).name)

    def _listener(self, number: int, replica: Replica) -> Listener:
        mark = "" if self._model.replicas == 1 else f"{number} | "
        return Listener(lambda end: self._ended(replica, end), lambda line: self.journal.add(mark + line))

    async def _until_ready(self, replica: Replica) -> None:
        process, port = self._processes[replica.address], port_of(replica.address)
        while not await self._answers(process, replica.address):
            if not process.running:
                said = await process.last_words()
                advice = advice_on(process.tail)
                raise BackendFailed(f"{process.title} ended before it was ready: {said}{advice}")
            if is_refused(port, process.tail):
                raise BackendFailed(f"{process.title} found port {port} taken by another program; its next start gets another port")
            await asyncio.sleep(POLL_S)
        with contextlib.suppress(OSError):  # then the next gateway ends it
            process.mark(State.READY)
        replica.up = True

    async def _answers(self, process: EngineProcess, address: str) -> bool:
        """It, and not a program that took its port before it could."""
        if not await answers(self._session, address):
            return False
        return await asyncio.to_thread(processes.listens_in, process.pid, port_of(address))

    def _ended(self, replica: Replica, end: str) -> None:
        was_up, replica.up = replica.up, False
        process = self._processes.get(replica.address)
        _log.warning("%s ended%s", process.title if process is not None else self._name, end)
        if not any(other.up for other in self._replicas):
            if was_up:
                self._abandon()
            self.on_ended(f"its server ended{end}")
        elif was_up:
            self._revive(replica)

    def _abandon(self) -> None:
        """The model counts as gone from here on: no half-started replica may come up unseen."""
        for task in self._revivals:
            task.cancel()
        for process in self._processes.values():
            process.kill()

    # ------------------------------------------------------------------ another gateway's

    async def why_not_adopt(self, records: Sequence[Record]) -> str:
        """Why servers that an earlier gateway left cannot be this model's; empty: they can. In the order of their replicas."""
        purposes = [self._purpose(number) for number in range(self._model.replicas)]
        reason = why_not(records, purposes, self._model.sleeps)
        return reason or next(filter(None, await asyncio.gather(*map(self._why_unfit, records))), "")

    async def _why_unfit(self, record: Record) -> str:
        if not await asyncio.to_thread(processes.listens_in, record.pid, record.port):
            return f"it does not listen on port {record.port}"
        path = "/health" if record.state is State.READY else "/v1/models"  # the first can run the model, whose memory is away now
        answered = await answers(self._session, _address(record.port), _ADOPTION_TIMEOUT_S, path)
        return "" if answered else "it does not answer"

    def adopt(self, records: Sequence[Record]) -> State:
        """Of whom `why_not_adopt` knew nothing. Returns what they are: ready, or asleep. Raises `OSError` when a log cannot be opened."""
        for number, record in enumerate(records):
            replica = Replica(_address(record.port))
            listener = self._listener(number, replica)
            self._enter(number, replica, EngineProcess.adopt(self._title(number), self._log_of(number), record, listener))
            _log.info("%s: adopted process %d, %s", self._title(number), record.pid, record.state.value)
        return records[0].state

    def leave(self) -> None:
        for task in self._revivals:
            task.cancel()
        for process in self._processes.values():
            _log.info("%s: process %d is left to the next gateway", process.title, process.pid)
            process.leave()
        self._processes, self._replicas = {}, []

    def _mark(self, state: State) -> None:
        """What the next gateway would find. Raises `OSError`."""
        for replica in self._replicas:
            if replica.up:
                self._processes[replica.address].mark(state)

    def _mark_if_possible(self, state: State) -> None:
        with contextlib.suppress(OSError):  # then the next gateway finds what was last, and ends what that does not fit
            self._mark(state)

    # ------------------------------------------------------------------ one of several

    def _revive(self, lost: Replica) -> None:
        task = asyncio.get_running_loop().create_task(self._replace(self._replicas.index(lost)))
        self._revivals.add(task)
        task.add_done_callback(self._revivals.discard)

    async def _replace(self, number: int) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._replicas[number].up:
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            try:
                await self._end(self._replicas[number])
                self._launch(number)
                await asyncio.wait_for(self._until_ready(self._replicas[number]), self._model.start_timeout_s)
            except (BackendFailed, OSError, asyncio.TimeoutError) as error:
                _log.warning("%s: replica %d: %s", self._name, number, str(error) or "was not ready in time")

    async def _end(self, replica: Replica) -> None:
        process = self._processes.get(replica.address)
        if process is not None:
            await process.stop()
            self._processes.pop(replica.address, None)

    async def _end_revivals(self) -> None:
        """What is half started must not be awake while the others sleep."""
        tasks = list(self._revivals)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(replica) for replica in self._replicas if not replica.up))

    async def stop(self) -> None:
        """May be said while `start` is under way, which fails then. Who says it second waits too, until nothing is left."""
        async with self._ending:
            await self._end_revivals()
            processes, self._processes, self._replicas = self._processes, {}, []
            await asyncio.gather(*(process.stop() for process in processes.values()))

    async def is_gone(self, replica: Replica) -> bool:
        """The end of a process is told a moment after its connections broke."""
        await asyncio.sleep(POLL_S)
        process = self._processes.get(replica.address)
        return process is None or not process.running

    # ------------------------------------------------------------------ sleep

    async def sleep(self) -> None:
        await asyncio.wait_for(self._sleep(), self._model.start_timeout_s)

    async def _sleep(self) -> None:
        await self._end_revivals()
        with contextlib.ExitStack() as undo:
            if self._model.sleeps == "kv":
                undo.callback(self._mark_if_possible, State.READY)  # whatever fails, it is awake
            self._mark(State.GOING_TO_SLEEP)  # first: it must not be found awake when it is not
            if self._model.sleeps == "kv":
                for leader, memory in self._memory_of_those_up():
                    await memory.give_back(leader)
            if self._controls is not None:
                await asyncio.gather(*(self._controls.sleep(replica.address) for replica in self._replicas if replica.up))
            undo.pop_all()
        self._mark_if_possible(State.ASLEEP)

    def _memory_of_those_up(self) -> list[tuple[int | None, KvMemory]]:
        return [(replica.pid, memory) for replica, memory in zip(self._replicas, self._kv_memory, strict=False) if replica.up]

    async def limit_kv(self, limit: Amount) -> list[int]:
        if not (memories := self._memory_of_those_up()):
            raise BackendFailed("it has no elastic KV cache now: " + ("no server of it is up" if self._kv_memory else "`elastic` is false"))
        return [await memory.limit(limit, leader) for leader, memory in memories]

    async def wake(self) -> None:
        try:
            await asyncio.wait_for(self._wake(), self._model.start_timeout_s)
        except (BackendFailed, asyncio.TimeoutError) as error:
            if isinstance(error, BackendFailed) and error.no_memory and await self._asleep_again():
                raise
            await self.stop()
            raise BackendFailed(str(error) or "did not wake up in time") from error

    async def _wake(self) -> None:
        self._mark_if_possible(State.WAKING)
        if self._controls is not None:
            await asyncio.gather(*(self._controls.wake(replica.address) for replica in self._replicas if replica.up))
        self._mark_if_possible(State.READY)
        for replica in self._replicas:
            if not replica.up:
                self._revive(replica)

    async def _asleep_again(self) -> bool:
        """A wake-up that found too little memory may have taken a part of it."""
        try:
            await self._sleep()
        except (BackendFailed, OSError) as error:
            _log.warning("%s: neither awake nor asleep: %s", self._name, error)
            return False
        return True


def _address(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def advice_on(lines: Iterable[str]) -> str:
    """To be put behind an engine's last words; empty without any."""
    text = "\n".join(lines)
    return "".join(f" -> {advice}" for words, advice in _ADVICE.items() if words in text)
