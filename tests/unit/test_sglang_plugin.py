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
