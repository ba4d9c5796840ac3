# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from examples.demo.picture import draw
from examples.demo.run import write_answers, write_samples
from examples.demo.series import Answer, Check, EngineMemory, Sample, Story
from examples.demo.show import LiveScreen, PlainScreen, answer_line, open_screen, shorten
from examples.demo.watch import read_sample
from rich.console import Console

from kvcached.card.card import Card
from kvcached.card.record import CardIdentity, EntrySpec, Kind, Usage

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def story() -> Story:
    samples = [Sample(float(at), {"facts": EngineMemory(at * MIB, at * MIB), "stories": EngineMemory((9 - at) * MIB)}) for at in range(10)]
    return Story(("facts", "stories"), 20 * MIB, samples=samples, asked={"facts": 3})


def test_without_a_terminal_there_are_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.demo.show.PLAIN_EVERY_S", 3600.0)
    out = io.StringIO()
    with open_screen(Console(file=out, width=100), live=True) as screen:
        assert type(screen) is PlainScreen
        screen.stage("one")
        screen.update(story())
        screen.update(story())
        screen.checks([Check("a", True, "fine"), Check("b", False, "bad [x]")])
    lines = out.getvalue().splitlines()
    assert lines[0] == "== one"
    assert [line for line in lines if "card 9 MiB of 20 MiB" in line] == [lines[1]], "the second update came too early to be shown"
    assert "FAILED    b: bad [x]" in lines[-1]


def test_on_a_terminal_there_is_a_table() -> None:
    out = io.StringIO()
    with open_screen(Console(file=out, width=120, force_terminal=True), live=True) as screen:
        assert isinstance(screen, LiveScreen)
        screen.waiting(["3 s facts loading"])
        screen.update(story())
        screen.answer(Answer("facts", "why?", "because"))
        screen.checks([Check("a", True, "fine")])
    text = out.getvalue()
    for part in (
        "loading",
        "of the card",
        "20 MiB for all engines together",
        "2 static engines, for what was seen so far: 9 MiB",
        "because",
    ):
        assert part in text


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    out = io.StringIO()
    with open_screen(Console(file=out, width=80, force_terminal=True), live=True) as screen:
        screen.update(story())
    assert "…" not in out.getvalue()
    assert "answered" in out.getvalue()


def test_no_live_wins_over_a_terminal() -> None:
    with open_screen(Console(file=io.StringIO(), force_terminal=True), live=False) as screen:
        assert type(screen) is PlainScreen


def test_an_answer_is_one_line_that_says_when_it_failed() -> None:
    assert answer_line(Answer("facts", "why?", "be\ncause\n\nof it", 3, 2.0), 80) == "   facts   2.0 s | why? -> be cause of it"
    assert "FAILED: HTTP 500" in answer_line(Answer("facts", "why?", error="HTTP 500"), 80)
    assert "FAILED: no text" in answer_line(Answer("facts", "why?"), 80)
    assert len(shorten("word " * 50, 40)) <= 40


def test_answers_are_written_whole(tmp_path: Path) -> None:
    path = write_answers([Answer("facts", "why?", "a\nb"), Answer("facts", "how?", error="HTTP 500")], tmp_path / "answers.txt")
    assert path.read_text() == "[facts] why?\na\nb\n\n[facts] how?\nHTTP 500\n\n"


def test_samples_are_written_with_units(tmp_path: Path) -> None:
    seen = story()
    seen.samples = seen.samples[2:3]
    lines = write_samples(seen, tmp_path / "memory.csv").read_text().splitlines()
    assert lines[0] == "at_s,engine,lease_bytes,owned_bytes,cached_bytes,parked_bytes"
    assert lines[1:] == [f"2.00,facts,{2 * MIB},{2 * MIB},0,0", f"2.00,stories,{7 * MIB},0,0,0"]


def test_the_sample_is_what_the_card_says(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert read_sample(run_dir, 1.0) is None
    identity = CardIdentity("host-test", "host memory", 100 * MIB)
    with Card.open(run_dir, identity, budget_bytes=64 * MIB, settle_s=0.0) as card:
        entry = card.register(EntrySpec(Kind.KV, instance="facts"))
        assert entry.lease(8 * MIB, owned=True).granted
        entry.publish(Usage(mapped_bytes=6 * MIB, owned_bytes=4 * MIB, cached_bytes=MIB, parked_bytes=2 * MIB))
        assert read_sample(run_dir, 1.0) == Sample(1.0, {"facts": EngineMemory(8 * MIB, 4 * MIB, MIB, 2 * MIB)})


def test_the_picture_is_written_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, svg = draw(story(), tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "2 static engines: 9 + 0 = 9 MiB" in svg.read_text()
