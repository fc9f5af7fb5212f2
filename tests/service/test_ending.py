"""How an instance ends: in order, in a hurry, with its engine lost, and without leaving anything."""

import asyncio
import os
import signal
import time
from pathlib import Path

import aiohttp
import pytest

from bus.client import CommandFailed
from tests.broker import NatsServer, eventually
from tests.program import Program, title
from tests.service.serving import Serving, serving, words

TERM, KILL, STOP = signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP
SLOW = ("--token-interval-ms", "20")


def host_of(one: Serving) -> int:
    return next(pid for pid in one.program.left() if "service.engine.host" in title(pid))


async def gone(program: Program, within_s: float = 5.0) -> None:
    await eventually(lambda: not program.left(), within_s=within_s)


async def test_the_stages_come_in_order_and_a_stream_finishes(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url, engine=SLOW) as one:
        liveness = one.watch("liveness")
        async with one.complete(60) as response:
            one.signal(TERM)
            text, error = await words(response)
        assert error is None and text.split() == [f"t{n}" for n in range(60)]
        assert await one.end() == 0
        await gone(one.program)
        last = [e for e in one.events if e.state in ("shutting_down", "stopped")]
        stages = [e.operation.verb if e.operation else None for e in last]
        assert stages == [
            None,
            "grace_period",
            "no_new_requests",
            "drain",
            "end_of_requests",
            "engine_shutdown",
            "engine_processes",
            None,
        ]
        assert last[-1].state == "stopped" and last[-1].previous == "shutting_down"
        assert not any(e.ready for e in last)
        assert liveness == ["SERVING", "CLOSED"]


async def test_requests_are_accepted_in_the_grace_period_and_refused_after_it(
    tmp_path: Path, nats_url: str
) -> None:
    async with serving(tmp_path, nats_url, "--grace-period-s", "3", engine=SLOW) as one:
        async with one.complete(400) as running:
            one.signal(TERM)
            await eventually(lambda: "shutting_down" in one.states)
            assert not await one.routable()
            async with one.complete(2) as response:
                assert response.status == 200
            await eventually(lambda: any(e.operation and e.operation.verb == "drain" for e in one.events))
            with pytest.raises(aiohttp.ClientConnectionError):
                async with one.complete(2):
                    pass
            text, error = await words(running)
        assert error is None and len(text.split()) == 400
        assert await one.end() == 0


async def test_what_a_keep_pause_froze_is_finished(tmp_path: Path, nats_url: str) -> None:
    """Good weights: nothing stands in the way of the requests but the pause."""
    async with serving(tmp_path, nats_url, engine=SLOW) as one:
        async with one.complete(60) as response:
            await one.instance.pause(mode="keep")
            one.signal(TERM)
            text, error = await words(response)
        assert error is None and len(text.split()) == 60
        assert await one.end() == 0


async def test_what_waits_for_sleeping_memory_ends_with_the_retryable_error(
    tmp_path: Path, nats_url: str
) -> None:
    async with serving(tmp_path, nats_url, engine=SLOW) as one:
        async with one.complete(10_000) as response:
            await one.instance.sleep(level=1, mode="keep")
            one.signal(TERM)
            _, error = await words(response)
        assert error is not None and (error["code"], error["retryable"]) == ("shutting_down", True)
        assert await one.end() == 0


async def test_an_open_session_is_not_waited_for(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url, engine=("--call-ms", "update_weights=60000")) as one:
        await one.instance.start_weight_update()
        update = asyncio.create_task(one.instance.update_weights({}, timeout_s=30))
        await eventually(lambda: one.events[-1].operation is not None)
        one.signal(TERM)
        with pytest.raises(CommandFailed) as failure:
            await update
        assert failure.value.code == "shutting_down"
        assert await one.end() == 0
        await gone(one.program)


async def test_a_request_that_does_not_make_it_ends_with_an_error(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url, "--drain-timeout-s", "0.3", engine=SLOW) as one:
        async with one.complete(10_000) as response:
            one.signal(TERM)
            text, error = await words(response)
        assert text and error is not None
        assert (error["code"], error["retryable"]) == ("shutting_down", True)
        assert await one.end() == 0


async def test_without_grace_for_requests_they_end_at_once(tmp_path: Path, nats_url: str) -> None:
    options = ("--no-graceful-shutdown", "--drain-timeout-s", "30")
    async with serving(tmp_path, nats_url, *options, engine=SLOW) as one:
        async with one.complete(10_000) as response:
            one.signal(TERM)
            _, error = await words(response)
        assert error is not None and error["code"] == "shutting_down"
        assert await one.end(within_s=10) == 0


async def test_a_second_signal_cuts_the_waiting_short_and_a_third_changes_nothing(
    tmp_path: Path, nats_url: str
) -> None:
    async with serving(tmp_path, nats_url, "--grace-period-s", "60", engine=SLOW) as one:
        async with one.complete(100_000) as response:
            one.signal(TERM)
            await eventually(lambda: "shutting_down" in one.states)
            one.signal(signal.SIGINT)
            one.signal(TERM)
            _, error = await words(response)
        assert error is not None and error["retryable"]
        assert await one.end(within_s=10) == 70
        await gone(one.program)
        assert one.states[-1] == "stopped"


async def test_the_verb_is_no_signal(tmp_path: Path, nats_url: str) -> None:
    """Its repeat changes nothing, and a signal after it is the first one."""
    async with serving(tmp_path, nats_url, "--grace-period-s", "1") as one:
        assert (await one.instance.shutdown()).changed
        assert not (await one.instance.shutdown()).changed
        one.signal(TERM)
        assert await one.end() == 0


async def test_without_a_broker_the_end_is_as_orderly(tmp_path: Path, nats_server: NatsServer) -> None:
    async with serving(tmp_path, nats_server.url) as one:
        await nats_server.stop(KILL)
        one.signal(TERM)
        assert await one.end(within_s=10) == 0
        await gone(one.program)


async def test_a_frozen_broker_does_not_hold_up_the_end(tmp_path: Path, nats_server: NatsServer) -> None:
    async with serving(tmp_path, nats_server.url) as one:
        nats_server.freeze()
        one.signal(TERM)
        assert await one.end(within_s=15) == 0
        await gone(one.program)
        nats_server.thaw()


async def test_a_signal_while_the_engine_loads_ends_at_once(tmp_path: Path, nats_url: str) -> None:
    options = ("--grace-period-s", "60")
    async with serving(tmp_path, nats_url, *options, engine=("--load-s", "60"), state=None) as one:
        liveness = one.watch("liveness")
        await eventually(lambda: liveness)
        one.signal(TERM)
        assert await one.end(within_s=10) == 0
        await eventually(lambda: "CLOSED" in liveness)
        assert liveness == ["SERVING", "CLOSED"]
        await gone(one.program)


async def test_the_death_of_the_engine_is_seen_by_everybody(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url, "--failure-linger-s", "1", engine=SLOW) as one:
        names = ("liveness", "readiness", "vllm.Inference", "vllm.Control", "")
        seen = {name: one.watch(name) for name in names}
        await eventually(lambda: all(seen.values()))
        async with one.complete(10_000) as response:
            drain = asyncio.create_task(one.instance.pause(mode="wait", timeout_s=30))
            await eventually(lambda: not one.events[-1].settled)
            waiting = asyncio.create_task(one.instance.resume(timeout_s=30))
            await one.simulate(call="now", outcome="die")
            _, error = await words(response)
            for command in (drain, waiting):
                with pytest.raises(CommandFailed) as failure:
                    await command
                assert (failure.value.code, failure.value.retryable) == ("engine_failed", True)
        assert error is not None and error["retryable"]
        assert not await one.routable()
        assert await one.end() == 1
        for name in names:
            await eventually(lambda: all("CLOSED" in statuses for statuses in seen.values()))
            assert seen[name][-2:] == ["NOT_SERVING", "CLOSED"]
        await gone(one.program)
        assert one.states[-3:] == ["failed", "shutting_down", "stopped"]
        assert "engine failed" in one.program.stderr()


async def test_a_host_that_is_killed_is_found_at_once(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url, "--failure-linger-s", "0.2") as one:
        os.kill(host_of(one), KILL)
        killed_s = time.monotonic()
        await eventually(lambda: "failed" in one.states)
        assert time.monotonic() - killed_s < 25  # a guard; the benchmark has the figure
        assert await one.end() == 1
        await gone(one.program)


async def test_a_signal_after_a_failure_cuts_the_linger(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url, "--failure-linger-s", "60") as one:
        liveness = one.watch("liveness")
        await one.simulate(call="now", outcome="die")
        await eventually(lambda: "failed" in one.states)
        one.signal(TERM)
        assert await one.end(within_s=10) == 1
        await eventually(lambda: "CLOSED" in liveness)
        assert liveness == ["SERVING", "NOT_SERVING", "CLOSED"]
        down = next(e for e in one.events if e.state == "shutting_down")
        assert (down.previous, down.live) == ("failed", False)


async def test_an_engine_that_dies_while_requests_drain_costs_the_exit_code(
    tmp_path: Path, nats_url: str
) -> None:
    async with serving(tmp_path, nats_url, engine=SLOW) as one:
        liveness = one.watch("liveness")
        async with one.complete(10_000) as response:
            one.signal(TERM)
            await eventually(lambda: any(e.operation and e.operation.verb == "drain" for e in one.events))
            os.kill(host_of(one), KILL)
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        assert await one.end(within_s=10) == 1
        assert liveness == ["SERVING", "CLOSED"]
        assert "failed" not in one.states


async def test_an_idle_engine_that_dies_while_shutting_down_costs_nothing(
    tmp_path: Path, nats_url: str
) -> None:
    async with serving(tmp_path, nats_url, "--grace-period-s", "60") as one:
        one.signal(TERM)
        await eventually(lambda: "shutting_down" in one.states)
        os.kill(host_of(one), KILL)
        assert await one.end(within_s=10) == 0


async def test_a_stopped_engine_is_wedged(tmp_path: Path, nats_url: str) -> None:
    options = ("--health-interval-s", "0.2", "--health-timeout-s", "1", "--failure-linger-s", "0.2")
    async with serving(tmp_path, nats_url, *options) as one:
        os.kill(host_of(one), STOP)
        assert await one.end() == 1
        failed = next(e for e in one.events if e.state == "failed")
        assert failed.reasons == ["the engine failed: wedged"]
        await gone(one.program)


async def test_a_hung_call_is_told_then_asked_about_then_wedged(tmp_path: Path, nats_url: str) -> None:
    """Lease: a receiver that is stuck cannot be interrupted. It is reported as wedged, and the process ends,
    so that a supervisor replaces it."""
    options = ("--call-timeout-s", "update=0.5", "--health-timeout-s", "1", "--failure-linger-s", "0.2")
    async with serving(tmp_path, nats_url, *options) as one:
        await one.instance.start_weight_update()
        await one.simulate(call="update_weights", outcome="hang")
        with pytest.raises(CommandFailed) as failure:
            await one.instance.update_weights({})
        assert (failure.value.code, failure.value.retryable) == ("engine_timeout", True)
        assert await one.end() == 1
        failed = next(e for e in one.events if e.state == "failed")
        assert failed.reasons == ["the engine failed: wedged"]


async def test_a_long_update_within_its_time_is_left_alone(tmp_path: Path, nats_url: str) -> None:
    """Probe contract: liveness stays while a declared update takes longer than the engine may be silent."""
    options = ("--health-interval-s", "0.1", "--health-timeout-s", "0.3")
    async with serving(tmp_path, nats_url, *options, engine=("--call-ms", "update_weights=2000")) as one:
        liveness = one.watch("liveness")
        await one.instance.start_weight_update()
        await one.instance.update_weights({})
        await one.instance.finish_weight_update(weight_version="v")
        assert liveness == ["SERVING"]
        assert (await one.snapshot()).state == "serving"


async def test_nothing_outlives_a_control_process_that_is_killed(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one:
        assert len(one.program.left()) > 1
        os.kill(one.program.pid, KILL)
        await gone(one.program)


async def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path: Path, nats_url: str) -> None:
    options = ("--failure-linger-s", "0.2")
    engine = ("--load-error", "the weights are upside down")
    async with serving(tmp_path, nats_url, *options, engine=engine, state=None) as one:
        assert await one.end() == 1
        assert "the weights are upside down" in one.program.stderr()
        assert len(one.program.stderr().splitlines()) == 1
        await gone(one.program)


async def test_a_start_that_takes_too_long_has_failed(tmp_path: Path, nats_url: str) -> None:
    options = ("--engine-start-timeout-s", "1", "--failure-linger-s", "0.2")
    async with serving(tmp_path, nats_url, *options, engine=("--load-s", "60"), state=None) as one:
        assert await one.end() == 1
        assert "not loaded within 1 s" in one.program.stderr()
        await gone(one.program)


async def test_the_pod_needs_more_time_than_the_stages(tmp_path: Path) -> None:
    options = ("--grace-period-s", "10", "--drain-timeout-s", "100", "--engine-shutdown-timeout-s", "20")
    program = await Program.start(
        tmp_path, "serve", "m", "--engine", "sim", *options, "--print-termination-grace"
    )
    assert await program.end(within_s=60) == 0
    assert int(program.out.read_text()) >= 130
