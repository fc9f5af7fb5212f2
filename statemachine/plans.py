"""How each verb is carried out, step by step.

A plan is a generator: it yields what must be done (`Do`, `Tell`, `Cut`), gets the outcome, and
returns how the command ended. It reads and replaces `board.facts`, and is pure: nothing happens
until somebody carries out what it yielded. It refuses before its first step, leaving the facts
alone.
"""

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from statemachine import effects as fx
from statemachine import events as ev
from statemachine.facts import Facts, Session, Situation, shown, situation
from statemachine.states import Mode, Origin, Phase, State, Strength, Tag

SCHEDULING_TAG = "scheduling"
"""vLLM's tag for a level-0 sleep: no memory behind it."""

RETRY_DELAYS_S = (0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0)
"""Between attempts to bring the engine where it should be: 0.2 s, doubling to 2 s, for about 10 s."""


class Refused(Exception):
    """The command is not allowed now; nothing has changed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Unsettled(Exception):
    """The engine answers, but cannot be brought to where it should be."""


@dataclass(frozen=True)
class Do:
    """Call the engine, after a delay."""

    call: fx.EngineCall
    after_s: float = 0.0


@dataclass(frozen=True)
class Tell:
    """Answer the command now; the operation goes on."""

    done: "Done"


@dataclass(frozen=True)
class Cut:
    """End the requests that a drain waits for."""


@dataclass(frozen=True)
class Outcome:
    """How a `Do` ended. A question has a view and never fails."""

    message: str | None = None
    timed_out: bool = False
    view: ev.EngineView | None = None

    @property
    def ok(self) -> bool:
        return self.message is None

    @property
    def code(self) -> str:
        return "engine_timeout" if self.timed_out else "engine_error"


@dataclass(frozen=True)
class Done:
    """How a command ended; no code means well."""

    changed: bool = False
    code: str | None = None
    message: str = ""
    result: dict[str, Any] = field(default_factory=dict)


class Board(Protocol):
    """What a plan sees and changes.

    Attributes:
        ceiling: the state shown is never more available than this while the plan runs.
        pending_stop: a stop that was asked for and is not confirmed yet.
    """

    facts: Facts
    ceiling: State | None
    pending_stop: tuple[Mode, Origin] | None


T = TypeVar("T")
Steps = Generator[Do | Tell | Cut, Outcome, T]
Plan = Steps[Done]

NOTHING = Done()
CHANGED = Done(changed=True)


def strength(mode: Mode | None) -> Strength:
    """A stop that somebody else made may have frozen requests, as keep does."""
    return Strength[mode.name] if mode and mode is not Mode.UNKNOWN else Strength.KEEP


def stronger(one: Mode | None, other: Mode) -> Mode:
    return one if one is not None and strength(one) >= strength(other) else other


# --- the verbs ----------------------------------------------------------------------------------


def pause(board: Board, request: ev.PauseRequested) -> Plan:
    before = board.facts
    if not before.scheduling and not _pause_reaches_engine(before, request):
        if Origin.COMMAND in before.stops:
            return NOTHING
        board.facts = before.with_stop(Origin.COMMAND)
        return CHANGED
    return (yield from _stop(board, Origin.COMMAND, fx.PauseEngine(request.mode, request.clear_cache)))


def _pause_reaches_engine(facts: Facts, request: ev.PauseRequested) -> bool:
    """Whether a pause of an engine that is stopped already must be told to it."""
    if shown(facts) is not State.PAUSED:
        return strength(request.mode) > strength(facts.stop_mode)
    if Origin.COMMAND not in facts.stops:  # somebody else's stop: the origin is added, and no more
        frozen = request.held > 0 and strength(facts.stop_mode) is Strength.KEEP
        return frozen and request.mode is Mode.ABORT
    if facts.stop_mode is not Mode.KEEP:
        return False
    if request.mode is Mode.WAIT and request.held:
        raise Refused(
            "invalid_state",
            f"{request.held} requests are frozen by keep and never drain: resume, or pause with abort",
        )
    return request.mode is Mode.ABORT


def _stop(board: Board, origin: Origin, call: fx.PauseEngine | fx.SleepEngine) -> Plan:
    """Stop scheduling without touching memory, and remember who asked."""
    before = board.facts
    board.pending_stop = call.mode, origin
    outcome = yield Do(call)
    if outcome.ok:
        board.facts = _stopped(before, origin, call.mode)
        return CHANGED
    view = yield from _ask(board, outcome, drains=isinstance(call, fx.SleepEngine))
    if before.scheduling and not view.scheduling:  # it took effect all the same
        board.facts = _stopped(before, origin, call.mode)
    else:
        _confirm(board, view)
    board.pending_stop = None
    yield from _align(board)
    return Done(code=outcome.code, message=outcome.message or "")


def _stopped(facts: Facts, origin: Origin, mode: Mode) -> Facts:
    return replace(facts.with_stop(origin), scheduling=False, stop_mode=stronger(facts.stop_mode, mode))


def resume(board: Board, request: ev.ResumeRequested) -> Plan:
    outcome = yield Do(fx.ResumeEngine())
    if outcome.ok:
        board.facts = _running(board.facts)
        return CHANGED
    view = yield from _ask(board, outcome)
    _confirm(board, view)
    yield from _align(board)
    return Done(code=outcome.code, message=outcome.message or "")


def _running(facts: Facts) -> Facts:
    return replace(facts, scheduling=True, stops=(), stop_mode=None)


def sleep(board: Board, request: ev.SleepRequested) -> Plan:
    before = board.facts
    call = fx.SleepEngine(request.level, request.mode)
    if request.level == 0:
        if before.scheduling:
            return (yield from _stop(board, Origin.SLEEP, call))
        if Origin.SLEEP in before.stops:
            return NOTHING
        board.facts = before.with_stop(Origin.SLEEP)
        return CHANGED
    if before.asleep:
        if before.sleep_level == request.level:
            return NOTHING
        raise Refused("invalid_state", f"asleep at level {before.sleep_level}: wake up first")
    board.pending_stop = request.mode, Origin.SLEEP
    outcome = yield Do(call)
    if outcome.ok:
        board.facts = _slept(before, request, tuple(Tag))
        return CHANGED
    view = yield from _ask(board, outcome, drains=True)
    if view.asleep:
        board.facts = _slept(before, request, view.asleep)
    elif before.scheduling and not view.scheduling:  # its first half: a pause
        board.facts = _stopped(before, Origin.SLEEP, request.mode)
    else:
        _confirm(board, view)
    board.pending_stop = None
    yield from _align(board)
    return Done(code=outcome.code, message=outcome.message or "")


def _slept(facts: Facts, request: ev.SleepRequested, asleep: tuple[Tag, ...]) -> Facts:
    discarded = request.level == 2 and Tag.WEIGHTS in asleep
    return replace(
        _stopped(facts, Origin.SLEEP, request.mode),
        asleep=asleep,
        sleep_level=request.level,
        bad=Phase.DISCARDED if discarded else facts.bad,
    )


def wake_up(board: Board, request: ev.WakeUpRequested) -> Plan:
    before = board.facts
    if situation(before) is Situation.PAUSED_BY_SLEEP:
        return (yield from _end_level_0(board, request))
    todo = tuple(t for t in before.asleep if request.tags is None or t.value in request.tags)
    if not todo:
        return Done(result={"woken": []})
    outcome = yield Do(fx.WakeEngine(todo))
    if outcome.ok:
        _woken(board, tuple(t for t in before.asleep if t not in todo))
    else:
        view = yield from _ask(board, outcome)
        _woken(board, view.asleep)
        _confirm(board, view)
    woken = [t.value for t in before.asleep if t not in board.facts.asleep]
    failure = yield from _align(board)
    if outcome.ok and failure is None:
        return Done(changed=True, result={"woken": woken})
    if failure is not None and outcome.ok:
        outcome = failure
    return Done(bool(woken), outcome.code, outcome.message or "", {"woken": woken})


def _woken(board: Board, asleep: tuple[Tag, ...]) -> None:
    board.facts = replace(board.facts, asleep=asleep) if asleep else board.facts.fully_woken()


def _end_level_0(board: Board, request: ev.WakeUpRequested) -> Plan:
    if request.tags is not None and SCHEDULING_TAG not in request.tags:
        return Done(result={"woken": []})
    rest = board.facts.without_stop(Origin.SLEEP)
    if rest.stops:
        board.facts = rest
        return Done(changed=True, result={"woken": [SCHEDULING_TAG]})
    done = yield from resume(board, ev.ResumeRequested(ticket=request.ticket, cause=request.cause))
    return replace(done, result={"woken": [SCHEDULING_TAG] if board.facts.scheduling else []})


def init_transfer(board: Board, request: ev.InitTransferRequested) -> Plan:
    _require_transfer(board.facts)
    outcome = yield Do(fx.InitTransfer(request.init_info))
    if outcome.ok:
        return CHANGED
    view = yield from _ask(board, outcome)
    _confirm(board, view)
    yield from _align(board)
    return Done(code=outcome.code, message=outcome.message or "")


def _require_transfer(facts: Facts) -> None:
    if not facts.weight_transfer:
        raise Refused(
            "invalid_state", "this engine has no weight transfer configured (--weight-transfer-config)"
        )


def start_update(board: Board, request: ev.StartUpdateRequested) -> Plan:
    before = board.facts
    _require_transfer(before)
    session = Session(request.session, request.cause.issuer, request.epoch, before.bad)
    board.facts = replace(before.with_stop(Origin.UPDATE), session=session)
    # A request that runs while a session is open kills vLLM: do not rely on an older answer.
    if before.scheduling or (yield from _question()).scheduling:
        board.pending_stop = request.pause_mode, Origin.UPDATE
        outcome = yield Do(fx.PauseEngine(request.pause_mode, clear_cache=False))
        if not outcome.ok:
            return (yield from _unopened(board, before, outcome))
        board.facts = replace(board.facts, scheduling=False, stop_mode=request.pause_mode)
        board.pending_stop = None
    outcome = yield Do(fx.StartUpdate())
    if not outcome.ok:
        return (yield from _unopened(board, before, outcome))
    return Done(changed=True, result={"session": session.id})


def _unopened(board: Board, before: Facts, outcome: Outcome) -> Plan:
    """A start that failed: back to where we were if the workers still have their parameters."""
    session = board.facts.session
    view = yield from _ask(board, outcome)
    board.pending_stop = None
    if before.bad is None and view.meta_parameters:
        yield Do(fx.FinishUpdate())
        view = yield from _question()
    if before.bad is None and view.meta_parameters:
        board.facts = replace(board.facts, session=None, bad=Phase.TAINTED, last_session=session)
    else:
        facts = board.facts if Origin.UPDATE in before.stops else board.facts.without_stop(Origin.UPDATE)
        board.facts = replace(facts, session=None)
    _confirm(board, view)
    yield from _align(board)
    return Done(code=outcome.code, message=outcome.message or "")


def update_weights(board: Board, request: ev.UpdateWeightsRequested) -> Plan:
    session = board.facts.session
    assert session is not None, "the table lets an update in only with a session"
    session = replace(session, loading=True, chunks=session.chunks + 1)
    board.facts = replace(board.facts, session=session)
    outcome = yield Do(fx.LoadChunk(request.update_info))
    if outcome.ok:
        return CHANGED
    board.facts = _tainted(board.facts)  # before anything else is tried
    view = yield from _ask(board, outcome)
    _confirm(board, view)
    yield from _align(board)
    return Done(changed=True, code=outcome.code, message=outcome.message or "")


def _tainted(facts: Facts) -> Facts:
    return replace(facts, session=None, bad=Phase.TAINTED, last_session=facts.session)


def finish_update(board: Board, request: ev.FinishUpdateRequested) -> Plan:
    session = board.facts.session
    assert session is not None, "the table lets a finish in only with a session"
    if not session.chunks and not session.finished:
        if not request.allow_empty:
            raise Refused(
                "empty_weight_update",
                "no chunk was loaded in this session: "
                "abort it, or say allow_empty if the weights came another way",
            )
        if session.bad_before is not None and request.weight_version is None:
            raise Refused(
                "empty_weight_update",
                "the weights were not good before: an empty finish must name its weight_version",
            )
    if request.incomplete is not None and session.chunks and not session.finished:
        raise Refused("incomplete_weight_update", request.incomplete)
    version = request.weight_version or session.id
    # What is done stays done when a later step fails: a repeated finish goes on from there.
    if not session.finished:
        outcome = yield Do(fx.FinishUpdate())
        if not outcome.ok:
            view = yield from _ask(board, outcome)
            if outcome.timed_out and view.session_open is False:
                session = _step(board, session, finished=True)
            return (yield from _unfinished(board, view, outcome))
        session = _step(board, session, finished=True)
    if session.version_set != version:
        outcome = yield Do(fx.SetVersion(version))
        if not outcome.ok:
            return (yield from _unfinished(board, (yield from _ask(board, outcome)), outcome))
        session = _step(board, session, version_set=version)
    if request.clear_cache and not session.caches_reset:
        outcome = yield Do(fx.ResetCaches())
        if not outcome.ok:
            return (yield from _unfinished(board, (yield from _ask(board, outcome)), outcome))
        session = _step(board, session, caches_reset=True)
    board.facts = replace(
        board.facts.without_stop(Origin.UPDATE),
        session=None,
        bad=None,
        last_session=None,
        version=version,
        epoch=session.epoch,
    )
    result = {"committed": True, "version": version, "chunks": session.chunks}
    yield from _align(board, told=result)
    return Done(changed=True, result=result)


def _step(board: Board, session: Session, **done: Any) -> Session:
    session = replace(session, **done)
    board.facts = replace(board.facts, session=session)
    return session


def _unfinished(board: Board, view: ev.EngineView, outcome: Outcome) -> Plan:
    _confirm(board, view)
    yield from _align(board)
    return Done(code=outcome.code, message=outcome.message or "")


def abort_update(board: Board, request: ev.AbortUpdateRequested) -> Plan:
    return (yield from end_session(board))


def end_session(board: Board) -> Plan:
    """End the open session without a good finish: undone if nothing was loaded, else tainted."""
    session = board.facts.session
    assert session is not None, "the table lets an abort in only with a session"
    if session.loading or session.finished:
        board.facts = _tainted(board.facts)
        return CHANGED
    # Undo: a finish without a chunk puts back what the start took away (facts of vLLM 0.32).
    outcome = yield Do(fx.FinishUpdate())
    view = (yield from _question()) if outcome.ok else (yield from _ask(board, outcome))
    if outcome.ok and not view.meta_parameters:
        board.facts = replace(board.facts.without_stop(Origin.UPDATE), session=None, bad=session.bad_before)
    else:
        board.facts = _tainted(board.facts)
    _confirm(board, view)
    yield from _align(board)
    if outcome.ok:
        return CHANGED
    return Done(changed=True, code=outcome.code, message=outcome.message or "")


def end_pause(board: Board) -> Plan:
    """The pause that a command asked for is over. Nothing else that stops scheduling is."""
    board.facts = board.facts.without_stop(Origin.COMMAND)
    yield from _align(board)
    return CHANGED


def stop_again(board: Board) -> Plan:
    """Somebody resumed behind our back where nothing may run."""
    yield from _align(board)
    return CHANGED


# --- settling -----------------------------------------------------------------------------------


def _question(timed_out: bool = False) -> Steps[ev.EngineView]:
    view = (yield Do(fx.AskEngine(timed_out))).view
    assert view is not None, "a question is answered or the engine is given up"
    return view


def _ask(board: Board, outcome: Outcome, drains: bool = False) -> Steps[ev.EngineView]:
    """Settle a call that failed. One that timed out is answered before the engine is asked."""
    if outcome.timed_out:
        yield Tell(Done(code=outcome.code, message=outcome.message or ""))
        if drains:
            yield Cut()
    return (yield from _question(outcome.timed_out))


def _confirm(board: Board, view: ev.EngineView) -> None:
    """Take over what the engine says of its scheduler and memory."""
    facts = replace(board.facts, scheduling=view.scheduling)
    if view.scheduling and facts.may_schedule:
        facts = _running(facts)
    elif not view.scheduling and facts.stop_mode is None:
        facts = replace(facts, stop_mode=Mode.UNKNOWN)
    board.facts = facts


def _align(board: Board, told: dict[str, Any] | None = None) -> Steps[Outcome | None]:
    """Bring the scheduler to where it should be, and try again for about 10 s.

    Args:
        told: the result of a command that is committed: if the first attempt fails it is answered
            with the error and this result at once.

    Returns:
        The first failure, if it took more than one attempt.

    Raises:
        Unsettled: it did not work.
    """
    first: Outcome | None = None
    for delay_s in (0.0, *RETRY_DELAYS_S):
        call = _needed(board.facts)
        if call is None:
            return first
        outcome = yield Do(call, delay_s)
        if outcome.ok:
            board.facts = _aligned(board.facts, call)
            continue
        if first is None:
            first = outcome
            if told is not None:
                board.ceiling = None
                yield Tell(Done(changed=True, code=outcome.code, message=outcome.message or "", result=told))
        _confirm(board, (yield from _question(outcome.timed_out)))
    if _needed(board.facts) is None:
        return first
    raise Unsettled("the engine could not be brought to the state it should be in")


def _needed(facts: Facts) -> fx.ResumeEngine | fx.PauseEngine | None:
    """What would bring the scheduler to where it should be."""
    if facts.wants_scheduling and not facts.scheduling:
        return fx.ResumeEngine()
    if facts.scheduling and not facts.may_schedule:
        return fx.PauseEngine(Mode.KEEP, clear_cache=False)
    return None


def _aligned(facts: Facts, call: fx.ResumeEngine | fx.PauseEngine) -> Facts:
    if isinstance(call, fx.ResumeEngine):
        return _running(facts)
    return replace(facts, scheduling=False, stop_mode=facts.stop_mode or Mode.KEEP)
