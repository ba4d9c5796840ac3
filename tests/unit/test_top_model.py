# SPDX-License-Identifier: Apache-2.0
"""The parts of `kvtop` without a screen: what is read of real card files, what is remembered, which rows there are and what they say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from typer.testing import CliRunner, Result

from kvcached.card import NO_LIMIT_BYTES, Card, CardIdentity, EntrySpec, Kind, Usage
from kvcached.card.locks import slot_byte
from kvcached.card.record import HEADER_BYTES, SLOT_BYTES, Record, encode_slot, slot_copy_offset
from kvcached.card.segment import open_existing
from kvcached.cli.machine import Target
from kvcached.cli.top.actions import ALL, Order, parse_order
from kvcached.cli.top.command import app
from kvcached.cli.top.detail import describe, graph
from kvcached.cli.top.history import History, Point, columns, plot
from kvcached.cli.top.plain_view import to_json
from kvcached.cli.top.rows import SORTS, State, View, build, fit, state_of
from kvcached.cli.top.sampler import CardSample, RankRow, Sample, Sampler, plain
from kvcached.config import Amount
from kvcached.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

BUDGET_BYTES = 100 * MIB


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def card(run_dir: Path) -> Iterator[Card]:
    with Card.open(run_dir, CardIdentity("GPU-0", "a card", GIB), budget_bytes=BUDGET_BYTES, settle_s=0) as opened:
        yield opened


def spec(instance: str, **words: object) -> EntrySpec:
    return EntrySpec(Kind.KV, instance, **words)  # type: ignore[arg-type]


class TestSampler:
    def test_a_directory_without_cards_and_none_at_all(self, tmp_path: Path) -> None:
        assert Sampler(tmp_path).sample().cards == ()
        sample = Sampler(tmp_path / "absent").sample()
        assert (sample.cards, sample.problem) == ((), "")

    def test_a_path_that_is_no_directory_is_a_problem(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert "Not a directory" in Sampler(tmp_path / "file").sample().problem

    def test_kv_and_other_memory_of_a_rank_are_one_row(self, run_dir: Path, card: Card) -> None:
        entry = card.register(spec("chat", name="Qwen", floor_bytes=2 * MIB, limit_bytes=50 * MIB))
        assert entry.lease(8 * MIB, owned=True).granted
        entry.publish(Usage(mapped_bytes=7 * MIB, owned_bytes=4 * MIB, cached_bytes=2 * MIB, parked_bytes=MIB))
        other = card.register(EntrySpec(Kind.OTHER, "chat", "Qwen"))
        assert other.lease(10 * MIB, owned=True).granted
        (seen,) = Sampler(run_dir).sample().cards
        assert (seen.uuid, seen.budget_bytes, seen.leased_bytes, seen.free_bytes) == ("GPU-0", BUDGET_BYTES, 18 * MIB, 82 * MIB)
        assert (seen.other_bytes, seen.mapped_bytes, seen.owned_bytes, seen.cached_bytes) == (10 * MIB, 7 * MIB, 4 * MIB, 2 * MIB)
        (row,) = seen.rows
        assert (row.key, row.name, row.alive, row.has_kv, row.other_bytes) == (("GPU-0", "chat", 0), "Qwen", True, True, 10 * MIB)
        assert (row.record.mapped_bytes, row.record.limit_bytes, row.record.floor_bytes) == (7 * MIB, 50 * MIB, 2 * MIB)

    def test_it_follows_pools_that_come_change_and_go(self, run_dir: Path, card: Card) -> None:
        sampler = Sampler(run_dir)
        assert sampler.sample().cards[0].rows == ()
        entry = card.register(spec("chat"))
        assert [row.instance for row in sampler.sample().cards[0].rows] == ["chat"]
        entry.publish(Usage(mapped_bytes=3))
        entry.publish(Usage(mapped_bytes=5))
        assert sampler.sample().cards[0].rows[0].record.mapped_bytes == 5
        entry.set_limits(limit_bytes=9)
        assert sampler.sample().cards[0].rows[0].record.limit_bytes == 9
        entry.close()
        assert sampler.sample().cards[0].rows == ()

    def test_what_did_not_change_is_not_decoded_again(self, run_dir: Path, card: Card) -> None:
        card.register(spec("chat"))
        code = card.register(spec("code"))
        sampler = Sampler(run_dir)
        first = sampler.sample().cards[0]
        assert sampler.sample().cards[0] is first
        code.publish(Usage(mapped_bytes=1))
        second = sampler.sample().cards[0]
        assert second.rows[0].record is first.rows[0].record
        assert second.rows[1].record is not first.rows[1].record

    def test_between_thorough_looks_only_the_records_are_read(self, run_dir: Path, card: Card) -> None:
        entry = card.register(spec("chat"))
        sampler = Sampler(run_dir, thorough_every=3)
        assert len(sampler.sample().cards) == 1
        path = next(run_dir.glob("*.card"))
        path.rename(path.with_suffix(".away"))
        entry.publish(Usage(mapped_bytes=7))
        for _ in range(2):
            assert sampler.sample().cards[0].rows[0].record.mapped_bytes == 7
        assert sampler.sample().cards == ()

    @pytest.mark.parametrize("thorough_every", [1, 3])
    def test_the_kernel_is_asked_about_new_entries_and_those_at_rest(self, run_dir: Path, card: Card, thorough_every: int) -> None:
        """The lock is taken away without a write: what a crash looks like."""
        entry = card.register(spec("chat"))
        sampler = Sampler(run_dir, thorough_every=thorough_every)
        assert sampler.sample().cards[0].rows[0].alive
        file = open_existing(next(run_dir.glob("*.card"))).file
        entry.publish(Usage(mapped_bytes=7))
        file.unlock(slot_byte(0))
        assert sampler.sample().cards[0].rows[0].alive  # it was when it wrote
        assert [sampler.sample().cards[0].rows[0].alive for _ in range(3)].count(False) == (3 if thorough_every == 1 else 2)
        assert not Sampler(run_dir).sample().cards[0].rows[0].alive
        assert file.try_lock(slot_byte(0))
        assert [sampler.sample().cards[0].rows[0].alive for _ in range(3)][-1]

    def test_a_copy_that_is_torn_is_tried_again(self, run_dir: Path, card: Card) -> None:
        """Its sequence number is there before the rest; the number alone must not make it known."""
        card.register(spec("chat")).publish(Usage(mapped_bytes=7))
        sampler = Sampler(run_dir)
        before = sampler.sample().cards[0].rows[0].record
        after = before._replace(sequence=before.sequence + 1, mapped_bytes=9)
        raw, at = encode_slot(after), HEADER_BYTES + slot_copy_offset(after, SLOT_BYTES)
        fd = open_existing(next(run_dir.glob("*.card"))).file.fd
        os.pwrite(fd, raw[:40], at)
        assert sampler.sample().cards[0].rows[0].record.mapped_bytes == 7
        os.pwrite(fd, raw, at)
        assert sampler.sample().cards[0].rows[0].record.mapped_bytes == 9

    def test_an_entry_that_moves_into_a_slot_of_another_is_another_row(self, run_dir: Path, card: Card) -> None:
        sampler = Sampler(run_dir)
        for name in ("chat", "code"):
            entry = card.register(spec(name, name=f"model of {name}"))
            (row,) = sampler.sample().cards[0].rows
            assert (row.instance, row.name, row.alive) == (name, f"model of {name}", True)
            entry.close()

    def test_a_file_that_is_deleted_and_made_again(self, run_dir: Path, card: Card) -> None:
        entry = card.register(spec("chat"))
        sampler = Sampler(run_dir)
        sampler.sample()
        next(run_dir.glob("*.card")).unlink()
        assert sampler.sample().cards == ()
        assert entry.heartbeat()
        assert [row.instance for row in sampler.sample().cards[0].rows] == ["chat"]
        shutil.rmtree(run_dir)
        assert sampler.sample().cards == ()

    def test_a_damaged_file_says_so_and_heals(self, run_dir: Path, card: Card) -> None:
        entry = card.register(spec("chat"))
        sampler = Sampler(run_dir)
        path = next(run_dir.glob("*.card"))
        os.truncate(path, 10)
        (seen,) = sampler.sample().cards
        assert (seen.uuid, "not a card" in seen.problem) == ("GPU-0", True)
        path.unlink()
        entry.heartbeat()
        assert sampler.sample().cards[0].problem == ""

    def test_a_slot_that_nobody_can_read_and_one_of_another_version(self, run_dir: Path, card: Card) -> None:
        for name in ("a", "b"):
            card.register(spec(name))
        path = next(run_dir.glob("*.card"))
        newer = encode_slot(Record(version=9, sequence=9, lease_bytes=5, kind=Kind.KV))
        with path.open("r+b") as file:  # closing it drops this process's locks, which no test below needs
            file.seek(HEADER_BYTES)
            file.write(b"x" * SLOT_BYTES)
            file.seek(HEADER_BYTES + SLOT_BYTES + SLOT_BYTES // 2)
            file.write(newer)
        rows = Sampler(run_dir).sample().cards[0].rows
        assert [(row.instance, row.record.kind, row.known_version) for row in rows] == [
            ("slot 0", Kind.UNREADABLE, True),
            ("slot 1", Kind.OTHER, False),
        ]

    def test_an_entry_of_a_dead_process_is_dead(self, run_dir: Path, card: Card) -> None:
        program = (
            "import os, sys; from pathlib import Path; from kvcached.card import *;"
            "card = Card.open(Path(sys.argv[1]), CardIdentity('GPU-0', 'a card', 1 << 30), budget_bytes=0);"
            "entry = card.register(EntrySpec(Kind.KV, 'gone', limit_bytes=9 << 20, floor_bytes=1 << 20));"
            "entry.lease(1 << 20, owned=True); entry.publish(Usage(mapped_bytes=1 << 20, owned_bytes=1 << 20)); os._exit(0)"
        )
        subprocess.run(
            [sys.executable, "-c", program, str(run_dir)], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        )
        (seen,) = Sampler(run_dir).sample().cards
        assert ([(row.instance, row.alive) for row in seen.rows], seen.leased_bytes) == ([("gone", False)], 0)
        assert build(Sampler(run_dir).sample(), View(), 80)[2].text.split() == ["gone", "0", "0", "0", "0", "0", "-", "0", "0", "dead"]

    def test_names_cannot_steer_the_terminal(self, run_dir: Path, card: Card) -> None:
        card.register(spec("chat", name="\x1b[2Jmodel\n"))
        assert Sampler(run_dir).sample().cards[0].rows[0].name == "?[2Jmodel?"
        assert plain("Qwen3-8B") == "Qwen3-8B"


def row(instance: str, rank: int = 0, *, alive: bool = True, uuid: str = "GPU-0", name: str = "", other: int = 0, **words: int) -> RankRow:
    values = {"kind": Kind.KV, "limit_bytes": 50 * MIB, **words}
    return RankRow((uuid, instance, rank), name, alive, Record(**values), other)  # type: ignore[arg-type]


def card_of(*rows: RankRow, uuid: str = "GPU-0", **words: int) -> CardSample:
    return CardSample(uuid, "NVIDIA H200", budget_bytes=BUDGET_BYTES, rows=rows, **words)  # type: ignore[arg-type]


def names(sample: Sample, **view: object) -> list[str]:
    lines = build(sample, View(**view), 80)[1:]  # type: ignore[arg-type]
    return [line.key[1] if line.key and len(line.key) == 3 else "card" for line in lines]


SAMPLE = Sample(
    0,
    (
        card_of(
            row("b", mapped_bytes=1 * MIB, owned_bytes=1 * MIB),
            row("a", 1, mapped_bytes=9 * MIB),
            row("a", 0, mapped_bytes=5 * MIB, cached_bytes=5 * MIB, name="Qwen3"),
        ),
        card_of(row("c", uuid="GPU-1", mapped_bytes=7 * MIB, limit_bytes=NO_LIMIT_BYTES), uuid="GPU-1"),
    ),
)


class TestRows:
    def test_grouped_by_card_engine_and_rank(self) -> None:
        lines = build(SAMPLE, View(), 80)
        assert [line.key for line in lines[1:]] == [
            ("GPU-0",),
            ("GPU-0", "a", 0),
            ("GPU-0", "a", 1),
            ("GPU-0", "b", 0),
            ("GPU-1",),
            ("GPU-1", "c", 0),
        ]
        assert lines[2].text.split() == ["a", "0", "5M", "0", "5M", "0", "50M", "0", "0", "ok"]
        assert lines[6].text.split() == ["c", "0", "7M", "0", "0", "0", "-", "0", "0", "ok"]

    def test_the_order_within_cards_and_in_one_list(self) -> None:
        assert names(SAMPLE, sort="mapped") == ["card", "a", "a", "b", "card", "c"]
        assert names(SAMPLE, sort="mapped", by_card=False) == ["a", "c", "a", "b"]
        assert names(SAMPLE, sort="mapped", by_card=False, is_reversed=True) == ["b", "a", "c", "a"]
        assert names(SAMPLE, sort="used", by_card=False) == ["b", "a", "a", "c"]
        assert names(SAMPLE, sort="limit", by_card=False)[0] == "c"
        assert names(SAMPLE, is_reversed=True) == ["card", "b", "a", "a", "card", "c"]
        assert [line.key for line in build(SAMPLE, View(sort="mapped"), 80)][2] == ("GPU-0", "a", 1)

    def test_what_is_wanted_is_shown_while_it_is(self) -> None:
        hungry = row("a", wanted_bytes=9 * MIB, ticket=1, wanted_until_ns=1_000)
        samples = [Sample(now_ns, (card_of(hungry, row("b", wanted_bytes=10 * MIB)),)) for now_ns in (1_000, 1_001)]
        assert [build(sample, View(), 80)[2].text.split()[-2:] for sample in samples] == [["9M", "waits"], ["0", "ok"]]
        assert [names(sample, sort="wanted") for sample in samples] == [["card", "a", "b"]] * 2
        shown = [to_json(sample, View(), Path("run"))["cards"][0]["pools"][0]["wanted_bytes"] for sample in samples]
        assert shown == [9 * MIB, 0]

    def test_trouble_comes_first_when_sorted_by_state(self) -> None:
        sample = Sample(0, (card_of(row("a"), row("b", lease_bytes=51 * MIB), row("c", alive=False)),))
        assert names(sample, sort="state") == ["card", "c", "b", "a"]

    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("", ["card", "a", "a", "b", "card", "c"]),
            ("QWEN", ["card", "a"]),
            ("gpu-1", ["card", "c"]),
            ("b", ["card", "b"]),
            ("nvidia", ["card", "a", "a", "b", "card", "c"]),
            ("nothing", []),
        ],
    )
    def test_the_filter_looks_at_pool_model_card_and_state(self, text: str, shown: list[str]) -> None:
        assert names(SAMPLE, filter_text=text) == shown

    def test_the_model_has_a_column_where_there_is_room(self) -> None:
        assert "MODEL" not in build(SAMPLE, View(), 100)[0].text
        wide = build(SAMPLE, View(), 120)
        assert "MODEL" in wide[0].text
        assert "Qwen3" in wide[2].text

    @settings(deadline=None)
    @given(st.text(max_size=60), st.text(max_size=60), st.integers(72, 200), st.sampled_from(SORTS))
    def test_no_line_is_wider_than_the_screen(self, instance: str, name: str, width: int, sort: str) -> None:
        full = {"mapped_bytes": 1023 * GIB, "owned_bytes": 1 << 62, "floor_bytes": 1023 * MIB, "wanted_bytes": 1023, "quarantined_bytes": 1}
        sample = Sample(0, (card_of(row(plain(instance), 65535, name=plain(name), **full), over_bytes=1023 * MIB, other_bytes=1 << 50),))
        lines = build(sample, View(sort=sort), width)
        assert max(cell_len(line.text) for line in lines) <= width
        for line in describe(sample, sample.cards[0], sample.cards[0].rows[0], {}, width):
            assert cell_len(line.text) <= width

    def test_long_names_keep_their_ends(self) -> None:
        assert fit("short", 8) == "short   "
        assert fit("Qwen3-30B-A3B-Instruct-a1b2c3", 17) == "Qwen3-30B-~a1b2c3"
        assert fit("abcdef", 4) == "abc~"

    def test_a_card_says_what_is_wrong_with_it(self) -> None:
        def line(card: CardSample, now_ns: int = 0) -> str:
            return build(Sample(now_ns, (card,)), View(), 80)[1].text

        assert line(card_of(leased_bytes=40 * MIB, other_bytes=MIB)).split()[-8:] == "100M leased 40M free 60M not KV 1M".split()[-8:]
        assert line(card_of(over_bytes=MIB)).endswith("over 1M")
        assert line(card_of(short_bytes=MIB)).endswith("short 1M")
        assert line(card_of(settled_at_ns=5), 4).endswith("new")
        assert not line(card_of(settled_at_ns=5), 6).endswith("new")
        assert "cannot be read: torn" in line(CardSample("GPU-9", "", problem="torn"))


class TestStates:
    @pytest.mark.parametrize(
        ("shown", "word", "said"),
        [
            (row("a"), "ok", ""),
            (row("a", alive=False), "dead", "kvctl delete a"),
            (row("a", quarantined_bytes=MIB), "failed", "1 MiB quarantined"),
            (row("a", version=9, lease_bytes=MIB), "version", "1 MiB"),
            (row("a", kind=Kind.UNREADABLE), "unread", "damaged"),
            (row("a", kind=Kind.OTHER, other=3 * MIB), "no kv", "3 MiB"),
            (row("a", lease_bytes=51 * MIB), "over", "1 MiB above its limit"),
            (row("a", ticket=1, wanted_bytes=MIB, wanted_until_ns=100), "waits", "waits for 1 MiB"),
            (row("a", ticket=1, wanted_bytes=MIB, wanted_until_ns=4), "ok", ""),
            (row("a", floor_bytes=2 * MIB, lease_bytes=MIB), "ok", ""),
        ],
    )
    def test_each_state_says_why(self, shown: RankRow, word: str, said: str) -> None:
        state = state_of(shown, card_of(shown), 5, {})
        assert (state.word, said in state.why, bool(state.why)) == (word, True, word != "ok")

    def test_a_floor_that_cannot_be_covered(self) -> None:
        shown = row("a", floor_bytes=2 * MIB, lease_bytes=MIB)
        assert state_of(shown, card_of(shown, short_bytes=MIB), 0, {}).word == "short"

    def test_what_the_pool_answered_stands_above_what_is_only_strained(self) -> None:
        silent = {"a": State("silent", "does not answer")}
        strained = row("a", lease_bytes=51 * MIB)
        assert state_of(strained, card_of(strained), 0, silent).word == "silent"
        assert state_of(row("a", alive=False), card_of(), 0, silent).word == "dead"
        assert state_of(row("b"), card_of(), 0, silent).word == "ok"


class TestHistory:
    def test_it_is_bounded_in_time_and_in_series(self) -> None:
        history = History(samples=5, most_series=4)
        for number in range(20):
            history.add(Sample(0, (card_of(row("a", mapped_bytes=number), row(f"b{number}")),)))
            assert len(history) <= 4 + 3
        assert [point.mapped_bytes for point in history.points(("GPU-0", "a", 0))] == [15, 16, 17, 18, 19]
        assert history.points(("GPU-0", "b0", 0)) == ()
        assert len(history) <= 5

    def test_a_pool_that_comes_back_goes_on(self) -> None:
        history = History(samples=5)
        history.add(SAMPLE)
        history.add(Sample(0))
        history.add(SAMPLE)
        assert len(history.points(("GPU-1", "c", 0))) == 2

    def test_a_limit_above_the_budget_bounds_nothing(self) -> None:
        history = History()
        history.add(SAMPLE)
        assert history.points(("GPU-1", "c", 0))[0] == Point(7 * MIB, 0, 0, BUDGET_BYTES)
        assert history.points(("GPU-0",))[0].limit_bytes == BUDGET_BYTES

    def test_a_column_is_as_high_as_its_highest_sample(self) -> None:
        assert columns([1, 9, 2, 3], count=4, width=10, per_column=2) == [1, 9, 3]
        assert columns([1, 9, 2, 3], count=4, width=2, per_column=2) == [9, 3]
        assert columns([], count=4, width=2, per_column=2) == [0]

    @settings(deadline=None)
    @given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 7), st.integers(1, 20))
    def test_a_column_that_is_full_never_changes(self, values: list[int], per_column: int, width: int) -> None:
        def full(values: list[int], width: int) -> dict[int, int]:
            drawn = columns(values, len(values), width, per_column)
            assert len(drawn) <= width
            newest = len(values) // per_column
            return dict(zip(range(newest - len(drawn) + 1, newest), drawn[:-1], strict=True))

        before, after = full(values, width), full([*values, 9], width + 1)
        assert before.items() <= after.items()

    def test_bars(self) -> None:
        assert plot([0, 1, 4, 8], top=8, lines=1) == [" ▁▄█"]
        assert plot([0, 4, 6, 8], top=8, lines=2) == ["  ▄█", " ███"]
        assert plot([1], top=1000, lines=1) == ["▁"]
        assert plot([0, 0], top=0, lines=2) == ["  ", "  "]

    def test_the_four_curves_have_one_scale(self) -> None:
        lines = graph([Point(50, 25, 0, 100)] * 4, 4, 20, 1, 1, of_card=False)
        assert [line.text for line in lines] == [
            "mapped    50B   ▄▄▄▄",
            "used      25B   ▂▂▂▂",
            "cached      0       ",
            "limit    100B   ████",
        ]
        assert "budget" in graph([], 0, 20, 1, 1, of_card=True)[3].text


class TestOrders:
    @pytest.mark.parametrize(
        ("kind", "text", "order"),
        [
            ("limit", "3G", Order("limit", "a", Amount(3 * GIB))),
            ("limit", " 40% ", Order("limit", "a", Amount(40, is_percent=True))),
            ("limit", "None", Order("limit", "a", ALL)),
            ("trim", "", Order("trim", "a", ALL)),
            ("trim", "all", Order("trim", "a", ALL)),
            ("trim", "512MiB", Order("trim", "a", Amount(512 * MIB))),
        ],
    )
    def test_as_people_write_it(self, kind: str, text: str, order: Order) -> None:
        assert parse_order(kind, "a", text) == order

    @pytest.mark.parametrize(
        ("kind", "text"), [("limit", ""), ("limit", "3Q"), ("limit", "140%"), ("limit", "all"), ("trim", "none"), ("trim", "-1")]
    )
    def test_what_is_not_understood_is_never_sent(self, kind: str, text: str) -> None:
        with pytest.raises(ValueError, match=r"%|size"):
            parse_order(kind, "a", text)

    def test_the_question_says_what_will_be_done(self) -> None:
        assert parse_order("limit", "a", "40%").question == "Limit a to 40% of the card's budget?"
        assert parse_order("limit", "a", "none").question == "Lift the limit of a?"
        assert parse_order("trim", "a", "").question == "Trim a: take back all that is parked?"
        assert parse_order("trim", "a", "3G").question == "Trim a: take back up to 3 GiB of what is parked?"


def kvtop(run_dir: Path, *arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(app, ["--run-dir", str(run_dir), *arguments], env={"COLUMNS": "80", "TERM": "dumb", **environ})


class TestOnce:
    def test_without_a_terminal_it_is_one_look(self, run_dir: Path, card: Card) -> None:
        entry = card.register(spec("chat", limit_bytes=20 * MIB))
        assert entry.lease(8 * MIB, owned=True).granted
        entry.publish(Usage(mapped_bytes=8 * MIB, quarantined_bytes=MIB))
        result = kvtop(run_dir)
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        assert lines[1].split() == "GPU-0 a card budget 100M leased 8M free 92M not KV 0".split()
        assert lines[2].split() == "chat 0 8M 0 0 0 20M 0 0 failed".split()
        assert lines[4].startswith("chat rank 0 on GPU-0: failed: 1 MiB quarantined")
        assert max(map(len, lines[:3])) <= 80
        assert result.stdout.isascii()
        assert kvtop(run_dir, "--once").stdout == result.stdout

    def test_json(self, run_dir: Path, card: Card) -> None:
        card.register(spec("chat")).publish(Usage(mapped_bytes=3 * MIB))
        card.register(spec("code"))
        value = json.loads(kvtop(run_dir, "--json", "--filter", "chat").stdout)
        (shown,) = value["cards"]
        assert (value["run_dir"], shown["uuid"], shown["free_bytes"]) == (str(run_dir), "GPU-0", BUDGET_BYTES)
        (pool,) = shown["pools"]
        assert (pool["instance"], pool["rank"], pool["pid"], pool["state"]) == ("chat", 0, os.getpid(), "ok")
        assert (pool["mapped_bytes"], pool["limit_bytes"], pool["floor_bytes"]) == (3 * MIB, None, 0)

    def test_options(self, run_dir: Path, card: Card) -> None:
        for name, size in (("a", 1), ("b", 3), ("c", 2)):
            card.register(spec(name)).publish(Usage(mapped_bytes=size))
        lines = kvtop(run_dir, "--sort", "mapped", "--flat").stdout.splitlines()
        assert [line.split()[0] for line in lines[1:]] == ["b", "c", "a"]
        lines = kvtop(run_dir, "--sort", "mapped", "--flat", "--reverse").stdout.splitlines()
        assert [line.split()[0] for line in lines[1:]] == ["a", "c", "b"]

    def test_an_empty_machine_says_so(self, run_dir: Path) -> None:
        assert kvtop(run_dir).stdout == f"no pools on this machine; run directory {run_dir}\n"
        assert json.loads(kvtop(run_dir, "--json").stdout)["cards"] == []

    def test_exit_codes(self, run_dir: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        unreadable = kvtop(tmp_path / "file")
        assert (unreadable.exit_code, "Not a directory" in unreadable.stderr) == (4, True)
        assert json.loads(kvtop(tmp_path / "file", "--json").stdout)["error"]["exit_code"] == 4
        wrong = kvtop(run_dir, "--sort", "height")
        assert (wrong.exit_code, "mapped" in wrong.stderr) == (2, True)
        assert kvtop(run_dir, KVCACHED_LIMIT="4Q").exit_code == 2

    def test_a_dumb_terminal_gets_text(self, run_dir: Path) -> None:
        """With FORCE_COLOR the output counts as a terminal; `TERM=dumb` still cannot place a cursor."""
        assert kvtop(run_dir, FORCE_COLOR="1").stdout.startswith("no pools")

    def test_nothing_but_the_live_screen_loads_textual(self, run_dir: Path) -> None:
        program = (
            "import sys; from kvcached.cli.top.command import app; from typer.testing import CliRunner;"
            f"assert CliRunner().invoke(app, ['--once', '--run-dir', {str(run_dir)!r}]).exit_code == 0;"
            "sys.exit('textual' in sys.modules)"
        )
        subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})

    def test_without_textual_it_says_what_to_install(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        result = kvtop(run_dir, FORCE_COLOR="1", TERM="xterm")
        assert (result.exit_code, "pip install 'kvcached-elastic[top]'" in result.stderr) == (1, True)


def test_a_share_of_a_card_that_cannot_be_read_is_one_of_what_the_pool_knows(tmp_path: Path) -> None:
    client = cast("Any", SimpleNamespace(status=lambda: SimpleNamespace(budget_bytes=BUDGET_BYTES)))
    target = Target("chat", (), 0, tmp_path / "chat.sock")
    assert target.bytes_of(Amount.parse("40%"), client) == BUDGET_BYTES * 40 // 100
    assert target.bytes_of(Amount.parse("3MiB"), client) == 3 * MIB
