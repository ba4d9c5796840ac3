# SPDX-License-Identifier: Apache-2.0
"""One question to an OpenAI-compatible server, with the standard library only."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from examples.demo.plan import SYSTEM
from examples.demo.series import Answer


@dataclass(frozen=True, slots=True)
class Server:
    """Where an engine listens. `timeout_s` bounds the wait for one answer."""

    name: str
    port: int
    max_tokens: int
    timeout_s: float = 180.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def ask(server: Server, prompt: str) -> Answer:
    """The answer, or an `Answer` whose `error` says what went wrong."""
    start_s = time.monotonic()
    try:
        reply = _post(server, prompt)
        text, tokens = str(reply["choices"][0]["message"]["content"]).strip(), int(reply["usage"]["completion_tokens"])
    except urllib.error.HTTPError as error:
        detail = error.read(2000).decode(errors="replace")
        return Answer(server.name, prompt, error=f"HTTP {error.code}: {detail}")
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        return Answer(server.name, prompt, error=f"{type(error).__name__}: {error}")
    return Answer(server.name, prompt, text, tokens, time.monotonic() - start_s)


def _post(server: Server, prompt: str) -> Any:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
    body = {"model": server.name, "messages": messages, "max_tokens": server.max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=server.timeout_s) as response:
        return json.load(response)


def healthy(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=2.0) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False
