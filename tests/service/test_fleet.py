"""Fleets of simulated instances in processes of their own: what a trainer does, and what then holds."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from bus.client import Client
from bus.fleet import End, Fleet, FleetUpdate, PartialUpdate
from bus.messages import Snapshot
from tests.broker import eventually
from tests.service.serving import Serving, serving

CHUNK = {"path": "/v2"}


@contextlib.asynccontextmanager
async def fleet_of(folder: Path, url: str, names: Sequence[str] = "abc") -> AsyncIterator[dict[str, Serving]]:
    async with contextlib.AsyncExitStack() as stack:
        starting = (stack.enter_async_context(serving(folder, url, name=name)) for name in names)
        yield dict(zip(names, await asyncio.gather(*starting), strict=True))


def shown(instances: dict[str, Serving]) -> dict[str, tuple[str, str]]:
    """State and version that each has last told."""
    return {
        name: (each.events[-1].state, each.events[-1].weights.version) for name, each in instances.items()
    }


def ends(update: FleetUpdate) -> dict[str, End]:
    return {name: part.end for name, part in update.parts.items()}


async def all_show(instances: dict[str, Serving], wanted: Callable[[Snapshot], bool]) -> None:
    await eventually(lambda: all(wanted(each.events[-1]) for each in instances.values()), within_s=60)


async def test_updates_of_a_fleet(tmp_path: Path, nats_url: str) -> None:
    """All; then all but one, by each policy; and nobody is ready with other weights meanwhile."""
    async with (
        fleet_of(tmp_path, nats_url) as three,
        Client.connect(nats_url, issuer="trainer") as client,
        Fleet(client) as fleet,
    ):
        epoch = await client.new_epoch()
        async with fleet.update("v1") as update:
            assert (await update.load(CHUNK)).ok
            assert (await update.load([{"rank": 0}])).ok
        assert set(ends(update).values()) == {End.COMMITTED}
        for each in three.values():
            state = await each.snapshot()
            assert (state.state, state.ready, state.weights.version) == ("serving", True, "v1")
            assert state.weights.epoch == epoch
            updated = [event for event in each.events if event.state != "serving" and event.ready]
            assert updated == []

        # One engine fails at a chunk: the others have the version, and wait for the trainer.
        await three["b"].simulate(call="update_weights", outcome="error", times=1)
        with pytest.raises(PartialUpdate, match=r"1 of 3 instances failed: b \(engine_error, tainted\)"):
            await update_all(fleet, "v2")
        await all_show(three, lambda event: event.settled and not event.ready)
        assert shown(three) == {"a": ("paused", "v2"), "b": ("weight_update", "v1"), "c": ("paused", "v2")}
        await update_all(fleet, "v2")
        await all_show(three, lambda event: event.ready and event.weights.version == "v2")

        await three["c"].simulate(call="start_weight_update", outcome="error", times=1)
        with pytest.raises(PartialUpdate):
            await update_all(fleet, "v3", "abort")
        await all_show(three, lambda event: event.ready and event.weights.version == "v2")

        await three["a"].simulate(call="update_weights", outcome="error", times=1)
        with pytest.raises(PartialUpdate):
            await update_all(fleet, "v4", "resume_good")
        await all_show({name: three[name] for name in "bc"}, lambda event: event.ready)
        assert shown(three) == {"a": ("weight_update", "v2"), "b": ("serving", "v4"), "c": ("serving", "v4")}

        # The trainer that was replaced is refused by all, and leaves nothing paused.
        for command in ("pause", "resume"):
            assert (await three["b"].instance.send(command, epoch=epoch + 1)).ok
        with pytest.raises(PartialUpdate, match=r"\(stale_epoch, none\)"):
            await update_all(fleet, "v5")
        await all_show({"c": three["c"]}, lambda event: event.ready and event.weights.version == "v4")


async def update_all(fleet: Fleet, version: str, on_partial: str = "hold") -> None:
    async with fleet.update(version, on_partial) as update:  # type: ignore[arg-type]
        await update.load(CHUNK)


async def test_a_pause_that_one_refuses_is_taken_back(tmp_path: Path, nats_url: str) -> None:
    async with (
        fleet_of(tmp_path, nats_url) as three,
        Client.connect(nats_url, issuer="trainer") as client,
        Fleet(client) as fleet,
    ):
        await three["b"].instance.sleep(level=1)
        await three["c"].instance.pause(mode="keep")
        await eventually(
            lambda: [s.state for _, s in sorted(fleet.states.items())] == ["serving", "asleep", "paused"]
        )
        with pytest.raises(PartialUpdate, match=r"b \(invalid_state, none\)"):
            await update_all(fleet, "v1")
        await all_show(three, lambda event: event.settled)
        assert [state for state, _ in shown(three).values()] == ["serving", "asleep", "paused"]

        # Without the sleeper the rest is updated, and who was paused before is paused after.
        fleet.drop("b")
        await update_all(fleet, "v1")
        await all_show(three, lambda event: event.settled)
        assert shown(three) == {"a": ("serving", "v1"), "b": ("asleep", "default"), "c": ("paused", "v1")}


async def test_an_engine_that_dies_in_an_update(tmp_path: Path, nats_url: str) -> None:
    async with (
        fleet_of(tmp_path, nats_url, "ab") as two,
        Client.connect(nats_url, issuer="trainer") as client,
        Fleet(client) as fleet,
    ):
        await two["b"].simulate(call="update_weights", outcome="die")
        with pytest.raises(PartialUpdate) as partial:
            await update_all(fleet, "v1", "resume_good")
        update = partial.value.update
        assert update.parts["b"].code == "engine_failed"
        assert ends(update)["a"] is End.COMMITTED
        await all_show({"a": two["a"]}, lambda event: event.ready and event.weights.version == "v1")


async def test_a_trainer_that_dies_leaves_nobody_frozen(tmp_path: Path, nats_url: str) -> None:
    """Its leases run out: undone where nothing had been loaded, and serving again."""
    async with fleet_of(tmp_path, nats_url, "ab") as two:
        async with Client.connect(nats_url, issuer="trainer") as client, Fleet(client) as fleet:

            async def train() -> None:
                async with fleet.update("v1", lease_s=1.0):
                    await client.bus.close()  # nothing of what follows gets out
                    raise RuntimeError("killed")

            with pytest.raises(RuntimeError, match="killed"):
                await train()
        await all_show(two, lambda event: event.ready and event.settled)
        assert shown(two) == {"a": ("serving", "default"), "b": ("serving", "default")}
        causes = [event.cause.verb for event in two["a"].events if event.cause is not None]
        assert "lease_expired" in causes
