# SPDX-License-Identifier: Apache-2.0
"""Put our functions around SGLang's: resolve all, compare, install all, or undo all and raise."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvcached.engines.sglang.seams import Kind, Seam
from kvcached.errors import EngineNotSupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MARK: Final = "kvcached_hook"
_MISSING: Final = object()


class Target(NamedTuple):
    """Where a seam's function is kept, and what is there now."""

    seam: Seam
    holder: Any
    name: str
    found: Any


def resolve(seam: Seam) -> Target:
    """Raises `EngineNotSupported` when the target is not there or does not take the parameters that are relied on."""
    module, _, path = seam.target.partition(":")
    *parents, name = path.split(".")
    try:
        holder = importlib.import_module(f"sglang.srt.{module}")
        for parent in parents:
            holder = getattr(holder, parent)
    except (ImportError, AttributeError) as error:
        raise EngineNotSupported(f"this SGLang has no {seam.target} ({seam.reason}): {error}") from error
    found = _found(seam, holder, name)
    if found is _MISSING:
        raise EngineNotSupported(f"this SGLang has no {seam.target} ({seam.reason})")
    if seam.parameters:
        known = inspect.signature(found).parameters
        missing = [parameter for parameter in seam.parameters if parameter not in known]
        if missing:
            raise EngineNotSupported(f"{seam.target} of this SGLang takes no {', '.join(missing)}; it takes {', '.join(known)}")
    return Target(seam, holder, name, found)


def _found(seam: Seam, holder: Any, name: str) -> Any:
    """What is wrapped must be the holder's own: wrapping an inherited function in a subclass would miss the others."""
    if seam.kind in (Kind.WRAP, Kind.PROPERTY):
        return vars(holder).get(name, _MISSING)
    if seam.kind is Kind.FIELD:
        known = name in getattr(holder, "__annotations__", {}) or hasattr(holder, name)
        return name if known else _MISSING
    return getattr(holder, name, _MISSING)


def install_seams(seams: Iterable[Seam], adapter: object) -> None:
    """Put `adapter`'s methods around their targets. Raises `EngineNotSupported`; then nothing has changed."""
    targets = [resolve(seam) for seam in seams if seam.kind is not Kind.ATTRIBUTE]
    hooked = [target for target in targets if target.seam.hook]
    with contextlib.ExitStack() as undo:
        for target in hooked:
            undo.callback(setattr, target.holder, target.name, target.found)
            setattr(target.holder, target.name, _around(target, getattr(adapter, target.seam.hook)))
        _require_installed(hooked)
        undo.pop_all()


def _require_installed(targets: Iterable[Target]) -> None:
    for target in targets:
        if not is_installed(target.seam):
            raise EngineNotSupported(f"{target.seam.target} could not be wrapped")


def is_installed(seam: Seam) -> bool:
    """Whether our function is around the target, still."""
    found = resolve(seam).found
    return hasattr(found.fget if isinstance(found, property) else found, _MARK)


def _around(target: Target, hook: Callable[..., Any]) -> Any:
    if target.seam.kind is Kind.PROPERTY:
        return property(_wrapped(target.found.fget, hook))
    return _wrapped(target.found, hook)


def _wrapped(original: Any, hook: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(wrapper, _MARK, True)
    return wrapper
