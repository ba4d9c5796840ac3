# SPDX-License-Identifier: Apache-2.0
"""Every setting, read once: environment, then a TOML file, then defaults. Nothing else reads the environment.

In both places `auto` (or, in the environment, an empty value) means the default. `docs/settings.md` is the table.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TextIO

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from kvcached.errors import EngineNotSupported, SettingError
from kvcached.log_lines import JsonLine, OneLine
from kvcached.setting_types import (
    INSTANCE_PATTERN,
    Amount,
    CardNames,
    Count,
    Directory,
    Fraction,
    GroupId,
    InstanceName,
    LogFormat,
    LogLevel,
    Milliseconds,
    PageMb,
    PowerOfTwo,
    Seconds,
    Share,
    Size,
    Weight,
    ZeroBackingName,
    group_id,
)
from kvcached.spelling import SWITCH, did_you_mean, like_the_switch
from kvcached.units import GIB, MIB, format_size

_toml: Final = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CONFIG_VARIABLE",
    "INSTANCE_PATTERN",
    "Amount",
    "SettingRow",
    "Settings",
    "check_public_package",
    "configure_logging",
    "describe_settings",
    "load_settings",
    "loads_plugin",
    "misspelt_switches",
    "override",
    "package_version",
    "process_environment",
    "tell_misspelt_switches",
]

CONFIG_VARIABLE: Final = "KVCACHED_CONFIG"
_SIZE: Final = "a size such as 512MiB or 3G"
_AMOUNT: Final = f"{_SIZE}, or a share such as 40%"
_BOOL: Final = "true or false"
_COUNT: Final = "a whole number, 0 or more"


def _setting(default: Any, variable: str, allowed: str) -> Any:
    return Field(default=default, json_schema_extra={"variable": variable, "allowed": allowed})


class Settings(BaseModel):
    """All settings, checked. Made by `load_settings`. The lines below the fields are what `docs/settings.md` says."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True)

    enabled: bool = _setting(False, SWITCH, _BOOL)
    """make the engine's KV cache elastic"""
    autopatch: bool = _setting(True, "KVCACHED_AUTOPATCH", _BOOL)
    """false keeps the engine adapters out, whatever `enabled` says"""
    instance_name: InstanceName | None = _setting(None, "KVCACHED_IPC_NAME", "letters, digits, `.`, `_` and `-`, at most 40")
    """name of this engine for `kvctl`; auto: made from the engine and its process id"""
    model_name: str | None = _setting(None, "KVCACHED_NAME", "any text")
    """name of the model that `kvctl` shows; auto: the engine's own name for it"""
    log_level: LogLevel = _setting("INFO", "KVCACHED_LOG_LEVEL", "DEBUG, INFO, WARNING, ERROR or CRITICAL")
    """least severe event that is logged"""
    log_format: LogFormat = _setting("text", "KVCACHED_LOG_FORMAT", "text or json")
    """json: one object a line, with the facts of an event under their own names"""

    card: CardNames = _setting("auto", "KVCACHED_CARD", "host:N, cuda:N or hip:N, or several with commas")
    """the card, or one for each worker of an engine; auto: the worker's own device, the host card for an engine on the CPU"""
    gpu_utilization: Fraction = _setting(0.95, "KVCACHED_GPU_UTILIZATION", "a number above 0, at most 1")
    """share of the card that all engines on it may use together; `budget` goes before it"""
    budget: Share | None = _setting(None, "KVCACHED_BUDGET", _AMOUNT)
    """what all engines on the card may use together; auto: `gpu_utilization`"""
    margin_bytes: Size = _setting(256 * MIB, "KVCACHED_MARGIN", _SIZE)
    """part of the card's measured free memory that is never leased"""
    limit: Share | None = _setting(None, "KVCACHED_LIMIT", _AMOUNT)
    """most that this engine's KV cache may hold, from its first page on; a share is of the budget; auto: the budget"""
    floor: Share | None = _setting(None, "KVCACHED_FLOOR", _AMOUNT)
    """least that the others leave to this engine; auto: one longest request, at most 1/16 of the budget"""
    weight: Weight = _setting(1.0, "KVCACHED_WEIGHT", "a number, 0.001 to 1000")
    """this engine's part of contended memory, against the weights of the others"""
    other: Share | None = _setting(None, "KVCACHED_OTHER_BYTES", _AMOUNT)
    """weights and activations, leased before they are loaded; a share is of the budget; auto: measured at the last start"""

    virtual: Share | None = _setting(None, "KVCACHED_VIRTUAL", _AMOUNT)
    """address range of the KV cache, the most that it can ever grow to; a share is of the card; auto: the budget"""
    page_size_mb: PageMb | None = _setting(None, "KVCACHED_PAGE_SIZE_MB", "a whole number of MiB, 1 to 1024")
    """page per layer and buffer in the per-layer layout, else a lower bound of the page; auto: the page with least waste"""
    contiguous_layout: bool | None = _setting(None, "KVCACHED_CONTIGUOUS_LAYOUT", _BOOL)
    """true: all layers of a block side by side (interleaved); false: per layer; auto: what suits the device"""
    zero_backing: ZeroBackingName = _setting("never", "KVCACHED_ZERO_BACKING", "never, used or all")
    """what an unmapped page reads as: a fault; zeros, once it was used; zeros, always"""
    max_cached_tokens: int = _setting(-1, "KVCACHED_MAX_CACHED_TOKENS", "a whole number")
    """tokens kept for the prefix cache; below 0: no cap, pressure reclaims them; 0: none"""

    prealloc_enabled: bool = _setting(True, "KVCACHED_PAGE_PREALLOC_ENABLED", _BOOL)
    """keep mapped pages ready ahead of need"""
    min_reserved_pages: Count = _setting(5, "KVCACHED_MIN_RESERVED_PAGES", _COUNT)
    """with fewer pages ready than this, more are mapped in the background"""
    max_reserved_pages: Count = _setting(10, "KVCACHED_MAX_RESERVED_PAGES", "a whole number, `min_reserved_pages` or more")
    """with more pages empty than this, the rest is given back"""
    idle_trim_s: Seconds = _setting(10.0, "KVCACHED_IDLE_TRIM_S", "seconds, 0 to 86400")
    """an engine without work for this long gives its reserve back too"""
    large_run_mb: Count = _setting(256, "KVCACHED_LARGE_RUN_MB", "a whole number of MiB, 0 or more")
    """largest run of pages that is mapped as one; 0: single pages only"""
    handle_cache_mb: Count = _setting(256, "KVCACHED_HANDLE_CACHE_MB", "a whole number of MiB, 0 or more")
    """physical memory that an unmap may keep for the next map"""

    run_dir: Directory = _setting(None, "KVCACHED_RUN_DIR", "an absolute path")
    """where the processes of a machine meet; auto: `kvcached-UID` in /dev/shm, else in /tmp; with `run_group` `kvcached-group-GID`"""
    run_group: GroupId | None = _setting(None, "KVCACHED_RUN_GROUP", "name or number of a group")
    """share cards and control with this group; auto: with no other user"""
    lease_timeout_ms: Milliseconds = _setting(20, "KVCACHED_LEASE_TIMEOUT_MS", "milliseconds, 1 to 60000")
    """longest wait for the card's lock; after it the engine is told that there is no memory just now"""
    ipc_timeout_s: Annotated[float, Field(gt=0, le=3600)] = _setting(10.0, "KVCACHED_IPC_TIMEOUT", "seconds, above 0, at most 3600")
    """longest wait for another process to answer"""

    host_capacity_bytes: Annotated[Size, Field(gt=0)] = _setting(None, "KVCACHED_HOST_CAPACITY", _SIZE)
    """size of a host card; auto: 8 GiB, at most half of the machine's memory"""
    host_granularity_bytes: PowerOfTwo = _setting(2 * MIB, "KVCACHED_HOST_GRANULARITY", "a power of two, 4KiB or more")
    """smallest page of a host card"""
    host_dir: Directory = _setting(None, "KVCACHED_HOST_DIR", "an absolute path")
    """directory of the host card's capacity file; auto: `host` in the run directory"""

    canary: bool = _setting(False, "KVCACHED_CANARY", _BOOL)
    """for hunting faults: a stamp behind every block in use, looked at after each step"""

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _warnings: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="before")
    @classmethod
    def _fill_machine_defaults(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The defaults that depend on the machine or on another setting."""
        values = dict(given)
        if "run_dir" not in values:
            values["run_dir"] = _default_run_dir(values.get("run_group"))
        values.setdefault("host_dir", Path(str(values["run_dir"])) / "host")
        values.setdefault("host_capacity_bytes", min(8 * GIB, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2))
        return values

    @model_validator(mode="after")
    def _marks_are_in_order(self) -> Settings:
        if self.min_reserved_pages > self.max_reserved_pages:
            raise ValueError(
                f"KVCACHED_MIN_RESERVED_PAGES is {self.min_reserved_pages}, above KVCACHED_MAX_RESERVED_PAGES, {self.max_reserved_pages}; "
                "allowed: at most that"
            )
        return self

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know although it is no error: unknown variables, each with the nearest known name."""
        return self._warnings

    def source_of(self, name: str) -> str:
        """Where field `name` came from: `environment VARIABLE`, `file PATH` or `default`. Raises `KeyError` for an unknown name."""
        if name not in type(self).model_fields:
            raise KeyError(name)
        return self._sources.get(name, "default")

    def card_of(self, local_rank: int) -> str:
        """The card of a worker, by its number on this machine: of one that is named for all, or its own in a list; `auto` as it is.

        Raises `SettingError` when a list is too short.
        """
        names = self.card.split(",")
        if len(names) == 1:
            return names[0]
        if local_rank >= len(names):
            raise SettingError(
                f"KVCACHED_CARD names {len(names)} cards, {self.card}, and none is left for worker {local_rank}; name one for each"
            )
        return names[local_rank]

    def budget_bytes(self, total_bytes: int) -> int:
        """The card's budget, given the card's size."""
        return self.budget.of(total_bytes) if self.budget is not None else int(total_bytes * self.gpu_utilization)


class SettingRow(NamedTuple):
    """What a person has to know about one setting; `default` is as written in a TOML file."""

    name: str
    variable: str
    allowed: str
    default: str
    about: str


def describe_settings() -> list[SettingRow]:
    """All settings in the order of the model."""
    return [_row(name) for name in Settings.model_fields]


def _row(name: str) -> SettingRow:
    field = Settings.model_fields[name]
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return SettingRow(name, str(extra["variable"]), str(extra["allowed"]), _default_text(name, field.default), str(field.description))


def _default_text(name: str, default: object) -> str:
    if default is None:
        return "auto"
    if isinstance(default, bool):
        return str(default).lower()
    if name.endswith("_bytes") and isinstance(default, int):
        return format_size(default).replace(" ", "")
    return str(default)


def _default_run_dir(group: object) -> Path:
    parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK | os.X_OK) else Path("/tmp")
    if group is None:
        return parent / f"kvcached-{os.getuid()}"
    try:
        return parent / f"kvcached-group-{group_id(group)}"
    except ValueError:  # the field's own check reports it, with its name
        return parent / "kvcached-group"


def load_settings(environ: Mapping[str, str] | None = None, toml_path: Path | None = None) -> Settings:
    """Read and check everything. `toml_path` replaces the search for a file.

    Raises `SettingError` naming the variable or key, its value and what is allowed.
    """
    environ = os.environ if environ is None else environ
    path = toml_path if toml_path is not None else _find_file(environ)
    variables = {row.variable: row.name for row in describe_settings()}
    given = {name: (value, f"file {path}") for name, value in (_read_file(path) if path is not None else {}).items()}
    for variable, name in variables.items():
        if environ.get(variable, "").strip():
            given[name] = (environ[variable].strip(), f"environment {variable}")
    settings = _checked(given)
    settings._sources = {name: source for name, (_, source) in given.items()}
    settings._warnings = _unknown_variables(environ, [*variables, CONFIG_VARIABLE])
    return settings


def elastic_is_asked_for(environ: Mapping[str, str] | None = None) -> bool:
    """Whether an engine in this process is to be made elastic.

    A bad value of some setting is no reason to stop an engine that was not asked to be elastic; else it is a `SettingError`.
    """
    environ = os.environ if environ is None else environ
    try:
        settings = load_settings(environ)
    except SettingError:
        if environ.get(SWITCH, "").strip().lower() in ("", "0", "false", "no", "off", "auto"):
            return False
        raise
    return settings.enabled and settings.autopatch


def misspelt_switches(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Variables that look as if they should have been `ENABLE_KVCACHED`, such as `ENABLE_KVCACHE`; they have no effect."""
    return like_the_switch(os.environ if environ is None else environ)


def tell_misspelt_switches() -> None:
    """Log that an engine which was perhaps meant to be elastic is not. Without a handler of ours it goes to standard error."""
    for name in misspelt_switches():
        logging.getLogger("kvcached").warning("%s has no effect: this engine is not elastic; did you mean %s?", name, SWITCH)


def override(settings: Settings, changes: Mapping[str, object]) -> Settings:
    """`settings` with some fields replaced by a program, checked anew. Raises `SettingError`."""
    unknown = [name for name in changes if name not in Settings.model_fields]
    if unknown:
        raise SettingError(f"{unknown[0]} is no setting; allowed: {', '.join(Settings.model_fields)}")
    given = {name: (getattr(settings, name), source) for name, source in settings._sources.items()}
    given |= {name: (value, "the program") for name, value in changes.items()}
    changed = _checked(given)
    changed._sources = {name: source for name, (_, source) in given.items()}
    changed._warnings = settings._warnings
    return changed


def _checked(given: Mapping[str, tuple[Any, str]]) -> Settings:
    try:
        return Settings(**{name: value for name, (value, source) in given.items() if not _means_default(name, value, source)})
    except ValidationError as error:
        raise SettingError(_explain(error, given)) from None


def _means_default(name: str, value: object, source: str) -> bool:
    if isinstance(value, bool) and Settings.model_fields[name].annotation not in (bool, bool | None):
        raise SettingError(f"{name} = {value} in {source} is not allowed; allowed: {_row(name).allowed}")
    return isinstance(value, str) and value.strip().lower() == "auto"


def _explain(error: ValidationError, given: Mapping[str, tuple[Any, str]]) -> str:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    name = str(first["loc"][0])
    value, source = given[name]
    where = f"{_row(name).variable}={value}" if source.startswith("environment") else f"{name} = {value!r} in {source}"
    return f"{where} is not allowed: {message}; allowed: {_row(name).allowed}, or auto"


def _find_file(environ: Mapping[str, str]) -> Path | None:
    named = environ.get(CONFIG_VARIABLE, "").strip()
    if named:
        return Path(named).expanduser()
    # Not `Path.expanduser`: it fails for a user without a home, as those of containers are.
    candidates = (Path("kvcached.toml"), Path(os.path.expanduser("~/.config/kvcached.toml")))
    return next((path for path in candidates if os.path.isfile(path)), None)  # a home that this user may not look into has none


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = _toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"the settings file {path} cannot be read: {error}; {CONFIG_VARIABLE} names it") from None
    except _toml.TOMLDecodeError as error:
        raise SettingError(f"the settings file {path} is not TOML: {error}") from None
    for key in values:
        if key not in Settings.model_fields:
            raise SettingError(f"unknown key {key!r} in {path}{did_you_mean(key, Settings.model_fields)}; docs/settings.md lists all")
    return values


def _unknown_variables(environ: Mapping[str, str], known: list[str]) -> tuple[str, ...]:
    unknown = {name for name in environ if name.startswith("KVCACHED_") and name not in known}
    named = sorted(unknown.union(misspelt_switches(environ)))
    return tuple(f"unknown variable {name} has no effect{did_you_mean(name, known)}" for name in named)


def loads_plugin(name: str, variable: str = "VLLM_PLUGINS", environ: Mapping[str, str] | None = None) -> bool:
    """Whether an engine would load the plugin `name`: `variable`, where it is set, lists all that it loads."""
    listed = (os.environ if environ is None else environ).get(variable)
    return listed is None or name in listed.split(",")


def process_environment() -> dict[str, str]:
    """What a process that we start inherits: a copy."""
    return dict(os.environ)


def package_version() -> str:
    """Version of the installed distribution, `0+source` when it runs from a source tree."""
    try:
        return importlib.metadata.version("kvcached-elastic")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


def check_public_package() -> None:
    """Raise `EngineNotSupported` if the public package `kvcached` is installed beside ours: both own the import name."""
    try:
        found = importlib.metadata.distribution("kvcached")
    except importlib.metadata.PackageNotFoundError:
        return
    raise EngineNotSupported(
        f"the package kvcached {found.version} is installed beside kvcached-elastic, and both provide the module kvcached; "
        "run: pip uninstall kvcached && pip install --force-reinstall --no-deps kvcached-elastic"
    )


def configure_logging(settings: Settings, stream: TextIO | None = None) -> logging.Logger:
    """Give the logger `kvcached` the level and format of `settings` and one handler (default: standard error). A repeat replaces it."""
    logger = logging.getLogger("kvcached")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLine() if settings.log_format == "json" else OneLine())
    logger.handlers = [handler]
    logger.setLevel(settings.log_level)
    logger.propagate = False
    return logger
