"""Every pair of state and event has an arrow or is refused; every cell of the verb table holds."""

from dataclasses import replace

import pytest

from statemachine import events as ev
from statemachine.facts import Facts, Session, Situation, situation
from statemachine.lifecycle import EventNotAllowed, Lifecycle, Refused
from statemachine.states import Mode, Origin, Phase, State, Tag
from statemachine.table import ARROWS, VERBS, Cell, Verb
from tests.statemachine.driver import Driver, ModelEngine, request

SERVING = Facts(loaded=True)
PAUSED = replace(SERVING, scheduling=False, stops=(Origin.COMMAND,), stop_mode=Mode.ABORT)
ASLEEP = replace(
    SERVING,
    scheduling=False,
    stops=(Origin.SLEEP,),
    stop_mode=Mode.ABORT,
    sleep_level=1,
    asleep=(Tag.WEIGHTS, Tag.KV_CACHE),
)
SESSION = replace(PAUSED, stop_mode=Mode.KEEP, stops=(Origin.COMMAND, Origin.UPDATE), session=Session("s"))

FACTS: dict[Situation, Facts] = {
    Situation.STARTING: Facts(),
    Situation.SERVING: SERVING,
    Situation.PAUSED_KEEP: replace(PAUSED, stop_mode=Mode.KEEP),
    Situation.PAUSED: PAUSED,
    Situation.PAUSED_BY_SLEEP: replace(PAUSED, stops=(Origin.SLEEP,)),
    Situation.PAUSED_OUTSIDE: replace(PAUSED, stops=(Origin.OUTSIDE,), stop_mode=Mode.UNKNOWN),
    Situation.ASLEEP: ASLEEP,
    Situation.ASLEEP_BAD: replace(ASLEEP, sleep_level=2, bad=Phase.DISCARDED),
    Situation.PARTIAL: replace(ASLEEP, asleep=(Tag.KV_CACHE,)),
    Situation.PARTIAL_BAD: replace(ASLEEP, asleep=(Tag.KV_CACHE,), bad=Phase.TAINTED),
    Situation.PARTIAL_KV_ONLY: replace(ASLEEP, asleep=(Tag.WEIGHTS,)),
    Situation.OPEN: SESSION,
    Situation.LOADING: replace(SESSION, session=Session("s", loading=True, chunks=1)),
    Situation.FINISHED: replace(SESSION, session=Session("s", loading=True, chunks=1, finished=True)),
    Situation.BAD: replace(PAUSED, bad=Phase.TAINTED),
    Situation.FAILED: replace(SERVING, failure="gone"),
    Situation.SHUTTING_DOWN: replace(SERVING, closing=True),
}

SAMPLES: dict[Verb, tuple[type[ev.Request], dict[str, object]]] = {
    Verb.PAUSE: (ev.PauseRequested, {}),
    Verb.RESUME: (ev.ResumeRequested, {}),
    Verb.SLEEP_0: (ev.SleepRequested, {"level": 0}),
    Verb.SLEEP: (ev.SleepRequested, {"level": 1}),
    Verb.WAKE_ALL: (ev.WakeUpRequested, {}),
    Verb.WAKE_SOME: (ev.WakeUpRequested, {"tags": ("weights",)}),
    Verb.INIT: (ev.InitTransferRequested, {}),
    Verb.START: (ev.StartUpdateRequested, {}),
    Verb.UPDATE: (ev.UpdateWeightsRequested, {}),
    Verb.FINISH: (ev.FinishUpdateRequested, {"allow_empty": True}),
    Verb.ABORT: (ev.AbortUpdateRequested, {}),
}

REPORTS: tuple[ev.Event, ...] = (
    ev.EngineLoaded(),
    ev.EngineLoaded(stale=True),
    ev.WeightsStale(ev.Cause("announcement")),
    ev.LeaseExpired(ev.Cause("lease_expired"), "s"),
    ev.LeaseExpired(ev.Cause("lease_expired")),
    ev.EngineDied("gone"),
    ev.EngineUnresponsive(),
    ev.CallSucceeded(99),
    ev.CallFailed(99, "no"),
    ev.Observed(99, ev.EngineView(True), 0.0),
    ev.DrainCut(ev.Cause("pause")),
    ev.ShutdownRequested(ev.Cause("signal")),
    ev.StageBegan("drain"),
    ev.Stopped(),
)

# The table (STATES), written out again by hand: what a whole command comes to when the
# engine does as it is told, with the mode abort and nothing held.
EXPECTED = """
starting                               NR NR NR NR NR NR NR NR NR NR NR
serving                                ok -  ok ok -  -  ok ok IS IS IS
paused, keep                           ok ok ok ok -  -  ok ok IS IS IS
paused, wait or abort                  -  ok ok ok -  -  ok ok IS IS IS
paused by sleep 0                      ok ok -  ok ok -  ok ok IS IS IS
paused from outside                    ok ok ok ok -  -  ok ok IS IS IS
asleep, weights good                   IS IS IS -  ok ok IS IS IS IS IS
asleep, level 2 or weights bad         IS IS IS IS ok ok IS IS IS IS IS
partial, weights in, good              IS IS IS IS ok -  ok ok IS IS IS
partial, weights in, bad               IS IS IS IS ok -  ok ok IS IS IS
partial, only kv_cache in              IS IS IS IS ok ok IS IS IS IS IS
weight_update, open                    ok WO WO WO -  -  WO WO ok ok ok
weight_update, loading                 ok WO WO WO -  -  WO WO ok ok ok
weight_update, engine finished         ok WO WO WO -  -  WO WO IS ok IS
weight_update, tainted / discarded / stale - WN ok ok - - ok ok IS IS IS
failed                                 EF EF EF EF EF EF EF EF EF EF EF
shutting_down                          SD SD SD SD SD SD SD SD SD SD SD
"""
CODES = {
    "IS": "invalid_state",
    "WO": "weight_update_open",
    "WN": "weights_not_ready",
    "NR": "not_ready",
    "EF": "engine_failed",
    "SD": "shutting_down",
}
CELLS = [
    (Situation(" ".join(words[:-11])), verb, cell)
    for line in EXPECTED.strip().splitlines()
    for words in [line.split()]
    for verb, cell in zip(Verb, words[-11:], strict=True)
]


@pytest.mark.parametrize("at", Situation, ids=lambda s: s.value)
def test_the_facts_of_these_tests_make_the_situation(at: Situation) -> None:
    assert situation(FACTS[at]) is at


@pytest.mark.parametrize(("at", "verb", "cell"), CELLS, ids=lambda v: getattr(v, "value", v))
def test_every_cell_of_the_verb_table(at: Situation, verb: Verb, cell: str) -> None:
    facts = FACTS[at]
    engine = ModelEngine(facts.scheduling, facts.asleep, facts.session is not None, facts.session is not None)
    driver = Driver(facts, engine)
    kind, fields = SAMPLES[verb]
    if cell in CODES:
        with pytest.raises(Refused) as refusal:
            driver.do(kind, **fields)
        assert refusal.value.code == CODES[cell]
        assert driver.life.facts == facts
        return
    answer = driver.do(kind, **fields)
    assert answer.code is None
    assert answer.changed is (cell == "ok")


@pytest.mark.parametrize("event", REPORTS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("at", Situation, ids=lambda s: s.value)
def test_every_report_has_an_arrow_or_is_refused(at: Situation, event: ev.Event) -> None:
    """And nothing but the state that an arrow names can come of it."""
    life = Lifecycle(facts=FACTS[at])
    before = life.state
    allowed = {a.dest for a in ARROWS if a.source is before and a.event is type(event)}
    try:
        life.handle(event)
    except EventNotAllowed:
        assert not allowed
        assert (life.state, life.facts) == (before, FACTS[at])
    else:
        assert life.state in allowed


def test_every_situation_and_verb_has_a_cell() -> None:
    assert set(VERBS) == {(s, v) for s in Situation for v in Verb}


def test_no_arrow_leads_out_of_failed_but_shutting_down() -> None:
    assert {a.dest for a in ARROWS if a.source is State.FAILED} == {State.FAILED, State.SHUTTING_DOWN}
    assert {a.dest for a in ARROWS if a.source is State.SHUTTING_DOWN} == {State.SHUTTING_DOWN, State.STOPPED}
    assert not [a for a in ARROWS if a.source is State.STOPPED]


def test_no_arrow_stands_twice() -> None:
    assert len(set(ARROWS)) == len(ARROWS)


def test_a_refusing_cell_leaves_everything_alone() -> None:
    for (at, verb), cell in VERBS.items():
        if not cell.refuses:
            continue
        life = Lifecycle(facts=FACTS[at])
        kind, fields = SAMPLES[verb]
        with pytest.raises(Refused):
            life.handle(request(kind, **fields))  # type: ignore[arg-type]
        assert life.facts == FACTS[at]
        assert not life.busy
        assert cell is not Cell.NOTHING
