# SPDX-License-Identifier: Apache-2.0
"""Answers SGLang's allocations of KV buffers with tensors over an arena, where its function does more than allocate."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvcached.errors import EngineNotSupported


class ZerosFromArena(TorchFunctionMode):
    """While it is active, `torch.zeros` of the shape and type that comes next is answered with the tensors given, in their order."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._left = tensors

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and self._left and kwargs.get("dtype") is self._left[0].dtype:
            size = args[0] if len(args) == 1 else kwargs.get("size")
            if size == tuple(self._left[0].shape):
                return self._left.pop(0)
        return func(*args, **kwargs)

    def require_answered(self) -> None:
        """Raises `EngineNotSupported` when SGLang made its buffers in some other way."""
        if self._left:
            raise EngineNotSupported(f"{len(self._left)} KV buffers were expected and did not come: this SGLang makes them in another way")
