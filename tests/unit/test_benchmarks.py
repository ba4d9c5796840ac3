# SPDX-License-Identifier: Apache-2.0
"""Programs for machines with a GPU, which no test runs: what one takes from another is there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tests" / "gpu").glob("*.py")])


def names_in(program: Path) -> set[str]:
    """What a module defines or imports at its top."""
    found: set[str] = set()
    for node in ast.parse(program.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(name.asname or name.name for name in node.names)
        else:
            found.update(name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store))
    return found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_what_a_program_takes_from_another_is_there(program: Path) -> None:
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.ImportFrom) and (other := program.with_name(f"{node.module}.py")).exists():
            assert {name.name for name in node.names} <= names_in(other)
