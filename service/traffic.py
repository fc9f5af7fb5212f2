"""What others see of an instance: gRPC health, discovery, state events and the snapshot."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bus import messages, subjects
from bus.codec import Format, encode
from bus.connection import Bus, BusError
from bus.discovery import DELETE_TIMEOUT_S, Announcer
from service.engine.protocol import EngineInfo
from service.health_server import HealthOfOne, HealthServer
from service.metrics import Metrics
from service.sessions import Lease, Sessions
from statemachine import effects as fx
from statemachine import events as ev
from statemachine.states import State

log = logging.getLogger(__name__)

UNREACHABLE = "discovery_unreachable"


@dataclass(frozen=True)
class Identity:
    """Who this instance is, for as long as it lives.

    Addresses are what others are told; empty where there is none (`sim-fleet`).
    """

    namespace: str
    component: str
    instance: str
    incarnation: str
    role: str
    grpc: str
    http: str
    admin: str


@dataclass
class Outside:
    """Shows the state machine's pictures to everybody.

    Attributes:
        in_flight: inference requests accepted and not yet ended.
        on_change: called after each published change.
        trouble: why the version that the component requires could not be applied.
        engine: once it is loaded.
    """

    me: Identity
    health: HealthServer | HealthOfOne
    bus: Bus
    announcer: Announcer
    picture: fx.Picture
    model: str
    in_flight: int = 0
    engine: EngineInfo | None = None
    engine_kind: str = "vllm"
    unready_since_s: float = field(default_factory=time.monotonic)
    metrics: Metrics = field(default_factory=Metrics)
    sessions: Sessions = field(default_factory=Sessions)
    on_change: Callable[[], None] = lambda: None
    trouble: Callable[[], str | None] = lambda: None
    _chunk_s: float | None = None
    _busy_s: float = float("-inf")
    _seq: int = 0
    _time: float = field(default_factory=time.time)
    _previous: State | None = None
    _cause: ev.Cause | None = None
    _update_since: float | None = None
    _operation_since: float | None = None

    # --- orders of the state machine ------------------------------------------------------------

    def show_health(self, statuses: Mapping[str, bool]) -> None:
        self.health.set(statuses)

    async def leave(self) -> None:
        """No longer than `DELETE_TIMEOUT_S`, whatever the broker does."""
        self.unready_since_s = time.monotonic()
        await self.announcer.delete(DELETE_TIMEOUT_S)

    async def join(self, weight_version: str) -> None:
        me, info = self.me, self.engine
        entry = messages.InstanceEntry(
            namespace=me.namespace,
            component=me.component,
            endpoint=subjects.ENDPOINT,
            instance=me.instance,
            incarnation=me.incarnation,
            model=info.model if info else self.model,
            role=me.role,
            transport=messages.Transport(http=me.http or None, grpc=me.grpc),
            weight_version=weight_version,
            max_model_len=info.max_model_len if info else None,
        )
        await self.announcer.put(entry, self._patience_s)

    async def publish(self, picture: fx.Picture, cause: ev.Cause | None) -> None:
        """Make a change known: one more in `seq`, as an event and for those who come later."""
        now = time.time()
        before = self.picture
        if picture.state is not before.state:
            self._previous = before.state
        if picture.weight_update is None:
            self._update_since = None
        elif self._update_since is None or not _same_update(before, picture):
            self._update_since = now
        if picture.operation is None:
            self._operation_since = None
        elif before.operation != picture.operation:
            self._operation_since = now
        self.picture, self._cause, self._time = picture, cause, now
        self._chunk_s = None
        self._seq += 1
        self.metrics.state(picture.state, picture.ready, picture.live, picture.weights.good)
        await self.announce()
        self.on_change()
        log.info("%s", _line(picture, cause))

    async def progress(self, seconds: float) -> None:
        """Tell those who listen how long the chunk has been loading; no change, so no new `seq`."""
        self._chunk_s = seconds
        await self._send_event(self.snapshot())

    async def announce(self) -> None:
        """Send the present snapshot to those who listen, and keep it for those who come later."""
        snapshot = self.snapshot()
        await self._send_event(snapshot)
        await self.announcer.put_state(snapshot, self._patience_s)

    async def _send_event(self, snapshot: messages.Snapshot) -> None:
        subject = subjects.state(self.me.namespace, self.me.component, self.me.instance)
        try:
            await self.bus.publish(subject, encode(snapshot, Format.MSGPACK))
        except BusError as error:
            log.debug("state event not sent: %s", error)

    @property
    def _patience_s(self) -> float:
        """With the broker away a change is kept for the reconnect."""
        return DELETE_TIMEOUT_S if self.bus.connected else 0.0

    async def restored(self) -> None:
        """Put the keys right after a reconnect."""
        while self.bus.connected and not await self.announcer.restore():
            await asyncio.sleep(DELETE_TIMEOUT_S)

    # --- requests ---------------------------------------------------------------------------------

    def count(self, in_flight: int) -> None:
        """The host reports how many inference requests are in flight."""
        if self.in_flight or in_flight:
            self._busy_s = time.monotonic()
        self.in_flight = in_flight

    def busy_within(self, seconds: float) -> bool:
        """Whether a request was in flight, or ended, so shortly ago."""
        return self.in_flight > 0 or time.monotonic() - self._busy_s < seconds

    # --- the snapshot ---------------------------------------------------------------------------

    def snapshot(self) -> messages.Snapshot:
        me, picture = self.me, self.picture
        info = self.engine
        return messages.Snapshot(
            namespace=me.namespace,
            component=me.component,
            instance=me.instance,
            incarnation=me.incarnation,
            seq=self._seq,
            time=self._time,
            state=picture.state.value,
            previous=self._previous.value if self._previous else None,
            ready=picture.ready,
            live=picture.live,
            settled=picture.settled,
            reasons=self._reasons(),
            paused=self._paused(),
            sleep=_sleep(picture),
            weight_update=self._weight_update(),
            weights=messages.Weights(
                version=picture.weights.version, epoch=picture.weights.epoch, good=picture.weights.good
            ),
            in_flight=self.in_flight,
            operation=self._operation(),
            cause=_cause(self._cause),
            role=me.role,
            model=info.model if info else self.model,
            engine=messages.Engine(
                kind=info.kind if info else self.engine_kind, version=info.version if info else None
            ),
            addresses=messages.Addresses(grpc=me.grpc, http=me.http or None, admin=me.admin or None),
        )

    def _reasons(self) -> list[str]:
        trouble = None if self.picture.ready else self.trouble()
        unreachable = None if self.bus.connected else UNREACHABLE
        return [*self.picture.reasons, *filter(None, (trouble, unreachable))]

    def _weight_update(self) -> messages.WeightUpdate | None:
        update = self.picture.weight_update
        if update is None:
            return None
        return messages.WeightUpdate(
            phase=update.phase.value,
            session=update.session,
            owner=update.owner,
            chunks=update.chunks,
            since=self._update_since,
            lease_expires=_wall(self.sessions.session.lease) if self.sessions.session else None,
            progress=self._progress(),
        )

    def _progress(self) -> messages.Progress | None:
        if self._chunk_s is None:
            return None
        session = self.sessions.session
        size = session.received.bytes if session else 0
        return messages.Progress(seconds=round(self._chunk_s, 3), bytes=size or None)

    def _paused(self) -> messages.Paused | None:
        if (paused := self.picture.paused) is None:
            return None
        return messages.Paused(
            mode=paused.mode.value,
            by=[origin.value for origin in paused.by],
            lease_expires=_wall(self.sessions.pause) if self.sessions.pause else None,
        )

    def _operation(self) -> messages.Operation | None:
        operation = self.picture.operation
        if operation is None:
            return None
        return messages.Operation(
            verb=operation.verb, id=operation.id, since=self._operation_since or self._time
        )


def _same_update(one: fx.Picture, other: fx.Picture) -> bool:
    """Whether both show the same session, or the same fault of the weights."""
    a, b = one.weight_update, other.weight_update
    if a is None or b is None:
        return False
    return a.session == b.session and (a.session is not None or a.phase is b.phase)


def _wall(lease: Lease) -> float | None:
    """When a lease runs out, on the clock of others; it runs on the monotonic one."""
    if lease.length_s is None:
        return None
    return time.time() + (lease.expires_s() or time.monotonic() + lease.length_s) - time.monotonic()


def _sleep(picture: fx.Picture) -> messages.Sleep | None:
    if (sleep := picture.sleep) is None:
        return None
    return messages.Sleep(level=sleep.level, asleep=[tag.value for tag in sleep.asleep])


def _cause(cause: ev.Cause | None) -> messages.Cause | None:
    if cause is None:
        return None
    return messages.Cause(verb=cause.verb, id=cause.id, issuer=cause.issuer)


def _line(picture: fx.Picture, cause: ev.Cause | None) -> str:
    """One log line for a person: where we are and who made it so."""
    parts = [picture.state.value if picture.settled else f"{picture.state.value} (not settled)"]
    if picture.reasons:
        parts.append("; ".join(picture.reasons))
    if cause:
        parts.append(f"cause: {cause.verb}" + (f" by {cause.issuer}" if cause.issuer else ""))
    return " | ".join(parts)
