# SPDX-License-Identifier: Apache-2.0
"""Look every seam up in an SGLang release: which one moved, and how.

    python -m kvcached.engines.sglang.inspection

prints it as one JSON value. A program of its own: SGLang's modules are imported for it, since many of its names come from others by way
of a package or a base class. `kvcached verify --engine sglang` calls it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvcached.engines.sglang.install import resolve
from kvcached.engines.sglang.seams import Kind, seams_of
from kvcached.engines.sglang.support import release_of, require_release
from kvcached.errors import EngineNotSupported

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcached.engines.sglang.seams import Seam


@dataclass(frozen=True, slots=True)
class Finding:
    """`problem` is empty where the seam is as recorded; else it says what is different."""

    target: str
    kind: str
    reason: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Inspected:
    """`unsupported` is empty for a release in the supported range, else says why not."""

    version: str
    unsupported: str
    findings: list[Finding]


def inspect_release(version: str) -> Inspected:
    """The importable SGLang. Raises `EngineNotSupported` for a version that is none."""
    try:
        require_release(version)
        unsupported = ""
    except EngineNotSupported as error:
        unsupported = str(error)
    return Inspected(version, unsupported, findings_of(seams_of(release_of(version))))


def findings_of(seams: Iterable[Seam]) -> list[Finding]:
    """Of all seams but the attributes of instances, which are not there before there is an instance."""
    return [Finding(seam.target, seam.kind.value, seam.reason, _problem(seam)) for seam in seams if seam.kind is not Kind.ATTRIBUTE]


def _problem(seam: Seam) -> str:
    try:
        resolve(seam)
    except EngineNotSupported as error:
        return str(error)
    return ""


def main() -> None:
    import sglang

    sys.stdout.write(f"\n{json.dumps(asdict(inspect_release(sglang.__version__)))}\n")


if __name__ == "__main__":
    main()
