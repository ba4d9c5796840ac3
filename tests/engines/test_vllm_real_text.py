# SPDX-License-Identifier: Apache-2.0
"""Real text with Gemma 3 270M, sliding windows beside full attention: elastic or not, it says the same.

The first run fetches the model, 238 MB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from harness.cases import Case
from harness.matrix import NEWEST, NO_CACHE, NO_RESERVE

from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.engines import Batch

    Batches = Callable[[str, tuple[Case, ...], bool], Batch]

ASKED = {"scenario": "real_text", "model": "gemma3-270m", "prompts": 12, "max_tokens": 16}
ROOMY = {"KVCACHED_HOST_GRANULARITY": "256KiB", "KVCACHED_VIRTUAL": "512MiB"}
TIGHT = ROOMY | NO_RESERVE | {"KVCACHED_LIMIT": str(48 * MIB), "KVCACHED_CANARY": "true"}
STOCK = (Case("stock", **ASKED),)
ELASTIC = (Case("cached", settings=ROOMY, **ASKED), Case("tight uncached", options=NO_CACHE, settings=TIGHT, **ASKED))

pytestmark = [pytest.mark.full, pytest.mark.parametrize("version", NEWEST)]
each_elastic = pytest.mark.parametrize("name", [case.name for case in ELASTIC])


@pytest.fixture
def stock(version: str, batches: Batches) -> Batch:
    return batches(version, STOCK, False)


@pytest.fixture
def elastic(version: str, batches: Batches) -> Batch:
    return batches(version, ELASTIC, True)


def test_the_unhooked_engine_knows_what_it_says_and_outgrows_its_window(stock: Batch) -> None:
    assert "six, seven, eight" in stock["stock"]["first"]
    assert stock["stock"]["longest"] > stock["stock"]["window"] == 512


@each_elastic
def test_the_answers_are_those_of_the_unhooked_engine(name: str, stock: Batch, elastic: Batch) -> None:
    assert len(elastic[name]["tokens"]) == 1 + 1 + 12 + 1
    assert elastic[name]["tokens"] == stock["stock"]["tokens"]


def test_both_the_cache_and_pressure_were_met(elastic: Batch) -> None:
    assert elastic["cached"]["hits"] > 0
    assert elastic["tight uncached"]["preemptions"] > 0
    assert elastic["tight uncached"]["stamps_read"] > 1_000


@each_elastic
def test_memory_falls_back_after_the_requests(name: str, elastic: Batch) -> None:
    settled = elastic[name]["settled"]
    assert settled["owned_blocks"] == 1  # the null block
    assert settled["lease_bytes"] == settled["held_pages"] * settled["step_bytes"]
