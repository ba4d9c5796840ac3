# SPDX-License-Identifier: Apache-2.0
"""What `config` shows, in both commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcached.cli.output import say, say_json, table, warn
from kvcached.config import describe_settings
from kvcached.units import format_size

if TYPE_CHECKING:
    from kvcached.config import Settings


def settings_json(settings: Settings) -> dict[str, Any]:
    values = settings.model_dump(mode="json")
    shown = {
        row.name: {"variable": row.variable, "value": values[row.name], "source": settings.source_of(row.name)}
        for row in describe_settings()
    }
    return {"settings": shown, "warnings": list(settings.warnings)}


def show_settings(settings: Settings, as_json: bool) -> None:
    """Every setting: variable, value, and where the value came from."""
    if as_json:
        say_json(settings_json(settings))
        return
    cells = [
        (row.variable, value_text(settings, row.name), settings.source_of(row.name).removesuffix(f" {row.variable}"))
        for row in describe_settings()
    ]
    say(table(("VARIABLE", "VALUE", "FROM"), cells, left=3, whole=1))
    for warning in settings.warnings:
        warn(f"warning: {warning}")


def value_text(settings: Settings, name: str) -> str:
    """A value as one would write it in the settings file."""
    value = getattr(settings, name)
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return str(value).lower()
    return format_size(value) if name.endswith("_bytes") else str(value)
