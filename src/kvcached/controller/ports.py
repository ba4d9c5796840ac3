# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that bind theirs long after it was chosen."""

from __future__ import annotations

import contextlib
import random
import re
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

RANGE: Final = (15_000, 22_000)
"""Below those that the system gives to whoever asks for any, and below those that SGLang takes for its ranks (22,000 to 29,999)."""
_TAKEN: Final = re.compile(r"bind on address \('[^']*', (\d+)[,)].*address already in use", re.IGNORECASE)


def free_ports(count: int, besides: Container[int] = ()) -> list[int]:
    """Ports of the loopback interface that nobody listens on just now, each another, and none of those `besides`."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = random.randrange(*RANGE)
            if port in besides:
                continue
            with contextlib.suppress(OSError):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
    return found


def free_port(besides: Container[int] = ()) -> int:
    return free_ports(1, besides)[0]


def port_of(address: str) -> int:
    """Of the address of a server that was given one of ours."""
    return int(address.rpartition(":")[2])


def is_refused(port: int, lines: Iterable[str]) -> bool:
    """Whether a server says in these lines of its log that somebody else has its port. SGLang says so, and then hangs for minutes."""
    return any(str(port) in _TAKEN.findall(line) for line in lines)
