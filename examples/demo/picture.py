# SPDX-License-Identifier: Apache-2.0
"""Memory over time as a picture: what the engines held, stacked, against what static ones would hold, and the card's size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from examples.demo.series import Story

COLOURS = ("#1f77b4", "#e08214", "#5aae61", "#9970ab")
INK = "#333333"
STATIC = "#b2182b"


def draw(story: Story, folder: Path, name: str = "memory") -> list[Path]:
    """Write `name`.png and `name`.svg into `folder`. Raises `ModuleNotFoundError` without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
        _plot(axes, story)
        for path in paths:
            figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)
    return paths


def _plot(axes: Any, story: Story) -> None:
    times = [sample.at_s for sample in story.samples]
    leases = [_mib(sample.of(name).lease_bytes for sample in story.samples) for name in story.names]
    axes.stackplot(
        times,
        *leases,
        labels=[f"{name} ({kind})" for name, kind in zip(story.names, story.kinds, strict=True)],
        colors=COLOURS[: len(story.names)],
        alpha=0.85,
        step="post",
    )
    _level(axes, story.budget_bytes, INK, "-", f"the card: {_number(story.budget_bytes)} MiB")
    static = story.all_static_bytes()
    each = " + ".join(_number(story.static_bytes(name)) for name in story.names)
    _level(axes, static, STATIC, "--", f"{len(story.names)} static engines: {each} = {_number(static)} MiB, all the time")
    axes.set_xlim(0, max([*times, 1.0]))
    axes.set_ylim(0, 1.28 * max(story.budget_bytes, static) / (1 << 20))
    axes.set_xlabel("seconds")
    axes.set_ylabel("KV cache memory leased from the card, MiB")
    everyone = "them both" if len(story.names) == 2 else "them all"
    title = f"{story.who[0].upper()}{story.who[1:]}, bursts in turn, one card that could not hold {everyone}"
    axes.set_title(title, fontsize=12, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(loc="upper left", ncols=2, frameon=False, fontsize=9)


def _level(axes: Any, size_bytes: int, colour: str, style: str, label: str) -> None:
    axes.axhline(size_bytes / (1 << 20), color=colour, linestyle=style, linewidth=1.6, label=label)


def _mib(sizes: Any) -> Sequence[float]:
    return [size / (1 << 20) for size in sizes]


def _number(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.0f}"
