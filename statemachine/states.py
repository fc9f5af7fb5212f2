"""Where we are: the vocabulary of the state machine."""

from enum import Enum, IntEnum


class State(Enum):
    """The state an instance shows. `stopped` is the last event of a life and is never left."""

    STARTING = "starting"
    SERVING = "serving"
    PAUSED = "paused"
    ASLEEP = "asleep"
    PARTIALLY_AWAKE = "partially_awake"
    WEIGHT_UPDATE = "weight_update"
    FAILED = "failed"
    SHUTTING_DOWN = "shutting_down"
    STOPPED = "stopped"


class Phase(Enum):
    """Why the weights are not known to be fit to serve."""

    OPEN = "open"
    LOADING = "loading"
    TAINTED = "tainted"
    DISCARDED = "discarded"
    STALE = "stale"


class Origin(Enum):
    """Who stopped scheduling."""

    COMMAND = "command"
    SLEEP = "sleep"
    UPDATE = "update"
    OUTSIDE = "outside"


class Mode(Enum):
    """What a stop does to the requests in flight.

    abort ends them, wait lets them finish, keep freezes them. unknown is a stop that
    somebody else made.
    """

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"
    UNKNOWN = "unknown"


class Tag(Enum):
    """A part of the accelerator memory that sleeps and wakes by itself, in vLLM's order."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class Admission(Enum):
    """What happens to an inference request that arrives now."""

    OPEN = "open"
    HELD = "held"
    REFUSED = "refused"
    CLOSED = "closed"
    """As refused, and for good: the instance goes away."""


class Strength(IntEnum):
    """How much a stop takes from the requests in flight; a stronger one overrides a weaker."""

    KEEP = 0
    WAIT = 1
    ABORT = 2
