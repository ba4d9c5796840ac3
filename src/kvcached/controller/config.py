# SPDX-License-Identifier: Apache-2.0
"""The file `models.yaml`, checked. An error names the key and what is allowed; `models.example.yaml` is the manual."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from kvcached.errors import SettingError
from kvcached.setting_types import INSTANCE_PATTERN, Share, Size

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

_LISTEN: Final = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):(?P<port>\d{1,5})")
_ADDRESS: Final = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")


def _text(value: object) -> object:
    """A number where a command line or an environment wants text: nobody quotes a port in YAML."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _listen(value: object) -> object:
    match = _LISTEN.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match["port"]) > 65_535:
        raise ValueError("write HOST:PORT, such as 127.0.0.1:8080")
    return value


def _address(value: object) -> object:
    if not isinstance(value, str) or _ADDRESS.fullmatch(value) is None:
        raise ValueError("write the address of a server, such as http://10.0.0.2:8000")
    return value.rstrip("/")


def _name(value: object) -> object:
    if not isinstance(value, str) or not value or len(value) > 200 or not value.isprintable():
        raise ValueError("a name is printable text of 1 to 200 characters")
    return value


def _list_of(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _tuple_of(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _path(value: object) -> object:
    return Path(value).expanduser() if isinstance(value, str) else value


_AMOUNT_SCHEMA: Final = {"type": ["string", "integer"], "examples": ["512MiB", "3G"]}
Name = Annotated[str, BeforeValidator(_name)]
Text = Annotated[str, BeforeValidator(_text)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_tuple_of)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_tuple_of)]
Address = Annotated[str, BeforeValidator(_address)]
Addresses = Annotated[
    tuple[Address, ...],
    BeforeValidator(lambda value: _tuple_of(_list_of(value))),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
File = Annotated[Path, BeforeValidator(_path), WithJsonSchema({"type": "string"})]
Bytes = Annotated[Size, WithJsonSchema(_AMOUNT_SCHEMA)]
Amounts = Annotated[Share, WithJsonSchema({**_AMOUNT_SCHEMA, "examples": ["2GiB", "40%"]})]
Duration = Annotated[float, Field(gt=0, le=30 * 86_400, strict=False)]
CardName = Annotated[str, Field(pattern=r"^(host|cuda|hip):\d{1,4}$")]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )


class ApiKey(_Section):
    """One key that clients may use."""

    key: Annotated[str, Field(min_length=8)]
    """the key itself, or `env:NAME` for the value of a variable"""
    models: Names = ()
    """models that it opens; none: all, and the actions too"""


class Model(_Section):
    """One model: how it is run, how many may use it, and when it sleeps."""

    engine: Literal["vllm", "sglang", "remote"]
    """what runs it; remote: a server that somebody else runs"""
    model: Name | None = None
    """what the engine loads: a folder, or a name on the hub; of a remote: its name there (default: the name here)"""
    address: Addresses = ()
    """of a remote: where it is; several for replicas"""
    upstream_key: str | None = None
    """what is sent to the model's server as its key: text or `env:NAME`; default: the client's own, if no `api_keys` are set here"""
    aliases: Names = ()
    """further names that clients may use"""

    venv: File | None = None
    """virtual environment that has the engine; default: the one that this program runs in"""
    python: File | None = None
    """interpreter that has the engine, instead of `venv`"""
    args: Texts = ()
    """further arguments of the engine's server"""
    env: Annotated[dict[str, Text], Field(default_factory=dict)]
    """variables of the engine's process"""
    elastic: bool = True
    """make its KV cache elastic"""
    card: CardName | None = None
    """where it runs, for the byte plan and the KV cache; default: the engine's own device"""
    weights: Bytes = 0
    """bytes of weights and activations, for the byte plan and for eviction; 0: not known"""
    floor: Amounts | None = None
    """least KV memory that the other models leave to it"""
    limit: Amounts | None = None
    """most KV memory that it may hold"""
    start_timeout_s: Duration = 900.0
    """a start, wake-up or going to sleep that takes longer has failed"""

    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """servers of this model; a request goes to the one with the fewest"""
    affinity: Literal["none", "session", "prefix"] = "none"
    """requests that go to the same of several servers: those of a session (`X-Session-ID`, `prompt_cache_key`, `user`), or that begin
    alike"""
    concurrency: Annotated[int, Field(ge=1, le=100_000)] = 256
    """requests that one replica works on at once"""
    queue: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    """requests that may wait; one more is answered with 429"""
    queue_timeout_s: Duration = 300.0
    """a request that has waited so long is answered with 503"""
    keep_alive_s: Duration | None = None
    """a stream that waits gets a comment so often, and an error as an event; default: none, and an error has its status"""

    sleep: Literal["host", "discard", "kv", "stop", "never"] | None = None
    """what sleep is: weights kept in host memory; weights read again on wake-up; only the KV cache given back; the server ended;
    none. default: host where the engine can, else kv if elastic, else stop; for a remote: never"""
    sleep_mode: Literal["wait", "abort"] = "wait"
    """what an action to sleep does with open requests: let them end, or end them"""
    ttl_s: Duration | None = None
    """asleep after so long without a request; default: only to make room"""
    pin: bool = False
    """never asleep but by an action"""
    preload: bool = False
    """started with this program"""
    group: Name | None = None
    """of the models of a group one at most is awake"""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """a model whose requests wait makes a busy one leave only if that has no higher priority"""

    @model_validator(mode="after")
    def _fits_its_engine(self) -> Model:
        problem = _remote_problem(self) if self.engine == "remote" else _local_problem(self)
        if problem:
            raise ValueError(problem)
        return self

    @property
    def sleeps(self) -> str:
        """`sleep` with its default."""
        if self.sleep is not None:
            return self.sleep
        if self.engine == "remote":
            return "never"
        return "host" if not _why_weights_stay(self) else "kv" if self.elastic else "stop"

    @property
    def servers(self) -> int:
        """Replicas, of whatever kind."""
        return len(self.address) or self.replicas

    def upstream_name(self, name: str) -> str:
        """What the model `name` is called by its server."""
        return (self.model or name) if self.engine == "remote" else name


def _remote_problem(model: Model) -> str:
    local = {"venv", "python", "args", "env", "replicas", "floor", "limit"} & model.model_fields_set
    if not model.address:
        return "`address` is missing: a remote model has one"
    if local:
        return f"`{min(local)}` is for engines that are started here, and this one is remote"
    return "`sleep` of a remote is host, discard or never" if model.sleep in ("kv", "stop") else ""


def _local_problem(model: Model) -> str:
    if model.model is None:
        return "`model` is missing: what the engine loads"
    if model.address:
        return "`address` is for remote models"
    if model.venv is not None and model.python is not None:
        return "`venv` and `python` exclude each other"
    if model.sleep == "kv" and not model.elastic:
        return "`sleep: kv` gives an elastic KV cache back, and `elastic` is false"
    reason = _why_weights_stay(model) if model.sleep in ("host", "discard") else ""
    advice = "`kv` or `stop`" if model.elastic else "`stop`"
    return f"`sleep: {model.sleep}` cannot be: {reason}; write {advice}" if reason else ""


def _why_weights_stay(model: Model) -> str:
    """Why the engine cannot let go of its weights while it runs; empty where it can."""
    if model.engine == "vllm" and model.card is not None and model.card.startswith("host:"):
        return "vLLM's sleep mode needs a GPU"
    if model.engine == "sglang" and model.elastic:
        return "SGLang's memory saver, which lets go of weights, excludes an elastic KV cache"
    return ""


class ServeConfig(_Section):
    """The whole file."""

    listen: Annotated[str, BeforeValidator(_listen)] = "127.0.0.1:8080"
    """address of the gateway; port 0: any that is free"""
    api_keys: Annotated[tuple[ApiKey, ...], BeforeValidator(lambda value: _keys(value))] = ()
    """who may use it; none: everybody who reaches the address"""
    cards: Annotated[dict[CardName, Bytes], Field(default_factory=dict)]
    """size of each card that models name, for the byte plan"""
    log_dir: File | None = None
    """folder of the engines' logs; default: `kvcached-logs` where this program was started"""
    traces: Address | None = None
    """collector of traces that takes OTLP over HTTP, such as http://127.0.0.1:4318; needs the extra `traces`; default: none"""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """of the gateway: one admits and measures all requests, and the others carry streams, for more tokens than one core can pass on"""
    request_timeout_s: Duration = 60.0
    """a client that takes so long to send the head of a request, or its body (and a second more for each 16 KiB of that), is answered
    with 408"""
    models: Annotated[dict[Name, Model], Field(min_length=1)]
    """name, as clients write it, and what it is"""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ServeConfig:
        for problem in (_name_problem(self), _pool_problem(self), _group_problem(self), _key_problem(self), _card_problem(self)):
            if problem:
                raise ValueError(problem)
        return self

    @property
    def host_and_port(self) -> tuple[str, int]:
        match = _LISTEN.fullmatch(self.listen)
        assert match is not None
        return match["host"].strip("[]"), int(match["port"])

    def names(self) -> dict[str, str]:
        """Every name and alias, and the model it stands for."""
        return {word: name for name, model in self.models.items() for word in (name, *model.aliases)}


def _keys(value: object) -> object:
    if not isinstance(value, list):
        return value
    return tuple({"key": key} if isinstance(key, str) else key for key in value)


def _name_problem(config: ServeConfig) -> str:
    seen: dict[str, str] = {}
    for name, model in config.models.items():
        for word in (name, *model.aliases):
            if word in seen:
                return f"models.{name}: the name {word!r} is taken by models.{seen[word]}: names and `aliases` have to differ"
            seen[word] = name
        if model.engine != "remote" and INSTANCE_PATTERN.fullmatch(instance_name(name, 0)) is None:
            return f"models.{name}: the name becomes a file name: letters, digits, '.', '_' and '-', at most 36; use `aliases` for others"
    return ""


def _pool_problem(config: ServeConfig) -> str:
    owners: dict[tuple[str, str], str] = {}
    for name, model in config.models.items():
        for replica in range(model.replicas if model.engine != "remote" else 0):
            for what in (("pool", instance_name(name, replica)), ("log", server_name(name, model.replicas, replica))):
                if what in owners:
                    return f"models.{name}: the {what[0]} {what[1]!r} would be one of models.{owners[what]} too: replicas are numbered"
                owners[what] = name
    return ""


def _group_problem(config: ServeConfig) -> str:
    for name, model in config.models.items():
        mates = [mate for mate, other in config.models.items() if other.group == model.group and mate != name]
        if model.group is not None and mates and (model.pin or model.sleeps == "never"):
            key = "pin" if model.pin else "sleep"
            return f"models.{name}.{key}: it would keep models.{mates[0]}, of the same group, out for ever"
    return ""


def _key_problem(config: ServeConfig) -> str:
    for index, key in enumerate(config.api_keys):
        unknown = [name for name in key.models if name not in config.models]
        if unknown:
            return f"api_keys.{index}.models: there is no model {unknown[0]!r}"
    return ""


def _card_problem(config: ServeConfig) -> str:
    for name, model in config.models.items():
        if config.cards and model.card is not None and model.card not in config.cards:
            return f"models.{name}.card: {model.card} is not among `cards`"
    return ""


def instance_name(name: str, replica: int) -> str:
    """How the pool of a replica is called in `kvctl`."""
    return name if replica == 0 else f"{name}-{replica}"


def server_name(name: str, replicas: int, replica: int) -> str:
    """How the log of a replica is called, and its record."""
    return name if replicas == 1 else f"{name}-{replica}"


# ---------------------------------------------------------------------- reading


class _Loader(yaml.SafeLoader):
    """A key that is there twice is a mistake, and PyYAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = [key for key in keys if keys.count(key) > 1 and key != "<<"]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice[0]!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def load_config(path: Path) -> ServeConfig:
    """Read and check the file. Raises `SettingError` that names the file and the key, or the line where it is no YAML."""
    try:
        return parse_config(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} cannot be read: {error}") from None
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from None


def parse_config(text: str) -> ServeConfig:
    """The same, from text. Raises `SettingError`."""
    try:
        given = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2024-13-45
        raise SettingError(f"this is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict):
        raise SettingError("the file begins with `models:` and a name below it; see models.example.yaml")
    try:
        return ServeConfig.model_validate(given)
    except ValidationError as error:
        raise SettingError(_explain(error)) from None
    except RecursionError:
        raise SettingError("an anchor of the file contains itself") from None


def _explain(error: ValidationError) -> str:
    lines = [_sentence(detail["loc"], detail["type"], detail["msg"]) for detail in error.errors(include_url=False)]
    return "; ".join(dict.fromkeys(lines))


def _sentence(location: tuple[int | str, ...], kind: str, message: str) -> str:
    key = ".".join(str(part) for part in location if part != "[key]")
    if kind == "extra_forbidden":
        owner = ServeConfig if len(location) == 1 else Model if location[0] == "models" else ApiKey
        return f"{key}: there is no such key; allowed: {', '.join(owner.model_fields)}"
    text = message.removeprefix("Value error, ")
    return f"{key}: {text[0].lower()}{text[1:]}" if key else text


def json_schema() -> str:
    """For editors that check the file while it is written."""
    return json.dumps(ServeConfig.model_json_schema(), indent=2) + "\n"


def secret(text: str, environ: Mapping[str, str], key: str) -> str:
    """`text`, or what the variable says that it names with `env:`. Raises `SettingError` that names `key`."""
    if not text.startswith("env:"):
        return text
    value = environ.get(text[4:], "")
    if not value:
        raise SettingError(f"{key}: the variable {text[4:]} is not set")
    return value
