# SPDX-License-Identifier: Apache-2.0
"""`kvcached verify` looks every seam up in source alone: what moved is named, whatever the way it moved."""

from pathlib import Path

import pytest

from kvcached.cli.verify import run_verify
from kvcached.engines.vllm import inspection
from kvcached.engines.vllm.inspection import Release
from kvcached.engines.vllm.seams import FIRST, LAST, SEAMS, Kind, Seam, seams_of

POOL = "vllm.v1.core.block_pool:BlockPool"
SOURCE = """
from x import y
if y:
    def door(one, *, two=1): ...
class BlockPool:
    size: int
    def __init__(self, blocks):
        self.free = blocks
        if blocks:
            self.later: int = 1
    def take(self, num_blocks, extra=None): ...
    @property
    def page(self): ...
class Status:
    DONE = 1
"""


@pytest.fixture
def release(tmp_path: Path) -> Release:
    folder = tmp_path / "vllm" / "v1" / "core"
    folder.mkdir(parents=True)
    (folder / "block_pool.py").write_text(SOURCE)
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("def inside(): ...")
    return Release(tmp_path / "vllm", "0.30.1+cpu")


def problem(monkeypatch, release, target, kind=Kind.FIELD, parameters=()):
    monkeypatch.setattr(inspection, "seams_of", lambda version: [Seam(target, kind, "why", parameters)])
    (finding,) = release.findings()
    assert finding.reason == "why"
    return finding.problem


@pytest.mark.parametrize(
    ("path", "kind", "parameters"),
    [
        ("BlockPool.take", Kind.METHOD, ("num_blocks", "extra")),
        ("BlockPool", Kind.CALL, ("size",)),
        ("BlockPool.size", Kind.FIELD, ()),
        ("BlockPool.free", Kind.FIELD, ()),
        ("BlockPool.later", Kind.FIELD, ()),
        ("BlockPool.page", Kind.FIELD, ()),
        ("Status.DONE", Kind.FIELD, ()),
        ("door", Kind.CALL, ("one", "two")),
    ],
)
def test_what_is_there_is_found(monkeypatch, release, path, kind, parameters):
    assert problem(monkeypatch, release, f"vllm.v1.core.block_pool:{path}", kind, parameters) == ""


def test_a_package_is_a_module_too(monkeypatch, release):
    assert problem(monkeypatch, release, "vllm.v1.core.package:inside", Kind.CALL) == ""


@pytest.mark.parametrize(
    ("target", "kind", "parameters", "says"),
    [
        ("vllm.v1.core.gone:BlockPool.take", Kind.METHOD, (), "there is no module vllm.v1.core.gone"),
        (f"{POOL}s.take", Kind.METHOD, (), "has no BlockPools"),
        (f"{POOL}.give", Kind.METHOD, (), "has no BlockPool.give"),
        (f"{POOL}.take", Kind.METHOD, ("count",), "no parameter count; it has self, num_blocks, extra"),
        (f"{POOL}.size", Kind.METHOD, (), ""),
        (f"{POOL}.size.inner", Kind.FIELD, (), "size is no class"),
        ("vllm.v1.core.block_pool:Status", Kind.METHOD, (), "it is no method"),
    ],
)
def test_what_moved_is_named(monkeypatch, release, target, kind, parameters, says):
    assert says in problem(monkeypatch, release, target, kind, parameters)


def test_each_release_has_its_own_seams_and_the_nearest_ones_beyond_the_range():
    old, new = {seam.target for seam in seams_of((0, 28))}, {seam.target for seam in seams_of((0, 29))}
    assert old - new
    assert new - old
    assert seams_of((0, 40)) == seams_of(LAST)
    assert seams_of((0, 1)) == seams_of(FIRST)


def test_no_seam_is_listed_twice_for_a_release():
    for minor in range(FIRST[1], LAST[1] + 1):
        targets = [seam.target for seam in seams_of((0, minor))]
        assert len(targets) == len(set(targets))
    assert all(seam.reason and ":" in seam.target for seam in SEAMS)


def test_a_release_outside_the_range_is_a_problem_by_name(release):
    assert release.supported == ""
    newer = Release(release.root, "0.99.0")
    assert "vLLM 0.99.0 is not supported" in newer.supported
    report = run_verify(newer)
    assert report.problems == 1 + sum(bool(finding.problem) for finding in report.findings)
    assert report.problems > 10  # this little tree has hardly anything of vLLM
