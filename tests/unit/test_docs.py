# SPDX-License-Identifier: Apache-2.0
"""What the documentation says is true: links, paths, names of settings, commands and errors; and what is marked `run` is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcached import errors
from kvcached.config import describe_settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")])
NEEDS = {"ci", "engine", "gpu", "running-engine"}
LANGUAGES = {"bash", "python", "text", "toml", "json", "yaml", "ini", "console", ""}
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
TREES = ("src/", "docs/", "examples/", "tests/", "native/", "benchmarks/", "scripts/", ".ci/", "deploy/")
SHORT_TREES = ("core", "runtime", "card", "ranks", "vmm", "views", "engines", "cli")


class Fence(NamedTuple):
    page: Path
    language: str
    marks: tuple[str, ...]
    text: str

    @property
    def runs(self) -> bool:
        return "run" in self.marks


def fences() -> list[Fence]:
    found = []
    for page in PAGES:
        for head, text in FENCE.findall(page.read_text(encoding="utf-8")):
            language, *marks = head.split() or [""]
            found.append(Fence(page, language, tuple(marks), text))
    return found


def name_of(value: object) -> str:
    if isinstance(value, Path):
        return str(value.relative_to(ROOT))
    return f"{name_of(value.page)}-{value.text.split(chr(10))[0][:30]}" if isinstance(value, Fence) else str(value)


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        target, _, anchor = link.partition("#")
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {link} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_named_in_the_text_exist(page: Path) -> None:
    for code in CODE.findall(prose(page)):
        if code.startswith(TREES) and re.fullmatch(r"[\w./-]+", code):
            assert (ROOT / code).exists(), f"{page.name}: {code}"
        elif code.split("/")[0] in SHORT_TREES and re.fullmatch(r"\w+/[\w/]+\.py", code):
            assert (ROOT / "src" / "kvcached" / code).exists(), f"{page.name}: {code}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_named_in_the_text_exist(page: Path) -> None:
    known = {row.variable for row in describe_settings()} | {"KVCACHED_CONFIG"}
    named = set(re.findall(r"\b(?:KVCACHED_[A-Z_]+[A-Z]|ENABLE_KVCACHED)\b", page.read_text(encoding="utf-8")))
    assert named <= known


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_fence_says_what_it_is(page: Path) -> None:
    for fence in fences():
        if fence.page == page and page.name not in ("settings.md", "kvctl.md"):
            assert fence.language in LANGUAGES, fence
            if fence.language in ("bash", "python"):
                assert fence.marks == ("run",) or fence.marks in {(f"needs={need}",) for need in NEEDS}, fence


def test_every_error_class_has_its_section() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.KVCachedError)}
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    titles = {word for title in re.findall(r"^### (.*)$", text, re.MULTILINE) for word in re.findall(r"\w+", title)}
    assert classes <= titles


def test_commands_named_in_the_text_exist() -> None:
    from kvcached.cli import kvctl, main

    for program, app in (("kvctl", kvctl.app), ("kvcached", main.app)):
        known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
        for page in PAGES:
            text = "\n".join(
                [*CODE.findall(prose(page)), *(fence.text for fence in fences() if fence.page == page and fence.language == "bash")]
            )
            named = set(re.findall(rf"(?:^|[\s`]){program} ([a-z][a-z-]+)", text, re.MULTILINE)) - {"list"} | {"list"} & known
            assert named <= known, f"{page.name}: {program} {named - known}"


def test_make_targets_named_in_the_text_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        text = "\n".join([*CODE.findall(prose(page)), *(fence.text for fence in fences() if fence.page == page)])
        assert set(re.findall(r"(?:^|\s)make ([a-z-]+)", text, re.MULTILINE)) <= targets, page.name


@pytest.mark.parametrize("fence", [fence for fence in fences() if fence.runs], ids=name_of)
def test_what_is_marked_run_runs(fence: Fence, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("KVCACHED_", "ENABLE_KVCACHED"))}
    environment["KVCACHED_RUN_DIR"] = str(tmp_path / "run")
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    program = [sys.executable, "-W", "error", "-c", fence.text] if fence.language == "python" else ["bash", "-ec", fence.text]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "a reader who runs it sees nothing"


def test_enough_of_it_is_run() -> None:
    """A change of the marks' spelling must not switch the tests above off."""
    assert {fence.page.name for fence in fences() if fence.runs} >= {
        "README.md",
        "python-api.md",
        "troubleshooting.md",
        "sharing-a-card.md",
    }
