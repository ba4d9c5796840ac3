# SPDX-License-Identifier: Apache-2.0
"""Every metric by name, kind, labels and meaning. Pure. The exporter exports these and no others, and `docs/metrics.md` lists them."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from kvcached.core.tally import Eviction


class Kind(Enum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """`name` is the exported one: a counter's ends in `_total`, and what has a unit ends in it. `meaning` is one sentence."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str


CARD: Final = ("card",)
RANK: Final = ("card", "pool", "rank")
POOL: Final = ("pool",)
WORK: Final = ("pool", "rank")

RUN_DIR_READABLE: Final = Metric("kvcached_run_dir_readable", Kind.GAUGE, (), "1 if the run directory can be read, else 0.")
SCRAPE: Final = Metric("kvcached_scrape_duration_seconds", Kind.GAUGE, (), "What this look took, the answers of the pools included.")
BUILD: Final = Metric("kvcached_build_info", Kind.GAUGE, ("version",), "Always 1: the version of the exporter.")
CARD_INFO: Final = Metric("kvcached_card_info", Kind.GAUGE, ("card", "name"), "Always 1: the card's name.")
CARD_READABLE: Final = Metric("kvcached_card_readable", Kind.GAUGE, CARD, "1 if the card's record can be read, else 0.")
POOL_INFO: Final = Metric("kvcached_pool_info", Kind.GAUGE, (*RANK, "model", "pid"), "Always 1: what the pool serves, and where.")
POOL_UP: Final = Metric(
    "kvcached_pool_up", Kind.GAUGE, RANK, "1 if its process lives, also stopped; 0 if it has ended: its memory is free."
)
POOL_KNOWN: Final = Metric(
    "kvcached_pool_readable", Kind.GAUGE, RANK, "1 if its entry can be read; 0 if it is damaged, or of another version of KVCacheD."
)
ANSWERS: Final = Metric("kvcached_pool_answers", Kind.GAUGE, POOL, "1 if the pool has told its counters in time, else 0.")
LIMIT: Final = Metric("kvcached_pool_limit_bytes", Kind.GAUGE, RANK, "The most that it may hold; +Inf for no limit.")
WANTED: Final = Metric("kvcached_pool_wanted_bytes", Kind.GAUGE, RANK, "What it waits for at this moment.")
OTHER: Final = Metric("kvcached_pool_other_bytes", Kind.GAUGE, RANK, "Weights and other memory of the same rank that is not KV cache.")


def _of_card(word: str, meaning: str, field: str = "") -> tuple[str, Metric]:
    return f"{field or word}_bytes", Metric(f"kvcached_card_{word}_bytes", Kind.GAUGE, CARD, meaning)


def _of_record(word: str, meaning: str, unit: str = "_bytes") -> tuple[str, Metric]:
    return f"{word}{unit}", Metric(f"kvcached_pool_{word}{unit}", Kind.GAUGE, RANK, meaning)


def _told(word: str, kind: Kind, meaning: str) -> tuple[str, Metric]:
    return word, Metric(f"kvcached_pool_{word}{'_total' if kind is Kind.COUNTER else ''}", kind, POOL, meaning)


def _time(field: str, name: str, meaning: str) -> tuple[str, Metric]:
    return field, Metric(f"kvcached_pool_{name}_seconds", Kind.HISTOGRAM, WORK, meaning)


CARD_GAUGES: Final = dict(
    (
        _of_card("budget", "What all pools of the card may lease together."),
        _of_card("leased", "What they lease."),
        _of_card("free", "What of the budget nobody leases."),
        _of_card("other", "What of the leases is not KV cache: weights, activations."),
        _of_card("memory", "All that the card has.", "total"),
        _of_card("over", "What floors and owned leases together exceed the budget by."),
        _of_card("short", "What the card lacks to cover all floors now."),
    )
)
"""By the name of the sample's field."""

RECORD_GAUGES: Final = dict(
    (
        _of_record("lease", "What it may hold at this moment, granted by the card; never exceeded."),
        _of_record("floor", "The least that the others leave to it."),
        _of_record("weight", "Its part when several want more than there is.", ""),
        _of_record("mapped", "Memory in its address range."),
        _of_record("owned", "Of it, blocks of running requests."),
        _of_record("cached", "Of it, prefixes kept for later requests."),
        _of_record("parked", "Of it, empty pages kept ready."),
        _of_record("retired", "Of it, empty pages that work in flight may still read."),
        _of_record("prepared", "Pages on their way out, until all ranks agree."),
        _of_record("handles", "Physical memory kept for the next map, mapped nowhere."),
        _of_record("zero", "The page that stands behind what is not mapped."),
        _of_record("quarantined", "Pages that the driver did not confirm as free."),
        _of_record("virtual", "The address range."),
    )
)
"""By the name of the record's field."""

TOLD: Final = dict(
    (
        _told("refusing", Kind.GAUGE, "1 if the pool refuses work since its state is not known, else 0: restart this engine."),
        _told("page_bytes", Kind.GAUGE, "What is mapped and unmapped at a time, at least."),
        _told("block_bytes", Kind.GAUGE, "A block of all layers."),
        _told("misses", Kind.COUNTER, "Times that the engine asked for blocks and got none."),
        _told("preemptions", Kind.COUNTER, "Requests that the engine put back for lack of blocks."),
        _told("avoidable_preemptions", Kind.COUNTER, "Of these, while others held parked or cached bytes beyond their floors."),
        _told("refusals", Kind.COUNTER, "Times that the card granted less than was asked for."),
        _told("presses", Kind.COUNTER, "Times that the pool asked the others of the card to give memory back."),
        _told("taken_bytes", Kind.COUNTER, "What the others gave back when it asked."),
        _told("given_bytes", Kind.COUNTER, "What it gave back when others asked."),
    )
)
"""By the name of the answer's field."""

EVICTED: Final = Metric(
    "kvcached_pool_evicted_blocks_total",
    Kind.COUNTER,
    (*POOL, "reason"),
    f"Cached blocks that were dropped, by reason: {', '.join(why.value for why in Eviction)}.",
)
WAITS: Final = Metric(
    "kvcached_pool_schedule_wait_seconds", Kind.HISTOGRAM, POOL, "How long a call of the engine's scheduler waited for more pages."
)
TIMES: Final = dict(
    (
        _time("step", "step_wait", "How long a step waited in a worker for pages to be mapped."),
        _time("lease", "lease_wait", "How long a rise of the lease took."),
        _time("map", "map", "How long a call of the device that makes or maps pages took."),
        _time("unmap", "unmap", "How long a call of the device that unmaps or releases pages took."),
    )
)
"""By the name of a rank's field."""

METRICS: Final = (
    *(RUN_DIR_READABLE, SCRAPE, BUILD, CARD_INFO, CARD_READABLE, *CARD_GAUGES.values()),
    *(POOL_INFO, POOL_UP, POOL_KNOWN, *RECORD_GAUGES.values(), LIMIT, WANTED, OTHER),
    *(ANSWERS, *TOLD.values(), EVICTED, WAITS, *TIMES.values()),
)


def table() -> list[str]:
    """The rows of the table in the documentation."""
    rows = ((f"`{metric.name}`", metric.kind.value, ", ".join(metric.labels) or "-", metric.meaning.rstrip(".")) for metric in METRICS)
    return [f"| {' | '.join(row)} |" for row in rows]
