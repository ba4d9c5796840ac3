# SPDX-License-Identifier: Apache-2.0
"""Errors as clients of the OpenAI API expect them, and those of Anthropic's under its path."""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from typing import Final

from kvcached.controller.states import CLOSING, Refuse, Why

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ANTHROPIC_PATH: Final = "/v1/messages"


def is_anthropic(path: str) -> bool:
    return path == _ANTHROPIC_PATH or path.startswith(_ANTHROPIC_PATH + "/")


class ApiError(Exception):
    """What a client is told. `retry_after_s`: None when it makes no sense to ask again."""

    def __init__(self, status: int, message: str, code: str, retry_after_s: float | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s
        self.param = param

    def body(self, path: str) -> bytes:
        """For a request to `path`."""
        if is_anthropic(path):
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            return json.dumps({"type": "error", "error": {"type": kind, "message": self.message}}).encode()
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return json.dumps({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}).encode()

    def event(self, path: str) -> bytes:
        """The last event of a stream that was asked for at `path`. It begins with a new line: the stream may be in the middle of one."""
        return b"\n\n" + error_event(self.body(path), path)

    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def error_event(body: bytes, path: str) -> bytes:
    """`body`: one line of JSON."""
    name = b"event: error\n" if is_anthropic(path) else b""
    return name + b"data: " + body + b"\n\n"


def reshaped(status: int, body: bytes, path: str) -> bytes | None:
    """What a server's framework says where the server has no such path or method, as clients of `path` expect it; None: it is all else."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if status < 400 or not isinstance(said, dict) or said.keys() != {"detail"}:
        return None
    message = said["detail"] if isinstance(said["detail"], str) else json.dumps(said["detail"])
    word = HTTPStatus(status).name.lower() if status in HTTPStatus._value2member_map_ else "upstream_error"
    return ApiError(status, message, word).body(path)


def refused(refusal: Refuse) -> ApiError:
    """429 where the client asked too much, 404 where the model is no more, else 503."""
    status = {Why.QUEUE_FULL: 429, Why.GONE: 404}.get(refusal.why, 503)
    return ApiError(status, refusal.reason, refusal.why.value, None if status == 404 else refusal.retry_after_s)


def without_reason(error: ApiError, model: str) -> ApiError:
    """For a client that may use the model and no more."""
    if error.code != Why.FAILED.value:
        return error
    return ApiError(error.status, f"{model} failed; who runs it finds the reason at /sleep/status", error.code, error.retry_after_s)


def shutting_down() -> ApiError:
    return ApiError(503, CLOSING, Why.CLOSING.value, 5.0)


def no_such_model(name: str) -> ApiError:
    return ApiError(404, f"The model {name!r} does not exist; GET /v1/models lists those that do.", "model_not_found", param="model")
