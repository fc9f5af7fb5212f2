"""Who is let in, in which order commands are judged, and what is remembered."""

import asyncio
import time
from typing import Any

import pytest

from service import control
from service.control import MAX_WAITING
from statemachine import events as ev
from tests.service.shell import shell


async def test_refusals_come_in_the_order_of_the_contract() -> None:
    """A command with everything wrong is refused for the first thing in the list."""
    async with shell() as s:
        past = 1_000_000_000.0
        assert await s.code("sleep", {"level": 7}, session="x", deadline=past, id="a") == "deadline_exceeded"
        assert await s.code("sleep", {"level": 7}, session="x", id="a") == "session_mismatch"
        assert await s.code("sleep", {"level": 7}, id="a") == "invalid_argument"
        assert await s.code("update_weights", {"update_info": {}}, id="a") == "invalid_state"
        assert s.engine.calls == []


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (None, "not_ready"),
        (ev.EngineDied("gone"), "engine_failed"),
        (ev.ShutdownRequested(ev.Cause("signal")), "shutting_down"),
    ],
)
async def test_outside_of_its_life_an_instance_says_so_before_anything_else(
    event: ev.Event | None, code: str
) -> None:
    async with shell(loaded=event is not None) as s:
        if event is not None:
            s.runner.post(event)
        reply = await s.do("sleep", {"level": 7}, session="x", deadline=1.0)
        assert reply["error"]["code"] == code
        assert reply["error"]["retryable"]
        assert (await s.do("status"))["ok"]


async def test_an_unknown_verb_is_named() -> None:
    async with shell() as s:
        error = (await s.do("dance"))["error"]
        assert error["code"] == "unknown_verb" and "dance" in error["message"]
        assert await s.code("simulate", {"call": "now", "outcome": "die"}) == "unknown_verb"


async def test_a_repeat_gets_the_first_answer_and_does_nothing() -> None:
    """Idempotency: the same key means the same command, whatever has happened since."""
    async with shell() as s:
        first = await s.do("pause", id="one")
        await s.do("resume", id="two")
        again = await s.do("pause", id="one")
        assert again == {**first, "duplicate": True}
        assert s.engine.calls == ["pause", "resume"]


async def test_a_repeat_of_a_running_command_waits_for_its_answer() -> None:
    """Idempotency: also while the first still runs, which `status` tells by the key."""
    async with shell() as s:
        s.engine.close("pause")
        first = s.send("pause", id="same")
        await s.engine.started("pause")
        second = s.send("pause", id="same")
        status = await s.do("status", {"verb": "pause", "id": "same"})
        assert status["result"] == {"reply": None, "running": True}
        s.engine.open("pause")
        assert (await s.reply(first))["duplicate"] is False
        assert (await s.reply(second))["duplicate"] is True
        assert s.engine.calls == ["pause"]


async def test_an_id_is_not_reused_for_something_else() -> None:
    async with shell() as s:
        await s.do("pause", {"mode": "keep"}, id="one")
        assert await s.code("pause", {"mode": "abort"}, id="one") == "invalid_argument"
        assert (await s.do("resume", id="one"))["ok"]  # another verb's id is another id


async def test_a_refusal_is_judged_anew_and_an_engine_error_is_not() -> None:
    """Idempotency: remembered is what ended well or has called the engine."""
    async with shell() as s:
        assert await s.code("finish_weight_update", id="f") == "invalid_state"
        await s.do("start_weight_update")
        await s.do("update_weights", {"update_info": {}})
        assert (await s.do("finish_weight_update", id="f"))["ok"]
        s.engine.errors["pause"] = s_error()
        assert await s.code("pause", id="p") == "engine_error"
        again = await s.do("pause", id="p")
        assert again["duplicate"] and again["error"]["code"] == "engine_error"


def s_error() -> Exception:
    from service.engine.protocol import EngineError

    return EngineError("no")


@pytest.mark.parametrize(("limit", "value"), [("REMEMBER_S", 0.05), ("REMEMBER_MAX", 1)])
async def test_what_is_long_ago_is_forgotten(
    limit: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idempotency: for 10 minutes, and the last 10,000."""
    assert (control.REMEMBER_S, control.REMEMBER_MAX) == (600, 10_000)
    monkeypatch.setattr(control, limit, value)
    async with shell() as s:
        assert not (await s.do("pause", id="one"))["duplicate"]
        assert (await s.do("pause", id="one"))["duplicate"]
        await asyncio.sleep(0.1)
        await s.do("resume", id="two")
        assert not (await s.do("pause", id="one"))["duplicate"]
        status = await s.do("status", {"verb": "resume", "id": "two"})
        assert (status["result"]["reply"] is not None) is (limit == "REMEMBER_S")
        assert s.engine.calls == ["pause", "resume", "pause"]


async def test_the_answer_of_a_lost_reply_can_be_asked_for() -> None:
    """Idempotency: by its verb and key."""
    async with shell() as s:
        await s.do("pause", id="lost")
        status = await s.do("status", {"verb": "pause", "id": "lost"})
        assert status["result"]["reply"]["id"] == "lost"
        assert status["result"]["reply"]["ok"] and not status["result"]["running"]
        unknown = await s.do("status", {"verb": "pause", "id": "other"})
        assert unknown["result"] == {"reply": None, "running": False}


async def test_64_may_wait_and_the_next_is_told_busy_unless_it_would_be_refused_anyway() -> None:
    async with shell() as s:
        s.engine.close("pause")
        running = s.send("pause", {"mode": "keep"})
        await s.engine.started("pause")
        waiting = [s.send("resume" if n % 2 else "pause") for n in range(MAX_WAITING)]
        error = (await s.do("pause"))["error"]
        assert (error["code"], error["retryable"]) == ("busy", True)
        assert await s.code("finish_weight_update") == "invalid_state"
        assert await s.code("sleep", {"level": True}) == "invalid_argument"
        s.engine.open("pause")
        for reply_to in (running, *waiting):
            assert (await s.reply(reply_to))["ok"]


async def test_one_queue_and_what_it_never_lets_through() -> None:
    """Ordering guard: one command at a time, in order of arrival, and `status` does not wait. What the
    engine would accept and regret is refused before it is called."""
    async with shell() as s:
        update: dict[str, Any] = {"update_info": {}}

        async def refused(*codes: tuple[str, dict[str, Any], str]) -> None:
            called = list(s.engine.calls)
            for verb, args, code in codes:
                assert await s.code(verb, args) == code, verb
            assert s.engine.calls == called

        outside = [("update_weights", update, "invalid_state"), ("finish_weight_update", {}, "invalid_state")]
        await refused(*outside)  # while serving
        called = list(s.engine.calls)
        for tags in (None, ["weights"], ["kv_cache"], []):
            reply = await s.do("wake_up", {"tags": tags} if tags is not None else {})
            assert (reply["ok"], reply["changed"], reply["result"]) == (True, False, {"woken": []})
        assert s.engine.calls == called  # nothing of it was asleep

        await s.do("sleep")
        await refused(*outside, ("start_weight_update", {}, "invalid_state"), ("resume", {}, "invalid_state"))
        await s.do("wake_up", {"tags": ["kv_cache"]})
        await refused(*outside, ("start_weight_update", {}, "invalid_state"), ("resume", {}, "invalid_state"))
        await s.do("wake_up", {"tags": ["weights"]})
        assert s.life.state.value == "serving"

        await s.do("sleep")
        await s.do("wake_up", {"tags": ["weights"]})
        await s.do("start_weight_update")
        await refused(
            ("resume", {}, "weight_update_open"),
            ("sleep", {}, "weight_update_open"),
            ("start_weight_update", {}, "weight_update_open"),
        )
        s.engine.close("update")
        running = s.send("update_weights", update)
        await s.engine.started("update")
        waiting = [s.send("wake_up"), s.send("resume")]
        status = await s.do("status")
        assert (status["ok"], status["state"]["settled"]) == (True, False)
        assert not any(reply_to in s.replies for reply_to in (running, *waiting))
        s.engine.open("update")
        assert [(await s.reply(reply_to))["ok"] for reply_to in (running, *waiting)] == [True, True, False]
        assert s.engine.calls[-2:] == ["update", "wake_up"]
        assert not s.engine.scheduling  # although everything is awake


async def test_a_lease_ends_between_two_commands() -> None:
    """Ordering guard: it does not wait for those that are queued."""
    async with shell() as s:
        await s.do("start_weight_update", {"lease_s": 0.2}, issuer="trainer")
        s.engine.close("pause")
        running = s.send("pause", {"mode": "abort"}, issuer="operator")  # stronger than keep: called
        await s.engine.started("pause")
        waiting = s.send("resume", issuer="operator")
        await asyncio.sleep(0.3)
        s.engine.open("pause")
        assert (await s.reply(running))["ok"]
        assert (await s.reply(waiting))["ok"]  # the session is over, or it would be refused
        assert s.engine.calls[-4:] == ["pause", "finish", "ask", "resume"]


async def test_a_deadline_that_passes_while_waiting_keeps_the_engine_out_of_it() -> None:
    async with shell() as s:
        s.engine.close("pause")
        s.send("pause")
        await s.engine.started("pause")
        late = s.send("resume", deadline=time.time() + 0.05)
        await asyncio.sleep(0.1)
        s.engine.open("pause")
        assert (await s.reply(late))["error"]["code"] == "deadline_exceeded"
        assert "resume" not in s.engine.calls


async def test_a_session_opened_with_an_epoch_must_be_named() -> None:
    async with shell() as s:
        session = (await s.do("start_weight_update", epoch=3))["result"]["session"]
        assert await s.code("update_weights", {"update_info": {}}) == "session_mismatch"
        assert await s.code("update_weights", {"update_info": {}}, session="other") == "session_mismatch"
        assert (await s.do("update_weights", {"update_info": {}}, session=session))["ok"]


async def test_a_session_opened_without_an_epoch_need_not_be_named_but_must_match() -> None:
    async with shell() as s:
        await s.do("start_weight_update")
        assert await s.code("abort_weight_update", session="other") == "session_mismatch"
        assert (await s.do("abort_weight_update"))["ok"]


async def test_nonsense_is_answered_in_its_own_format_and_changes_nothing() -> None:
    async with shell() as s:
        for body in (b"\xc1", b"\x93\x01\x02\x03", b"\x81"):
            s.control.on_message("x.pause", body, "inbox.m")
            assert s.replies["inbox.m"].pop()["error"]["code"] == "invalid_message"
        s.control.on_message("x.pause", b"\xc1", "")  # nobody to answer to
        assert s.engine.calls == []


async def test_what_waits_is_told_at_once_when_the_engine_dies() -> None:
    async with shell() as s:
        s.engine.close("pause")
        running = s.send("pause", {"mode": "wait"})
        await s.engine.started("pause")
        waiting = [s.send("resume"), s.send("sleep")]
        s.runner.post(ev.EngineDied("killed"))
        for reply_to in (running, *waiting):
            assert (await s.reply(reply_to))["error"]["code"] == "engine_failed"


async def test_a_shutdown_waits_for_nothing_and_is_asked_for_once() -> None:
    async with shell() as s:
        s.engine.close("pause")
        running = s.send("pause", {"mode": "wait"})
        await s.engine.started("pause")
        waiting = s.send("resume")
        reply = await s.do("shutdown")
        assert (reply["ok"], reply["changed"], reply["state"]["state"]) == (True, True, "shutting_down")
        for reply_to in (running, waiting):
            assert (await s.reply(reply_to))["error"]["code"] == "shutting_down"
        assert (await s.do("shutdown"))["changed"] is False


async def test_every_command_is_answered_exactly_once() -> None:
    async with shell() as s:
        sent = [s.send(verb) for verb in ("pause", "resume", "sleep", "wake_up", "status", "dance") * 5]
        for reply_to in sent:
            await s.reply(reply_to)
        await s.runner.caught_up()
        assert all(len(s.replies[reply_to]) == 1 for reply_to in sent)
