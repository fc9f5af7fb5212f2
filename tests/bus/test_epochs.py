"""Epochs: taken once each, only ever rising, known again after whatever happens to the broker."""

import asyncio
import shutil

import pytest

from bus import epochs, subjects
from bus.connection import Bus, BusError, NoBucket, WrongRevision
from bus.epochs import Epochs, highest_epoch, next_epoch, raise_epoch
from tests.broker import NatsServer, eventually
from tests.bus.conftest import Connect

WHO = ("default", "backend")
KEY = (subjects.EPOCHS_BUCKET, "default.backend")


async def test_compare_and_set(bus: Bus) -> None:
    """What `next_epoch` rests on: of two who read the same revision one is refused."""
    with pytest.raises(NoBucket):
        await bus.kv_update(*KEY, b"1", 0, 5)
    await bus.ensure_bucket(subjects.EPOCHS_BUCKET, ttl_s=None, limit_marker_ttl_s=None)
    assert (await bus.kv_read(*KEY)).revision == 0
    revision = await bus.kv_update(*KEY, b"1", 0, 5)
    with pytest.raises(WrongRevision):
        await bus.kv_update(*KEY, b"2", 0, 5)
    assert await bus.kv_get(*KEY) == b"1"
    assert await bus.kv_update(*KEY, b"2", revision, 5) == revision + 1


async def test_trainers_that_start_at_once_get_different_epochs(connect: Connect) -> None:
    """Fencing: an epoch is taken once for each start of a trainer, by compare-and-set."""
    buses = [await connect() for _ in range(4)]
    assert await highest_epoch(buses[0], *WHO) is None
    taken = await asyncio.gather(*(next_epoch(bus, *WHO) for bus in buses for _ in range(5)))
    assert sorted(taken) == list(range(1, 21))
    assert await highest_epoch(buses[0], *WHO) == 20
    assert await highest_epoch(buses[0], "default", "other") is None


@pytest.mark.parametrize(("value", "epoch"), [(b"7", 7), (b'{"epoch": 7, "issuer": "x"}', 7), (b"", None)])
async def test_what_the_bucket_may_hold(bus: Bus, value: bytes, epoch: int | None) -> None:
    await bus.ensure_bucket(subjects.EPOCHS_BUCKET, ttl_s=None)
    await bus.kv_put(*KEY, value, 5)
    assert await highest_epoch(bus, *WHO) == epoch
    assert await next_epoch(bus, *WHO) == (epoch or 0) + 1


@pytest.mark.parametrize("value", [b"true", b"1.5", b"x", b'{"a": 1}', b"[1]"])
async def test_what_it_may_not_hold_is_not_overwritten(bus: Bus, value: bytes) -> None:
    """Counting from 1 again would let an old trainer in."""
    await bus.ensure_bucket(subjects.EPOCHS_BUCKET, ttl_s=None)
    await bus.kv_put(*KEY, value, 5)
    with pytest.raises(BusError, match="not a number"):
        await next_epoch(bus, *WHO)
    assert await bus.kv_get(*KEY) == value


async def test_raising_never_lowers(bus: Bus) -> None:
    assert await raise_epoch(bus, *WHO, 5) == 5
    assert await raise_epoch(bus, *WHO, 3) == 5
    assert await next_epoch(bus, *WHO) == 6


async def test_the_last_epoch_is_not_wrapped_around(bus: Bus) -> None:
    await raise_epoch(bus, *WHO, 2**63 - 1)
    with pytest.raises(BusError, match="used up"):
        await next_epoch(bus, *WHO)


async def test_an_instance_knows_at_once_and_follows(connect: Connect) -> None:
    ours, theirs = await connect(), await connect()
    await next_epoch(theirs, *WHO)
    rises: list[int] = []
    async with Epochs(ours, *WHO, rises.append) as seen:
        assert seen.highest == 1
        await next_epoch(theirs, *WHO)
        await eventually(lambda: seen.highest == 2)
        assert rises == [1, 2]
        assert await seen.raise_to(9) == 9
        assert await highest_epoch(theirs, *WHO) == 9
        assert await seen.raise_to(4) == 9
        seen.note(12)
        assert seen.highest == 12
        await eventually(lambda: seen.stored)
        assert await highest_epoch(theirs, *WHO) == 12
        assert rises == [1, 2, 9, 12]


async def test_the_bucket_that_is_made_later_is_followed(connect: Connect) -> None:
    ours, theirs = await connect(), await connect()
    async with Epochs(ours, *WHO) as seen:
        assert seen.highest is None
        await next_epoch(theirs, *WHO)
        await eventually(lambda: seen.highest == 1)


async def test_an_epoch_seen_while_the_broker_is_away_is_stored_later(
    nats_server: NatsServer, connect: Connect
) -> None:
    """And one that somebody else took meanwhile is seen."""
    bus = await connect()
    await next_epoch(bus, *WHO)
    async with Epochs(bus, *WHO) as seen:
        await nats_server.stop()
        await eventually(lambda: not bus.connected)
        assert await seen.raise_to(4, timeout_s=0.1) == 4
        assert not seen.stored
        await nats_server.start()
        await eventually(lambda: seen.stored, within_s=10)
        other = await connect()
        assert await next_epoch(other, *WHO) == 5
        await eventually(lambda: seen.highest == 5)


async def test_a_bucket_that_is_lost_is_made_again(nats_server: NatsServer, connect: Connect) -> None:
    """With the broker's data gone, the old trainer would else be as good as the new one."""
    bus = await connect()
    async with Epochs(bus, *WHO) as seen:
        await seen.raise_to(6)
        await nats_server.stop()
        shutil.rmtree(nats_server.folder / "data")
        await nats_server.start()
        await eventually(lambda: bus.connected)

        async def there() -> bool:
            return await highest_epoch(bus, *WHO) == 6

        await eventually(there, within_s=10)
        assert seen.highest == 6


async def test_a_message_that_is_lost_is_made_good_by_looking(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bus.connection.LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("bus.connection.LOOK_AGAIN_S", ())
    ours, theirs = await connect(), await connect()
    async with Epochs(ours, *WHO) as seen:
        await eventually(lambda: ours._subscriptions)
        for subscription in ours._subscriptions:
            subscription._handler = lambda message: None
        await next_epoch(theirs, *WHO)
        await eventually(lambda: seen.highest == 1)


async def test_timeouts_are_kept(nats_server: NatsServer, connect: Connect) -> None:
    bus = await connect()
    nats_server.freeze()
    with pytest.raises(BusError):
        await next_epoch(bus, *WHO, timeout_s=0.1)
    nats_server.thaw()
    assert epochs.TIMEOUT_S > 0.1
