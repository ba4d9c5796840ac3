# SPDX-License-Identifier: Apache-2.0
"""The tree drawn at the top of `errors` is the tree of classes, and each error carries what a handler needs."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from kvcached import errors


def drawn_tree() -> dict[str, str]:
    """Class -> base, as drawn: each `+--` goes four columns deeper."""
    bases: dict[str, str] = {}
    ancestors: list[str] = ["Exception"]
    for line in (inspect.getdoc(errors) or "").splitlines()[1:]:
        match = re.match(r"((?:\|   |    )*)(\+-- )?([A-Z]\w+)\b", line)
        if match:
            depth = len(match[1]) // 4 + bool(match[2]) + 1
            bases[match[3]] = ancestors[depth - 1]
            ancestors[depth:] = [match[3]]
    return bases


def defined_classes() -> dict[str, type[Exception]]:
    return {name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__}


def test_the_drawing_and_the_classes_are_the_same_tree() -> None:
    assert drawn_tree() == {name: kind.__base__.__name__ for name, kind in defined_classes().items() if kind.__base__}


def test_every_class_says_what_it_means() -> None:
    assert [name for name, kind in defined_classes().items() if not kind.__dict__.get("__doc__")] == []


def test_pool_exhausted_tells_what_was_wanted() -> None:
    error = errors.PoolExhausted(76, 71, "blocks", "the limit is reached")
    assert str(error) == "76 blocks wanted, 71 available: the limit is reached"
    assert (error.wanted, error.available, error.unit, error.reason) == (76, 71, "blocks", "the limit is reached")


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(4096, "no memory (cuMemCreate returned 2, 4096 bytes)"), (0, "no memory (cuMemCreate returned 2)")]
)
def test_device_error_names_call_code_and_size(size_bytes: int, text: str) -> None:
    error = errors.DeviceOutOfMemory("cuMemCreate", 2, size_bytes, "no memory")
    assert str(error) == text
    assert (error.call, error.code, error.size_bytes) == ("cuMemCreate", 2, size_bytes)


def test_state_unknown_names_the_pages() -> None:
    assert errors.StateUnknown("undo failed", [3, 4]).pages == (3, 4)
    assert errors.StateUnknown("undo failed").pages == ()


@pytest.mark.parametrize(
    "error",
    [
        errors.PoolExhausted(3, 2, "blocks", "full"),
        errors.DeviceOutOfMemory("create", 2, 4096, "no memory"),
        errors.StateUnknown("lost", [1, 2]),
    ],
)
def test_an_error_crosses_processes_whole(error: errors.KVCachedError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_a_miss_tells_bytes_as_people_write_them() -> None:
    assert str(errors.PoolExhausted(3 << 30, 1 << 20, "bytes", "full")) == "3 GiB wanted, 1 MiB available: full"
    assert str(errors.PoolExhausted(3, 1, "blocks", "full")) == "3 blocks wanted, 1 available: full"
