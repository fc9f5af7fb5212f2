"""When an instance that fails is left alone, and how it comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.router.breaker import MAX_FAILURES, Breaker, Isolation, Outcome


def use(breaker: Breaker, outcome: Outcome) -> None:
    ticket = breaker.admit()
    assert ticket is not None
    breaker.report(ticket, outcome)


def isolated() -> Breaker:
    breaker = Breaker()
    for _ in range(MAX_FAILURES + 1):
        use(breaker, Outcome.BAD)
    assert breaker.isolation is Isolation.ISOLATED
    return breaker


def test_more_than_three_failures_in_a_row_isolate() -> None:
    breaker = Breaker()
    for _ in range(3):
        use(breaker, Outcome.BAD)
    assert breaker.admits
    use(breaker, Outcome.BAD)
    assert breaker.admit() is None


def test_a_success_resets_the_count() -> None:
    breaker = Breaker()
    for _ in range(5):
        for _ in range(3):
            use(breaker, Outcome.BAD)
        use(breaker, Outcome.GOOD)
    assert breaker.admits and breaker.failures == 0


def test_a_client_that_leaves_says_nothing() -> None:
    breaker = Breaker()
    for _ in range(3):
        use(breaker, Outcome.BAD)
    for _ in range(10):
        use(breaker, Outcome.UNKNOWN)
    assert breaker.failures == 3


def test_failed_probes_count_too() -> None:
    breaker = Breaker()
    use(breaker, Outcome.BAD)
    for _ in range(3):
        breaker.probed(False)
    assert breaker.isolation is Isolation.ISOLATED


def test_a_good_health_page_does_not_hide_that_requests_fail() -> None:
    """With few requests there is a good probe between any two failures."""
    breaker = Breaker()
    for _ in range(4):
        use(breaker, Outcome.BAD)
        breaker.probed(False)
        breaker.probed(True)
    assert not breaker.admits or breaker.isolation is Isolation.HALF_OPEN


def test_after_a_good_probe_one_request_may_try() -> None:
    breaker = isolated()
    breaker.probed(True)
    trial = breaker.admit()
    assert trial is not None and breaker.admit() is None
    breaker.report(trial, Outcome.GOOD)
    assert breaker.isolation is Isolation.CLOSED and breaker.failures == 0


def test_a_trial_that_fails_isolates_at_once() -> None:
    breaker = isolated()
    breaker.probed(True)
    use(breaker, Outcome.BAD)
    assert breaker.isolation is Isolation.ISOLATED


def test_a_trial_whose_client_leaves_does_not_stay_open() -> None:
    breaker = isolated()
    breaker.probed(True)
    use(breaker, Outcome.UNKNOWN)
    assert breaker.admit() is not None


def test_a_long_answer_to_a_trial_lets_others_in_but_forgives_nothing() -> None:
    breaker = isolated()
    breaker.probed(True)
    trial = breaker.admit()
    assert trial is not None
    breaker.answering(trial)
    other = breaker.admit()
    assert other is not None
    breaker.report(other, Outcome.BAD)
    assert breaker.isolation is Isolation.ISOLATED
    breaker.report(trial, Outcome.GOOD)
    assert breaker.isolation is Isolation.ISOLATED


@pytest.mark.parametrize("outcome", [Outcome.GOOD, Outcome.BAD])
def test_what_was_sent_before_the_isolation_does_not_count_after_it(outcome: Outcome) -> None:
    breaker = Breaker()
    late = breaker.admit()
    assert late is not None
    for _ in range(MAX_FAILURES + 1):
        use(breaker, Outcome.BAD)
    breaker.probed(True)
    breaker.answering(late)
    breaker.report(late, outcome)
    assert breaker.isolation is Isolation.HALF_OPEN


def test_its_own_word_brings_it_back_without_a_trial() -> None:
    breaker = isolated()
    breaker.restore()
    assert breaker.admits and breaker.failures == 0
    assert all(breaker.admit() for _ in range(3))


@given(
    st.lists(
        st.sampled_from(
            [*((what, outcome) for what in ("begin", "end") for outcome in Outcome), "good", "bad", "restore"]
        )
    )
)
def test_in_any_order_it_is_either_used_or_can_come_back(story: list[object]) -> None:
    """Never stuck: whatever happens, a good probe and one good request bring it back."""
    breaker, out = Breaker(), []
    for event in story:
        match event:
            case ("begin", _):
                admits = breaker.admits
                ticket = breaker.admit()
                assert (ticket is not None) == admits
                if ticket is not None:
                    out.append(ticket)
            case ("end", Outcome() as outcome) if out:
                breaker.report(out.pop(0), outcome)
            case "good" | "bad":
                breaker.probed(event == "good")
            case "restore":
                breaker.restore()
        in_use = breaker.isolation is Isolation.CLOSED
        assert breaker.failures <= MAX_FAILURES or not in_use
    for ticket in out:
        breaker.report(ticket, Outcome.UNKNOWN)
    breaker.probed(True)
    use(breaker, Outcome.GOOD)
    assert breaker.isolation is Isolation.CLOSED and breaker.failures == 0
