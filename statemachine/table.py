"""Every arrow, one row each: what each verb may do where, and where each event may lead.

Two tables. `VERBS` says for every situation and verb whether the command is run, changes nothing
or is refused; a command without a cell does not exist. `ARROWS` says from which state to which an
event may lead; `Lifecycle` feeds them to `transitions`, so that a move without an arrow is an
error of ours and never a state.
"""

from dataclasses import dataclass
from enum import Enum

from statemachine import events as ev
from statemachine.facts import Situation
from statemachine.states import State as S


class Verb(Enum):
    """A column of the verb table."""

    PAUSE = "pause"
    RESUME = "resume"
    SLEEP_0 = "sleep 0"
    SLEEP = "sleep 1, 2"
    WAKE_ALL = "wake all"
    WAKE_SOME = "wake some"
    INIT = "init"
    START = "start"
    UPDATE = "update"
    FINISH = "finish"
    ABORT = "abort"

    @property
    def command(self) -> str:
        """The verb as it is sent; several columns may share one."""
        return _COMMANDS[self]


_COMMANDS = {
    Verb.PAUSE: "pause",
    Verb.RESUME: "resume",
    Verb.SLEEP_0: "sleep",
    Verb.SLEEP: "sleep",
    Verb.WAKE_ALL: "wake_up",
    Verb.WAKE_SOME: "wake_up",
    Verb.INIT: "init_weight_transfer",
    Verb.START: "start_weight_update",
    Verb.UPDATE: "update_weights",
    Verb.FINISH: "finish_weight_update",
    Verb.ABORT: "abort_weight_update",
}


class Cell(Enum):
    """What a verb does in a situation: `RUN` its plan, nothing, or a refusal with that code."""

    RUN = "ok"
    NOTHING = "–"
    INVALID_STATE = "invalid_state"
    WEIGHT_UPDATE_OPEN = "weight_update_open"
    WEIGHTS_NOT_READY = "weights_not_ready"
    NOT_READY = "not_ready"
    ENGINE_FAILED = "engine_failed"
    SHUTTING_DOWN = "shutting_down"

    @property
    def refuses(self) -> bool:
        return self not in (Cell.RUN, Cell.NOTHING)


_ABBREVIATIONS = {
    "ok": Cell.RUN,
    "-": Cell.NOTHING,
    "IS": Cell.INVALID_STATE,
    "WO": Cell.WEIGHT_UPDATE_OPEN,
    "WN": Cell.WEIGHTS_NOT_READY,
    "NR": Cell.NOT_READY,
    "EF": Cell.ENGINE_FAILED,
    "SD": Cell.SHUTTING_DOWN,
}

# A plan may still find that there is nothing to do, or refuse for a reason that a table cannot
# hold: requests that a keep pause froze, the level of the sleep in force, a finish without a chunk.
_GRID: dict[Situation, str] = {
    #                           pause resume sleep0 sleep  all  some init start update finish abort
    Situation.STARTING:        "NR    NR     NR     NR     NR   NR   NR   NR    NR     NR     NR",
    Situation.SERVING:         "ok    -      ok     ok     -    -    ok   ok    IS     IS     IS",
    Situation.PAUSED_KEEP:     "ok    ok     ok     ok     -    -    ok   ok    IS     IS     IS",
    Situation.PAUSED:          "ok    ok     ok     ok     -    -    ok   ok    IS     IS     IS",
    Situation.PAUSED_BY_SLEEP: "ok    ok     -      ok     ok   ok   ok   ok    IS     IS     IS",
    Situation.PAUSED_OUTSIDE:  "ok    ok     ok     ok     -    -    ok   ok    IS     IS     IS",
    Situation.ASLEEP:          "IS    IS     IS     ok     ok   ok   IS   IS    IS     IS     IS",
    Situation.ASLEEP_BAD:      "IS    IS     IS     ok     ok   ok   IS   IS    IS     IS     IS",
    Situation.PARTIAL:         "IS    IS     IS     IS     ok   ok   ok   ok    IS     IS     IS",
    Situation.PARTIAL_BAD:     "IS    IS     IS     IS     ok   ok   ok   ok    IS     IS     IS",
    Situation.PARTIAL_KV_ONLY: "IS    IS     IS     IS     ok   ok   IS   IS    IS     IS     IS",
    Situation.OPEN:            "ok    WO     WO     WO     ok   ok   WO   WO    ok     ok     ok",
    Situation.LOADING:         "ok    WO     WO     WO     ok   ok   WO   WO    ok     ok     ok",
    Situation.FINISHED:        "ok    WO     WO     WO     ok   ok   WO   WO    IS     ok     IS",
    Situation.BAD:             "ok    WN     ok     ok     -    -    ok   ok    IS     IS     IS",
    Situation.FAILED:          "EF    EF     EF     EF     EF   EF   EF   EF    EF     EF     EF",
    Situation.SHUTTING_DOWN:   "SD    SD     SD     SD     SD   SD   SD   SD    SD     SD     SD",
}  # fmt: skip

VERBS: dict[tuple[Situation, Verb], Cell] = {
    (situation, verb): _ABBREVIATIONS[cell]
    for situation, row in _GRID.items()
    for verb, cell in zip(Verb, row.split(), strict=True)
}


@dataclass(frozen=True)
class Arrow:
    """`event` may lead from `source` to `dest`."""

    event: type
    source: S
    dest: S


LIVING = (S.SERVING, S.PAUSED, S.ASLEEP, S.PARTIALLY_AWAKE, S.WEIGHT_UPDATE)
"""The states of an engine that runs."""

COMMANDS = (
    ev.PauseRequested,
    ev.ResumeRequested,
    ev.SleepRequested,
    ev.WakeUpRequested,
    ev.InitTransferRequested,
    ev.StartUpdateRequested,
    ev.UpdateWeightsRequested,
    ev.FinishUpdateRequested,
    ev.AbortUpdateRequested,
)


def _stay(event: type, *states: S) -> tuple[Arrow, ...]:
    return tuple(Arrow(event, s, s) for s in states)


def _any(event: type, sources: tuple[S, ...], *dests: S) -> tuple[Arrow, ...]:
    return tuple(Arrow(event, s, d) for s in sources for d in dests if s is not d)


ARROWS: tuple[Arrow, ...] = (
    Arrow(ev.EngineLoaded, S.STARTING, S.SERVING),
    Arrow(ev.EngineLoaded, S.STARTING, S.WEIGHT_UPDATE),  # not the version that is required
    *_stay(ev.WeightsStale, S.ASLEEP, S.PARTIALLY_AWAKE, S.WEIGHT_UPDATE),
    *_any(ev.WeightsStale, (S.SERVING, S.PAUSED), S.WEIGHT_UPDATE),
    # A request shows the less available of before and asked-for at once; more only when confirmed.
    *_stay(ev.PauseRequested, S.PAUSED, S.WEIGHT_UPDATE),
    Arrow(ev.PauseRequested, S.SERVING, S.PAUSED),
    *_stay(ev.ResumeRequested, S.SERVING, S.PAUSED),
    *_stay(ev.SleepRequested, S.PAUSED, S.ASLEEP, S.WEIGHT_UPDATE),
    *_any(ev.SleepRequested, (S.SERVING,), S.PAUSED, S.ASLEEP),
    Arrow(ev.SleepRequested, S.PAUSED, S.ASLEEP),
    *_stay(ev.WakeUpRequested, *LIVING),
    *_stay(ev.InitTransferRequested, S.SERVING, S.PAUSED, S.PARTIALLY_AWAKE, S.WEIGHT_UPDATE),
    *_stay(ev.StartUpdateRequested, S.WEIGHT_UPDATE),
    *_any(ev.StartUpdateRequested, (S.SERVING, S.PAUSED, S.PARTIALLY_AWAKE), S.WEIGHT_UPDATE),
    *_stay(ev.UpdateWeightsRequested, S.WEIGHT_UPDATE),
    *_stay(ev.FinishUpdateRequested, S.WEIGHT_UPDATE),
    *_stay(ev.AbortUpdateRequested, S.WEIGHT_UPDATE),
    # The end of a session may need no engine call: an abort after a chunk, the last step of a finish.
    *_any(ev.FinishUpdateRequested, (S.WEIGHT_UPDATE,), S.ASLEEP, S.PARTIALLY_AWAKE, S.PAUSED),
    *_any(ev.AbortUpdateRequested, (S.WEIGHT_UPDATE,), S.ASLEEP, S.PARTIALLY_AWAKE),
    # The engine confirmed a step, perhaps the last one.
    *_stay(ev.CallSucceeded, *LIVING),
    Arrow(ev.CallSucceeded, S.PAUSED, S.SERVING),
    *_any(ev.CallSucceeded, (S.ASLEEP,), S.PARTIALLY_AWAKE, S.PAUSED, S.SERVING, S.WEIGHT_UPDATE),
    *_any(ev.CallSucceeded, (S.PARTIALLY_AWAKE,), S.PAUSED, S.SERVING, S.WEIGHT_UPDATE),
    *_any(ev.CallSucceeded, (S.WEIGHT_UPDATE,), S.ASLEEP, S.PARTIALLY_AWAKE, S.PAUSED, S.SERVING),
    # A failed call is settled by a question, whose answer can show less than was asked for.
    Arrow(ev.CallSucceeded, S.PAUSED, S.ASLEEP),
    Arrow(ev.CallSucceeded, S.PAUSED, S.PARTIALLY_AWAKE),
    Arrow(ev.CallSucceeded, S.SERVING, S.PAUSED),
    *_any(ev.CallSucceeded, LIVING, S.FAILED),  # it answers, and cannot be brought where it should be
    *_stay(ev.CallFailed, *LIVING),
    *_any(ev.CallFailed, (S.WEIGHT_UPDATE, S.ASLEEP, S.PARTIALLY_AWAKE), S.PAUSED),
    # Behind our back.
    *_stay(ev.Observed, *LIVING),
    Arrow(ev.Observed, S.SERVING, S.PAUSED),
    Arrow(ev.Observed, S.PAUSED, S.SERVING),
    *_any(ev.Observed, (S.SERVING, S.PAUSED), S.ASLEEP, S.PARTIALLY_AWAKE),
    *_any(ev.Observed, (S.ASLEEP, S.PARTIALLY_AWAKE), S.SERVING, S.PAUSED, S.WEIGHT_UPDATE),
    Arrow(ev.Observed, S.ASLEEP, S.PARTIALLY_AWAKE),
    Arrow(ev.Observed, S.PARTIALLY_AWAKE, S.ASLEEP),
    *_any(ev.Observed, (S.WEIGHT_UPDATE,), S.ASLEEP, S.PARTIALLY_AWAKE),
    *_any(ev.Observed, LIVING, S.FAILED),
    *_stay(ev.DrainCut, *LIVING),
    # A lease that runs out: a session is aborted; a pause is resumed, or only forgotten.
    *_stay(ev.LeaseExpired, *LIVING),
    *_any(ev.LeaseExpired, (S.WEIGHT_UPDATE,), S.ASLEEP, S.PARTIALLY_AWAKE),
    # The end. Failed is left only by shutting down, which is left only by being gone.
    *_any(ev.EngineDied, (S.STARTING, *LIVING), S.FAILED),
    *_stay(ev.EngineDied, S.FAILED, S.SHUTTING_DOWN),  # already as bad as it gets
    *_any(ev.EngineUnresponsive, (S.STARTING, *LIVING), S.FAILED),
    *_stay(ev.EngineUnresponsive, S.FAILED, S.SHUTTING_DOWN),
    *_any(ev.ShutdownRequested, (S.STARTING, *LIVING, S.FAILED), S.SHUTTING_DOWN),
    *_stay(ev.ShutdownRequested, S.SHUTTING_DOWN),
    *_stay(ev.StageBegan, S.SHUTTING_DOWN),
    Arrow(ev.Stopped, S.SHUTTING_DOWN, S.STOPPED),
    # What was under way when the end began comes to nothing.
    *_stay(ev.EngineLoaded, S.FAILED, S.SHUTTING_DOWN),
    *_stay(ev.CallSucceeded, S.FAILED, S.SHUTTING_DOWN),
    *_stay(ev.CallFailed, S.FAILED, S.SHUTTING_DOWN),
    *_stay(ev.Observed, S.FAILED, S.SHUTTING_DOWN),
    *_stay(ev.DrainCut, S.FAILED, S.SHUTTING_DOWN),
    *_stay(ev.LeaseExpired, S.FAILED, S.SHUTTING_DOWN),
    *_stay(ev.WeightsStale, S.FAILED, S.SHUTTING_DOWN),
)
