# SPDX-License-Identifier: Apache-2.0
"""A real pool on a card of the test's own, for tests of what looks at pools."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from real_pool import PoolProcess

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A short path: a socket's path may have 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder) / "run"


@pytest.fixture
def chat(run_dir: Path) -> Iterator[PoolProcess]:
    pool = PoolProcess(run_dir, "chat")
    yield pool
    pool.kill()
