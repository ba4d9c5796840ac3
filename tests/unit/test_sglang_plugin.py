# SPDX-License-Identifier: Apache-2.0
"""SGLang goes on without a plugin that raises, so whatever fails at the door must end the process."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kvcached.engines.sglang import plugin

ADAPTER = "kvcached.engines.sglang.adapter"


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(ADAPTER)
    monkeypatch.setitem(sys.modules, ADAPTER, module)
    return module


def test_an_error_of_any_kind_ends_the_process(monkeypatch: pytest.MonkeyPatch, adapter: ModuleType) -> None:
    monkeypatch.setenv("ENABLE_KVCACHED", "true")
    with pytest.raises(SystemExit, match="cannot be: cannot import name 'install'"):
        plugin()


def test_nobody_is_ended_who_did_not_ask(monkeypatch: pytest.MonkeyPatch, adapter: ModuleType) -> None:
    monkeypatch.setenv("ENABLE_KVCACHED", "false")
    plugin()


def test_a_broken_package_is_no_end_for_who_did_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_KVCACHED", "false")
    monkeypatch.setitem(sys.modules, "kvcached.config", None)
    with pytest.raises(ImportError):
        plugin()


def test_a_bad_setting_ends_who_asked(monkeypatch: pytest.MonkeyPatch, adapter: ModuleType) -> None:
    monkeypatch.setenv("ENABLE_KVCACHED", "true")
    monkeypatch.setenv("KVCACHED_LIMIT", "much")
    with pytest.raises(SystemExit, match="KVCACHED_LIMIT"):
        plugin()
