# SPDX-License-Identifier: Apache-2.0
"""Byte sizes as people write and read them."""

from __future__ import annotations

import re
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

_FACTORS: Final = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_FACTORS_LONG: Final = {"kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Bytes in `text`: `3G` and `3GiB` are 3 x 2**30, `3GB` is 3 x 10**9. Raises `ValueError` with what is allowed."""
    match = _SIZE.fullmatch(text)
    factor = {**_FACTORS, **_FACTORS_LONG}.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write a number with B, K, M, G, T, KiB, MiB, GiB, TiB, KB, MB, GB or TB, such as 512MiB")
    try:
        return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    except OverflowError:
        raise ValueError(f"{text[:40]!r} is more than any card has") from None


def format_size(size_bytes: int) -> str:
    """`size_bytes` in the largest binary unit that leaves at least 1, with up to two decimals: `1.5 GiB`."""
    magnitude = abs(size_bytes)
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if magnitude >= factor:
            return f"{size_bytes / factor:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size_bytes} B"


def ceil_div(numerator: int, denominator: int) -> int:
    """The least integer that is not below numerator / denominator, for a positive denominator."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple
