# SPDX-License-Identifier: Apache-2.0
"""A changed file while the gateway runs: no stream is dropped, and a file with a mistake changes nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvcached.controller.access import Access
from kvcached.controller.build import backend_of, card_bytes, listen_for_ends, specs_of
from kvcached.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import aiohttp

    from kvcached.controller.backends import Backend
    from kvcached.controller.config import Model, ServeConfig
    from kvcached.controller.gateway import Gateway
    from kvcached.controller.owner import Owner

_log = logging.getLogger("kvcached.controller")
_NO_NEW_SERVER: Final = frozenset(
    {
        "aliases",
        "concurrency",
        "queue",
        "queue_timeout_s",
        "keep_alive_s",
        "sleep_mode",
        "ttl_s",
        "pin",
        "preload",
        "group",
        "priority",
    }
)
"""Keys of a model that its servers do not have to know."""


def needs_new_server(old: Model, new: Model) -> bool:
    return any(getattr(old, key) != getattr(new, key) for key in type(new).model_fields if key not in _NO_NEW_SERVER)


class Reload:
    """Takes one file after another, each against the last that was taken."""

    def __init__(
        self, config: ServeConfig, environ: Mapping[str, str], owner: Owner, gateway: Gateway, session: aiohttp.ClientSession
    ) -> None:
        self._config = config
        self._environ = environ
        self._owner = owner
        self._gateway = gateway
        self._session = session

    def take(self, read_again: Callable[[], ServeConfig]) -> bool:
        """False, and nothing changed: the file has a mistake, which is logged."""
        try:
            new = read_again()
            access = Access(new, self._environ)
            self._refuse_what_cannot_be(new)
            backends = self._new_backends(new)
        except SettingError as error:
            _log.error("the file was not taken: %s", error)
            return False
        old, self._config = self._config, new
        self._owner.fleet.card_bytes = card_bytes(new)
        self._gateway.use(new, access)
        self._apply(old, new, backends)
        _log.info("the file was taken: %s", ", ".join(new.models))
        return True

    def _refuse_what_cannot_be(self, new: ServeConfig) -> None:
        if self._owner.leaving:
            raise SettingError("this gateway ends; the next one will take it")
        for key in ("listen", "log_dir", "traces", "processes"):
            if getattr(new, key) != getattr(self._config, key):
                raise SettingError(f"{key}: a change needs a new start")
        leaving = [name for name in new.models if name in self._owner.fleet.models and self._owner.fleet.models[name].retiring]
        if leaving:
            raise SettingError(f"models.{leaving[0]}: the last one of this name is still leaving; try again in a while")

    def _new_backends(self, new: ServeConfig) -> dict[str, Backend]:
        """Of the models that need new servers. Raises `SettingError`, before anything has changed."""
        old = self._config.models
        changed = {name: model for name, model in new.models.items() if name not in old or needs_new_server(old[name], model)}
        return {name: backend_of(name, model, new, self._environ, self._session) for name, model in changed.items()}

    def _apply(self, old: ServeConfig, new: ServeConfig, backends: Mapping[str, Backend]) -> None:
        for name in old.models.keys() - new.models.keys():
            if name in self._owner.fleet.models:
                self._owner.retire(name)
        for name, spec in specs_of(new).items():
            backend = backends.get(name)
            if backend is None:
                self._owner.change(spec)
                continue
            listen_for_ends(self._owner, {name: backend})
            if name not in old.models:
                self._owner.add(spec, backend)
            else:
                self._owner.renew(spec, backend)
