# SPDX-License-Identifier: Apache-2.0
"""Histograms: every time is in the bucket of the first bound that it does not exceed, and nothing is lost on the way."""

from bisect import bisect_left
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached.core.tally import BOUNDS_S, BUCKETS, FIRST_NS, Eviction, Histogram, Tally, cumulative

BOUNDS_NS = [FIRST_NS << bucket for bucket in range(BUCKETS)]
EDGES = [bound + more for bound in BOUNDS_NS for more in (0, 1)]
TIMES = st.lists(st.one_of(st.integers(0, 2**40), st.sampled_from(EDGES)), max_size=50)


@given(TIMES)
@settings(deadline=None)
def test_a_bucket_holds_what_took_at_most_its_bound(times):
    histogram = Histogram()
    for spent_ns in times:
        histogram.observe(spent_ns)
    sum_s, totals = cumulative(histogram.numbers())
    ordered = sorted(times)
    assert totals == [bisect_left(ordered, bound + 1) for bound in BOUNDS_NS] + [len(times)]
    assert sum_s == sum(times) / 1e9


def test_bounds_are_in_seconds_and_double():
    assert BOUNDS_S[0] == 16e-6
    assert all(2 * low == high for low, high in pairwise(BOUNDS_S))
    assert 8 < BOUNDS_S[-1] < 9


def test_what_is_empty_is_short_on_the_wire():
    histogram = Histogram()
    assert histogram.numbers() == (0,)
    histogram.observe(FIRST_NS + 1)
    assert histogram.numbers() == (FIRST_NS + 1, 0, 1)
    assert cumulative(()) == (0.0, [0] * (BUCKETS + 1))


def test_buckets_of_a_newer_version_count_as_the_open_one():
    assert cumulative((10, *[1] * (BUCKETS + 4)))[1][-2:] == [BUCKETS, BUCKETS + 4]


def test_each_pool_counts_for_itself():
    first, second = Tally(), Tally()
    first.evicted_blocks[Eviction.CAP] += 1
    first.waits.observe(1)
    assert second == Tally(waits=second.waits)
    assert second.waits.numbers() == (0,)
