"""Prefill and decode on two instances: vLLM's two hops, and what becomes of the KV cache between them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from service.router.pool import Role
from tests.broker import eventually
from tests.service.router.engines import Engine, Routing, engines, routing, text

PD = "policy=pd"


@asynccontextmanager
async def two_and_two(*flags: str) -> AsyncIterator[tuple[Routing, list[Engine], list[Engine]]]:
    async with (
        engines(2) as prefills,
        engines(2) as decodes,
        routing({"prefill": prefills, "decode": decodes}, PD, *flags) as router,
    ):
        yield router, prefills, decodes


def the_one(asked: list[Engine]) -> Engine:
    (one,) = (engine for engine in asked if engine.bodies())
    return one


@pytest.mark.parametrize("stream", [False, True])
async def test_both_hops_of_a_request(stream: bool) -> None:
    async with two_and_two() as (router, prefills, decodes):
        if stream:
            got = await router.stream(stream_options={"include_usage": True})
            answer, headers = got.text, got.headers
            assert got.done
        else:
            _, whole, headers = await router.complete(min_tokens=2)
            answer = whole["choices"][0]["text"]
        assert answer == text()
        prefill, decode = the_one(prefills), the_one(decodes)
        assert headers["X-Watchkeeper-Instance"] == decode.url
        assert headers["X-Watchkeeper-Prefill-Instance"] == prefill.url
        (first,), (second,) = prefill.bodies(), decode.bodies()
        assert first["max_tokens"] == 1 and first["min_tokens"] == 1 and first["stream"] is False
        assert first["kv_transfer_params"]["do_remote_decode"] is True and "stream_options" not in first
        assert second["max_tokens"] == 8 and second.get("stream", False) is stream
        assert second["kv_transfer_params"]["remote_engine_id"] == prefill.url
        ids = {prefill.asked[0][2]["X-Request-Id"], decode.asked[0][2]["X-Request-Id"]}
        assert ids == {headers["X-Request-Id"]}
        assert decode.fetched == prefill.kept and router.idle()


async def test_what_a_request_costs_whom() -> None:
    """A prefill its prompt; then, until it is fetched, its KV cache; a decode the prompt and each token."""
    async with (
        engines(1) as (prefill,),
        engines(1) as (decode,),
        routing({"prefill": [prefill], "decode": [decode]}, PD) as router,
    ):
        p, d = router.member(prefill), router.member(decode)
        prefill.gate.clear()
        decode.behaves, decode.times = "hang", 1
        asking = asyncio.create_task(router.complete(prompt=[1] * 100))
        await eventually(lambda: prefill.running == 1)
        assert (p.load, d.load) == (100, 0)
        prefill.gate.set()
        await eventually(lambda: decode.running == 1)
        assert (p.load, d.load) == (pytest.approx(30), 100)
        asking.cancel()
        await eventually(router.idle)
        got = await router.stream(prompt=[1] * 100, max_tokens=50)
        assert got.done and router.idle()


async def test_a_prefill_that_fails_is_done_elsewhere() -> None:
    async with two_and_two() as (router, (bad, good), decodes):
        bad.behaves = "500"
        for _ in range(4):
            assert (await router.complete())[0] == 200
        assert bad.bodies() and len(good.bodies()) == 4 and router.idle()
        assert not any(one.kept - {*decodes[0].fetched, *decodes[1].fetched} for one in (bad, good))


async def test_a_decode_that_may_have_fetched_the_cache_costs_a_new_prefill() -> None:
    async with two_and_two() as (router, prefills, (bad, good)):
        bad.behaves, bad.times = "500", 1
        for _ in range(2):
            status, _, headers = await router.complete()
            assert status == 200 and headers["X-Watchkeeper-Instance"] in (good.url, bad.url)
        assert sum(len(one.bodies()) for one in prefills) == 3
        # Under another id, since the first pair's may still be known; and the first cache is let go.
        ids = [engine.asked[0][2]["X-Request-Id"] for engine in prefills]
        assert len(set(ids)) == 2
        fetched = bad.fetched | good.fetched
        await eventually(lambda: not any(one.kept - fetched for one in prefills))
        assert router.idle()


@pytest.mark.parametrize("behaviour", ["paused", "refused connection"])
async def test_a_decode_that_took_nothing_costs_no_new_prefill(behaviour: str) -> None:
    async with two_and_two() as (router, prefills, (bad, good)):
        bad.behaves = behaviour
        if behaviour == "refused connection":
            await bad.stop()
        for _ in range(2):
            assert (await router.complete())[0] == 200
        assert sum(len(one.bodies()) for one in prefills) == 2 == len(good.bodies())
        assert router.idle()


async def test_nothing_is_prefilled_for_which_nobody_is_left_to_decode() -> None:
    async with two_and_two() as (router, prefills, decodes):
        for one in decodes:
            one.behaves = "500"
        status, answer, _ = await router.complete()
        assert status == 500 and answer["error"]["message"] == "broken"
        assert sum(len(one.bodies()) for one in prefills) == 2 and router.idle()


async def test_the_fault_of_a_request_is_told_by_the_prefill_and_nobody_is_asked_to_decode() -> None:
    async with two_and_two() as (router, prefills, decodes):
        for one in prefills:
            one.behaves = "400"
        status, answer, _ = await router.complete()
        assert status == 400 and answer["error"]["code"] == "BadRequestError"
        assert not any(one.asked for one in decodes) and router.idle()


async def test_what_cannot_be_split_is_decoded_alone() -> None:
    async with two_and_two() as (router, prefills, decodes):
        assert (await router.complete(n=2))[0] == 200
        assert not any(one.asked for one in prefills)
        assert "kv_transfer_params" not in the_one(decodes).bodies()[0]


@pytest.mark.parametrize("out", ["prefill", "decode"])
async def test_with_a_role_out_nothing_is_begun(out: str) -> None:
    """P and D are admitted as a pair or not at all."""
    async with two_and_two() as (router, prefills, decodes):
        pool = router.router.dispatch.pool(Role(out))
        for member in pool:
            pool.withdraw(member, "paused by command")
        status, answer, headers = await router.complete()
        assert status == 503 and headers["Retry-After"]
        assert f"no {out} instance takes requests" in answer["error"]["message"]
        assert "paused by command" in answer["error"]["message"]
        assert not any(one.asked for one in (*prefills, *decodes))


async def test_only_one_weight_version_is_in_a_pair() -> None:
    """A KV cache of other weights would be nonsense to the decode instance."""
    async with two_and_two() as (router, (old_p, new_p), (old_d, new_d)):
        for engine, version in ((old_p, "v1"), (old_d, "v1"), (new_p, "v2"), (new_d, "v2")):
            member = router.member(engine)
            router.router.dispatch.pool(member.role).regroup(member, member.group._replace(version=version))
        for _ in range(4):
            _, _, headers = await router.complete()
            assert headers["X-Watchkeeper-Weight-Version"] in ("v1", "v2")
        assert old_d.fetched == old_p.kept and new_d.fetched == new_p.kept and old_p.kept and new_p.kept
        pool = router.router.dispatch.pool(Role.DECODE)
        pool.withdraw(router.member(old_d), "paused by command")
        before = len(old_p.bodies())
        for _ in range(2):
            assert (await router.complete())[0] == 200
        assert len(old_p.bodies()) == before


async def test_a_client_that_leaves_during_the_prefill() -> None:
    async with two_and_two() as (router, prefills, decodes):
        for one in prefills:
            one.gate.clear()
        asking = asyncio.create_task(router.complete())
        await eventually(lambda: any(one.running for one in prefills))
        asking.cancel()
        await eventually(lambda: not any(one.running for one in prefills) and router.idle())
        await eventually(lambda: any(one.bodies("/abort_requests") for one in prefills))
        assert not any(one.asked for one in decodes)


async def test_a_client_that_leaves_when_the_prefill_has_just_finished() -> None:
    """Its answer is awaited for a moment: only that tells where the cache is."""
    async with two_and_two() as (router, prefills, decodes):
        for one in prefills:
            one.gate.clear()
        asking = asyncio.create_task(router.complete())
        await eventually(lambda: any(one.running for one in prefills))
        asking.cancel()
        await eventually(lambda: any(one.bodies("/abort_requests") for one in prefills))
        for one in prefills:
            one.gate.set()
        await eventually(lambda: any(one.fetched for one in decodes))
        assert the_one(decodes).bodies()[0]["max_tokens"] == 1
        await eventually(router.idle)


async def test_a_client_that_leaves_between_the_hops() -> None:
    """The cache is fetched for nobody, and the prefill is told: what vLLM keeps only a fetch sets free."""
    async with (
        engines(1) as (prefill,),
        engines(1) as (decode,),
        routing({"prefill": [prefill], "decode": [decode]}, PD, "wait_s=30") as router,
    ):
        prefill.gate.clear()
        asking = asyncio.create_task(router.complete())
        await eventually(lambda: prefill.running == 1)
        decode_pool = router.router.dispatch.pool(Role.DECODE)
        decode_pool.set_aside(router.member(decode), "paused")
        prefill.gate.set()
        await eventually(lambda: prefill.kept and not prefill.running)
        assert router.router.proxy.in_flight == 1 and not decode.asked
        asking.cancel()
        await eventually(lambda: not router.router.proxy.in_flight)
        await eventually(lambda: not prefill.kept)
        decode_pool.set_aside(router.member(decode), None)
        assert router.idle()


async def test_a_client_that_leaves_during_the_decode() -> None:
    async with two_and_two() as (router, _, decodes):
        for one in decodes:
            one.gate.clear()
        asking = asyncio.create_task(router.stream())
        await eventually(lambda: any(one.running for one in decodes))
        asking.cancel()
        await eventually(lambda: not any(one.running for one in decodes) and router.idle())


async def test_a_broken_stream_is_continued_by_a_new_pair() -> None:
    async with two_and_two("migration_limit=2") as (router, _, (bad, _good)):
        bad.behaves = "cut"
        for _ in range(2):
            got = await router.stream()
            assert got.text == text() and got.done and got.error is None
        assert router.idle()


async def test_other_paths_are_served_by_a_decode_instance_where_there_is_no_other() -> None:
    async with two_and_two() as (router, prefills, decodes):
        async with router.http.post("/v1/embeddings", json={"input": "a"}) as response:
            assert response.status == 200
        assert any(one.asked for one in decodes) and not any(one.asked for one in prefills)
