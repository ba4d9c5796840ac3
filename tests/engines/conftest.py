# SPDX-License-Identifier: Apache-2.0
"""Real vLLM releases on the CPU. Without the engine environment these tests are skipped; `make test-engines` sets it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from harness.engines import PYTHON, Batch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from harness.cases import Case


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/engines/" in str(item.path):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(14_400))  # a release's first test runs all of its cases
            item.add_marker(pytest.mark.xdist_group(group_of(item)))
            if not PYTHON.exists():
                item.add_marker(pytest.mark.skip(reason="no engine environment; make engines sets it up"))


def group_of(item: pytest.Item) -> str:
    """Tests of one group run in one process: those that look at the same engines' results."""
    file = item.path.stem
    if file in ("test_vllm_ranks", "test_vllm_ray"):
        return "test_vllm_ranks"
    if file == "test_vllm_serve":
        return file
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("version", file)) if callspec else file


@pytest.fixture(scope="session")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, tuple[Case, ...], bool], Batch]:
    """Makes each batch once in a session: (version, cases, elastic) -> results by name."""
    made: dict[tuple[str, bool, tuple[str, ...]], Batch] = {}

    def get(version: str, cases: tuple[Case, ...], elastic: bool) -> Batch:
        key = (version, elastic, tuple(case.name for case in cases))
        if key not in made:
            folder: Path = tmp_path_factory.mktemp("e")
            made[key] = Batch(version, list(cases), folder, elastic=elastic)
        return made[key]

    return get
