# SPDX-License-Identifier: Apache-2.0
"""What the file means: the facts for the logic, and the servers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcached.config import load_settings
from kvcached.controller.access import own_credentials
from kvcached.controller.backends import Backend, RemoteBackend
from kvcached.controller.config import ServeConfig, instance_name
from kvcached.controller.controls import Door, EngineControls, KvMemory, SglangControls, VllmControls
from kvcached.controller.engine_command import environment_of
from kvcached.controller.launcher import EngineBackend
from kvcached.controller.states import Spec
from kvcached.runtime.endpoint import endpoint_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    import aiohttp

    from kvcached.controller.config import Model
    from kvcached.controller.owner import Owner

_WAKE_GUESS_S: Final = {"kv": 0.1, "host": 2.0, "discard": 20.0, "stop": 60.0, "never": 60.0}


def spec_of(name: str, model: Model, config: ServeConfig) -> Spec:
    """What the logic has to know of a model."""
    return Spec(
        name=name,
        concurrency=model.concurrency * model.servers,
        queue=model.queue,
        queue_timeout_s=model.queue_timeout_s,
        ttl_s=model.ttl_s,
        pin=model.pin,
        can_sleep=model.sleeps != "never",
        sleep_stops=model.sleeps == "stop",
        can_stop=model.engine != "remote",
        keep=model.preload,
        group=model.group,
        priority=model.priority,
        card=model.card or "",
        cost_bytes=cost_bytes(model, config),
        rest_bytes=model.weights * model.replicas if model.sleeps == "kv" else 0,
        wake_guess_s=_WAKE_GUESS_S[model.sleeps],
    )


def cost_bytes(model: Model, config: ServeConfig) -> int:
    """What it takes of its card while it is awake: weights and the KV memory that is left to it, by each replica."""
    floor_bytes = model.floor.of(config.cards.get(model.card or "", 0)) if model.floor is not None else 0
    return (model.weights + floor_bytes) * model.replicas


def specs_of(config: ServeConfig) -> dict[str, Spec]:
    return {name: spec_of(name, model, config) for name, model in config.models.items()}


def card_bytes(config: ServeConfig) -> dict[str, int]:
    return dict(config.cards)


def build_backends(config: ServeConfig, environ: Mapping[str, str], session: aiohttp.ClientSession) -> dict[str, Backend]:
    """`environ`: what engines inherit."""
    return {name: backend_of(name, model, config, environ, session) for name, model in config.models.items()}


def backend_of(name: str, model: Model, config: ServeConfig, environ: Mapping[str, str], session: aiohttp.ClientSession) -> Backend:
    controls = _controls(model, Door(session, own_credentials(name, model, environ)))
    if model.engine == "remote":
        return RemoteBackend(model.address, session, controls, model.start_timeout_s)
    return EngineBackend(name, model, environ, log_dir_of(config), session, controls, _kv_memory(name, model, environ))


def log_dir_of(config: ServeConfig) -> Path:
    return config.log_dir or Path("kvcached-logs")


def _controls(model: Model, door: Door) -> EngineControls | None:
    if model.sleeps not in ("host", "discard"):
        return None
    discard = model.sleeps == "discard"
    if model.engine == "sglang":
        return SglangControls(door, discard, str(model.model))
    return VllmControls(door, discard, model.sleep_mode)


def _kv_memory(name: str, model: Model, environ: Mapping[str, str]) -> list[KvMemory]:
    if not model.elastic:
        return []
    run_dir = load_settings(environment_of(name, model, 0, environ)).run_dir
    return [KvMemory(endpoint_path(run_dir, instance_name(name, replica))) for replica in range(model.replicas)]


def listen_for_ends(owner: Owner, backends: Mapping[str, Backend]) -> None:
    """The owner hears when the servers of a model end by themselves."""
    for name, backend in backends.items():
        if isinstance(backend, EngineBackend):
            backend.on_ended = functools.partial(owner.ended, name)
