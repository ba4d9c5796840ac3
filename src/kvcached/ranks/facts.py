# SPDX-License-Identifier: Apache-2.0
"""What a mapper tells its owner at the start: how blocks lie on pages, what is mapped already, and which card it is. Pure."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvcached.core.geometry import BlockGeometry
from kvcached.core.stages import require_same_pages
from kvcached.errors import GeometryError, HandshakeMismatch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class MapperFacts:
    """`adopted_pages`: pages 0 .. n-1 were mapped one by one before there was an owner (the null block's page, warm-up).

    `cards`: of an owner with several ranks, each card with the bytes of one page in all ranks that are on it.
    """

    geometry: BlockGeometry
    adopted_pages: int
    card_uuid: str
    budget_bytes: int
    cards: tuple[tuple[str, int], ...] = ()

    @property
    def page_bytes_by_card(self) -> dict[str, int]:
        """What one page takes of each card."""
        return dict(self.cards) or {self.card_uuid: self.geometry.release_step_bytes}

    def to_text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> MapperFacts:
        """Raises `HandshakeMismatch` when the text was written by something else."""
        try:
            values = json.loads(text)
            geometry = BlockGeometry(**values.pop("geometry"))
            cards = tuple((uuid, page_bytes) for uuid, page_bytes in values.pop("cards", ()))
            return cls(geometry=geometry, cards=cards, **values)
        except (ValueError, TypeError, KeyError) as error:
            raise HandshakeMismatch(f"the mapper told facts that this version does not understand: {error}") from error


def agreed(by_rank: Sequence[MapperFacts]) -> MapperFacts:
    """One owner's view of its ranks: bytes are those of the rank that needs most for a page, which is the one that limits speak of.

    Raises `HandshakeMismatch` when page numbers do not mean the same blocks, or the same pages first, on every rank.
    """
    try:
        require_same_pages([facts.geometry for facts in by_rank])
    except GeometryError as error:
        raise HandshakeMismatch(f"the ranks do not number their pages alike: {error}") from error
    for rank, facts in enumerate(by_rank):
        if facts.adopted_pages != by_rank[0].adopted_pages:
            raise HandshakeMismatch(
                f"rank 0 has mapped {by_rank[0].adopted_pages} pages before its owner came, rank {rank} {facts.adopted_pages}"
            )
    largest = max(by_rank, key=lambda facts: facts.geometry.release_step_bytes)
    step_bytes = largest.geometry.release_step_bytes
    cards: Counter[str] = Counter()
    for facts in by_rank:
        cards[facts.card_uuid] += facts.geometry.release_step_bytes
    return MapperFacts(
        largest.geometry,
        largest.adopted_pages,
        by_rank[0].card_uuid,
        min(facts.budget_bytes * step_bytes // facts.geometry.release_step_bytes for facts in by_rank),
        tuple(cards.items()),
    )
