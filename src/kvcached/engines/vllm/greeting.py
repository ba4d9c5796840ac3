# SPDX-License-Identifier: Apache-2.0
"""What a scheduler and a worker of this adapter must have in common: package, instance, vLLM, and the list of what is touched in it."""

from __future__ import annotations

import hashlib

import vllm

from kvcached import __version__
from kvcached.engines.vllm.seams import seams_of
from kvcached.engines.vllm.support import release_of
from kvcached.ranks.messages import Hello


def greeting(instance: str, facts: str = "") -> Hello:
    """The first message of either side. A scheduler has no facts: it asks for the workers'."""
    return Hello(__version__, instance, facts, engine=f"vllm {vllm.__version__}", seams=_digest(vllm.__version__))


def _digest(version: str) -> str:
    listed = repr(seams_of(release_of(version)))
    return hashlib.sha256(listed.encode()).hexdigest()[:16]
