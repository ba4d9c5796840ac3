# SPDX-License-Identifier: Apache-2.0
"""Two tiers: what `make test` runs, and what `make test-full` runs besides (`--full`)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# A time for an example would be a timing assert, and so would be one for drawing it.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

# Those of one group run one after another in one process. The longest first, so that both processes are busy to the end.
LONGEST_GROUPS = (
    *(
        "0.5.23",
        "two_engines",
        "three_engines",
        "gateway_three",
        "demo",
        "test_vllm_serve",
        "test_sglang_ranks",
        "test_vllm_ranks",
        "both_engines",
        "gateway",
        "sglang_crowd",
    ),
    *("0.32.0", "test_sglang_serve"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also what only repeats on more releases, or for longer, what the others show")


@pytest.fixture(scope="session")
def is_full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [] if config.getoption("--full") else [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = sorted((item for item in items if item not in left_out), key=place_of)
    if config.getoption("loadgroup", False):  # in a process of xdist's
        require_groups(items)


def place_of(item: pytest.Item) -> int:
    group = next(iter(groups_of(item)), "")
    return LONGEST_GROUPS.index(group) if group in LONGEST_GROUPS else len(LONGEST_GROUPS)


def groups_of(item: pytest.Item) -> list[str]:
    return [str(mark.args[0]) for mark in item.iter_markers("xdist_group")]


def require_groups(items: list[pytest.Item]) -> None:
    """Without its group a test starts the engines of its group again, which nobody would notice but by the time it takes."""
    for item in items:
        groups = groups_of(item)
        if len(groups) > 1 or (groups and not item.nodeid.endswith(f"@{groups[0]}")):
            raise pytest.UsageError(f"xdist does not run {item.nodeid} with the rest of its group {groups}")
