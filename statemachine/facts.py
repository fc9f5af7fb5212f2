"""What is known of the engine, and what follows from it."""

from dataclasses import dataclass, replace
from enum import Enum

from statemachine.states import Mode, Origin, Phase, State, Tag

ALL_TAGS = tuple(Tag)


@dataclass(frozen=True)
class Session:
    """A weight-update session.

    Attributes:
        bad_before: what was wrong with the weights when it opened; an undo returns to it.
        loading: a chunk was dispatched.
        finished: the engine has finished; what remains of the finish is ours.
        version_set, caches_reset: steps of the finish that are done.
    """

    id: str
    owner: str | None = None
    epoch: int | None = None
    bad_before: Phase | None = None
    loading: bool = False
    chunks: int = 0
    finished: bool = False
    version_set: str | None = None
    caches_reset: bool = False


@dataclass(frozen=True)
class Facts:
    """The engine as last confirmed, and what was asked of it.

    Attributes:
        stage: how far the shutdown has come.
        scheduling: the engine's scheduler runs.
        stops: who asked for scheduling to stop, oldest first; one place per origin.
        stop_mode: the strongest mode of the stops made since scheduling last ran.
        sleep_level: of the sleep in force, also while partly awake.
        asleep: tags whose memory is not resident.
        bad: why the weights are not fit to serve outside of a session.
        last_session: the session that left the weights bad.
    """

    loaded: bool = False
    failure: str | None = None
    closing: bool = False
    stage: str | None = None
    stopped: bool = False
    weight_transfer: bool = True
    scheduling: bool = True
    stops: tuple[Origin, ...] = ()
    stop_mode: Mode | None = None
    sleep_level: int | None = None
    asleep: tuple[Tag, ...] = ()
    session: Session | None = None
    bad: Phase | None = None
    last_session: Session | None = None
    version: str = "default"
    epoch: int | None = None

    @property
    def good(self) -> bool:
        return self.session is None and self.bad is None

    @property
    def may_schedule(self) -> bool:
        """All memory is resident and the weights are good; whether anybody stopped it is another matter."""
        return not self.asleep and self.good

    @property
    def wants_scheduling(self) -> bool:
        return self.may_schedule and not self.stops

    def with_stop(self, origin: Origin) -> "Facts":
        """Adds an origin. A sleep comes last: it is the newest stop whenever memory is released."""
        others = tuple(o for o in self.stops if o is not origin)
        if origin in self.stops and origin is not Origin.SLEEP:
            return self
        return replace(self, stops=(*others, origin))

    def without_stop(self, origin: Origin) -> "Facts":
        return replace(self, stops=tuple(o for o in self.stops if o is not origin))

    def fully_woken(self) -> "Facts":
        """All memory is back: the sleep is over, and with it the stops older than it.

        The stop of a session, also of one that ended badly, is not a pause that anybody can end by
        waking up: it goes with a good finish or an undo.
        """
        newer = self.stops
        if Origin.SLEEP in self.stops:
            newer = self.stops[self.stops.index(Origin.SLEEP) + 1 :]
            if Origin.UPDATE in self.stops and Origin.UPDATE not in newer and not self.good:
                newer = (Origin.UPDATE, *newer)
        return replace(self, stops=newer, asleep=(), sleep_level=None)


AVAILABILITY = (
    State.WEIGHT_UPDATE,
    State.ASLEEP,
    State.PARTIALLY_AWAKE,
    State.PAUSED,
    State.SERVING,
)
"""The states of a living engine, from the least available."""


def less_available(one: State, other: State) -> State:
    """The less available of two states; one outside the order wins over one inside it."""
    if one not in AVAILABILITY:
        return one
    if other not in AVAILABILITY:
        return other
    return AVAILABILITY[min(AVAILABILITY.index(one), AVAILABILITY.index(other))]


def shown(facts: Facts) -> State:
    """The state that these facts make, first match."""
    if facts.stopped:
        return State.STOPPED
    if facts.closing:
        return State.SHUTTING_DOWN
    if facts.failure is not None:
        return State.FAILED
    if not facts.loaded:
        return State.STARTING
    if facts.session is not None:
        return State.WEIGHT_UPDATE
    if facts.asleep:
        return State.ASLEEP if len(facts.asleep) == len(ALL_TAGS) else State.PARTIALLY_AWAKE
    if facts.bad is not None:
        return State.WEIGHT_UPDATE
    if facts.stops or not facts.scheduling:
        return State.PAUSED
    return State.SERVING


class Situation(Enum):
    """A row of the verb table: the state shown, and what else a verb depends on."""

    STARTING = "starting"
    SERVING = "serving"
    PAUSED_KEEP = "paused, keep"
    PAUSED = "paused, wait or abort"
    PAUSED_BY_SLEEP = "paused by sleep 0"
    PAUSED_OUTSIDE = "paused from outside"
    ASLEEP = "asleep, weights good"
    ASLEEP_BAD = "asleep, level 2 or weights bad"
    PARTIAL = "partial, weights in, good"
    PARTIAL_BAD = "partial, weights in, bad"
    PARTIAL_KV_ONLY = "partial, only kv_cache in"
    OPEN = "weight_update, open"
    LOADING = "weight_update, loading"
    FINISHED = "weight_update, engine finished"
    BAD = "weight_update, tainted / discarded / stale"
    FAILED = "failed"
    SHUTTING_DOWN = "shutting_down"


def situation(facts: Facts) -> Situation:
    match shown(facts):
        case State.STARTING:
            return Situation.STARTING
        case State.SERVING:
            return Situation.SERVING
        case State.PAUSED:
            if Origin.SLEEP in facts.stops:
                return Situation.PAUSED_BY_SLEEP
            if Origin.COMMAND in facts.stops:
                return Situation.PAUSED_KEEP if facts.stop_mode is Mode.KEEP else Situation.PAUSED
            return Situation.PAUSED_OUTSIDE
        case State.ASLEEP:
            return Situation.ASLEEP if facts.bad is None else Situation.ASLEEP_BAD
        case State.PARTIALLY_AWAKE:
            if Tag.WEIGHTS in facts.asleep:
                return Situation.PARTIAL_KV_ONLY
            return Situation.PARTIAL if facts.bad is None else Situation.PARTIAL_BAD
        case State.WEIGHT_UPDATE:
            if facts.session is None:
                return Situation.BAD
            if facts.session.finished:
                return Situation.FINISHED
            return Situation.LOADING if facts.session.loading else Situation.OPEN
        case State.FAILED:
            return Situation.FAILED
        case State.SHUTTING_DOWN | State.STOPPED:
            return Situation.SHUTTING_DOWN
