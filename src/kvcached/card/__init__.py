# SPDX-License-Identifier: Apache-2.0
"""Bytes shared by the processes of one card: leases that hold through `kill -9`, and who may have how much."""

from kvcached.card.budget import Refusal
from kvcached.card.card import Card
from kvcached.card.entry import Entry, LeaseResult
from kvcached.card.record import CardIdentity, EntrySpec, Kind, Usage
from kvcached.card.together import lease_together
from kvcached.card.view import CardSnapshot, EntryView
from kvcached.core.limits import NO_LIMIT_BYTES

__all__ = [
    "NO_LIMIT_BYTES",
    "Card",
    "CardIdentity",
    "CardSnapshot",
    "Entry",
    "EntrySpec",
    "EntryView",
    "Kind",
    "LeaseResult",
    "Refusal",
    "Usage",
    "lease_together",
]
