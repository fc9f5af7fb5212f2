"""A router and instances on one bus: what they say of themselves decides where requests go."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bus.messages import Mode
from service.router.exchange import GROW_TOKENS
from tests.broker import NatsServer, eventually
from tests.service.router.engines import Routing, routing, text
from tests.service.serving import Serving, serving

TWO = ("aggregated", "aggregated")
SLOW = ("--token-interval-ms", "20")


@asynccontextmanager
async def fleet(
    folder: Path, nats: str, *roles: str, engine: tuple[str, ...] = SLOW
) -> AsyncIterator[list[Serving]]:
    """Simulated instances `i-0`, `i-1` … in processes of their own."""
    async with AsyncExitStack() as stack:
        started = [
            serving(folder, nats, "--role", role, name=f"i-{number}", engine=engine)
            for number, role in enumerate(roles)
        ]
        yield list(await asyncio.gather(*map(stack.enter_async_context, started)))


@asynccontextmanager
async def routed(nats: str, *flags: str, used: int) -> AsyncIterator[Routing]:
    async with routing([], *flags, nats=nats) as router:
        members = router.router.dispatch.membership
        await eventually(lambda: sum(one.admissible for one in members) == used, within_s=60)
        yield router


def used(router: Routing) -> set[str]:
    return {one.name for one in router.router.dispatch.membership if one.admissible}


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
async def test_a_pause_costs_nobody_anything(tmp_path: Path, nats_url: str, mode: Mode) -> None:
    """Whole answers that an abort ends, or that a pause keeps, are made elsewhere."""
    async with (
        fleet(tmp_path, nats_url, *TWO) as (one, _),
        routed(nats_url, used=2) as router,
    ):
        asking = [asyncio.create_task(router.complete(max_tokens=20)) for _ in range(6)]
        await eventually(lambda: router.router.proxy.in_flight == 6)
        await one.instance.pause(mode)
        assert used(router) == {"i-1"}
        for status, answer, headers in await asyncio.gather(*asking):
            assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
            if mode != "wait":
                assert headers["X-Watchkeeper-Instance"] == "i-1"
        for _ in range(3):
            assert (await router.complete())[2]["X-Watchkeeper-Instance"] == "i-1"
        await one.instance.resume()
        await eventually(lambda: used(router) == {"i-0", "i-1"})
        assert router.idle()


async def test_streams_that_an_abort_ends_go_on_elsewhere(tmp_path: Path, nats_url: str) -> None:
    async with (
        fleet(tmp_path, nats_url, *TWO) as (one, _),
        routed(nats_url, "migration_limit=1", used=2) as router,
    ):
        asking = [asyncio.create_task(router.stream(max_tokens=80)) for _ in range(6)]
        await eventually(lambda: are_answering(router, 3))
        await one.instance.pause("abort")
        for got in await asyncio.gather(*asking):
            assert got.error is None and got.done and got.text.split() == text(80).split()


def are_answering(router: Routing, streams: int) -> bool:
    """Whether every instance is in the middle of so many streams."""
    members = list(router.router.dispatch.membership)
    return all(one.in_flight == streams and one.load >= streams * GROW_TOKENS for one in members)


@pytest.mark.parametrize("migrations", [0, 1])
async def test_a_kill_ends_only_the_streams_in_it_and_with_migration_none(
    tmp_path: Path, nats_url: str, migrations: int
) -> None:
    async with (
        fleet(tmp_path, nats_url, *TWO) as (one, _),
        routed(nats_url, f"migration_limit={migrations}", used=2) as router,
    ):
        asking = [asyncio.create_task(router.stream(max_tokens=200)) for _ in range(8)]
        await eventually(lambda: are_answering(router, 4))
        await one.program.kill()
        after = [await router.complete() for _ in range(10)]
        assert [status for status, _, _ in after] == [200] * 10
        broken = 0
        for got in await asyncio.gather(*asking):
            assert got.status == 200
            broken += got.error is not None
            words = got.text.split()
            assert words == text(len(words)).split()
            assert (len(words) == 200 and got.done) == (got.error is None)
        assert broken == (0 if migrations else 4)
        # A new life under the old name is used as soon as it serves.
        async with serving(tmp_path, nats_url, name="i-0", engine=SLOW) as again:
            await eventually(lambda: used(router) == {"i-0", "i-1"}, within_s=5)
            assert again.events
        assert router.idle()


async def test_a_request_that_is_aborted_takes_nobody_out(tmp_path: Path, nats_url: str) -> None:
    """An instance that is paused would say so."""
    async with fleet(tmp_path, nats_url, *TWO) as (one, other), routed(nats_url, used=2) as router:
        await other.instance.pause()
        asking = asyncio.create_task(router.stream(max_tokens=200))
        await eventually(lambda: are_answering_by(router, one.name))
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"http://{one.ready['admin']}/abort_requests", json={}) as response,
        ):
            assert response.status == 200
        got = await asking
        assert got.error is not None and got.error["code"] == "aborted"
        assert used(router) == {one.name}
        assert (await router.complete())[0] == 200


def are_answering_by(router: Routing, name: str) -> bool:
    return any(one.name == name and one.load >= GROW_TOKENS for one in router.router.dispatch.membership)


async def test_a_version_is_told_and_asked_for(tmp_path: Path, nats_url: str) -> None:
    async with (
        fleet(tmp_path, nats_url, *TWO) as (one, _),
        routed(nats_url, "weights=latest", "migration_limit=1", used=2) as router,
    ):
        streaming = [asyncio.create_task(router.stream(max_tokens=100)) for _ in range(2)]
        await eventually(lambda: are_answering(router, 1))
        await one.instance.start_weight_update(pause_mode="abort")
        await one.instance.update_weights({})
        await one.instance.finish_weight_update(weight_version="v1")
        await eventually(lambda: used(router) == {"i-0", "i-1"})
        for _ in range(4):
            _, _, headers = await router.complete()
            assert headers["X-Watchkeeper-Instance"] == "i-0"
            assert headers["X-Watchkeeper-Weight-Version"] == "v1"
        # What began with other weights went on with them.
        for got in await asyncio.gather(*streaming):
            assert got.headers["X-Watchkeeper-Weight-Version"] == "default"
            assert got.done and got.text.split() == text(100).split()
        await one.instance.pause()
        await eventually(lambda: used(router) == {"i-1"})
        status, answer, _ = await router.complete()
        assert status == 503 and "another model or weight version (default)" in answer["error"]["message"]


async def test_a_client_may_ask_for_a_version_or_a_newer_one(tmp_path: Path, nats_url: str) -> None:
    async with (
        fleet(tmp_path, nats_url, *TWO) as (one, _),
        routed(nats_url, used=2) as router,
    ):
        await one.instance.start_weight_update()
        await one.instance.update_weights({})
        await one.instance.finish_weight_update(weight_version="v1")
        await eventually(lambda: used(router) == {"i-0", "i-1"})
        headers = {"X-Watchkeeper-Min-Version": "v1"}
        for _ in range(3):
            async with router.http.post("/v1/completions", json={"prompt": "p"}, headers=headers) as response:
                assert response.headers["X-Watchkeeper-Instance"] == "i-0"
        headers = {"X-Watchkeeper-Min-Version": "v2"}
        async with router.http.post("/v1/completions", json={"prompt": "p"}, headers=headers) as response:
            assert response.status == 503


async def test_prefill_and_decode(tmp_path: Path, nats_url: str) -> None:
    async with (
        fleet(tmp_path, nats_url, "prefill", "prefill", "decode", "decode") as all_four,
        routed(nats_url, "policy=pd", used=4) as router,
    ):
        whole = await asyncio.gather(*(router.complete(max_tokens=5) for _ in range(10)))
        assert all(status == 200 and answer["usage"]["completion_tokens"] == 5 for status, answer, _ in whole)
        streams = await asyncio.gather(*(router.stream(max_tokens=5) for _ in range(10)))
        assert all(got.done and got.text.split() == text(5).split() for got in streams)
        kept = [await kv(one) for one in all_four]
        assert sum(one["pulled"] for one in kept) == 20 and not any(one["pinned"] for one in kept)
        assert not any(one["local_prefills"] for one in kept[2:])
        await all_four[0].instance.pause("keep")
        await all_four[2].instance.sleep(1)
        answers = await asyncio.gather(*(router.complete(max_tokens=5) for _ in range(6)))
        assert {headers["X-Watchkeeper-Instance"] for _, _, headers in answers} == {"i-3"}
        assert {headers["X-Watchkeeper-Prefill-Instance"] for _, _, headers in answers} == {"i-1"}
        assert router.idle()


async def kv(one: Serving) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http, http.get(f"http://{one.ready['http']}/sim/kv") as response:
        return dict(await response.json())


async def test_without_a_broker_everything_goes_on(tmp_path: Path, nats_server: NatsServer) -> None:
    async with (
        fleet(tmp_path, nats_server.url, *TWO) as (one, other),
        routed(nats_server.url, "probe_interval_s=0.2", used=2) as router,
    ):
        await nats_server.stop()
        await eventually(lambda: not router.router._bus.connected)  # type: ignore[union-attr]
        for _ in range(6):
            assert (await router.complete())[0] == 200
        assert used(router) == {"i-0", "i-1"}
        # An instance says on its own HTTP and gRPC what it cannot say on the bus.
        admin = f"http://{one.ready['admin']}"
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{admin}/pause?mode=abort") as response:
                assert response.status == 200
            await eventually(lambda: used(router) == {"i-1"})
            for _ in range(4):
                assert (await router.complete())[0] == 200
            async with http.post(f"{admin}/resume") as response:
                assert response.status == 200
        await eventually(lambda: used(router) == {"i-0", "i-1"})
        await other.program.kill()
        for _ in range(10):
            assert (await router.complete())[0] == 200
        await nats_server.start()
        await eventually(lambda: router.router._bus.connected, within_s=60)  # type: ignore[union-attr]
        for _ in range(4):
            assert (await router.complete())[0] == 200
        await eventually(lambda: "i-0" in used(router))


async def test_all_paused_is_told_at_once_and_ends_at_once(tmp_path: Path, nats_url: str) -> None:
    async with (
        fleet(tmp_path, nats_url, *TWO) as both,
        routed(nats_url, used=2) as router,
    ):
        for one in both:
            await one.instance.pause()
        status, answer, headers = await router.complete()
        assert status == 503 and headers["Retry-After"] == "1"
        assert "i-0: paused: paused by command" in answer["error"]["message"]
        await both[0].instance.resume()
        started = time.monotonic()
        await eventually(lambda: used(router) == {"i-0"})
        assert time.monotonic() - started < 2
        assert (await router.complete())[0] == 200
