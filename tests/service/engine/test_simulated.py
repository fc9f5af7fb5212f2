"""The simulated engine behaves as vLLM does, in what it allows and in how it fails."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from service.engine.protocol import EngineDied, EngineError, EngineRefused, EngineView
from service.engine.simulated import SimulatedEngine
from statemachine.states import Mode, Tag

QUICK = ["--load-s", "0", "--token-interval-ms", "1"]
ALL = tuple(Tag)
NEVER = 10**9


async def loaded(*engine_args: str) -> SimulatedEngine:
    engine = SimulatedEngine("sim-model", [*QUICK, *engine_args], lambda _: None, lambda: None)
    await engine.load()
    return engine


class Stream:
    """One request that runs until it ends or the test does."""

    def __init__(self, engine: SimulatedEngine, max_tokens: int = NEVER) -> None:
        self.request = engine.generate(max_tokens)
        self.tokens: list[int] = []
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> str | None:
        async for token in self.request.tokens():
            self.tokens.append(token)
        return self.request.finish_reason

    async def running(self, tokens: int = 1) -> "Stream":
        goal = len(self.tokens) + tokens
        await until(lambda: len(self.tokens) >= goal or self.task.done())
        return self

    async def stands_still(self) -> None:
        before = len(self.tokens)
        await asyncio.sleep(0.02)
        assert len(self.tokens) == before
        assert not self.task.done()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def ended(task: "asyncio.Task[Any]") -> Any:
    async with asyncio.timeout(5):
        return await task


# Scheduling


async def test_a_request_gets_its_words_and_an_end() -> None:
    stream = Stream(await loaded(), max_tokens=3)
    assert await ended(stream.task) == "length"
    assert stream.tokens == [0, 1, 2]


async def test_abort_ends_what_runs_and_what_waits() -> None:
    engine = await loaded()
    running = await Stream(engine).running()
    await engine.pause(Mode.ABORT, clear_cache=True)
    assert await ended(running.task) == "abort"
    queued = Stream(engine)
    await queued.stands_still()
    assert queued.tokens == []
    await engine.pause(Mode.ABORT, clear_cache=True)  # a second one ends those that came since
    assert await ended(queued.task) == "abort"


async def test_keep_freezes_to_the_token() -> None:
    engine = await loaded()
    stream = await Stream(engine, max_tokens=50).running()
    await engine.pause(Mode.KEEP, clear_cache=True)
    await stream.stands_still()
    await engine.pause(Mode.WAIT, clear_cache=True)  # does not drain what is frozen, as in vLLM
    await stream.stands_still()
    await engine.resume()
    assert await ended(stream.task) == "length"
    assert stream.tokens == list(range(50))


async def test_wait_drains_what_runs_and_queues_what_comes() -> None:
    engine = await loaded()
    running = await Stream(engine, max_tokens=50).running()
    pausing = asyncio.create_task(engine.pause(Mode.WAIT, clear_cache=True))
    await until(lambda: engine._stop is Mode.WAIT)
    assert (await engine.ask()).scheduling is False  # in force while it drains
    late = Stream(engine, max_tokens=1)
    await ended(pausing)
    assert running.request.finish_reason == "length"
    await late.stands_still()
    await engine.resume()
    assert await ended(late.task) == "length"


async def test_a_request_can_be_ended_by_its_id() -> None:
    engine = await loaded()
    one, other = await Stream(engine).running(), await Stream(engine).running()
    one.request.request_id, other.request.request_id = "one", "other"
    await engine.abort_requests(["one", "nobody"])
    assert await ended(one.task) == "abort"
    await other.running()


async def test_a_drain_ends_when_its_requests_are_aborted() -> None:
    engine = await loaded()
    running = await Stream(engine).running()
    pausing = asyncio.create_task(engine.pause(Mode.WAIT, clear_cache=True))
    await running.running()
    assert not pausing.done()
    await engine.abort_requests()
    await ended(pausing)
    assert await ended(running.task) == "abort"


async def test_a_stop_is_in_force_from_the_start_of_its_call() -> None:
    engine = await loaded("--call-ms", "pause=60000,sleep=60000")
    stream = await Stream(engine).running()
    pausing = asyncio.create_task(engine.pause(Mode.KEEP, clear_cache=True))
    await until(lambda: engine._stop is Mode.KEEP)
    await stream.stands_still()
    assert (await engine.ask()).scheduling is False
    pausing.cancel()


# Memory


async def test_memory_sleeps_and_wakes_by_tags_and_waking_never_schedules() -> None:
    engine = await loaded()
    stream = await Stream(engine).running()
    await engine.sleep(1, Mode.KEEP)
    assert await engine.ask() == EngineView(scheduling=False, session_open=False, asleep=ALL)
    await engine.wake_up((Tag.WEIGHTS,))
    assert (await engine.ask()).asleep == (Tag.KV_CACHE,)
    await engine.wake_up(ALL)
    assert await engine.ask() == EngineView(scheduling=False, session_open=False)
    await stream.stands_still()
    await engine.resume()
    await stream.running()
    await engine.abort_requests()


async def test_scheduling_on_memory_that_sleeps_ends_the_engine() -> None:
    """vLLM accepts this resume; on an accelerator the forward pass is an illegal access."""
    engine = await loaded()
    stream = await Stream(engine).running()
    await engine.sleep(1, Mode.KEEP)
    await engine.resume()
    with pytest.raises(EngineDied, match="memory that sleeps"):
        await ended(stream.task)
    with pytest.raises(EngineDied, match="memory that sleeps"):
        await engine.ask()
    assert engine.died.result() == "a request was scheduled on memory that sleeps"


# Weights


async def test_an_update_from_start_to_finish() -> None:
    engine = await loaded()
    await engine.pause(Mode.KEEP, clear_cache=True)
    await engine.init_weight_transfer({})
    await engine.start_weight_update()
    assert (await engine.ask()).meta_parameters
    await engine.update_weights({"path": "x"})
    await engine.update_weights([{"path": "x"}])
    await engine.finish_weight_update()
    await engine.set_weight_version("v2")
    await engine.reset_caches()
    assert await engine.ask() == EngineView(scheduling=False, session_open=False, weight_version="v2")


async def test_a_failed_update_closes_the_session_and_a_good_one_repairs() -> None:
    engine = await loaded()
    await engine.pause(Mode.KEEP, clear_cache=True)
    await engine.start_weight_update()
    with pytest.raises(EngineError, match="no such file"):
        await engine.update_weights({"error": "no such file"})
    with pytest.raises(EngineError, match="without a matching start"):
        await engine.finish_weight_update()
    with pytest.raises(EngineError, match="must be called before"):
        await engine.update_weights({})
    assert (await engine.ask()).meta_parameters
    await engine.start_weight_update()
    await engine.finish_weight_update()  # an undo is never better than what was before
    assert (await engine.ask()).meta_parameters
    await engine.start_weight_update()
    await engine.update_weights({})
    await engine.finish_weight_update()
    assert not (await engine.ask()).meta_parameters


async def test_a_start_closes_a_session_that_was_left_open() -> None:
    engine = await loaded()
    await engine.pause(Mode.KEEP, clear_cache=True)
    await engine.start_weight_update()
    await engine.start_weight_update()
    await engine.finish_weight_update()
    assert not (await engine.ask()).meta_parameters  # nothing was loaded in either
    await engine.start_weight_update()
    await engine.update_weights({})
    await engine.start_weight_update()
    await engine.finish_weight_update()
    assert (await engine.ask()).meta_parameters  # the first had begun to load


async def test_a_request_in_a_session_ends_the_engine() -> None:
    engine = await loaded()
    await engine.start_weight_update()  # vLLM does not ask whether scheduling is stopped
    with pytest.raises(EngineDied, match="weights that are not there"):
        await ended(Stream(engine).task)


async def test_loading_into_memory_that_sleeps_ends_the_engine() -> None:
    engine = await loaded()
    await engine.sleep(1, Mode.ABORT)
    await engine.start_weight_update()
    with pytest.raises(EngineDied, match="memory that sleeps"):
        await engine.update_weights({})


# Scripts


async def test_an_error_has_no_effect_and_happens_as_often_as_asked() -> None:
    engine = await loaded()
    await engine.simulate({"call": "pause", "outcome": "error", "times": 2})
    for _ in range(2):
        with pytest.raises(EngineError, match="simulated error of pause"):
            await engine.pause(Mode.ABORT, clear_cache=True)
        assert (await engine.ask()).scheduling
    await engine.pause(Mode.ABORT, clear_cache=True)
    assert not (await engine.ask()).scheduling


async def test_scripts_of_one_call_queue() -> None:
    engine = await loaded()
    await engine.simulate({"call": "resume", "outcome": "error"})
    await engine.simulate({"call": "resume", "outcome": "die"})
    with pytest.raises(EngineError):
        await engine.resume()
    with pytest.raises(EngineDied, match="simulated death during resume"):
        await engine.resume()
    assert engine.died.done()


@pytest.mark.parametrize("call", ["pause", "sleep"])
async def test_a_delayed_stop_is_a_drain_that_an_abort_ends(call: str) -> None:
    engine = await loaded()
    running = await Stream(engine).running()
    await engine.simulate({"call": call, "outcome": "delay", "delay_s": 60})
    stopping = asyncio.create_task(
        engine.pause(Mode.WAIT, clear_cache=True) if call == "pause" else engine.sleep(1, Mode.WAIT)
    )
    await until(lambda: engine._drain is not None)
    assert not (await engine.ask()).scheduling
    await running.running()  # it drains: what runs goes on
    await engine.abort_requests()
    await ended(stopping)
    assert await ended(running.task) == "abort"
    assert await engine.ask() == EngineView(
        scheduling=False, session_open=False, asleep=ALL if call == "sleep" else ()
    )


async def test_a_delay_passes() -> None:
    engine = await loaded()
    for call in ("pause", "resume"):
        await engine.simulate({"call": call, "outcome": "delay", "delay_s": 0.02})
    started = asyncio.get_running_loop().time()
    await engine.pause(Mode.ABORT, clear_cache=True)
    assert not (await engine.ask()).scheduling
    await engine.resume()
    assert (await engine.ask()).scheduling
    assert asyncio.get_running_loop().time() - started >= 0.03


async def test_a_hang_blocks_every_later_call_but_not_death() -> None:
    engine = await loaded()
    stream = await Stream(engine).running()
    await engine.simulate({"call": "pause", "outcome": "hang"})
    calls = [
        asyncio.create_task(engine.pause(Mode.ABORT, clear_cache=True)),
        asyncio.create_task(engine.ask()),
        asyncio.create_task(engine.resume()),
    ]
    await asyncio.sleep(0.02)
    assert not any(call.done() for call in calls)
    await stream.stands_still()
    await engine.simulate({"call": "now", "outcome": "die"})
    for call in [*calls, stream.task]:
        with pytest.raises(EngineDied, match="simulated death"):
            await ended(call)


async def test_a_hanging_engine_is_gone_when_the_time_of_its_shutdown_is_over() -> None:
    engine = await loaded()
    stream = await Stream(engine).running()
    await engine.simulate({"call": "now", "outcome": "hang"})
    await until(lambda: engine._hung)
    await engine.shutdown(timeout_s=0.02)
    assert await ended(stream.task) == "abort"
    with pytest.raises(EngineDied, match="shut down"):
        await engine.ask()
    assert not engine.died.done()


async def test_faults_at_once_come_after_the_answer() -> None:
    engine = await loaded()
    stream = await Stream(engine).running()
    await engine.simulate({"call": "now", "outcome": "pause_out_of_band"})
    assert (await engine.ask()).scheduling
    await until(lambda: engine._stop is not None)
    await stream.stands_still()
    await engine.simulate({"call": "now", "outcome": "resume_out_of_band"})
    await stream.running()
    await engine.simulate({"call": "now", "outcome": "die"})
    assert not engine.died.done()
    assert await asyncio.wait_for(asyncio.shield(engine.died), 5) == "simulated death"


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ({}, "call must be"),
        ({"call": "dance", "outcome": "error"}, "call must be"),
        ({"call": [], "outcome": "error"}, "call must be"),
        ({"call": "pause"}, "outcome must be"),
        ({"call": "pause", "outcome": "pause_out_of_band"}, "outcome must be"),
        ({"call": "now", "outcome": "error"}, "outcome must be"),
        ({"call": "pause", "outcome": "error", "times": 0}, "times"),
        ({"call": "pause", "outcome": "error", "times": True}, "times"),
        ({"call": "pause", "outcome": "delay", "delay_s": -1}, "delay_s"),
        ({"call": "pause", "outcome": "delay", "delay_s": "1"}, "delay_s"),
        ({"call": "pause", "outcome": "delay", "delay_s": float("nan")}, "delay_s"),
    ],
)
async def test_a_bad_script_is_refused(script: dict[str, Any], complaint: str) -> None:
    with pytest.raises(EngineError, match=complaint):
        await (await loaded()).simulate(script)


@pytest.mark.parametrize(
    ("engine_args", "complaint"),
    [
        (["--tokens", "1"], "unrecognized arguments"),
        (["--load-s", "-1"], "--load-s"),
        (["--load-s", "inf"], "--load-s"),
        (["--call-ms", "dance=1"], "unknown call 'dance'"),
        (["--call-ms", "pause"], "NAME=MILLISECONDS"),
        (["surplus"], "unrecognized arguments"),
    ],
)
async def test_wrong_arguments_are_refused_in_one_line(engine_args: list[str], complaint: str) -> None:
    with pytest.raises(EngineRefused, match=complaint) as refused:
        await loaded(*engine_args)
    assert "\n" not in str(refused.value)


async def test_shutdown_ends_everything_in_order() -> None:
    engine = await loaded()
    stream = await Stream(engine).running()
    await engine.shutdown(timeout_s=5)
    assert await ended(stream.task) == "abort"
    with pytest.raises(EngineDied):
        await engine.resume()


# HTTP


@asynccontextmanager
async def served(engine: SimulatedEngine) -> AsyncIterator[aiohttp.ClientSession]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = "http://{}:{}".format(*listener.getsockname())
    serving = asyncio.create_task(engine.serve_http(engine.app(), listener))
    async with aiohttp.ClientSession(url) as client:
        async with asyncio.timeout(5):
            while True:
                try:
                    async with client.get("/health"):
                        break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.01)
        yield client
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def post(client: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with client.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def events(answer: aiohttp.ClientResponse) -> list[Any]:
    body = await answer.read()
    *items, last, nothing = body.decode().split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    return [json.loads(item.removeprefix("data: ")) for item in items]


async def test_models_and_health() -> None:
    engine = await loaded()
    async with served(engine) as client:
        async with client.get("/v1/models") as answer:
            models = await answer.json()
        assert [model["id"] for model in models["data"]] == ["sim-model"]
        await engine.simulate({"call": "now", "outcome": "die"})
        await asyncio.wait_for(asyncio.shield(engine.died), 5)
        async with client.get("/health") as answer:
            assert answer.status == 503


async def test_completions_whole() -> None:
    async with served(await loaded()) as client:
        status, answer = await post(client, "/v1/completions", prompt=["a b c", "d"], max_tokens=3)
        assert status == 200
        assert [choice["text"] for choice in answer["choices"]] == ["t0 t1 t2", "t0 t1 t2"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
        status, answer = await post(client, "/v1/completions", model="sim-model", prompt=[1, 2, 3])
        assert len(answer["choices"][0]["text"].split()) == 16
        messages = [{"role": "user", "content": "hi"}]
        status, answer = await post(client, "/v1/chat/completions", messages=messages, max_tokens=2)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "t0 t1"}
        assert answer["object"] == "chat.completion"


async def test_completions_as_a_stream() -> None:
    async with served(await loaded()) as client:
        body = {"prompt": ["a", "b"], "max_tokens": 3, "stream": True}
        body["stream_options"] = {"include_usage": True}
        async with client.post("/v1/completions", json=body) as answer:
            assert answer.content_type == "text/event-stream"
            *chunks, usage = await events(answer)
        texts = ["", ""]
        for chunk in chunks:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == ["t0 t1 t2", "t0 t1 t2"]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks].count("length") == 2
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 6)
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
        async with client.post("/v1/chat/completions", json=chat) as answer:
            chunks = await events(answer)
        assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks] == ["assistant", None, None]
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "t0 t1"
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_an_aborted_stream_says_so() -> None:
    engine = await loaded()
    async with served(engine) as client:
        body = {"prompt": "a", "max_tokens": 100_000, "stream": True}
        async with client.post("/v1/completions", json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            await engine.pause(Mode.ABORT, clear_cache=True)
            chunks = await events(answer)
        assert chunks[-1]["choices"][0] == {
            "index": 0,
            "logprobs": None,
            "finish_reason": "abort",
            "text": "",
        }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_even_a_frozen_request(stream: bool) -> None:
    engine = await loaded()
    async with served(engine) as client:
        body = {"prompt": "a", "max_tokens": 100_000, "stream": stream}
        asking = asyncio.create_task(_read(client, body))
        await until(lambda: any(request.started for request in engine._requests))
        await engine.pause(Mode.KEEP, clear_cache=True)
        asking.cancel()
        await until(lambda: not engine._requests)


async def _read(client: aiohttp.ClientSession, body: dict[str, Any]) -> None:
    async with client.post("/v1/completions", json=body) as answer:
        await answer.read()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {}, 400),
        ("/v1/completions", {"prompt": []}, 400),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400),
        ("/v1/completions", {"prompt": "a", "max_tokens": True}, 400),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**9}, 400),
        ("/v1/completions", {"prompt": "a", "n": 2}, 400),
        ("/v1/completions", {"prompt": "a", "stream": "yes"}, 400),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": ["hi"]}, 400),
    ],
)
async def test_a_wrong_request_gets_an_error_in_openais_form(
    path: str, body: dict[str, Any], status: int
) -> None:
    async with served(await loaded()) as client:
        got, answer = await post(client, path, **body)
        assert (got, answer["error"]["code"]) == (status, status)
        assert answer["error"]["message"]
        async with client.post(path, data=b"{nonsense") as refused:
            assert refused.status == 400
