# SPDX-License-Identifier: Apache-2.0
"""What operators ask of the gateway: health, traffic, who sleeps, who could, and actions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvcached import __version__
from kvcached.controller.api_errors import ApiError, no_such_model
from kvcached.controller.backends import BackendFailed
from kvcached.controller.card_memory import CardMemory
from kvcached.controller.metrics import exposition
from kvcached.controller.openapi import description
from kvcached.controller.placement import Room
from kvcached.controller.states import AT_REST, Model, State
from kvcached.controller.traffic import idle_models
from kvcached.errors import Misuse
from kvcached.setting_types import Amount

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.controller.choice import Replica
    from kvcached.controller.config import ServeConfig
    from kvcached.controller.owner import Owner


class Management:
    """`allow` raises `ApiError` for who may not ask. Load balancers have no key: to them `/health` says the least that they need.

    `under_way` lists requests that have not ended.
    """

    def __init__(
        self, config: ServeConfig, owner: Owner, allow: Callable[[web.Request], None], under_way: Callable[[], list[dict[str, Any]]]
    ) -> None:
        self._config = config
        self._owner = owner
        self._allow = allow
        self._under_way = under_way
        self._cards = CardMemory()

    def use(self, config: ServeConfig) -> None:
        self._config = config

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/openapi.json", self._description),
            web.get("/health", self._health),
            web.get("/health/{model:.+}", self._health_of),
            web.get("/traffic", self._traffic),
            web.get("/requests", self._requests),
            web.get("/cards", self._memory),
            web.get("/logs/{model:.+}", self._logs),
            web.get("/metrics", self._metrics),
            web.get("/models/idle", self._idle),
            web.get("/sleep/status", self._sleep_status),
            web.get("/sleep/candidates", self._candidates),
            web.post("/action/sleep/{model:.+}", self._sleep),
            web.post("/action/wakeup/{model:.+}", self._wake),
            web.post("/action/limit/{model:.+}", self._limit),
        ]

    async def _description(self, request: web.Request) -> web.Response:
        return web.json_response(description(__version__))

    async def _health(self, request: web.Request) -> web.Response:
        """200 while the gateway serves, whatever its models do."""
        if not self._allows(request):
            return web.json_response({"status": "ok"})
        return web.json_response({"status": "ok", "models": {name: model.state.value for name, model in self._models().items()}})

    async def _health_of(self, request: web.Request) -> web.Response:
        """503 for a model that failed; one that sleeps is well, since a request wakes it."""
        model = self._model(request)
        facts = self._facts(model) if self._allows(request) else {"model": model.name, "state": model.state.value}
        return web.json_response(facts, status=503 if model.state is State.FAILED else 200)

    def _allows(self, request: web.Request) -> bool:
        try:
            self._allow(request)
        except ApiError:
            return False
        return True

    async def _traffic(self, request: web.Request) -> web.Response:
        self._allow(request)
        now_s = self._owner.now_s
        facts = {name: {**self._owner.traffic[name].to_json(now_s), **_load(model)} for name, model in self._models().items()}
        return web.json_response({"models": facts})

    async def _requests(self, request: web.Request) -> web.Response:
        """Those that have not ended, the oldest first; `?most=50`."""
        self._allow(request)
        under_way = self._under_way()
        return web.json_response({"count": len(under_way), "requests": under_way[: _count(request, "most", 50)]})

    async def _memory(self, request: web.Request) -> web.Response:
        """What each card holds by the pools on it, and whose they are."""
        self._allow(request)
        backends = self._owner.backends
        run_dirs = dict.fromkeys(path for backend in backends.values() if (path := backend.run_dir) is not None)
        leaders = {replica.pid: name for name, backend in backends.items() for replica in backend.replicas if replica.pid is not None}
        return web.json_response(self._cards.look(run_dirs, leaders))

    async def _logs(self, request: web.Request) -> web.Response:
        """The last lines of a model's servers: `?most=200`, `?after=N` those that came since `next` was N. null: somebody else has them."""
        self._allow(request)
        model = self._model(request)
        after, most = _count(request, "after", 0), _count(request, "most", 200)
        journal = self._owner.backends[model.name].journal
        if journal is None:
            return web.json_response({"model": model.name, "lines": None, "next": 0, "missed": 0})
        excerpt = journal.after(after, most)
        return web.json_response({"model": model.name, **dataclasses.asdict(excerpt)})

    async def _metrics(self, request: web.Request) -> web.Response:
        """For Prometheus."""
        self._allow(request)
        body, content_type = exposition(self._owner)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _idle(self, request: web.Request) -> web.Response:
        """`?idle_s=60`: those that were idle for so long."""
        self._allow(request)
        traffic = ((name, self._owner.traffic[name]) for name in self._models())
        idle = idle_models(traffic, _seconds(request, "idle_s", 0.0), self._owner.now_s)
        return web.json_response({"models": [{"model": name, "idle_s": round(idle_s, 3)} for name, idle_s in idle]})

    async def _sleep_status(self, request: web.Request) -> web.Response:
        self._allow(request)
        return web.json_response({"models": {name: self._facts(model) for name, model in self._models().items()}})

    async def _candidates(self, request: web.Request) -> web.Response:
        """Ready models that could leave now, the one that is cheapest to bring back first."""
        self._allow(request)
        room = Room(list(self._models().values()), {}, self._owner.now_s)
        ready = [model for model in self._models().values() if model.state is State.READY and model.sleeps_by_itself and not model.busy]
        return web.json_response({"models": [self._facts(model) for model in sorted(ready, key=room.price)]})

    async def _sleep(self, request: web.Request) -> web.Response:
        """`?mode=wait|abort`: open requests end first, or are ended. `?wait_s=30`: answer when it sleeps (202: not yet)."""
        self._allow(request)
        model = self._model(request)
        known = self._config.models.get(model.name)  # not while it is being removed
        mode = request.query.get("mode", known.sleep_mode if known is not None else "wait")
        if mode not in ("wait", "abort"):
            raise ApiError(400, "`mode` is wait or abort.", "invalid_mode", param="mode")
        return await self._act(request, model, lambda: self._owner.sleep(model.name, hurry=mode == "abort"), AT_REST)

    async def _wake(self, request: web.Request) -> web.Response:
        """`?wait_s=30`: answer when it is ready (202: not yet)."""
        self._allow(request)
        model = self._model(request)
        return await self._act(request, model, lambda: self._owner.wake(model.name), frozenset({State.READY}))

    async def _limit(self, request: web.Request) -> web.Response:
        """`?limit=20GiB`, or `40%` of the card's budget: most KV memory of each of its servers, until that is started again."""
        self._allow(request)
        model = self._model(request)
        limit = _amount(request, "limit")
        try:
            in_force = await self._owner.backends[model.name].limit_kv(limit)
        except BackendFailed as error:
            raise ApiError(409, str(error), "not_possible") from None
        return web.json_response({"model": model.name, "limit_bytes": in_force})

    async def _act(self, request: web.Request, model: Model, action: Callable[[], None], wanted: frozenset[State]) -> web.Response:
        wait_s = _seconds(request, "wait_s", 0.0)
        try:
            action()
        except Misuse as error:
            raise ApiError(409, str(error), "not_possible") from None
        reached = await self._owner.settled(model.name, wanted, wait_s)
        if model.name not in self._models():
            raise no_such_model(model.name)
        return web.json_response(self._facts(model), status=200 if reached else 202)

    def _models(self) -> dict[str, Model]:
        return self._owner.fleet.models

    def _model(self, request: web.Request) -> Model:
        word = request.match_info["model"]
        name = self._config.names().get(word, word)
        if name not in self._models():
            raise no_such_model(word)
        return self._models()[name]

    def _facts(self, model: Model) -> dict[str, Any]:
        now_s = self._owner.now_s
        return {
            "model": model.name,
            "state": model.state.value,
            "for_s": round(now_s - model.since_s, 3),
            "idle_s": round(self._owner.traffic[model.name].idle_s(now_s), 3),
            "reason": model.reason,
            "failures": model.failures,
            "bring_back_s": round(model.bring_back_s, 3),
            "can_sleep": model.spec.can_sleep,
            "is_elastic": self._owner.backends[model.name].run_dir is not None,
            "servers": [_server(replica) for replica in self._owner.backends[model.name].replicas],
            **_load(model),
        }


def _server(replica: Replica) -> dict[str, Any]:
    """`pid`: of the process group's leader; null for a server that somebody else runs."""
    return {"address": replica.address, "up": replica.up, "open": len(replica.open), "pid": replica.pid}


def _load(model: Model) -> dict[str, int]:
    return {"open": len(model.open), "waiting": len(model.waiting)}


def _amount(request: web.Request, name: str) -> Amount:
    try:
        return Amount.parse(request.query.get(name, ""))
    except ValueError as error:
        raise ApiError(400, f"`{name}`: {error}", "invalid_size", param=name) from None


def _count(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ApiError(400, f"`{name}` is a whole number.", "invalid_count", param=name)
    return int(text)


def _seconds(request: web.Request, name: str, default: float) -> float:
    try:
        value = float(request.query.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86_400:
        raise ApiError(400, f"`{name}` is a number of seconds, 0 to 86400.", "invalid_seconds", param=name)
    return value
