# SPDX-License-Identifier: Apache-2.0
"""What commands that listen have in common: addresses, and an end by signal."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Final

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDINGS: Final = frozenset({signal.SIGINT, signal.SIGTERM})


def parse_address(text: str) -> tuple[str, int]:
    """`127.0.0.1:9461`, `[::1]:9461`; port 0 leaves the choice to the system."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise typer.BadParameter(f"{text!r} is no address; allowed are HOST:PORT and [HOST]:PORT")
    return host, int(port)


def wait_for_the_end() -> None:
    """Until SIGINT or SIGTERM. Within `endings_blocked`."""
    signal.sigwait(ENDINGS)


@contextlib.contextmanager
def endings_blocked() -> Iterator[None]:
    """In this thread and in those that it starts, so that the signals are waited for and interrupt nothing."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
