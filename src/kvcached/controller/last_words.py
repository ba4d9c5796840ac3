# SPDX-License-Identifier: Apache-2.0
"""Why a server ended, found in what it said: engines go on for many lines after the one that says it. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_WHO: Final = r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] |\[[^\]]*\] )?"
"""vLLM's name of the process, and either engine's of a line of its log."""
_CAUSES: Final = (
    re.compile(rf"^{_WHO}(?P<said>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)(?:: .*)?)$"),  # the last line of a traceback
    re.compile(rf"^{_WHO}\s*(?P<said>(?:Value error|Assertion failed), .+)$"),  # pydantic's, below the line with its exception
    re.compile(rf"^{_WHO}(?P<said>\S.*: error: .+)$"),  # argparse's
)
_ELSEWHERE: Final = re.compile(r"\b(?:above|root cause|validation errors? for)\b", re.IGNORECASE)
_LAST_LINES: Final = 3
_LONGEST: Final = 1_000
"""Characters that are told."""


def cause_of(lines: Iterable[str]) -> str:
    """The last of `lines` that is an error and does not only say that there was one; the last three, if none is. May be empty."""
    last: list[str] = []
    cause = ""
    for line in lines:
        last = [*last[1 - _LAST_LINES :], line]
        cause = _error_in(line) or cause
    return (cause or " / ".join(last))[:_LONGEST]


def _error_in(line: str) -> str:
    """Empty where it is none."""
    if _ELSEWHERE.search(line) is not None:
        return ""
    return next((match["said"] for pattern in _CAUSES if (match := pattern.match(line)) is not None), "")
