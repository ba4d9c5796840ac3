# SPDX-License-Identifier: Apache-2.0
"""From one gateway to the next of the same folder: servers that run go on."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kvcached.controller import leftovers
from kvcached.controller.launcher import EngineBackend

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from aiohttp import web

    from kvcached.controller.adoption import Record
    from kvcached.controller.backends import Backend
    from kvcached.controller.leftovers import Group
    from kvcached.controller.states import State

_log = logging.getLogger("kvcached.controller")
_LONGEST_REQUEST_S: Final = 120.0
"""Longer than requests are given to end."""


async def take_over(folder: Path, backends: Mapping[str, Backend]) -> dict[str, State]:
    """What earlier gateways left in `folder` is these models' from here on, or has ended. Returns the state of each that was taken.

    Raises `SettingError` when something does not end, and `OSError` when a log cannot be opened.
    """
    groups = await asyncio.to_thread(leftovers.groups_in, folder)
    records = {name: _records_of(name, groups) for name in backends}
    fit = {name: backend for name, backend in backends.items() if isinstance(backend, EngineBackend) and records[name]}
    reasons = dict(zip(fit, await asyncio.gather(*(backend.why_not_adopt(records[name]) for name, backend in fit.items())), strict=True))
    unfit = [group for group in groups if _why_unfit(group, reasons)]
    for group in unfit:
        _log.warning("%s: process %d of an earlier gateway is ended: %s", group.file.stem, group.pid, _why_unfit(group, reasons))
    await asyncio.to_thread(leftovers.end_all, unfit)
    return {name: backend.adopt(records[name]) for name, backend in fit.items() if not reasons[name]}


async def stop_accepting(runner: web.AppRunner) -> asyncio.Task[None]:
    """No connection from here on. Those without a request are closed, the others after the answer to theirs; then the task is done."""
    for site in list(runner.sites):
        await site.stop()
    await asyncio.sleep(0)  # what was accepted already is a request
    assert runner.server is not None
    runner.server.pre_shutdown()
    return asyncio.get_running_loop().create_task(runner.server.shutdown(_LONGEST_REQUEST_S))


def _records_of(name: str, groups: Sequence[Group]) -> list[Record]:
    """By replica."""
    found = [group.record for group in groups if group.record is not None and group.record.purpose.model == name]
    return sorted(found, key=lambda record: record.purpose.replica)


def _why_unfit(group: Group, reasons: Mapping[str, str]) -> str:
    if group.record is None:
        return "it has lost its first process, or its record is of another version"
    return reasons.get(group.record.purpose.model, "no model of that name is started here")
