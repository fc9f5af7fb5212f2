"""How an instance ends, and that nothing of it is left. Each test ends one."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from bus.client import CommandFailed, NoAnswer
from bus.messages import Snapshot
from tests.broker import NatsServer, eventually
from tests.integration.served import (
    ALL_DOWN,
    CLOSED,
    LONG,
    NOT_SERVING,
    REAL,
    SERVING,
    SOON_S,
    Served,
    measure,
)
from tests.program import Program

pytestmark = REAL


@asynccontextmanager
async def events_of(served: Served) -> AsyncIterator[list[Snapshot]]:
    """What it publishes from now on."""
    seen: list[Snapshot] = []

    async def read() -> None:
        async for event in served.client.events():
            if event.instance == served.name:
                seen.append(event)  # noqa: PERF401 - for ever, not a list

    reading = asyncio.create_task(read())
    try:
        await served.engine.status()  # the subscription is older than that answer
        yield seen
    finally:
        reading.cancel()
        await asyncio.wait({reading})


async def all_closed(served: Served) -> dict[str, list[str]]:
    """What the Watch streams saw in all, once they have ended."""
    for watch in served.watches.values():
        await watch.shows(CLOSED)
    return {name: watch.statuses for name, watch in served.watches.items()}


async def test_death_of_engine_core_is_told_at_once(doomed: Served) -> None:
    served = doomed
    [core] = served.processes("VLLM::EngineCore")
    assert served.processes("VLLM::Worker")
    async with events_of(served) as events:
        running = await served.stream(max_tokens=LONG).reaches(5)
        draining = asyncio.create_task(served.engine.pause("wait"))
        await served.watches["readiness"].shows(NOT_SERVING)
        waiting = asyncio.create_task(served.engine.resume())
        await served.engine.status()  # the resume has arrived before that answer
        assert not running.ended
        os.kill(core, signal.SIGKILL)
        killed_s = time.monotonic()
        not_live_s = await served.watches["liveness"].shows(NOT_SERVING)
        assert await served.health() == ALL_DOWN
        assert not await served.routable()
        for command in (draining, waiting):
            with pytest.raises(CommandFailed) as failure:
                await command
            assert (failure.value.code, failure.value.retryable) == ("engine_failed", True)
        with pytest.raises(CommandFailed) as refusal:  # while it lingers
            await served.engine.resume()
        assert refusal.value.code == "engine_failed"
        await running.end()
        assert await served.program.end(SOON_S) == 1, served.program.last_words()
    ended_s = time.monotonic()
    measure("kill -9 of EngineCore → liveness NOT_SERVING", not_live_s - killed_s, limit_s=1)
    measure("kill -9 of EngineCore → exit", ended_s - killed_s)
    assert running.finish_reason is None
    assert running.error is not None
    assert (running.error["code"], running.error["retryable"]) == ("engine_failed", True)
    assert served.program.left() == []
    assert not served.ready_file.exists()
    said = served.program.stderr()
    assert said.startswith("watchkeeper: error: the engine failed: ") and said.count("\n") == 1
    seen = await all_closed(served)
    assert seen["liveness"] == [SERVING, NOT_SERVING, CLOSED]
    for name in ("vllm.Inference", "vllm.Control", ""):
        assert seen[name] == [NOT_SERVING, SERVING, NOT_SERVING, CLOSED]
    # The events follow what they tell of: the one of the pause may be among them.
    assert [(event.state, event.live) for event in events if event.state != "paused"] == [
        ("failed", False),
        ("shutting_down", False),
        ("stopped", False),
    ]
    assert (await served.client.states())[served.name].state == "stopped"


async def test_a_stopped_worker_is_wedged(doomed: Served) -> None:
    """Nothing dies and nothing answers: only a question through EngineCore to every worker tells."""
    served = doomed
    [worker] = served.processes("VLLM::Worker")
    async with events_of(served) as events:
        os.kill(worker, signal.SIGSTOP)
        stopped_s = time.monotonic()
        # --health-interval-s and --health-timeout-s, and as much again on a busy machine.
        assert await served.program.end(60) == 1, served.program.last_words()
    measure("SIGSTOP of a worker → exit", time.monotonic() - stopped_s)
    failed = next(event for event in events if event.state == "failed")
    assert failed.reasons == ["the engine failed: wedged"]
    assert served.program.left() == []
    seen = await all_closed(served)
    assert seen["liveness"] == [SERVING, NOT_SERVING, CLOSED]


async def test_sigterm_lets_requests_finish(doomed: Served) -> None:
    served = doomed
    answer = await served.stream(max_tokens=400).reaches(5)
    async with events_of(served) as events:
        served.terminate()
        await served.watches["readiness"].shows(NOT_SERVING)
        assert await served.program.end(60) == 0, served.program.last_words()
    await answer.end()
    assert (answer.finish_reason, answer.count, answer.error) == ("length", 400, None)
    assert served.program.left() == []
    assert served.program.stderr() == ""
    assert not served.ready_file.exists()
    assert not await served.routable()
    assert [event.state for event in events][-1] == "stopped"
    assert {event.state for event in events} == {"shutting_down", "stopped"}
    assert (await served.client.states())[served.name].state == "stopped"
    with pytest.raises(NoAnswer):
        await served.engine.status()
    seen = await all_closed(served)
    # Who watches only liveness is never told that something was wrong.
    assert seen["liveness"] == [SERVING, CLOSED]
    for name in ("readiness", "vllm.Inference", "vllm.Control", ""):
        assert seen[name][-3:] == [SERVING, NOT_SERVING, CLOSED]


async def test_nothing_survives_the_control_process(doomed: Served) -> None:
    served = doomed
    assert len(served.processes("")) >= 4  # itself, the host, EngineCore, a worker
    answer = await served.stream(max_tokens=LONG).reaches(5)
    served.program.process.kill()
    killed_s = time.monotonic()
    await eventually(lambda: not served.program.left(), within_s=SOON_S)
    measure("kill -9 of the control process → all gone", time.monotonic() - killed_s, limit_s=5)
    await served.program.process.wait()
    with pytest.raises(aiohttp.ClientError):
        await answer.end()
    # The keys it could not delete are forgotten.
    await eventually(lambda: forgotten(served), within_s=30, every_s=0.2)
    assert await all_closed(served)


async def forgotten(served: Served) -> bool:
    return not await served.routable()


async def test_weights_that_cannot_be_loaded(broker: NatsServer, models: Path, tmp_path: Path) -> None:
    """The engine's fault, not that of the command line: exit code 1, in one line too."""
    broken = tmp_path / "model"
    broken.mkdir()
    for file in (models / "a").iterdir():
        content = file.read_bytes()
        (broken / file.name).write_bytes(content[:-1000] if file.suffix == ".safetensors" else content)
    program = await Program.start(
        tmp_path,
        *("serve", str(broken), "--nats", broker.url, "--failure-linger-s", "0"),
        *("--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0"),
        *("--", "--enforce-eager", "--kv-cache-memory-bytes", "64M"),
    )
    try:
        assert await program.end(600) == 1, program.last_words()
        assert program.left() == []
        said = program.stderr()
        assert said.startswith("watchkeeper: error: the engine failed: loading failed: "), said
        assert said.count("\n") == 1
    finally:
        await program.kill()
