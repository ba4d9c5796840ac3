# SPDX-License-Identifier: Apache-2.0
"""Shared memory and the run directory: each of doctor's rows tells the truth about a place that is as the test says."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvcached.card.segment import card_path
from kvcached.cli import places
from kvcached.cli.findings import Row, Verdict
from kvcached.config import load_settings
from kvcached.errors import SettingError
from kvcached.runtime.endpoint import prepare_run_dir
from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A socket's path may have 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def check(run_dir: Path, **more: str) -> Row:
    return places.check_run_dir(load_settings({"KVCACHED_RUN_DIR": str(run_dir), **more}))


class TestSharedMemory:
    @pytest.mark.parametrize(
        ("free_mib", "total_mib", "verdict"),
        [(32, 1024, Verdict.OK), (1, 1024, Verdict.WARNING), (63, 64, Verdict.WARNING), (1, 64, Verdict.WARNING)],
    )
    def test_how_much_of_it_there_is(self, monkeypatch: pytest.MonkeyPatch, free_mib: int, total_mib: int, verdict: Verdict) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(total_mib * MIB, 0, free_mib * MIB))
        row = places.check_shared_memory()
        assert (row.verdict, "--shm-size" in row.advice) == (verdict, verdict is Verdict.WARNING)

    def test_there_is_none(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        row = places.check_shared_memory(tmp_path / "shm")
        assert (row.verdict, "there is no" in row.finding) == (Verdict.WARNING, True)
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        assert "not writable" in places.check_shared_memory(tmp_path).finding


class TestRunDirectory:
    def test_its_mode_and_its_path(self, short_path: Path) -> None:
        run_dir = short_path / "run"
        assert check(run_dir / "deeper").finding.endswith("will be made by the first engine")
        run_dir.mkdir(mode=0o700)
        assert check(run_dir).verdict is Verdict.OK
        run_dir.chmod(0o770)
        assert check(run_dir).verdict is Verdict.PROBLEM
        assert check(run_dir, KVCACHED_RUN_GROUP="0").verdict is Verdict.OK
        run_dir.chmod(0o777)
        assert check(run_dir, KVCACHED_RUN_GROUP="0").verdict is Verdict.PROBLEM
        (short_path / "file").write_text("")
        assert check(short_path / "file").verdict is Verdict.PROBLEM
        assert check(short_path / "file/below").verdict is Verdict.PROBLEM
        assert check(short_path / ("x" * 90)).verdict is Verdict.PROBLEM
        assert list(run_dir.iterdir()) == [], "a try leaves nothing behind"

    def test_it_cannot_be_made(self, monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        row = check(short_path / "run")
        assert (row.verdict, "cannot be made" in row.finding) == (Verdict.PROBLEM, True)

    def test_another_users_is_refused_as_an_engine_refuses_it(self, monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
        group = short_path.stat().st_gid
        monkeypatch.setattr(os, "geteuid", lambda: 4_999)
        found = os.stat(short_path)
        stats = os.stat_result((found.st_mode, *found[1:4], 5_000, *found[5:]))
        real = os.stat
        monkeypatch.setattr(os, "stat", lambda path, **more: stats if Path(path) == short_path else real(path, **more))
        monkeypatch.setattr(Path, "stat", lambda path, **more: os.stat(path, **more))
        row = check(short_path)
        assert (row.verdict, "another user" in row.finding, "KVCACHED_RUN_GROUP" in row.advice) == (Verdict.PROBLEM, True, True)
        with pytest.raises(SettingError, match="belongs to user 5000"):
            prepare_run_dir(short_path)
        assert check(short_path, KVCACHED_RUN_GROUP=str(group)).verdict is Verdict.OK

    def test_a_file_system_that_takes_no_locks(self, monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
        def refuse(*arguments: Any) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "lockf", refuse)
        for run_dir in (short_path, short_path / "not there yet"):
            row = check(run_dir)
            assert (row.verdict, os.strerror(errno.ENOLCK) in row.finding) == (Verdict.PROBLEM, True)
            assert "a local file system" in row.advice

    def test_a_file_system_that_takes_no_sockets(self, monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
        class NoSocket(socket.socket):
            def bind(self, address: Any) -> None:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        monkeypatch.setattr(socket, "socket", NoSocket)
        assert check(short_path).verdict is Verdict.PROBLEM

    def test_cards_elsewhere_are_told(self, short_path: Path) -> None:
        settings = load_settings({"KVCACHED_RUN_DIR": str(short_path / "kvcached-0")})
        other = short_path / "kvcached-7"
        other.mkdir()
        assert list(places.check_other_run_dirs(settings)) == []
        card_path(other, "GPU-1").write_bytes(b"")
        (row,) = places.check_other_run_dirs(settings)
        assert (row.verdict, str(other) in row.finding) == (Verdict.WARNING, True)
        card_path(other, "GPU-1").rename(card_path(short_path, "GPU-1"))
        (short_path / "kvcached-0").mkdir()
        card_path(short_path, "GPU-1").rename(card_path(short_path / "kvcached-0", "GPU-1"))
        assert list(places.check_other_run_dirs(settings)) == [], "its own are no others'"
