# SPDX-License-Identifier: Apache-2.0
"""Records of engines: only what they name is ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvcached.controller import leftovers
from kvcached.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"


@contextlib.contextmanager
def group(code: str = "print(flush=True); import time; time.sleep(600)") -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a group."""
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process, process.stdout:
        try:
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def change(record: Path, **fields: object) -> None:
    record.write_text(json.dumps({**json.loads(record.read_text()), **fields}))


def test_what_has_a_record_is_ended(tmp_path: Path) -> None:
    with group() as one, group() as other:
        leftovers.note(tmp_path / "a.log", one.pid)
        leftovers.end_all(tmp_path)
        assert one.wait(60) == -15
        assert other.poll() is None
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_hear_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_TERM_GRACE_S", 0.1)
    with group(STUBBORN) as one:
        leftovers.note(tmp_path / "a.log", one.pid)
        leftovers.end_all(tmp_path)
        assert one.wait(60) == -9


@pytest.mark.parametrize("fields", [{"start": 1}, {"boot": "another"}, {"pid": 1}, {"pid": 0}, {"pid": -1}, {"pid": "x"}])
def test_another_process_of_that_number_is_left_alone(tmp_path: Path, fields: dict[str, object]) -> None:
    with group() as one:
        leftovers.note(tmp_path / "a.log", one.pid)
        change(tmp_path / "a.process", **fields)
        leftovers.end_all(tmp_path)
        assert one.poll() is None
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_record_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a.process").write_text("[")
    (tmp_path / "b.process").write_text("[]")
    leftovers.end_all(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_forgotten(tmp_path: Path) -> None:
    with group() as one:
        leftovers.note(tmp_path / "a.log", one.pid)
        leftovers.forget(tmp_path / "a.log")
        leftovers.forget(tmp_path / "a.log")
        leftovers.end_all(tmp_path)
        assert one.poll() is None


def test_a_folder_is_one_gateways(tmp_path: Path) -> None:
    with leftovers.claimed(tmp_path), pytest.raises(SettingError, match="another gateway uses"), leftovers.claimed(tmp_path):
        pass
    with leftovers.claimed(tmp_path):
        assert os.listdir(tmp_path) == [".gateway"]
