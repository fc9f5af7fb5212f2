"""Who may be sent a request, and who of them has the least to do. No I/O, no clock.

A `Member` is one incarnation of an instance. A `Pool` holds the members of one role, and those of
them that may be picked in heaps by load, so that a change costs O(log n). Each attempt of a request
holds a `Booking`, which takes its load back exactly once, however the attempt ends.
"""

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from service.router.breaker import Breaker, Isolation, Outcome, Ticket

_SPARE = 16
"""A heap is built anew when it holds this many outdated entries more than twice what is in use."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


ROLES = tuple(role.value for role in Role)


class Group(NamedTuple):
    """What requests choose by: members that are alike in it share a heap.

    Attributes:
        models: names it answers to.
        version: of its weights; empty if unknown.
    """

    models: frozenset[str]
    version: str


class Loss(StrEnum):
    """What happened to an instance while an attempt waits for it."""

    HELD = "held"
    """It keeps requests until it is resumed."""
    GONE = "gone"
    """Nothing more will come from it."""


@dataclass(eq=False)
class Member:
    """One incarnation of an instance.

    Attributes:
        name: of the instance; its URL if it is a static one.
        url: `http://host:port`.
        grpc: `host:port` of its health service, if it has one.
        withdrawn: why it is out by its own account, or None.
        unready: a probe found that it is not to be sent requests.
        aside: it refused a request because it is paused, and was not asked since.
        load: tokens: of prompts, and of answers so far.
        cards: what it says of its models, as in `/v1/models`.
        heard: how often its state was told; a probe that began before says nothing new.
    """

    name: str
    role: Role
    url: str
    group: Group
    incarnation: str = ""
    grpc: str | None = None
    withdrawn: str | None = None
    unready: str | None = None
    aside: str | None = None

    def __post_init__(self) -> None:
        self.breaker = Breaker()
        self.load = 0.0
        self.bookings: set[Booking] = set()
        self.period = 0
        """Bookings of an earlier one are not in the load."""
        self.cards: tuple[dict[str, Any], ...] = ()
        self.heard = 0
        self.turn = 0
        """When it was last picked: among equals the one that waits longest is next."""

    @property
    def in_flight(self) -> int:
        return len(self.bookings)

    @property
    def admissible(self) -> bool:
        return self.breaker.admits and not (self.withdrawn or self.unready or self.aside)

    @property
    def isolated(self) -> bool:
        return self.breaker.isolation is Isolation.ISOLATED

    @property
    def reason(self) -> str | None:
        """Why it is sent nothing, or None."""
        if self.withdrawn or self.unready or self.aside:
            return self.withdrawn or self.unready or self.aside
        match self.breaker.isolation:
            case Isolation.ISOLATED:
                return f"isolated after {self.breaker.failures} failures in a row"
            case Isolation.TRIAL:
                return "a trial request is on its way"
        return None


class Booking:
    """What one attempt costs its member, from the pick to `release`.

    Attributes:
        on_loss: told what happened to the member; True: the attempt ends for it.
        lost: what it ended for.
    """

    def __init__(self, pool: "Pool", member: Member, ticket: Ticket, load: float) -> None:
        self.member = member
        self.on_loss: Callable[[Loss], bool] | None = None
        self.lost: Loss | None = None
        self._pool, self._ticket, self._load = pool, ticket, load
        self._period = member.period
        self._reported = False

    def grow(self, load: float) -> None:
        """It costs so much more, or less, than before."""
        if self in self.member.bookings:
            self._load += load
            self._pool.add_load(self.member, load, self._period)

    def answering(self) -> None:
        """The first byte of a good answer is there."""
        self.member.breaker.answering(self._ticket)
        self._pool.refresh(self.member)

    def report(self, outcome: Outcome) -> None:
        """Say how it ended, once; later reports are ignored."""
        if not self._reported:
            self._reported = True
            self._pool.report(self.member, self._ticket, outcome)

    def release(self) -> None:
        """Take the load back; again is nothing."""
        if self not in self.member.bookings:
            return
        self.member.bookings.discard(self)
        self.on_loss = None
        self.report(Outcome.UNKNOWN)
        self._pool.add_load(self.member, -self._load, self._period)


class Pool:
    """The members of one role."""

    def __init__(self, role: Role, on_admissible: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            on_admissible: called when a member may be picked that could not be before.
        """
        self.role = role
        self._on_admissible = on_admissible
        self._members: dict[str, Member] = {}
        self._heaps: dict[Group, _Heap] = {}
        self._in: dict[Member, Group] = {}
        """Members that may be picked, and in which heap they are."""
        self._turns = itertools.count(1)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    @property
    def groups(self) -> Collection[Group]:
        """Those of members that may be picked."""
        return self._heaps.keys()

    def add(self, member: Member) -> None:
        """From now on it is known; it takes the place of an earlier incarnation."""
        if (known := self._members.get(member.name)) is not None:
            self.remove(known)
        self._members[member.name] = member
        self.refresh(member)

    def remove(self, member: Member) -> None:
        """It is not known any more. Its bookings end on their own."""
        if self._members.get(member.name) is member:
            del self._members[member.name]
        self._take_out(member)

    def pick(
        self,
        load: float,
        admits: Callable[[Group], bool] = lambda group: True,
        without: Collection[Member] = (),
    ) -> Booking | None:
        """Book the member with the least load.

        Args:
            load: what the request costs it, in tokens.
            admits: whether members of a group may be picked.
            without: members that may not.
        """
        least = self.least(admits, without)
        if least is None:
            return None
        ticket = least.breaker.admit()
        assert ticket is not None  # it would not be in a heap
        least.turn = next(self._turns)
        booking = Booking(self, least, ticket, load)
        least.bookings.add(booking)
        self.add_load(least, load, least.period)
        return booking

    def least(self, admits: Callable[[Group], bool], without: Collection[Member] = ()) -> Member | None:
        """Whom `pick` would book."""
        least: Member | None = None
        for group, heap in self._heaps.items():
            if admits(group):
                found = heap.least(without)
                if found is not None and (least is None or _rank(found) < _rank(least)):
                    least = found
        return least

    def add_load(self, member: Member, load: float, period: int) -> None:
        if period == member.period:
            member.load += load
        if not member.bookings:
            member.load = 0.0  # sums of floats may end a hair beside it
        self.refresh(member)

    def report(self, member: Member, ticket: Ticket, outcome: Outcome) -> None:
        member.breaker.report(ticket, outcome)
        self.refresh(member)

    def probed(self, member: Member, good: bool) -> None:
        """A probe of it succeeded or failed."""
        was_isolated = member.isolated
        member.breaker.probed(good)
        if was_isolated and not member.isolated:
            self._forget_load(member)
        self.refresh(member)

    def restore(self, member: Member) -> None:
        """It serves again, by its own account: nothing is held against it."""
        member.withdrawn = member.unready = member.aside = None
        if member.isolated:
            self._forget_load(member)
        member.breaker.restore()
        self.refresh(member)

    def withdraw(self, member: Member, reason: str) -> None:
        """It is out, by its own account."""
        member.withdrawn = reason
        self.refresh(member)

    def lose(self, member: Member, loss: Loss) -> None:
        """Tell those who wait for it."""
        for booking in tuple(member.bookings):
            if booking.on_loss is not None and booking.on_loss(loss):
                booking.lost = loss

    def set_aside(self, member: Member, reason: str | None) -> None:
        """It said itself that it is paused; None: that is over."""
        member.aside = reason
        self.refresh(member)

    def set_unready(self, member: Member, reason: str | None) -> None:
        """A probe found that it is not ready; None: that it is."""
        member.unready = reason
        self.refresh(member)

    def regroup(self, member: Member, group: Group) -> None:
        """It answers to other names, or has other weights."""
        member.group = group
        self.refresh(member)

    def refresh(self, member: Member) -> None:
        """Put it where it belongs after a change."""
        known = self._members.get(member.name) is member
        if not (known and member.admissible):
            self._take_out(member)
            return
        group = self._in.get(member)
        if group != member.group:
            self._take_out(member)
            self._in[member] = member.group
        heap = self._heaps.get(member.group)
        if heap is None:
            heap = self._heaps[member.group] = _Heap()
        heap.put(member)
        if group is None:
            self._on_admissible()

    def _take_out(self, member: Member) -> None:
        group = self._in.pop(member, None)
        if group is not None:
            heap = self._heaps[group]
            heap.discard(member)
            if not heap:
                del self._heaps[group]

    def _forget_load(self, member: Member) -> None:
        member.period += 1
        member.load = 0.0


_Rank = tuple[float, int]


def _rank(member: Member) -> _Rank:
    return member.load, member.turn


class _Heap:
    """Members by rank. An entry that was overtaken stays until it comes up, or until there are too many."""

    def __init__(self) -> None:
        self._entries: list[tuple[_Rank, int, Member]] = []
        self._current: dict[Member, tuple[_Rank, int]] = {}
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._current)

    def put(self, member: Member) -> None:
        rank = _rank(member)
        current = self._current.get(member)
        if current is not None and current[0] == rank:
            return
        number = next(self._numbers)
        self._current[member] = (rank, number)
        heapq.heappush(self._entries, (rank, number, member))
        if len(self._entries) > 2 * len(self._current) + _SPARE:
            self._entries = [(rank, number, each) for each, (rank, number) in self._current.items()]
            heapq.heapify(self._entries)

    def discard(self, member: Member) -> None:
        self._current.pop(member, None)

    def least(self, without: Collection[Member]) -> Member | None:
        passed = []
        found = None
        while self._entries:
            rank, number, member = self._entries[0]
            if self._current.get(member) != (rank, number):
                heapq.heappop(self._entries)
            elif member in without:
                passed.append(heapq.heappop(self._entries))
            else:
                found = member
                break
        for entry in passed:
            heapq.heappush(self._entries, entry)
        return found
