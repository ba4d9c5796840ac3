# SPDX-License-Identifier: Apache-2.0
"""Child processes of the demo: started, seen to die, and ended for certain. The children here are small Python programs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from examples.demo.ask import Server
from examples.demo.engine import Engine, EngineFailed, first_error, stop_all, tail, wait_ready
from examples.demo.options import ROOT, newest_release, parse
from examples.demo.plan import Sizes
from examples.demo.stage import engine_environment, public_command

from kvcached.controller.ports import free_ports
from kvcached.testing.kinds import KINDS, SGLANG, VLLM, EngineKind, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    time.sleep(60)
print("INFO 11-29 10:00:00 [core.py:12] deaf", flush=True)
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Engine]]:
    engines: list[Engine] = []

    def run(program: str) -> Engine:
        server = Server("facts", free_ports(1)[0], 1)
        engines.append(Engine(server, [sys.executable, "-c", program], os.environ, tmp_path / "engine.log"))
        return engines[-1]

    yield run
    stop_all(engines, grace_s=0.0)


def wait_for_text(engine: Engine, text: str) -> None:
    end_s = time.monotonic() + 60
    while text not in engine.last_line() and time.monotonic() < end_s:
        time.sleep(0.02)
    assert text in engine.last_line()


def test_an_engine_that_dies_is_reported_with_its_last_words(start: Callable[[str], Engine]) -> None:
    engine = start("raise SystemExit('ValueError: no room for the weights')")
    with pytest.raises(EngineFailed, match=r"facts ended with code 1(.|\n)*first error(.|\n)*no room(.|\n)*last lines(.|\n)*no room"):
        wait_ready([engine], 60.0, lambda _: None)


def test_the_first_error_is_named_not_its_consequences(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "(Worker pid=7) ERROR 11-29 22:57:00 [multiproc_executor.py:953]     raise SettingError(\n"
        "(Worker pid=7) ERROR 11-29 22:57:00 [multiproc_executor.py:953] kvcached.errors.SettingError: budget is 73 MiB; allowed ...\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert first_error(log) == "kvcached.errors.SettingError: budget is 73 MiB; allowed ..."
    log.write_text("all is well\n")
    assert first_error(log) == ""


def test_an_engine_that_never_answers_fails_at_its_deadline(start: Callable[[str], Engine]) -> None:
    seen: list[float] = []
    with pytest.raises(EngineFailed, match="not ready within 0 s"):
        wait_ready([start("import time; time.sleep(60)")], 0.0, seen.append)
    assert seen, "progress was shown"


def test_a_polite_engine_ends_without_a_word(start: Callable[[str], Engine]) -> None:
    engine = start("print('up', flush=True); import time; time.sleep(60)")
    wait_for_text(engine, "up")
    assert stop_all([engine], grace_s=60.0) == []
    assert engine.gone()


def test_a_deaf_engine_and_its_children_are_killed(start: Callable[[str], Engine]) -> None:
    engine = start(STUBBORN)
    wait_for_text(engine, "deaf")
    assert stop_all([engine], grace_s=0.2) == ["facts did not end within 0 s and was killed"]
    assert engine.gone()
    assert stop_all([engine]) == []


def test_the_shown_line_has_no_prefix(start: Callable[[str], Engine]) -> None:
    engine = start("print('(EngineCore pid=7) INFO 11-29 10:00:00 [core.py:12] loading weights\\n', flush=True)")
    wait_for_text(engine, "loading weights")
    assert engine.last_line() == "loading weights"


def test_tail_keeps_the_last_lines_that_say_something(tmp_path: Path) -> None:
    assert tail(tmp_path / "none", 3) == []
    (tmp_path / "log").write_text("x" * 100_000 + "\na\n\n b \n\n")
    assert tail(tmp_path / "log", 2) == ["a", " b"]


def test_ports_are_free_and_differ() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_engine_gets_the_card_and_no_stray_setting(kind: EngineKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stray in ("KVCACHED_LIMIT", "VLLM_CPU_KVCACHE_SPACE", "SGLANG_PLUGINS", "PYTHONDONTWRITEBYTECODE"):
        monkeypatch.setenv(stray, "1")
    environment = engine_environment(kind, "facts", tmp_path / "release", tmp_path, Sizes(4, 64, 32, 1024))
    assert not {"KVCACHED_LIMIT", "VLLM_CPU_KVCACHE_SPACE", "SGLANG_PLUGINS", "PYTHONDONTWRITEBYTECODE"} & environment.keys()
    assert environment["PYTHONPATH"] == str(tmp_path / "release")
    assert environment["ENABLE_KVCACHED"] == "true"
    assert environment["KVCACHED_BUDGET"] == environment["KVCACHED_HOST_CAPACITY"] == str(Sizes(4, 64, 32, 1024).budget_bytes)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_command_line_says_nothing_of_kvcached(kind: EngineKind) -> None:
    arguments = kind.arguments(Path("model"), "facts", 80, Shape(4, 64))
    assert "kvcached" not in " ".join(arguments).lower()
    assert {"model", "facts", "80", "4", "64", "32"} <= set(arguments)


def test_the_shown_command_is_one_for_a_shell(start: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.demo.stage.newest_release", lambda kind: ROOT / ".cache" / "engines" / f"{kind.package}-1.2.3")
    engine = start("")
    engine.command = [str(SGLANG.python(ROOT)), "-m", "engine", "--name", "two words"]
    shown = "PYTHONPATH=.cache/engines/sglang-1.2.3 SGLANG_USE_CPU_ENGINE=1 SGLANG_CPU_OMP_THREADS_BIND=0 ENABLE_KVCACHED=true "
    assert public_command(SGLANG, engine) == f"{shown}.venv-sglang/bin/python -m engine --name 'two words'"


def test_the_newest_release_is_used(tmp_path: Path) -> None:
    releases = tmp_path / ".cache" / "engines"
    for name in ("vllm-0.9.2", "vllm-0.32.0", "vllm-0.28.0", "vllm-0.33.0", "sglang-0.40.0"):
        (releases / name / "vllm").mkdir(parents=True)
    for name in ("vllm-0.9.2", "vllm-0.32.0", "vllm-0.28.0"):
        (releases / name / "vllm" / "__init__.py").touch()
    assert newest_release(VLLM, tmp_path).name == "vllm-0.32.0"
    with pytest.raises(SystemExit, match="make sglang"):
        newest_release(SGLANG, tmp_path)


def test_options_have_defaults_and_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([]).live
    assert parse([]).kinds == (VLLM, VLLM)
    assert parse(["--engine", "sglang"]).kinds == (SGLANG, SGLANG)
    assert parse(["--engine", "both"]).kinds == (VLLM, SGLANG)
    assert parse(["--rounds", "7", "--no-live", "--keep"]).rounds == 7
    with pytest.raises(SystemExit):
        parse(["--rounds", "0"])
    assert "not 1 or more" in capsys.readouterr().err
