# SPDX-License-Identifier: Apache-2.0
"""Requests to what a `Session` does, and its answers and errors to HTTP. Each command of `kvctl` is a path, its JSON is the answer."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvcached.cli import live
from kvcached.cli.answers import FLOOR, LIMIT, bytes_json, change_json, explain_json
from kvcached.cli.machine import read_cards
from kvcached.cli.output import ExitCode, error_json, exit_code_of
from kvcached.cli.settings_view import settings_json
from kvcached.config import Amount, load_settings
from kvcached.core.limits import NO_LIMIT_BYTES
from kvcached.errors import KVCachedError, PeerTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.cli.session import Session

    Command = Callable[[Session, str, bytes], dict[str, Any]]

CARDS: Final = "/v1/cards"
CONFIG: Final = "/v1/config"
WATCH: Final = "/v1/watch"
_POOL: Final = re.compile(r"/v1/pools/([^/]+)/([a-z]+)")
_STATUS: Final = {
    ExitCode.REFUSED: HTTPStatus.CONFLICT,
    ExitCode.USAGE: HTTPStatus.BAD_REQUEST,
    ExitCode.NO_SUCH_POOL: HTTPStatus.NOT_FOUND,
    ExitCode.UNREACHABLE: HTTPStatus.SERVICE_UNAVAILABLE,
}


class Reply(NamedTuple):
    status: HTTPStatus
    body: dict[str, Any]


class Watch(BaseModel):
    """A wish to be told the cards again and again: every `interval` seconds, `count` times (0: until who asked hangs up)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    interval: float = Field(default=1.0, ge=0.05, le=60)
    count: int = Field(default=0, ge=0, lt=2**31)


def _amount(value: object) -> object:
    """Bytes as a number, or as people write them: `3G`, `40%` of the card's budget."""
    if isinstance(value, str):
        return Amount.parse(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < NO_LIMIT_BYTES:
        return Amount(value)
    raise ValueError(f"{value!r} is not a size")


def _limit(value: object) -> object:
    """The same, or `none`."""
    return Amount(NO_LIMIT_BYTES) if value == "none" else _amount(value)


Size = Annotated[Amount, BeforeValidator(_amount)]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=True)


class _Limit(_Body):
    size: Annotated[Amount, BeforeValidator(_limit)]
    revision: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class _Size(_Body):
    size: Size


class _Trim(_Body):
    size: Size | None = None


class _Weight(_Body):
    weight: float = Field(ge=0.001, le=1000)


class _Delete(_Body):
    force: bool = False


B = TypeVar("B", bound=_Body)


def _read(model: type[B], body: bytes) -> B:
    """An empty body is an object without members. Raises `ValidationError`."""
    return model.model_validate_json(body or b"{}")


def _set_limit(session: Session, pool: str, body: bytes) -> dict[str, Any]:
    wish = _read(_Limit, body)
    return change_json(pool, LIMIT, session.limit(pool, wish.size, wish.revision))


def _set_floor(session: Session, pool: str, body: bytes) -> dict[str, Any]:
    return change_json(pool, FLOOR, session.floor(pool, _read(_Size, body).size))


def _set_weight(session: Session, pool: str, body: bytes) -> dict[str, Any]:
    return {"pool": pool, **session.weight(pool, _read(_Weight, body).weight).model_dump()}


def _trim(session: Session, pool: str, body: bytes) -> dict[str, Any]:
    return bytes_json(pool, *session.trim(pool, _read(_Trim, body).size))


def _evict(session: Session, pool: str, body: bytes) -> dict[str, Any]:
    return bytes_json(pool, *session.evict(pool, _read(_Size, body).size))


def _delete(session: Session, pool: str, body: bytes) -> dict[str, Any]:
    return session.delete(pool, force=_read(_Delete, body).force)


def _explain(session: Session, pool: str, body: bytes) -> dict[str, Any]:
    return explain_json(session.explain(pool))


COMMANDS: Final[dict[str, tuple[str, Command]]] = {
    "explain": ("GET", _explain),
    "limit": ("POST", _set_limit),
    "floor": ("POST", _set_floor),
    "weight": ("POST", _set_weight),
    "trim": ("POST", _trim),
    "evict": ("POST", _evict),
    "delete": ("POST", _delete),
}
"""By the last part of the path: `/v1/pools/POOL/COMMAND`."""


def respond(session: Session, method: str, path: str, body: bytes) -> Reply | Watch:
    """Every failure is a reply; whoever asks to watch is told so by whoever called."""
    try:
        return _respond(session, method, path, body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = "".join(f"{part}: " for part in first["loc"])
        return refusal(HTTPStatus.BAD_REQUEST, f"{where}{first['msg']}")
    except KVCachedError as error:
        code = exit_code_of(error)
        status = HTTPStatus.GATEWAY_TIMEOUT if isinstance(error, PeerTimeout) else _STATUS[code]
        return Reply(status, error_json(type(error).__name__, str(error), code))
    except OSError as error:
        return Reply(_STATUS[ExitCode.UNREACHABLE], error_json(type(error).__name__, str(error), ExitCode.UNREACHABLE))


def _respond(session: Session, method: str, path: str, body: bytes) -> Reply | Watch:
    if path.partition("?")[0] == WATCH:
        return _allowed("GET", method) or Watch.model_validate(dict(parse_qsl(path.partition("?")[2], keep_blank_values=True)))
    if path == CONFIG:
        return _allowed("GET", method) or Reply(HTTPStatus.OK, settings_json(load_settings()))
    if path == CARDS:
        return _allowed("GET", method) or Reply(HTTPStatus.OK, live.cards_json(session.run_dir, read_cards(session.run_dir)))
    found = _POOL.fullmatch(path)
    if found is None or found[2] not in COMMANDS:
        commands = ", ".join(COMMANDS)
        there = f"{CARDS}, {WATCH}, {CONFIG} and /v1/pools/POOL/COMMAND: {commands}"
        return refusal(HTTPStatus.NOT_FOUND, f"there is nothing at {path}; there are {there}")
    needed, command = COMMANDS[found[2]]
    return _allowed(needed, method) or Reply(HTTPStatus.OK, command(session, found[1], body))


def _allowed(needed: str, method: str) -> Reply | None:
    return None if method == needed else refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"{method} is not allowed here; {needed} is")


def too_many_watch() -> Reply:
    return Reply(HTTPStatus.SERVICE_UNAVAILABLE, error_json("TooManyWatch", "too many clients watch already", ExitCode.UNREACHABLE))


def refusal(status: HTTPStatus, message: str) -> Reply:
    """What is wrong with the request itself."""
    return Reply(status, error_json("BadRequest", message, ExitCode.USAGE))
