# SPDX-License-Identifier: Apache-2.0
"""What a request did and when, for whoever wants to know; by itself this records nothing."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvcached.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvcached.controller.traffic import Finished


class RequestTrace:
    """Of one request. Ended once, with what the traffic monitor is told of it."""

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """For the model to be ready and to have room."""
        yield

    @contextlib.contextmanager
    def asking(self, address: str) -> Iterator[dict[str, str]]:
        """A server. Yields the headers by which it can add its own part."""
        del address
        yield {}

    def end(self, finished: Finished, status: int | None, refused: bool) -> None:
        """Nothing comes after it. `status`: None where the client went away before there was one."""


class Traces:
    """Begins the trace of each request."""

    def begin(self, headers: Mapping[str, str], model: str, method: str, path: str) -> RequestTrace:
        del headers, model, method, path
        return RequestTrace()

    def close(self) -> None:
        """Send what has not been sent. May take some seconds."""


def traces_to(collector: str | None) -> Traces:
    """`collector`: address that takes OTLP over HTTP; None: nothing is recorded. Raises `SettingError` without the extra `traces`."""
    if collector is None:
        return Traces()
    try:
        from kvcached.controller.otlp import OtlpTraces  # only who asks for traces needs its packages
    except ModuleNotFoundError as error:
        raise SettingError(f"traces: {error.name} is missing: pip install 'kvcached-elastic[traces]'") from None
    return OtlpTraces(collector)
