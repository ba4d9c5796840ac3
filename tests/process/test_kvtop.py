# SPDX-License-Identifier: Apache-2.0
"""`kvtop` against real pools in other processes: its screen driven by keys, the command in a terminal, and one look in a pipe.

Waiting is for what is shown or answered, never for a time; a deadline only ends a test that fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from real_pool import DEADLINE_S, PoolProcess, eventually

from kvcached.card import NO_LIMIT_BYTES
from kvcached.cli.top.app import THOROUGH_EVERY, Options, TopApp
from kvcached.cli.top.rows import View
from kvcached.cli.top.sampler import Sampler
from kvcached.cli.top.screens import QuestionScreen
from kvcached.cli.top.widgets import Table
from kvcached.runtime.control import ControlClient, endpoint_path
from kvcached.testing.stopping import stop_process
from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from textual.pilot import Pilot

    from kvcached.card.record import Record

PAGE_BYTES = 2 * MIB
COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")


class Machine:
    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.pools: list[PoolProcess] = []

    def start(self, instance: str, **settings: object) -> PoolProcess:
        pool = PoolProcess(self.run_dir, instance, **{"budget": "100MiB", "floor": None, **settings})
        self.pools.append(pool)
        return pool

    def client(self, instance: str) -> ControlClient:
        return ControlClient(endpoint_path(self.run_dir, instance), 30)

    def record(self, instance: str) -> Record:
        """What the pool's entry says, which is a moment behind the pool."""
        (card,) = Sampler(self.run_dir).sample().cards
        return next(row.record for row in card.rows if row.instance == instance)

    def close(self) -> None:
        for pool in self.pools:
            pool.kill()

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "kvcached.cli.top.command", "--run-dir", str(self.run_dir), *arguments]

    def environment(self, **changes: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "LINES")}
        return {**kept, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "80", "TERM": "xterm-256color", **changes}

    def piped(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), env=self.environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )


@pytest.fixture
def machine() -> Iterator[Machine]:
    """Under a short path: a socket's path may have 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        made = Machine(Path(folder))
        yield made
        made.close()


def parks(size_bytes: int) -> dict[str, object]:
    """Settings with which so much is kept mapped and empty."""
    pages = size_bytes // PAGE_BYTES
    return {"prealloc_enabled": True, "min_reserved_pages": pages, "max_reserved_pages": pages}


class Screen:
    """The live screen in this process, on pools in others."""

    def __init__(self, app: TopApp, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    @property
    def lines(self) -> list[str]:
        return ["".join(segment.text for segment in strip) for strip in self.app.screen._compositor.render_strips()]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def row(self, instance: str) -> list[str]:
        """The words of a pool's line, none when it has no line."""
        return next((line.split() for line in self.lines if line.split()[:1] == [instance]), [])

    @property
    def chosen(self) -> str:
        key = self.app.screen_stack[0].query_one(Table).chosen
        return key[1] if key is not None and len(key) == 3 else ""

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < end, self.text
            await asyncio.sleep(0.02)

    async def until_text(self, text: str) -> None:
        """Also where a message was folded at the screen's edge."""
        await self.until(lambda: text in " ".join(self.text.split()))

    async def choose(self, instance: str) -> None:
        await self.until(lambda: bool(self.row(instance)))
        await self.press("home")
        while self.chosen != instance:
            before = self.chosen
            await self.press("down")
            await self.until(lambda: self.chosen != before)  # noqa: B023

    async def ask_for(self, key: str, size: str) -> None:
        """Keys that are pressed before the field is there go elsewhere."""
        await self.press(key)
        await self.until_text("Enter goes on")
        await self.press(*size, "enter")

    async def samples(self, count: int) -> None:
        """Until so many more were taken: the screen is alive."""
        goal = self.app.history.count + count
        await self.until(lambda: self.app.history.count >= goal)


def on_screen(machine: Machine, act: Callable[[Screen], Awaitable[None]], ask_s: float = 60.0, width: int = 80) -> None:
    asyncio.run(_on_screen(machine, act, ask_s, width))


async def _on_screen(machine: Machine, act: Callable[[Screen], Awaitable[None]], ask_s: float, width: int) -> None:
    async with _shown(machine, ask_s, width) as screen:
        await act(screen)


@asynccontextmanager
async def _shown(machine: Machine, ask_s: float, width: int) -> AsyncIterator[Screen]:
    app = TopApp(Options(machine.run_dir, ask_s, View()), Sampler(machine.run_dir, thorough_every=THOROUGH_EVERY))
    async with app.run_test(size=(width, 24)) as pilot:
        screen = Screen(app, pilot)
        await screen.until_text("q quit")
        yield screen


class TestPools:
    def test_what_real_pools_hold_is_on_80_columns(self, machine: Machine) -> None:
        chat = machine.start("chat")
        long_name = "a-pool-with-a-rather-long-name-" + "9" * 9
        machine.start(long_name)
        chat.take(12)

        async def act(screen: Screen) -> None:
            await screen.until(lambda: screen.row("chat")[1:4] == ["0", "12M", "12M"])
            await screen.until_text("999")
            assert screen.row("chat")[-1] == "ok"
            assert len(screen.lines) == 24
            assert {len(line) for line in screen.lines} == {80}
            chat.ask("give", 1)
            chat.take(30)
            await screen.until(lambda: screen.row("chat")[3:4] == ["42M"] or screen.row("chat")[3:4] == ["30M"])
            await screen.choose("chat")
            await screen.until_text(f"chat rank 0, model model-of-chat, pid {chat.pid}")

        on_screen(machine, act)

    def test_a_run_directory_without_pools_and_the_first_one_that_comes(self, machine: Machine) -> None:
        machine.run_dir.mkdir(mode=0o700)

        async def act(screen: Screen) -> None:
            await screen.until_text("no pools on this machine")
            await screen.press("l", "t", "down", "s")
            await screen.samples(3)
            await asyncio.to_thread(machine.start, "chat")
            await screen.until(lambda: screen.row("chat")[-1:] == ["ok"])

        on_screen(machine, act)

    def test_a_chosen_pool_that_ends_and_one_that_is_killed(self, machine: Machine) -> None:
        ends, dies = machine.start("b-ends"), machine.start("c-dies")
        machine.start("a-stays")

        async def act(screen: Screen) -> None:
            await screen.choose("b-ends")
            await asyncio.to_thread(ends.end)
            await screen.until(lambda: not screen.row("b-ends"))
            await screen.until(lambda: screen.chosen in ("a-stays", "c-dies"))
            await screen.choose("c-dies")
            dies.kill()
            await screen.until(lambda: screen.row("c-dies")[-1:] == ["dead"])
            assert screen.chosen == "c-dies"
            await screen.until_text("kvctl delete c-dies")
            await screen.press("l")
            await screen.until_text("choose a pool that lives first")
            assert screen.row("a-stays")[-1] == "ok"

        on_screen(machine, act)

    def test_the_cards_file_goes_away_and_comes_back(self, machine: Machine) -> None:
        """The pool is stopped meanwhile, or it would put its file back before anyone sees that it is gone."""
        chat = machine.start("chat")
        chat.take(12)

        async def act(screen: Screen) -> None:
            await screen.choose("chat")
            stop_process(chat.pid)
            next(machine.run_dir.glob("*.card")).unlink()
            await screen.until_text("no pools on this machine")
            shutil.rmtree(machine.run_dir)
            await screen.samples(2 * THOROUGH_EVERY)
            assert "no pools on this machine" in screen.text
            chat.signal(signal.SIGCONT)
            await screen.until(lambda: screen.row("chat")[3:4] == ["12M"])

        on_screen(machine, act)

    def test_a_stopped_pool_is_shown_as_silent_and_holds_nothing_up(self, machine: Machine) -> None:
        chat, code = machine.start("chat"), machine.start("code")
        code.take(12)

        async def act(screen: Screen) -> None:
            await screen.choose("chat")
            stop_process(chat.pid)
            await screen.until(lambda: screen.row("chat")[-1:] == ["silent"])
            assert screen.row("code")[-1] == "ok"
            await screen.ask_for("t", "")
            await screen.until_text("Trim chat: take back")
            await screen.press("y")
            await screen.until_text("chat: trim: no answer in time")
            code.take(20)
            await screen.until(lambda: screen.row("code")[3:4] == ["32M"])
            await screen.choose("code")
            await screen.samples(5)
            chat.signal(signal.SIGCONT)
            await screen.until(lambda: screen.row("chat")[-1:] == ["ok"])

        on_screen(machine, act, ask_s=1.0)


class TestOrders:
    """Each is done only after the question, by the pool itself, and the record shows it."""

    def test_trim_gives_back_what_is_parked(self, machine: Machine) -> None:
        """Of a pool without work: one that works fills its reserve again."""
        chat = machine.start("chat", **parks(20 * MIB))
        chat.take(8)
        chat.ask("give")
        eventually(lambda: machine.client("chat").status().parked_bytes >= 20 * MIB)

        async def act(screen: Screen) -> None:
            await screen.choose("chat")
            await screen.ask_for("t", "")
            await screen.until_text("Trim chat: take back all that is parked?")
            assert isinstance(screen.app.screen, QuestionScreen)
            assert (await asyncio.to_thread(machine.client("chat").status)).parked_bytes >= 20 * MIB
            await screen.press("y")
            await screen.until(lambda: re.search(r"chat: trim: \d+ MiB given back", screen.text) is not None)
            await screen.until(lambda: screen.row("chat")[2:6] == ["0", "0", "0", "0"])

        on_screen(machine, act)
        eventually(lambda: machine.client("chat").status().held_bytes == 0)

    def test_limit_is_applied_deferred_and_lifted(self, machine: Machine) -> None:
        chat = machine.start("chat")
        chat.take(40)

        async def order(screen: Screen, size: str, question: str, answer: str) -> None:
            await screen.ask_for("l", size)
            await screen.until_text(question)
            await screen.press("y")
            await screen.until_text(answer)

        async def act(screen: Screen) -> None:
            await screen.choose("chat")
            await order(screen, "60MiB", "Limit chat to 60 MiB?", "chat: limit applied: 60 MiB in force")
            await screen.until(lambda: screen.row("chat")[6:7] == ["60M"])
            await order(screen, "30M", "Limit chat to 30 MiB?", "chat: limit deferred: 30 MiB in force, 10 MiB above it still held")
            await screen.until(lambda: screen.row("chat")[-1:] == ["over"])
            await asyncio.to_thread(chat.ask, "give")
            await screen.until(lambda: screen.row("chat")[3:] == ["0", "0", "0", "30M", "2M", "0", "ok"])
            await order(screen, "none", "Lift the limit of chat?", "chat: limit applied: none in force")
            await screen.until(lambda: screen.row("chat")[6:7] == ["-"])

        on_screen(machine, act)
        assert machine.client("chat").status().limit_bytes == NO_LIMIT_BYTES

    def test_no_is_no(self, machine: Machine) -> None:
        machine.start("chat")
        before = machine.client("chat").status()

        async def act(screen: Screen) -> None:
            await screen.choose("chat")
            await screen.ask_for("l", "30M")
            await screen.until_text("Limit chat to 30 MiB?")
            await screen.press("n")
            await screen.until_text("nothing was asked")
            assert not screen.app.asked

        on_screen(machine, act)
        after = machine.client("chat").status()
        assert (after.limit_bytes, after.limit_revision) == (before.limit_bytes, before.limit_revision)

    def test_a_pool_that_dies_before_the_answer_to_the_question(self, machine: Machine) -> None:
        chat = machine.start("chat")
        machine.start("code")

        async def act(screen: Screen) -> None:
            await screen.choose("chat")
            await screen.ask_for("l", "30M")
            await screen.until_text("Limit chat to 30 MiB?")
            chat.kill()
            await screen.samples(2 * THOROUGH_EVERY)
            await screen.press("y")
            await screen.until_text("chat: limit: its process has ended")
            assert screen.row("code")[-1] == "ok"

        on_screen(machine, act)


class TestOnce:
    def test_a_pipe_gets_one_look_as_text_also_of_a_stopped_pool(self, machine: Machine) -> None:
        chat = machine.start("chat")
        code = machine.start("code")
        chat.take(12)
        eventually(lambda: machine.record("chat").owned_bytes == 12 * MIB)
        code.kill()  # not before: a lease may clear up after the dead
        stop_process(chat.pid)
        plain = machine.piped()
        assert (plain.returncode, plain.stderr) == (0, "")
        lines = plain.stdout.splitlines()
        assert lines[0].split()[0] == "POOLv"
        assert "budget 100M" in lines[1]
        assert lines[2].split()[:4] == ["chat", "0", "12M", "12M"]
        assert (lines[2].split()[-1], lines[3].split()[-1]) == ("ok", "dead")
        assert max(map(len, lines[:4])) <= 80
        assert plain.stdout.isascii()
        assert "\x1b" not in plain.stdout
        assert "kvctl delete code" in lines[-1]
        assert machine.piped("--once").stdout.splitlines()[2:] == lines[2:]  # above stands for how long the card has been new

    def test_json_has_the_pools_own_numbers(self, machine: Machine) -> None:
        chat = machine.start("chat", **parks(4 * MIB))
        chat.take(12)
        eventually(lambda: machine.record("chat").parked_bytes == 4 * MIB and machine.record("chat").owned_bytes == 12 * MIB)
        (card,) = json.loads(machine.piped("--json").stdout)["cards"]
        (pool,) = card["pools"]
        status = machine.client("chat").status()
        assert (pool["instance"], pool["pid"], pool["state"]) == ("chat", chat.pid, "ok")
        for name in ("mapped", "cached", "parked", "lease"):
            assert pool[f"{name}_bytes"] == getattr(status, f"{name}_bytes")
        assert pool["used_bytes"] == status.owned_bytes == 12 * MIB
        assert (card["budget_bytes"], card["leased_bytes"]) == (100 * MIB, status.lease_bytes)

    def test_an_empty_run_directory(self, machine: Machine) -> None:
        assert "no pools on this machine" in machine.piped().stdout
        assert json.loads(machine.piped("--json").stdout)["cards"] == []


class Terminal:
    """The command in a pseudo terminal of 80 columns and 24 lines."""

    def __init__(self, machine: Machine, *arguments: str, **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        self._process = subprocess.Popen(
            machine.command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, env=machine.environment(**environment)
        )
        os.close(theirs)
        self.shown = ""

    def read(self) -> bool:
        """False at the end."""
        if not select.select([self._ours], [], [], DEADLINE_S)[0]:
            raise AssertionError(self.shown)
        try:
            chunk = os.read(self._ours, 65536)
        except OSError:  # how a pseudo terminal says that the other end is closed
            return False
        self.shown += chunk.decode(errors="replace")
        return bool(chunk)

    def until(self, text: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            assert self.read(), self.shown
            assert time.monotonic() < end, self.shown

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait(self) -> int:
        while self.read():
            pass
        return self._process.wait(DEADLINE_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


class TestTerminal:
    @pytest.mark.parametrize("no_color", [False, True])
    def test_it_draws_and_leaves_the_terminal_as_it_was(self, machine: Machine, no_color: bool) -> None:
        machine.start("chat")
        with contextlib.closing(Terminal(machine, **({"NO_COLOR": "1"} if no_color else {}))) as terminal:
            terminal.until("model-of-chat")
            terminal.type("q")
            assert terminal.wait() == 0
        assert "\x1b[?1049h" in terminal.shown
        assert "\x1b[?1049l" in terminal.shown
        assert (COLOUR.search(terminal.shown) is None) == no_color

    def test_leaving_does_not_wait_for_a_pool_that_does_not_answer(self, machine: Machine) -> None:
        chat = machine.start("chat")
        stop_process(chat.pid)
        with contextlib.closing(Terminal(machine, "--timeout", "3600")) as terminal:
            terminal.until("model-of-chat")
            terminal.type("t")
            terminal.until("Enter goes on")
            terminal.type("\r")
            terminal.until("Trim chat: take back")
            terminal.type("y")
            terminal.until("waiting for its answer")
            terminal.type("q")
            assert terminal.wait() == 0

    def test_a_dumb_terminal_gets_one_look(self, machine: Machine) -> None:
        machine.start("chat")
        with contextlib.closing(Terminal(machine, TERM="dumb")) as terminal:
            assert terminal.wait() == 0
        assert "chat" in terminal.shown
        assert "\x1b" not in terminal.shown
