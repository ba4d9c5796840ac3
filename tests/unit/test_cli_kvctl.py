# SPDX-License-Identifier: Apache-2.0
"""`kvctl` without any pool: usage, sizes, exit codes, and what it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from kvcached.card import NO_LIMIT_BYTES
from kvcached.cli.control.routes import COMMANDS
from kvcached.cli.kvctl import app
from kvcached.cli.output import ExitCode, NoSuchPool, exit_code_of, parse_amount, parse_limit, parse_percent, reporting, short_size
from kvcached.config import Amount
from kvcached.errors import HandshakeMismatch, KVCachedError, Misuse, PeerLost, PeerRefused, PeerTimeout, SettingError
from kvcached.units import GIB, KIB, MIB

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def kvctl(run_dir: Path, *arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(app, ["--run-dir", str(run_dir), *arguments], env={"COLUMNS": "80", "NO_COLOR": "1", **environ})


class TestWithoutPools:
    def test_list_says_so_and_where_it_looked(self, run_dir: Path) -> None:
        result = kvctl(run_dir, "list")
        assert (result.exit_code, result.stdout) == (0, f"no pools on this machine; run directory {run_dir}\n")
        assert json.loads(kvctl(run_dir, "list", "--json").stdout) == {"run_dir": str(run_dir), "cards": []}
        assert not run_dir.exists()

    def test_list_points_to_another_users_cards(self, tmp_path: Path) -> None:
        (tmp_path / "kvcached-1000").mkdir()
        (tmp_path / "kvcached-1001").mkdir()
        (tmp_path / "kvcached-1000/GPU-1.card").touch()
        result = kvctl(tmp_path / "kvcached-0", "list")
        assert result.stdout.endswith(f"; there are cards in {tmp_path}/kvcached-1000: kvctl --run-dir {tmp_path}/kvcached-1000 list\n")
        assert "1001" not in result.stdout

    def test_watch_says_so_each_time(self, run_dir: Path) -> None:
        result = kvctl(run_dir, "watch", "-c", "2", "-n", "0.05")
        assert [line[9:] for line in result.stdout.splitlines()] == [f"no pools on this machine; run directory {run_dir}"] * 2

    @pytest.mark.parametrize(
        "command",
        [
            ("limit", "chat", "3G"),
            ("limit-percent", "chat", "40"),
            ("trim", "chat"),
            ("floor", "chat", "3G"),
            ("weight", "chat", "2"),
            ("evict", "chat", "3G"),
            ("explain", "chat"),
            ("delete", "chat"),
            ("trim", "../../etc"),
        ],
    )
    def test_every_other_command_says_that_there_is_no_such_pool(self, run_dir: Path, command: tuple[str, ...]) -> None:
        result = kvctl(run_dir, *command)
        assert (result.exit_code, result.stdout) == (3, "")
        assert result.stderr == f"no pool named {command[1]!r}; there are no pools in run directory {run_dir}\n"
        error = json.loads(kvctl(run_dir, *command, "--json").stdout)["error"]
        assert (error["type"], error["exit_code"]) == ("NoSuchPool", 3)

    def test_a_card_that_cannot_be_read_is_shown(self, run_dir: Path) -> None:
        run_dir.mkdir()
        (run_dir / "GPU-1.card").write_bytes(b"nonsense" * 1000)
        result = kvctl(run_dir, "list")
        assert (result.exit_code, "GPU-1" in result.stdout, "cannot be read" in result.stdout) == (0, True, True)


class TestUsage:
    @pytest.mark.parametrize(
        ("command", "said"),
        [
            (("limit", "chat", "3Q"), "is not a size"),
            (("limit", "chat", "140%"), "more than 100%"),
            (("limit", "chat"), "Missing argument"),
            (("limit-percent", "chat", "3G"), "is not a size"),
            (("weight", "chat", "0"), "0.001"),
            (("watch", "-n", "0"), "0.05"),
            (("frobnicate",), "No such command"),
        ],
    )
    def test_mistakes_are_exit_code_2_and_say_what_is_allowed(self, run_dir: Path, command: tuple[str, ...], said: str) -> None:
        result = kvctl(run_dir, *command)
        assert (result.exit_code, said in result.stderr) == (2, True)

    def test_a_bad_setting_is_exit_code_2(self, run_dir: Path) -> None:
        result = kvctl(run_dir, "list", KVCACHED_LIMIT="4Q")
        assert (result.exit_code, result.stderr.startswith("KVCACHED_LIMIT=4Q is not allowed")) == (2, True)

    def test_an_unknown_variable_is_a_warning(self, run_dir: Path) -> None:
        result = kvctl(run_dir, "list", KVCACHED_LIMTI="4G")
        assert (result.exit_code, "did you mean KVCACHED_LIMIT?" in result.stderr) == (0, True)

    def test_config_shows_where_values_come_from(self, run_dir: Path) -> None:
        shown = json.loads(kvctl(run_dir, "config", "--json", KVCACHED_LIMIT="40%").stdout)["settings"]
        assert shown["limit"] == {"variable": "KVCACHED_LIMIT", "value": "40%", "source": "environment KVCACHED_LIMIT"}
        assert shown["weight"]["source"] == "default"
        assert max(len(line) for line in kvctl(run_dir, "config").stdout.splitlines()) <= 80

    def test_every_command_and_exit_code_is_documented(self) -> None:
        text = (ROOT / "docs/kvctl.md").read_text()
        for command in app.registered_commands:
            name = command.name or getattr(command.callback, "__name__", "")
            assert f"`kvctl {name}" in text, name
        for code in ExitCode:
            assert f"| {int(code)} |" in text

    def test_every_command_is_there_over_http_too_and_documented(self) -> None:
        text = (ROOT / "docs/control.md").read_text()
        names = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
        assert names - set(COMMANDS) == {"list", "watch", "limit-percent", "config"}
        for name, (method, _) in COMMANDS.items():
            assert f"| `{method} /v1/pools/POOL/{name}` |" in text, name


class TestPieces:
    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (NoSuchPool("x"), 3),
            (SettingError("x"), 2),
            (PeerLost("x"), 4),
            (PeerTimeout("x"), 4),
            (HandshakeMismatch("x"), 4),
            (PeerRefused("x"), 1),
            (Misuse("x"), 1),
        ],
    )
    def test_exit_codes(self, error: KVCachedError, code: int) -> None:
        assert exit_code_of(error) == code

    def test_a_file_that_may_not_be_opened_is_one_sentence(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(typer.Exit) as ended, reporting(as_json=False):
            raise PermissionError(13, "Permission denied", "/run/x")
        assert ended.value.exit_code == 4
        assert capsys.readouterr().err == "[Errno 13] Permission denied: '/run/x'\n"

    def test_other_errors_travel_on(self) -> None:
        with pytest.raises(ZeroDivisionError), reporting(as_json=True):
            raise ZeroDivisionError

    def test_amounts(self) -> None:
        assert parse_amount("512MiB") == Amount(512 * MIB)
        assert parse_limit(" None ") == Amount(NO_LIMIT_BYTES)
        assert parse_percent("40") == parse_percent("40 %") == Amount(40, is_percent=True)
        for bad in ("", "x", "-1", "101%"):
            with pytest.raises(typer.BadParameter):
                parse_limit(bad)

    @pytest.mark.parametrize(
        ("size_bytes", "text"),
        [(0, "0"), (1, "1B"), (KIB, "1K"), (3 * GIB // 2, "1.5G"), (100 * GIB + 1, "100G"), (1023 * MIB, "1023M"), (NO_LIMIT_BYTES, "-")],
    )
    def test_short_sizes(self, size_bytes: int, text: str) -> None:
        assert short_size(size_bytes) == text

    @given(st.integers(0, 2**53))
    def test_short_sizes_are_short_and_near(self, size_bytes: int) -> None:
        text = short_size(size_bytes)
        assert len(text) <= 6
        factor = {"B": 1, "K": KIB, "M": MIB, "G": GIB, "T": GIB * KIB}.get(text[-1], 1)
        assert abs(float(text.rstrip("BKMGT")) * factor - size_bytes) <= max(0.05 * size_bytes, 0)
