"""Whatever the order of events, the invariants hold."""

import random
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from statemachine import effects as fx
from statemachine import events as ev
from statemachine.lifecycle import EventNotAllowed, Refused
from statemachine.states import Admission, Mode, Phase, State, Tag
from statemachine.table import LIVING
from tests.statemachine.driver import Driver

MODES = st.sampled_from([Mode.KEEP, Mode.WAIT, Mode.ABORT])
COMMANDS: st.SearchStrategy[tuple[type[ev.Request], dict[str, object]]] = st.one_of(
    st.tuples(st.just(ev.PauseRequested), st.fixed_dictionaries({"mode": MODES})),
    st.tuples(st.just(ev.ResumeRequested), st.just({})),
    st.tuples(st.just(ev.SleepRequested), st.fixed_dictionaries({"level": st.integers(0, 2), "mode": MODES})),
    st.tuples(
        st.just(ev.WakeUpRequested),
        st.fixed_dictionaries(
            {"tags": st.none() | st.lists(st.sampled_from(["weights", "kv_cache", "scheduling"])).map(tuple)}
        ),
    ),
    st.tuples(st.just(ev.InitTransferRequested), st.just({})),
    st.tuples(st.just(ev.StartUpdateRequested), st.fixed_dictionaries({"pause_mode": MODES})),
    st.tuples(st.just(ev.UpdateWeightsRequested), st.just({})),
    st.tuples(
        st.just(ev.FinishUpdateRequested),
        st.fixed_dictionaries(
            {
                "allow_empty": st.booleans(),
                "clear_cache": st.booleans(),
                "weight_version": st.sampled_from([None, "v1", "v2"]),
            }
        ),
    ),
    st.tuples(st.just(ev.AbortUpdateRequested), st.just({})),
)
FAILABLE_CALLS = [
    fx.PauseEngine,
    fx.ResumeEngine,
    fx.SleepEngine,
    fx.WakeEngine,
    fx.InitTransfer,
    fx.StartUpdate,
    fx.LoadChunk,
    fx.FinishUpdate,
    fx.SetVersion,
    fx.ResetCaches,
]
FAILABLE = st.sampled_from(FAILABLE_CALLS)
MAY_MAKE_GOOD = {"FinishUpdateRequested", "AbortUpdateRequested", "StartUpdateRequested", "LeaseExpired"}


class AnyOrder(RuleBasedStateMachine):
    """Commands, failures, deaths and what happens behind our back, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.accepted: set[int] = set()
        self.ticket = 0
        self.clock_s = 0.0
        self.ready = False
        self.routable = False
        self.gate = Admission.REFUSED
        self.good = True
        self.state = State.STARTING

    def feed(self, event: ev.Event) -> None:
        operation = self.driver.life.picture.operation
        own = isinstance(event, ev.Request | ev.LeaseExpired)
        verb = type(event).__name__ if own else operation and operation.verb
        try:
            effects = self.driver.feed(event)
        except EventNotAllowed:
            return
        for effect in effects:
            match effect:
                case fx.ShowHealth(statuses=statuses):
                    self.ready = statuses["readiness"]
                case fx.JoinDiscovery():
                    assert self.ready, "routable before readiness was SERVING"
                    assert self.gate is Admission.OPEN, "routable before requests are admitted"
                    self.routable = True
                case fx.LeaveDiscovery():
                    self.routable = False
                case fx.Admit(admission=admission):
                    self.gate = admission
                case fx.Call():
                    assert not self.ready and not self.routable, "an engine call while ready"
                case fx.Publish(picture=picture):
                    if picture.weights.good and not self.good:
                        assert verb in MAY_MAKE_GOOD, f"{verb} made bad weights good"
                    self.good = picture.weights.good
                    if self.state is State.FAILED:
                        assert picture.state in (State.FAILED, State.SHUTTING_DOWN)
                    self.state = picture.state
                case _:
                    pass

    @rule(transfer=st.booleans(), stale=st.booleans())
    @precondition(lambda self: self.driver.life.state is State.STARTING)
    def loaded(self, transfer: bool, stale: bool) -> None:
        self.feed(ev.EngineLoaded(weight_transfer=transfer, stale=stale))

    @rule()
    @precondition(lambda self: not self.driver.life.busy)
    def another_version_is_required(self) -> None:
        self.feed(ev.WeightsStale(ev.Cause("announcement")))

    @rule(of_session=st.booleans())
    @precondition(lambda self: not self.driver.life.busy)
    def a_lease_runs_out(self, of_session: bool) -> None:
        session = self.driver.life.facts.session
        if of_session and session is None:
            return
        self.feed(ev.LeaseExpired(ev.Cause("LeaseExpired"), session.id if of_session and session else None))

    @rule(command=COMMANDS, held=st.integers(0, 2))
    @precondition(lambda self: not self.driver.life.busy)
    def command(self, command: tuple[type[ev.Request], dict[str, object]], held: int) -> None:
        kind, fields = command
        self.ticket += 1
        if kind is ev.StartUpdateRequested:
            fields = {**fields, "session": f"s{self.ticket}"}
        event: Any = kind(ticket=self.ticket, cause=ev.Cause(kind.__name__), held=held, **fields)
        before = self.driver.life.facts
        try:
            self.feed(event)
        except Refused:
            assert self.driver.life.facts == before
            assert not self.driver.life.busy
        else:
            self.accepted.add(self.ticket)

    @rule()
    @precondition(lambda self: self.driver.life.running_call)
    def the_call_ends(self) -> None:
        call = self.driver.life.running_call
        assert call is not None
        self.feed(self.driver.engine.carry_out(call))

    @rule(took_effect=st.booleans())
    @precondition(
        lambda self: (
            self.driver.life.running_call and not isinstance(self.driver.life.running_call.call, fx.AskEngine)
        )
    )
    def the_call_times_out(self, took_effect: bool) -> None:
        call = self.driver.life.running_call
        assert call is not None
        if took_effect:
            self.driver.engine.carry_out(call)
        self.feed(ev.CallFailed(call.number, "too long", timed_out=True))

    @rule(kind=FAILABLE)
    def the_next_call_of_a_kind_fails(self, kind: type) -> None:
        self.driver.engine.fail.append(kind)

    @rule(number=st.integers(-1, 3))
    @precondition(lambda self: self.driver.life.running_call)
    def an_old_call_ends(self, number: int) -> None:
        call = self.driver.life.running_call
        if call is None or number < call.number:
            self.feed(ev.CallSucceeded(number))

    @rule(seconds=st.floats(0.1, 100.0), stale=st.booleans())
    def the_periodic_question_is_answered(self, seconds: float, stale: bool) -> None:
        self.clock_s += seconds
        generation = self.driver.life.generation - (1 if stale else 0)
        self.feed(ev.Observed(generation, self.driver.engine.view(), self.clock_s))

    @rule(scheduling=st.booleans())
    @precondition(lambda self: not self.driver.life.busy)
    def somebody_acts_behind_our_back(self, scheduling: bool) -> None:
        self.driver.engine.scheduling = scheduling
        self.driver.engine.scheduled_where_forbidden = False

    @rule()
    @precondition(lambda self: self.driver.life.running_call)
    def a_drain_is_cut(self) -> None:
        self.feed(ev.DrainCut(ev.Cause("pause", "cut")))

    @rule(event=st.sampled_from([ev.EngineDied("x"), ev.EngineUnresponsive()]))
    @precondition(lambda self: self.ticket > 12)
    def the_engine_is_lost(self, event: ev.Event) -> None:
        self.feed(event)

    @rule()
    @precondition(lambda self: self.ticket > 12)
    def shutdown(self) -> None:
        self.feed(ev.ShutdownRequested(ev.Cause("signal")))

    @invariant()
    def ready_only_when_serving_and_settled(self) -> None:
        picture = self.driver.life.picture
        assert picture.ready == (picture.state is State.SERVING and picture.settled)
        assert self.ready == picture.ready
        assert self.routable == picture.ready
        if picture.ready:
            assert picture.weights.good and self.gate is Admission.OPEN and not picture.reasons
        else:
            assert picture.reasons

    @invariant()
    def every_accepted_command_is_answered_exactly_once(self) -> None:
        answered = self.accepted & set(self.driver.answers)
        unanswered = self.accepted - answered
        assert len(unanswered) <= (1 if self.driver.life.busy else 0)

    @invariant()
    def nothing_is_scheduled_by_us_where_it_must_not_be(self) -> None:
        assert not self.driver.engine.scheduled_where_forbidden

    @invariant()
    def a_settled_picture_is_what_its_facts_say(self) -> None:
        life = self.driver.life
        if life.busy or life.state not in LIVING:
            return
        facts, picture = life.facts, life.picture
        assert facts.scheduling == (picture.state is State.SERVING)
        assert (picture.weight_update is None) == facts.good
        assert picture.weight_update is None or picture.weight_update.phase in set(Phase)
        assert (picture.sleep is not None) == bool(facts.asleep)
        assert picture.state is not State.ASLEEP or facts.asleep == tuple(Tag)


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestAnyOrder = AnyOrder.TestCase


Fields: TypeAlias = Callable[[random.Random], dict[str, object]]


def _a_mode(chance: random.Random) -> Mode:
    return chance.choice([Mode.KEEP, Mode.WAIT, Mode.ABORT])


VERBS: list[tuple[type[ev.Request], Fields]] = [
    (ev.PauseRequested, lambda chance: {"mode": _a_mode(chance)}),
    (ev.ResumeRequested, lambda chance: {}),
    (ev.SleepRequested, lambda chance: {"level": chance.randint(0, 2), "mode": _a_mode(chance)}),
    (
        ev.WakeUpRequested,
        lambda chance: {"tags": chance.choice([None, ("weights",), ("kv_cache",), ("scheduling",)])},
    ),
    (ev.InitTransferRequested, lambda chance: {}),
    (ev.StartUpdateRequested, lambda chance: {"pause_mode": _a_mode(chance)}),
    (ev.UpdateWeightsRequested, lambda chance: {}),
    (
        ev.FinishUpdateRequested,
        lambda chance: {
            "allow_empty": chance.random() < 0.5,
            "clear_cache": chance.random() < 0.5,
            "weight_version": chance.choice([None, "v1", "v2"]),
        },
    ),
    (ev.AbortUpdateRequested, lambda chance: {}),
]
STORIES, STEPS = 240, 60


@pytest.mark.parametrize("part", range(4))
def test_long_stories_in_which_most_calls_go_well(part: int) -> None:
    """The same without a fondness for odd orders, so that sessions, sleeps and failures come together."""
    for seed in range(part * STORIES // 4, (part + 1) * STORIES // 4):
        chance, machine = random.Random(seed), AnyOrder()
        machine.loaded(transfer=True, stale=chance.random() < 0.1)
        told: list[str] = []
        try:
            while len(told) < STEPS and machine.driver.life.state in LIVING:
                told.append(a_step(machine, chance))
                machine.ready_only_when_serving_and_settled()
                machine.every_accepted_command_is_answered_exactly_once()
                machine.nothing_is_scheduled_by_us_where_it_must_not_be()
                machine.a_settled_picture_is_what_its_facts_say()
        except Exception as error:
            error.add_note(f"story {seed}: {'; '.join(told)}; and then")
            raise


def a_step(machine: AnyOrder, chance: random.Random) -> str:
    call = machine.driver.life.running_call
    kind = chance.choice(FAILABLE_CALLS)
    of_session = chance.random() < 0.7
    steps: list[tuple[int, str, Callable[[], None]]] = [
        (3, f"{kind.__name__} will fail", lambda: machine.the_next_call_of_a_kind_fails(kind)),
        (3, "asked", lambda: machine.the_periodic_question_is_answered(chance.uniform(1, 100), False)),
    ]
    if call is not None:
        steps.append((50, "it ends", machine.the_call_ends))
        steps.append((2, "cut", machine.a_drain_is_cut))
        if not isinstance(call.call, fx.AskEngine):
            steps.append((3, "it times out", lambda: machine.the_call_times_out(chance.random() < 0.5)))
    else:
        verb, fields = chance.choice(VERBS)
        command = verb, fields(chance)
        steps.append((40, str(command), lambda: machine.command(command, chance.choice([0, 0, 1]))))
        steps.append((5, "lease", lambda: machine.a_lease_runs_out(of_session)))
        steps.append((2, "outside", lambda: machine.somebody_acts_behind_our_back(chance.random() < 0.5)))
        steps.append((2, "stale", machine.another_version_is_required))
    _, told, do = chance.choices(steps, [weight for weight, *_ in steps])[0]
    do()
    return told
