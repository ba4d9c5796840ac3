# SPDX-License-Identifier: Apache-2.0
"""Which servers of an earlier gateway are the next one's: a record says what each was started for, and how it is. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from kvcached.controller.states import State

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_OF_A_SESSION: Final = frozenset(
    {
        *("_", "PWD", "OLDPWD", "SHLVL", "TERM", "COLUMNS", "LINES", "WINDOWID", "TMUX", "TMUX_PANE", "STY"),
        *("SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "XDG_SESSION_ID"),
        *("INVOCATION_ID", "JOURNAL_STREAM", "MANAGERPID", "SYSTEMD_EXEC_PID", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"),
        *("LISTEN_FDNAMES", "LISTEN_FDS", "LISTEN_PID", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE"),
    }
)
"""Variables of who started the gateway and when: each start has others, and no engine asks for them."""


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a server is started for. `command`: with 0 for its port. `folder`: where relative paths begin.

    `environment`: a digest of each variable's value, which may be a secret.
    """

    model: str
    replica: int
    log: str
    folder: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Record:
    """A server that runs. `pid` leads its session and process group; `start` in the kernel's ticks since that `boot`.

    `state`: STARTING, READY, GOING_TO_SLEEP, ASLEEP or WAKING. `sleep`: how it sleeps, if it does.
    """

    pid: int
    start: int | None
    boot: str
    port: int
    sleep: str
    state: State
    purpose: Purpose

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "state": self.state.value}


def record_from(given: Mapping[str, Any]) -> Record | None:
    """None for one of another version, which may say less or more."""
    try:
        purpose = Purpose(**{**given["purpose"], "command": tuple(given["purpose"]["command"])})
        return Record(**{**given, "state": State(given["state"]), "purpose": purpose})
    except (KeyError, TypeError, ValueError):
        return None


def digests(environment: Mapping[str, str], chosen: Collection[str]) -> dict[str, str]:
    """Of all variables but those of a session, unless they were `chosen` for this model."""
    kept = {name: value for name, value in environment.items() if name in chosen or name not in _OF_A_SESSION}
    return {name: blake2b(value.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest() for name, value in kept.items()}


def why_not(records: Sequence[Record], purposes: Sequence[Purpose], sleep: str) -> str:
    """Why these servers cannot be those of a model that wants one for each of `purposes`; empty: they can."""
    if len(records) != len(purposes):
        return f"{len(records)} of {len(purposes)} servers are left"
    different = [words for record, purpose in zip(records, purposes, strict=True) for words in _differences(record.purpose, purpose)]
    if different:
        return f"it was started with another {', '.join(dict.fromkeys(different))}"
    states = {record.state for record in records}
    if states not in ({State.READY}, {State.ASLEEP}):
        return f"it was left {' and '.join(sorted(state.value for state in states))}"
    if State.ASLEEP in states and {record.sleep for record in records} != {sleep}:
        return "it sleeps in another way"
    return ""


def _differences(old: Purpose, new: Purpose) -> list[str]:
    found = [field.name for field in fields(Purpose) if getattr(old, field.name) != getattr(new, field.name)]
    changed = sorted(name for name in {*old.environment, *new.environment} if old.environment.get(name) != new.environment.get(name))
    return [f"environment ({', '.join(changed)})" if name == "environment" else name for name in found]
