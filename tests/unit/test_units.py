# SPDX-License-Identifier: Apache-2.0
"""Sizes read back as they were written, and whole numbers never pass through a float."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached.units import GIB, KIB, MIB, TIB, ceil_div, format_size, parse_size, round_up


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("3k", 3 * KIB),
        ("3K", 3 * KIB),
        ("3KiB", 3 * KIB),
        ("3KB", 3000),
        ("512MiB", 512 * MIB),
        ("5M", 5 * MIB),
        ("5mb", 5_000_000),
        ("3G", 3 * GIB),
        ("3GiB", 3 * GIB),
        ("3GB", 3_000_000_000),
        ("2T", 2 * TIB),
        ("2tib", 2 * TIB),
        ("2TB", 2 * 10**12),
        ("1.5 GiB", 3 * GIB // 2),
        ("  0.25 k ", 256),
        (f"{2**63 + 1}B", 2**63 + 1),
        (f"{2**53 + 1}K", (2**53 + 1) * KIB),
    ],
)
def test_sizes_as_people_write_them(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "1..5G", "1.G", ".5G", "1 G B", "3PiB", "3i", "1e9", "0x10", "1,5G", "nan", "3G3"])
def test_what_is_no_size_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size; write a number with B, K, M, .* such as 512MiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1 KiB"),
        (100 * KIB, "100 KiB"),
        (3 * GIB // 2, "1.5 GiB"),
        (MIB + MIB // 8, "1.12 MiB"),
        (10 * TIB, "10 TiB"),
        (2000 * TIB, "2000 TiB"),
        (-3 * MIB, "-3 MiB"),
        (-5, "-5 B"),
    ],
)
def test_sizes_as_people_read_them(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(0, 2**62))
def test_what_is_shown_can_be_read_back_to_within_its_decimals(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.006)


@given(st.integers(0, 2**80), st.sampled_from(["", "B", "K", "MiB", "G", "TB"]))
def test_whole_numbers_are_exact(number: int, unit: str) -> None:
    factor = {"": 1, "B": 1, "K": KIB, "MiB": MIB, "G": GIB, "TB": 10**12}[unit]
    assert parse_size(f"{number}{unit}") == number * factor


@given(st.integers(-(2**70), 2**70), st.integers(1, 2**40))
def test_division_and_rounding_go_up(value: int, divisor: int) -> None:
    quotient = ceil_div(value, divisor)
    assert (quotient - 1) * divisor < value <= quotient * divisor
    assert round_up(value, divisor) == quotient * divisor
