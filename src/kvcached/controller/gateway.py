# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible address of all models: which model a request is for, and who may ask."""

from __future__ import annotations

import json
import logging
import re
import time
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from kvcached.controller import page
from kvcached.controller.api_errors import ApiError, no_such_model
from kvcached.controller.choice import key_of
from kvcached.controller.forwarding import Forwarders
from kvcached.controller.intake import Intake
from kvcached.controller.manage import Management
from kvcached.controller.origin import is_foreign, is_misled
from kvcached.controller.proxy import Call, Proxy
from kvcached.controller.reply import ClientGone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import aiohttp

    from kvcached.controller.access import Access
    from kvcached.controller.config import ServeConfig
    from kvcached.controller.owner import Owner
    from kvcached.controller.traces import Traces

_log = logging.getLogger("kvcached.controller")
MAX_BODY_BYTES: Final = 256 * 1024 * 1024
_FURTHER_PATHS: Final = ("/tokenize", "/detokenize", "/rerank", "/v2/rerank", "/score", "/classify", "/pooling", "/generate")
"""Beside `/v1/`. No others: the servers have paths that put them to sleep and change their weights, and those are the owner's."""
_OF_ENGINES: Final = r"(?!models(?:/|$)).+"
"""Below `/v1/`: all but the list of models, which is ours and only to be read."""
_FORM_MODEL: Final = re.compile(rb';[ \t]*name="?model"?\r\n(?:[^\r\n]{1,200}\r\n){0,8}\r\n([^\r\n]{1,200})\r\n')
"""The field of a form. Bounded: a body made of such lines must not stop everybody else."""


class Gateway:
    """The application. `created_s`: what `/v1/models` says, in seconds since 1970."""

    def __init__(
        self,
        config: ServeConfig,
        access: Access,
        owner: Owner,
        session: aiohttp.ClientSession,
        traces: Traces,
        forwarders: Forwarders | None = None,
    ) -> None:
        self._config = config
        self._access = access
        self._owner = owner
        self.intake = Intake(config.request_timeout_s)
        self._proxy = Proxy(owner, session, traces, forwarders or Forwarders(0))
        self._names = config.names()
        self._created_s = int(time.time())
        self._management = Management(config, owner, self._everything, self._proxy.under_way)

    def use(self, config: ServeConfig, access: Access) -> None:
        """A new file; requests that are under way keep what they have."""
        self._config, self._access, self._names = config, access, config.names()
        self._management.use(config)
        self.intake.timeout_s = config.request_timeout_s

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._shape_errors])
        app.add_routes([*page.routes(), *self._management.routes()])
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.route("*", "/upstream/{name}/{path:.*}", self._to_named),
                web.post(f"/v1/{{path:{_OF_ENGINES}}}", self._to_model),
                *(web.post(path, self._to_model) for path in _FURTHER_PATHS),
            ]
        )
        return app

    def runner(self) -> web.AppRunner:
        """A client that leaves cancels its handler, and so the request to the model's server."""
        return web.AppRunner(self.app(), handler_cancellation=True, access_log=None)

    # ------------------------------------------------------------------ errors

    @web.middleware
    async def _shape_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return _answer(error, request.path)
        except ClientGone:
            return web.Response(status=499)
        except web.HTTPException as error:
            said = ApiError(error.status, error.text or error.reason, error.reason.lower().replace(" ", "_"))
            answer = _answer(said, request.path)
            if "Allow" in error.headers:
                answer.headers["Allow"] = error.headers["Allow"]
            return answer

    # ------------------------------------------------------------------ models

    async def _models(self, request: web.Request) -> web.Response:
        opened = self._access.models_of(request.headers)
        names = [word for word, name in self._names.items() if name in self._owner.fleet.models and (opened is None or name in opened)]
        return web.json_response({"object": "list", "data": [self._card_of(word) for word in names]})

    async def _model(self, request: web.Request) -> web.Response:
        word = request.match_info["model"]
        self._resolve(word, self._access.models_of(request.headers))
        return web.json_response(self._card_of(word))

    def _card_of(self, word: str) -> dict[str, Any]:
        name = self._names[word]
        state = self._owner.fleet.models[name].state.value
        return {"id": word, "object": "model", "created": self._created_s, "owned_by": "kvcached", "root": name, "state": state}

    def _everything(self, request: web.Request) -> None:
        """Raises `ApiError` unless the key opens all models, or for a browser that somebody else's page makes ask."""
        _refuse_foreign(request)
        if not self._config.api_keys and is_misled(request.headers, self._config.host_and_port[0]):
            raise ApiError(403, "Without `api_keys` this is for localhost only; to use another name, set `api_keys`.", "wrong_host")
        if self._access.models_of(request.headers) is not None:
            raise ApiError(403, "This API key opens models only.", "not_allowed")

    def _resolve(self, word: str, opened: frozenset[str] | None) -> str:
        """The model that a name or alias stands for, if it is among those that are open; None: all are. Raises `ApiError` 403 or 404."""
        name = self._names.get(word)
        if name is None:
            raise no_such_model(word)
        if name not in self._owner.fleet.models:
            raise self._owner.absent(word)
        if opened is not None and name not in opened:
            raise ApiError(403, f"This API key does not open the model {word!r}.", "not_allowed", param="model")
        return name

    # ------------------------------------------------------------------ requests

    async def _to_named(self, request: web.Request) -> web.StreamResponse:
        """`/upstream/NAME/PATH`: PATH of that model's server, with any method. It can do whatever the server can."""
        self._everything(request)
        body = await self.intake.read(request)
        name = self._resolve(request.match_info["name"], None)
        path = "/" + "".join(request.rel_url.raw_path_qs.split("/", 3)[3:])  # not `raw_path`, which may be a whole address
        return await self._relay(request, name, path, body)

    async def _to_model(self, request: web.Request) -> web.StreamResponse:
        if ".." in request.path.split("/"):
            raise ApiError(400, "The path climbs.", "invalid_path")
        opened = self._access.models_of(request.headers)  # who has no key is told so before the body is read
        if not self._config.api_keys:
            _refuse_foreign(request)
        body = await self.intake.read(request)
        word, given = self._named_model(request, body)
        name = self._resolve(word, opened)
        upstream = self._config.models[name].upstream_name(name)
        if given is None:
            match = _FORM_MODEL.search(body)
            body = body if match is None else body[: match.start(1)] + upstream.encode() + body[match.end(1) :]
        elif given.get("model", upstream) != upstream:
            body = json.dumps({**given, "model": upstream}).encode()
        return await self._relay(request, name, request.rel_url.raw_path_qs, body, given, in_full=opened is None)

    async def _relay(
        self, request: web.Request, name: str, path: str, body: bytes, given: dict[str, Any] | None = None, *, in_full: bool = True
    ) -> web.StreamResponse:
        credentials = self._access.upstream_headers(name, request.headers)
        model = self._config.models[name]
        keep_alive_s = model.keep_alive_s if given is not None and given.get("stream") is True else None
        key = key_of(model.affinity, request.headers, given) if model.servers > 1 else ""
        call = Call(name, request.method, path, body, credentials, keep_alive_s, key, in_full)
        return await self._proxy.relay(request, call)

    def _named_model(self, request: web.Request, body: bytes) -> tuple[str, dict[str, Any] | None]:
        """The name that a body has, and the body if it is JSON. With one model only, none is needed. Raises `ApiError` 400."""
        if request.content_type.startswith("multipart/"):
            match = _FORM_MODEL.search(body)
            return (match[1].decode(errors="replace") if match else self._only_model()), None
        given = _json_object(body)
        word = given["model"] if "model" in given else self._only_model()
        if not isinstance(word, str):
            raise ApiError(400, "`model` is not text.", "invalid_model", param="model")
        return word, given

    def _only_model(self) -> str:
        if len(self._config.models) > 1:
            raise ApiError(400, "You must provide a model.", "model_missing", param="model")
        return next(iter(self._config.models))


def _refuse_foreign(request: web.Request) -> None:
    """A page of another site can make its reader's browser ask, though it cannot read the answer."""
    if is_foreign(request.headers):
        raise ApiError(403, "This is not for pages of other sites.", "cross_site")


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body) if body else {}
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is no JSON: {error}", "invalid_json") from None
    if not isinstance(given, dict):
        raise ApiError(400, "The body is no JSON object.", "invalid_json")
    return given


def _answer(error: ApiError, path: str) -> web.Response:
    answer = web.Response(status=error.status, body=error.body(path), headers=error.headers())
    if error.status == 408:
        answer.force_close()
    return answer
