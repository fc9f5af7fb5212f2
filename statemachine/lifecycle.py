"""handle(event) -> effects: the one answer to "what may this engine do now"."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transitions import Machine, MachineError

from statemachine import effects as fx
from statemachine import events as ev
from statemachine import health, plans
from statemachine.facts import Facts, less_available, shown, situation
from statemachine.plans import Do, Done, Outcome, Plan, Refused, Tell, Unsettled
from statemachine.states import Admission, Mode, Origin, Phase, State, Tag
from statemachine.table import ARROWS, VERBS, Cell, Verb

OUT_OF_BAND_LIMIT = 3
OUT_OF_BAND_WINDOW_S = 60.0
"""The engine is stopped again when somebody resumes it where it must not run; this often within
this time and it has failed (STATES, "What happens by itself")."""

__all__ = ["EventNotAllowed", "Lifecycle", "Refused"]


class EventNotAllowed(Exception):
    """The table has no arrow for `event` in `state`; the lifecycle is unchanged."""

    def __init__(self, state: State, event: ev.Event) -> None:
        super().__init__(f"{type(event).__name__} is not allowed while {state.value}")
        self.state, self.event = state, event


@dataclass
class _Operation:
    """A command, or a correction of our own, that runs."""

    ticket: int | None
    cause: ev.Cause
    plan: Plan
    call: fx.Call | None = None
    called: bool = False
    answered: bool = False
    cut_by: str | None = None


class Lifecycle:
    """One life of one engine.

    Commands come one at a time: a `Request` is handled only while not `busy`. Nothing here
    waits: what must be done comes back as effects, in the order to carry them out.

    Args:
        withdraw_on_pause: legacy health names that follow readiness.
        facts: where to begin; tests begin elsewhere than at the start.
    """

    def __init__(self, withdraw_on_pause: frozenset[str] = frozenset(), facts: Facts | None = None) -> None:
        self.facts = facts or Facts()
        self.ceiling: State | None = None
        self.pending_stop: tuple[Mode, Origin] | None = None
        self.generation = 0
        self._withdraw_on_pause = withdraw_on_pause
        self._operation: _Operation | None = None
        self._calls = 0
        self._resumed_outside: deque[float] = deque(maxlen=OUT_OF_BAND_LIMIT)
        self._effects: list[fx.Effect] = []
        self._position = _Position(shown(self.facts))
        self._shown_health: dict[str, bool] = self._health(self.picture)
        self._shown_picture = self.picture
        self._shown_cause: ev.Cause | None = None
        self._admission = self._wanted_admission()

    @property
    def state(self) -> State:
        return self._position.value

    @property
    def busy(self) -> bool:
        """An operation runs; the next command waits."""
        return self._operation is not None

    @property
    def running_call(self) -> fx.Call | None:
        return self._operation.call if self._operation else None

    @property
    def health(self) -> dict[str, bool]:
        """The status of every health name; True is SERVING."""
        return dict(self._shown_health)

    # --- events ---------------------------------------------------------------------------------

    def judge(self, request: ev.Command) -> Refused | None:
        """Why the table would refuse this command in the state shown; None if it would not."""
        cell = VERBS[situation(self.facts), column(request)]
        if not cell.refuses:
            return None
        return Refused(cell.value, _refusal(cell, column(request), self.state))

    def handle(self, event: ev.Event) -> list[fx.Effect]:
        """Take in one event.

        Returns:
            What must be done, in order. What others see comes first, so that readiness is gone
            before the engine hears of a pause, and a reply comes after all of it.

        Raises:
            Refused: the command is not allowed now; nothing has changed.
            EventNotAllowed: the event makes no sense now; nothing has changed.
        """
        if not any(a.source is self.state and a.event is type(event) for a in ARROWS):
            if isinstance(event, ev.Request) and (refusal := self.judge(event)):
                raise refusal
            raise EventNotAllowed(self.state, event)
        self._effects = []
        cause = self._take_in(event)
        self._position.move(type(event).__name__, self._shown())
        effects = [*self._show(cause), *self._effects]
        self._effects = []
        return effects

    def _take_in(self, event: ev.Event) -> ev.Cause | None:
        cause = self._operation.cause if self._operation else None
        match event:
            case ev.EngineLoaded():
                cause = ev.Cause("start")
                if self.state is State.STARTING:
                    bad = Phase.STALE if event.stale else None
                    self.facts = replace(
                        self.facts, loaded=True, weight_transfer=event.weight_transfer, bad=bad
                    )
                    self._keep_off(cause)
            case ev.WeightsStale():
                cause = event.cause
                self._stale(event)
            case ev.CallSucceeded():
                self._continue(event.number, Outcome(view=event.view))
            case ev.CallFailed():
                self._continue(event.number, Outcome(event.message, event.timed_out))
            case ev.Observed():
                cause = ev.Cause("outside")
                self._observe(event)
            case ev.DrainCut():
                self._cut_drain(event)
            case ev.LeaseExpired():
                cause = event.cause
                self._lease_expired(event)
            case ev.EngineDied() | ev.EngineUnresponsive():
                cause = ev.Cause("engine")
                self._fail(event.reason)
            case ev.ShutdownRequested():
                cause = event.cause
                self._close()
            case ev.StageBegan():
                cause = self._shown_cause
                self.facts = replace(self.facts, stage=event.stage)
            case ev.Stopped():
                cause = self._shown_cause
                self.facts = replace(self.facts, stopped=True, stage=None)
            case _:
                cause = event.cause
                self._accept(event)
        return cause

    # --- commands -------------------------------------------------------------------------------

    def _accept(self, request: ev.Command) -> None:
        if self._operation is not None:
            raise EventNotAllowed(self.state, request)
        verb = column(request)
        cell = VERBS[situation(self.facts), verb]
        if cell.refuses:
            raise Refused(cell.value, _refusal(cell, verb, self.state))
        if cell is Cell.NOTHING:
            result: dict[str, Any] = {"woken": []} if isinstance(request, ev.WakeUpRequested) else {}
            self._effects.append(fx.Answer(request.ticket, result=result))
            return
        self.ceiling = less_available(self.state, _asked_for(request, self.state))
        self._begin(_Operation(request.ticket, request.cause, _plan(self, request)))

    def _begin(self, operation: _Operation) -> None:
        self._operation = operation
        try:
            self._advance(None)
        except Refused:
            self._end()
            raise

    def _continue(self, number: int, outcome: Outcome) -> None:
        operation = self._operation
        if operation is None or operation.call is None or operation.call.number != number:
            return  # of an operation that is over
        operation.call = None
        self._advance(outcome)

    def _advance(self, outcome: Outcome | None) -> None:
        """Run the plan to its next engine call, or to its end."""
        operation = self._operation
        assert operation is not None
        try:
            while True:
                step = operation.plan.send(outcome)  # type: ignore[arg-type]
                outcome = Outcome()
                match step:
                    case Do():
                        self._call(operation, step)
                        return
                    case Tell():
                        self._answer(operation, step.done)
                    case _:
                        self._effects.append(fx.CutDrain())
        except StopIteration as end:
            self._end()
            self._answer(operation, end.value)
        except Unsettled as error:
            self._end()
            self._answer(operation, Done(code="engine_failed", message=str(error)))
            self._fail("unsettled")

    def _call(self, operation: _Operation, step: Do) -> None:
        self._calls += 1
        self.generation += 1
        operation.call = fx.Call(self._calls, step.call, step.after_s)
        operation.called = True
        self._effects.append(operation.call)

    def _answer(self, operation: _Operation, done: Done) -> None:
        if operation.answered or operation.ticket is None:
            return
        operation.answered = True
        result = done.result if operation.cut_by is None else {**done.result, "cut_by": operation.cut_by}
        answer = fx.Answer(operation.ticket, done.changed, done.code, done.message, result, operation.called)
        self._effects.append(answer)

    def _end(self) -> None:
        self._operation = None
        self.ceiling = self.pending_stop = None
        self.generation += 1

    def _cut_drain(self, event: ev.DrainCut) -> None:
        call = self.running_call
        if call is None or not may_be_cut(call.call):
            return
        assert self._operation is not None
        self._operation.cut_by = event.cause.id or event.cause.issuer or event.cause.verb
        self._effects.append(fx.CutDrain())

    # --- what happens by itself -----------------------------------------------------------------

    def _observe(self, event: ev.Observed) -> None:
        if self._operation is not None or event.generation != self.generation or self.state not in _OBSERVED:
            return
        facts, view = self.facts, event.view
        if view.asleep != facts.asleep:
            facts = _moved_memory(facts, view.asleep)
        if not view.scheduling and facts.scheduling:
            facts = replace(facts.with_stop(Origin.OUTSIDE), scheduling=False, stop_mode=Mode.UNKNOWN)
        elif view.scheduling and facts.may_schedule:
            facts = replace(facts, scheduling=True, stops=(), stop_mode=None)
        self.facts = facts
        if view.scheduling and not facts.may_schedule:
            self._stop_again(event.at_s)

    def _stop_again(self, at_s: float) -> None:
        self._resumed_outside.append(at_s)
        if (
            len(self._resumed_outside) == OUT_OF_BAND_LIMIT
            and at_s - self._resumed_outside[0] <= OUT_OF_BAND_WINDOW_S
        ):
            self._fail("resumed from outside again and again where nothing may run")
            return
        self.facts = replace(self.facts, scheduling=True)
        self.ceiling = self.state
        self._begin(_Operation(None, ev.Cause("outside"), plans.stop_again(self)))

    def _lease_expired(self, event: ev.LeaseExpired) -> None:
        if self.state not in _OBSERVED:
            return
        if self._operation is not None:
            raise EventNotAllowed(self.state, event)
        facts = self.facts
        if event.session is not None:
            if facts.session is not None and facts.session.id == event.session:
                self.ceiling = self.state
                self._begin(_Operation(None, event.cause, plans.end_session(self)))
        elif Origin.COMMAND in facts.stops:
            self.ceiling = self.state
            self._begin(_Operation(None, event.cause, plans.end_pause(self)))

    def _stale(self, event: ev.WeightsStale) -> None:
        if self.state not in _OBSERVED or self.facts.session is not None or self.facts.bad is not None:
            return  # no better for it
        if self._operation is not None:
            raise EventNotAllowed(self.state, event)
        self.facts = replace(self.facts, bad=Phase.STALE)
        self._keep_off(event.cause)

    def _keep_off(self, cause: ev.Cause) -> None:
        """Stop an engine that schedules on weights that are not fit to serve."""
        if self.facts.scheduling and not self.facts.may_schedule:
            self.ceiling = self._shown()
            self._begin(_Operation(None, cause, plans.stop_again(self)))

    def _fail(self, reason: str) -> None:
        if self.facts.closing or self.facts.failure is not None:
            return  # while it goes away anyway, the death of the engine changes nothing that others see
        self._drop_operation("engine_failed", f"the engine failed: {reason}")
        self.facts = replace(self.facts, failure=reason)
        self._effects.append(fx.BeginFailure(reason))

    def _close(self) -> None:
        if self.facts.closing:
            return
        drain = self._drain()
        self._drop_operation("shutting_down", "the instance shuts down")
        self.facts = replace(self.facts, closing=True)
        self._effects.append(fx.BeginShutdown(drain))

    def _drain(self) -> fx.Drain:
        facts = self.facts
        if facts.failure is not None or not facts.loaded:
            return fx.Drain.SKIP
        if self._operation is not None or not facts.may_schedule:
            return fx.Drain.END
        return fx.Drain.RUN if facts.scheduling else fx.Drain.RESUME

    def _drop_operation(self, code: str, message: str) -> None:
        operation = self._operation
        if operation is None:
            return
        self._end()
        operation.plan.close()
        self._answer(operation, Done(code=code, message=message))

    # --- what others see ------------------------------------------------------------------------

    def _shown(self) -> State:
        state = shown(self.facts)
        return less_available(state, self.ceiling) if self.ceiling else state

    @property
    def picture(self) -> fx.Picture:
        facts = self.facts
        state = self._shown()
        settled = self._operation is None
        ready = state is State.SERVING and settled
        operation = self._operation
        running = fx.Running(operation.cause.verb, operation.cause.id) if operation else None
        if facts.stage is not None:
            running = fx.Running(facts.stage, None)
        return fx.Picture(
            state=state,
            settled=settled,
            ready=ready,
            live=facts.failure is None,
            reasons=() if ready else tuple(self._reasons(state)),
            paused=self._paused(),
            sleep=fx.Sleeping(facts.sleep_level or 1, facts.asleep) if facts.asleep else None,
            weight_update=_update_info(facts),
            weights=fx.Weights(facts.version, facts.epoch, facts.good),
            operation=running,
        )

    def _paused(self) -> fx.Paused | None:
        facts, mode = self.facts, self.facts.stop_mode
        if self.pending_stop is not None:
            mode = plans.stronger(mode, self.pending_stop[0])
            facts = facts.with_stop(self.pending_stop[1])
        if not facts.stops:
            return None
        return fx.Paused(mode or Mode.UNKNOWN, facts.stops)

    def _reasons(self, state: State) -> list[str]:
        facts = self.facts
        match state:
            case State.STARTING:
                return ["the engine is loading"]
            case State.FAILED:
                return [f"the engine failed: {facts.failure}"]
            case State.SHUTTING_DOWN:
                return [f"shutting down: {facts.stage}" if facts.stage else "shutting down"]
            case State.STOPPED:
                return ["stopped"]
        reasons = []
        if self._operation:
            reasons.append(f"{self._operation.cause.verb} is under way")
        if facts.session:
            reasons.append(f"a weight update is open: {facts.session.id}")
        if facts.asleep:
            reasons.append("asleep: " + ", ".join(t.value for t in facts.asleep))
        if facts.bad:
            reasons.append(f"the weights are {facts.bad.value}")
        if facts.stops:
            reasons.append("paused by " + ", ".join(o.value for o in facts.stops))
        return reasons

    def _health(self, picture: fx.Picture) -> dict[str, bool]:
        return health.statuses(picture.state, picture.settled, not picture.live, self._withdraw_on_pause)

    def _wanted_admission(self) -> fx.Admit:
        facts = self.facts
        if facts.failure is not None:
            return fx.Admit(Admission.CLOSED, "the engine failed", end_held=True, code="engine_failed")
        if not facts.loaded:
            return fx.Admit(Admission.REFUSED, "the engine is loading")
        mode = facts.stop_mode
        if self.pending_stop is not None:
            mode = plans.stronger(mode, self.pending_stop[0])
        if facts.bad is not None:
            return fx.Admit(Admission.REFUSED, f"the weights are {facts.bad.value}", end_held=True)
        if facts.scheduling and self.pending_stop is None:
            return fx.Admit(Admission.OPEN)
        if mode is Mode.KEEP:
            return fx.Admit(Admission.HELD)
        return fx.Admit(
            Admission.REFUSED, f"the engine is {self._shown().value}", end_held=bool(facts.asleep)
        )

    def _show(self, cause: ev.Cause | None) -> list[fx.Effect]:
        """The difference between what others see and what they should see, in the order that is safe.

        Traffic leaves before admission changes, and comes back after it.
        """
        picture, admission = self.picture, self._admission
        statuses = self._health(picture)
        if not self.facts.closing:  # the shutdown has its own stages for admission
            admission = self._wanted_admission()
        traffic: list[fx.Effect] = []
        if statuses != self._shown_health:
            traffic.append(fx.ShowHealth(statuses))
        if picture.ready != self._shown_picture.ready:
            traffic.append(
                fx.JoinDiscovery(picture.weights.version) if picture.ready else fx.LeaveDiscovery()
            )
        gate: list[fx.Effect] = [] if admission == self._admission else [admission]
        effects = [*gate, *traffic] if picture.ready else [*traffic, *gate]
        if picture != self._shown_picture:
            effects.append(fx.Publish(picture, cause))
            self._shown_cause = cause
        self._shown_health, self._shown_picture, self._admission = statuses, picture, admission
        return effects


_OBSERVED = (State.SERVING, State.PAUSED, State.ASLEEP, State.PARTIALLY_AWAKE, State.WEIGHT_UPDATE)


class _Position:
    """The state, moved by a `transitions.Machine` along the arrows of the table and not otherwise."""

    value: State

    def __init__(self, initial: State) -> None:
        machine = Machine(
            model=self,
            states=State,
            initial=initial,
            model_attribute="value",
            auto_transitions=False,
            queued=False,
            ignore_invalid_triggers=False,
        )
        for arrow in ARROWS:
            machine.add_transition(
                arrow.event.__name__, arrow.source, arrow.dest, conditions=_leads_to(arrow.dest)
            )

    def move(self, event: str, dest: State) -> None:
        if not self.trigger(event, dest=dest):  # type: ignore[attr-defined]
            raise MachineError(f"no arrow for {event} from {self.value.value} to {dest.value}")


def _leads_to(wanted: State) -> Callable[[State], bool]:
    def condition(dest: State) -> bool:
        return dest is wanted

    return condition


def column(request: ev.Command) -> Verb:
    """The column of the verb table that this command stands in."""
    match request:
        case ev.PauseRequested():
            return Verb.PAUSE
        case ev.ResumeRequested():
            return Verb.RESUME
        case ev.SleepRequested():
            return Verb.SLEEP_0 if request.level == 0 else Verb.SLEEP
        case ev.WakeUpRequested():
            return Verb.WAKE_ALL if request.tags is None else Verb.WAKE_SOME
        case ev.InitTransferRequested():
            return Verb.INIT
        case ev.StartUpdateRequested():
            return Verb.START
        case ev.UpdateWeightsRequested():
            return Verb.UPDATE
        case ev.FinishUpdateRequested():
            return Verb.FINISH
        case ev.AbortUpdateRequested():
            return Verb.ABORT


def drains(call: fx.EngineCall) -> bool:
    """Whether the call waits for requests to end by themselves."""
    return isinstance(call, fx.PauseEngine | fx.SleepEngine) and call.mode is Mode.WAIT


def may_be_cut(call: fx.EngineCall) -> bool:
    """Whether an abort that waits behind the call may end its requests already."""
    return isinstance(call, fx.PauseEngine | fx.SleepEngine) and call.mode is not Mode.KEEP


def _plan(life: Lifecycle, request: ev.Command) -> Plan:
    match request:
        case ev.PauseRequested():
            return plans.pause(life, request)
        case ev.ResumeRequested():
            return plans.resume(life, request)
        case ev.SleepRequested():
            return plans.sleep(life, request)
        case ev.WakeUpRequested():
            return plans.wake_up(life, request)
        case ev.InitTransferRequested():
            return plans.init_transfer(life, request)
        case ev.StartUpdateRequested():
            return plans.start_update(life, request)
        case ev.UpdateWeightsRequested():
            return plans.update_weights(life, request)
        case ev.FinishUpdateRequested():
            return plans.finish_update(life, request)
        case ev.AbortUpdateRequested():
            return plans.abort_update(life, request)


def _asked_for(request: ev.Command, state: State) -> State:
    """The state that the command asks for; what is less available of this and before is shown."""
    match request:
        case ev.PauseRequested():
            return State.PAUSED
        case ev.SleepRequested():
            return State.PAUSED if request.level == 0 else State.ASLEEP
        case ev.StartUpdateRequested():
            return State.WEIGHT_UPDATE
        case ev.InitTransferRequested():
            return state
        case _:
            return State.SERVING


def _refusal(cell: Cell, verb: Verb, state: State) -> str:
    match cell:
        case Cell.WEIGHT_UPDATE_OPEN:
            return f"{verb.command} is not allowed while a weight update is open: finish or abort it first"
        case Cell.WEIGHTS_NOT_READY:
            return f"{verb.command} is not allowed: the weights are not fit to serve before a good update"
        case Cell.NOT_READY:
            return "the engine is still loading"
        case Cell.ENGINE_FAILED:
            return "the engine has failed"
        case Cell.SHUTTING_DOWN:
            return "the instance shuts down"
        case _:
            return f"{verb.command} is not allowed while {state.value}"


def _update_info(facts: Facts) -> fx.UpdateInfo | None:
    session = facts.session
    if session is not None:
        phase = Phase.LOADING if session.loading else Phase.OPEN
        return fx.UpdateInfo(phase, session.id, session.owner, session.chunks)
    if facts.bad is None:
        return None
    last = facts.last_session
    if last is None or facts.bad is not Phase.TAINTED:
        return fx.UpdateInfo(facts.bad)
    return fx.UpdateInfo(facts.bad, last.id, last.owner, last.chunks)


def _moved_memory(facts: Facts, asleep: tuple[Tag, ...]) -> Facts:
    """Somebody put memory to sleep or woke it behind our back.

    The engine does not tell the level of a sleep: weights that somebody else released count as
    discarded, since nothing confirms that they come back.
    """
    if not asleep:
        return facts.fully_woken()
    gone = Tag.WEIGHTS in asleep and Tag.WEIGHTS not in facts.asleep
    return replace(
        facts.with_stop(Origin.SLEEP),
        asleep=asleep,
        sleep_level=facts.sleep_level or 2,
        bad=Phase.DISCARDED if gone else facts.bad,
    )
