"""What must be done: the state machine's orders, as plain data, in the order to carry them out."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from statemachine.events import Cause, JsonMap
from statemachine.states import Admission, Mode, Origin, Phase, State, Tag

# --- engine calls -----------------------------------------------------------------------------


@dataclass(frozen=True)
class PauseEngine:
    mode: Mode
    clear_cache: bool


@dataclass(frozen=True)
class ResumeEngine:
    pass


@dataclass(frozen=True)
class SleepEngine:
    level: int
    mode: Mode


@dataclass(frozen=True)
class WakeEngine:
    """Makes memory resident and never schedules."""

    tags: tuple[Tag, ...]


@dataclass(frozen=True)
class InitTransfer:
    init_info: JsonMap


@dataclass(frozen=True)
class StartUpdate:
    pass


@dataclass(frozen=True)
class LoadChunk:
    update_info: JsonMap | list[JsonMap]


@dataclass(frozen=True)
class FinishUpdate:
    pass


@dataclass(frozen=True)
class SetVersion:
    version: str


@dataclass(frozen=True)
class ResetCaches:
    pass


@dataclass(frozen=True)
class AskEngine:
    """Ask until the engine answers; no answer ends in `EngineUnresponsive`, never in `CallFailed`.

    timed_out: the question follows a call that timed out, which has a longer limit.
    """

    timed_out: bool = False


EngineCall = (
    PauseEngine
    | ResumeEngine
    | SleepEngine
    | WakeEngine
    | InitTransfer
    | StartUpdate
    | LoadChunk
    | FinishUpdate
    | SetVersion
    | ResetCaches
    | AskEngine
)

# --- what others see --------------------------------------------------------------------------


@dataclass(frozen=True)
class Paused:
    mode: Mode
    by: tuple[Origin, ...]


@dataclass(frozen=True)
class Sleeping:
    level: int
    asleep: tuple[Tag, ...]


@dataclass(frozen=True)
class UpdateInfo:
    phase: Phase
    session: str | None = None
    owner: str | None = None
    chunks: int = 0


@dataclass(frozen=True)
class Weights:
    version: str = "default"
    epoch: int | None = None
    good: bool = True


@dataclass(frozen=True)
class Running:
    """The operation that runs."""

    verb: str
    id: str | None


@dataclass(frozen=True)
class Picture:
    """All that the state machine has to say to others at one moment."""

    state: State
    settled: bool
    ready: bool
    live: bool
    reasons: tuple[str, ...] = ()
    paused: Paused | None = None
    sleep: Sleeping | None = None
    weight_update: UpdateInfo | None = None
    weights: Weights = field(default_factory=Weights)
    operation: Running | None = None


# --- effects ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShowHealth:
    """statuses: every health name, True for SERVING."""

    statuses: dict[str, bool]


@dataclass(frozen=True)
class LeaveDiscovery:
    pass


@dataclass(frozen=True)
class JoinDiscovery:
    weight_version: str = "default"


@dataclass(frozen=True)
class Admit:
    """What happens to inference requests from now on.

    Attributes:
        reason: told to those who are refused.
        end_held: requests that are held or frozen end now with the retryable error.
        code: of that error, where it is not the one of the admission.
    """

    admission: Admission
    reason: str = ""
    end_held: bool = False
    code: str = ""


@dataclass(frozen=True)
class Publish:
    picture: Picture
    cause: Cause | None


@dataclass(frozen=True)
class Call:
    """Its end comes back as `CallSucceeded` or `CallFailed` with this number."""

    number: int
    call: EngineCall
    after_s: float = 0.0


@dataclass(frozen=True)
class CutDrain:
    """End every request in the engine, so that the drain that runs can end."""


@dataclass(frozen=True)
class Answer:
    """The one answer to the command with this ticket.

    called: the engine was called for it (decides whether its id is remembered).
    code: None when it ended well.
    """

    ticket: int
    changed: bool = False
    code: str | None = None
    message: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    called: bool = False


class Drain(Enum):
    """How the requests in flight are ended when the instance goes away."""

    RUN = "run"
    """They run: wait for them."""
    RESUME = "resume"
    """They are frozen and the weights are good: resume, then wait."""
    END = "end"
    """Nothing may run: end them with the retryable error."""
    SKIP = "skip"
    """The engine is gone or was never there."""


@dataclass(frozen=True)
class BeginShutdown:
    drain: Drain


@dataclass(frozen=True)
class BeginFailure:
    """The engine is lost: linger, clean up, exit with 1."""

    reason: str


Effect = (
    ShowHealth
    | LeaveDiscovery
    | JoinDiscovery
    | Admit
    | Publish
    | Call
    | CutDrain
    | Answer
    | BeginShutdown
    | BeginFailure
)
