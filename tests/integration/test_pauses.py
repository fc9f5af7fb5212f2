"""Pauses and sleep with requests in flight; callers who leave in the middle."""

import asyncio
import contextlib
import time

import pytest

from bus import subjects
from bus.client import Client, CommandFailed
from bus.codec import Format, decode_reply, encode
from bus.connection import Bus, Timeout
from tests.broker import NatsServer, eventually
from tests.integration.served import (
    ALL_UP,
    LONG,
    NAMES,
    NOT_READY,
    NOT_SERVING,
    PROMPT,
    REAL,
    SERVING,
    SOON_S,
    Answer,
    Served,
    shown,
    snapshot,
)

pytestmark = REAL


def assert_refused(answer: Answer) -> None:
    """As the contract says: at once, with an error that says when to come back."""
    assert answer.status == 503
    assert int(answer.headers["Retry-After"]) >= 1
    assert answer.error is not None
    assert (answer.error["code"], answer.error["retryable"]) == ("engine_paused", True)
    assert answer.error["message"]
    assert answer.tokens == []


async def back_to_serving(served: Served) -> None:
    """What a resume brings back by the time it is answered."""
    assert await served.health() == ALL_UP
    assert await served.routable()
    assert await served.complete() == served.answers[0]


async def test_abort_ends_what_runs(served: Served) -> None:
    answers = [served.stream(f"{PROMPT} {i}", LONG) for i in range(3)]
    for answer in answers:
        await answer.reaches(5)
    paused = await served.engine.pause("abort")
    assert shown(paused) == (True, "paused", True)
    for answer in answers:
        await answer.end()
        assert (answer.status, answer.finish_reason, answer.error) == (200, "abort", None)
        assert 5 <= len(answer.tokens) < LONG
    assert await served.health() == NOT_READY
    assert not await served.routable()
    assert_refused(await served.stream().end())
    assert shown(await served.engine.resume()) == (True, "serving", True)
    await back_to_serving(served)


def control(served: Served, verb: str) -> str:
    return subjects.control(served.client.namespace, served.client.component, served.name, verb)


async def in_flight(served: Served, count: int) -> bool:
    return (await served.state()).in_flight == count


async def test_wait_answers_when_it_has_finished(served: Served) -> None:
    answer = await served.stream(max_tokens=LONG).reaches(5)
    pausing = asyncio.create_task(served.engine.pause("wait", timeout_s=SOON_S))
    withdrawn_s = await served.watches["readiness"].shows(NOT_SERVING)
    state = await served.state()
    assert (state.state, state.settled, state.in_flight) == ("paused", False, 1)
    assert state.operation is not None and state.operation.verb == "pause"
    assert not await served.routable()
    assert_refused(await served.stream().end())
    assert not pausing.done() and not answer.ended

    paused = await pausing
    come = len(answer.tokens)
    await answer.end()
    assert len(answer.tokens) - come < 50  # what was on its way
    assert answer.ended_s is not None and withdrawn_s < answer.ended_s
    assert (answer.finish_reason, answer.count) == ("length", LONG)
    assert shown(paused) == (True, "paused", True)
    await served.engine.resume()
    await back_to_serving(served)


@pytest.mark.parametrize("clear_cache", [True, False], ids=["cache cleared", "cache kept"])
async def test_keep_freezes_and_the_text_does_not_notice(served: Served, clear_cache: bool) -> None:
    whole = await served.long_answer()
    answer = await served.stream(max_tokens=LONG).reaches(20)
    paused = await served.engine.pause("keep", clear_cache=clear_cache)
    assert shown(paused) == (True, "paused", True)
    held = served.stream()  # accepted, and held
    frozen_at = await answer.stands_still()
    assert 20 <= frozen_at < LONG
    assert (await served.state()).in_flight == 2
    assert await served.health() == NOT_READY
    assert len(answer.tokens) == frozen_at and held.tokens == []

    assert shown(await served.engine.resume()) == (True, "serving", True)
    await answer.end()
    assert (answer.finish_reason, answer.text) == ("length", whole)
    assert (await held.end()).text == served.answers[0]
    await back_to_serving(served)


async def test_abort_after_keep_ends_what_was_held(served: Served) -> None:
    frozen = await served.stream(max_tokens=LONG).reaches(5)
    await served.engine.pause("keep")
    held = served.stream()
    await eventually(lambda: in_flight(served, 2), within_s=SOON_S)
    with pytest.raises(CommandFailed) as refusal:  # they would never drain
        await served.engine.pause("wait")
    assert refusal.value.code == "invalid_state"
    await served.engine.pause("abort")
    assert (await frozen.end()).finish_reason == "abort"
    assert (await held.end()).tokens == []
    assert (await served.state()).in_flight == 0
    await served.engine.resume()
    await back_to_serving(served)


async def test_sleep_and_wake_step_by_step(served: Served) -> None:
    slept = await served.engine.sleep(1)
    assert shown(slept) == (True, "asleep", True)
    asleep = snapshot(slept).sleep
    assert asleep is not None
    assert (asleep.level, asleep.asleep) == (1, ["weights", "kv_cache"])
    await resume_is_refused(served)

    woken = await served.engine.wake_up(["weights"])
    assert shown(woken) == (True, "partially_awake", True)
    assert woken.result == {"woken": ["weights"]}
    await resume_is_refused(served)
    assert_refused(await served.stream().end())

    woken = await served.engine.wake_up()
    assert shown(woken) == (True, "serving", True)
    assert woken.result == {"woken": ["kv_cache"]}
    await back_to_serving(served)


async def resume_is_refused(served: Served) -> None:
    with pytest.raises(CommandFailed) as refusal:
        await served.engine.resume()
    assert refusal.value.code == "invalid_state"
    assert await served.health() == NOT_READY
    assert not await served.routable()


async def test_sleep_with_keep_holds_and_waking_step_by_step_lets_nothing_through(served: Served) -> None:
    whole = await served.long_answer()
    answer = await served.stream(max_tokens=LONG).reaches(10)
    await served.engine.sleep(1, mode="keep")
    held = served.stream()
    frozen_at = await answer.stands_still()
    await served.engine.wake_up(["weights"])
    assert await answer.stands_still() == frozen_at and held.tokens == []
    await served.engine.wake_up(["kv_cache", "kv_cache", "weights"])
    # All memory is resident and the weights are good: that was the full wake-up.
    assert (await served.state()).state == "serving"
    assert frozen_at < LONG
    assert (await answer.end()).text == whole
    assert (await held.end()).text == served.answers[0]
    await back_to_serving(served)


async def test_a_wake_up_ends_no_pause_that_came_without_a_sleep(served: Served) -> None:
    answer = await served.stream(max_tokens=LONG).reaches(10)
    await served.engine.pause("keep")
    frozen_at = await answer.stands_still()
    woken = await served.engine.wake_up()
    assert shown(woken) == (False, "paused", True)
    assert await answer.stands_still() == frozen_at
    assert await served.health() == NOT_READY
    await served.engine.resume()
    await answer.reaches(frozen_at + 1)
    await answer.leave()
    await back_to_serving(served)


async def test_a_long_pause_is_no_illness(served: Served) -> None:
    """What a liveness probe would have restarted: a minute's pause for somebody else's training step."""
    whole = await served.long_answer()
    before = {name: len(served.watches[name].seen) for name in NAMES}
    answer = await served.stream(max_tokens=LONG).reaches(20)
    await served.engine.pause("keep")
    frozen_at = await answer.stands_still()
    began_s = time.monotonic()
    for probe in range(1, 13):
        assert await served.health() == NOT_READY
        assert not await served.routable()
        await asyncio.sleep(max(0.0, began_s + 5 * probe - time.monotonic()))
    assert await served.health() == NOT_READY
    state = await served.state()
    assert (state.state, state.live, state.incarnation) == ("paused", True, served.incarnation)
    assert len(answer.tokens) == frozen_at and not answer.ended

    assert shown(await served.engine.resume()) == (True, "serving", True)
    await served.watches["readiness"].shows(SERVING)
    news = {name: served.watches[name].statuses[count:] for name, count in before.items()}
    readiness = news.pop("readiness")
    assert readiness == [NOT_SERVING, SERVING]
    assert not any(news.values()), news
    assert (await answer.end()).text == whole
    assert (await served.state()).incarnation == served.incarnation
    await back_to_serving(served)


async def test_a_caller_who_does_not_wait_for_the_reply(served: Served, client: Client) -> None:
    """The command ends all the same, and what became of it can be asked."""
    answer = await served.stream(max_tokens=LONG).reaches(5)
    subject = control(served, "pause")
    command = encode({"id": "impatient", "args": {"mode": "wait"}}, Format.MSGPACK)
    with pytest.raises(Timeout):
        await client.bus.request(subject, command, timeout_s=0.2)
    assert not answer.ended
    asked = await served.engine.status("pause", "impatient")
    assert asked.result == {"reply": None, "running": True}

    assert (await answer.end()).finish_reason == "length"
    await served.settled("paused")
    assert await served.health() == NOT_READY
    asked = await served.engine.status("pause", "impatient")
    assert asked.result is not None
    assert (asked.result["running"], asked.result["reply"]["ok"]) == (False, True)
    repeated = decode_reply(await client.bus.request(subject, command, timeout_s=SOON_S))
    assert (repeated.ok, repeated.duplicate, repeated.changed) == (True, True, True)
    await served.engine.resume()
    await back_to_serving(served)


async def test_a_caller_whose_connection_is_gone(served: Served, broker: NatsServer) -> None:
    answer = await served.stream(max_tokens=LONG).reaches(5)
    async with await Bus.connect(broker.url) as bus:
        subject = control(served, "sleep")
        command = encode({"args": {"level": 1, "mode": "wait"}}, Format.MSGPACK)
        asking = asyncio.create_task(bus.request(subject, command, SOON_S))
        await served.watches["readiness"].shows(NOT_SERVING)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
    assert not answer.ended
    assert (await answer.end()).finish_reason == "length"
    await served.settled("asleep")
    await served.engine.wake_up()
    await back_to_serving(served)


async def test_a_user_who_leaves_ends_the_drain_that_waited_for_them(served: Served) -> None:
    answer = await served.stream(max_tokens=LONG).reaches(5)
    pausing = asyncio.create_task(served.engine.pause("wait"))
    await served.watches["readiness"].shows(NOT_SERVING)
    assert not pausing.done()
    await answer.leave()
    paused = await pausing
    assert shown(paused) == (True, "paused", True)
    await eventually(lambda: in_flight(served, 0), within_s=SOON_S)
    await served.engine.resume()
    await back_to_serving(served)


async def test_a_user_who_leaves_while_held(served: Served) -> None:
    frozen = await served.stream(max_tokens=LONG).reaches(5)
    await served.engine.pause("keep")
    held = served.stream()
    await eventually(lambda: in_flight(served, 2), within_s=SOON_S)
    await frozen.leave()
    await held.leave()
    await eventually(lambda: in_flight(served, 0), within_s=SOON_S)
    await served.engine.resume()
    await back_to_serving(served)
    # Nobody computes for them behind the scenes.
    assert shown(await served.engine.pause("wait", timeout_s=5)) == (True, "paused", True)
    await served.engine.resume()
