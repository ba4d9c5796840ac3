# SPDX-License-Identifier: Apache-2.0
"""Lets torchvision be imported beside a torch that was built without its operators. Loaded by a `.pth` file, in every process.

torchvision's Python side registers fake kernels for two operators of its binary part, and fails where that part was not loaded. So they
are declared just before torchvision is imported. Nobody calls them.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; acts on the first import of torchvision."""

    library: Any = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, DeclareOperators())
