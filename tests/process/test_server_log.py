# SPDX-License-Identifier: Apache-2.0
"""A log that others write: nothing of it is missed, and it stays within its bound."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvcached.controller import server_log
from kvcached.controller.server_log import ServerLog, open_to_append

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S = 60.0
COUNTS = "import time\nfor number in range({count}): print(number, flush=True); time.sleep({pause_s})"


def lines_of(log: ServerLog) -> list[str]:
    found: list[str] = []
    while (lines := log.lines()) is not None:
        found += lines
    return found


def append(path: Path, text: str) -> None:
    fd = open_to_append(path)
    os.write(fd, text.encode())
    os.close(fd)


def test_lines_come_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.log"
    append(path, "old\n")
    log = ServerLog(path)
    assert lines_of(log) == []
    append(path, "one\ntw")
    assert lines_of(log) == ["one"]
    append(path, "o\nthree")
    assert lines_of(log) == ["two"]
    assert (log.last(), log.last()) == ("three", "")
    log.close()


@pytest.mark.parametrize(("back_bytes", "lines"), [(0, []), (5, ["two"]), (7, ["two"]), (9, ["one", "two"]), (1000, ["one", "two"])])
def test_its_last_lines_are_whole(tmp_path: Path, back_bytes: int, lines: list[str]) -> None:
    append(tmp_path / "a.log", "one\ntwo\n")
    log = ServerLog(tmp_path / "a.log", back_bytes)
    assert lines_of(log) == lines
    log.close()


@pytest.mark.parametrize("told", ["by the kernel", "by a look"])
def test_growth_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    if told == "by a look":
        monkeypatch.setattr(server_log, "_watch", lambda path: None)
        monkeypatch.setattr(server_log, "_LOOK_S", 0.02)
    path = tmp_path / "a.log"
    output = open_to_append(path)
    log = ServerLog(path)

    async def play() -> list[str]:
        found: list[str] = []
        while len(found) < 20:
            await log.grown()
            found += lines_of(log)
        return found

    with subprocess.Popen([sys.executable, "-c", COUNTS.format(count=20, pause_s=0.01)], stdout=output):
        os.close(output)
        assert asyncio.run(asyncio.wait_for(play(), WAIT_S)) == [str(number) for number in range(20)]
    log.close()


def test_a_full_log_is_kept_beside_it_while_its_writer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "MOST_BYTES", 1000)
    path = tmp_path / "a.log"
    output = open_to_append(path)
    log = ServerLog(path)
    for round_ in range(30):
        os.write(output, b"%099d\n" % round_)
        assert lines_of(log) == [f"{round_:099d}"]
        assert path.stat().st_size <= 1000
    os.close(output)
    log.close()
    kept = (tmp_path / "a.log.1").read_bytes() + path.read_bytes()
    assert kept == b"".join(b"%099d\n" % round_ for round_ in range(11, 30))


def test_what_is_written_while_it_is_cut_is_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "MOST_BYTES", 10)
    path = tmp_path / "a.log"
    append(path, "x" * 20 + "\n")
    log = ServerLog(path, 1000)
    copy = server_log.shutil.copyfileobj  # type: ignore[attr-defined]

    def busy(source: object, target: object) -> None:
        append(path, "before\n")
        copy(source, target)
        append(path, "after\n")

    monkeypatch.setattr(server_log.shutil, "copyfileobj", busy)  # type: ignore[attr-defined]
    assert lines_of(log) == ["x" * 20, "before", "after"]
    assert (tmp_path / "a.log.1").read_text() == "x" * 20 + "\nbefore\nafter\n"
    assert path.read_text() == ""
    log.close()


def test_one_that_somebody_else_cuts_is_followed_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    append(path, "first\n")
    log = ServerLog(path)
    os.truncate(path, 0)
    append(path, "x\n")
    assert lines_of(log) == ["x"]
    log.close()


def test_a_copy_that_cannot_be_written_does_not_keep_it_from_being_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "MOST_BYTES", 10)
    (tmp_path / "a.log.1").mkdir()
    path = tmp_path / "a.log"
    log_of = open_to_append(path)
    log = ServerLog(path)
    os.write(log_of, b"a long line\n")
    assert lines_of(log) == ["a long line"]
    assert path.read_bytes() == b""
    os.write(log_of, b"next\n")
    assert lines_of(log) == ["next"]
    os.close(log_of)
    log.close()
