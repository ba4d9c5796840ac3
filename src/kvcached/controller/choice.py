# SPDX-License-Identifier: Apache-2.0
"""Which of a model's servers gets a request. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SESSION_HEADER: Final = "X-Session-ID"
_SESSION_KEYS: Final = ("prompt_cache_key", "user")
_PROMPT_KEYS: Final = ("system", "messages", "prompt", "input")
_PREFIX_CHARACTERS: Final = 1024
_MOST_ABOVE_MEAN: Final = 1.25
FIRST_REST_S: Final = 1.0
LONGEST_REST_S: Final = 60.0


@dataclass(slots=True, eq=False)
class Replica:
    """One server. `open`: requests that it works on for us. `pid`: of the process group's leader, if it is ours.

    `failures` in a row, and until when it gets no requests for them unless all others are worse.
    """

    address: str
    up: bool = True
    pid: int | None = None
    failures: int = 0
    rests_until_s: float = 0.0
    open: set[object] = field(default_factory=set)


def choose(replicas: Sequence[Replica], now_s: float, key: str = "") -> Replica | None:
    """The one with the fewest requests; with a `key` the one of that key, unless it has many more than the others.

    One that failed rests, unless all do: then the one whose rest ends first has to try. None when no server is up.
    """
    up = [replica for replica in replicas if replica.up]
    fit = [replica for replica in up if replica.rests_until_s <= now_s]
    if not fit:
        return min(up, key=lambda replica: replica.rests_until_s, default=None)
    if not key:
        return min(fit, key=_load)
    most = _MOST_ABOVE_MEAN * (sum(map(_load, fit)) + 1) / len(fit)
    by_key = sorted(fit, key=lambda replica: _rank(key, replicas.index(replica)), reverse=True)
    return next((replica for replica in by_key if _load(replica) + 1 <= max(most, 1.0)), min(fit, key=_load))


def _load(replica: Replica) -> int:
    return len(replica.open)


def _rank(key: str, number: int) -> bytes:
    """Each key has its own order of the servers, which stays when one goes or comes."""
    return hashlib.blake2b(f"{number}/{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()


def failed(replica: Replica, now_s: float) -> None:
    """It did not answer, or could not: it rests, twice as long each time."""
    replica.failures += 1
    replica.rests_until_s = now_s + _rest_s(replica)


def tried(replica: Replica, now_s: float) -> None:
    """A request goes there. After a failure that is a try, and others keep away until it has ended or the rest is over again."""
    if replica.failures:
        replica.rests_until_s = now_s + _rest_s(replica)


def _rest_s(replica: Replica) -> float:
    return min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(replica.failures - 1, 10))


def worked(replica: Replica) -> None:
    replica.failures, replica.rests_until_s = 0, 0.0


def key_of(affinity: str, headers: Mapping[str, str], body: Mapping[str, Any] | None) -> str:
    """What requests have in common that belong together. `affinity`: none, session or prefix, which goes by the session if there is one."""
    if affinity == "none":
        return ""
    given = body or {}
    session = headers.get(_SESSION_HEADER, "") or next((str(given[name]) for name in _SESSION_KEYS if given.get(name)), "")
    if session or affinity == "session":
        return session
    prompts = [given[name] for name in _PROMPT_KEYS if name in given]
    return json.dumps(prompts)[:_PREFIX_CHARACTERS] if prompts else ""
