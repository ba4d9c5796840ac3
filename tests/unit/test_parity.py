# SPDX-License-Identifier: Apache-2.0
"""What docs/parity.md claims: each claim has one test that is there, and each word on another tool its page."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
HEAD = ["what", "here", "test", "llama-swap", "Ollama", "production stack", "LiteLLM", "public kvcached"]
TOOLS = "LOPTK"
MARK = re.compile(r"([LOPTK]\d)$")


class Row(NamedTuple):
    what: str
    here: str
    test: str
    others: tuple[str, ...]

    @property
    def claims(self) -> bool:
        return re.search(r"\byes\b", self.here) is not None


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables() -> list[list[list[str]]]:
    """Each with its head, without the line below it."""
    found = re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE)
    return [[cells(line) for number, line in enumerate(table.splitlines()) if number != 1] for table in found]


ROWS = [Row(line[0], line[1], line[2], tuple(line[3:])) for head, *lines in tables() if head == HEAD for line in lines]
PAGES = dict(line for head, *lines in tables() if head == ["mark", "page"] for line in lines)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_a_claim_has_one_test_that_is_there_and_nothing_else_has(row: Row) -> None:
    assert row.claims != (row.here == "no"), "yes, with what it is limited to, or no"
    if not row.claims:
        assert row.test == ""
        return
    named = re.fullmatch(r"`(tests/[\w/]+\.py)((?:::\w+){1,2})`", row.test)
    assert named is not None, row.test
    *classes, function = named[2].split("::")[1:]
    body = ast.parse((ROOT / named[1]).read_text(encoding="utf-8")).body
    for name in classes:
        (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    assert function.startswith("test_")
    assert [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name == function] == [function]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_what_is_said_of_another_tool_has_the_page_that_says_so(row: Row) -> None:
    assert len(row.others) == len(TOOLS)
    for tool, said in zip(TOOLS, row.others, strict=True):
        mark = MARK.search(said)
        assert not said or (mark is not None and mark[1][0] == tool and mark[1] in PAGES), said
    assert row.claims or any(row.others), "nobody has it"


def test_no_test_shows_two_things_and_every_page_is_used() -> None:
    shown = [row.test for row in ROWS if row.claims]
    assert len(shown) == len(set(shown)) > 30
    used = {mark[1] for row in ROWS for said in row.others if (mark := MARK.search(said))}
    assert used == set(PAGES)
    assert all(re.search(r"\]\(https://\S+\)", page) for page in PAGES.values())


def test_it_tells_what_is_not_here_too() -> None:
    assert sum(row.here == "no" for row in ROWS) >= 10
    assert sum(len(lines) - 1 for lines in tables()) == len(ROWS) + len(PAGES), "a table with another head is not looked at"
