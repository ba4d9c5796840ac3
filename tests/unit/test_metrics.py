# SPDX-License-Identifier: Apache-2.0
"""The exporter without processes: its text, the rules of its names, and that board and documentation speak of what there is."""

from __future__ import annotations

import ast
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from typer import BadParameter
from typer.testing import CliRunner

from kvcached.card.record import NO_LIMIT_BYTES, Kind, Record
from kvcached.cli.kvctl import app as kvctl
from kvcached.cli.main import app
from kvcached.cli.metrics import catalog
from kvcached.cli.metrics.catalog import METRICS, Metric, table
from kvcached.cli.metrics.exporter import Exporter, families
from kvcached.cli.metrics.readings import endpoints_of, read
from kvcached.cli.serving import parse_address
from kvcached.cli.top.sampler import CardSample, RankRow, Sample
from kvcached.config import describe_settings
from kvcached.core.tally import BOUNDS_S, Eviction
from kvcached.runtime.control_messages import PoolMetrics, RankMetrics

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden") / "metrics.txt"
BOARD = ROOT / "contrib" / "grafana" / "kvcached.json"
RULES = ROOT / "contrib" / "prometheus" / "kvcached.rules.yaml"
UNITS = ("bytes", "seconds", "blocks", "info")
NO_UNITS = set("ms milliseconds ns us kb mb gb mib gib percent byte second block sum count bucket".split())
NOW_NS = 10**12


def row(instance: str, rank: int = 0, *, name: str = "", alive: bool = True, other_bytes: int = 0, **record: Any) -> RankRow:
    fields = {"kind": Kind.KV, "limit_bytes": NO_LIMIT_BYTES, "weight": 1.0, "pid": 7, "endpoint": f"/run/{instance}.sock".encode()}
    return RankRow(("GPU-0", instance, rank), name or f"model-of-{instance}", alive, Record(**{**fields, **record}), other_bytes)


def sample() -> Sample:
    usage = {f"{name}_bytes": number for number, name in enumerate(("mapped", "owned", "cached", "parked", "retired", "prepared"), 21)}
    more = {"handles_bytes": 27, "zero_bytes": 28, "quarantined_bytes": 29, "virtual_bytes": 30}
    rows = (
        row("chat", other_bytes=40, lease_bytes=31, floor_bytes=32, limit_bytes=33, weight=1.5, wanted_bytes=34, **usage, **more),
        row("chat", 1, lease_bytes=35, wanted_bytes=36, ticket=1, wanted_until_ns=NOW_NS),
        row("code", lease_bytes=37),
        row("mail", alive=False, lease_bytes=38),
        row("new", kind=Kind.OTHER, lease_bytes=39, endpoint=b""),
        row("odd", name='a "model"\\of\ntwo lines'),
        row("slot 5", kind=Kind.OTHER, version=2, lease_bytes=41, endpoint=b""),
        row("slot 6", kind=Kind.UNREADABLE, endpoint=b""),
    )
    card = CardSample("GPU-0", "a card", 90, 80, 70, 60, over_bytes=50, short_bytes=51, rows=rows)
    return Sample(NOW_NS, (card, CardSample("GPU-1", "", problem="it is damaged")))


def answers() -> dict[str, PoolMetrics]:
    chat = PoolMetrics(
        refusing=True,
        page_bytes=11,
        block_bytes=12,
        misses=13,
        preemptions=14,
        avoidable_preemptions=9,
        refusals=15,
        presses=16,
        taken_bytes=17,
        given_bytes=18,
        evicted_blocks={why.value: number for number, why in enumerate(Eviction, 1)},
        waits=(1_500_000_000, 0, 1, 0, 2),
        ranks=(RankMetrics(lease=(16_000, 1), map=(5,), unmap=(2**40, *[0] * 20, 3), step=(32_000, 0, 1)), RankMetrics()),
    )
    return {"chat": chat, "odd": PoolMetrics()}


class Fixed(Collector):
    def __init__(self, sample: Sample, answers: dict[str, PoolMetrics]) -> None:
        self._readings = read(sample, answers)

    def collect(self) -> Iterable[Any]:
        return families(self._readings)


def text() -> str:
    registry = CollectorRegistry()
    registry.register(Fixed(sample(), answers()))
    return generate_latest(registry).decode()


def values() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = [sample for family in text_string_to_metric_families(text()) for sample in family.samples]
    by_name = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}
    assert len(by_name) == len(found), "two samples of one name have the same labels"
    return by_name


def value(name: str, **labels: str) -> float | None:
    return values().get((name, frozenset(labels.items())))


class TestText:
    def test_it_is_the_golden_one(self) -> None:
        assert text() == GOLDEN.read_text(encoding="utf-8")

    def test_a_rank_has_its_bytes(self) -> None:
        labels = {"card": "GPU-0", "pool": "chat", "rank": "0"}
        for number, name in enumerate("mapped owned cached parked retired prepared handles zero quarantined virtual".split(), 21):
            assert value(f"kvcached_pool_{name}_bytes", **labels) == number
        for number, name in enumerate(("lease", "floor", "limit"), 31):
            assert value(f"kvcached_pool_{name}_bytes", **labels) == number
        assert value("kvcached_pool_weight", **labels) == 1.5
        assert value("kvcached_pool_other_bytes", **labels) == 40

    def test_only_who_waits_wants(self) -> None:
        assert value("kvcached_pool_wanted_bytes", card="GPU-0", pool="chat", rank="0") == 0
        assert value("kvcached_pool_wanted_bytes", card="GPU-0", pool="chat", rank="1") == 36

    def test_no_limit_is_infinite(self) -> None:
        assert value("kvcached_pool_limit_bytes", card="GPU-0", pool="code", rank="0") == math.inf

    def test_the_dead_hold_nothing(self) -> None:
        mail = {name for (name, labels) in values() if ("pool", "mail") in labels}
        assert mail == {"kvcached_pool_up", "kvcached_pool_readable", "kvcached_pool_info", "kvcached_pool_answers"}
        assert value("kvcached_pool_up", card="GPU-0", pool="mail", rank="0") == 0
        assert value("kvcached_pool_answers", pool="mail") == 0

    def test_the_silent_have_no_counters(self) -> None:
        assert value("kvcached_pool_answers", pool="code") == 0
        assert value("kvcached_pool_misses_total", pool="code") is None
        assert value("kvcached_pool_misses_total", pool="odd") == 0

    def test_leases_add_up(self) -> None:
        """Of another version's entry, and of one without KV cache, only the lease is known."""
        sums = [value for (name, _), value in values().items() if name in ("kvcached_pool_lease_bytes", "kvcached_pool_other_bytes")]
        assert sum(sums) == sum(row.record.lease_bytes + row.other_bytes for row in sample().cards[0].rows if row.alive)
        assert value("kvcached_pool_readable", card="GPU-0", pool="slot 5", rank="0") == 0
        assert value("kvcached_pool_readable", card="GPU-0", pool="slot 6", rank="0") == 0

    def test_buckets_are_cumulative_and_seconds(self) -> None:
        name = "kvcached_pool_schedule_wait_seconds"
        totals = [value(f"{name}_bucket", pool="chat", le=str(bound)) for bound in BOUNDS_S]
        assert totals == [0, 1, 1, *[3] * (len(BOUNDS_S) - 3)]
        assert value(f"{name}_bucket", pool="chat", le="+Inf") == value(f"{name}_count", pool="chat") == 3
        assert value(f"{name}_sum", pool="chat") == 1.5
        assert value("kvcached_pool_unmap_seconds_bucket", pool="chat", rank="0", le=str(BOUNDS_S[-1])) == 0
        assert value("kvcached_pool_unmap_seconds_count", pool="chat", rank="0") == 3

    def test_names_of_others_are_escaped(self) -> None:
        labels = next(dict(labels) for (name, labels) in values() if name == "kvcached_pool_info" and ("pool", "odd") in labels)
        assert labels["model"] == 'a "model"\\of\ntwo lines'

    def test_a_card_that_cannot_be_read(self) -> None:
        assert {name for (name, labels) in values() if ("card", "GPU-1") in labels} == {"kvcached_card_readable"}

    def test_a_run_directory_that_cannot_be_read(self) -> None:
        readings = read(Sample(NOW_NS, problem="no"), {})
        assert readings.by_metric[catalog.RUN_DIR_READABLE] == [((), 0)]

    def test_every_metric_is_exported(self) -> None:
        there = {(name, frozenset(label for label, _ in labels) - {"le"}) for (name, labels) in values()}
        of_the_exporter = {catalog.BUILD, catalog.SCRAPE}
        for metric in set(METRICS) - of_the_exporter:
            suffix = "_bucket" if metric.kind is catalog.Kind.HISTOGRAM else ""
            assert (metric.name + suffix, frozenset(metric.labels)) in there

    def test_those_of_the_exporter(self, tmp_path: Path) -> None:
        exporter = Exporter(tmp_path, 1.0)
        there = {sample.name for family in text_string_to_metric_families(exporter.text()) for sample in family.samples}
        exporter.close()
        assert there == {"kvcached_run_dir_readable", "kvcached_build_info", "kvcached_scrape_duration_seconds"}


class TestWhoIsAsked:
    def test_the_living_once_whatever_their_ranks(self) -> None:
        assert endpoints_of(sample()) == {name: Path(f"/run/{name}.sock") for name in ("chat", "code", "odd")}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
class TestNames:
    """The rules of Prometheus' documentation on naming."""

    def test_one_word_after_the_other(self, metric: Metric) -> None:
        assert re.fullmatch(r"kvcached(_[a-z]+)+", metric.name)
        assert all(re.fullmatch(r"[a-z]+", label) for label in metric.labels)

    def test_units_are_base_units_and_last(self, metric: Metric) -> None:
        words = metric.name.removesuffix("_total").split("_")
        assert not set(words[:-1]) & {*UNITS, "total"}
        assert not set(words) & {
            "ms",
            "milliseconds",
            "ns",
            "us",
            "kb",
            "mb",
            "gb",
            "mib",
            "percent",
            "byte",
            "second",
            "sum",
            "count",
            "bucket",
        }

    def test_counters_and_only_they_end_in_total(self, metric: Metric) -> None:
        assert metric.name.endswith("_total") == (metric.kind is catalog.Kind.COUNTER)

    def test_histograms_are_of_seconds(self, metric: Metric) -> None:
        assert metric.kind is not catalog.Kind.HISTOGRAM or metric.name.endswith("_seconds")

    def test_a_label_is_not_in_the_name(self, metric: Metric) -> None:
        subject = metric.name.split("_")[1]
        assert not {label for label in metric.labels if label != subject} & set(metric.name.split("_"))

    def test_its_meaning_is_a_sentence(self, metric: Metric) -> None:
        assert re.fullmatch(r"[A-Z0-9][^|\n]*\.", metric.meaning)


def test_names_are_there_once() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_the_documentation_has_the_table() -> None:
    lines = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("| `kvcached_")] == table()


def test_the_documentation_has_every_event_of_the_log_with_its_facts() -> None:
    calls = [
        call
        for file in sorted((ROOT / "src").rglob("*.py"))
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "fields" and call.args
    ]
    named = {call.args[0].value: {word.arg for word in call.keywords} for call in calls if isinstance(call.args[0], ast.Constant)}
    rows = re.findall(r"^\| `(\w+)` \| [A-Z][^|]* \| ([^:]*):", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {event: set(re.findall(r"`(\w+)`", facts)) for event, facts in rows} == named


def expressions(node: object) -> Iterable[tuple[str, str]]:
    """Every expression of the board with its legend."""
    if isinstance(node, dict):
        if isinstance(node.get("expr"), str):
            yield node["expr"], node["legendFormat"]
        if node.get("type") == "query":
            yield node["definition"], ""
            assert node["definition"] == node["query"]["query"]
        for child in node.values():
            yield from expressions(child)
    elif isinstance(node, list):
        for child in node:
            yield from expressions(child)


EXPORTED = {
    metric.name + suffix: metric
    for metric in METRICS
    for suffix in (("_bucket", "_sum", "_count") if metric.kind is catalog.Kind.HISTOGRAM else ("",))
}


class TestBoard:
    found = tuple(expressions(json.loads(BOARD.read_text(encoding="utf-8"))))

    def test_it_names_only_what_is_exported(self) -> None:
        named = {name for expression, _ in self.found for name in re.findall(r"\bkvcached_\w+", expression)}
        assert named <= set(EXPORTED)
        assert len(named) > 25

    def test_it_names_only_labels_that_are_there(self) -> None:
        for expression, legend in self.found:
            known = {"le", "instance"} | {label for name in re.findall(r"\bkvcached_\w+", expression) for label in EXPORTED[name].labels}
            grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r",\s*", group)}
            assert grouped | set(re.findall(r"(\w+)=~", expression)) <= known, expression
            shown = set(re.findall(r"{{(\w+)}}", legend))
            assert shown <= (grouped - {"le"} if grouped else known), legend

    def test_counters_are_shown_as_rates(self) -> None:
        for expression, _ in self.found:
            for name in re.findall(r"\bkvcached_\w+(?:_total|_bucket)\b", expression):
                assert f"rate({name}" in expression

    def test_every_counter_and_histogram_is_on_it(self) -> None:
        shown = " ".join(expression for expression, _ in self.found)
        missing = [metric.name for metric in METRICS if metric.kind is not catalog.Kind.GAUGE and metric.name not in shown]
        assert not missing

    def test_panels_do_not_overlap(self) -> None:
        taken: set[tuple[int, int]] = set()
        for panel in json.loads(BOARD.read_text(encoding="utf-8"))["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & taken, panel["title"]
            assert at["x"] + at["w"] <= 24
            taken |= cells


class TestAlerts:
    """What `promtool check rules` would say, and more: that names, labels and commands are there."""

    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    rules = tuple(rule for group in groups for rule in group["rules"])

    def test_each_has_what_prometheus_takes_and_no_more(self) -> None:
        assert all(set(group) == {"name", "rules"} for group in self.groups)
        for rule in self.rules:
            assert {"alert", "expr", "labels", "annotations"} <= set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule
            assert re.fullmatch(r"KVCache[A-Za-z]+", rule["alert"])
            assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
            assert rule["labels"] in [{"severity": severity} for severity in ("info", "warning", "critical")]
            assert set(rule["annotations"]) == {"summary", "description"}
        assert len({rule["alert"] for rule in self.rules}) == len(self.rules) > 10

    def test_they_name_only_what_is_exported(self) -> None:
        for rule in self.rules:
            named = set(re.findall(r"\bkvcached_\w+", rule["expr"]))
            assert named, rule["alert"]
            assert named <= set(EXPORTED), rule["alert"]

    def test_counters_are_asked_how_fast_they_rise_and_gauges_what_they_are(self) -> None:
        for rule in self.rules:
            for name in re.findall(r"\bkvcached_\w+", rule["expr"]):
                rises = re.search(rf"(?:rate|increase)\({name}\[\d+m\]\)", rule["expr"]) is not None
                assert rises == (EXPORTED[name].kind is not catalog.Kind.GAUGE), rule["alert"]

    def test_labels_are_there_and_those_that_are_shown_are_kept(self) -> None:
        for rule in self.rules:
            expression = rule["expr"]
            names = re.findall(r"\bkvcached_\w+", expression)
            common = set.intersection(*({"instance", "le", *EXPORTED[name].labels} for name in names))
            groups = [set(re.split(r",\s*", group)) for group in re.findall(r"(?:by|on) \(([^)]*)\)", expression)]
            assert all(group <= common for group in groups), rule["alert"]
            kept = set.intersection(common, *groups) - {"le"}
            assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= kept, rule["alert"]

    def test_brackets_are_closed(self) -> None:
        for rule in self.rules:
            texts = (rule["expr"], *rule["annotations"].values())
            assert all(text.count(left) == text.count(right) for text in texts for left, right in ("()", "[]", "{}")), rule["alert"]

    def test_every_sign_of_trouble_has_one(self) -> None:
        """What the first row of the board shows."""
        asked = " ".join(rule["expr"] for rule in self.rules)
        panels = json.loads(BOARD.read_text(encoding="utf-8"))["panels"]
        first = [panel for panel in panels if panel["gridPos"]["y"] == 1]
        shown = {name for expression, _ in expressions(first) for name in re.findall(r"\bkvcached_\w+", expression)}
        assert {name for name in shown if name not in asked} == set()
        assert len(shown) > 5

    def test_the_commands_and_settings_in_them_are_there(self) -> None:
        told = " ".join(rule["annotations"]["description"] for rule in self.rules)
        kvctl_commands = {
            command.name or command.callback.__name__ for command in kvctl.registered_commands if command.callback is not None
        }
        assert set(re.findall(r"`kvctl ([a-z-]+)", told)) <= kvctl_commands
        kvcached_commands = {
            command.name or command.callback.__name__ for command in app.registered_commands if command.callback is not None
        }
        assert set(re.findall(r"`kvcached ([a-z-]+)", told)) <= kvcached_commands
        assert set(re.findall(r"KVCACHED_\w+", told)) <= {row.variable for row in describe_settings()}


class TestArguments:
    @pytest.mark.parametrize(
        ("text", "address"), [("127.0.0.1:9461", ("127.0.0.1", 9461)), ("[::1]:0", ("::1", 0)), ("localhost:65535", ("localhost", 65535))]
    )
    def test_addresses(self, text: str, address: tuple[str, int]) -> None:
        assert parse_address(text) == address

    @pytest.mark.parametrize("text", ["", "9461", ":9461", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "a:b", "[]:1"])
    def test_what_is_no_address(self, text: str) -> None:
        with pytest.raises(BadParameter):
            parse_address(text)
        assert CliRunner().invoke(app, ["metrics", "--once", "--listen", text]).exit_code == 2

    def test_without_prometheus_client_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        done = CliRunner().invoke(app, ["metrics", "--once"])
        assert done.exit_code == 1
        assert "kvcached-elastic[metrics]" in done.stderr
