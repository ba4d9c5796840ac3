# SPDX-License-Identifier: Apache-2.0
"""HTTP on a loopback port or a Unix socket: one request a connection, a deadline on it, so many at a time, and a token."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import socket
import socketserver
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, Final

from kvcached.cli import live
from kvcached.cli.control.routes import Reply, Watch, refusal, respond, too_many_watch
from kvcached.runtime.endpoint import remove_abandoned

if TYPE_CHECKING:
    from pathlib import Path

    from kvcached.cli.session import Session

_log = logging.getLogger("kvcached.http")
_MAX_BODY_BYTES: Final = 64 * 1024
_MAX_REQUESTS: Final = 16
_MAX_WATCHERS: Final = 8  # they stay: so many requests at least are left for others
REQUEST_TIMEOUT_S: Final = 5.0


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_TIMEOUT_S
    server_version = "kvcached"
    sys_version = ""

    def handle(self) -> None:
        """Whoever sends a byte now and then is cut off as well as whoever is silent."""
        cut = threading.Timer(REQUEST_TIMEOUT_S, self._hang_up)
        cut.daemon = True
        cut.start()
        try:
            super().handle()
        except OSError as error:
            _log.debug("a client went away: %s", error)
        finally:
            cut.cancel()

    def _hang_up(self) -> None:
        """What was asked already is still done, and answered."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def do_GET(self) -> None:
        reply = self._reply()
        if not isinstance(reply, Watch):
            self._send(reply)
        elif self.server.watchers.acquire(blocking=False):
            try:
                self._show(reply)
            finally:
                self.server.watchers.release()
        else:
            self._send(too_many_watch())

    def _show(self, watch: Watch) -> None:
        """A line for each look, until so many were shown, the client goes away or the server ends. The connection's end is the body's."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/x-ndjson")
        self.end_headers()
        shown = 0
        while True:
            self.wfile.write(json.dumps(live.look_json(self.server.session.run_dir), ensure_ascii=False).encode() + b"\n")
            shown += 1
            if shown == watch.count or self.server.ending.wait(watch.interval):
                return

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _reply(self) -> Reply | Watch:
        if not self.server.admits(self.headers.get("Authorization", "")):
            return refusal(HTTPStatus.UNAUTHORIZED, "the header `Authorization: Bearer TOKEN` is missing or wrong")
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or "Transfer-Encoding" in self.headers:
            return refusal(HTTPStatus.LENGTH_REQUIRED, "a body needs a Content-Length")
        if int(length) > _MAX_BODY_BYTES:
            return refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {_MAX_BODY_BYTES} bytes")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            return refusal(HTTPStatus.REQUEST_TIMEOUT, "the body is not complete")
        return respond(self.server.session, self.command, self.path, body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class finds wrong with a request."""
        self._send(refusal(HTTPStatus(code), message or HTTPStatus(code).phrase))

    def _send(self, reply: Reply) -> None:
        payload = json.dumps(reply.body, ensure_ascii=False).encode()
        self.send_response(reply.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        if reply.status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """`token`: what clients have to know; None: whoever can reach the socket may."""

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: Any, session: Session, token: str | None) -> None:
        self.session = session
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._slots = threading.Semaphore(_MAX_REQUESTS)
        self.watchers = threading.Semaphore(_MAX_WATCHERS)
        self.ending = threading.Event()
        super().__init__(address, _Handler)

    def admits(self, authorization: str) -> bool:
        """Compares in constant time."""
        return self._authorization is None or hmac.compare_digest(authorization.encode("utf-8", "replace"), self._authorization)

    def shutdown(self) -> None:
        self.ending.set()
        super().shutdown()

    def process_request(self, request: Any, client_address: Any) -> None:
        """A further one waits in the kernel's queue: each that is served has its deadlines."""
        self._slots.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.exception("a request ended with a bug")


class PortServer(_Server):
    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}" if self.address_family == socket.AF_INET6 else f"http://{host!s}:{port}"


class PortServer6(PortServer):
    address_family = socket.AF_INET6


class SocketServer(_Server):
    """At a path that no live process listens at; for this user alone. The file goes when it is closed."""

    address_family = socket.AF_UNIX

    def __init__(self, path: Path, session: Session, token: str | None) -> None:
        self._path = path
        super().__init__(str(path), session, token)

    def server_bind(self) -> None:
        os.fchmod(self.fileno(), 0o600)  # before bind: the file never has a wider mode, whatever the umask
        remove_abandoned(self._path)
        super().server_bind()

    def server_close(self) -> None:
        super().server_close()
        remove_abandoned(self._path)

    @property
    def url(self) -> str:
        return f"unix:{self._path}"
