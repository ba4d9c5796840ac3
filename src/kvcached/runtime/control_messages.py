# SPDX-License-Identifier: Apache-2.0
"""What a pool's control endpoint understands, and how it lies on the wire.

A message is four bytes of length (big-endian, at most 64 KiB) and JSON: `{"v": 1, "request": {"op": ...}}`, answered by
`{"v": 1, "answer": {...}}` or `{"v": 1, "error": {"type": ..., "message": ...}}`.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Annotated, Final, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvcached.errors import HandshakeMismatch, Misuse, PeerLost, PeerTimeout

if TYPE_CHECKING:
    import socket

PROTOCOL: Final = 1
MAX_MESSAGE_BYTES: Final = 64 * 1024
_LENGTH: Final = struct.Struct(">I")
_Bytes = Annotated[int, Field(ge=0, lt=2**63)]


class Answer(BaseModel):
    """What an operation returns. Sizes are in bytes. Fields that a newer version adds are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class Pong(Answer):
    protocol: int
    version: str
    instance: str
    pid: int


class PoolStatus(Answer):
    """A pool at one moment. `held_bytes` is what the lease must cover; `state`: `ok`, `over`, `short` or `refusing`; `reason`: why."""

    instance: str
    name: str = ""
    pid: int = 0
    card: str = ""
    state: str = "ok"
    reason: str = ""
    budget_bytes: int = 0
    capacity_bytes: int = 0
    page_bytes: int = 0
    block_bytes: int = 0
    lease_bytes: int = 0
    held_bytes: int = 0
    limit_bytes: int = 0
    limit_revision: int = 0
    floor_bytes: int = 0
    weight: float = 1.0
    owned_bytes: int = 0
    cached_bytes: int = 0
    parked_bytes: int = 0
    retired_bytes: int = 0
    mapped_bytes: int = 0
    longest_request_tokens: int = 0  # most that the pool can ever hold of one request; 0: not known


class ChangeAnswer(Answer):
    """What became of a new limit or floor.

    `applied`: in force, nothing above it. `deferred`: in force, but `overage_bytes` are still held and go as they fall free.
    `clamped`: cut to what is possible. `stale`: a later revision is in force already. `rejected`: nothing changed, see `reason`.
    """

    outcome: Literal["applied", "deferred", "clamped", "stale", "rejected"]
    asked_bytes: int
    in_force_bytes: int
    overage_bytes: int = 0
    revision: int = 0
    reason: str = ""


class WeightAnswer(Answer):
    weight: float


class BytesAnswer(Answer):
    """Bytes given back to the card by this call."""

    given_bytes: int


class ExplainRow(Answer):
    """`size_bytes` are held because of `reason`; `freed_by` says what would free them, `detail` which pages they are and why, if known."""

    reason: str
    size_bytes: int
    freed_by: str = ""
    detail: str = ""


class Explanation(Answer):
    rows: tuple[ExplainRow, ...] = Field(strict=False)


_Numbers = Annotated[tuple[int, ...], Field(strict=False)]


class RankMetrics(Answer):
    """How long a rank's work took so far, as `kvcached.core.tally.Numbers`."""

    lease: _Numbers = ()
    map: _Numbers = ()
    unmap: _Numbers = ()
    step: _Numbers = ()


class PoolMetrics(Answer):
    """What has happened to a pool since it was opened: `kvcached.core.tally.Tally`. `ranks` is empty when not all have answered."""

    refusing: bool = False
    page_bytes: int = 0
    block_bytes: int = 0
    misses: int = 0
    preemptions: int = 0
    avoidable_preemptions: int = 0
    refusals: int = 0
    presses: int = 0
    taken_bytes: int = 0
    given_bytes: int = 0
    evicted_blocks: dict[str, int] = Field(default_factory=dict)
    waits: _Numbers = ()
    ranks: Annotated[tuple[RankMetrics, ...], Field(strict=False)] = ()


class PoolControl(Protocol):
    """What a pool offers to the outside. Called from the endpoint's threads, several at a time.

    Each call bounds its own waiting (`PeerTimeout` if it cannot act in time) and raises `KVCachedError`s only.
    """

    def status(self) -> PoolStatus: ...

    def metrics(self) -> PoolMetrics:
        """Waits for no engine: one that is inside a step is counted too."""

    def limit(self, limit_bytes: int, revision: int | None = None) -> ChangeAnswer:
        """Let the pool hold at most `limit_bytes`. With a `revision`, an answer to an older one than is in force is `stale`."""

    def floor(self, floor_bytes: int) -> ChangeAnswer:
        """What the others must leave to this pool."""

    def weight(self, weight: float) -> WeightAnswer:
        """This pool's part of contended memory, 0.001 to 1000."""

    def trim(self, size_bytes: int | None = None) -> BytesAnswer:
        """Give back up to `size_bytes` (None: all) of parked pages and kept handles."""

    def evict(self, size_bytes: int) -> BytesAnswer:
        """Drop cached blocks, cheapest first, until `size_bytes` are given back or no cached block is left."""

    def explain(self) -> Explanation:
        """For each held byte the reason."""

    def pressure(self, wanted_bytes: int) -> BytesAnswer:
        """Another pool of the card lacks `wanted_bytes`: give back what is parked."""


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class PingRequest(_Request):
    """Answered by the endpoint itself, even when the pool cannot answer."""

    op: Literal["ping"] = "ping"


class StatusRequest(_Request):
    op: Literal["status"] = "status"

    def perform(self, pool: PoolControl) -> Answer:
        return pool.status()


class MetricsRequest(_Request):
    op: Literal["metrics"] = "metrics"

    def perform(self, pool: PoolControl) -> Answer:
        return pool.metrics()


class LimitRequest(_Request):
    op: Literal["limit"] = "limit"
    limit_bytes: _Bytes
    revision: _Bytes | None = None

    def perform(self, pool: PoolControl) -> Answer:
        return pool.limit(self.limit_bytes, self.revision)


class FloorRequest(_Request):
    op: Literal["floor"] = "floor"
    floor_bytes: _Bytes

    def perform(self, pool: PoolControl) -> Answer:
        return pool.floor(self.floor_bytes)


class WeightRequest(_Request):
    op: Literal["weight"] = "weight"
    weight: float = Field(ge=0.001, le=1000)

    def perform(self, pool: PoolControl) -> Answer:
        return pool.weight(self.weight)


class TrimRequest(_Request):
    op: Literal["trim"] = "trim"
    size_bytes: _Bytes | None = None

    def perform(self, pool: PoolControl) -> Answer:
        return pool.trim(self.size_bytes)


class EvictRequest(_Request):
    op: Literal["evict"] = "evict"
    size_bytes: _Bytes

    def perform(self, pool: PoolControl) -> Answer:
        return pool.evict(self.size_bytes)


class ExplainRequest(_Request):
    op: Literal["explain"] = "explain"

    def perform(self, pool: PoolControl) -> Answer:
        return pool.explain()


class PressureRequest(_Request):
    op: Literal["pressure"] = "pressure"
    wanted_bytes: _Bytes

    def perform(self, pool: PoolControl) -> Answer:
        return pool.pressure(self.wanted_bytes)


PoolRequest = (
    StatusRequest
    | MetricsRequest
    | LimitRequest
    | FloorRequest
    | WeightRequest
    | TrimRequest
    | EvictRequest
    | ExplainRequest
    | PressureRequest
)
Request = PingRequest | PoolRequest
A = TypeVar("A", bound=Answer)


class Failure(BaseModel):
    """Why there is no answer: the name of the error's class, and its message."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    type: str
    message: str


class _Head(BaseModel):
    v: int


class _RequestFrame(BaseModel):
    model_config = ConfigDict(extra="forbid")
    v: int
    request: Annotated[Request, Field(discriminator="op")]


class _FailureFrame(BaseModel):
    error: Failure


def encode_request(request: Request) -> bytes:
    return _frame(_RequestFrame(v=PROTOCOL, request=request).model_dump_json())


def decode_request(payload: bytes) -> Request:
    """Raises `HandshakeMismatch` for another protocol version, `Misuse` for anything that is not a request."""
    try:
        version = _Head.model_validate_json(payload).v
        if version != PROTOCOL:
            raise HandshakeMismatch(f"this endpoint speaks protocol {PROTOCOL}, the request is of protocol {version}")
        return _RequestFrame.model_validate_json(payload).request
    except ValidationError as error:
        raise Misuse(f"not a request: {_first(error)}") from None


def encode_answer(answer: Answer | Failure) -> bytes:
    """Raises `Misuse` when the answer is longer than a message may be."""
    kind = "error" if isinstance(answer, Failure) else "answer"
    return _frame(f'{{"v": {PROTOCOL}, "{kind}": {answer.model_dump_json()}}}')


def decode_answer(payload: bytes, answer_type: type[A]) -> A | Failure:
    """Raises `HandshakeMismatch` for another protocol version and for what is no answer of `answer_type`."""
    try:
        version = _Head.model_validate_json(payload).v
        if version != PROTOCOL:
            raise HandshakeMismatch(f"the endpoint speaks protocol {version}, this is protocol {PROTOCOL}; update the older one")
        frame = TypeAdapter(dict[str, object]).validate_json(payload)
        if "error" in frame:
            return _FailureFrame.model_validate(frame).error
        return answer_type.model_validate(frame.get("answer"))
    except ValidationError as error:
        raise HandshakeMismatch(f"the answer is not understood: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]


def _frame(text: str) -> bytes:
    payload = text.encode()
    if len(payload) > MAX_MESSAGE_BYTES:
        raise Misuse(f"a message of {len(payload)} bytes is longer than {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


class Deadline:
    """A moment that all waiting of one exchange shares."""

    def __init__(self, timeout_s: float, complaint: str = "no complete message within the deadline") -> None:
        self._at_s = time.monotonic() + timeout_s
        self._complaint = complaint

    def left_s(self) -> float:
        """Seconds left, above 0. Raises `PeerTimeout` when there are none."""
        left_s = self._at_s - time.monotonic()
        if left_s <= 0:
            raise PeerTimeout(self._complaint)
        return left_s


def send_frame(connection: socket.socket, frame: bytes, deadline: Deadline) -> None:
    """Raises `PeerTimeout`, `PeerLost`."""
    try:
        connection.settimeout(deadline.left_s())
        connection.sendall(frame)
    except TimeoutError:
        raise PeerTimeout("the peer did not take the message within the deadline") from None
    except OSError as error:
        raise PeerLost(f"the peer closed the connection: {error}") from error


def receive_frame(connection: socket.socket, deadline: Deadline) -> bytes:
    """The JSON of one message. Raises `PeerTimeout`, `PeerLost`, and `HandshakeMismatch` for a length that no message has."""
    (size,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size, deadline))
    if size > MAX_MESSAGE_BYTES:
        raise HandshakeMismatch(f"a message of {size} bytes is longer than {MAX_MESSAGE_BYTES}")
    return _receive_exactly(connection, size, deadline)


def _receive_exactly(connection: socket.socket, size: int, deadline: Deadline) -> bytes:
    received = bytearray()
    while len(received) < size:
        connection.settimeout(deadline.left_s())
        try:
            chunk = connection.recv(size - len(received))
        except TimeoutError:
            raise PeerTimeout("no complete message within the deadline") from None
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from error
        if not chunk:
            raise PeerLost("the peer closed the connection before its message was complete")
        received += chunk
    return bytes(received)
