# SPDX-License-Identifier: Apache-2.0
"""Settings: where they come from, what is allowed, and that the documents say the same."""

from __future__ import annotations

import importlib.metadata
import io
import json
import logging
import os
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvcached.config import (
    Amount,
    Settings,
    check_public_package,
    configure_logging,
    describe_settings,
    elastic_is_asked_for,
    load_settings,
    loads_plugin,
    misspelt_switches,
    override,
    package_version,
)
from kvcached.engines.sglang import plugin as plugin_of_sglang
from kvcached.engines.vllm import general_plugin
from kvcached.errors import EngineNotSupported, SettingError
from kvcached.log_lines import fields
from kvcached.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
NAMES_USERS_KNOW = [
    "ENABLE_KVCACHED",
    "KVCACHED_AUTOPATCH",
    "KVCACHED_IPC_NAME",
    "KVCACHED_PAGE_SIZE_MB",
    "KVCACHED_GPU_UTILIZATION",
    "KVCACHED_PAGE_PREALLOC_ENABLED",
    "KVCACHED_MIN_RESERVED_PAGES",
    "KVCACHED_MAX_RESERVED_PAGES",
    "KVCACHED_MAX_CACHED_TOKENS",
    "KVCACHED_CONTIGUOUS_LAYOUT",
    "KVCACHED_IPC_TIMEOUT",
    "KVCACHED_LOG_LEVEL",
]


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings file of the machine or of the tree is found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


class TestPrecedence:
    def test_defaults(self) -> None:
        settings = load_settings({})
        assert settings.enabled is False
        assert settings.autopatch is True
        assert settings.max_cached_tokens == -1
        assert settings.lease_timeout_ms == 20
        assert settings.large_run_mb == 256
        assert settings.zero_backing == "never"
        assert {settings.source_of(row.name) for row in describe_settings()} == {"default"}

    def test_the_environment_goes_before_the_file_and_the_file_before_defaults(self, tmp_path: Path) -> None:
        path = write(tmp_path / "my.toml", 'limit = "3G"\nfloor = "1G"\nweight = 2\n')
        settings = load_settings({"KVCACHED_LIMIT": "40%", "KVCACHED_CONFIG": str(path)})
        assert (settings.limit, settings.source_of("limit")) == (Amount(40, is_percent=True), "environment KVCACHED_LIMIT")
        assert (settings.floor, settings.source_of("floor")) == (Amount(GIB), f"file {path}")
        assert (settings.weight, settings.source_of("weight")) == (2, f"file {path}")
        assert (settings.budget, settings.source_of("budget")) == (None, "default")

    def test_an_unknown_name_has_no_source(self) -> None:
        with pytest.raises(KeyError):
            load_settings({}).source_of("limits")

    def test_files_are_searched_in_order(self, tmp_path: Path) -> None:
        home = write(tmp_path / "home/.config/kvcached.toml", "weight = 2")
        assert load_settings({}).source_of("weight") == f"file {home}"
        write(tmp_path / "kvcached.toml", "weight = 3")
        assert load_settings({}).weight == 3
        named = write(tmp_path / "named.toml", "weight = 4")
        assert load_settings({"KVCACHED_CONFIG": str(named)}).weight == 4
        given = write(tmp_path / "given.toml", "weight = 5")
        assert load_settings({"KVCACHED_CONFIG": str(named)}, given).weight == 5

    def test_the_process_environment_is_read_when_none_is_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVCACHED_NAME", "llama")
        assert load_settings().model_name == "llama"

    @pytest.mark.parametrize("nothing", ["", "  ", "auto", " AUTO "])
    def test_empty_and_auto_are_the_default(self, nothing: str) -> None:
        variables = {row.variable: nothing for row in describe_settings()}
        assert load_settings(variables).model_dump() == load_settings({}).model_dump()

    def test_settings_cannot_be_changed(self) -> None:
        with pytest.raises(ValidationError):
            load_settings({}).weight = 3  # type: ignore[misc]


class TestValues:
    @pytest.mark.parametrize(
        ("variable", "text", "name", "value"),
        [
            ("ENABLE_KVCACHED", "true", "enabled", True),
            ("ENABLE_KVCACHED", "1", "enabled", True),
            ("KVCACHED_AUTOPATCH", "0", "autopatch", False),
            ("KVCACHED_IPC_NAME", "chat-1.a_b", "instance_name", "chat-1.a_b"),
            ("KVCACHED_PAGE_SIZE_MB", "2", "page_size_mb", 2),
            ("KVCACHED_GPU_UTILIZATION", "0.5", "gpu_utilization", 0.5),
            ("KVCACHED_PAGE_PREALLOC_ENABLED", "no", "prealloc_enabled", False),
            ("KVCACHED_MIN_RESERVED_PAGES", "0", "min_reserved_pages", 0),
            ("KVCACHED_MAX_RESERVED_PAGES", "99", "max_reserved_pages", 99),
            ("KVCACHED_MAX_CACHED_TOKENS", "16000", "max_cached_tokens", 16000),
            ("KVCACHED_CONTIGUOUS_LAYOUT", "false", "contiguous_layout", False),
            ("KVCACHED_IPC_TIMEOUT", "2.5", "ipc_timeout_s", 2.5),
            ("KVCACHED_LOG_LEVEL", "debug", "log_level", "DEBUG"),
            ("KVCACHED_LOG_FORMAT", "JSON", "log_format", "json"),
            ("KVCACHED_CARD", "HOST:0", "card", "host:0"),
            ("KVCACHED_CARD", "host:0, HOST:1", "card", "host:0,host:1"),
            ("KVCACHED_CARD", "cuda:7", "card", "cuda:7"),
            ("KVCACHED_BUDGET", "80%", "budget", Amount(80, is_percent=True)),
            ("KVCACHED_BUDGET", "40GiB", "budget", Amount(40 * GIB)),
            ("KVCACHED_MARGIN", "1.5G", "margin_bytes", 3 * GIB // 2),
            ("KVCACHED_MARGIN", "0", "margin_bytes", 0),
            ("KVCACHED_OTHER_BYTES", "17G", "other", Amount(17 * GIB)),
            ("KVCACHED_VIRTUAL", "128G", "virtual", Amount(128 * GIB)),
            ("KVCACHED_ZERO_BACKING", "Used", "zero_backing", "used"),
            ("KVCACHED_RUN_DIR", "/run/x", "run_dir", Path("/run/x")),
            ("KVCACHED_RUN_GROUP", "4243", "run_group", 4243),
            ("KVCACHED_RUN_GROUP", "root", "run_group", 0),
            ("KVCACHED_HOST_CAPACITY", "2G", "host_capacity_bytes", 2 * GIB),
            ("KVCACHED_HOST_GRANULARITY", "64KiB", "host_granularity_bytes", 65536),
            ("KVCACHED_WEIGHT", "0.001", "weight", 0.001),
            ("KVCACHED_IDLE_TRIM_S", "0", "idle_trim_s", 0.0),
            ("KVCACHED_LARGE_RUN_MB", "0", "large_run_mb", 0),
        ],
    )
    def test_good_ones(self, variable: str, text: str, name: str, value: object) -> None:
        assert getattr(load_settings({variable: f" {text} "}), name) == value

    @pytest.mark.parametrize(
        ("variable", "text", "said"),
        [
            ("ENABLE_KVCACHED", "maybe", "true or false"),
            ("KVCACHED_IPC_NAME", "a/b", "letters, digits"),
            ("KVCACHED_IPC_NAME", "x" * 41, "at most 40"),
            ("KVCACHED_PAGE_SIZE_MB", "0", "1 to 1024"),
            ("KVCACHED_PAGE_SIZE_MB", "2.5", "a whole number of MiB"),
            ("KVCACHED_GPU_UTILIZATION", "0", "above 0, at most 1"),
            ("KVCACHED_GPU_UTILIZATION", "1.01", "above 0, at most 1"),
            ("KVCACHED_GPU_UTILIZATION", "nan", "above 0, at most 1"),
            ("KVCACHED_MIN_RESERVED_PAGES", "-1", "0 or more"),
            ("KVCACHED_MAX_CACHED_TOKENS", "many", "a whole number"),
            ("KVCACHED_IPC_TIMEOUT", "0", "seconds, above 0"),
            ("KVCACHED_LOG_LEVEL", "TRACE", "DEBUG, INFO"),
            ("KVCACHED_LOG_FORMAT", "xml", "text or json"),
            ("KVCACHED_CARD", "gpu0", "host:N, cuda:N or hip:N"),
            ("KVCACHED_CARD", "host:0,auto", "several with commas"),
            ("KVCACHED_BUDGET", "101%", "40%"),
            ("KVCACHED_BUDGET", "40Q", "512MiB"),
            ("KVCACHED_LIMIT", "-3G", "512MiB"),
            ("KVCACHED_MARGIN", "40%", "512MiB"),
            ("KVCACHED_ZERO_BACKING", "sometimes", "never, used or all"),
            ("KVCACHED_RUN_DIR", "run", "an absolute path"),
            ("KVCACHED_RUN_GROUP", "no such group", "name or number of a group"),
            ("KVCACHED_HOST_CAPACITY", "0", "512MiB"),
            ("KVCACHED_HOST_GRANULARITY", "3MiB", "a power of two"),
            ("KVCACHED_HOST_GRANULARITY", "2KiB", "4KiB or more"),
            ("KVCACHED_WEIGHT", "0", "0.001 to 1000"),
            ("KVCACHED_LEASE_TIMEOUT_MS", "0", "1 to 60000"),
        ],
    )
    def test_a_bad_one_names_variable_value_and_what_is_allowed(self, variable: str, text: str, said: str) -> None:
        with pytest.raises(SettingError) as error:
            load_settings({variable: text})
        assert str(error.value).startswith(f"{variable}={text} is not allowed: ")
        assert said in str(error.value).rpartition("; allowed: ")[2]

    @pytest.mark.parametrize(
        "line",
        ["limit = true", "weight = true", "run_dir = 3", "page_size_mb = 1.5", "budget = -1", "margin_bytes = 0.5", "instance_name = 7"],
    )
    def test_a_bad_one_in_a_file_names_key_and_file(self, tmp_path: Path, line: str) -> None:
        path = write(tmp_path / "kvcached.toml", line)
        with pytest.raises(SettingError, match=re.escape(str(path.name))) as error:
            load_settings({})
        assert str(error.value).startswith(line.split()[0])
        assert "allowed: " in str(error.value)

    def test_reserve_marks_must_be_in_order(self) -> None:
        with pytest.raises(SettingError, match="KVCACHED_MIN_RESERVED_PAGES is 11, above KVCACHED_MAX_RESERVED_PAGES, 10"):
            load_settings({"KVCACHED_MIN_RESERVED_PAGES": "11"})

    def test_the_run_directory_follows_the_group_and_the_host_directory_follows_it(self) -> None:
        assert load_settings({}).run_dir.name == f"kvcached-{os.getuid()}"
        assert load_settings({"KVCACHED_RUN_GROUP": "4243"}).run_dir.name == "kvcached-group-4243"
        assert load_settings({"KVCACHED_RUN_DIR": "/run/x"}).host_dir == Path("/run/x/host")

    def test_without_a_writable_shared_memory_the_run_directory_is_under_tmp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        assert load_settings({}).run_dir.parent == Path("/tmp")

    def test_one_card_is_for_all_workers_and_a_list_has_one_for_each(self) -> None:
        assert [load_settings({"KVCACHED_CARD": "host:3"}).card_of(rank) for rank in range(3)] == ["host:3"] * 3
        assert load_settings({}).card_of(1) == "auto"
        listed = load_settings({"KVCACHED_CARD": "host:1,host:0"})
        assert [listed.card_of(rank) for rank in range(2)] == ["host:1", "host:0"]
        with pytest.raises(SettingError, match="names 2 cards, host:1,host:0, and none is left for worker 2"):
            listed.card_of(2)

    def test_the_budget_goes_before_the_utilization(self) -> None:
        assert load_settings({"KVCACHED_GPU_UTILIZATION": "0.5"}).budget_bytes(80 * GIB) == 40 * GIB
        both = load_settings({"KVCACHED_GPU_UTILIZATION": "0.5", "KVCACHED_BUDGET": "25%"})
        assert both.budget_bytes(80 * GIB) == 20 * GIB


class TestOverride:
    def test_a_program_goes_before_everything_and_is_checked(self) -> None:
        base = load_settings({"KVCACHED_LIMIT": "3G", "KVCACHED_WEIGHT": "2", "KVCACHED_FLOOR": "auto"})
        changed = override(base, {"limit": "40%", "card": "host:0"})
        assert (changed.limit, changed.weight, changed.floor) == (Amount(40, is_percent=True), 2, None)
        assert [changed.source_of(name) for name in ("limit", "weight", "budget")] == [
            "the program",
            "environment KVCACHED_WEIGHT",
            "default",
        ]
        assert base.limit == Amount(3 * GIB)
        assert override(changed, {"run_dir": "/run/x"}).host_dir == Path("/run/x/host")

    def test_what_is_wrong_is_named(self) -> None:
        with pytest.raises(SettingError, match=r"^weight = 0 in the program is not allowed: .*; allowed: a number, 0.001 to 1000"):
            override(load_settings({}), {"weight": 0})
        with pytest.raises(SettingError, match="limits is no setting; allowed: enabled, "):
            override(load_settings({}), {"limits": "3G"})

    def test_marks_stay_in_order(self) -> None:
        with pytest.raises(SettingError, match="KVCACHED_MIN_RESERVED_PAGES is 20"):
            override(load_settings({}), {"min_reserved_pages": 20})


class TestUnknownNames:
    def test_a_variable_is_a_warning_with_the_nearest_name(self) -> None:
        settings = load_settings({"KVCACHED_LIMTI": "3G", "KVCACHED_XYZZY": "1", "PATH": "/bin", "KVCACHED_CONFIG": ""})
        assert settings.warnings == (
            "unknown variable KVCACHED_LIMTI has no effect; did you mean KVCACHED_LIMIT?",
            "unknown variable KVCACHED_XYZZY has no effect",
        )

    def test_a_key_is_an_error_with_the_nearest_name(self, tmp_path: Path) -> None:
        write(tmp_path / "kvcached.toml", "lease_timeout = 5")
        with pytest.raises(SettingError, match=r"unknown key 'lease_timeout' in kvcached.toml; did you mean lease_timeout_ms\?"):
            load_settings({})

    def test_a_file_that_is_named_and_absent(self, tmp_path: Path) -> None:
        with pytest.raises(SettingError, match=r"absent.toml cannot be read: .*KVCACHED_CONFIG names it"):
            load_settings({"KVCACHED_CONFIG": str(tmp_path / "absent.toml")})

    def test_a_file_that_is_no_toml(self, tmp_path: Path) -> None:
        write(tmp_path / "kvcached.toml", "limit = 3G")
        with pytest.raises(SettingError, match="is not TOML"):
            load_settings({})
        (tmp_path / "kvcached.toml").write_bytes(b"\xff\xfe")
        with pytest.raises(SettingError, match="cannot be read"):
            load_settings({})


class TestAmount:
    @given(st.integers(0, 2**50))
    def test_bytes_do_not_depend_on_the_whole(self, size_bytes: int) -> None:
        assert Amount.parse(str(size_bytes)).of(7) == size_bytes

    @given(st.floats(0, 100), st.integers(0, 2**45))
    def test_a_share_is_never_more_than_the_whole(self, percent: float, whole_bytes: int) -> None:
        assert 0 <= Amount.parse(f"{percent:.6f}%").of(whole_bytes) <= whole_bytes

    def test_how_they_are_written(self) -> None:
        assert [str(Amount.parse(text)) for text in ("40%", "12.5 %", "3G", "1536M")] == ["40%", "12.5%", "3 GiB", "1.5 GiB"]


class TestDocuments:
    def test_every_name_that_users_know_is_there(self) -> None:
        assert set(NAMES_USERS_KNOW) <= {row.variable for row in describe_settings()}

    def test_every_setting_says_what_it_is_for_and_no_variable_is_used_twice(self) -> None:
        rows = describe_settings()
        assert all(row.about not in ("", "None") and row.allowed for row in rows)
        assert len({row.variable for row in rows}) == len(rows) == len(Settings.model_fields)

    def test_the_table_is_the_model(self) -> None:
        text = (ROOT / "docs/settings.md").read_text()
        rows = [tuple(cell.strip() for cell in line.strip("|\n").split(" | ")) for line in text.splitlines() if line.startswith("| `")]
        assert rows == [(f"`{row.variable}`", f"`{row.name}`", row.default, row.allowed, row.about) for row in describe_settings()]

    def test_the_example_holds_every_key_with_its_default(self) -> None:
        path = ROOT / "kvcached.example.toml"
        settings = load_settings({}, path)
        assert settings.model_dump() == load_settings({}).model_dump()
        assert [settings.source_of(row.name) for row in describe_settings()] == [f"file {path}"] * len(describe_settings())

    def test_the_example_explains_every_key_in_order(self) -> None:
        lines = (ROOT / "kvcached.example.toml").read_text().splitlines()
        keys = [line.split(" = ")[0] for line in lines if re.match(r"[a-z_]+ = ", line)]
        assert keys == [row.name for row in describe_settings()]
        for row in describe_settings():
            at = next(number for number, line in enumerate(lines) if line.startswith(f"{row.name} = "))
            assert lines[at - 2 : at] == [f"# {row.about}", f"# {row.variable}: {row.allowed}"]


class TestPublicPackage:
    @pytest.fixture
    def other(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """A directory with the metadata of a distribution named kvcached, first on the path."""
        write(tmp_path / "site/kvcached-0.1.5.dist-info/METADATA", "Metadata-Version: 2.1\nName: kvcached\nVersion: 0.1.5\n")
        monkeypatch.syspath_prepend(tmp_path / "site")
        return tmp_path / "site"

    def test_it_is_refused_by_name_with_what_to_do(self, other: Path) -> None:
        with pytest.raises(EngineNotSupported, match=r"kvcached 0\.1\.5 .*pip uninstall kvcached"):
            check_public_package()

    def test_alone_we_are_welcome(self) -> None:
        check_public_package()

    def test_our_version_is_the_distributions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.metadata, "version", {"kvcached-elastic": "9.9"}.__getitem__)
        assert package_version() == "9.9"

        def absent(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", absent)
        assert package_version() == "0+source"


@pytest.mark.parametrize(
    ("environ", "loaded"),
    [({}, True), ({"VLLM_PLUGINS": "kvcached"}, True), ({"VLLM_PLUGINS": ""}, False), ({"VLLM_PLUGINS": "kvcached2,x"}, False)],
)
def test_vllms_own_list_of_plugins_counts(environ: dict[str, str], loaded: bool) -> None:
    assert loads_plugin("kvcached", environ=environ) is loaded


class TestLogging:
    @pytest.fixture(autouse=True)
    def restored(self) -> Iterator[None]:
        logger = logging.getLogger("kvcached")
        before = (logger.handlers, logger.level, logger.propagate)
        yield
        logger.handlers, logger.level, logger.propagate = before

    def log(self, environ: dict[str, str], event: Any) -> list[str]:
        stream = io.StringIO()
        configure_logging(load_settings(environ), stream)
        configure_logging(load_settings(environ), stream)
        event(logging.getLogger("kvcached.control"))
        return stream.getvalue().splitlines()

    def test_one_event_is_one_line_also_with_a_traceback(self) -> None:
        def event(logger: logging.Logger) -> None:
            try:
                int("two\nlines")
            except ValueError:
                logger.exception("it failed")

        (line,) = self.log({}, event)
        assert f"ERROR kvcached.control[{os.getpid()}]: it failed" in line
        assert "ValueError: invalid literal" in line

    def test_the_level_is_the_settings(self) -> None:
        def event(logger: logging.Logger) -> None:
            logger.info("quiet")
            logger.warning("loud")

        assert len(self.log({"KVCACHED_LOG_LEVEL": "warning"}, event)) == 1
        assert len(self.log({"KVCACHED_LOG_LEVEL": "info"}, event)) == 2

    def test_as_json_an_event_is_one_object_with_its_facts(self) -> None:
        def event(logger: logging.Logger) -> None:
            logger.info("%s gave %d bytes", "chat", 7, extra=fields("gave_back", giver="chat", given_bytes=7))
            try:
                int("two\nlines")
            except ValueError:
                logger.exception("it failed")

        gave, failed = map(json.loads, self.log({"KVCACHED_LOG_FORMAT": "json"}, event))
        assert (gave["event"], gave["giver"], gave["given_bytes"], gave["message"]) == ("gave_back", "chat", 7, "chat gave 7 bytes")
        assert (gave["level"], gave["logger"], gave["pid"]) == ("INFO", "kvcached.control", os.getpid())
        assert datetime.fromisoformat(gave["time"]).utcoffset() == timedelta(0)
        assert (failed["message"], "event" in failed) == ("it failed", False)
        assert "ValueError: invalid literal" in failed["traceback"]

    def test_as_text_facts_are_in_the_sentence_alone(self) -> None:
        (line,) = self.log({}, lambda logger: logger.info("chat gave 7 bytes", extra=fields("gave_back", given_bytes=7)))
        assert line.endswith("chat gave 7 bytes")


def test_nothing_else_reads_the_environment() -> None:
    reading = re.compile(r"os\.environ|os\.getenv|from os import .*environ")
    guilty = [path for path in (ROOT / "src").rglob("*.py") if path.name != "config.py" and reading.search(path.read_text())]
    assert guilty == []


@pytest.mark.parametrize("off", ["", "0", "false", "off"])
def test_a_bad_setting_does_not_stop_an_engine_that_was_not_asked_to_be_elastic(off: str) -> None:
    assert elastic_is_asked_for({"ENABLE_KVCACHED": off, "KVCACHED_LIMIT": "5x"}) is False
    with pytest.raises(SettingError, match="KVCACHED_LIMIT"):
        elastic_is_asked_for({"ENABLE_KVCACHED": "true", "KVCACHED_LIMIT": "5x"})
    assert elastic_is_asked_for({"ENABLE_KVCACHED": "true"}) is True
    assert elastic_is_asked_for({"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "0"}) is False


class TestSwitch:
    @pytest.mark.parametrize(
        "name",
        [
            "ENABLE_KVCACHE",
            "ENABLED_KVCACHED",
            "KVCACHED_ENABLE",
            "KVCACHED_ENABLED",
            "enable_kvcached",
            "ENABLE_KV_CACHED",
            "ENABLE_KVCAHCED",
        ],
    )
    def test_a_misspelt_one_is_named_with_the_right_one(self, name: str) -> None:
        assert misspelt_switches({name: "true"}) == (name,)
        assert load_settings({name: "true"}).warnings == (f"unknown variable {name} has no effect; did you mean ENABLE_KVCACHED?",)
        assert not elastic_is_asked_for({name: "true"})

    @pytest.mark.parametrize(
        "name", ["ENABLE_KVCACHED", "KVCACHED_LIMIT", "VLLM_ENABLE_V1_MULTIPROCESSING", "ENABLE_CACHE", "KVCACHED_NAME"]
    )
    def test_other_variables_are_none(self, name: str) -> None:
        assert misspelt_switches({name: "true"}) == ()

    def test_an_engine_says_so_at_its_start(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.delenv("ENABLE_KVCACHED", raising=False)
        for plugin in (general_plugin, plugin_of_sglang):
            plugin()
        assert caplog.messages == []
        monkeypatch.setenv("ENABLE_KVCACHE", "true")
        for plugin in (general_plugin, plugin_of_sglang):
            plugin()
        assert caplog.messages == ["ENABLE_KVCACHE has no effect: this engine is not elastic; did you mean ENABLE_KVCACHED?"] * 2
