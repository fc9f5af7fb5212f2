"""Who is picked, and that what an attempt costs is taken back, in any order of events."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)

from service.router.breaker import MAX_FAILURES, Isolation, Outcome
from service.router.pool import Booking, Group, Loss, Member, Pool, Role

GROUP = Group(frozenset({"m"}), "v1")


def member(name: str, group: Group = GROUP, incarnation: str = "1") -> Member:
    return Member(name, Role.DECODE, f"http://{name}", group, incarnation)


def pool_of(*names: str) -> tuple[Pool, list[Member]]:
    pool = Pool(Role.DECODE)
    members = [member(name) for name in names]
    for each in members:
        pool.add(each)
    return pool, members


def pick(pool: Pool, load: float = 10, **choice: object) -> Booking:
    booking = pool.pick(load, **choice)  # type: ignore[arg-type]
    assert booking is not None
    return booking


def fail(pool: Pool, name: str) -> None:
    one = pool.get(name)
    assert one is not None
    for _ in range(MAX_FAILURES + 1):
        ticket = one.breaker.admit()
        assert ticket is not None
        pool.report(one, ticket, Outcome.BAD)


def test_the_least_loaded_is_picked() -> None:
    pool, _ = pool_of("a", "b", "c")
    first, second = pick(pool, 30), pick(pool, 10)
    third = pick(pool, 20)
    assert {first.member.name, second.member.name, third.member.name} == {"a", "b", "c"}
    assert pick(pool).member is second.member
    third.release()
    assert pick(pool).member is third.member


def test_among_equals_turns_are_taken() -> None:
    """Else the first of them got everything at concurrency 1."""
    pool, _ = pool_of("a", "b", "c")
    names = []
    for _ in range(6):
        booking = pick(pool)
        names.append(booking.member.name)
        booking.release()
    assert sorted(names[:3]) == sorted(names[3:]) == ["a", "b", "c"]


def test_a_release_counts_once() -> None:
    pool, (one,) = pool_of("a")
    first, second = pick(pool, 7), pick(pool, 5)
    for _ in range(3):
        first.release()
    assert one.load == 5 and one.in_flight == 1
    second.grow(3)
    assert one.load == 8
    second.release()
    second.grow(100)
    assert one.load == 0 and one.in_flight == 0


def test_a_failed_attempt_does_not_make_an_instance_attractive() -> None:
    """A dead one fails at once, so it has the least load; it may not win every pick for that."""
    pool, _ = pool_of("dead", "busy")
    busy = pick(pool, 1000, without=[pool.get("dead")])
    failures = 0
    for _ in range(100):
        booking = pick(pool)
        booking.report(Outcome.BAD if booking.member.name == "dead" else Outcome.GOOD)
        failures += booking.member.name == "dead"
        booking.release()
    assert failures == MAX_FAILURES + 1
    busy.release()


@pytest.mark.parametrize(
    "out",
    [
        lambda pool, one: fail(pool, one.name),
        lambda pool, one: pool.withdraw(one, "paused"),
        lambda pool, one: pool.set_aside(one, "refused"),
        lambda pool, one: pool.set_unready(one, "probe"),
        lambda pool, one: pool.remove(one),
    ],
    ids=["isolated", "withdrawn", "aside", "unready", "removed"],
)
def test_one_that_is_out_is_not_picked(out: Callable[[Pool, Member], None]) -> None:
    pool, (one, _) = pool_of("a", "b")
    out(pool, one)
    assert {pick(pool).member.name for _ in range(10)} == {"b"}
    assert pool.pick(1, without=[m for m in pool if m.name == "b"]) is None


def test_a_good_probe_brings_an_isolated_one_back_with_load_0() -> None:
    """Requests that it had before are no part of its load any more, however they end."""
    pool, (one, other) = pool_of("a", "b")
    old = pick(pool, 50, without=[other])
    fail(pool, "a")
    pool.probed(one, True)
    assert one.load == 0 and one.in_flight == 1
    trial = pick(pool, 10, without=[other])
    assert pool.pick(1, without=[other]) is None  # one trial at a time
    old.release()
    assert one.load == 10
    trial.report(Outcome.GOOD)
    trial.release()
    assert one.load == 0 and one.breaker.isolation is Isolation.CLOSED


def test_a_new_incarnation_starts_from_zero() -> None:
    pool, (old,) = pool_of("a")
    booking = pick(pool, 50)
    new = member("a", incarnation="2")
    pool.add(new)
    assert pick(pool).member is new
    booking.release()
    assert new.load == 10 and old.load == 0


def test_groups_are_chosen_by_what_is_asked() -> None:
    pool = Pool(Role.AGGREGATED)
    old, new = member("old"), member("new", Group(frozenset({"m"}), "v2"))
    other = member("other", Group(frozenset({"n"}), "v2"))
    for each in (old, new, other):
        pool.add(each)
    assert pick(pool, admits=lambda group: "n" in group.models).member is other
    assert pick(pool, admits=lambda group: group.version == "v1").member is old
    pool.regroup(old, Group(frozenset({"m"}), "v2"))
    assert pool.pick(1, lambda group: group.version == "v1") is None


def test_those_who_wait_are_told_what_happens_to_the_instance() -> None:
    pool, (one,) = pool_of("a")
    told: list[Loss] = []

    def stays_unless_gone(loss: Loss) -> bool:
        told.append(loss)
        return loss is Loss.GONE

    stays, leaves, _ = bookings = [pick(pool) for _ in range(3)]
    stays.on_loss, leaves.on_loss = stays_unless_gone, lambda loss: True
    pool.lose(one, Loss.HELD)
    assert told == [Loss.HELD]
    assert [booking.lost for booking in bookings] == [None, Loss.HELD, None]


def test_a_pick_from_a_thousand_costs_what_a_pick_from_ten_costs() -> None:
    """Work, not time: how often members are compared."""
    compared = {}
    for size in (10, 1000):
        pool, _ = pool_of(*map(str, range(size)))
        chance = random.Random(1)
        held = [pick(pool, chance.randint(1, 500)) for _ in range(size)]
        count = 0

        class Counted(float):
            def __lt__(self, other: float) -> bool:
                nonlocal count
                count += 1
                return float(self) < float(other)

            def __add__(self, other: float) -> "Counted":
                return Counted(float(self) + float(other))

            def __neg__(self) -> "Counted":
                return Counted(-float(self))

        for one in pool:
            one.load = Counted(one.load)
        for _ in range(200):
            held.append(pick(pool, Counted(chance.randint(1, 500))))
            held.pop(chance.randrange(len(held))).release()
        compared[size] = count / 200
    assert compared[1000] < 5 * max(1, compared[10])  # log2(1000) / log2(10) is 3


WORDS = ("withdraw", "restore", "aside", "not aside", "unready", "ready")


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens: loads are the sum of what is booked, nobody who is out is picked, and the least
    loaded of those who may be picked always is."""

    bookings: Bundle[Booking] = Bundle("bookings")

    @initialize()
    def start(self) -> None:
        self.pool = Pool(Role.DECODE)
        self.costs: dict[Booking, tuple[Member, int, float]] = {}
        """Open bookings: of whom, in which period, and what they cost."""
        self.names = 0

    members = st.integers(min_value=0, max_value=5)

    def one(self, number: int) -> Member | None:
        known = list(self.pool)
        return known[number % len(known)] if known else None

    @rule(version=st.sampled_from(["v1", "v2"]), again=st.booleans(), number=members)
    def join(self, version: str, again: bool, number: int) -> None:
        known = self.one(number)
        name = known.name if again and known is not None else str(self.names)
        self.names += 1
        self.pool.add(member(name, Group(frozenset({"m"}), version), incarnation=str(self.names)))

    @rule(number=members)
    def leave(self, number: int) -> None:
        if (one := self.one(number)) is not None:
            self.pool.remove(one)

    @rule(
        number=members,
        what=st.sampled_from(["withdraw", "restore", "aside", "not aside", "unready", "ready"]),
    )
    def say(self, number: int, what: str) -> None:
        one = self.one(number)
        if one is None:
            return
        match what:
            case "withdraw":
                self.pool.withdraw(one, "paused")
            case "restore":
                self.pool.restore(one)
            case "aside" | "not aside":
                self.pool.set_aside(one, "refused" if what == "aside" else None)
            case _:
                self.pool.set_unready(one, "probe" if what == "unready" else None)

    @rule(number=members, good=st.booleans())
    def probe(self, number: int, good: bool) -> None:
        if (one := self.one(number)) is not None:
            self.pool.probed(one, good)

    @rule(number=members, version=st.sampled_from(["v1", "v2"]))
    def update(self, number: int, version: str) -> None:
        if (one := self.one(number)) is not None:
            self.pool.regroup(one, Group(one.group.models, version))

    @rule(
        target=bookings,
        load=st.floats(min_value=0.5, max_value=1000),
        version=st.sampled_from([None, "v1", "v2"]),
        without=st.sets(members, max_size=2),
    )
    def book(self, load: float, version: str | None, without: set[int]) -> Any:
        excluded = [one for number in without if (one := self.one(number)) is not None]
        may = [
            one
            for one in self.pool
            if one.admissible and one not in excluded and version in (None, one.group.version)
        ]
        least = min((one.load for one in may), default=None)
        booking = self.pool.pick(load, lambda group: version in (None, group.version), excluded)
        assert (booking is None) == (not may)
        if booking is None:
            return multiple()
        assert booking.member in may
        assert booking.member.load - load == pytest.approx(least)
        self.costs[booking] = (booking.member, booking.member.period, load)
        return booking

    @rule(booking=bookings, load=st.floats(min_value=0, max_value=100))
    def grow(self, booking: Booking, load: float) -> None:
        booking.grow(load)
        if booking in self.costs:
            one, period, cost = self.costs[booking]
            self.costs[booking] = (one, period, cost + load)

    @rule(booking=bookings)
    def answer(self, booking: Booking) -> None:
        booking.answering()

    @rule(booking=bookings, outcome=st.sampled_from(Outcome))
    def report(self, booking: Booking, outcome: Outcome) -> None:
        booking.report(outcome)

    @rule(booking=bookings)
    def release(self, booking: Booking) -> None:
        booking.release()
        self.costs.pop(booking, None)

    @invariant()
    def loads_are_what_is_booked(self) -> None:
        everyone = {*self.pool, *(one for one, _, _ in self.costs.values())}
        for one in everyone:
            costs = [cost for who, period, cost in self.costs.values() if who is one and period == one.period]
            assert one.load == pytest.approx(sum(costs), abs=1e-6)
            assert one.load >= 0 or one.load == pytest.approx(0, abs=1e-6)
            assert one.in_flight == sum(who is one for who, _, _ in self.costs.values())
            if not one.bookings:
                assert one.load == 0

    def teardown(self) -> None:
        for booking in list(self.costs):
            booking.release()
        self.costs.clear()
        self.loads_are_what_is_booked()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
