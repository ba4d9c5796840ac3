# SPDX-License-Identifier: Apache-2.0
"""Traces of requests, sent to a collector in OpenTelemetry's own format (OTLP over HTTP). Needs the extra `traces`.

A request's span continues the client's `traceparent`; below it is a span for each wait and for each server that was asked, which gets a
`traceparent` of its own, so that an engine that traces adds its part. Names of attributes are OpenTelemetry's where it has one.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvcached.controller.traces import RequestTrace, Traces

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opentelemetry.trace import Span, Tracer

    from kvcached.controller.traffic import Finished

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_PATH: Final = "/v1/traces"
_TIMEOUT_S: Final = 3.0  # what a collector that is away costs when the gateway ends


class OtlpTraces(Traces):
    """Spans are collected in memory, a bounded number of them, and sent by a thread of the library: no request waits for the collector."""

    def __init__(self, collector: str) -> None:
        exporter = OTLPSpanExporter(endpoint=collector.rstrip("/") + _PATH, timeout=_TIMEOUT_S)
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvcached.controller")

    def begin(self, headers: Mapping[str, str], model: str, method: str, path: str) -> RequestTrace:
        carrier = {name.lower(): value for name, value in headers.items() if name.lower() in _PROPAGATOR.fields}
        facts = {"http.request.method": method, "url.path": path, "gen_ai.request.model": model}
        span = self._tracer.start_span(f"{method} {path}", _PROPAGATOR.extract(carrier), SpanKind.SERVER, facts)
        return OtlpRequestTrace(self._tracer, span)

    def close(self) -> None:
        self._provider.shutdown()


def _resource() -> Resource:
    """The variables that the SDK knows win, or two gateways could not be told apart."""
    return Resource.create().merge(Resource({"service.name": "kvcached"})).merge(OTELResourceDetector().detect())


class OtlpRequestTrace(RequestTrace):
    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._inside = trace.set_span_in_context(span)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        with self._tracer.start_as_current_span("wait for the model", self._inside):
            yield

    @contextlib.contextmanager
    def asking(self, address: str) -> Iterator[dict[str, str]]:
        with self._tracer.start_as_current_span("ask a server", self._inside, SpanKind.CLIENT, {"server.address": address}) as span:
            headers: dict[str, str] = {}
            _PROPAGATOR.inject(headers, trace.set_span_in_context(span))
            yield headers

    def end(self, finished: Finished, status: int | None, refused: bool) -> None:
        given = {
            "http.response.status_code": status,
            "kvcached.refused": refused,
            "kvcached.time_to_first_byte_s": finished.ttft_s,
            "gen_ai.usage.input_tokens": finished.tokens_in,
            "gen_ai.usage.output_tokens": finished.tokens_out,
        }
        self._span.set_attributes({name: value for name, value in given.items() if value is not None})
        if not finished.ok:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()
