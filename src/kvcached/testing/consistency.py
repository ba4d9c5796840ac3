# SPDX-License-Identifier: Apache-2.0
"""A pool's books, checked between two of its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.core.invariants import check
from kvcached.errors import InvariantBroken, KVCachedError

if TYPE_CHECKING:
    from kvcached.runtime.pool import Pool


def must_be_consistent(pool: Pool) -> None:
    """Raise `InvariantBroken` when the ledger's own checks fail."""
    with pool.lock:
        try:
            check(pool.ledger)
        except KVCachedError as error:
            raise InvariantBroken(f"the ledger is wrong: {error}") from error
