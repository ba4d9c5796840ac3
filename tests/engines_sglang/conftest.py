# SPDX-License-Identifier: Apache-2.0
"""Real SGLang releases on the CPU. Without their environment these tests are skipped; `make sglang` sets it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sglang_harness.cases import PYTHON
from sglang_harness.matrix import batches

if TYPE_CHECKING:
    from sglang_harness.cases import Batch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/engines_sglang" in str(item.path):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(900))
            if not PYTHON.exists():
                item.add_marker(pytest.mark.skip(reason="no SGLang environment; make sglang sets it up"))


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Batch]:
    """All cases of each release; a release's are run when the first of its results is looked at."""
    return batches(lambda version: tmp_path_factory.mktemp(f"sg{version.replace('.', '')}"))
