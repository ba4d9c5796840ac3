# SPDX-License-Identifier: Apache-2.0
"""The live screen of `kvtop`, driven by its keys, on cards that are written through the card's own API."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from kvcached.card import Card, CardIdentity, Entry, EntrySpec, Kind, Usage
from kvcached.cli.top.app import THOROUGH_EVERY, Options, TopApp
from kvcached.cli.top.rows import View
from kvcached.cli.top.sampler import Sampler
from kvcached.cli.top.screens import AmountScreen, HelpScreen, QuestionScreen
from kvcached.cli.top.widgets import Table
from kvcached.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from textual.pilot import Pilot


class Machine:
    """Cards in a run directory of which this process holds the entries."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.cards: list[Card] = []
        self.entries: dict[str, Entry] = {}

    def add(self, uuid: str, *instances: str) -> None:
        card = Card.open(self.run_dir, CardIdentity(uuid, "a card", GIB), budget_bytes=GIB, settle_s=0)
        self.cards.append(card)
        for number, instance in enumerate(instances):
            entry = card.register(EntrySpec(Kind.KV, instance, name=f"model of {instance}", limit_bytes=512 * MIB))
            assert entry.lease((number + 1) * MIB, owned=True).granted
            entry.publish(Usage(mapped_bytes=(number + 1) * MIB, owned_bytes=(9 - number) * 1024, parked_bytes=MIB))
            self.entries[instance] = entry

    def close(self) -> None:
        for card in self.cards:
            card.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "run")
    yield made
    made.close()


def screen_lines(app: TopApp) -> list[str]:
    """What is on the terminal, line by line."""
    return ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]


class Seen:
    """A running screen. Waiting is for what is drawn, never for a time."""

    def __init__(self, app: TopApp, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(3000):
            if holds():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("\n".join(self.lines))

    async def until_text(self, text: str) -> None:
        await self.until(lambda: text in self.text)

    async def tick(self) -> None:
        """One sample and one drawing, now."""
        self.app.look()
        self.app.draw()
        await self.pilot.pause()

    @property
    def lines(self) -> list[str]:
        return screen_lines(self.app)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def rows(self) -> list[str]:
        """Names in the table, from above."""
        shown = self.app.screen_stack[0].query_one(Table).lines[1:]
        return [line.key[1] if len(line.key) == 3 else line.key[0] for line in shown if line.key is not None]

    def labels(self) -> list[str]:
        """What the curves are of."""
        return [line.split()[0] for line in self.lines if line[:7] in ("mapped ", "used   ", "cached ", "limit  ", "budget ")]

    @property
    def chosen(self) -> str:
        key = self.app.screen_stack[0].query_one(Table).chosen
        return "" if key is None else key[-1] if len(key) == 1 else key[1]


@asynccontextmanager
async def shown(machine: Machine, width: int = 80, height: int = 24, **options: object) -> AsyncIterator[Seen]:
    made = Options(machine.run_dir, 5.0, View(), **options)  # type: ignore[arg-type]
    app = TopApp(made, Sampler(machine.run_dir, thorough_every=THOROUGH_EVERY))
    async with app.run_test(size=(width, height)) as pilot:
        seen = Seen(app, pilot)
        await seen.until_text("q quit")
        yield seen


class TestTable:
    @pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
    def test_cards_engines_and_ranks_are_rows(self, machine: Machine, width: int, height: int) -> None:
        machine.add("GPU-0", "chat", "code")
        machine.add("GPU-1", "embed")

        async def run() -> None:
            async with shown(machine, width, height) as seen:
                await seen.until_text("GPU-1")
                assert seen.rows() == ["GPU-0", "chat", "code", "GPU-1", "embed"]
                lines = seen.lines
                assert len(lines) == height
                assert {len(line) for line in lines} == {width}
                assert "budget 1G  leased 3M  free 1021M  not KV 0" in lines[2]
                assert ("model of chat" in lines[3]) == (width > 110)
                for word in ("MAPPED", "USED", "CACHED", "PARKED", "LIMIT", "FLOOR", "WANTED", "STATE"):
                    assert word in lines[1]
                await seen.until(lambda: seen.labels() == ["mapped", "used", "cached", "limit"])

        asyncio.run(run())

    def test_an_empty_machine_says_what_to_do_and_pools_appear(self, machine: Machine) -> None:
        async def run() -> None:
            async with shown(machine) as seen:
                await seen.until_text("no pools on this machine")
                assert "ENABLE_KVCACHED=true" in seen.text
                await seen.press("l", "t", "s", "down", "r", "g")
                machine.add("GPU-0", "chat")
                await seen.until(lambda: "chat" in seen.rows())

        asyncio.run(run())

    def test_pools_come_and_go_and_the_chosen_one_stays_chosen(self, machine: Machine) -> None:
        machine.add("GPU-0", "b", "d")

        async def run() -> None:
            async with shown(machine) as seen:
                await seen.until(lambda: seen.chosen == "b")
                await seen.press("down")
                assert seen.chosen == "d"
                machine.add("GPU-0", "a", "c")
                await seen.until(lambda: seen.rows() == ["GPU-0", "a", "b", "c", "d"])
                assert seen.chosen == "d"
                machine.entries["d"].close()
                await seen.until(lambda: seen.rows() == ["GPU-0", "a", "b", "c"])
                assert seen.chosen == "c"

        asyncio.run(run())

    def test_a_card_file_that_is_deleted_and_made_again(self, machine: Machine) -> None:
        machine.add("GPU-0", "chat")

        async def run() -> None:
            async with shown(machine) as seen:
                await seen.until(lambda: seen.rows() == ["GPU-0", "chat"])
                next(machine.run_dir.glob("*.card")).unlink()
                await seen.until_text("no pools on this machine")
                assert machine.entries["chat"].heartbeat()
                await seen.until(lambda: seen.rows() == ["GPU-0", "chat"])

        asyncio.run(run())

    def test_many_pools_scroll(self, machine: Machine) -> None:
        for number in range(8):
            machine.add(f"GPU-{number}", *(f"pool-{number}{letter}" for letter in "abcdefgh"))

        async def run() -> None:
            async with shown(machine) as seen:
                await seen.until_text("cards 8, pools 64")
                await seen.press("end")
                await seen.until_text("pool-7h  ")
                assert seen.chosen == "pool-7h"
                assert "POOL" in seen.lines[1]
                await seen.press("home")
                await seen.until_text("GPU-0 a card")
                for _ in range(9):
                    await seen.press(*["down"] * 8)
                    await seen.until(lambda: seen.chosen in seen.rows())
                assert seen.chosen == "pool-7h"

        asyncio.run(run())

    def test_timers_that_tick_while_the_screen_is_taken_down_find_nothing_missing(self, machine: Machine) -> None:
        machine.add("GPU-0", "chat")

        async def run() -> None:
            async with shown(machine) as seen:
                await seen.until_text("chat")
            for tick in (seen.app.look, seen.app.draw, seen.app._inquire):
                tick()

        asyncio.run(run())

    def test_a_resize_draws_anew(self, machine: Machine) -> None:
        machine.add("GPU-0", "chat")

        async def run() -> None:
            async with shown(machine) as seen:
                await seen.until_text("chat")
                await seen.pilot.resize_terminal(130, 45)
                await seen.until(lambda: "MODEL" in seen.text and len(seen.lines) == 45)
                await seen.pilot.resize_terminal(40, 10)
                await seen.until(lambda: {len(line) for line in seen.lines} == {40})
                await seen.pilot.resize_terminal(80, 24)
                await seen.until_text("? help")
                await seen.until(lambda: "chat" in seen.text)

        asyncio.run(run())

    def test_only_lines_that_changed_are_drawn_again(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        machine.add("GPU-0", "chat", "code")
        drawn: list[int] = []

        async def run() -> None:
            async with shown(machine, samples_per_s=0.01, draws_per_s=0.01, inquiries=False) as seen:
                await seen.until_text("code")
                await seen.tick()
                render = Table.render_line
                monkeypatch.setattr(Table, "render_line", lambda table, y: drawn.append(y) or render(table, y))
                await seen.tick()
                assert drawn == []
                machine.entries["code"].publish(Usage(mapped_bytes=77 * MIB))
                await seen.tick()
                assert "77M" in seen.text
                assert set(drawn) == {3}  # below the heading, its card, which shows no sum of it, and `chat`

        asyncio.run(run())


class TestKeys:
    def test_sort_and_reverse(self, machine: Machine) -> None:
        machine.add("GPU-0", "a", "b", "c")

        async def run() -> None:
            async with shown(machine) as seen:
                await seen.press("s")
                await seen.until_text("sort mapped")
                assert "MAPPEDv" in seen.lines[1]
                assert seen.rows() == ["GPU-0", "c", "b", "a"]
                await seen.press("s")
                assert seen.rows() == ["GPU-0", "a", "b", "c"]
                await seen.press("r")
                assert seen.rows() == ["GPU-0", "c", "b", "a"]
                await seen.press("S")
                assert seen.rows() == ["GPU-0", "a", "b", "c"]
                await seen.until_text("sort mapped reversed")

        asyncio.run(run())

    def test_one_list_without_cards(self, machine: Machine) -> None:
        machine.add("GPU-0", "a")
        machine.add("GPU-1", "b", "c")

        async def run() -> None:
            async with shown(machine) as seen:
                await seen.press("s", "g")
                assert seen.rows() == ["c", "a", "b"]

        asyncio.run(run())

    def test_filter(self, machine: Machine) -> None:
        machine.add("GPU-0", "chat", "code")
        machine.add("GPU-1", "embed")

        async def run() -> None:
            async with shown(machine) as seen:
                await seen.press("slash", *"cod")
                assert seen.rows() == ["GPU-0", "code"]
                await seen.press("s", "q")
                assert seen.rows() == []
                await seen.press("backspace", "backspace", "enter")
                await seen.until_text("filter 'cod'")
                await seen.press("s")
                assert (seen.app.view.sort, seen.rows()) == ("mapped", ["GPU-0", "code"])
                await seen.press("escape")
                assert seen.rows() == ["GPU-0", "code", "chat", "GPU-1", "embed"]

        asyncio.run(run())

    def test_pause_and_go_on(self, machine: Machine) -> None:
        machine.add("GPU-0", "chat")

        async def run() -> None:
            async with shown(machine) as seen:
                await seen.press("p")
                await seen.until_text("PAUSED")
                before = seen.app.history.count
                machine.entries["chat"].publish(Usage(mapped_bytes=77 * MIB))
                await seen.tick()
                await seen.tick()
                assert ("77M" in seen.text, seen.app.history.count) == (False, before)
                await seen.press("space")
                await seen.until_text("77M")
                assert "PAUSED" not in seen.text

        asyncio.run(run())

    def test_the_graph_is_of_the_chosen_row_and_grows(self, machine: Machine) -> None:
        machine.add("GPU-0", "chat", "code")

        async def run() -> None:
            async with shown(machine) as seen:
                await seen.until(lambda: any(line.startswith("limit    512M") and line.endswith("███") for line in seen.lines))
                await seen.press("up")
                await seen.until_text("budget     1G")
                assert seen.chosen == "GPU-0"
                await seen.press("plus")
                await seen.until_text("0.4 s a column")
                await seen.press("minus", "minus", "minus")
                await seen.until_text("0.1 s a column")

        asyncio.run(run())

    def test_help_fits_and_closes(self, machine: Machine) -> None:
        async def run() -> None:
            async with shown(machine, 80, 30) as seen:
                await seen.press("question_mark")
                assert isinstance(seen.app.screen, HelpScreen)
                await seen.until_text("clamped,")
                assert all(word in seen.text for word in ("limit the chosen pool", "PARKED", "silent"))
                await seen.press("escape")
                assert not isinstance(seen.app.screen, HelpScreen)

        asyncio.run(run())

    def test_q_leaves(self, machine: Machine) -> None:
        async def run() -> None:
            async with shown(machine) as seen:
                await seen.press("q")
                assert seen.app._exit

        asyncio.run(run())


class TestQuestions:
    """Nothing is sent before a `y`; there is no process behind these entries that could answer."""

    @pytest.mark.parametrize("leave", [("escape",), ("1", "M", "enter", "n"), ("1", "M", "enter", "escape"), ("1", "M", "enter", "enter")])
    @pytest.mark.parametrize("key", ["l", "t"])
    def test_it_can_be_left_at_each_step(self, machine: Machine, key: str, leave: tuple[str, ...]) -> None:
        machine.add("GPU-0", "chat")

        async def run() -> None:
            async with shown(machine, inquiries=False) as seen:
                await seen.until(lambda: seen.chosen == "chat")
                await seen.press(key)
                assert isinstance(seen.app.screen, AmountScreen)
                await seen.press(*leave)
                await seen.until_text("nothing was asked")
                assert not seen.app.asked

        asyncio.run(run())

    def test_a_size_that_is_none_is_said_and_can_be_corrected(self, machine: Machine) -> None:
        machine.add("GPU-0", "chat")

        async def run() -> None:
            async with shown(machine) as seen:
                await seen.until(lambda: seen.chosen == "chat")
                await seen.press("l", "3", "Q", "enter")
                await seen.until_text("is not a size")
                await seen.press("backspace", "G", "enter")
                assert isinstance(seen.app.screen, QuestionScreen)
                await seen.until_text("Limit chat to 3 GiB?")

        asyncio.run(run())

    def test_a_card_cannot_be_limited(self, machine: Machine) -> None:
        machine.add("GPU-0", "chat")

        async def run() -> None:
            async with shown(machine) as seen:
                await seen.until(lambda: seen.chosen == "chat")
                await seen.press("up", "l")
                await seen.until_text("choose a pool")

        asyncio.run(run())

    def test_nobody_at_the_other_end_is_an_answer(self, machine: Machine) -> None:
        machine.add("GPU-0", "chat")

        async def run() -> None:
            async with shown(machine) as seen:
                await seen.until(lambda: seen.chosen == "chat")
                await seen.press("t", "enter", "y")
                await seen.until_text("chat: trim: nobody answers at")
                assert not seen.app.asked

        asyncio.run(run())


@pytest.mark.parametrize("no_color", [False, True])
def test_without_colour_there_is_none(machine: Machine, monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    machine.add("GPU-0", "chat")
    machine.entries["chat"].publish(Usage(quarantined_bytes=MIB))
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    found: set[str] = set()

    async def run() -> None:
        async with shown(machine) as seen:
            await seen.until_text("failed")
            styles = [segment.style for strip in seen.app.screen._compositor.render_strips() for segment in strip if segment.style]
            found.update(color.name for style in styles for color in (style.color, style.bgcolor) if color and not color.is_default)

    asyncio.run(run())
    assert ("red" in found, not found) == (not no_color, no_color)
