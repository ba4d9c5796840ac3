# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket

import pytest

from kvcached.controller import ports

UVICORN = "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 15121): address already in use"
OF_IPV6 = "ERROR:    [Errno 98] error while attempting to bind on address ('::1', 15121, 0, 0): [errno 98] address already in use"


def test_each_port_is_another_and_none_is_where_others_take_theirs() -> None:
    found = ports.free_ports(200)
    assert len(set(found)) == 200
    assert max(found) < 22_000 <= 32_768  # SGLang's ranks, and the system


def test_a_port_that_was_given_already_is_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given, other = ports.free_ports(2)
    picked = iter([given, given, other])
    monkeypatch.setattr(ports.random, "randrange", lambda *_: next(picked))
    assert ports.free_port(besides={given}) == other


def test_a_port_that_somebody_listens_on_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        picked = iter([taken, ports.free_port()])
        monkeypatch.setattr(ports.random, "randrange", lambda *_: next(picked))
        assert ports.free_port() != taken


@pytest.mark.parametrize("line", [UVICORN, OF_IPV6])
def test_a_server_that_cannot_have_its_port_says_so(line: str) -> None:
    assert ports.is_refused(15121, ["Started server process [7]", line])
    assert not ports.is_refused(1512, [line])
    assert not ports.is_refused(15122, [line])
    assert not ports.is_refused(15121, ["Uvicorn running on http://127.0.0.1:15121", "port 15121: address already in use by nobody"])
