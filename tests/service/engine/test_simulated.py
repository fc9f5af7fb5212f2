"""The simulated engine behaves as vLLM does, in what it allows and in how it fails."""

import asyncio
from typing import Any, get_args

import aiohttp
import pytest

from bus.messages import BadArguments, SimulateArgs, SimulatedCall, Verb, parse_args
from service.engine.protocol import EngineDied, EngineError, EngineRefused, EngineView
from service.engine.simulated_options import CALL_MS, parse_script
from service.engine.simulated_words import FIRST_ID, of_ids, of_text
from statemachine.states import Mode, Tag
from tests.service.engine.simulation import Stream, ended, events, loaded, post, served, until

ALL = tuple(Tag)


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


@pytest.mark.parametrize("call", get_args(SimulatedCall))
def test_the_bus_accepts_the_scripts_that_the_engine_accepts(call: str) -> None:
    for outcome in get_args(SimulateArgs.__annotations__["outcome"]):
        script = {"call": call, "outcome": outcome, "delay_s": 1}
        try:
            parse_args(Verb.SIMULATE, script)
        except BadArguments:
            with pytest.raises(EngineError, match="outcome must be"):
                parse_script(script)
        else:
            assert parse_script(script)[0] == call


def test_the_bus_names_calls_that_exist() -> None:
    assert set(get_args(SimulatedCall)) <= {"now", *CALL_MS}


@pytest.mark.parametrize(
    ("engine_args", "complaint"),
    [
        (["--tokens", "1"], "unrecognized arguments"),
        (["--prefill-ms", "-1"], "--prefill-ms"),
        (["--prefill-us-per-token", "x"], "--prefill-us-per-token"),
        (["--kv-lease-s", "nan"], "--kv-lease-s"),
        (["--kv-load-failure-policy", "retry"], "--kv-load-failure-policy"),
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


async def test_usage_in_every_chunk_and_token_ids() -> None:
    async with served(await loaded()) as client:
        body: dict[str, Any] = {"prompt": "a b", "max_tokens": 2, "stream": True, "return_token_ids": True}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        async with client.post("/v1/completions", json=body) as answer:
            first, second, usage = await events(answer)
        assert [chunk["choices"][0]["token_ids"] for chunk in (first, second)] == [[FIRST_ID], [FIRST_ID + 1]]
        assert first["choices"][0]["prompt_token_ids"] == of_text("a b").ids
        assert "prompt_token_ids" not in second["choices"][0]
        assert [chunk["usage"]["completion_tokens"] for chunk in (first, second, usage)] == [1, 2, 2]
        assert {chunk["usage"]["prompt_tokens"] for chunk in (first, second, usage)} == {2}

        chat = {**body, "messages": [{"role": "user", "content": "a b"}]}
        async with client.post("/v1/chat/completions", json=chat) as answer:
            opening, first, second, usage = await events(answer)
        assert opening["prompt_token_ids"] == of_text("a b").ids
        assert [chunk["usage"]["completion_tokens"] for chunk in (opening, first, second, usage)] == [
            0,
            1,
            2,
            2,
        ]
        assert [chunk["choices"][0]["token_ids"] for chunk in (first, second)] == [[FIRST_ID], [FIRST_ID + 1]]

        body["stream_options"] = {"continuous_usage_stats": True}  # vLLM: nothing without include_usage
        async with client.post("/v1/completions", json=body) as answer:
            assert all("usage" not in chunk for chunk in await events(answer))

        del body["stream"]
        _, whole = await post(client, "/v1/completions", **body)
        assert whole["choices"][0]["token_ids"] == [FIRST_ID, FIRST_ID + 1]
        assert whole["choices"][0]["prompt_token_ids"] == of_text("a b").ids
        _, whole = await post(client, "/v1/chat/completions", **{**chat, "stream": False})
        assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (
            of_text("a b").ids,
            [FIRST_ID, FIRST_ID + 1],
        )


@pytest.mark.parametrize(
    "prompt", ["a b", "a b ", "a\n", "", "at", "t5", "c3t0", "t0 t1", "x t0 t2", "t0 t1 "]
)
@pytest.mark.parametrize("cut_after", [1, 2, 5])
async def test_a_text_that_was_cut_goes_on_where_it_stopped(prompt: str, cut_after: int) -> None:
    """However often it is sent on: as text or as token ids, nothing is lost and nothing comes twice."""
    async with served(await loaded("--token-interval-ms", "0")) as client:

        async def answer(prompt: Any, max_tokens: int) -> Any:
            _, body = await post(
                client, "/v1/completions", prompt=prompt, max_tokens=max_tokens, return_token_ids=True
            )
            return body["choices"][0]

        whole = await answer(prompt, 8)
        begun = await answer(prompt, cut_after)
        rest = await answer(prompt + begun["text"], 8 - cut_after)
        assert begun["text"] + rest["text"] == whole["text"]
        assert begun["token_ids"] + rest["token_ids"] == whole["token_ids"]
        rest = await answer(begun["prompt_token_ids"] + begun["token_ids"], 8 - cut_after)
        assert begun["text"] + rest["text"] == whole["text"]
        assert begun["token_ids"] + rest["token_ids"] == whole["token_ids"]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("a", "t0 t1"),
        ("a t0 t1", " t2 t3"),
        ("a t0 t1 ", "t2 t3"),
        ("a t1 t2", "t0 t1"),
        ("t0 t10", "t0 t1"),
        ("t00", "t0 t1"),
        ("t1234567890", "t0 t1"),
        ("\ud800", "t0 t1"),
    ],
)
def test_what_the_model_says_next(prompt: str, text: str) -> None:
    parsed = of_text(prompt)
    assert "".join(parsed.text(parsed.first + made) for made in range(2)) == text
    assert of_ids(parsed.ids).first == parsed.first


async def test_a_chat_goes_on_with_its_final_message_only_if_it_is_asked_to() -> None:
    async with served(await loaded()) as client:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "t0 t1"}]
        going_on = {"continue_final_message": True, "add_generation_prompt": False}
        path = "/v1/chat/completions"
        _, answer = await post(client, path, messages=messages, max_tokens=2, **going_on)
        assert answer["choices"][0]["message"]["content"] == " t2 t3"
        _, answer = await post(client, path, messages=messages, max_tokens=2)
        assert answer["choices"][0]["message"]["content"] == "t0 t1"
        parts = [{"role": "assistant", "content": [{"type": "text", "text": "t0"}]}]
        _, answer = await post(client, path, messages=parts, max_tokens=1, **going_on)
        assert answer["choices"][0]["message"]["content"] == " t1"


async def test_a_chat_stream_opens_with_its_first_token() -> None:
    """So a router that waits for the first event waits for the engine, not for its HTTP server."""
    engine = await loaded()
    async with served(engine) as client:
        await engine.pause(Mode.KEEP, clear_cache=True)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stream": True}
        async with client.post("/v1/chat/completions", json=body) as answer:
            await until(lambda: engine.in_flight)
            assert not answer.content._buffer
            await engine.resume()
            assert len(await events(answer)) == 2


async def test_requests_are_named_as_vllm_names_them_and_ended_by_these_names() -> None:
    engine = await loaded()
    async with served(engine) as client:
        headers = {"X-Request-Id": "mine"}
        body = {"prompt": ["a", "b"], "max_tokens": 100_000, "stream": True}
        async with client.post("/v1/completions", json=body, headers=headers) as answer:
            await answer.content.readuntil(b"\n\n")
            for path, ids in [
                ("/abort_requests", ["mine", "cmpl-mine", "cmpl-mine-0"]),
                ("/inference/v1/abort_requests", ["cmpl-mine-1"]),
            ]:
                async with client.post(path, json={"request_ids": ids}) as aborted:
                    assert aborted.status == 200
            chunks = await events(answer)
        assert {chunk["id"] for chunk in chunks} == {"cmpl-mine"}
        reasons = {c["choices"][0]["index"]: c["choices"][0]["finish_reason"] for c in chunks}
        assert reasons == {0: "abort", 1: "abort"}

        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100_000, "stream": True}
        async with client.post("/v1/chat/completions", json=body, headers=headers) as answer:
            await answer.content.readuntil(b"\n\n")
            status, said = await post(client, "/abort_requests", request_ids=["chatcmpl-mine"])
            assert (status, said) == (200, {"status": "aborted", "aborted": 1})
            chunks = await events(answer)
        assert (chunks[-1]["id"], chunks[-1]["choices"][0]["finish_reason"]) == ("chatcmpl-mine", "abort")


async def test_an_abort_without_ids_is_one_of_all() -> None:
    engine = await loaded()
    running = [await Stream(engine).running() for _ in range(2)]
    async with served(engine) as client:
        status, _ = await post(client, "/inference/v1/abort_requests")
        assert status == 400
        assert await post(client, "/abort_requests") == (200, {"status": "aborted", "aborted": 2})
        assert (await post(client, "/abort_requests", request_ids=[1]))[0] == 400
    assert [await ended(one.task) for one in running] == ["abort", "abort"]


async def test_the_prompt_takes_its_time() -> None:
    engine = await loaded("--prefill-ms", "20", "--prefill-us-per-token", "1000", "--token-interval-ms", "0")
    async with served(engine) as client:
        for tokens, least_s in ((1, 0.021), (40, 0.06)):
            started = asyncio.get_running_loop().time()
            await post(client, "/v1/completions", prompt=[1] * tokens, max_tokens=1)
            assert asyncio.get_running_loop().time() - started >= least_s


async def test_an_engine_that_refuses_looks_healthy() -> None:
    engine = await loaded()
    async with served(engine) as client:
        running = await Stream(engine).running()
        await engine.simulate({"call": "now", "outcome": "refuse"})
        await until(lambda: engine.refuses)
        for path in ("/v1/completions", "/v1/chat/completions"):
            status, answer = await post(client, path, prompt="a", messages=[])
            assert (status, answer["error"]["code"]) == (500, 500)
        async with client.get("/health") as health:
            assert health.status == 200
        await running.running()
        assert (await engine.ask()).scheduling
        await engine.simulate({"call": "now", "outcome": "admit"})
        await until(lambda: not engine.refuses)
        assert (await post(client, "/v1/completions", prompt="a"))[0] == 200


async def test_streams_are_cut_and_the_engine_lives_on() -> None:
    engine = await loaded()
    async with served(engine) as client:
        whole = asyncio.create_task(post(client, "/v1/completions", prompt="a", max_tokens=100))
        body = {"prompt": "a", "max_tokens": 100_000, "stream": True}
        async with (
            client.post("/v1/completions", json=body) as one,
            client.post("/v1/completions", json=body) as other,
        ):
            await one.content.readuntil(b"\n\n")
            await other.content.readuntil(b"\n\n")
            await engine.simulate({"call": "now", "outcome": "cut"})
            for answer in (one, other):
                with pytest.raises(aiohttp.ClientPayloadError):
                    await answer.read()
        status, answered = await ended(whole)
        assert (status, answered["choices"][0]["finish_reason"]) == (200, "length")
        assert engine.in_flight == 0
        async with client.post("/v1/completions", json={**body, "max_tokens": 2}) as answer:
            assert len(await events(answer)) == 2  # those that come later are not cut


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
        ("/v1/completions", {"prompt": "a", "kv_transfer_params": [1]}, 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": ["hi"]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "continue_final_message": True}, 400),
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
