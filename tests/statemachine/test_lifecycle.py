"""The rules of the contract (section 2) and the notes of the verb table, as stories."""

from typing import Any

import pytest

from statemachine import effects as fx
from statemachine import events as ev
from statemachine.lifecycle import Refused
from statemachine.states import Admission, Mode, Origin, Phase, State, Tag
from tests.statemachine.driver import Driver, request

PAUSE, RESUME, SLEEP, WAKE = ev.PauseRequested, ev.ResumeRequested, ev.SleepRequested, ev.WakeUpRequested
INIT, START, UPDATE = ev.InitTransferRequested, ev.StartUpdateRequested, ev.UpdateWeightsRequested
FINISH, ABORT = ev.FinishUpdateRequested, ev.AbortUpdateRequested


def kinds(effects: list[fx.Effect]) -> list[type]:
    return [type(e) for e in effects]


def refusal(driver: Driver, verb: type[ev.Request], **fields: Any) -> str:
    """The code that a command is refused with."""
    with pytest.raises(Refused) as refused:
        driver.do(verb, **fields)
    return refused.value.code


@pytest.mark.parametrize(
    ("verb", "fields", "state"),
    [
        (PAUSE, {"mode": Mode.WAIT}, State.PAUSED),
        (SLEEP, {"level": 1}, State.ASLEEP),
        (START, {}, State.WEIGHT_UPDATE),
    ],
)
def test_traffic_leaves_before_the_engine_is_called(
    verb: type[ev.Request], fields: dict[str, Any], state: State
) -> None:
    """Subscribe before advertise; unregister before sleep: health and discovery come first."""
    driver = Driver.serving()
    effects = driver.feed(request(verb, **fields))
    assert kinds(effects) == [fx.ShowHealth, fx.LeaveDiscovery, fx.Admit, fx.Publish, fx.Call]
    assert driver.life.state is state
    assert not driver.life.picture.settled


def test_traffic_comes_back_after_the_engine_has_confirmed_and_the_reply_comes_last() -> None:
    driver = Driver.serving()
    driver.do(PAUSE)
    assert kinds(driver.feed(request(RESUME, 9))) == [fx.Publish, fx.Call]
    call = driver.life.running_call
    assert call is not None
    effects = driver.feed(ev.CallSucceeded(call.number))
    assert kinds(effects) == [fx.Admit, fx.ShowHealth, fx.JoinDiscovery, fx.Publish, fx.Answer]


def test_partial_wake_keeps_traffic_away() -> None:
    """Waking the weights alone is what a colocated trainer does before it loads new ones."""
    driver = Driver.serving()
    driver.do(SLEEP, level=1)
    with pytest.raises(Refused, match="while asleep"):  # scheduling on unmapped memory
        driver.do(RESUME)
    assert driver.do(WAKE, tags=("weights",)).result == {"woken": ["weights"]}
    assert driver.life.state is State.PARTIALLY_AWAKE
    assert not driver.engine.scheduling
    assert driver.do(WAKE).result == {"woken": ["kv_cache"]}
    assert driver.life.state is State.SERVING


def test_a_pause_asked_for_by_two_is_ended_by_one_resume() -> None:
    driver = Driver.serving()
    driver.do(PAUSE, mode=Mode.ABORT)
    called = len(driver.calls())
    assert driver.do(SLEEP, level=0).changed
    assert len(driver.calls()) == called  # remembered, not sent
    assert driver.life.picture.paused == fx.Paused(Mode.ABORT, (Origin.COMMAND, Origin.SLEEP))
    driver.do(RESUME)
    assert driver.life.state is State.SERVING


def test_wake_up_ends_only_a_level_0_sleep() -> None:
    driver = Driver.serving()
    driver.do(SLEEP, level=0)
    driver.do(PAUSE)
    assert driver.do(WAKE).changed
    assert driver.life.facts.stops == (Origin.COMMAND,)  # a pause stands beside it
    assert driver.life.state is State.PAUSED
    driver.do(RESUME)
    driver.do(SLEEP, level=0)
    assert not driver.do(WAKE, tags=("weights",)).changed
    assert driver.do(WAKE, tags=("scheduling",)).result == {"woken": ["scheduling"]}
    assert driver.life.state is State.SERVING


def test_a_full_wake_up_ends_the_pauses_older_than_the_sleep() -> None:
    driver = Driver.serving()
    driver.do(PAUSE)
    driver.do(SLEEP)
    driver.do(WAKE)
    assert driver.life.state is State.SERVING


def test_a_pause_inside_a_session_outlives_the_wake_up_and_the_finish() -> None:
    driver = Driver.serving()
    driver.do(SLEEP)
    driver.do(WAKE, tags=("weights",))
    driver.do(START)
    driver.do(PAUSE)
    driver.do(WAKE)
    assert driver.life.state is State.WEIGHT_UPDATE
    driver.do(UPDATE)
    driver.do(FINISH)
    assert driver.life.state is State.PAUSED
    assert not driver.engine.scheduling


def test_frozen_requests_never_drain() -> None:
    driver = Driver.serving()
    driver.do(PAUSE, mode=Mode.KEEP)
    assert not driver.do(PAUSE, mode=Mode.KEEP).changed
    assert not driver.do(PAUSE, mode=Mode.WAIT, held=0).changed
    with pytest.raises(Refused, match="2 requests are frozen by keep") as refused:
        driver.do(PAUSE, mode=Mode.WAIT, held=2)
    assert refused.value.code == "invalid_state"
    assert driver.do(PAUSE, mode=Mode.ABORT, held=2).changed
    assert driver.life.facts.stop_mode is Mode.ABORT


@pytest.mark.parametrize("last_wake_up", ["inside the session", "after the commit"])
def test_a_session_brackets_the_update_of_a_sleeping_engine(last_wake_up: str) -> None:
    """Update session: prepared with the weights resident, applied in chunks, committed with a version.
    What was received is held against the manifest before the engine's finish, the commit comes before
    anything is scheduled, whenever the last wake-up comes, and one session is open at a time."""
    driver = Driver.serving()
    driver.do(SLEEP)
    assert refusal(driver, START) == "invalid_state"
    driver.do(WAKE, tags=("weights",))
    driver.do(START)
    assert refusal(driver, START) == "weight_update_open"
    driver.do(UPDATE)
    if last_wake_up == "inside the session":
        assert driver.do(WAKE).result == {"woken": ["kv_cache"]}
    called = len(driver.calls())
    missing = "1 of 2 parameters were received"
    assert refusal(driver, FINISH, incomplete=missing) == "incomplete_weight_update"
    assert len(driver.calls()) == called
    driver.do(UPDATE)
    called = len(driver.calls())
    assert driver.do(FINISH, weight_version="v2").result["committed"]
    if last_wake_up == "after the commit":
        assert driver.life.state is State.PARTIALLY_AWAKE and not driver.engine.scheduling
        driver.do(WAKE)
    commit = [fx.FinishUpdate, fx.SetVersion, fx.ResetCaches]
    wake = [fx.WakeEngine] if last_wake_up == "after the commit" else []
    assert [type(call) for call in driver.calls()[called:]] == [*commit, *wake, fx.ResumeEngine]
    assert not driver.engine.scheduled_where_forbidden
    assert driver.life.state is State.SERVING


@pytest.mark.parametrize("begin", [(), ((SLEEP, {}), (WAKE, {"tags": ("weights",)}))])
def test_an_undone_session_leads_back_to_where_it_came_from(begin: tuple[Any, ...]) -> None:
    """No auto-resume; tainted weights: unservable from the start on, and before the first chunk undone by
    an empty finish without a version, which is verified."""
    driver = Driver.serving()
    for kind, fields in begin:
        driver.do(kind, **fields)
    before = driver.life.state
    driver.do(START)
    assert not driver.life.picture.weights.good and not driver.life.picture.ready
    called = len(driver.calls())
    assert driver.do(ABORT).code is None
    undone = driver.calls()[called:]
    assert undone[:2] == [fx.FinishUpdate(), fx.AskEngine()]
    assert not [call for call in undone if isinstance(call, fx.SetVersion)]
    assert driver.life.state is before
    assert driver.life.picture.weights.good
    assert driver.life.facts.version == "default"


@pytest.mark.parametrize("end", ["aborted", "a chunk failed", "its lease ran out", "its undo failed"])
def test_tainted_weights_serve_again_only_after_a_good_finish(end: str) -> None:
    """No auto-resume; tainted weights: nothing but a good finish of a new session leads out, whatever is
    tried. The instance is alive meanwhile: replacing its process is the other way, and not forced."""
    driver = Driver.serving()
    driver.do(START)
    session = driver.life.facts.session
    assert session is not None
    match end:
        case "aborted":
            driver.do(UPDATE)
            driver.do(ABORT)
        case "a chunk failed":
            driver.engine.fail = [fx.LoadChunk]
            assert driver.do(UPDATE).code == "engine_error"
        case "its lease ran out":
            driver.do(UPDATE)
            driver.feed(ev.LeaseExpired(ev.Cause("lease_expired"), session.id))
            driver.settle()
        case _:
            driver.engine.fail = [fx.FinishUpdate]
            assert driver.do(ABORT).code == "engine_error"

    def is_tainted() -> bool:
        health = driver.life.health
        assert (driver.life.state, driver.life.facts.version) == (State.WEIGHT_UPDATE, "default")
        assert health["liveness"] and not health["readiness"] and not driver.engine.scheduling
        return driver.life.facts.bad is Phase.TAINTED

    assert is_tainted()
    assert refusal(driver, RESUME) == "weights_not_ready"
    for verb in (UPDATE, FINISH, ABORT):
        assert refusal(driver, verb) == "invalid_state"
    driver.do(SLEEP)
    driver.do(WAKE)
    assert is_tainted()
    driver.engine.scheduling = True  # somebody resumes it behind our back
    observe(driver)
    driver.settle()
    assert is_tainted()
    driver.do(START)
    assert refusal(driver, FINISH, allow_empty=True) == "empty_weight_update"
    driver.do(ABORT)
    assert is_tainted()
    driver.do(START)
    driver.do(UPDATE)
    driver.do(FINISH, weight_version="v2")
    assert driver.life.picture.ready and driver.life.facts.version == "v2"


def test_an_undo_never_makes_bad_weights_good() -> None:
    driver = Driver.serving()
    driver.do(SLEEP, level=2)
    driver.do(WAKE)
    assert driver.life.picture.weight_update == fx.UpdateInfo(Phase.DISCARDED)
    driver.do(START)
    driver.do(ABORT)
    assert driver.life.picture.weight_update == fx.UpdateInfo(Phase.DISCARDED)
    assert not driver.engine.scheduling


def test_a_session_aborted_after_a_chunk_is_tainted_until_a_good_finish() -> None:
    driver = Driver.serving()
    driver.do(START)
    driver.do(UPDATE)
    driver.do(ABORT)
    picture = driver.life.picture
    assert picture.weight_update is not None and picture.weight_update.phase is Phase.TAINTED
    with pytest.raises(Refused) as refused:
        driver.do(RESUME)
    assert refused.value.code == "weights_not_ready"
    driver.do(START)
    driver.do(UPDATE)
    assert driver.do(FINISH, weight_version="v2").result == {"committed": True, "version": "v2", "chunks": 1}
    assert driver.life.state is State.SERVING


def test_a_failed_chunk_taints_before_anything_else_is_tried() -> None:
    driver = Driver.serving()
    driver.do(START)
    driver.engine.fail = [fx.LoadChunk]
    driver.feed(request(UPDATE, 50))
    call = driver.life.running_call
    assert call is not None
    effects = driver.feed(driver.engine.carry_out(call))
    assert driver.life.facts.bad is Phase.TAINTED
    gate = next(e for e in effects if isinstance(e, fx.Admit))
    assert gate.admission is Admission.REFUSED and gate.end_held  # what keep froze ends now
    driver.settle()
    assert driver.answers[50].code == "engine_error"
    with pytest.raises(Refused):
        driver.do(FINISH)


def test_a_finish_goes_on_with_the_first_step_not_done() -> None:
    """Version visible only at commit, and the commit is all of its steps."""
    driver = Driver.serving()
    driver.do(START)
    driver.do(UPDATE)
    driver.engine.fail = [fx.ResetCaches]
    assert driver.do(FINISH, weight_version="v").code == "engine_error"
    assert driver.life.state is State.WEIGHT_UPDATE
    assert driver.life.facts.version == "default"  # visible only when committed
    for verb in (UPDATE, ABORT):
        with pytest.raises(Refused):
            driver.do(verb)
    called = len(driver.calls())
    assert driver.do(FINISH, weight_version="v").code is None
    assert [type(c) for c in driver.calls()[called:]] == [fx.ResetCaches, fx.ResumeEngine]
    assert driver.life.state is State.SERVING


def test_a_failed_resume_after_the_commit_is_told_and_tried_again() -> None:
    driver = Driver.serving()
    driver.do(START)
    driver.do(UPDATE)
    driver.engine.fail = [fx.ResumeEngine]
    driver.feed(request(FINISH, 70, weight_version="v"))
    while 70 not in driver.answers:
        driver.step()
    answer = driver.answers[70]
    assert (answer.code, answer.result["committed"]) == ("engine_error", True)
    assert driver.life.state is State.PAUSED
    driver.settle()
    assert driver.life.state is State.SERVING


def test_a_finish_without_a_chunk_must_be_declared() -> None:
    """Bracket, do not own, the transfer: weights that came by a way not seen here are declared."""
    driver = Driver.serving()
    driver.do(START)
    with pytest.raises(Refused) as refused:
        driver.do(FINISH)
    assert refused.value.code == "empty_weight_update"
    assert driver.do(FINISH, allow_empty=True, weight_version="elsewhere").code is None
    assert driver.life.facts.version == "elsewhere"


def test_bad_weights_are_declared_good_only_by_name() -> None:
    """Weights-required flag: a load that the service could not see counts once the trainer declares it."""
    driver = Driver.serving()
    driver.do(SLEEP, level=2)
    driver.do(WAKE)
    driver.do(START)
    with pytest.raises(Refused) as refused:
        driver.do(FINISH, allow_empty=True)
    assert refused.value.code == "empty_weight_update"
    driver.do(FINISH, allow_empty=True, weight_version="v")
    assert driver.life.state is State.SERVING


def test_a_failed_start_is_undone() -> None:
    driver = Driver.serving()
    driver.engine.fail = [fx.StartUpdate]
    driver.engine.meta = True  # the worker got half way
    assert driver.do(START).code == "engine_error"
    assert fx.FinishUpdate() in driver.calls()
    assert driver.life.state is State.SERVING


def test_a_start_that_cannot_be_undone_leaves_tainted_weights() -> None:
    driver = Driver.serving()
    driver.engine.fail = [fx.StartUpdate, fx.FinishUpdate]
    driver.engine.meta = True
    assert driver.do(START).code == "engine_error"
    picture = driver.life.picture
    assert picture.weight_update is not None and picture.weight_update.phase is Phase.TAINTED
    assert not driver.engine.scheduling


@pytest.mark.parametrize("end", ["abort", "lease"])
@pytest.mark.parametrize("asleep", [(Tag.KV_CACHE,), tuple(Tag)], ids=["in part", "behind our back"])
def test_a_session_may_end_without_an_engine_call_while_memory_sleeps(
    end: str, asleep: tuple[Tag, ...]
) -> None:
    driver = Driver.serving()
    driver.do(SLEEP)
    driver.do(WAKE, tags=("weights",))
    driver.do(START)
    driver.do(UPDATE)
    driver.engine.asleep = asleep
    observe(driver)
    session = driver.life.facts.session
    assert session is not None
    if end == "abort":
        driver.do(ABORT)
    else:
        driver.feed(ev.LeaseExpired(ev.Cause("lease_expired"), session.id))
    assert driver.life.state is (State.ASLEEP if len(asleep) == 2 else State.PARTIALLY_AWAKE)
    driver.do(WAKE)
    assert driver.life.facts.bad is Phase.TAINTED
    assert driver.life.state is State.WEIGHT_UPDATE and not driver.engine.scheduling


@pytest.mark.parametrize(
    ("begin", "after"),
    [
        ([(PAUSE, {})], State.PAUSED),
        ([(SLEEP, {}), (WAKE, {"tags": ("weights",)})], State.PARTIALLY_AWAKE),
        ([], State.SERVING),
    ],
)
def test_a_repeated_finish_may_have_no_step_left(
    begin: list[tuple[type[ev.Request], dict[str, Any]]], after: State
) -> None:
    """The caches could not be cleared, and then need not be."""
    driver = Driver.serving()
    for kind, fields in begin:
        driver.do(kind, **fields)
    driver.do(START)
    driver.do(UPDATE)
    driver.engine.fail = [fx.ResetCaches]
    assert driver.do(FINISH, weight_version="v").code == "engine_error"
    assert driver.do(FINISH, weight_version="v", clear_cache=False).result["committed"]
    assert (driver.life.state, driver.life.facts.version) == (after, "v")


def test_level_2_discards_the_weights() -> None:
    """Weights-required flag: after a sleep of level 2 nothing resumes until new weights are committed."""
    driver = Driver.serving()
    driver.do(SLEEP, level=2)
    driver.do(WAKE)
    assert driver.life.state is State.WEIGHT_UPDATE
    assert refusal(driver, RESUME) == "weights_not_ready"
    assert not driver.engine.scheduling and not driver.life.health["readiness"]
    driver.do(START)
    driver.do(UPDATE)
    driver.do(ABORT)
    assert refusal(driver, RESUME) == "weights_not_ready"
    driver.do(START)
    driver.do(UPDATE)
    driver.do(FINISH)
    assert driver.life.state is State.SERVING


def test_a_failed_wake_up_has_the_tags_that_the_engine_says() -> None:
    driver = Driver.serving()
    driver.do(SLEEP)
    driver.engine.fail = [fx.WakeEngine]
    driver.engine.asleep = (Tag.KV_CACHE,)  # it had woken the weights before it failed
    answer = driver.do(WAKE)
    assert (answer.code, answer.result) == ("engine_error", {"woken": ["weights"]})
    assert driver.life.state is State.PARTIALLY_AWAKE
    assert driver.do(WAKE).code is None
    assert driver.life.state is State.SERVING


def test_a_call_that_timed_out_is_answered_before_the_engine_is_asked() -> None:
    driver = Driver.serving()
    driver.feed(request(PAUSE, 5))
    call = driver.life.running_call
    assert call is not None
    driver.engine.scheduling = False  # it took effect after all
    driver.feed(ev.CallFailed(call.number, "60 s are over", timed_out=True))
    assert driver.answers[5].code == "engine_timeout"
    assert driver.life.busy
    driver.settle()
    assert driver.life.state is State.PAUSED


def test_a_sleep_that_timed_out_ends_its_drain() -> None:
    driver = Driver.serving()
    driver.feed(request(SLEEP, 5, mode=Mode.WAIT))
    call = driver.life.running_call
    assert call is not None
    effects = driver.feed(ev.CallFailed(call.number, "120 s are over", timed_out=True))
    assert fx.CutDrain() in effects
    driver.settle()
    assert driver.life.state is State.SERVING


def test_an_engine_that_cannot_be_resumed_has_failed() -> None:
    driver = Driver.serving()
    driver.do(START)
    driver.engine.fail = [fx.ResumeEngine] * 99
    driver.feed(request(ABORT, 8))
    driver.settle()
    assert driver.life.state is State.FAILED
    assert driver.answers[8].code == "engine_failed"
    delays = [e.after_s for e in driver.said if isinstance(e, fx.Call) and e.call == fx.ResumeEngine()]
    assert delays[:4] == [0.0, 0.2, 0.4, 0.8] and 9 <= sum(delays) <= 11


def test_an_abort_cuts_a_drain_and_keeps_its_place() -> None:
    driver = Driver.serving()
    driver.feed(request(PAUSE, 1, mode=Mode.WAIT))
    assert driver.feed(ev.DrainCut(ev.Cause("pause", "hurry"))) == [fx.CutDrain()]
    driver.settle()
    assert driver.answers[1].code is None
    assert driver.answers[1].result == {"cut_by": "hurry"}


def test_the_death_of_the_engine_answers_what_runs() -> None:
    driver = Driver.serving()
    driver.feed(request(PAUSE, 1, mode=Mode.WAIT))
    effects = driver.feed(ev.EngineDied("killed"))
    assert driver.answers[1].code == "engine_failed"
    assert driver.life.health == dict.fromkeys(driver.life.health, False)
    assert kinds(effects)[-1] is fx.BeginFailure


def test_a_shutdown_waits_for_nothing_and_keeps_liveness() -> None:
    driver = Driver.serving()
    driver.feed(request(PAUSE, 1, mode=Mode.WAIT))
    effects = driver.feed(ev.ShutdownRequested(ev.Cause("signal")))
    assert driver.answers[1].code == "shutting_down"
    assert effects[-1] == fx.BeginShutdown(fx.Drain.END)
    driver.feed(ev.EngineDied("as told"))
    assert driver.life.state is State.SHUTTING_DOWN
    assert driver.life.health["liveness"]
    driver.feed(ev.StageBegan("drain"))
    assert driver.life.picture.operation == fx.Running("drain", None)
    driver.feed(ev.Stopped())
    assert driver.life.picture.operation is None
    assert driver.life.state is State.STOPPED


@pytest.mark.parametrize(
    ("story", "drain"),
    [
        ((), fx.Drain.RUN),
        (((PAUSE, {"mode": Mode.KEEP}),), fx.Drain.RESUME),
        (((SLEEP, {}),), fx.Drain.END),
        (((START, {}),), fx.Drain.END),
        (((SLEEP, {"level": 2}), (WAKE, {})), fx.Drain.END),
    ],
)
def test_how_requests_end_at_a_shutdown(story: tuple[Any, ...], drain: fx.Drain) -> None:
    driver = Driver.serving()
    for kind, fields in story:
        driver.do(kind, **fields)
    assert driver.feed(ev.ShutdownRequested(ev.Cause("signal")))[-1] == fx.BeginShutdown(drain)


def test_liveness_stays_down_when_a_failed_instance_shuts_down() -> None:
    driver = Driver.serving()
    driver.feed(ev.EngineDied("gone"))
    driver.feed(ev.ShutdownRequested(ev.Cause("signal")))
    assert not driver.life.health["liveness"]


def observe(driver: Driver, at_s: float = 0.0) -> list[fx.Effect]:
    return driver.feed(ev.Observed(driver.life.generation, driver.engine.view(), at_s))


def test_a_pause_behind_our_back_is_followed() -> None:
    driver = Driver.serving()
    driver.engine.scheduling = False
    observe(driver)
    assert driver.life.picture.paused == fx.Paused(Mode.UNKNOWN, (Origin.OUTSIDE,))
    driver.engine.scheduling = True
    observe(driver)
    assert driver.life.state is State.SERVING


def test_an_answer_from_before_a_command_is_thrown_away() -> None:
    driver = Driver.serving()
    asked = driver.life.generation
    driver.do(PAUSE)
    driver.feed(ev.Observed(asked, ev.EngineView(scheduling=True), 0.0))
    assert driver.life.state is State.PAUSED


def test_a_resume_behind_our_back_onto_sleeping_memory_is_stopped_and_the_third_fails() -> None:
    driver = Driver.serving()
    driver.do(SLEEP)
    for at_s in (0.0, 20.0):
        driver.engine.scheduling = True
        observe(driver, at_s)
        driver.settle()
        assert not driver.engine.scheduling
        assert driver.life.state is State.ASLEEP
    driver.engine.scheduling = True
    observe(driver, 59.0)
    assert driver.life.state is State.FAILED


def test_resumes_behind_our_back_that_are_far_apart_do_not_fail() -> None:
    driver = Driver.serving()
    driver.do(SLEEP)
    for at_s in (0.0, 40.0, 80.0, 120.0):
        driver.engine.scheduling = True
        observe(driver, at_s)
        driver.settle()
    assert driver.life.state is State.ASLEEP


@pytest.mark.parametrize(
    ("mode", "admission"),
    [(Mode.KEEP, Admission.HELD), (Mode.WAIT, Admission.REFUSED), (Mode.ABORT, Admission.REFUSED)],
)
def test_admission_follows_the_mode_of_the_stop(mode: Mode, admission: Admission) -> None:
    driver = Driver.serving()
    gates = [e.admission for e in driver.feed(request(PAUSE, mode=mode)) if isinstance(e, fx.Admit)]
    assert gates == [admission]  # already while the call runs


def test_sleeping_memory_ends_held_requests_unless_the_mode_is_keep() -> None:
    driver = Driver.serving()
    driver.do(PAUSE, mode=Mode.KEEP)
    driver.do(SLEEP, mode=Mode.WAIT)
    assert [e for e in driver.said if isinstance(e, fx.Admit)][-1].end_held
    other = Driver.serving()
    other.do(SLEEP, mode=Mode.KEEP)
    assert [e for e in other.said if isinstance(e, fx.Admit)][-1].admission is Admission.HELD


def test_an_init_withdraws_readiness_for_its_duration() -> None:
    """It blocks EngineCore's only thread."""
    driver = Driver.serving()
    driver.feed(request(INIT))
    assert driver.life.state is State.SERVING
    assert not driver.life.health["readiness"] and driver.life.health["vllm.Inference"]
    driver.settle()
    assert driver.life.health["readiness"]


@pytest.mark.parametrize("verb", [INIT, START])
def test_without_a_configured_transfer_there_is_no_update(verb: type[ev.Request]) -> None:
    driver = Driver()
    driver.feed(ev.EngineLoaded(weight_transfer=False))
    with pytest.raises(Refused, match="no weight transfer") as refused:
        driver.do(verb)
    assert refused.value.code == "invalid_state"
    assert driver.life.picture.ready


def test_nothing_changes_for_others_when_nothing_changes() -> None:
    driver = Driver.serving()
    assert kinds(driver.feed(request(RESUME))) == [fx.Answer]
    assert kinds(driver.feed(request(WAKE, 2))) == [fx.Answer]


def test_an_instance_without_the_required_version_is_stopped_before_it_is_ready() -> None:
    driver = Driver()
    driver.feed(ev.EngineLoaded(stale=True))
    assert driver.life.state is State.WEIGHT_UPDATE
    driver.settle()
    assert not driver.engine.scheduling
    assert driver.life.picture.weight_update == fx.UpdateInfo(Phase.STALE)
    driver.do(START)
    driver.do(UPDATE)
    driver.do(FINISH, weight_version="v5")
    assert driver.life.state is State.SERVING


def test_a_serving_instance_that_cannot_get_the_required_version_leaves_traffic_first() -> None:
    driver = Driver.serving()
    effects = driver.feed(ev.WeightsStale(ev.Cause("announcement", "a")))
    assert kinds(effects) == [fx.ShowHealth, fx.LeaveDiscovery, fx.Admit, fx.Publish, fx.Call]
    driver.settle()
    assert driver.life.picture.weight_update == fx.UpdateInfo(Phase.STALE)
    assert not driver.engine.scheduling


def test_a_session_whose_lease_runs_out_is_undone_or_tainted() -> None:
    driver = Driver.serving()
    driver.do(START)
    session = driver.life.facts.session
    assert session is not None
    driver.feed(ev.LeaseExpired(ev.Cause("lease_expired"), session.id))
    driver.settle()
    assert driver.life.state is State.SERVING
    driver.do(START)
    driver.do(UPDATE)
    session = driver.life.facts.session
    assert session is not None
    driver.feed(ev.LeaseExpired(ev.Cause("lease_expired"), session.id))
    driver.settle()
    assert driver.life.facts.bad is Phase.TAINTED


def test_a_pause_whose_lease_runs_out_asleep_is_only_forgotten() -> None:
    driver = Driver.serving()
    driver.do(PAUSE)
    driver.do(SLEEP)
    driver.feed(ev.LeaseExpired(ev.Cause("lease_expired")))
    driver.settle()
    assert driver.life.state is State.ASLEEP
    assert driver.life.facts.stops == (Origin.SLEEP,)
