# SPDX-License-Identifier: Apache-2.0
"""The kinds of value that a setting can have, and the check of each. A `ValueError` says what is wrong; `config` names the setting."""

from __future__ import annotations

import grp
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from kvcached.units import format_size, parse_size

INSTANCE_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
MOST_BYTES: Final = 1 << 60
"""Records and messages have 64 bits for a number of bytes."""
_PERCENT: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of bytes, or a share of something that is known only later."""

    value: float
    is_percent: bool = False

    @classmethod
    def parse(cls, text: str) -> Amount:
        """`40%` or a size as `parse_size` reads it. Raises `ValueError` with what is allowed."""
        match = _PERCENT.fullmatch(text)
        if match is None:
            return cls(_checked_size(text))
        if float(match[1]) > 100:
            raise ValueError(f"{text!r} is more than 100%")
        return cls(float(match[1]), is_percent=True)

    def of(self, whole_bytes: int) -> int:
        """Bytes, given the whole that a share refers to."""
        return int(whole_bytes * self.value / 100) if self.is_percent else int(self.value)

    def __str__(self) -> str:
        return f"{self.value:g}%" if self.is_percent else format_size(int(self.value))


def _checked_size(value: object) -> int:
    size = parse_size(value) if isinstance(value, str) else value
    if not isinstance(size, int):
        raise ValueError(f"{value!r} is not a size")  # noqa: TRY004
    if size > MOST_BYTES:
        raise ValueError(f"{str(value)[:40]} is more than any card has")
    return size


def _checked_amount(value: object) -> Amount:
    if isinstance(value, Amount):
        return value
    amount = Amount.parse(value) if isinstance(value, str) else Amount(_checked_size(value))
    if amount.value < 0:
        raise ValueError(f"{value!r} is below zero")
    return amount


def group_id(value: object) -> int:
    text = str(value).strip()
    try:
        return int(text) if text.isdecimal() else grp.getgrnam(text).gr_gid
    except KeyError:
        raise ValueError(f"there is no group {text!r} on this machine") from None


def _instance_name(value: object) -> str:
    if not isinstance(value, str) or INSTANCE_PATTERN.fullmatch(value) is None:
        raise ValueError(f"{value!r} is not a name: it becomes a file name")
    return value


def _power_of_two(value: object) -> int:
    size_bytes = _checked_size(value)
    if size_bytes < 4096 or size_bytes & (size_bytes - 1):
        raise ValueError(f"{size_bytes} bytes is not a power of two of at least 4096")
    return size_bytes


def _path(value: object) -> Path:
    path = Path(str(value)).expanduser()
    if not path.is_absolute():
        raise ValueError(f"{str(value)!r} is not an absolute path, and processes with other working directories must find it too")
    return path


def _cards(value: object) -> str:
    return str(value).lower().replace(" ", "")


def _lower(value: object) -> str:
    return str(value).lower()


Size = Annotated[int, BeforeValidator(_checked_size), Field(ge=0)]
PowerOfTwo = Annotated[int, BeforeValidator(_power_of_two)]
Share = Annotated[Amount, BeforeValidator(_checked_amount), PlainSerializer(str)]
Directory = Annotated[Path, BeforeValidator(_path)]
GroupId = Annotated[int, BeforeValidator(group_id)]
InstanceName = Annotated[str, BeforeValidator(_instance_name)]
CardNames = Annotated[str, BeforeValidator(_cards), Field(pattern=r"^(auto|(host|cuda|hip):\d{1,4}(,(host|cuda|hip):\d{1,4})*)$")]
LogFormat = Annotated[Literal["text", "json"], BeforeValidator(_lower)]
LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(lambda level: str(level).upper())]
ZeroBackingName = Annotated[Literal["never", "used", "all"], BeforeValidator(_lower)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(ge=0, le=86_400)]
PageMb = Annotated[int, Field(ge=1, le=1024)]
Weight = Annotated[float, Field(ge=0.001, le=1000)]
Milliseconds = Annotated[int, Field(ge=1, le=60_000)]
