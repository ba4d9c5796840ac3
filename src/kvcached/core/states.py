# SPDX-License-Identifier: Apache-2.0
"""The states of a page, each one byte of the page table, and as plain numbers for the hot path."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class PageState(IntEnum):
    """What a page is, as one byte of the table."""

    UNMAPPED = 0
    MAPPING = 1  # in a plan to grow that is not settled
    PARKED = 2  # mapped, empty, nothing in flight reads it
    USED = 3  # has owned or cached blocks
    RETIRED = 4  # mapped and empty, but work in flight may read it
    UNMAPPING = 5  # in a plan to shrink that is not settled
    QUARANTINED = 6  # held, but nobody knows whether it is mapped
    VOID = 7  # no whole block lies on it


UNMAPPED: Final = int(PageState.UNMAPPED)
MAPPING: Final = int(PageState.MAPPING)
PARKED: Final = int(PageState.PARKED)
USED: Final = int(PageState.USED)
RETIRED: Final = int(PageState.RETIRED)
UNMAPPING: Final = int(PageState.UNMAPPING)
QUARANTINED: Final = int(PageState.QUARANTINED)
VOID: Final = int(PageState.VOID)

ROWS: Final = tuple(bytes((state,)) for state in PageState)
"""One page in each state; times n, a row of n pages."""
