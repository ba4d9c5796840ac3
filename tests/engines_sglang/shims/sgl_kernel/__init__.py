# SPDX-License-Identifier: Apache-2.0
"""A package of SGLang's kernel package's name, for machines without a GPU: SGLang imports names from it that a CPU run never calls.

It registers none of the operators by which SGLang tells whether the CPU has AMX kernels: without them every layer runs in plain torch, on
any machine alike. `sgl_kernel.mamba` has what there is no plain torch for in SGLang.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__version__ = "99.0.0"  # newer than whatever SGLang asks for


class Missing:
    """A name that may be looked up, compared and passed about, but not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"sgl_kernel.{self.__name__} was called: without a GPU there are no kernels")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Missing) and other.__name__ == self.__name__

    def __hash__(self) -> int:
        return hash(self.__name__)


class MissingModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves every submodule of this package; all of their names are missing."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = __getattr__  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(name)


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor, req_to_token: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, slots: torch.Tensor, *_: object
) -> None:
    """SGLang imports this by name at its start. Copies each request's new slots into its row."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = slots[done : done + end - start].to(req_to_token.dtype)
        done += end - start


sys.meta_path.append(MissingModules())
