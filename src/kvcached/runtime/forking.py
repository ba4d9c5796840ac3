# SPDX-License-Identifier: Apache-2.0
"""Locks in a forked child. One that another thread held at the fork stays held there for ever: that thread does not exist in it."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from kvcached.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
FORKED: Final = "this process was forked from the one that owns this pool; open a pool of its own"


class OrphanedLock:
    """Put in the place of a lock that guards what only the parent may use: refuses instead of waiting."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> NoReturn:
        raise Misuse(FORKED)

    def release(self) -> NoReturn:
        raise Misuse(FORKED)

    def __enter__(self) -> NoReturn:
        raise Misuse(FORKED)

    def __exit__(self, *_: object) -> None:
        """Never entered."""


def in_forked_child(target: T, act: Callable[[T], None]) -> None:
    """Call `act(target)` in every child that is forked while `target` lives; keeps no reference to it. `act` must not use `target`."""
    reference = weakref.ref(target)

    def run() -> None:
        if (alive := reference()) is not None:
            act(alive)

    os.register_at_fork(after_in_child=run)
