# SPDX-License-Identifier: Apache-2.0
"""The gateway's own paths, described: OpenAPI 3.1. What goes to models is the engines' to describe. Pure."""

from __future__ import annotations

from typing import Any, Final

_MODEL: Final = {"name": "model", "in": "path", "required": True, "description": "name or alias", "schema": {"type": "string"}}
_NUMBER: Final = {"type": "number", "minimum": 0}
_COUNT: Final = {"type": "integer", "minimum": 0}
_TEXT: Final = {"type": "string"}
_STATES: Final = ("stopped", "starting", "ready", "draining", "going to sleep", "asleep", "waking", "failed")
_STATE: Final = {"type": "string", "enum": list(_STATES)}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _by_model(values: Any) -> dict[str, Any]:
    return _object(models={"type": "object", "additionalProperties": values})


def _or_null(kind: str) -> dict[str, Any]:
    return {"type": [kind, "null"]}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


_SCHEMAS: Final = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_or_null("string"), code=_TEXT)),
    "Card": _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, root=_TEXT, state=_STATE),
    "Facts": _object(
        model=_TEXT,
        state=_STATE,
        for_s=_NUMBER,
        idle_s=_NUMBER,
        reason=_TEXT,
        failures=_COUNT,
        bring_back_s=_NUMBER,
        can_sleep={"type": "boolean"},
        is_elastic={"type": "boolean"},
        servers=_list(_object(address=_TEXT, up={"type": "boolean"}, open=_COUNT, pid=_or_null("integer"))),
        open=_COUNT,
        waiting=_COUNT,
    ),
    "Traffic": _object(open=_COUNT, waiting=_COUNT, idle_s=_NUMBER, total={"type": "object"}, windows={"type": "object"}),
    "Request": _object(model=_TEXT, path=_TEXT, phase={"enum": ["waiting", "sent", "answering"]}, for_s=_NUMBER),
    "Memory": _object(
        card=_TEXT,
        uuid=_TEXT,
        budget_bytes=_COUNT,
        leased_bytes=_COUNT,
        free_bytes=_COUNT,
        problem=_TEXT,
        pools=_list(
            _object(
                model=_or_null("string"),
                pool=_TEXT,
                rank=_COUNT,
                leased_bytes=_COUNT,
                used_bytes=_COUNT,
                cached_bytes=_COUNT,
                other_bytes=_COUNT,
                limit_bytes=_COUNT,
            )
        ),
    ),
    "Lines": _object(model=_TEXT, lines={"type": ["array", "null"], "items": _TEXT}, next=_COUNT, missed=_COUNT),
    "Limit": _object(model=_TEXT, limit_bytes=_list(_COUNT)),
}


def _query(name: str, description: str, schema: Any, required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": required, "description": description, "schema": schema}


def _json(description: str, schema: Any) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


_ERRORS: Final = {
    "400": "a parameter is wrong",
    "401": "the key is missing or wrong",
    "403": "the key does not open this, or the page of another site asks",
    "404": "there is no such model",
    "409": "it cannot be done with this model now",
}


def _operation(summary: str, answer: Any, *parameters: Any, errors: str = "401 403", **answers: Any) -> dict[str, Any]:
    """`answers`: further ones, by `s` and their status."""
    told = {"200": answer, **{status.removeprefix("s"): one for status, one in answers.items()}}
    told |= {status: _json(_ERRORS[status], _ref("Error")) for status in errors.split()}
    return {"summary": summary, "parameters": list(parameters), "responses": told}


_SECONDS: Final = {"type": "number", "minimum": 0, "maximum": 86_400}
_INTEGER: Final = {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}
_WAIT: Final = _query("wait_s", "answer when it is done, or after so long", _SECONDS)
_AMOUNT: Final = {"type": "string", "pattern": "^([0-9]{1,6}(B|KiB|MiB|GiB)|[1-9]?[0-9]%|100%)$"}
"""More is understood: see the documentation of sizes."""
_OF_MODEL: Final = "401 403 404"
_ACTION: Final = "400 401 403 404 409"
_NOT_YET: Final = _json("not yet", _ref("Facts"))
_ALIVE: Final = {"type": "object", "required": ["status"], "properties": {"status": {"const": "ok"}, "models": {"type": "object"}}}
_WELL: Final = {"anyOf": [_ref("Facts"), _object(model=_TEXT, state=_STATE)]}
_OUR_PATHS: Final[dict[str, dict[str, Any]]] = {
    "/v1/models": {
        "get": _operation(
            "Models and aliases that the key opens", _json("a list", _object(object=_TEXT, data=_list(_ref("Card")))), errors="401"
        )
    },
    "/v1/models/{model}": {"get": _operation("One of them", _json("it", _ref("Card")), _MODEL, errors=_OF_MODEL)},
    "/health": {"get": _operation("Whether the gateway serves", _json("it does", _ALIVE), errors="")},
    "/health/{model}": {
        "get": _operation("Whether a model does", _json("well", _WELL), _MODEL, errors="404", s503=_json("it failed", _WELL))
    },
    "/traffic": {"get": _operation("Requests, tokens and durations, by windows", _json("by model", _by_model(_ref("Traffic"))))},
    "/requests": {
        "get": _operation(
            "Requests that have not ended, the oldest first",
            _json("the oldest", _object(count=_COUNT, requests=_list(_ref("Request")))),
            _query("most", "so many at most; 50", _INTEGER),
            errors="400 401 403",
        )
    },
    "/cards": {
        "get": _operation("What each card holds, by pools", _json("all cards", _object(cards=_list(_ref("Memory")), problems=_list(_TEXT))))
    },
    "/logs/{model}": {
        "get": _operation(
            "The last lines of a model's servers",
            _json("null where somebody else runs them", _ref("Lines")),
            _MODEL,
            _query("after", "those since `next` was this", _INTEGER),
            _query("most", "so many at most; 200", _INTEGER),
            errors="400 401 403 404",
        )
    },
    "/metrics": {"get": _operation("For Prometheus", {"description": "text", "content": {"text/plain": {"schema": _TEXT}}})},
    "/models/idle": {
        "get": _operation(
            "Who is idle, the longest first",
            _json("names", _object(models=_list(_object(model=_TEXT, idle_s=_NUMBER)))),
            _query("idle_s", "for at least so long", _SECONDS),
            errors="400 401 403",
        )
    },
    "/sleep/status": {"get": _operation("States with their reasons", _json("by model", _by_model(_ref("Facts"))))},
    "/sleep/candidates": {"get": _operation("Who could sleep, cheapest first", _json("a list", _object(models=_list(_ref("Facts")))))},
    "/action/sleep/{model}": {
        "post": _operation(
            "Put a model to sleep",
            _json("it sleeps", _ref("Facts")),
            _MODEL,
            _WAIT,
            _query("mode", "let open requests end, or end them; default: as the file says", {"enum": ["wait", "abort"]}),
            errors=_ACTION,
            s202=_NOT_YET,
        )
    },
    "/action/wakeup/{model}": {
        "post": _operation("Wake or start a model", _json("it is ready", _ref("Facts")), _MODEL, _WAIT, errors=_ACTION, s202=_NOT_YET)
    },
    "/action/limit/{model}": {
        "post": _operation(
            "Most KV memory of each pool of each server",
            _json("bytes in force, by server", _ref("Limit")),
            _MODEL,
            _query("limit", "a size such as 20GiB, or a share of the card such as 40%", _AMOUNT, required=True),
            errors=_ACTION,
        )
    },
}


def description(version: str) -> dict[str, Any]:
    """The document, for `/openapi.json`."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "KVCacheD gateway", "version": version},
        "paths": _OUR_PATHS,
        "components": {"schemas": _SCHEMAS, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }
