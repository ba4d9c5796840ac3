# SPDX-License-Identifier: Apache-2.0
"""Names that were perhaps meant to be other ones. Pure."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

SWITCH: Final = "ENABLE_KVCACHED"
_SWITCH_SPELLINGS: Final = ("ENABLEKVCACHED", "KVCACHEDENABLE")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the nearest of `known`, empty when none is near. What they all begin with does not count."""
    if _is_like_the_switch(name):
        return f"; did you mean {SWITCH}?"
    bare = {candidate.removeprefix("KVCACHED_"): candidate for candidate in known}
    close = difflib.get_close_matches(name.removeprefix("KVCACHED_"), list(bare), n=1, cutoff=0.5)
    return f"; did you mean {bare[close[0]]}?" if close else ""


def like_the_switch(names: Iterable[str]) -> tuple[str, ...]:
    """Those that look as if they should have been `SWITCH`, such as `ENABLE_KVCACHE`; it is not among them."""
    return tuple(sorted(name for name in names if name != SWITCH and _is_like_the_switch(name)))


def _is_like_the_switch(name: str) -> bool:
    letters = "".join(letter for letter in name.upper() if letter.isalpha())
    return "KV" in letters and bool(difflib.get_close_matches(letters, _SWITCH_SPELLINGS, n=1, cutoff=0.85))
