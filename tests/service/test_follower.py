"""Announced versions: applied by every instance itself, also by those that start later."""

from pathlib import Path
from typing import Any

from bus import subjects
from bus.announce import announce, ensure_stream
from bus.client import Client
from bus.discovery import Change, ChangeKind, Listener
from bus.messages import Announcement
from tests.broker import eventually
from tests.service.serving import Serving, serving
from tests.service.test_sessions import safetensors


def version(name: str, epoch: int = 1, **fields: Any) -> Announcement:
    return Announcement(id=f"a-{name}", epoch=epoch, version=name, updates=[{"chunk": 1}], **fields)


async def publish(client: Client, announcement: Announcement) -> None:
    await announce(client.bus, "default", "backend", announcement)


async def holds(one: Serving, wanted: str, state: str = "serving") -> None:
    async def read() -> bool:
        snapshot = await one.snapshot()
        return (snapshot.weights.version, snapshot.state, snapshot.settled) == (wanted, state, True)

    await eventually(read, within_s=15)


async def test_every_instance_applies_a_version_by_itself(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one, serving(tmp_path, nats_url, name="two") as two:
        await publish(one.client, version("v1", issuer="trainer"))
        for instance in (one, two):
            await holds(instance, "v1")
            entry = (await one.client.instances())[instance.name]
            assert entry.weight_version == "v1"
        assert any(e.cause and e.cause.issuer == "trainer" for e in one.events)


async def test_a_paused_instance_applies_it_and_stays_paused(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one:
        await one.instance.pause()
        await publish(one.client, version("v1"))
        await holds(one, "v1", state="paused")


async def test_a_late_instance_is_stale_until_it_has_the_last_version(tmp_path: Path, nats_url: str) -> None:
    """Version gating of joiners: it tells that it is there, and is neither ready nor in discovery until it
    has committed the version that its component requires."""
    async with Client.connect(nats_url) as client:
        await publish(client, version("v1"))
        await publish(client, version("v2"))
        changes: list[Change] = []
        async with (
            Listener(client.bus, "default", "backend", changes.append) as listener,
            serving(tmp_path, nats_url) as one,
        ):
            await holds(one, "v2")
            before = one.events[: [e.ready for e in one.events].index(True)]
            phases = [e.weight_update.phase for e in before if e.weight_update]
            assert phases[0] == "stale"
            assert {e.weights.version for e in one.events if e.ready} == {"v2"}
            await eventually(lambda: listener.instances.get("one"))
            entries = [c.entry.weight_version for c in changes if c.kind is ChangeKind.ROUTABLE and c.entry]
            assert set(entries) == {"v2"}


async def test_newer_means_epoch_and_order_and_never_the_text(tmp_path: Path, nats_url: str) -> None:
    """Fencing: within an epoch the later announcement counts, of two epochs the higher one. A trainer that
    starts again takes an epoch, and may go back to weights with an older name."""
    async with serving(tmp_path, nats_url) as one:
        await publish(one.client, version("v9"))
        await holds(one, "v9")
        await publish(one.client, version("v10"))
        await holds(one, "v10")
        await publish(one.client, version("v3", epoch=2))
        await holds(one, "v3")
        await publish(one.client, version("v11"))  # of the trainer before
        async with serving(tmp_path, nats_url, name="two") as two:
            await holds(two, "v3")
        await holds(one, "v3")
        assert not any(event.weights.version == "v11" for event in one.events)


async def test_asleep_nothing_wakes_and_the_version_comes_before_readiness(
    tmp_path: Path, nats_url: str
) -> None:
    async with serving(tmp_path, nats_url) as one:
        await one.instance.sleep(level=1)
        await publish(one.client, version("v1"))
        await eventually(lambda: one.events[-1].weights.good is False)
        assert one.events[-1].state == "asleep"
        await one.instance.wake_up()
        await holds(one, "v1")
        woken = [e for e in one.events if e.seq > 4]
        assert not any(e.ready for e in woken if e.weights.version != "v1")


async def test_an_open_session_ends_first(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one:
        await one.instance.start_weight_update()
        await publish(one.client, version("v1"))
        await one.instance.update_weights({})
        await one.instance.finish_weight_update(weight_version="mine")
        await holds(one, "v1")


async def test_what_can_be_checked_without_the_engine_is_checked_first(tmp_path: Path, nats_url: str) -> None:
    """The old weights stay loaded; the instance leaves traffic, and comes back by itself."""
    async with serving(tmp_path, nats_url) as one:
        late = tmp_path / "late.safetensors"
        announcement = Announcement(id="a", epoch=1, version="v1", updates=[{"path": str(late)}])
        await publish(one.client, announcement)
        await eventually(lambda: one.events[-1].weight_update)
        update = one.events[-1].weight_update
        assert update is not None and update.phase == "stale"
        snapshot = await one.snapshot()
        assert any("v1" in reason and "late.safetensors" in reason for reason in snapshot.reasons)
        assert not any(e.operation and e.operation.verb == "start_weight_update" for e in one.events)
        safetensors(late, {"a": 3})
        await holds(one, "v1")


async def test_a_version_that_the_engine_does_not_take_keeps_it_out(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one:
        await one.simulate(call="update_weights", outcome="error", times=1)
        await publish(one.client, version("v1"))
        await eventually(lambda: any("v1" in r for r in one.events[-1].reasons) or _tainted(one))
        await holds(one, "default", state="weight_update")
        await publish(one.client, version("v2"))
        await holds(one, "v2")


async def test_what_is_fenced_or_cannot_be_read_displaces_nothing(tmp_path: Path, nats_url: str) -> None:
    async with Client.connect(nats_url) as client:
        await publish(client, version("good", epoch=5))
        await ensure_stream(client.bus)
        await client.bus.publish(subjects.weights("default", "backend"), b"\xc1 nonsense")
        await publish(client, version("old", epoch=4))
        async with serving(tmp_path, nats_url) as one:
            await holds(one, "good")
            assert (await one.snapshot()).weights.epoch == 5


async def test_an_epoch_outlives_the_instance_that_saw_it(tmp_path: Path, nats_url: str) -> None:
    """Fencing: an instance that restarted refuses the old trainer, too."""
    async with serving(tmp_path, nats_url) as one:
        await one.instance.pause(epoch=7)
        await one.program.kill()
        async with serving(tmp_path, nats_url) as again:
            reply = await again.instance.pause(epoch=6, check=False)
            assert reply.error is not None and reply.error.code == "stale_epoch"


def _tainted(one: Serving) -> bool:
    update = one.events[-1].weight_update
    return update is not None and update.phase == "tainted"
