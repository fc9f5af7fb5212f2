"""Wire types: what may be sent, what is answered, what is published.

What arrives from others as a command is checked strictly (`parse_args`); what instances publish is
read leniently, so that an older reader understands a newer instance. Times are UNIX seconds.
"""

import math
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

Mode: TypeAlias = Literal["abort", "wait", "keep"]
WakeTag: TypeAlias = Literal["weights", "kv_cache", "scheduling"]
CacheRule: TypeAlias = Literal["clear", "keep"]
JsonMap: TypeAlias = dict[str, Any]
UpdateInfo: TypeAlias = JsonMap | Annotated[list[JsonMap], Meta(min_length=1)]

Text: TypeAlias = Annotated[str, Meta(max_length=1024)]
Label: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0)]


class Verb(StrEnum):
    """The last word of a control subject."""

    PAUSE = "pause"
    RESUME = "resume"
    SLEEP = "sleep"
    WAKE_UP = "wake_up"
    INIT_WEIGHT_TRANSFER = "init_weight_transfer"
    START_WEIGHT_UPDATE = "start_weight_update"
    UPDATE_WEIGHTS = "update_weights"
    FINISH_WEIGHT_UPDATE = "finish_weight_update"
    ABORT_WEIGHT_UPDATE = "abort_weight_update"
    STATUS = "status"
    SHUTDOWN = "shutdown"
    SIMULATE = "simulate"


class StateName(StrEnum):
    """The states on the wire. A snapshot carries a plain string, for readers of a later version."""

    STARTING = "starting"
    SERVING = "serving"
    PAUSED = "paused"
    ASLEEP = "asleep"
    PARTIALLY_AWAKE = "partially_awake"
    WEIGHT_UPDATE = "weight_update"
    FAILED = "failed"
    SHUTTING_DOWN = "shutting_down"
    STOPPED = "stopped"


class ErrorCode(StrEnum):
    """Why a command was refused or failed."""

    INVALID_MESSAGE = "invalid_message"
    INVALID_ARGUMENT = "invalid_argument"
    UNKNOWN_VERB = "unknown_verb"
    INVALID_STATE = "invalid_state"
    WEIGHT_UPDATE_OPEN = "weight_update_open"
    WEIGHTS_NOT_READY = "weights_not_ready"
    EMPTY_WEIGHT_UPDATE = "empty_weight_update"
    INCOMPLETE_WEIGHT_UPDATE = "incomplete_weight_update"
    SESSION_MISMATCH = "session_mismatch"
    LEASE_EXPIRED = "lease_expired"
    STALE_EPOCH = "stale_epoch"
    NOT_READY = "not_ready"
    BUSY = "busy"
    SHUTTING_DOWN = "shutting_down"
    ENGINE_FAILED = "engine_failed"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    ENGINE_TIMEOUT = "engine_timeout"
    ENGINE_ERROR = "engine_error"
    INTERNAL = "internal"

    @property
    def retryable(self) -> bool:
        """Whether the same command may succeed later, or on another instance."""
        return self in _RETRYABLE

    @property
    def http_status(self) -> int:
        return _TRANSPORTS[self][0]

    @property
    def grpc_status(self) -> str:
        """The name of the gRPC status code."""
        return _TRANSPORTS[self][1]


_RETRYABLE = {
    ErrorCode.NOT_READY,
    ErrorCode.BUSY,
    ErrorCode.ENGINE_TIMEOUT,
    ErrorCode.SHUTTING_DOWN,
    ErrorCode.ENGINE_FAILED,
}

_TRANSPORTS: dict[ErrorCode, tuple[int, str]] = {
    **dict.fromkeys(
        (ErrorCode.INVALID_MESSAGE, ErrorCode.INVALID_ARGUMENT, ErrorCode.UNKNOWN_VERB),
        (400, "INVALID_ARGUMENT"),
    ),
    **dict.fromkeys(
        (
            ErrorCode.INVALID_STATE,
            ErrorCode.WEIGHT_UPDATE_OPEN,
            ErrorCode.WEIGHTS_NOT_READY,
            ErrorCode.EMPTY_WEIGHT_UPDATE,
            ErrorCode.INCOMPLETE_WEIGHT_UPDATE,
            ErrorCode.SESSION_MISMATCH,
            ErrorCode.LEASE_EXPIRED,
            ErrorCode.STALE_EPOCH,
        ),
        (409, "FAILED_PRECONDITION"),
    ),
    **dict.fromkeys(
        (ErrorCode.NOT_READY, ErrorCode.BUSY, ErrorCode.SHUTTING_DOWN, ErrorCode.ENGINE_FAILED),
        (503, "UNAVAILABLE"),
    ),
    **dict.fromkeys((ErrorCode.DEADLINE_EXCEEDED, ErrorCode.ENGINE_TIMEOUT), (504, "DEADLINE_EXCEEDED")),
    **dict.fromkeys((ErrorCode.ENGINE_ERROR, ErrorCode.INTERNAL), (500, "INTERNAL")),
}


class BadArguments(Exception):
    """The sender's `args` are not what the verb takes; the text names the argument."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What a control message holds, before its verb has been looked at.

    Attributes:
        id: idempotency key, per verb and incarnation; never empty.
        deadline: not started after it.
    """

    id: Label | None = None
    issuer: Text | None = None
    epoch: Int64 | None = None
    session: Text | None = None
    deadline: float | None = None
    args: JsonMap = {}

    def __post_init__(self) -> None:
        _check_finite(self, "deadline")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a weight update must have received when it is finished.

    Attributes:
        parameters: how many distinct tensors.
        names_sha256: of their names, sorted, joined by newlines, UTF-8.
        chunks: how many `update_weights` calls.
    """

    parameters: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    names_sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    chunks: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


class Args(msgspec.Struct, frozen=True, kw_only=True):
    """What a verb takes. Unknown fields are ignored, wrong types refused."""


class PauseArgs(Args, frozen=True, kw_only=True):
    mode: Mode = "abort"
    clear_cache: bool = True
    lease_s: Seconds | None = None

    def __post_init__(self) -> None:
        _check_finite(self, "lease_s")


class ResumeArgs(Args, frozen=True, kw_only=True):
    pass


class SleepArgs(Args, frozen=True, kw_only=True):
    """
    Attributes:
        level: 0 only stops scheduling, 1 keeps the weights in host memory, 2 discards them;
            1 and 2 drop the KV cache (vLLM, docs/features/sleep_mode.md).
    """

    level: Annotated[int, Meta(ge=0, le=2)] = 1
    mode: Mode = "abort"


class WakeUpArgs(Args, frozen=True, kw_only=True):
    """
    Attributes:
        tags: None for all.
    """

    tags: list[WakeTag] | None = None


class InitWeightTransferArgs(Args, frozen=True, kw_only=True):
    """
    Attributes:
        init_s: how long it may take; None for the instance's own limit.
    """

    init_info: JsonMap
    init_s: Seconds | None = None

    def __post_init__(self) -> None:
        _check_finite(self, "init_s")


class StartWeightUpdateArgs(Args, frozen=True, kw_only=True):
    """
    Attributes:
        start_s, chunk_s, finish_s: how long the start, each chunk and the finish may take; None for
            the instance's own limits.
    """

    pause_mode: Mode = "keep"
    lease_s: Seconds | None = None
    manifest: Manifest | None = None
    start_s: Seconds | None = None
    chunk_s: Seconds | None = None
    finish_s: Seconds | None = None

    def __post_init__(self) -> None:
        for name in ("lease_s", "start_s", "chunk_s", "finish_s"):
            _check_finite(self, name)


class UpdateWeightsArgs(Args, frozen=True, kw_only=True):
    """
    Attributes:
        update_info: one map, or one for each worker rank; one chunk in either case.
    """

    update_info: UpdateInfo


class FinishWeightUpdateArgs(Args, frozen=True, kw_only=True):
    """
    Attributes:
        weight_version: None stands for the session id.
        allow_empty: the trainer declares that the weights came another way.
    """

    weight_version: Label | None = None
    cache: CacheRule = "clear"
    allow_empty: bool = False


class AbortWeightUpdateArgs(Args, frozen=True, kw_only=True):
    pass


class StatusArgs(Args, frozen=True, kw_only=True):
    """
    Attributes:
        verb, id: of the command whose remembered reply is wanted.
    """

    verb: Text | None = None
    id: Text | None = None


class ShutdownArgs(Args, frozen=True, kw_only=True):
    pass


SimulatedCall: TypeAlias = Literal[
    "now",
    "pause",
    "resume",
    "sleep",
    "wake_up",
    "init_weight_transfer",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "ask",
    "shutdown",
]
_AT_ONCE = ("die", "hang", "pause_out_of_band", "resume_out_of_band", "refuse", "admit", "cut")
_AT_A_CALL = ("error", "hang", "delay", "die")


class SimulateArgs(Args, frozen=True, kw_only=True):
    """What the simulated engine shall do at the next calls of a kind, or at once.

    Attributes:
        call: `now`, or the name of an engine call.
        times: at how many such calls; one if it is not given.
    """

    call: SimulatedCall
    outcome: Literal[
        "error", "hang", "delay", "die", "pause_out_of_band", "resume_out_of_band", "refuse", "admit", "cut"
    ]
    delay_s: Annotated[float, Meta(ge=0)] | None = None
    times: Annotated[int, Meta(ge=1, le=2**31)] | None = None

    def __post_init__(self) -> None:
        _check_finite(self, "delay_s")
        allowed = _AT_ONCE if self.call == "now" else _AT_A_CALL
        if self.outcome not in allowed:
            raise ValueError(f"outcome {self.outcome!r} does not go with call {self.call!r}")
        if self.outcome == "delay" and self.delay_s is None:
            raise ValueError("outcome 'delay' needs delay_s")


ARGS: dict[Verb, type[Args]] = {
    Verb.PAUSE: PauseArgs,
    Verb.RESUME: ResumeArgs,
    Verb.SLEEP: SleepArgs,
    Verb.WAKE_UP: WakeUpArgs,
    Verb.INIT_WEIGHT_TRANSFER: InitWeightTransferArgs,
    Verb.START_WEIGHT_UPDATE: StartWeightUpdateArgs,
    Verb.UPDATE_WEIGHTS: UpdateWeightsArgs,
    Verb.FINISH_WEIGHT_UPDATE: FinishWeightUpdateArgs,
    Verb.ABORT_WEIGHT_UPDATE: AbortWeightUpdateArgs,
    Verb.STATUS: StatusArgs,
    Verb.SHUTDOWN: ShutdownArgs,
    Verb.SIMULATE: SimulateArgs,
}


def parse_args(verb: Verb, raw: JsonMap) -> Args:
    """What `verb` was asked to do: an object of the type `ARGS[verb]`.

    Strict about values (no bool or float for an int; an int is a float), lenient about unknown keys.

    Raises:
        BadArguments: and never anything else.
    """
    try:
        return msgspec.convert(raw, ARGS[verb])
    except msgspec.ValidationError as error:
        raise BadArguments(describe(error, "args")) from None
    except RecursionError:
        raise BadArguments("args are nested too deeply") from None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        code: an `ErrorCode`; a plain string, since a later version may have more of them.
    """

    code: str
    message: str = ""
    retryable: bool = False


class Paused(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        mode: of the stop in force: keep, wait, abort or unknown.
        by: who stopped scheduling: command, sleep, update, outside.
    """

    mode: str
    by: list[str]
    lease_expires: float | None = None


class Sleep(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        asleep: tags whose memory is not resident, weights before kv_cache.
    """

    level: int
    asleep: list[str]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a chunk is that loads now.

    Attributes:
        seconds: since it was dispatched.
        bytes: of the chunks loaded before it, where known.
    """

    seconds: float
    bytes: int | None = None


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        owner: issuer of the start.
        progress: while a chunk loads.
    """

    phase: str
    session: str | None = None
    owner: str | None = None
    chunks: int = 0
    since: float | None = None
    lease_expires: float | None = None
    progress: Progress | None = None


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        version: the last committed one.
    """

    version: str = "default"
    epoch: int | None = None
    good: bool = True


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """The command whose engine call runs."""

    verb: str
    id: str | None = None
    since: float


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """What led to this state: a verb, or the name of something that happened by itself."""

    verb: str
    id: str | None = None
    issuer: str | None = None


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    version: str | None = None


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """`host:port` each."""

    grpc: str | None = None
    http: str | None = None
    admin: str | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All that an instance says of itself. On the wire every field is present.

    Attributes:
        seq: from 1 in each incarnation, one more at each change.
        live: unless the engine failed.
        settled: no call runs or is unknown; memory is free only if asleep *and* settled.
        reasons: why it is not ready.
    """

    v: int = 1
    namespace: str
    component: str
    instance: str
    incarnation: str
    seq: int
    time: float
    state: str
    previous: str | None = None
    ready: bool
    live: bool
    settled: bool
    reasons: list[str] = []
    paused: Paused | None = None
    sleep: Sleep | None = None
    weight_update: WeightUpdate | None = None
    weights: Weights = Weights()
    in_flight: int = 0
    operation: Operation | None = None
    cause: Cause | None = None
    role: str = "aggregated"
    model: str | None = None
    engine: Engine | None = None
    addresses: Addresses = Addresses()


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a command, sent when it has ended."""

    id: str | None = None
    instance: str
    incarnation: str
    ok: bool
    changed: bool = False
    duplicate: bool = False
    error: ErrorBody | None = None
    result: JsonMap | None = None
    state: Snapshot | None = None
    queued_ms: float = 0.0
    engine_ms: float = 0.0


class Transport(msgspec.Struct, frozen=True, kw_only=True):
    """`host:port` each, as others reach them."""

    http: str | None = None
    grpc: str | None = None


class InstanceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A discovery entry: it is there exactly while the instance may be sent requests."""

    v: int = 1
    namespace: str
    component: str
    endpoint: str
    instance: str
    incarnation: str
    model: str | None = None
    role: str = "aggregated"
    transport: Transport = Transport()
    weight_version: str = "default"
    max_model_len: int | None = None


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """A weight version that every instance of a component shall apply by itself."""

    id: Label
    epoch: Int64
    version: Label
    updates: list[UpdateInfo]
    init_info: JsonMap | None = None
    cache: CacheRule = "clear"
    pause_mode: Mode = "keep"
    manifest: Manifest | None = None
    issuer: Text | None = None
    lease_s: Seconds | None = None

    def __post_init__(self) -> None:
        _check_finite(self, "lease_s")


def describe(error: msgspec.ValidationError, root: str) -> str:
    """The text of a validation error with the field named first: `args.level: expected …`."""
    text, _, path = str(error).rpartition(" - at ")
    if not text:
        return f"{root}: {error}" if root else str(error)
    path = path.strip("`").removeprefix("key` in `").replace("`", "").replace("$", root, 1).lstrip(".")
    text = text[:1].lower() + text[1:]
    return f"{path}: {text}" if path else text


def _check_finite(struct: msgspec.Struct, name: str) -> None:
    value = getattr(struct, name)
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number")
