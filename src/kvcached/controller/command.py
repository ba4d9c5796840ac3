# SPDX-License-Identifier: Apache-2.0
"""`kvcached serve`: check the file, show the plan, or run the gateway."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

from kvcached.cli.output import say, table
from kvcached.config import configure_logging, load_settings, process_environment
from kvcached.controller.access import Access
from kvcached.controller.build import log_dir_of
from kvcached.controller.config import ServeConfig, json_schema, load_config
from kvcached.controller.engine_command import environment_of
from kvcached.controller.leftovers import claimed
from kvcached.controller.plan import CardPlan, Row, plan_of
from kvcached.controller.serve import serve
from kvcached.controller.traces import traces_to
from kvcached.errors import SettingError
from kvcached.units import format_size

if TYPE_CHECKING:
    from pathlib import Path


def show_schema() -> None:
    """The JSON schema of the file."""
    say(json_schema().rstrip())


def check(path: Path) -> None:
    """Read the file and its variables. Raises `SettingError` that names the key."""
    config = load_config(path)
    environ = process_environment()
    Access(config, environ)
    traces_to(config.traces).close()
    for name, model in config.models.items():
        if model.elastic:
            load_settings(environment_of(name, model, 0, environ))
    _refuse_what_cannot_fit(config)
    say(f"{path}: {len(config.models)} model{'' if len(config.models) == 1 else 's'}, no mistake")


def dry_run(path: Path) -> None:
    """The byte plan of each card. Raises `SettingError` for what cannot fit."""
    config = load_config(path)
    for plan in plan_of(config):
        _show(plan)
    for name, model in config.models.items():
        if model.engine == "remote":
            say(f"{name}: remote, at {', '.join(model.address)}")
    _refuse_what_cannot_fit(config)


def run(path: Path) -> None:
    """Until a signal ends it. Raises `SettingError`, also when the address is taken."""
    config = _checked(path)
    configure_logging(load_settings())
    gc.freeze()  # what is there now stays; looking through it again and again would hold streams up
    with claimed(log_dir_of(config)):
        asyncio.run(serve(config, process_environment(), lambda address: _announce(config, address), lambda: _checked(path)))


def _announce(config: ServeConfig, address: str) -> None:
    say(f"serving {', '.join(config.models)} at {address}/v1")


def _checked(path: Path) -> ServeConfig:
    config = load_config(path)
    _refuse_what_cannot_fit(config)
    return config


def _refuse_what_cannot_fit(config: ServeConfig) -> None:
    problems = [problem for plan in plan_of(config) for problem in plan.problems()]
    if problems:
        raise SettingError("; ".join(problems))


def _show(plan: CardPlan) -> None:
    size = format_size(plan.size_bytes) if plan.size_bytes else "of a size that `cards` does not say"
    say(f"{plan.card}: {size}")
    if plan.rows:
        say(table(("MODEL", "WEIGHTS", "FLOOR", "LIMIT", "SLEEPS"), [_cells(row) for row in plan.rows], left=1))
    if plan.size_bytes:
        left = plan.left_bytes
        say(f"left with all awake: {format_size(left)}" if left >= 0 else f"all awake need {format_size(-left)} more: some will sleep")


def _cells(row: Row) -> tuple[str, ...]:
    weights = format_size(row.weights_bytes) if row.weights_bytes else "not known"
    limit = format_size(row.limit_bytes) if row.limit_bytes is not None else "the card"
    return row.model, weights, format_size(row.floor_bytes), limit, "no" if row.stays else "yes"
