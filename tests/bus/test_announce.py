"""Announcements: stored, read in order, each once, whatever happens to the broker."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bus import subjects
from bus.announce import KEPT, Announcements, announce, ensure_stream
from bus.codec import decode_announcement
from bus.connection import Bus, NotConnected, Stored, TooLarge
from bus.messages import Announcement
from tests.broker import NatsServer, eventually
from tests.bus.conftest import Connect

WHO = ("default", "backend")


def version(text: str, **rest: Any) -> Announcement:
    fields: dict[str, Any] = {"id": f"id-{text}", "epoch": 1, "updates": [{"path": f"/{text}"}], **rest}
    return Announcement(version=text, **fields)


def versions(found: list[Stored]) -> list[str]:
    return [decode_announcement(stored.data).version for stored in found]


@asynccontextmanager
async def reading(announcements: Announcements) -> AsyncIterator[list[Stored]]:
    """A list that grows with what is announced."""
    seen: list[Stored] = []

    async def read() -> None:
        async for stored in announcements.live():
            seen.append(stored)  # noqa: PERF401

    task = asyncio.create_task(read())
    yield seen
    task.cancel()
    await asyncio.wait({task})


async def test_stored_ones_in_order_and_then_live_ones(connect: Connect) -> None:
    ours, theirs = await connect(), await connect()
    for text in ("v1", "v2"):
        await announce(theirs, *WHO, version(text))
    await announce(theirs, "default", "other", version("w1"))
    announcements = Announcements(ours, *WHO)
    found = await announcements.stored()
    assert versions(found) == ["v1", "v2"]
    assert [stored.sequence for stored in found] == [1, 2]
    assert await announcements.stored() == []
    async with reading(announcements) as seen:
        assert await announce(theirs, *WHO, version("v3")) == 4
        await eventually(lambda: seen)
        await announce(theirs, *WHO, version("v4"))
        await eventually(lambda: len(seen) == 2)
        assert versions(seen) == ["v3", "v4"]
        assert [stored.sequence for stored in seen] == [4, 5]
        assert announcements.last == 5


async def test_a_reader_makes_the_stream(bus: Bus) -> None:
    assert await Announcements(bus, *WHO).stored() == []
    assert (await bus.stream_info(subjects.WEIGHTS_STREAM)).last == 0
    await ensure_stream(bus)  # there already


async def test_the_same_announcement_is_stored_once(bus: Bus) -> None:
    """So that a trainer that got no answer may repeat it."""
    first = await announce(bus, *WHO, version("v1"))
    assert await announce(bus, *WHO, version("v1")) == first
    assert await announce(bus, *WHO, version("v1", cache="keep")) == first + 1
    assert await announce(bus, "default", "other", version("v1")) == first + 2
    assert len(await Announcements(bus, *WHO).stored()) == 2


async def test_the_last_64_of_each_component_are_kept(bus: Bus) -> None:
    await announce(bus, "default", "other", version("w1"))
    for number in range(KEPT + 3):
        await announce(bus, *WHO, version(f"v{number}"))
    found = versions(await Announcements(bus, *WHO).stored())
    assert found == [f"v{number}" for number in range(3, KEPT + 3)]
    assert versions(await Announcements(bus, "default", "other").stored()) == ["w1"]


async def test_bytes_are_given_as_they_are(bus: Bus) -> None:
    """Whoever reads must see what cannot be decoded, so as to say so; and must get past it."""
    await ensure_stream(bus)
    await bus.publish(subjects.weights(*WHO), b"\xc1 nonsense")
    await bus.publish(subjects.weights(*WHO), b"")
    await announce(bus, *WHO, version("v1"))
    found = await Announcements(bus, *WHO).stored()
    assert [stored.data for stored in found[:2]] == [b"\xc1 nonsense", b""]
    assert versions(found[2:]) == ["v1"]


async def test_a_large_one_passes_and_too_large_a_one_is_refused(bus: Bus) -> None:
    names = [f"model.layers.{number}.weight" for number in range(25_000)]
    await announce(bus, *WHO, version("v1", updates=[{"names": names}]))
    (found,) = await Announcements(bus, *WHO).stored()
    assert decode_announcement(found.data).updates == [{"names": names}]
    with pytest.raises(TooLarge):
        await announce(bus, *WHO, version("v2", updates=[{"x": "x" * 2 * 1024 * 1024}]))


async def test_nothing_is_lost_or_repeated_over_restarts_of_the_broker(
    nats_server: NatsServer, connect: Connect
) -> None:
    ours, theirs = await connect(), await connect()
    announcements = Announcements(ours, *WHO)
    await announce(theirs, *WHO, version("v1"))
    await announcements.stored()
    async with reading(announcements) as seen:
        for number in range(2, 5):
            await announce(theirs, *WHO, version(f"v{number}"))
            await nats_server.restart()
            await eventually(lambda: theirs.connected, within_s=10)
        await announce(theirs, *WHO, version("v5"))
        await eventually(lambda: len(seen) >= 4, within_s=10)
        assert versions(seen) == ["v2", "v3", "v4", "v5"]


async def test_what_is_announced_while_a_reader_is_cut_off_reaches_it(
    nats_server: NatsServer, connect: Connect
) -> None:
    ours, theirs = await connect(), await connect()
    announcements = Announcements(ours, *WHO)
    await announcements.stored()
    async with reading(announcements) as seen:
        await eventually(lambda: ours._subscriptions)
        link = ours._link
        assert link is not None
        link.end("cut by the test")
        await announce(theirs, *WHO, version("v1"))
        await eventually(lambda: seen, within_s=10)
        assert versions(seen) == ["v1"]


async def test_a_stream_made_anew_is_read_from_its_beginning_with_higher_numbers(
    nats_server: NatsServer, connect: Connect
) -> None:
    """Else versions announced after the broker lost its data would look old for ever."""
    ours, theirs = await connect(), await connect()
    for text in ("v1", "v2", "v3"):
        await announce(theirs, *WHO, version(text))
    announcements = Announcements(ours, *WHO)
    await announcements.stored()
    async with reading(announcements) as seen:
        await nats_server.stop()
        shutil.rmtree(nats_server.folder / "data")
        await nats_server.start()
        await eventually(lambda: theirs.connected, within_s=10)
        assert await announce(theirs, *WHO, version("v4")) == 1
        await eventually(lambda: seen, within_s=10)
        assert (versions(seen), seen[0].sequence) == (["v4"], 4)


async def test_a_message_that_is_lost_is_made_good_by_looking(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bus.connection.LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("bus.connection.LOOK_AGAIN_S", ())
    ours, theirs = await connect(), await connect()
    async with reading(Announcements(ours, *WHO)) as seen:
        await eventually(lambda: ours._subscriptions)
        for subscription in ours._subscriptions:
            subscription._handler = lambda message: None
        await announce(theirs, *WHO, version("v1"))
        await eventually(lambda: seen)


async def test_a_read_that_fails_gives_everything_next_time(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect()
    for text in ("v1", "v2"):
        await announce(bus, *WHO, version(text))
    announcements = Announcements(bus, *WHO)
    read = bus.stream_next

    async def fails_at_the_second(stream: str, subject: str, after: int) -> Stored | None:
        if after:
            raise NotConnected("gone")
        return await read(stream, subject, after)

    with monkeypatch.context() as patch:
        patch.setattr(bus, "stream_next", fails_at_the_second)
        with pytest.raises(NotConnected):
            await announcements.stored()
    assert versions(await announcements.stored()) == ["v1", "v2"]


async def test_readers_end_with_the_bus(connect: Connect) -> None:
    bus = await connect()
    announcements = Announcements(bus, *WHO)

    async def read() -> None:
        async for _ in announcements.live():
            pass

    task = asyncio.create_task(read())
    await eventually(lambda: bus._subscriptions)
    await bus.close()
    with pytest.raises(NotConnected):
        await task
