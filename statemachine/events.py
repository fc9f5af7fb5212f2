"""What happened: everything that can move the state machine, as plain data.

A `...Requested` event is a command that somebody sent. All other events report what the
engine or the surroundings did.
"""

from dataclasses import dataclass, field
from typing import Any

from statemachine.states import Mode, Tag

JsonMap = dict[str, Any]


@dataclass(frozen=True)
class Cause:
    """Who made a change: the verb (or `signal`, `outside`, `engine`), and the sender's own words."""

    verb: str
    id: str | None = None
    issuer: str | None = None


@dataclass(frozen=True)
class EngineView:
    """What the engine says of itself. Every worker has taken part in the answer.

    Attributes:
        scheduling: False from the moment a pause is in force, also while it still drains.
        asleep: tags whose memory is not resident, in the order of `Tag`.
        meta_parameters: some parameter is on the meta device: a weight session is open in a
            worker or ended badly.
        session_open: whether a worker has a weight session open; None where it cannot be told.
        weight_version: the engine's own label.
    """

    scheduling: bool
    asleep: tuple[Tag, ...] = ()
    meta_parameters: bool = False
    session_open: bool | None = None
    weight_version: str = "default"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A command.

    Attributes:
        ticket: names the command in the `Answer` effect; unique within one life.
        held: inference requests in flight when the command is judged.
    """

    ticket: int
    cause: Cause
    held: int = 0


@dataclass(frozen=True, kw_only=True)
class PauseRequested(Request):
    mode: Mode = Mode.ABORT
    clear_cache: bool = True


@dataclass(frozen=True, kw_only=True)
class ResumeRequested(Request):
    pass


@dataclass(frozen=True, kw_only=True)
class SleepRequested(Request):
    """level: 0 only stops scheduling, 1 keeps the weights in host memory, 2 discards them."""

    level: int = 1
    mode: Mode = Mode.ABORT


@dataclass(frozen=True, kw_only=True)
class WakeUpRequested(Request):
    """tags: what to wake, None for all; `scheduling` is a tag of vLLM's without memory behind it."""

    tags: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class InitTransferRequested(Request):
    init_info: JsonMap = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StartUpdateRequested(Request):
    """session: the identifier that the session gets if it opens."""

    session: str
    pause_mode: Mode = Mode.KEEP
    epoch: int | None = None


@dataclass(frozen=True, kw_only=True)
class UpdateWeightsRequested(Request):
    update_info: JsonMap | list[JsonMap] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FinishUpdateRequested(Request):
    """
    Attributes:
        weight_version: None stands for the session's identifier.
        incomplete: what was received falls short of the session's manifest, in words.
    """

    weight_version: str | None = None
    clear_cache: bool = True
    allow_empty: bool = False
    incomplete: str | None = None


@dataclass(frozen=True, kw_only=True)
class AbortUpdateRequested(Request):
    pass


@dataclass(frozen=True)
class EngineLoaded:
    """
    Attributes:
        weight_transfer: whether a weight-transfer backend is configured.
        stale: the component requires other weights than those that were loaded.
    """

    weight_transfer: bool = True
    stale: bool = False


@dataclass(frozen=True)
class WeightsStale:
    """The component requires a version that this instance does not have and cannot get now."""

    cause: Cause


@dataclass(frozen=True)
class EngineDied:
    """The engine can never answer again, or never started."""

    reason: str


@dataclass(frozen=True)
class EngineUnresponsive:
    """The engine was asked and did not answer in time."""

    reason: str = "wedged"


@dataclass(frozen=True)
class CallSucceeded:
    """number: of the `Call` effect; view: the answer, if the call was a question."""

    number: int
    view: EngineView | None = None


@dataclass(frozen=True)
class CallFailed:
    number: int
    message: str
    timed_out: bool = False


@dataclass(frozen=True)
class Observed:
    """The answer to the periodic question.

    Attributes:
        generation: `Lifecycle.generation` when the question was asked; an answer from before the
            start of a command is thrown away.
        at_s: monotonic reading in seconds.
    """

    generation: int
    view: EngineView
    at_s: float


@dataclass(frozen=True)
class DrainCut:
    """An abort pause arrived behind a drain that runs: its requests end now."""

    cause: Cause


@dataclass(frozen=True)
class LeaseExpired:
    """A trainer has shown no sign of life for too long, or a later one has taken over.

    Attributes:
        session: the session that ends; None for a pause.
    """

    cause: Cause
    session: str | None = None


@dataclass(frozen=True)
class ShutdownRequested:
    cause: Cause


@dataclass(frozen=True)
class StageBegan:
    """The shutdown has come to this stage; None when the last one has ended."""

    stage: str | None


@dataclass(frozen=True)
class Stopped:
    """Everything is gone but the bus."""


Command = (
    PauseRequested
    | ResumeRequested
    | SleepRequested
    | WakeUpRequested
    | InitTransferRequested
    | StartUpdateRequested
    | UpdateWeightsRequested
    | FinishUpdateRequested
    | AbortUpdateRequested
)

Event = (
    Command
    | EngineLoaded
    | WeightsStale
    | EngineDied
    | EngineUnresponsive
    | CallSucceeded
    | CallFailed
    | Observed
    | DrainCut
    | LeaseExpired
    | ShutdownRequested
    | StageBegan
    | Stopped
)
