# SPDX-License-Identifier: Apache-2.0
"""The first process of a server: our child, or that of an earlier gateway."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

from kvcached import processes

if TYPE_CHECKING:
    import subprocess

_LOOK_S: Final = 1.0


class Leader:
    """`child`: None for one that another process started; how that ended nobody learns."""

    def __init__(self, pid: int, start: int | None, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._start = start
        self._child = child

    @property
    def running(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return processes.start_of(self.pid) == self._start and processes.is_there(self.pid)

    @property
    def end(self) -> str:
        """How it ended, in words."""
        return "" if self._child is None else f" with code {self._child.returncode}"

    async def ended(self) -> None:
        """Returns when it has. Where the kernel does not tell, it is looked at once a second."""
        fd = _handle(self.pid)
        try:
            if fd is not None and self.running:
                await readable(fd)
        finally:
            if fd is not None:
                os.close(fd)
        while self.running:
            await asyncio.sleep(_LOOK_S)


async def readable(fd: int) -> None:
    """Returns when there is something to be read, or will be nothing any more."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    loop.add_reader(fd, told.set)
    try:
        await told.wait()
    finally:
        loop.remove_reader(fd)


def _handle(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # a Python or a kernel without it, or the process is no more
        return None
