"""What the bus says of instances, as members of pools."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages import Addresses, InstanceEntry, Paused, Snapshot, Transport, Weights
from service.router.breaker import MAX_FAILURES, Outcome
from service.router.membership import LEFT, NOT_PROBED, Membership
from service.router.pool import Loss, Member, Role
from service.router.server import Router
from service.router.settings import Static, load_router
from service.router.versions import Versions
from service.shutdown import Resources

NAMES: dict[str, Any] = {"namespace": "default", "component": "backend", "instance": "a", "model": "m"}


def entry(incarnation: str = "1", http: str | None = "10.0.0.1:8000", **facts: Any) -> InstanceEntry:
    transport = Transport(http=http, grpc="10.0.0.1:1")
    return InstanceEntry(**NAMES, endpoint="generate", incarnation=incarnation, transport=transport, **facts)


def snapshot(incarnation: str = "1", state: str = "serving", seq: int = 1, **facts: Any) -> Snapshot:
    ready = state == "serving"
    facts = {"reasons": [] if ready else [f"{state} by command"], "live": True, **facts}
    facts |= {"time": float(seq), "ready": ready, "settled": True}
    facts |= {"addresses": Addresses(http="10.0.0.1:8000", grpc="10.0.0.1:1")}
    return Snapshot(**NAMES, incarnation=incarnation, seq=seq, state=state, **facts)


def only(membership: Membership) -> Member:
    (member,) = membership
    return member


def test_one_that_is_listed_and_says_that_it_serves_is_used() -> None:
    membership = Membership()
    membership.update("a", entry(role="decode", weight_version="v7"), snapshot())
    member = only(membership)
    assert member.admissible and member.role is Role.DECODE
    assert (member.url, member.grpc) == ("http://10.0.0.1:8000", "10.0.0.1:1")
    assert member.group.version == "v7" and "m" in member.group.models


def test_an_entry_without_an_event_is_enough() -> None:
    membership = Membership()
    membership.update("a", entry(), None)
    assert only(membership).admissible


def test_an_event_takes_it_out_although_it_is_listed_and_brings_it_back() -> None:
    membership = Membership()
    membership.update("a", entry(), snapshot())
    membership.update("a", entry(), snapshot(state="paused", seq=2))
    assert only(membership).reason == "paused: paused by command"
    membership.update("a", entry(), snapshot(seq=3))
    assert only(membership).admissible


def test_a_deleted_entry_takes_it_out_although_the_event_is_late() -> None:
    membership = Membership()
    membership.update("a", entry(), snapshot())
    membership.update("a", None, snapshot())
    assert only(membership).reason == LEFT


def test_one_that_is_out_when_the_router_starts_is_shown_with_its_reason() -> None:
    membership = Membership()
    membership.update("a", None, snapshot(state="asleep", role="prefill"))
    assert only(membership).reason == "asleep: asleep by command"
    assert only(membership).role is Role.PREFILL


def test_an_event_of_an_earlier_incarnation_says_nothing() -> None:
    membership = Membership()
    membership.update("a", entry("2"), snapshot("1", state="failed", live=False))
    assert only(membership).admissible and only(membership).incarnation == "2"


def test_an_event_of_a_later_incarnation_makes_the_entry_an_old_one() -> None:
    membership = Membership()
    membership.update("a", entry("1"), snapshot("1"))
    membership.update("a", entry("1"), snapshot("2", state="starting"))
    assert only(membership).incarnation == "2" and not only(membership).admissible


def test_a_new_incarnation_starts_without_load_and_failures() -> None:
    membership = Membership()
    membership.update("a", entry("1"), snapshot("1"))
    pool = membership.pools[Role.AGGREGATED]
    for _ in range(MAX_FAILURES + 1):
        booking = pool.pick(10)
        assert booking is not None
        booking.report(Outcome.BAD)
    assert not only(membership).admissible
    membership.update("a", entry("2"), snapshot("2"))
    assert only(membership).admissible and only(membership).load == 0


def test_serving_again_brings_back_one_that_was_isolated() -> None:
    """The instance knows better than a probe; but the same state told again forgives nothing."""
    membership = Membership()
    membership.update("a", entry(), snapshot())
    pool = membership.pools[Role.AGGREGATED]
    for _ in range(MAX_FAILURES + 1):
        booking = pool.pick(10)
        assert booking is not None
        booking.report(Outcome.BAD)
        booking.release()
    membership.update("a", entry(), snapshot(seq=2))
    assert only(membership).isolated
    membership.update("a", None, snapshot(state="failed", seq=3))
    membership.update("a", entry(), snapshot(seq=4))
    assert only(membership).admissible


@pytest.mark.parametrize(
    ("told", "loss"),
    [
        (snapshot(state="failed", seq=2, live=False), Loss.GONE),
        (snapshot(state="paused", seq=2, paused=Paused(mode="keep", by=["command"])), Loss.HELD),
        (snapshot(state="paused", seq=2, paused=Paused(mode="wait", by=["command"])), None),
        (None, Loss.GONE),
    ],
    ids=["failed", "keeps requests", "finishes requests", "gone"],
)
def test_those_who_wait_for_an_answer_hear_whether_to_wait_on(
    told: Snapshot | None, loss: Loss | None
) -> None:
    membership = Membership()
    membership.update("a", entry(), snapshot())
    booking = membership.pools[Role.AGGREGATED].pick(10)
    assert booking is not None
    heard: list[Loss] = []

    def note(loss: Loss) -> bool:
        heard.append(loss)
        return True

    booking.on_loss = note
    membership.update("a", None, told)
    assert heard == ([loss] if loss is not None else [])


def test_an_instance_that_takes_no_requests_is_no_member() -> None:
    """Those of `sim-fleet` have no HTTP address."""
    membership = Membership()
    membership.update("a", entry(http=""), None)
    assert list(membership) == []


def test_a_static_instance_is_used_once_a_probe_has_found_it() -> None:
    membership = Membership([Static(Role.PREFILL, "http://10.0.0.9:8000")])
    member = only(membership)
    assert member.reason == NOT_PROBED
    membership.learned(member, [{"id": "m"}, {"id": "lora"}])
    membership.pool(member).set_unready(member, None)
    assert member.admissible and membership.models(Role.PREFILL) == {"m", "lora"}


def test_the_newest_version_is_that_of_anybody_known() -> None:
    """Also of one that is paused: with `latest` nobody is served older weights meanwhile."""
    membership = Membership()
    membership.update("a", entry(weight_version="v1"), snapshot())
    membership.versions.started()
    membership.update("b", entry(weight_version="v2"), snapshot())
    membership.update("b", None, snapshot(state="paused", weights=Weights(version="v2")))
    assert membership.newest(Role.AGGREGATED) == "v2"


def test_versions_are_ordered_by_epoch_then_by_appearance_then_by_name() -> None:
    versions = Versions()
    for name in ("step-9", "step-10", "default"):
        versions.note(name, None)
    assert versions.newest(["default", "step-9", "step-10"]) == "step-10"
    versions.started()
    versions.note("aaa", None)
    versions.note("zzz", None)
    versions.note("bbb", None)
    assert versions.newest(["step-10", "aaa", "bbb", "zzz"]) == "bbb"
    versions.note("rolled-back", 2)
    versions.note("late-of-an-old-trainer", 1)
    assert versions.newest(["bbb", "rolled-back", "late-of-an-old-trainer"]) == "rolled-back"
    assert versions.at_least("bbb", "step-9") and not versions.at_least("step-9", "bbb")
    assert versions.at_least("step-10", "step-2") and not versions.at_least("step-10", "step-11")
    # Of one that nobody has held only its like can be newer.
    assert not versions.at_least("zzz", "step-99") and not versions.at_least("zzz", "nope")
    assert versions.at_least("bbb", "bbb") and not versions.at_least("default", "step-1")


ENTRIES = st.one_of(st.none(), st.builds(entry, st.sampled_from("123"), weight_version=st.sampled_from("vw")))
SNAPSHOTS = st.one_of(
    st.none(),
    st.builds(snapshot, st.sampled_from("123"), st.sampled_from(["serving", "paused", "asleep", "failed"])),
)


@given(st.lists(st.tuples(ENTRIES, SNAPSHOTS), max_size=20))
@settings(deadline=None)
def test_in_any_order_one_is_used_exactly_if_it_is_listed_and_does_not_say_no(
    story: list[tuple[InstanceEntry | None, Snapshot | None]],
) -> None:
    membership = Membership()
    for listed, told in story:
        membership.update("a", listed, told)
        may = listed is not None and (
            told is None
            or told.incarnation < listed.incarnation
            or (told.incarnation == listed.incarnation and told.ready)
        )
        used = [member for member in membership if member.admissible]
        assert bool(used) == may
        assert len(list(membership)) <= 1
        if may and listed is not None:
            assert used[0].incarnation == listed.incarnation
            assert used[0].group.version == listed.weight_version


@pytest.mark.parametrize(
    ("flags", "asked", "admitted"),
    [
        ({}, None, {"step-1", "step-2", ""}),
        ({"weights": "latest"}, None, {"step-2"}),
        ({"weights": "min-version", "min_version": "step-2"}, None, {"step-2"}),
        ({"weights": "min-version", "min_version": "step-1"}, None, {"step-1", "step-2"}),
        ({"weights": "min-version", "min_version": "step-1"}, "step-2", {"step-2"}),
        ({}, "step-2", {"step-2"}),
        ({}, "step-3", set()),
    ],
)
async def test_weights_choose_who_may_answer(
    flags: dict[str, str], asked: str | None, admitted: set[str]
) -> None:
    router = Router(load_router({**flags, "static": ["aggregated=10.0.0.9:1"]}, environ={}), Resources())
    for name, version in (("a", "step-1"), ("b", "step-2")):
        router.dispatch.membership.update(name, entry(weight_version=version), snapshot())
    admits = router.dispatch.admits(Role.AGGREGATED, "", asked)
    assert {one.group.version for one in router.dispatch.membership if admits(one.group)} == admitted
    await router.dispatch.upstream.close()
