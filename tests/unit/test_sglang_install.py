# SPDX-License-Identifier: Apache-2.0
"""Functions are wrapped all together or not at all, and what moved is named."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from kvcached.engines.sglang.install import install_seams, is_installed
from kvcached.engines.sglang.seams import Kind, Seam
from kvcached.errors import EngineNotSupported


class Pool:
    size: int = 4

    def take(self, count: int) -> int:
        return count

    @property
    def free(self) -> int:
        return 10


class Larger(Pool):
    """Inherits everything."""


class Adapter:
    def doubled(self, original: Any, pool: Any, *args: Any, **kwargs: Any) -> int:
        return 2 * int(original(pool, *args, **kwargs))

    def less_one(self, original: Any, pool: Any) -> int:
        return int(original(pool)) - 1


TAKE = Seam("pools:Pool.take", Kind.WRAP, "hands out", "doubled", ("count",))
FREE = Seam("pools:Pool.free", Kind.PROPERTY, "counts", "less_one")
SIZE = Seam("pools:Pool.size", Kind.FIELD, "is read")


@pytest.fixture(autouse=True)
def _pools(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType("sglang.srt.pools")
    module.Pool, module.Larger = Pool, Larger  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.pools", module)
    take, free = vars(Pool)["take"], vars(Pool)["free"]
    yield
    Pool.take, Pool.free = take, free  # type: ignore[method-assign]


def test_functions_and_properties_are_wrapped() -> None:
    install_seams([TAKE, FREE, SIZE], Adapter())
    assert (Pool().take(3), Pool().take(count=4), Larger().take(1), Pool().free) == (6, 8, 2, 9)
    assert is_installed(TAKE)
    assert is_installed(FREE)


@pytest.mark.parametrize(
    ("seam", "reason"),
    [
        (Seam("pools:Pool.lend", Kind.WRAP, "hands out", "doubled"), "no pools:Pool.lend"),
        (Seam("pools:Ledger.take", Kind.WRAP, "hands out", "doubled"), "no pools:Ledger.take"),
        (Seam("ponds:Pool.take", Kind.WRAP, "hands out", "doubled"), "no ponds:Pool.take"),
        (Seam("pools:Larger.take", Kind.WRAP, "hands out", "doubled"), "no pools:Larger.take"),
        (Seam("pools:Pool.width", Kind.FIELD, "is read"), "no pools:Pool.width"),
        (Seam("pools:Pool.take", Kind.CALL, "is called", parameters=("count", "zone")), "takes no zone; it takes self, count"),
    ],
)
def test_what_moved_is_named_and_nothing_has_changed(seam: Seam, reason: str) -> None:
    with pytest.raises(EngineNotSupported, match=reason):
        install_seams([TAKE, FREE, seam], Adapter())
    assert (Pool().take(3), Pool().free) == (3, 10)
    assert not is_installed(TAKE)


def test_a_wrap_that_fails_half_way_is_undone() -> None:
    missing = Seam("pools:Pool.free", Kind.PROPERTY, "counts", "no_such_hook")
    with pytest.raises(AttributeError):
        install_seams([TAKE, missing], Adapter())
    assert Pool().take(3) == 3
