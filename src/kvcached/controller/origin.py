# SPDX-License-Identifier: Apache-2.0
"""Whether a request comes from a page of somebody else's in a browser that can reach this address. Pure."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping


def is_foreign(headers: Mapping[str, str]) -> bool:
    """A browser says of its own accord for whose page it asks. Programs do not, and are not meant."""
    said = headers.get("Sec-Fetch-Site")
    if said is not None:
        return said not in ("same-origin", "none")
    origin = headers.get("Origin")
    return origin is not None and _netloc_of(origin) != headers.get("Host", "").lower()


def is_misled(headers: Mapping[str, str], listen_host: str) -> bool:
    """Somebody's name leads to a loopback address: the browser takes this gateway for that somebody's own site."""
    return _is_loopback(listen_host) and not _is_loopback(_host_of(headers))


def _netloc_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _host_of(headers: Mapping[str, str]) -> str:
    try:
        return urlsplit("//" + headers.get("Host", "")).hostname or "localhost"  # without the header it is no browser
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")
