"""Who announced what, and who fell silent: the two key-value buckets, as a writer and as a reader.

A key is present while its writer renews it. Readers take an empty value for an absent one.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from enum import Enum

from bus import subjects
from bus.codec import BadMessage, Format, decode_entry, decode_snapshot, encode
from bus.connection import Bus, BusError, KvUpdate, Message, NoBucket, Subscription, Timeout, UpdateKind
from bus.messages import InstanceEntry, Snapshot

logger = logging.getLogger(__name__)

TTL_S = 10.0
MARKER_TTL_S = 60.0
RENEW_S = 3.0
PUT_TIMEOUT_S = 1.0
DELETE_TIMEOUT_S = 0.2
"""The engine call that ends readiness waits no longer for a broker that is away."""
GRACE_S = 5.0
"""After a reconnect writers need a moment, too, to renew their keys."""
SILENT_S = 15.0
"""Not renewed for so long while connected: gone, even if no marker told so."""
_QUEUE_LIMIT = 10_000


async def ensure_buckets(bus: Bus) -> None:
    """Create the buckets of instances and of states unless they exist.

    Raises:
        BusError: they may be missing.
    """
    for bucket in (subjects.INSTANCES_BUCKET, subjects.STATES_BUCKET):
        await bus.ensure_bucket(bucket, ttl_s=TTL_S, history=1, limit_marker_ttl_s=MARKER_TTL_S)


class Announcer:
    """Holds what this instance's two keys should be, and makes them so.

    No method raises for the bus: what could not be done is `dirty`, and `renew` and `restore`
    do it. Changes reach the server in the order of the calls, also if a renewal runs meanwhile.
    """

    def __init__(
        self, bus: Bus, namespace: str, component: str, instance: str, endpoint: str = subjects.ENDPOINT
    ) -> None:
        self._bus = bus
        self._entry_key = subjects.instance_key(namespace, component, endpoint, instance)
        self._state_key = subjects.state_key(namespace, component, instance)
        self._entry: bytes | None = None
        self._state: bytes | None = None
        self._dirty: set[str] = set()

    @property
    def dirty(self) -> bool:
        """Whether the server may hold something else than it should."""
        return bool(self._dirty)

    @property
    def announced(self) -> bool:
        """Whether the entry should be present."""
        return self._entry is not None

    async def clear_left_over(self) -> None:
        """Create missing buckets and delete keys that an earlier life left under this name.

        Raises:
            BusError: unlike the others, since a start must not go on without it.
        """
        await ensure_buckets(self._bus)
        for bucket, key in self._keys():
            if await self._bus.kv_get(bucket, key) is not None:
                await self._bus.kv_delete(bucket, key, PUT_TIMEOUT_S)

    async def put(self, entry: InstanceEntry, timeout_s: float = PUT_TIMEOUT_S) -> bool:
        """From now on this instance may be sent requests.

        Returns:
            Whether the server has confirmed it.
        """
        self._entry = encode(entry, Format.JSON)
        return await self._store(subjects.INSTANCES_BUCKET, self._entry_key, self._entry, timeout_s)

    async def delete(self, timeout_s: float = DELETE_TIMEOUT_S) -> bool:
        """From now on it may not.

        Returns:
            Whether the server has confirmed it; never later than `timeout_s`.
        """
        self._entry = None
        return await self._store(subjects.INSTANCES_BUCKET, self._entry_key, None, timeout_s)

    async def put_state(self, snapshot: Snapshot, timeout_s: float = PUT_TIMEOUT_S) -> bool:
        """Show this state to those who come later.

        Returns:
            Whether the server has confirmed it.
        """
        self._state = encode(snapshot, Format.JSON)
        return await self._store(subjects.STATES_BUCKET, self._state_key, self._state, timeout_s)

    def refresh_state(self, snapshot: Snapshot) -> None:
        """What the next renewal shows: the same state, with figures that have moved on."""
        self._state = encode(snapshot, Format.JSON)

    async def renew(self) -> bool:
        """Put what should be there again, and delete an entry that should not be there.

        Returns:
            Whether all is as it should be.
        """
        return await self._apply(delete_blindly=False)

    async def restore(self) -> bool:
        """As `renew`, for after a reconnect: also makes missing buckets."""
        try:
            await ensure_buckets(self._bus)
        except BusError as error:
            logger.warning("cannot put discovery right: %s", error)
            self._dirty.update(key for _, key in self._keys())
            return False
        return await self._apply(delete_blindly=True)

    async def run(self, snapshot: Callable[[], Snapshot] | None = None) -> None:
        """Renew every `RENEW_S` until cancelled.

        Args:
            snapshot: gives the state as it is then.
        """
        due = time.monotonic() + RENEW_S
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = max(due + RENEW_S, time.monotonic())
            if snapshot is not None and self._state is not None:
                self.refresh_state(snapshot())
            if self._bus.connected and not await self.renew() and self._bus.connected:
                await self.restore()

    def _keys(self) -> tuple[tuple[str, str], tuple[str, str]]:
        return (
            (subjects.INSTANCES_BUCKET, self._entry_key),
            (subjects.STATES_BUCKET, self._state_key),
        )

    async def _apply(self, delete_blindly: bool) -> bool:
        entry_right = True
        if self._entry is None and not delete_blindly:
            try:
                found = await self._bus.kv_get(subjects.INSTANCES_BUCKET, self._entry_key, PUT_TIMEOUT_S)
            except BusError:
                found, entry_right = None, False
            delete_blindly = found is not None
            if entry_right and found is None and self._entry is None:
                self._dirty.discard(self._entry_key)
        # What should be is looked up again right before it is sent: it may have changed meanwhile.
        if self._entry is not None or delete_blindly:
            entry_right = await self._store(
                subjects.INSTANCES_BUCKET, self._entry_key, self._entry, PUT_TIMEOUT_S
            )
        state_right = self._state is None or await self._store(
            subjects.STATES_BUCKET, self._state_key, self._state, PUT_TIMEOUT_S
        )
        return entry_right and state_right

    async def _store(self, bucket: str, key: str, value: bytes | None, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        self._dirty.add(key)
        try:
            if not self._bus.connected:
                async with asyncio.timeout(timeout_s):
                    await self._bus.wait_connected()
                value = self._entry if key == self._entry_key else self._state
            left_s = end - time.monotonic()
            if value is None:
                await self._bus.kv_delete(bucket, key, left_s)
            else:
                await self._bus.kv_put(bucket, key, value, left_s)
        except (BusError, TimeoutError) as error:
            logger.warning("discovery: %s is not %s: %s", key, "deleted" if value is None else "put", error)
            return False
        if value == (self._entry if key == self._entry_key else self._state):
            self._dirty.discard(key)
        return True


class ChangeKind(Enum):
    ROUTABLE = "routable"
    """Its entry appeared or changed."""
    NOT_ROUTABLE = "not_routable"
    """Its entry is gone."""
    STATE = "state"
    """It published a state."""
    ENDED = "ended"
    """This incarnation will not be heard of again: its state key is gone, or a newer one took over."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a listener learnt.

    Attributes:
        entry: with `ROUTABLE` the new one, with `NOT_ROUTABLE` the last.
        snapshot: with `STATE` the new one, with `ENDED` the last.
        missed: state changes in between that were not seen. Each snapshot is complete, so nothing
            else is lost.
    """

    kind: ChangeKind
    instance: str
    entry: InstanceEntry | None = None
    snapshot: Snapshot | None = None
    missed: int = 0


class Listener:
    """The instances of one component, live: `instances` (routable) and `states`, by name.

    Fed by the key-value buckets and, sooner, by state events. While the bus is away both stay as
    they were; after a reconnect they are put right, and a key that is not there is given `GRACE_S`.

        async with Listener(bus, "default", "backend") as listener:
            print(listener.instances)
            async for change in listener.changes(): ...
    """

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        component: str,
        on_change: Callable[[Change], None] | None = None,
        endpoint: str = subjects.ENDPOINT,
    ) -> None:
        """`on_change` is called on the loop, in order, and must only enqueue."""
        self.instances: dict[str, InstanceEntry] = {}
        self.states: dict[str, Snapshot] = {}
        self._bus = bus
        self._events = subjects.state_pattern(namespace, component)
        self._buckets = {
            subjects.INSTANCES_BUCKET: subjects.instance_key_pattern(namespace, component, endpoint),
            subjects.STATES_BUCKET: subjects.state_key_pattern(namespace, component),
        }
        self._on_change = on_change
        self._queues: set[asyncio.Queue[Change | None]] = set()
        self._subscription: Subscription | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._synced = {bucket: asyncio.Event() for bucket in self._buckets}
        self._leaving: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._heard: dict[tuple[str, str], float] = {}

    async def start(self, wait_s: float = 5.0) -> None:
        """Begin to listen; when it returns all that exists is known.

        Raises:
            Timeout: not within `wait_s`; it goes on listening nevertheless.
            NotConnected, BusError: it does not listen.
        """
        self._subscription = await self._bus.subscribe(self._events, self._on_event)
        self._tasks = [asyncio.create_task(self._watch(*item)) for item in self._buckets.items()]
        self._tasks.append(asyncio.create_task(self._sweep()))
        try:
            async with asyncio.timeout(wait_s):
                for event in self._synced.values():
                    await event.wait()
        except TimeoutError:
            raise Timeout(f"discovery was not read in {wait_s:g} s") from None

    async def close(self) -> None:
        """Stop listening; iterators end. What is known stays readable."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for timer in self._leaving.values():
            timer.cancel()
        self._leaving.clear()
        for queue in self._queues:
            queue.put_nowait(None)

    async def __aenter__(self) -> "Listener":
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def changes(self) -> AsyncGenerator[Change, None]:
        """Yield each change from now on, until `close`.

        Nothing is missed between reading `instances` or `states` and the first step, if nothing is
        awaited in between. A reader 10,000 changes behind loses the oldest.
        """
        queue: asyncio.Queue[Change | None] = asyncio.Queue()
        self._queues.add(queue)
        try:
            while (change := await queue.get()) is not None:
                yield change
        finally:
            self._queues.discard(queue)

    def _tell(self, change: Change) -> None:
        if self._on_change is not None:
            try:
                self._on_change(change)
            except Exception:
                logger.exception("on_change of a listener failed")
        for queue in self._queues:
            if queue.qsize() >= _QUEUE_LIMIT:
                queue.get_nowait()
                logger.warning("a reader of discovery changes is too slow; the oldest change is dropped")
            queue.put_nowait(change)

    def _on_event(self, message: Message) -> None:
        try:
            snapshot = decode_snapshot(message.data)
        except BadMessage as error:
            logger.warning("on %s: %s", message.subject, error)
            return
        self._state(message.subject.rpartition(".")[2], snapshot, from_key=False)

    async def _watch(self, bucket: str, pattern: str) -> None:
        with contextlib.suppress(BusError):  # the bus was closed
            async with contextlib.aclosing(self._bus.kv_watch(bucket, pattern)) as updates:
                async for update in updates:
                    if update.kind is UpdateKind.SYNCED:
                        self._synced[bucket].set()
                    else:
                        self._on_key(bucket, update)

    def _on_key(self, bucket: str, update: KvUpdate) -> None:
        name = update.key.rpartition(".")[2]
        leaving = self._leaving.pop((bucket, name), None)
        if leaving is not None:
            leaving.cancel()
        if update.value is None:
            recently = time.monotonic() - self._bus.connected_since < GRACE_S
            if update.kind is UpdateKind.EXPIRED and recently:
                self._leaving[bucket, name] = asyncio.get_running_loop().call_later(
                    GRACE_S, self._remove, bucket, name
                )
            else:
                self._remove(bucket, name)
            return
        try:
            if bucket == subjects.STATES_BUCKET:
                self._state(name, decode_snapshot(update.value), from_key=True)
            else:
                self._entry(name, decode_entry(update.value))
        except BadMessage as error:
            logger.warning("key %s of %s: %s", update.key, bucket, error)

    def _entry(self, name: str, entry: InstanceEntry) -> None:
        self._heard[subjects.INSTANCES_BUCKET, name] = time.monotonic()
        known = self.instances.get(name)
        if known == entry:
            return
        if known is not None and known.incarnation != entry.incarnation:
            self._remove(subjects.INSTANCES_BUCKET, name)
        self.instances[name] = entry
        self._tell(Change(ChangeKind.ROUTABLE, name, entry=entry))

    def _state(self, name: str, snapshot: Snapshot, from_key: bool) -> None:
        now = time.monotonic()
        known = self.states.get(name)
        missed = 0
        if known is not None and known.incarnation == snapshot.incarnation:
            self._heard[subjects.STATES_BUCKET, name] = now
            # Progress and renewals keep the number; what they bring is news all the same.
            if (snapshot.seq, snapshot.time) < (known.seq, known.time) or snapshot == known:
                return
            missed = max(0, snapshot.seq - known.seq - 1)
        elif known is not None:
            # Incarnations are ULIDs: a smaller one is older, unless a clock was set back.
            silent = now - self._heard.get((subjects.STATES_BUCKET, name), 0.0) > TTL_S
            if snapshot.incarnation < known.incarnation and not (from_key and silent):
                return
            self._remove(subjects.STATES_BUCKET, name)
        self._heard[subjects.STATES_BUCKET, name] = now
        self.states[name] = snapshot
        self._tell(Change(ChangeKind.STATE, name, snapshot=snapshot, missed=missed))

    def _remove(self, bucket: str, name: str) -> None:
        self._leaving.pop((bucket, name), None)
        self._heard.pop((bucket, name), None)
        if bucket == subjects.STATES_BUCKET:
            snapshot = self.states.pop(name, None)
            if snapshot is not None:
                self._tell(Change(ChangeKind.ENDED, name, snapshot=snapshot))
        else:
            entry = self.instances.pop(name, None)
            if entry is not None:
                self._tell(Change(ChangeKind.NOT_ROUTABLE, name, entry=entry))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            if not self._bus.connected:
                continue
            oldest = time.monotonic() - SILENT_S
            if self._bus.connected_since > oldest:
                continue
            for bucket, name in [key for key, heard in self._heard.items() if heard < oldest]:
                self._remove(bucket, name)


async def read_instances(
    bus: Bus, namespace: str, component: str, endpoint: str = subjects.ENDPOINT
) -> dict[str, InstanceEntry]:
    """The routable instances of a component now, by name.

    Raises:
        NotConnected, Timeout, BusError
    """
    pattern = subjects.instance_key_pattern(namespace, component, endpoint)
    found: dict[str, InstanceEntry] = {}
    for key, value in (await _entries(bus, subjects.INSTANCES_BUCKET, pattern)).items():
        with contextlib.suppress(BadMessage):
            found[key.rpartition(".")[2]] = decode_entry(value)
    return found


async def read_states(bus: Bus, namespace: str, component: str) -> dict[str, Snapshot]:
    """The states of all live instances of a component now, by name. Raises as `read_instances`."""
    pattern = subjects.state_key_pattern(namespace, component)
    found: dict[str, Snapshot] = {}
    for key, value in (await _entries(bus, subjects.STATES_BUCKET, pattern)).items():
        with contextlib.suppress(BadMessage):
            found[key.rpartition(".")[2]] = decode_snapshot(value)
    return found


async def _entries(bus: Bus, bucket: str, pattern: str) -> dict[str, bytes]:
    try:
        return await bus.kv_entries(bucket, pattern)
    except NoBucket:  # no instance was ever here
        return {}
