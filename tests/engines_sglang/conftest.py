# SPDX-License-Identifier: Apache-2.0
"""Real SGLang releases on the CPU. Without their environment these tests are skipped; `make sglang` sets it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sglang_harness.cases import PYTHON
from sglang_harness.matrix import NEWEST, batches

if TYPE_CHECKING:
    from sglang_harness.cases import Batch

SHARING = tuple(f"test_sglang_{part}" for part in ("tokens", "limits", "hybrid", "stages", "replicas"))  # look at the same engines' results


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/engines_sglang/" in str(item.path):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(14_400))  # a release's first test runs all of its cases
            item.add_marker(pytest.mark.xdist_group(group_of(item)))
            if not PYTHON.exists():
                item.add_marker(pytest.mark.skip(reason="no SGLang environment; make sglang sets it up"))


def group_of(item: pytest.Item) -> str:
    """Tests of one group run in one process: those that look at the same engines' results. Without a version it is the newest one's."""
    if item.path.stem not in (
        "test_sglang_tokens",
        "test_sglang_limits",
        "test_sglang_hybrid",
        "test_sglang_stages",
        "test_sglang_replicas",
    ):
        return item.path.stem
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("version", NEWEST)) if callspec else NEWEST


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory, is_full: bool) -> dict[str, Batch]:
    """All cases of each release; a release's are run when the first of its results is looked at."""
    return batches(lambda version: tmp_path_factory.mktemp(f"sg{version.replace('.', '')}"), full=is_full)
