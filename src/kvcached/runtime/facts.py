# SPDX-License-Identifier: Apache-2.0
"""What a mapper tells its owner at the start: how blocks lie on pages, what is mapped already, and which card it is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from kvcached.core.geometry import BlockGeometry
from kvcached.errors import HandshakeMismatch


@dataclass(frozen=True, slots=True)
class MapperFacts:
    """`adopted_pages`: pages 0 .. n-1 were mapped one by one before there was an owner (the null block's page, warm-up)."""

    geometry: BlockGeometry
    adopted_pages: int
    card_uuid: str
    budget_bytes: int

    def to_text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> MapperFacts:
        """Raises `HandshakeMismatch` when the text was written by something else."""
        try:
            values = json.loads(text)
            geometry = BlockGeometry(**values.pop("geometry"))
            return cls(geometry=geometry, **values)
        except (ValueError, TypeError, KeyError) as error:
            raise HandshakeMismatch(f"the mapper told facts that this version does not understand: {error}") from error
