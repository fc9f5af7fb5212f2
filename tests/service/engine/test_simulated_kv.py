"""Prefill and decode in two simulated engines: what is pinned leaves in exactly one way."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from service.engine.admission import AdmissionGate
from service.engine.simulated import SimulatedEngine
from statemachine.states import Admission, Mode
from tests.service.engine.simulation import ended, events, get, loaded, post, served, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Side:
    """One engine of a pair and its HTTP side."""

    def __init__(self, engine: SimulatedEngine, client: aiohttp.ClientSession) -> None:
        self.engine, self.client = engine, client

    async def prefill(self, name: str = "r", **more: Any) -> dict[str, Any]:
        """`kv_transfer_params` for the decode side."""
        body = {"prompt": "a b c", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}, **more}
        async with self.client.post(COMPLETIONS, json=body, headers={"X-Request-Id": name}) as answer:
            assert answer.status == 200
            params: dict[str, Any] = (await answer.json())["kv_transfer_params"]
            return params

    async def decode(self, params: dict[str, Any], **more: Any) -> tuple[int, Any]:
        body = {"prompt": "a b c", "max_tokens": 3, "kv_transfer_params": params, **more}
        return await post(self.client, COMPLETIONS, **body)

    async def counts(self) -> dict[str, int]:
        """All that are not 0."""
        counts: dict[str, int] = await get(self.client, "/sim/kv")
        assert set(counts) == {
            "pinned",
            "pulled",
            "expired",
            "aborted",
            "local_prefills",
            "failed_loads",
            "in_flight",
        }
        return {name: count for name, count in counts.items() if count}

    async def has(self, **counts: int) -> None:
        """Wait until these are all that is not 0."""
        async with asyncio.timeout(5):
            while await self.counts() != counts:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def a_side(*engine_args: str) -> AsyncIterator[Side]:
    engine = await loaded(*engine_args)
    async with served(engine) as client:
        yield Side(engine, client)


@asynccontextmanager
async def a_pair(*engine_args: str) -> AsyncIterator[tuple[Side, Side]]:
    """Prefill side and decode side."""
    async with a_side(*engine_args) as prefill, a_side(*engine_args) as decode:
        yield prefill, decode


def port_of_nobody() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def test_a_prompt_is_computed_on_one_side_and_goes_on_on_the_other() -> None:
    async with a_pair() as (prefill, decode):
        params = await prefill.prefill("mine")
        assert params["remote_request_id"].startswith("cmpl-mine-0-")
        assert params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1]],
            "remote_engine_id": prefill.engine.kv.engine_id,
            "remote_request_id": params["remote_request_id"],
            "remote_host": prefill.client._base_url.host,  # type: ignore[union-attr]
            "remote_port": prefill.client._base_url.port,  # type: ignore[union-attr]
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": 3,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }
        assert await prefill.counts() == {"pinned": 1, "local_prefills": 1}
        status, answer = await decode.decode(params)
        assert (status, answer["choices"][0]["text"]) == (200, "t0 t1 t2")
        assert "kv_transfer_params" not in answer
        assert await prefill.counts() == {"pulled": 1, "local_prefills": 1}
        assert await decode.counts() == {}


async def test_a_chat_does_so_too_and_is_streamed() -> None:
    async with a_pair() as (prefill, decode):
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 1}
        chat["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        async with prefill.client.post(CHAT, json=chat, headers={"X-Request-Id": "x"}) as answer:
            params = (await answer.json())["kv_transfer_params"]
        assert params["remote_request_id"].startswith("chatcmpl-x-")
        chat |= {"kv_transfer_params": params, "max_completion_tokens": 2, "stream": True}
        async with decode.client.post(CHAT, json=chat) as answer:
            chunks = await events(answer)
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "t0 t1"
        assert await prefill.counts() == {"pulled": 1, "local_prefills": 1}


async def test_a_decode_side_without_prefill_time_spends_none() -> None:
    async with a_side() as prefill, a_side("--prefill-ms", "60000") as decode:
        assert (await ended(asyncio.create_task(decode.decode(await prefill.prefill()))))[0] == 200
        assert "local_prefills" not in await decode.counts()


# What is missing is computed


@pytest.mark.parametrize(
    "name",
    ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids"],
)
async def test_incomplete_params_mean_a_local_prefill(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async with a_pair() as (prefill, decode):
        params = await prefill.prefill()
        params[name] = [] if name == "remote_block_ids" else None
        with caplog.at_level(logging.WARNING):
            assert (await decode.decode(params))[0] == 200
        assert name in caplog.text
        assert await decode.counts() == {"local_prefills": 1}
        assert await prefill.counts() == {"pinned": 1, "local_prefills": 1}


async def test_a_plain_request_is_a_local_prefill_and_pins_nothing() -> None:
    async with a_side() as side:
        await post(side.client, COMPLETIONS, prompt=["a", "b"], max_tokens=1)
        assert await side.counts() == {"local_prefills": 2}


# Loads that fail


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("why", ["used", "unknown", "other engine", "dead"])
async def test_a_load_that_fails(policy: str, why: str) -> None:
    async with a_pair("--kv-load-failure-policy", policy) as (prefill, decode):
        params = await prefill.prefill()
        left = {"pinned": 1}
        match why:
            case "used":
                await decode.decode(params)
                left = {"pulled": 1}
            case "unknown":
                params["remote_request_id"] += "0"
            case "other engine":
                params["remote_engine_id"] = decode.engine.kv.engine_id
            case "dead":
                params["remote_port"] = port_of_nobody()
        status, answer = await decode.decode(params)
        if policy == "recompute":
            assert (status, answer["choices"][0]["text"]) == (200, "t0 t1 t2")
            assert await decode.counts() == {"failed_loads": 1, "local_prefills": 1}
        else:
            assert (status, answer["error"]["type"]) == (500, "InternalServerError")
            assert await decode.counts() == {"failed_loads": 1}
        assert await prefill.counts() == {**left, "local_prefills": 1}


async def test_failing_is_the_default_and_a_stream_says_so() -> None:
    async with a_pair() as (prefill, decode):
        params = await prefill.prefill()
        await decode.decode(params)
        body = {"prompt": "a", "stream": True, "kv_transfer_params": params}
        async with decode.client.post(COMPLETIONS, json=body) as answer:
            assert answer.status == 200
            [error] = await events(answer)
        assert error["error"]["code"] == 500
        body = {"messages": [{"role": "user"}], "stream": True, "kv_transfer_params": params}
        async with decode.client.post(CHAT, json=body) as answer:
            opening, error = await events(answer)
        assert opening["choices"][0]["delta"]["role"] == "assistant"
        assert error["error"]["code"] == 500
        assert await decode.counts() == {"failed_loads": 2}


async def test_memory_that_sleeps_gives_nothing() -> None:
    async with a_pair() as (prefill, decode):
        params = await prefill.prefill()
        await prefill.engine.sleep(1, Mode.ABORT)
        assert (await decode.decode(params))[0] == 500
        assert (await prefill.counts())["pinned"] == 1


async def test_of_two_that_want_the_same_one_gets_it() -> None:
    async with a_pair() as (prefill, decode):
        params = await prefill.prefill()
        answers = await asyncio.gather(*(decode.decode(params) for _ in range(5)))
        assert sorted(status for status, _ in answers) == [200, 500, 500, 500, 500]
        assert await prefill.counts() == {"pulled": 1, "local_prefills": 1}
        assert await decode.counts() == {"failed_loads": 4}


# How a pin ends, and when there is none


async def test_a_lease_ends() -> None:
    async with a_side("--kv-lease-s", "0.02") as prefill, a_side() as decode:
        params = await prefill.prefill()
        await prefill.has(expired=1, local_prefills=1)
        assert (await decode.decode(params))[0] == 500
        assert await prefill.counts() == {"expired": 1, "local_prefills": 1}


@pytest.mark.parametrize("by", ["client's id", "remote id"])
async def test_an_abort_frees_what_is_pinned(by: str) -> None:
    async with a_pair() as (prefill, decode):
        params = await prefill.prefill("mine")
        await prefill.prefill("other")
        name = "cmpl-mine-0" if by == "client's id" else params["remote_request_id"]
        await post(prefill.client, "/abort_requests", request_ids=[name])
        assert await prefill.counts() == {"pinned": 1, "aborted": 1, "local_prefills": 2}
        assert (await decode.decode(params))[0] == 500


async def test_an_abort_frees_nothing_where_it_is_as_in_vllm() -> None:
    async with a_pair("--abort-keeps-kv") as (prefill, decode):
        params = await prefill.prefill("mine")
        await post(prefill.client, "/abort_requests", request_ids=["cmpl-mine-0"])
        assert await prefill.counts() == {"pinned": 1, "local_prefills": 1}
        assert (await decode.decode(params))[0] == 200


async def test_an_aborted_prefill_keeps_nothing() -> None:
    async with a_side("--prefill-ms", "60000") as prefill:
        body = {"prompt": "a", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        headers = {"X-Request-Id": "mine"}
        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(read(prefill.client, body, headers))
            await prefill.has(in_flight=1, local_prefills=1)
            await post(prefill.client, "/abort_requests", request_ids=["cmpl-mine-0"])
        answer = asking.result()
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert "kv_transfer_params" not in answer
        assert await prefill.counts() == {"local_prefills": 1}


async def test_a_client_that_leaves_a_prefill_keeps_nothing() -> None:
    async with a_side("--prefill-ms", "60000") as prefill:
        body = {"prompt": "a", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        asking = asyncio.create_task(read(prefill.client, body))
        await prefill.has(in_flight=1, local_prefills=1)
        asking.cancel()
        await prefill.has(local_prefills=1)


@pytest.mark.parametrize(
    ("how", "stream"),
    [("leaves", False), ("leaves", True), ("aborted", False), ("aborted", True), ("cut", True)],
)
async def test_what_a_queued_decode_will_not_fetch_is_freed(how: str, stream: bool) -> None:
    async with a_pair() as (prefill, decode):
        await decode.engine.pause(Mode.KEEP, clear_cache=True)
        body = {"prompt": "a", "stream": stream, "kv_transfer_params": await prefill.prefill()}
        asking = asyncio.create_task(read(decode.client, body))
        await decode.has(in_flight=1)
        assert await prefill.counts() == {"pinned": 1, "local_prefills": 1}
        match how:
            case "leaves":
                asking.cancel()
            case "aborted":
                await decode.engine.abort_requests()
            case "cut":
                await decode.engine.simulate({"call": "now", "outcome": "cut"})
        await prefill.has(aborted=1, local_prefills=1)
        await decode.has()
        await asyncio.wait({asking})


async def test_who_leaves_while_the_peer_hangs_frees_it_there() -> None:
    async with a_pair() as (prefill, decode):
        params = await prefill.prefill()
        await prefill.engine.simulate({"call": "now", "outcome": "hang"})
        await until(lambda: prefill.engine._hung)
        asking = asyncio.create_task(decode.decode(params))
        await decode.has(in_flight=1)
        asking.cancel()
        await decode.has()
        await prefill.has(aborted=1, local_prefills=1)
        await prefill.engine.simulate({"call": "now", "outcome": "die"})
        await until(prefill.engine.died.done)


@pytest.mark.parametrize("wrong", [{"max_tokens": 10**9}, {"model": "other"}])
async def test_a_decode_that_is_turned_away_frees_it(wrong: dict[str, Any]) -> None:
    async with a_pair() as (prefill, decode):
        status, _ = await decode.decode(await prefill.prefill(), **wrong)
        assert status in (400, 404)
        await prefill.has(aborted=1, local_prefills=1)


async def test_an_engine_that_refuses_or_died_tells_nobody() -> None:
    async with a_pair() as (prefill, decode):
        await decode.engine.simulate({"call": "now", "outcome": "refuse"})
        await until(lambda: decode.engine.refuses)
        assert (await decode.decode(await prefill.prefill()))[0] == 500
        await decode.engine.simulate({"call": "now", "outcome": "admit"})
        await until(lambda: not decode.engine.refuses)
        await decode.engine.pause(Mode.KEEP, clear_cache=True)
        asking = asyncio.create_task(decode.decode(await prefill.prefill()))
        await decode.has(in_flight=1)
        await decode.engine.simulate({"call": "now", "outcome": "die"})
        await asyncio.wait({asking})
        assert await prefill.counts() == {"pinned": 2, "local_prefills": 2}


async def test_a_prefill_side_that_is_paused_still_gives() -> None:
    """Its gate refuses inference; fetching KV is none."""
    engine = await loaded()
    gate = AdmissionGate(engine.app(), lambda _: None)
    engine.app = lambda: gate  # type: ignore[method-assign]
    gate.set(Admission.OPEN, "", end_held=False)
    async with served(engine) as client, a_side() as decode:
        prefill = Side(engine, client)
        params = await prefill.prefill()
        await engine.pause(Mode.ABORT, clear_cache=True)
        gate.set(Admission.REFUSED, "paused", end_held=False)
        assert (await post(client, COMPLETIONS, prompt="a"))[0] == 503
        assert (await decode.decode(params))[0] == 200
        assert await prefill.counts() == {"pulled": 1, "local_prefills": 1}


async def read(
    client: aiohttp.ClientSession, body: dict[str, Any], headers: dict[str, str] | None = None
) -> Any:
    async with client.post(COMPLETIONS, json=body, headers=headers) as answer:
        return await (answer.text() if body.get("stream") else answer.json())
