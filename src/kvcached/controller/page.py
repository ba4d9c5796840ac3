# SPDX-License-Identifier: Apache-2.0
"""The web page: its files as they lie in the package. It knows nothing that its reader's key does not open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiohttp import web

from kvcached.controller.api_errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER: Final = Path(__file__).with_name("page_files")
INDEX: Final = "index.html"
_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS: Final[Mapping[str, str]] = {
    # Nothing but its own files, and no text that becomes code: names and log lines come from others.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def routes() -> list[web.RouteDef]:
    """Addresses are relative, so that the page works below any path of a proxy in front."""
    return [web.get("/", _to_page), web.get("/ui", _to_page), web.get("/ui/{file:.*}", _file)]


async def _to_page(_: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": "ui/", **HEADERS})


async def _file(request: web.Request) -> web.StreamResponse:
    """Only what lies in the folder, by its name there."""
    name = request.match_info["file"] or INDEX
    known = {path.name: path for path in FOLDER.iterdir() if path.suffix in _TYPES}
    if name not in known:
        raise ApiError(404, "Not Found", "not_found")
    path = known[name]
    return web.Response(body=path.read_bytes(), content_type=_TYPES[path.suffix], charset="utf-8", headers=HEADERS)
