"""Who there is: what the bus and the command line say about instances, as members of pools. No I/O."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bus.messages import InstanceEntry, Snapshot
from service.router.pool import Group, Loss, Member, Pool, Role
from service.router.settings import Static
from service.router.versions import Versions

NOT_PROBED = "not probed yet"
LEFT = "left discovery"

HOLDING = ("keep", "unknown")
"""Modes of a stop that may keep a request instead of answering it."""


class Membership:
    """The pools, kept in step with what is known of the instances.

    Attributes:
        pools: one per role.
        versions: of weights that were seen, in order.
    """

    def __init__(
        self, statics: Iterable[Static] = (), on_admissible: Callable[[], None] = lambda: None
    ) -> None:
        self.pools = {role: Pool(role, on_admissible) for role in Role}
        self.versions = Versions()
        for static in statics:
            member = Member(static.url, static.role, static.url, Group(frozenset(), ""), unready=NOT_PROBED)
            self.pools[static.role].add(member)
        self._names: dict[Role, frozenset[str]] = {}
        self._newest: dict[Role, str | None] = {}
        self._choosy: dict[tuple[Role, str], bool] = {}
        """All are found when they are asked for, and forgotten when something changes."""

    def __iter__(self) -> Iterator[Member]:
        for pool in self.pools.values():
            yield from pool

    def pool(self, member: Member) -> Pool:
        return self.pools[member.role]

    def reason(self, name: str) -> str | None:
        """Why an instance is sent nothing; None: it is in use."""
        member = self._find(name)
        return member.reason if member is not None else "gone"

    def chooses(self, role: Role, model: str) -> bool:
        """Whether some members answer to this name and others do not."""
        if model not in self.models(role):  # names of clients' own making are not kept
            return False
        key = (role, model)
        if key not in self._choosy:
            groups = [member.group.models for member in self.pools[role]]
            having = sum(model in models for models in groups)
            self._choosy[key] = having < len(groups)
        return self._choosy[key]

    def models(self, role: Role) -> frozenset[str]:
        """All names to which members answer, whether they may be sent requests now or not."""
        if role not in self._names:
            self._names[role] = frozenset().union(*(member.group.models for member in self.pools[role]))
        return self._names[role]

    def newest(self, role: Role) -> str | None:
        """The newest version of weights that a member holds, whether it may be sent requests now or not."""
        if role not in self._newest:
            versions = {member.group.version for member in self.pools[role]} - {""}
            self._newest[role] = self.versions.newest(versions)
        return self._newest[role]

    def _changed(self) -> None:
        self._names.clear()
        self._newest.clear()
        self._choosy.clear()

    def learned(self, member: Member, cards: Iterable[dict[str, Any]]) -> None:
        """It has told its models.

        Args:
            cards: as in `/v1/models`, each with an `id`.
        """
        member.cards = tuple(cards)
        models = frozenset(card["id"] for card in member.cards)
        self.pool(member).regroup(member, member.group._replace(models=models))
        self._changed()

    def update(self, name: str, entry: InstanceEntry | None, snapshot: Snapshot | None) -> None:
        """Take over what is now known of an instance of the bus.

        Args:
            entry: in discovery; only with one it may be sent requests.
            snapshot: its last state event. That of an earlier incarnation than the entry's says
                nothing; that of a later one overrides the entry.
        """
        if entry is not None and not entry.transport.http:
            entry = None  # it takes no requests
        if entry is not None and snapshot is not None:
            if snapshot.incarnation < entry.incarnation:
                snapshot = None
            elif snapshot.incarnation > entry.incarnation:
                entry = None
        self._changed()
        known = self._find(name)
        member = self._current(name, known, entry, snapshot)
        if known is not None and known is not member:
            self.pool(known).remove(known)
            self.pool(known).lose(known, Loss.GONE)
        if member is None:
            return
        member.heard += 1
        pool = self.pool(member)
        if member is not known:
            pool.add(member)
        if entry is not None:
            epoch = snapshot.weights.epoch if snapshot is not None else None
            self.versions.note(entry.weight_version, epoch)
            if entry.weight_version != member.group.version:
                pool.regroup(member, member.group._replace(version=entry.weight_version))
        reason = _why_out(entry, snapshot)
        if reason is None:
            if member.withdrawn is not None:
                pool.restore(member)
            return
        pool.withdraw(member, reason)
        loss = _loss(snapshot)
        if loss is not None:
            pool.lose(member, loss)

    def _find(self, name: str) -> Member | None:
        return next((found for pool in self.pools.values() if (found := pool.get(name)) is not None), None)

    def _current(
        self, name: str, known: Member | None, entry: InstanceEntry | None, snapshot: Snapshot | None
    ) -> Member | None:
        """The member that this is about: the one that is known, a new one, or None if it is no more."""
        if entry is not None:
            about: InstanceEntry | Snapshot = entry
            http, grpc = entry.transport.http, entry.transport.grpc
            version = entry.weight_version
        elif snapshot is not None and snapshot.addresses.http:
            about = snapshot
            http, grpc = snapshot.addresses.http, snapshot.addresses.grpc
            version = snapshot.weights.version
        else:
            return None
        url = f"http://{http}"
        if known is not None and (known.incarnation, known.url) == (about.incarnation, url):
            return known
        try:
            role = Role(about.role)
        except ValueError:
            return None  # a role of a later version of us
        models = frozenset([about.model] if about.model else [])
        return Member(name, role, url, Group(models, version), about.incarnation, grpc, withdrawn=LEFT)


def _why_out(entry: InstanceEntry | None, snapshot: Snapshot | None) -> str | None:
    if snapshot is not None and not snapshot.ready:
        return ": ".join(filter(None, (snapshot.state, ", ".join(snapshot.reasons))))
    return LEFT if entry is None else None


def _loss(snapshot: Snapshot | None) -> Loss | None:
    if snapshot is None:
        return None
    if not snapshot.live or snapshot.state == "stopped":
        return Loss.GONE
    if snapshot.paused is not None and snapshot.paused.mode in HOLDING:
        return Loss.HELD
    return None
