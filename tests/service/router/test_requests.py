"""Requests through a router: what the client sees when instances do well, and when they do not."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from yarl import URL

from service.router.breaker import MAX_FAILURES, Isolation
from tests.broker import eventually
from tests.service.router.engines import Engine, engines, routing, text


async def test_a_request_and_its_answer_pass_untouched() -> None:
    async with engines(1) as (engine,), routing([engine]) as router:
        headers = {"X-Request-Id": "abc", "Authorization": "Bearer key", "X-Of-The-Client": "1"}
        body = {"prompt": "p", "max_tokens": 3, "of_a_later_version": {"x": [1]}}
        async with router.http.post("/v1/completions", json=body, headers=headers) as response:
            answer = await response.json()
            assert response.status == 200 and answer["choices"][0]["text"] == text(3)
            assert response.headers["X-Request-Id"] == "abc"
            assert response.headers["X-Watchkeeper-Instance"] == engine.url
        _, got, sent = engine.asked[0]
        assert got == body
        assert all(sent[name] == value for name, value in headers.items())
        assert router.idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_arrives_event_by_event(path: str) -> None:
    async with engines(1) as (engine,), routing([engine]) as router:
        engine.gate.clear()
        body = {
            "prompt": "p",
            "messages": [{"role": "user", "content": "p"}],
            "stream": True,
            "max_tokens": 3,
        }
        async with router.http.post(path, json=body) as response:
            first = await response.content.readuntil(b"t0")
            assert b"data:" in first and engine.running == 1
            engine.gate.set()
            rest = await response.read()
        assert rest.endswith(b"data: [DONE]\n\n") and b"t2" in rest
        await eventually(router.idle)


@pytest.mark.parametrize("behaviour", ["500", "503", "drop", "empty", "error 200", "abort", "429", "paused"])
async def test_what_fails_before_the_first_byte_is_tried_elsewhere(behaviour: str) -> None:
    async with engines(2) as (bad, good), routing([bad, good]) as router:
        bad.behaves = behaviour
        for _ in range(4):
            status, answer, headers = await router.complete()
            assert (status, answer["choices"][0]["text"]) == (200, text())
            assert headers["X-Watchkeeper-Instance"] == good.url
        assert len(bad.asked) >= 1 and router.idle()


@pytest.mark.parametrize("behaviour", ["500", "drop", "no events", "error first", "paused", "abort"])
async def test_a_stream_that_fails_before_its_first_event_is_tried_elsewhere(behaviour: str) -> None:
    async with engines(2) as (bad, good), routing([bad, good]) as router:
        bad.behaves, bad.at = behaviour, 0
        for _ in range(4):
            got = await router.stream()
            assert got.status == 200 and got.text == text() and got.done and got.error is None
        assert len(bad.asked) >= 1 and router.idle()


async def test_nothing_is_tried_twice_at_the_same_instance() -> None:
    async with engines(2, behaves="500") as (one, other), routing([one, other], "max_attempts=5") as router:
        status, answer, headers = await router.complete()
        assert status == 500 and answer["error"]["message"] == "broken"  # what the engine said
        assert headers["X-Watchkeeper-Instance"] in (one.url, other.url)
        assert len(one.asked) == len(other.asked) == 1


async def test_no_more_instances_are_tried_than_allowed() -> None:
    async with engines(4, behaves="drop") as four, routing(four, "max_attempts=2") as router:
        status, answer, _ = await router.complete()
        assert status == 502 and answer["error"]["code"] == "upstream_failed" and answer["error"]["retryable"]
        assert sum(len(one.asked) for one in four) == 2


@pytest.mark.parametrize("behaviour", ["400", "400 first"])
async def test_the_fault_of_a_request_is_told_and_held_against_nobody(behaviour: str) -> None:
    """A bad client must not take the fleet down."""
    async with engines(2, behaves=behaviour) as two, routing(two) as router:
        for _ in range(10):
            got = await router.stream()
            assert (got.status == 400 and b"BadRequestError" in got.body) or b"bad" in got.body
        assert sum(len(one.asked) for one in two) == 10
        assert all(router.member(one).breaker.failures == 0 for one in two)


async def test_an_answer_that_takes_too_long_is_fetched_elsewhere() -> None:
    async with engines(2) as (hung, good), routing([hung, good], "first_byte_timeout_s=0.2") as router:
        hung.behaves = "hang"
        answers = await asyncio.gather(*(router.complete() for _ in range(4)))
        assert [status for status, _, _ in answers] == [200] * 4
        await eventually(lambda: hung.running == 0)  # it is told that nobody waits any more
        assert router.member(hung).breaker.failures >= 1 and router.idle()


async def test_with_nobody_else_a_timeout_is_told_as_one() -> None:
    async with engines(1, behaves="hang") as (hung,), routing([hung], "first_byte_timeout_s=0.1") as router:
        status, answer, _ = await router.complete()
        assert status == 503 and "no first byte within 0.1 s" in answer["error"]["message"]
    async with engines(1, behaves="hang") as (hung,):  # noqa: SIM117
        async with routing([hung], "first_byte_timeout_s=0.1", "max_attempts=1") as router:
            status, answer, _ = await router.complete()
            assert status == 504 and "no first byte within 0.1 s" in answer["error"]["message"]


async def test_more_than_three_failures_in_a_row_isolate_and_a_probe_brings_back() -> None:
    async with engines(2) as (bad, good), routing([bad, good], "probe_interval_s=0.3") as router:
        bad.behaves, bad.healthy = "500", False
        await eventually(lambda: router.member(bad).isolated)
        asked = len(bad.asked)
        for _ in range(10):
            assert (await router.complete())[0] == 200
        assert len(bad.asked) == asked
        async with router.http.get("/state") as response:
            state = await response.json()
        shown = {one["url"]: one for one in state["pools"]["aggregated"]["instances"]}
        assert shown[bad.url]["load"] is None and "isolated after" in shown[bad.url]["reason"]
        bad.behaves, bad.healthy = "well", True
        await eventually(lambda: router.member(bad).breaker.isolation is Isolation.HALF_OPEN)
        for _ in range(4):
            assert (await router.complete())[0] == 200
        assert router.member(bad).breaker.isolation is Isolation.CLOSED and len(bad.asked) > asked


async def test_the_trial_of_one_that_is_still_sick_costs_no_client_anything() -> None:
    async with engines(2) as (bad, good), routing([bad, good], "probe_interval_s=0.2") as router:
        bad.behaves, before = "500", bad.probed  # while /health is 200
        while bad.probed < before + 6:
            assert (await router.complete())[0] == 200
        assert len(bad.asked) <= MAX_FAILURES + 1 + bad.probed - before


SOON = aiohttp.ClientTimeout(10)


async def test_one_that_is_paused_is_set_aside_until_it_may_be_asked_again() -> None:
    async with engines(2) as (paused, good), routing([paused, good]) as router:
        paused.behaves, paused.retry_after = "paused", "60"
        for _ in range(5):
            assert (await router.complete())[0] == 200
        assert len(paused.asked) == 1
        member = router.member(paused)
        assert member.breaker.failures == 0 and member.reason == "paused by command"


async def test_one_that_was_paused_is_used_again_after_the_time_that_it_said() -> None:
    async with engines(1) as (paused,), routing([paused]) as router:
        paused.behaves, paused.times = "paused", 1
        assert (await router.complete())[0] == 503
        await router.until_used(paused)  # Retry-After, and a probe
        assert (await router.complete())[0] == 200


async def test_all_out_is_told_at_once_and_why() -> None:
    async with engines(2, behaves="paused") as two, routing(two) as router:
        await router.complete()
        started = time.monotonic()
        status, answer, headers = await router.complete()
        assert status == 503 and time.monotonic() - started < 1
        error = answer["error"]
        assert error["code"] == "no_instance" and error["retryable"] and headers["Retry-After"] == "1"
        assert all(f"{one.url}: paused by command" in error["message"] for one in two)


async def test_a_request_may_wait_for_an_instance() -> None:
    async with engines(1, behaves="paused", times=1) as (one,), routing([one], "wait_s=5") as router:
        assert (await router.complete())[0] == 200


async def test_without_any_instance_the_router_says_so() -> None:
    async with engines(1) as (one,), routing({"decode": [one]}) as router:
        status, answer, _ = await router.complete()
        assert (
            status == 503
            and answer["error"]["message"] == "no aggregated instance takes requests: none is known"
        )


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        ("cut", "stream_cut"),
        ("half", "stream_cut"),
        ("stop", "stream_cut"),
        ("error", "engine_failed"),
        ("pause", "engine_paused"),
        ("abort", "aborted"),
    ],
)
async def test_a_stream_that_breaks_never_ends_well(behaviour: str, code: str) -> None:
    async with engines(1) as (engine,), routing([engine]) as router:
        engine.behaves = behaviour
        got = await router.stream()
        assert got.status == 200 and got.text == text(3) and not got.done
        assert got.error is not None and got.error["code"] == code
        assert got.events[-1] == {"error": got.error}
        assert all(
            choice["finish_reason"] is None for event in got.events[:-1] for choice in event["choices"]
        )
        counts = behaviour in ("cut", "half", "stop", "error")
        assert router.member(engine).breaker.failures == counts
        assert router.idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("behaviour", ["cut", "half", "stop", "error", "pause", "abort"])
async def test_a_broken_stream_goes_on_elsewhere_without_gap_or_repeat(path: str, behaviour: str) -> None:
    async with engines(2) as (bad, good), routing([bad, good], "migration_limit=1") as router:
        bad.behaves = behaviour
        answers = [await router.stream(path) for _ in range(2)]
        for got in answers:
            assert got.status == 200 and got.text == text() and got.done and got.error is None
            assert len({event["id"] for event in got.events}) == 1
            assert not any("usage" in event for event in got.events)
        assert bad.asked and router.idle()
        async with router.http.get("/metrics") as response:
            assert f"watchkeeper_router_migrations_total {len(bad.asked)}.0" in await response.text()


@pytest.mark.parametrize("across", [False, True])
async def test_it_goes_on_with_other_weights_only_where_that_is_allowed(across: bool) -> None:
    flags = ("migration_limit=1", f"migrate_across_versions={str(across).lower()}")
    async with engines(2) as (bad, good), routing([bad, good], *flags) as router:
        for engine, version in ((bad, "v1"), (good, "v2")):
            member = router.member(engine)
            router.router.dispatch.pool(member.role).regroup(member, member.group._replace(version=version))
        bad.behaves = "cut"
        answers = [await router.stream() for _ in range(2)]
        began_old = [one for one in answers if one.headers["X-Watchkeeper-Weight-Version"] == "v1"]
        assert began_old
        for got in began_old:
            assert (got.done, got.error is None, got.text) == (across, across, text() if across else text(3))


async def test_it_goes_on_no_more_often_than_allowed() -> None:
    async with engines(3, behaves="cut", at=2) as three, routing(three, "migration_limit=1") as router:
        got = await router.stream()
        assert got.text == text(4) and got.error is not None and not got.done


@pytest.mark.parametrize(
    "more",
    [{"n": 2}, {"logprobs": 1}, {"response_format": {"type": "json_object"}}, {"structured_outputs": {}}],
    ids=str,
)
async def test_what_text_alone_does_not_continue_is_not_continued(more: dict[str, Any]) -> None:
    async with engines(2, behaves="cut") as two, routing(two, "migration_limit=3") as router:
        got = await router.stream(**more)
        assert got.text == text(3) and got.error is not None
        assert sum(len(one.asked) for one in two) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request_and_leaves_nothing(stream: bool) -> None:
    async with engines(1) as (engine,), routing([engine]) as router:
        engine.gate.clear()
        body = {"prompt": "p", "stream": stream}

        async def ask() -> None:
            async with router.http.post("/v1/completions", json=body) as response:
                await response.read()

        asking = [asyncio.create_task(ask()) for _ in range(10)]
        await eventually(lambda: engine.running == 10)
        for one in asking:
            one.cancel()
        await eventually(lambda: engine.running == 0 and router.idle())
        assert router.member(engine).breaker.failures == 0
        engine.gate.set()
        assert (await router.complete())[0] == 200


@contextlib.asynccontextmanager
async def two_models() -> AsyncIterator[tuple[Engine, Engine]]:
    async with engines(1, models=("m", "lora")) as (one,), engines(1, models=("n",)) as (other,):
        yield one, other


async def test_models_are_those_of_all_also_of_one_that_does_not_answer_now() -> None:
    async with two_models() as (one, other), routing([one, other]) as router:
        await eventually(lambda: router.member(other).cards and router.member(one).cards)
        await other.stop()
        async with router.http.get("/v1/models") as response:
            answer = await response.json()
        assert {card["id"] for card in answer["data"]} == {"m", "lora", "n"}


async def test_a_model_is_asked_of_those_who_have_it() -> None:
    async with two_models() as (one, other), routing([one, other]) as router:
        await eventually(lambda: router.member(other).cards and router.member(one).cards)
        for _ in range(3):
            assert (await router.complete(model="n"))[0] == 200
        assert not one.asked and len(other.asked) == 3
        assert (await router.complete(model="unknown"))[0] == 200  # the engine's to judge


async def test_other_paths_go_to_an_aggregated_instance_as_they_are() -> None:
    async with engines(2) as (bad, good), routing([bad, good]) as router:
        bad.behaves = "500"
        for _ in range(3):
            url = URL("/v1/embeddings?x=1%2F2", encoded=True)
            async with router.http.post(url, json={"input": "a"}) as response:
                assert response.status == 200 and response.headers["X-Engine"] == "1"
                assert await response.json() == {"input": "a"}
        assert good.asked[0][0] == "/v1/embeddings?x=1%2F2" and router.idle()


async def test_another_path_that_breaks_is_broken_for_the_client_too() -> None:
    async with engines(1, behaves="cut") as (engine,), routing([engine]) as router:
        with pytest.raises(aiohttp.ClientError):
            async with router.http.get("/v1/stream") as response:
                await response.read()
        async with router.http.get("/v1/stream?type=text/event-stream") as response:
            events = (await response.read()).strip().split(b"\n\n")
        assert events[0] == b"data: 1" and json.loads(events[-1][6:])["error"]["code"] == "stream_cut"
        assert router.idle()


async def test_a_body_may_be_announced_and_packed() -> None:
    """As curl announces a large one, and waits for a word."""
    async with engines(1) as (engine,), routing([engine]) as router:
        body = {"prompt": "p" * 2000, "max_tokens": 1}
        async with router.http.post("/v1/completions", json=body, expect100=True, timeout=SOON) as response:
            assert response.status == 200
        async with router.http.post("/v1/completions", json=body, compress="gzip") as response:
            assert response.status == 200
        assert engine.bodies() == [body, body]


@pytest.mark.parametrize(("encoding", "body"), [("gzip", b'{"prompt": "p"}'), ("gzip", b""), ("br", b"x")])
async def test_a_body_that_is_not_packed_as_it_says_is_told_so(encoding: str, body: bytes) -> None:
    async with engines(1) as (engine,), routing([engine]) as router:
        headers = {"Content-Encoding": encoding}
        async with router.http.post("/v1/completions", data=body, headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "invalid_request"
        assert not engine.asked and router.idle()


async def test_a_stream_may_come_back_to_one_that_broke_it_before() -> None:
    """Else a long stream would not survive a pause of each instance in turn."""
    async with engines(2, behaves="cut", times=1) as two, routing(two, "migration_limit=3") as router:
        got = await router.stream(max_tokens=12)
        assert got.error is None and got.done and got.text == text(12)
        assert sum(len(one.asked) for one in two) == 3


@pytest.mark.parametrize("body", [b"", b"{", b"[1]"])
async def test_a_body_that_is_none_is_told_so(body: bytes) -> None:
    async with engines(1) as (engine,), routing([engine]) as router:
        async with router.http.post("/v1/completions", data=body) as response:
            assert response.status == 400 and (await response.json())["error"]["code"] == "invalid_request"
        async with router.http.get("/nothing") as response:
            assert response.status == 404
        assert not engine.asked


async def test_too_many_requests_are_refused() -> None:
    async with engines(1) as (engine,), routing([engine], "max_requests=2") as router:
        engine.gate.clear()
        two = [asyncio.create_task(router.complete()) for _ in range(2)]
        await eventually(lambda: engine.running == 2)
        status, answer, headers = await router.complete()
        assert status == 429 and answer["error"]["retryable"] and "Retry-After" in headers
        engine.gate.set()
        assert [status for status, _, _ in await asyncio.gather(*two)] == [200, 200]


async def test_an_instance_that_comes_back_on_its_address_is_found_again() -> None:
    async with engines(1) as (engine,), routing([engine], "probe_interval_s=0.2") as router:
        port = int(engine.url.rpartition(":")[2])
        await engine.stop()
        for _ in range(3):
            assert (await router.complete(max_tokens=1))[0] in (502, 503)
        again = await Engine().start(port)
        try:
            await router.until_used(again)
            assert (await router.complete())[0] == 200
        finally:
            await again.stop()


async def test_the_key_of_the_engines_is_used_where_the_client_has_none(tmp_path: Any) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    async with engines(1) as (engine,), routing([engine], f"upstream_key_file={key}") as router:
        await router.complete()
        assert engine.asked[0][2]["Authorization"] == "Bearer secret"
