# SPDX-License-Identifier: Apache-2.0
"""Requests through a gateway that sends its traces to a collector, which reads them as the standard says."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from gateway_stage import PIECES, cut_at_once, listening, play, stage
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvcached.controller.otlp import OtlpTraces
from kvcached.controller.traces import Traces, traces_to
from kvcached.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gateway_stage import Stage
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
ERROR = 2


class Collector:
    def __init__(self) -> None:
        self.services: set[str] = set()
        self.spans: dict[str, list[Span]] = {}

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.post("/v1/traces", self._take)])
        return app

    async def _take(self, request: web.Request) -> web.Response:
        given = ExportTraceServiceRequest.FromString(await request.read())
        for resource in given.resource_spans:
            self.services |= {fact.value.string_value for fact in resource.resource.attributes if fact.key == "service.name"}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                self.spans.setdefault(span.name, []).append(span)
        return web.Response()


def facts(span: Span) -> dict[str, Any]:
    return {fact.key: getattr(fact.value, str(fact.value.WhichOneof("value"))) for fact in span.attributes}


def traced(scene: Callable[[Stage], Awaitable[None]], **more: Any) -> Collector:
    """What has come to the collector after the gateway has ended."""
    collector = Collector()

    async def act() -> None:
        async with listening(collector.app()) as address, stage(more, {"traces": address}) as it:
            await scene(it)

    play(act)
    assert collector.services == {"kvcached"}
    return collector


def test_a_request_continues_its_clients_trace_and_the_server_gets_a_part_of_it() -> None:
    given: list[str] = []

    async def scene(it: Stage) -> None:
        status, body, _ = await it.post(body={"model": "chat", "stream": True}, headers={"Traceparent": TRACEPARENT})
        assert (status, body) == (200, b"".join(PIECES))
        given.append(it.upstream.headers[0]["traceparent"])

    spans = traced(scene).spans
    (request,), (waited,), (asked,) = (spans[name] for name in ("POST /v1/chat/completions", "wait for the model", "ask a server"))
    assert {span.trace_id.hex() for span in (request, waited, asked)} == {TRACE_ID}
    assert request.parent_span_id.hex() == PARENT_ID
    assert waited.parent_span_id == asked.parent_span_id == request.span_id
    assert given == [f"00-{TRACE_ID}-{asked.span_id.hex()}-01"]
    assert request.start_time_unix_nano <= waited.end_time_unix_nano <= asked.end_time_unix_nano <= request.end_time_unix_nano
    said = facts(request)
    assert said.pop("kvcached.time_to_first_byte_s") > 0
    assert said == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "gen_ai.request.model": "chat",
        "http.response.status_code": 200,
        "kvcached.refused": False,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 2,
    }
    assert request.status.code != ERROR


def test_each_server_that_was_asked_has_its_span_and_the_one_that_was_lost_says_so() -> None:
    async def scene(it: Stage) -> None:
        it.upstream.script.append(cut_at_once)
        assert (await it.post())[0] == 200

    spans = traced(scene).spans
    assert sorted(span.status.code for span in spans["ask a server"]) == [0, ERROR]
    assert len(spans["wait for the model"]) == 2
    assert len({span.trace_id for part in spans.values() for span in part}) == 1


def test_a_failure_is_told_with_its_status() -> None:
    async def failed(it: Stage) -> None:
        it.upstream.script += [cut_at_once] * 5
        it.upstream.healthy = False
        assert (await it.post())[0] in (502, 503)

    spans = traced(failed).spans
    (request,) = spans["POST /v1/chat/completions"]
    assert facts(request)["http.response.status_code"] in (502, 503)
    assert request.status.code == ERROR


def test_the_variables_of_the_sdk_win(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen() -> Any:
        return OtlpTraces("http://127.0.0.1:9")._provider.resource.attributes

    assert (seen()["service.name"], "telemetry.sdk.version" in seen()) == ("kvcached", True)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=left,host.name=h")
    assert (seen()["service.name"], seen()["host.name"]) == ("left", "h")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "right")
    assert seen()["service.name"] == "right"


def test_a_collector_that_is_away_costs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def act() -> None:
        async with stage(None, {"traces": "http://127.0.0.1:9"}) as it:
            assert (await it.post())[0] == 200

    play(act)
    assert any("opentelemetry" in record.name for record in caplog.records)


def test_without_a_collector_headers_pass_as_they_came() -> None:
    async def act() -> None:
        async with stage() as it:
            await it.post(headers={"traceparent": TRACEPARENT})
            assert it.upstream.headers[0]["traceparent"] == TRACEPARENT

    play(act)
    assert type(traces_to(None)) is Traces


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvcached.controller.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SettingError, match=r"traces: .* is missing: pip install 'kvcached-elastic\[traces\]'"):
        traces_to("http://127.0.0.1:4318")
