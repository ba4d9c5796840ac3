# SPDX-License-Identifier: Apache-2.0
"""What `kvcached doctor` says: rows of finding and advice."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Verdict(Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Row:
    """One finding; `advice` says what to do, and is empty when there is nothing to do."""

    subject: str
    verdict: Verdict
    finding: str
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict.value}
