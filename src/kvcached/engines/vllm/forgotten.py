# SPDX-License-Identifier: Apache-2.0
"""An engine inside a user's own program may be dropped without being shut down; its memory must not stay behind."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def close_when_forgotten(part: object, close: Callable[[], None]) -> None:
    """Call `close`, which must not refer to `part`, when `part` is collected. At exit the kernel takes everything back anyway.

    In a thread of its own: the collector may run inside any call, with any lock held.
    """
    finalizer = weakref.finalize(part, threading.Thread(target=close, name="kvcached-forgotten", daemon=True).start)
    finalizer.atexit = False  # type: ignore[misc]  # a property, which the stubs do not know
