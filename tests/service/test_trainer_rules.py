"""What a trainer relies on, seen from outside of a simulated instance in a process of its own."""

import asyncio
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bus.client import Client, CommandFailed
from bus.discovery import Change, ChangeKind, Listener
from bus.messages import Announcement, Reply
from tests.broker import eventually
from tests.service.serving import Serving, serving
from tests.service.test_follower import holds, publish
from tests.service.test_sessions import safetensors


async def test_a_version_shows_when_it_is_committed_and_everywhere(tmp_path: Path, nats_url: str) -> None:
    """Version visible only at commit: in the state events, with its epoch, in discovery, and as what the
    engine itself says. Weights that nobody declared are not a version of somebody's."""
    async with serving(tmp_path, nats_url) as one, aiohttp.ClientSession() as http:

        async def seen() -> tuple[str, int | None, str | None, str]:
            weights = (await one.snapshot()).weights
            entry = (await one.client.instances()).get("one")
            async with http.get(f"http://{one.ready['admin']}/weight_info") as response:
                engine = (await response.json())["weight_version"]
            told = entry.weight_version if entry else None
            return weights.version, weights.epoch, told, engine

        assert await seen() == ("default", None, "default", "default")
        epoch = await one.client.new_epoch()
        session = await _start(one)
        assert await seen() == ("default", None, None, "default")
        await one.instance.update_weights({}, session=session)
        assert await seen() == ("default", None, None, "default")
        await one.simulate(call="finish_weight_update", outcome="error", times=1)
        with pytest.raises(CommandFailed):
            await one.instance.finish_weight_update("v7", session=session)
        assert await seen() == ("default", None, None, "default")
        await one.instance.finish_weight_update("v7", session=session)
        assert await seen() == ("v7", epoch, "v7", "v7")
        early = [event for event in one.events if event.weights.version == "v7" and event.weight_update]
        assert early == []

        session = await _start(one)
        await one.instance.update_weights({}, session=session)
        await one.instance.finish_weight_update(session=session)
        assert await seen() == (session, epoch, session, session)


async def test_probes_are_answered_while_the_engine_hangs_in_a_call(tmp_path: Path, nats_url: str) -> None:
    """Probe contract: an answer is the instance's own state and never waits for the engine. Its silence is
    excused inside the budget of the declared call, and then it has failed. Whoever watches sees each state
    in order, with the instance, its life and the version."""
    options = ("--health-interval-s", "0.1", "--health-timeout-s", "0.5", "--failure-linger-s", "5")
    async with serving(tmp_path, nats_url, *options) as one, aiohttp.ClientSession() as http:
        liveness = one.watch("liveness")
        reply = await one.instance.send("start_weight_update", {"chunk_s": 2.0})
        assert reply.ok
        await one.simulate(call="update_weights", outcome="hang")
        chunk = asyncio.create_task(one.instance.update_weights({}, check=False))
        await eventually(
            lambda: one.events[-1].operation and one.events[-1].operation.verb == "update_weights"
        )
        asked_s = time.monotonic()
        for _ in range(5):  # longer than the engine may be silent outside of a call
            assert (await one.check("liveness"), await one.check("readiness")) == ("SERVING", "NOT_SERVING")
            for path, status in (("livez", 200), ("readyz", 503)):
                async with http.get(f"http://{one.ready['admin']}/{path}") as response:
                    assert response.status == status
            assert (await one.instance.status()).ok
            await asyncio.sleep(0.2)
        assert time.monotonic() - asked_s > 0.5
        assert liveness == ["SERVING"]
        answer = await chunk
        assert answer.error is not None and answer.error.code == "engine_timeout"
        await eventually(lambda: "NOT_SERVING" in liveness, within_s=10)
        # Events and health come by different ways.
        await eventually(lambda: one.events[-1].reasons == ["the engine failed: wedged"], within_s=10)
        order = [(event.instance, event.incarnation, event.seq) for event in one.events]
        changes = list(dict.fromkeys(order))  # what only shows progress is no change
        assert changes == [("one", one.ready["incarnation"], n + 1) for n in range(len(changes))]
        assert {event.weights.version for event in one.events} == {"default"}


@pytest.mark.parametrize("required", [False, True], ids=["nothing is required", "a version is required"])
async def test_a_service_that_is_killed_in_a_session(required: bool, tmp_path: Path, nats_url: str) -> None:
    """Crash of the service itself: its engine, and the half-loaded weights, go with it. The next life has
    weights of its own, or is stale until it has those that are required. It knows nothing of the old session
    and its keys, and its epoch still holds."""
    file = safetensors(tmp_path / "v1.safetensors", {"a": 3})
    async with serving(tmp_path, nats_url) as one:
        epoch = await one.client.new_epoch()
        if required:
            await publish(one.client, _announcement(file, epoch))
            await holds(one, "v1")
        session = await _start(one, id="start")
        await one.instance.update_weights({}, session=session, id="chunk")
        await one.program.kill()
        assert one.program.left() == []
        if required:
            file.rename(tmp_path / "away")
        async with serving(tmp_path, nats_url, state=None) as again:
            old = again.client.instance("one")
            if required:
                stale = await again.until("weight_update")
                assert stale.weight_update is not None and stale.weight_update.phase == "stale"
                assert await again.check("readiness") == "NOT_SERVING" and not await again.routable()
                (tmp_path / "away").rename(file)
            await holds(again, "v1" if required else "default")
            served = {event.weights.version for event in again.events if event.ready}
            assert served == {"v1" if required else "default"}
            chunk: dict[str, Any] = {"epoch": epoch, "check": False}
            late = await old.update_weights({}, session=session, id="chunk", **chunk)
            assert (late.duplicate, _code(late)) == (False, "session_mismatch")
            assert _code(await old.pause(epoch=epoch - 1, check=False)) == "stale_epoch"
            assert (await again.snapshot()).ready


async def test_who_is_told_of_an_instance_may_command_it_at_once(tmp_path: Path, nats_url: str) -> None:
    """Subscribe before advertise; unregister before sleep: the first command after the entry appears is
    answered, and by the time a sleep is answered the entry is gone."""
    async with Client.connect(nats_url) as client:
        answers: list[asyncio.Task[Reply]] = []

        def changed(change: Change) -> None:
            if change.kind is ChangeKind.ROUTABLE:
                answers.append(asyncio.create_task(client.instance("one").send("status")))

        async with (
            Listener(client.bus, "default", "backend", changed),
            serving(tmp_path, nats_url, state=None) as one,
        ):
            await eventually(lambda: answers, within_s=60)
            state = (await answers[0]).state
            assert state is not None and state.live
            await one.until("serving")
            assert await one.routable()
            assert (await one.instance.sleep(level=1)).ok
            assert not await one.routable()


async def test_progress_of_a_long_chunk(tmp_path: Path, nats_url: str) -> None:
    """Budgets per phase: whoever waits is told the chunks, the bytes as far as they are known, and the
    seconds, at most twice a second and without a new `seq`."""
    file = safetensors(tmp_path / "1.safetensors", {"a": 3, "b": 4})
    slow = ("--call-ms", "update_weights=1300")
    async with serving(tmp_path, nats_url, engine=slow) as one:
        await one.instance.start_weight_update(manifest={"parameters": 2})
        await one.instance.update_weights({"path": str(file)})
        await one.instance.update_weights({"path": str(file)})
        updates = [(event.seq, event.weight_update) for event in one.events if event.weight_update]
        told = [(seq, update.chunks, update.progress) for seq, update in updates if update.progress]
        assert [chunks for _, chunks, _ in told] in ([1, 1, 2, 2], [1, 2, 2], [1, 1, 2], [1, 2])
        assert next(progress.bytes for _, chunks, progress in told if chunks == 2) == 7
        for chunk in (1, 2):
            seconds = [progress.seconds for _, chunks, progress in told if chunks == chunk]
            assert seconds[0] >= 0.5 and all(b - a >= 0.49 for a, b in pairwise(seconds))
            assert len({seq for seq, chunks, _ in told if chunks == chunk}) == 1


async def _start(one: Serving, **options: Any) -> str:
    reply = await one.instance.start_weight_update(**options)
    return str((reply.result or {})["session"])


def _announcement(file: Path, epoch: int) -> Announcement:
    return Announcement(id="a", epoch=epoch, version="v1", updates=[{"path": str(file)}])


def _code(reply: Reply) -> str | None:
    return reply.error.code if reply.error else None
