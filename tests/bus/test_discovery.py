"""Discovery: keys that are put, renewed and deleted, and those who listen."""

import asyncio
import shutil
import time
from typing import Any

import msgspec
import pytest

from bus import discovery, subjects
from bus.codec import Format, encode
from bus.connection import Bus
from bus.discovery import Announcer, Change, ChangeKind, Listener, ensure_buckets, read_instances, read_states
from bus.messages import InstanceEntry, Snapshot, Transport
from tests.broker import NatsServer, eventually
from tests.bus.conftest import Connect

ENTRY = InstanceEntry(
    namespace="n",
    component="c",
    endpoint="generate",
    instance="i",
    incarnation="01A",
    transport=Transport(http="h:1", grpc="h:2"),
)
SNAPSHOT = Snapshot(
    namespace="n",
    component="c",
    instance="i",
    incarnation="01A",
    seq=1,
    time=1.0,
    state="serving",
    ready=True,
    live=True,
    settled=True,
)
KEY = (subjects.INSTANCES_BUCKET, "n.c.generate.i")
STATE_KEY = (subjects.STATES_BUCKET, "n.c.i")


def entry(**changes: Any) -> InstanceEntry:
    return msgspec.structs.replace(ENTRY, **changes)


def snapshot(**changes: Any) -> Snapshot:
    return msgspec.structs.replace(SNAPSHOT, **changes)


@pytest.fixture
async def announcer(bus: Bus) -> Announcer:
    announcer = Announcer(bus, "n", "c", "i")
    await announcer.clear_left_over()
    return announcer


# The writer


async def test_present_means_routable(announcer: Announcer, bus: Bus) -> None:
    assert await announcer.put(ENTRY)
    assert await bus.kv_get(*KEY) == encode(ENTRY, Format.JSON)
    assert await read_instances(bus, "n", "c") == {"i": ENTRY}
    assert await read_instances(bus, "n", "other") == {}
    assert await announcer.delete()
    assert await bus.kv_get(*KEY) is None
    assert not announcer.dirty
    await announcer.put_state(SNAPSHOT)
    assert await read_states(bus, "n", "c") == {"i": SNAPSHOT}


async def test_nothing_is_announced_where_nobody_ever_was(bus: Bus) -> None:
    assert await read_instances(bus, "n", "c") == {}
    assert await read_states(bus, "n", "c") == {}


async def test_keys_of_an_earlier_life_are_deleted_at_the_start(announcer: Announcer, bus: Bus) -> None:
    await announcer.put(ENTRY)
    await announcer.put_state(SNAPSHOT)
    again = Announcer(bus, "n", "c", "i")
    await again.clear_left_over()
    assert await bus.kv_get(*KEY) is None
    assert await bus.kv_get(*STATE_KEY) is None


async def test_renewed_keys_outlive_their_ttl(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "RENEW_S", 0.3)
    for bucket in (subjects.INSTANCES_BUCKET, subjects.STATES_BUCKET):
        await bus.ensure_bucket(bucket, ttl_s=1)
    announcer = Announcer(bus, "n", "c", "i")
    await announcer.put(ENTRY)
    await announcer.put_state(SNAPSHOT)
    running = asyncio.create_task(announcer.run())
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        assert await bus.kv_get(*KEY)
        assert await bus.kv_get(*STATE_KEY)
        await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.wait({running})
    await eventually(lambda: is_absent(bus))


async def is_absent(bus: Bus) -> bool:
    return await bus.kv_get(*KEY) is None and await bus.kv_get(*STATE_KEY) is None


@pytest.mark.parametrize("how", ["stopped", "frozen"])
async def test_delete_without_a_broker_takes_a_fifth_of_a_second(
    how: str, announcer: Announcer, bus: Bus, nats_server: NatsServer, connect: Connect
) -> None:
    """And what it could not do is done first thing after the reconnect."""
    await announcer.put(ENTRY)
    if how == "stopped":
        await nats_server.stop()
    else:
        nats_server.freeze()
    started = time.monotonic()
    assert await announcer.delete() is False
    assert time.monotonic() - started < 5
    assert announcer.dirty is True
    await (nats_server.start() if how == "stopped" else thawed(nats_server))
    await eventually(lambda: bus.connected)
    assert await announcer.restore()
    await eventually(lambda: not announcer.dirty)
    assert await bus.kv_get(*KEY) is None


async def thawed(server: NatsServer) -> None:
    server.thaw()


async def test_a_renewal_deletes_what_came_back(announcer: Announcer, bus: Bus) -> None:
    """A put may have slept in a frozen server's socket, and land after the delete."""
    await announcer.put(ENTRY)
    await announcer.delete()
    await bus.kv_put(*KEY, encode(ENTRY, Format.JSON), 1)
    assert await announcer.renew()
    assert await bus.kv_get(*KEY) is None


async def test_a_renewal_never_undoes_a_delete(announcer: Announcer, bus: Bus) -> None:
    for _ in range(100):
        await announcer.put(ENTRY)
        await asyncio.gather(announcer.renew(), announcer.delete())
        assert await bus.kv_get(*KEY) is None
        await asyncio.gather(announcer.renew(), announcer.put(ENTRY))
        assert await bus.kv_get(*KEY) is not None


async def test_everything_is_put_right_on_an_empty_broker(
    announcer: Announcer, bus: Bus, nats_server: NatsServer, connect: Connect
) -> None:
    await announcer.put(ENTRY)
    await announcer.put_state(SNAPSHOT)
    await nats_server.stop()
    shutil.rmtree(nats_server.folder / "data")
    await nats_server.start()
    await eventually(lambda: bus.connected)
    assert await announcer.renew() is False
    assert await announcer.restore()
    assert await bus.kv_get(*KEY)
    assert await bus.kv_get(*STATE_KEY)


# The reader


class Told:
    def __init__(self) -> None:
        self.changes: list[Change] = []

    def __call__(self, change: Change) -> None:
        self.changes.append(change)

    def kinds(self) -> list[ChangeKind]:
        return [change.kind for change in self.changes]


async def test_a_listener_knows_what_was_there_and_learns_what_changes(
    announcer: Announcer, bus: Bus
) -> None:
    await announcer.put(ENTRY)
    await announcer.put_state(SNAPSHOT)
    told = Told()
    async with Listener(bus, "n", "c", told) as listener:
        assert listener.instances == {"i": ENTRY}
        assert listener.states == {"i": SNAPSHOT}
        told.changes.clear()
        paused = snapshot(seq=2, state="paused", ready=False)
        await bus.publish(subjects.state("n", "c", "i"), encode(paused, Format.MSGPACK))
        await eventually(lambda: listener.states["i"].state == "paused")
        await announcer.put_state(paused)  # the same again, by the other way
        await announcer.renew()
        await announcer.delete()
        await eventually(lambda: not listener.instances)
        assert told.changes == [
            Change(ChangeKind.STATE, "i", snapshot=paused),
            Change(ChangeKind.NOT_ROUTABLE, "i", entry=ENTRY),
        ]


async def test_a_gap_is_told_and_older_events_are_ignored(announcer: Announcer, bus: Bus) -> None:
    told, subject = Told(), subjects.state("n", "c", "i")
    async with Listener(bus, "n", "c", told) as listener:
        for seq in (1, 2, 5, 4, 5, 6):
            await bus.publish(subject, encode(snapshot(seq=seq), Format.MSGPACK))
        await bus.publish(subject, b"\xc1")
        await bus.publish(subject, encode(snapshot(seq=6, time=2.0, in_flight=3), Format.MSGPACK))
        await eventually(lambda: listener.states.get("i") and listener.states["i"].in_flight == 3)
        # A figure that moves without a change: the same number and time.
        await bus.publish(subject, encode(snapshot(seq=6, time=2.0, in_flight=4), Format.MSGPACK))
        await eventually(lambda: listener.states["i"].in_flight == 4)
        await bus.publish(subject, encode(snapshot(seq=6, time=2.0, in_flight=4), Format.MSGPACK))
        await bus.flush(5)
        assert [(c.snapshot.seq, c.missed) for c in told.changes if c.snapshot] == [
            (1, 0),
            (2, 0),
            (5, 2),
            (6, 0),
            (6, 0),
            (6, 0),
        ]


async def test_a_new_incarnation_ends_the_old_one_first(announcer: Announcer, bus: Bus) -> None:
    await announcer.put(ENTRY)
    await announcer.put_state(SNAPSHOT)
    told, subject = Told(), subjects.state("n", "c", "i")
    async with Listener(bus, "n", "c", told) as listener:
        told.changes.clear()
        await announcer.put(entry(incarnation="01B"))
        await bus.publish(subject, encode(snapshot(incarnation="01B", state="starting"), Format.MSGPACK))
        await bus.publish(subject, encode(snapshot(seq=9), Format.MSGPACK))  # the old one, late
        await bus.publish(subject, encode(snapshot(incarnation="01B", seq=2), Format.MSGPACK))
        await eventually(lambda: len(told.changes) == 5)
        assert [(c.kind, c.snapshot.incarnation) for c in told.changes if c.snapshot] == [
            (ChangeKind.ENDED, "01A"),
            (ChangeKind.STATE, "01B"),
            (ChangeKind.STATE, "01B"),
        ]
        assert [(c.kind, c.entry.incarnation) for c in told.changes if c.entry] == [
            (ChangeKind.NOT_ROUTABLE, "01A"),
            (ChangeKind.ROUTABLE, "01B"),
        ]
        assert listener.states["i"].seq == 2


async def test_who_falls_silent_is_gone(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "GRACE_S", 0.0)
    for bucket in (subjects.INSTANCES_BUCKET, subjects.STATES_BUCKET):
        await bus.ensure_bucket(bucket, ttl_s=1)
    announcer, told = Announcer(bus, "n", "c", "i"), Told()
    async with Listener(bus, "n", "c", told) as listener:
        await announcer.put(ENTRY)
        await announcer.put_state(SNAPSHOT)
        await eventually(lambda: not listener.states and not listener.instances and told.changes)
        assert sorted(told.kinds(), key=lambda kind: kind.value) == [
            ChangeKind.ENDED,
            ChangeKind.NOT_ROUTABLE,
            ChangeKind.ROUTABLE,
            ChangeKind.STATE,
        ]


async def test_after_a_reconnect_an_expired_key_has_time_to_come_back(
    nats_server: NatsServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One instance comes back within the grace, one does not, one left by itself."""
    monkeypatch.setattr(discovery, "GRACE_S", 1.0)
    monkeypatch.setattr(discovery, "RENEW_S", 0.2)
    bus, told = await connect(), Told()
    await bus.ensure_bucket(subjects.INSTANCES_BUCKET, ttl_s=1)
    await ensure_buckets(bus)
    announcers = {name: Announcer(bus, "n", "c", name) for name in ("back", "lost", "left")}
    async with Listener(bus, "n", "c", told) as listener:
        for name, announcer in announcers.items():
            await announcer.put(entry(instance=name))
        await eventually(lambda: len(listener.instances) == 3)
        await nats_server.stop()
        await asyncio.sleep(1.2)  # the keys expire meanwhile
        await nats_server.start()
        await eventually(lambda: bus.connected)
        reconnected = time.monotonic()
        await announcers["left"].delete(1)
        await announcers["back"].restore()
        renewing = asyncio.create_task(announcers["back"].run())
        await eventually(lambda: "lost" not in listener.instances)
        assert time.monotonic() - reconnected > 0.7
        gone = [c.instance for c in told.changes if c.kind is ChangeKind.NOT_ROUTABLE]
        assert gone.count("lost") == 1
        assert "back" not in gone
        renewing.cancel()
        await asyncio.wait({renewing})


async def test_a_listener_that_starts_before_any_instance(bus: Bus) -> None:
    """The buckets do not exist yet."""
    async with Listener(bus, "n", "c") as listener:
        assert listener.instances == {}
        announcer = Announcer(bus, "n", "c", "i")
        await announcer.clear_left_over()
        await announcer.put(ENTRY)
        await eventually(lambda: listener.instances == {"i": ENTRY})


async def test_changes_can_be_iterated(announcer: Announcer, bus: Bus) -> None:
    got: list[Change] = []

    async def read(listener: Listener) -> None:
        async for change in listener.changes():
            got.append(change)  # noqa: PERF401

    listener = Listener(bus, "n", "c")
    await listener.start()
    reading = asyncio.create_task(read(listener))
    await asyncio.sleep(0)
    await announcer.put(ENTRY)
    await eventually(lambda: got == [Change(ChangeKind.ROUTABLE, "i", entry=ENTRY)])
    await listener.close()
    await asyncio.wait_for(reading, 1)


async def test_who_is_not_renewed_is_gone_even_without_a_marker(
    announcer: Announcer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "SILENT_S", 0.3)
    monkeypatch.setattr(discovery, "RENEW_S", 0.1)
    async with Listener(bus, "n", "c") as listener:
        await bus.publish(subjects.state("n", "c", "i"), encode(SNAPSHOT, Format.MSGPACK))  # and no key
        await eventually(lambda: listener.states)
        await eventually(lambda: not listener.states)
