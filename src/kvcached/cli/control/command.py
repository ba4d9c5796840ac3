# SPDX-License-Identifier: Apache-2.0
"""`kvcached control`: where it listens, and who may."""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import typer

from kvcached.cli.control.server import PortServer, PortServer6, SocketServer
from kvcached.cli.output import reporting, warn
from kvcached.cli.serving import endings_blocked, parse_address, wait_for_the_end
from kvcached.cli.session import Session
from kvcached.config import load_settings
from kvcached.errors import SettingError
from kvcached.runtime.endpoint import prepare_run_dir

_UNIX: Final = "unix:"
_TOKEN_FILE: Final = "control.token"
_LEAST_TOKEN_CHARS: Final = 16
_LONGEST_TOKEN_BYTES: Final = 4096


def control(
    listen: Annotated[
        str, typer.Option("--listen", metavar="ADDRESS", help="127.0.0.1:PORT, [::1]:PORT, or unix:PATH.")
    ] = "127.0.0.1:9462",
    token_file: Annotated[
        Path | None, typer.Option(help="What clients of a port have to know; default: control.token in the run directory, made if need be.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run directory; default: the setting KVCACHED_RUN_DIR.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0.01, help="As for kvctl.")] = None,
) -> None:
    """Offer what kvctl does over HTTP, on a loopback port with a token or on a Unix socket of this user. Ends at SIGINT or SIGTERM.

    Exit codes: 0 ended, 2 usage or a bad setting, 4 the address cannot be had.
    """
    with reporting(as_json=False):
        settings = load_settings()
        where = (run_dir or settings.run_dir).absolute()
        prepare_run_dir(where, settings.run_group)
        _serve(listen, token_file, Session(where, timeout or settings.ipc_timeout_s))


def _serve(listen: str, token_file: Path | None, session: Session) -> None:
    with endings_blocked(), _open(listen, token_file, session) as server:
        thread = threading.Thread(target=server.serve_forever, name="kvcached-http")
        thread.start()
        warn(f"kvcached control: listening at {server.url}")
        wait_for_the_end()
        server.shutdown()
        thread.join()


def _open(listen: str, token_file: Path | None, session: Session) -> PortServer | SocketServer:
    if listen.startswith(_UNIX):
        return SocketServer(Path(listen.removeprefix(_UNIX)).absolute(), session, None if token_file is None else read_token(token_file))
    address, port = _loopback(listen)
    token_file = token_file or session.run_dir / _TOKEN_FILE
    warn(f"kvcached control: the token is in {token_file}")
    return (PortServer if address.version == 4 else PortServer6)((str(address), port), session, read_token(token_file))


def _loopback(listen: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Nothing is encrypted here: what leaves the machine needs a proxy with TLS before it."""
    host, port = parse_address(listen)
    with suppress(ValueError):
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        if address.is_loopback:
            return address, port
    raise typer.BadParameter(f"{listen!r} is no address of this machine alone; allowed are 127.0.0.1:PORT, [::1]:PORT and unix:PATH")


def read_token(path: Path) -> str:
    """The token in `path`, which is made with a new one if there is none. Raises `SettingError` when others may read it."""
    if not path.exists():
        _make_token(path)
    with path.open("rb") as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid not in (0, os.geteuid()):
            raise SettingError(f"the token file {path} must be this user's alone (chmod 600)")
        token = opened.read(_LONGEST_TOKEN_BYTES).decode(errors="replace").strip()
    if len(token) < _LEAST_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        raise SettingError(f"the token in {path} must have at least {_LEAST_TOKEN_CHARS} printable ASCII characters")
    return token


def _make_token(path: Path) -> None:
    """Whole or not at all; of several makers the first counts."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{secrets.token_urlsafe(32)}\n")
    with suppress(FileExistsError):
        os.link(fresh, path)
    fresh.unlink()
