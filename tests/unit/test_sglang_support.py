# SPDX-License-Identifier: Apache-2.0
"""Which releases and arguments of SGLang are taken, and that the list of seams covers each release once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from kvcached.config import load_settings
from kvcached.engines.sglang.seams import FIRST, LAST, SEAMS, Kind, seams_of
from kvcached.engines.sglang.support import attention_replicas, release_of, require_features, require_release, require_settings
from kvcached.errors import EngineNotSupported

if TYPE_CHECKING:
    from pathlib import Path

RELEASES = [(0, 5, patch) for patch in range(FIRST[2], LAST[2] + 1)]


def test_releases_within_the_range_are_taken() -> None:
    assert require_release("0.5.11") == (0, 5, 11)
    assert require_release("0.5.23.post1") == (0, 5, 23)


@pytest.mark.parametrize("version", ["0.5.10", "0.5.24", "1.0.0", "0.4.9.post6"])
def test_others_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(EngineNotSupported, match=r"0\.5\.11 to 0\.5\.23"):
        require_release(version)


def test_text_that_is_no_version_is_refused() -> None:
    with pytest.raises(EngineNotSupported, match="no release"):
        release_of("main")


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_has_one_function_for_each_hook(release: tuple[int, int, int]) -> None:
    hooks = [seam.hook for seam in seams_of(release) if seam.hook and seam.hook not in ("remaining_tokens", "locked", "checked")]
    assert len(hooks) == len(set(hooks))
    assert {"create_mla_buffers", "virtual_bytes", "start", "schedule", "finish_step", "idle", "flush", "admit"} <= set(hooks)
    assert {"create_mha_buffers", "create_mha_buffers_and_rest"} & set(hooks)
    assert {"adopt_configured", "adopt_runner"} & set(hooks)


def test_what_is_wrapped_has_a_hook_and_nothing_else_has() -> None:
    for seam in SEAMS:
        assert bool(seam.hook) is (seam.kind in (Kind.WRAP, Kind.PROPERTY)), seam.target
        assert seam.first <= seam.last, seam.target


@pytest.mark.parametrize(
    "arguments",
    [
        {"tp_size": 2, "pp_size": 1, "dp_size": 1, "disaggregation_mode": "null", "speculative_algorithm": None},
        {"tp_size": 2, "pp_size": 4},
        {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True},
        {"tp_size": 4, "dp_size": 2, "attn_dp_size": 1, "enable_dp_attention": True},
        {"tp_size": 4, "dp_size": 1, "attn_dp_size": 2},
    ],
)
def test_usual_arguments_are_taken(arguments: dict[str, object]) -> None:
    require_features(SimpleNamespace(**arguments), LAST)


@pytest.mark.parametrize(
    ("arguments", "replicas"),
    [
        ({"tp_size": 4}, 1),
        ({"dp_size": 2, "enable_dp_attention": True}, 2),
        ({"dp_size": 2, "attn_dp_size": 1, "enable_dp_attention": True}, 2),
        ({"dp_size": 1, "attn_dp_size": 4, "enable_dp_attention": True}, 4),
        ({"dp_size": 1, "attn_dp_size": 4}, 4),
    ],
)
def test_replicas_of_attention_are_counted_as_each_release_asks_for_them(arguments: dict[str, object], replicas: int) -> None:
    assert attention_replicas(SimpleNamespace(**arguments)) == replicas


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dp_size": 2, "attn_dp_size": 2}, "dp_size=2"),
        ({"pp_size": 2, "dp_size": 2, "enable_dp_attention": True}, "pp_size=2 with data parallel attention"),
    ],
)
def test_mixtures_that_were_not_tried_are_refused(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(EngineNotSupported, match=named):
        require_features(SimpleNamespace(**arguments), LAST)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dp_size", 4),
        ("disaggregation_mode", "decode"),
        ("enable_memory_saver", True),
        ("speculative_algorithm", "EAGLE"),
        ("speculative_algorithm", "NGRAM"),
        ("enable_hierarchical_cache", True),
        ("enable_flexkv", True),
        ("radix_cache_backend", "theirs"),
    ],
)
def test_what_cannot_be_elastic_is_named(name: str, value: object) -> None:
    with pytest.raises(EngineNotSupported, match=f"{name}={value}"):
        require_features(SimpleNamespace(**{name: value}), LAST)


def test_replicas_of_attention_are_refused_on_releases_that_were_not_tried() -> None:
    with pytest.raises(EngineNotSupported, match=r"0\.5\.21 and newer"):
        require_features(SimpleNamespace(dp_size=2, enable_dp_attention=True), (0, 5, 20))


def test_a_canary_that_would_see_nothing_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.touch()
    require_settings(load_settings({}, empty))
    with pytest.raises(EngineNotSupported, match="unset KVCACHED_CANARY"):
        require_settings(load_settings({"KVCACHED_CANARY": "true"}, empty))
