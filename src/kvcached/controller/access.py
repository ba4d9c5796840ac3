# SPDX-License-Identifier: Apache-2.0
"""Who may use which model, and what a model's server gets as credentials."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from kvcached.controller.api_errors import ApiError
from kvcached.controller.config import secret

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcached.controller.config import Model, ServeConfig


class Access:
    """The keys of the file. Raises `SettingError` for a variable that is not set."""

    def __init__(self, config: ServeConfig, environ: Mapping[str, str]) -> None:
        self._keys = [
            (secret(key.key, environ, f"api_keys.{index}.key").encode(), frozenset(key.models)) for index, key in enumerate(config.api_keys)
        ]
        self._upstream = {name: own_credentials(name, model, environ) for name, model in config.models.items()}

    def models_of(self, headers: Mapping[str, str]) -> frozenset[str] | None:
        """Models that the client's key opens; None: all, and the actions. Raises `ApiError` 401."""
        if not self._keys:
            return None
        given = _given_key(headers).encode("utf-8", "surrogateescape")
        # Every key is compared, so that the time says nothing about which of them is nearly right.
        opened = [models for key, models in self._keys if hmac.compare_digest(key, given)]
        if not opened:
            raise ApiError(401, "The API key is missing or wrong.", "invalid_api_key")
        return None if any(not models for models in opened) else frozenset[str]().union(*opened)

    def upstream_headers(self, model: str, headers: Mapping[str, str]) -> dict[str, str]:
        """Its own key if it has one; else the client's, if that is not one of ours."""
        if self._upstream[model] or self._keys:
            return self._upstream[model]
        return {name: headers[name] for name in ("Authorization", "x-api-key") if name in headers}


def own_credentials(name: str, model: Model, environ: Mapping[str, str]) -> dict[str, str]:
    """Headers with the key that the model's server has of its own; none if it has none. Raises `SettingError`."""
    if model.upstream_key is None:
        return {}
    return {"Authorization": f"Bearer {secret(model.upstream_key, environ, f'models.{name}.upstream_key')}"}


def _given_key(headers: Mapping[str, str]) -> str:
    kind, _, key = headers.get("Authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
