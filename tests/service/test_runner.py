"""Effects in order, one call at a time, and every call bounded."""

import asyncio

import pytest

from service import runner
from service.engine.protocol import EngineDied, EngineError
from statemachine.states import Admission
from tests.broker import eventually
from tests.service.shell import TIMEOUTS_S, shell


async def test_traffic_is_gone_before_the_engine_hears_of_a_pause() -> None:
    """Subscribe before advertise; unregister before sleep: traffic is gone when the engine hears of it."""
    async with shell() as s:
        s.traffic.seen.clear()
        s.engine.close("pause")
        reply_to = s.send("pause")
        await s.engine.started("pause")
        assert s.traffic.seen == [("readiness", False), ("routable", False), ("state", ("paused", False))]
        assert s.engine.admission is Admission.REFUSED
        s.engine.open("pause")
        await s.reply(reply_to)
        assert s.traffic.seen[3:] == [("state", ("paused", True)), ("reply", reply_to)]


async def test_traffic_is_back_before_the_reply_to_a_resume() -> None:
    async with shell() as s:
        await s.do("pause")
        s.traffic.seen.clear()
        reply_to = s.send("resume")
        await s.reply(reply_to)
        assert s.traffic.seen == [
            ("state", ("paused", False)),
            ("readiness", True),
            ("routable", "default"),
            ("state", ("serving", True)),
            ("reply", reply_to),
        ]


async def test_traffic_comes_back_only_to_a_gate_that_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that stood still for a moment would refuse what discovery sends to it."""
    monkeypatch.setattr(runner, "GATE_LIMIT_S", 0.001)
    async with shell() as s:
        await s.do("pause")
        s.traffic.seen.clear()
        s.engine.deaf_to_admission = 1
        reply_to = s.send("resume")
        await eventually(lambda: s.engine.deaf_to_admission == 0)
        await asyncio.sleep(0.05)  # nothing comes of it
        assert s.traffic.seen == [("state", ("paused", False))]
        s.engine.hears.set()
        assert (await s.reply(reply_to))["ok"]
        assert s.engine.admission is Admission.OPEN and ("readiness", True) in s.traffic.seen


async def test_an_order_that_was_not_taken_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "GATE_LIMIT_S", 0.02)
    monkeypatch.setattr(runner, "OPENING_LIMIT_S", 0.02)
    async with shell() as s:
        s.engine.deaf_to_admission = 2
        assert (await s.do("pause"))["ok"]
        await eventually(lambda: s.engine.admission is Admission.REFUSED and not s.engine.deaf_to_admission)
        s.engine.deaf_to_admission = 2
        assert (await s.do("resume"))["ok"]
        await eventually(lambda: s.engine.admission is Admission.OPEN)


async def test_an_order_that_was_overtaken_is_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "GATE_LIMIT_S", 0.02)
    monkeypatch.setattr(runner, "GATE_RETRY_S", 0.02)
    async with shell() as s:
        s.engine.deaf_to_admission = 1
        assert (await s.do("pause"))["ok"]
        assert (await s.do("resume"))["ok"]
        await asyncio.sleep(0.2)  # nothing comes of it
        assert s.engine.admission is Admission.OPEN


async def test_commands_run_one_at_a_time_in_order_of_arrival() -> None:
    async with shell() as s:
        s.engine.close("pause")
        replies = [s.send(verb) for verb in ("pause", "resume", "sleep", "wake_up")]
        await s.engine.started("pause")
        assert s.engine.calls == ["pause"]
        s.engine.open("pause")
        for reply_to in replies:
            assert (await s.reply(reply_to))["ok"]
        assert s.engine.calls == ["pause", "resume", "sleep", "wake_up", "resume"]


async def test_an_abort_ends_a_drain_and_comes_after_it() -> None:
    async with shell() as s:
        s.engine.close("pause")
        drain = s.send("pause", {"mode": "wait"})
        await s.engine.started("pause")
        abort = s.send("pause", {"mode": "abort"}, id="hurry")
        assert (await s.reply(drain))["result"] == {"cut_by": "hurry"}
        assert (await s.reply(abort))["changed"] is False
        assert s.engine.aborted == 1


async def test_what_slipped_in_behind_an_abort_is_ended() -> None:
    async with shell() as s:
        s.engine.in_flight = 1
        assert (await s.do("pause"))["ok"]
        assert (s.engine.aborted, s.engine.in_flight) == (1, 0)


async def test_a_keep_pause_leaves_requests_alone() -> None:
    async with shell() as s:
        s.engine.in_flight = 1
        assert (await s.do("pause", {"mode": "keep"}))["ok"]
        assert (s.engine.aborted, s.engine.admission) == (0, Admission.HELD)


async def test_a_call_over_its_limit_is_told_and_then_settled() -> None:
    async with shell(call_timeouts_s={**TIMEOUTS_S, "pause": 0.05}) as s:
        s.engine.close("pause")
        reply = await s.do("pause", {"mode": "keep"})
        assert (reply["error"]["code"], reply["state"]["settled"]) == ("engine_timeout", False)
        after = await s.do("resume")  # waits until the engine was asked
        assert (after["ok"], after["state"]["state"]) == (True, "serving")


async def test_a_drain_has_no_limit() -> None:
    async with shell(call_timeouts_s={**TIMEOUTS_S, "pause": 0.01}) as s:
        s.engine.close("pause")
        reply_to = s.send("pause", {"mode": "wait"})
        await s.engine.started("pause")
        await asyncio.sleep(0.05)
        s.engine.open("pause")
        assert (await s.reply(reply_to))["ok"]


async def test_an_engine_that_does_not_answer_after_a_time_out_is_wedged() -> None:
    """Probe contract: a declared call excuses the engine's silence for as long as its limit, no longer."""
    async with shell(call_timeouts_s={**TIMEOUTS_S, "pause": 0.02}, health_timeout_s=0.05) as s:
        s.engine.close("pause")
        s.engine.close("ask")
        assert await s.code("pause", {"mode": "keep"}) == "engine_timeout"
        async with asyncio.timeout(5):
            failure = await s.runner.failure
        assert failure.reason == "wedged"
        assert await s.code("resume") == "engine_failed"


async def test_a_silent_engine_is_found_when_no_call_runs() -> None:
    """Probe contract: liveness is the service's own loop and an engine that answers."""
    async with shell(health_interval_s=0.01, health_timeout_s=0.05) as s:
        s.engine.close("ask")
        async with asyncio.timeout(5):
            failure = await s.runner.failure
        assert failure.reason == "wedged"


async def test_a_long_call_is_never_taken_for_a_hang() -> None:
    """Probe contract: the engine's silence is excused inside a declared call."""
    async with shell(health_interval_s=0.01, health_timeout_s=0.02) as s:
        await s.do("start_weight_update")
        s.engine.close("update")
        reply_to = s.send("update_weights", {"update_info": {}})
        await s.engine.started("update")
        s.engine.close("ask")
        await asyncio.sleep(0.2)
        assert not s.runner.failure.done()
        s.engine.open("ask")
        s.engine.open("update")
        assert (await s.reply(reply_to))["ok"]


async def test_a_pause_behind_our_back_is_seen() -> None:
    async with shell(health_interval_s=0.01) as s:
        s.engine.scheduling = False
        async with asyncio.timeout(5):
            while (await s.do("status"))["state"]["state"] != "paused":
                await asyncio.sleep(0.01)


async def test_a_call_that_failed_is_settled_with_patience() -> None:
    async with shell() as s:
        s.engine.errors = {"pause": EngineError("no"), "ask": EngineError("not now")}
        reply = await s.do("pause")
        assert reply["error"]["code"] == "engine_error"
        assert reply["state"]["state"] == "serving" and reply["state"]["settled"]
        assert s.engine.calls == ["pause", "ask", "ask"]


async def test_an_engine_that_dies_in_a_call_has_failed() -> None:
    async with shell() as s:
        s.engine.errors["pause"] = EngineDied("killed")
        assert await s.code("pause") == "engine_failed"
        assert s.runner.failure.result().reason == "killed"


async def test_no_command_starts_while_keys_are_put_right() -> None:
    async with shell() as s:
        s.runner.hold_commands()
        reply_to = s.send("pause")
        await s.runner.caught_up()
        assert s.engine.calls == []
        s.runner.release_commands()
        assert (await s.reply(reply_to))["ok"]
