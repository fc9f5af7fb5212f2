"""The engine host from the control process's side: calls, events, death, and nothing left behind."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from service.engine.process import (
    KEPT_LINES,
    MAX_LINE_BYTES,
    Accepted,
    Died,
    EngineProcess,
    Failed,
    Loaded,
    Progress,
    Refused,
)
from service.engine.protocol import EngineDied, EngineError, EngineInfo, EngineView, HostSettings
from statemachine.states import Admission, Mode, Tag
from tests.service.engine.hosts import Host, a_host, a_stream, group_of, until


async def test_a_host_loads_serves_and_is_gone() -> None:
    async with a_host() as host:
        assert [type(event) for event in host.events] == [Accepted, Progress, Loaded]
        (loaded,) = host.of(Loaded)
        assert isinstance(loaded, Loaded)
        assert loaded.info == EngineInfo(
            kind="sim",
            version=loaded.info.version,
            model="sim-model",
            max_model_len=131_072,
            weight_transfer=True,
            weight_transfer_backend="sim",
        )
        assert await _completion(host) == (503, "not_ready")
        assert await host.process.set_admission(Admission.OPEN, "") == 0
        assert await _completion(host) == (200, None)
    assert isinstance(await host.ended(), Died)


async def _completion(host: Host) -> tuple[int, str | None]:
    body = {"prompt": "a", "max_tokens": 2}
    async with aiohttp.ClientSession(host.url) as client, client.post("/v1/completions", json=body) as answer:
        return answer.status, (await answer.json()).get("error", {}).get("code")


async def test_every_call_reaches_the_engine() -> None:
    async with a_host() as host:
        engine = host.process
        await engine.pause(Mode.KEEP, clear_cache=False)
        assert await engine.ask() == EngineView(scheduling=False, session_open=False)
        await engine.sleep(2, Mode.ABORT)
        assert (await engine.ask()).asleep == (Tag.WEIGHTS, Tag.KV_CACHE)
        await engine.wake_up((Tag.WEIGHTS,))
        assert (await engine.ask()).asleep == (Tag.KV_CACHE,)
        await engine.wake_up((Tag.KV_CACHE, Tag.WEIGHTS))
        await engine.init_weight_transfer({"master_port": 1})
        await engine.start_weight_update()
        assert (await engine.ask()).meta_parameters
        await engine.update_weights([{"path": "/a"}, {"path": "/b"}])
        await engine.update_weights({"path": "/ü"})
        await engine.finish_weight_update()
        await engine.set_weight_version("v7")
        await engine.reset_caches()
        await engine.shutdown_weight_transfer()
        await engine.abort_requests()
        await engine.resume()
        assert await engine.ask() == EngineView(scheduling=True, session_open=False, weight_version="v7")


async def test_errors_of_the_engine_arrive_with_their_text() -> None:
    async with a_host() as host:
        with pytest.raises(EngineError, match="called without a matching start"):
            await host.process.finish_weight_update()
        await host.process.start_weight_update()
        with pytest.raises(EngineError, match=r"^update_weights failed: ü{900}"):
            await host.process.update_weights({"error": "ü" * 100_000})
        with pytest.raises(EngineError, match="outcome must be"):
            await host.process.simulate({"call": "pause"})
        with pytest.raises(EngineError, match="JSON"):
            await host.process.update_weights({"handle": b"bytes"})
        assert (await host.process.ask()).scheduling


async def test_eight_mebibytes_pass() -> None:
    async with a_host() as host:
        await host.process.init_weight_transfer({"x": "y" * (8 * 1024 * 1024)})


async def test_proxies_in_the_environment_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with a_host() as host:
        assert (await host.process.ask()).scheduling


async def test_arguments_at_fault_are_refused_in_one_line(tmp_path: Path) -> None:
    host = await Host(tmp_path, "--no-such-option").start()
    refused = await host.ended()
    assert isinstance(refused, Refused)
    assert "unrecognized arguments: --no-such-option" in refused.message
    with pytest.raises(EngineDied, match="unrecognized arguments"):
        await host.process.ask()
    await until(lambda: not group_of(host.pid))  # it ends by itself
    assert await host.process.kill() == ()


async def test_a_failed_load_says_why(tmp_path: Path) -> None:
    host = await Host(tmp_path, "--load-error", "out of memory").start()
    assert await host.ended() == Failed("out of memory")
    assert await host.process.kill() == ()


async def test_the_host_answers_while_the_engine_loads(tmp_path: Path) -> None:
    host = await Host(tmp_path, "--load-s", "600").start()
    await host.saw(Accepted)
    assert await host.process.set_admission(Admission.REFUSED, "wait") == 0
    await host.process.stop_listening()
    assert await host.process.kill() == ()
    assert isinstance(await host.ended(), Died)


async def test_requests_are_counted_once_and_known_at_once() -> None:
    async with a_host() as host:
        await host.process.set_admission(Admission.OPEN, "")
        async with a_stream(host), a_stream(host):
            await host.process.pause(Mode.KEEP, clear_cache=True)
            assert await host.process.set_admission(Admission.HELD, "paused") == 2
            asking = asyncio.create_task(_completion(host))
            await until(lambda: host.in_flight == 3)
            assert await host.process.set_admission(Admission.REFUSED, "asleep") >= 2
            assert await asking == (503, "engine_paused")
            await until(lambda: host.in_flight == 2)
        await until(lambda: host.in_flight == 0)  # the clients left, frozen as they were


async def test_held_streams_end_with_an_event() -> None:
    async with a_host() as host:
        await host.process.set_admission(Admission.OPEN, "")
        async with a_stream(host) as answer:
            await host.process.pause(Mode.KEEP, clear_cache=True)
            await host.process.set_admission(Admission.REFUSED, "discarded", end_held=True)
            last = (await answer.text()).split("\n\n")[-2]
            assert json.loads(last.removeprefix("data: "))["error"] == {
                "code": "engine_paused",
                "retryable": True,
                "message": "discarded",
            }
        await until(lambda: host.in_flight == 0)
        await host.process.resume()
        await host.process.pause(Mode.WAIT, clear_cache=True)  # nothing is left in the engine to drain


async def test_open_connections_outlive_the_listener() -> None:
    async with a_host() as host:
        await host.process.set_admission(Admission.OPEN, "")
        async with a_stream(host, max_tokens=500) as answer:
            await host.process.stop_listening()
            await host.process.stop_listening()
            with pytest.raises(aiohttp.ClientConnectorError):
                await _completion(host)
            assert (await answer.text()).endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
async def test_the_death_of_the_host_is_told_at_once(number: signal.Signals) -> None:
    async with a_host("--call-ms", "pause=600000") as host:
        calls: list[asyncio.Task[Any]] = [
            asyncio.create_task(host.process.pause(Mode.ABORT, clear_cache=True))
        ]
        await until_paused(host)
        os.kill(host.pid, number)
        killed_at = time.monotonic()
        died = await host.ended()
        assert died == Died(f"the engine host was killed by {number.name}")
        assert host.ended_at - killed_at < 0.2
        calls.append(asyncio.create_task(host.process.ask()))
        for call in calls:
            with pytest.raises(EngineDied, match=number.name):
                await asyncio.wait_for(call, 1)


async def until_paused(host: Host) -> None:
    while (await host.process.ask()).scheduling:
        await asyncio.sleep(0.005)


async def test_the_death_of_the_engine_reaches_everyone() -> None:
    async with a_host("--call-ms", "pause=600000") as host:
        await host.process.set_admission(Admission.OPEN, "")
        async with a_stream(host) as answer:
            call = asyncio.create_task(host.process.pause(Mode.WAIT, clear_cache=True))
            await until_paused(host)
            await host.process.simulate({"call": "now", "outcome": "die"})  # answered before
            assert await host.ended() == Died("simulated death")
            with pytest.raises(EngineDied, match="simulated death"):
                await asyncio.wait_for(call, 1)
            last = (await answer.text()).split("\n\n")[-2]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
        assert await _completion(host) == (503, "engine_failed")
        await until(lambda: not group_of(host.pid), within_s=5)  # it ends by itself


async def test_a_hanging_engine_blocks_calls_but_not_the_host() -> None:
    async with a_host() as host:
        await host.process.simulate({"call": "ask", "outcome": "hang"})
        calls = [asyncio.create_task(host.process.ask()), asyncio.create_task(host.process.resume())]
        assert await host.process.set_admission(Admission.CLOSED, "wedged") == 0
        await asyncio.sleep(0.05)
        assert not any(call.done() for call in calls)
        assert await host.process.kill() == ()
        for call in calls:
            with pytest.raises(EngineDied):
                await asyncio.wait_for(call, 1)


async def test_a_stopped_host_can_be_killed() -> None:
    async with a_host() as host:
        os.kill(host.pid, signal.SIGSTOP)
        call = asyncio.create_task(host.process.ask())
        assert await host.process.kill() == ()
        with pytest.raises(EngineDied):
            await asyncio.wait_for(call, 1)


async def test_an_abort_ends_a_drain() -> None:
    async with a_host() as host:
        await host.process.set_admission(Admission.OPEN, "")
        await host.process.simulate({"call": "pause", "outcome": "delay", "delay_s": 600})
        async with a_stream(host) as answer:
            call = asyncio.create_task(host.process.pause(Mode.WAIT, clear_cache=True))
            await until_paused(host)
            assert not call.done()
            await host.process.abort_requests()
            await asyncio.wait_for(call, 5)
            assert '"finish_reason":"abort"' in await answer.text()


async def test_a_caller_that_leaves_does_not_end_its_call() -> None:
    async with a_host("--call-ms", "set_weight_version=200") as host:
        call = asyncio.create_task(host.process.set_weight_version("v2"))
        await asyncio.sleep(0.1)  # on its way; the next call waits for its turn either way
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await host.process.reset_caches()
        assert (await host.process.ask()).weight_version == "v2"


async def test_shutdown_is_not_a_death() -> None:
    async with a_host() as host:
        await host.process.set_admission(Admission.OPEN, "")
        async with a_stream(host) as answer:
            await host.process.shutdown_engine(timeout_s=5)
            assert '"finish_reason":"abort"' in await answer.text()
        with pytest.raises(EngineDied, match="shut down"):
            await host.process.ask()
        assert not isinstance(host.last, Died)


async def test_kill_may_come_at_any_time(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert await host.process.kill() == ()
    with pytest.raises(EngineDied, match="before it was started"):
        await host.process.start()
    with pytest.raises(EngineDied, match="not started"):
        await host.process.ask()
    assert [event async for event in host.process.events()] == [
        Died("the engine host was killed before it was started")
    ]
    early = await Host(tmp_path).start()
    assert [*await asyncio.gather(early.process.kill(), early.process.kill())] == [(), ()]
    assert not group_of(early.pid)


class Shell(EngineProcess):
    """Something else in the place of the host."""

    script = ""

    def _command(self) -> list[str]:
        return ["/bin/sh", "-c", self.script]


def a_shell(folder: Path, script: str, lines: list[str]) -> Shell:
    shell = Shell(HostSettings("sim", "m"), socket.socket(), folder, lines.append)
    shell.script = script
    return shell


async def test_the_whole_group_is_killed_also_when_its_leader_is_gone(tmp_path: Path) -> None:
    lines: list[str] = []
    shell = a_shell(tmp_path, "trap '' TERM; sleep 600 & sleep 600 & echo ready; exit 7", lines)
    await shell.start()
    assert shell.pid is not None
    assert [event async for event in shell.events()] == [Died("the engine host exited with code 7")]
    assert len(group_of(shell.pid)) == 2
    assert await shell.kill() == ()
    assert group_of(shell.pid) == []
    assert lines == ["ready"]


async def test_output_comes_in_lines_whatever_is_written(tmp_path: Path) -> None:
    lines: list[str] = []
    noise = "import sys; sys.stdout.write('x' * 100_000); sys.stdout.flush()"
    script = (
        f"printf 'one\\n\\ntwo\\r 3%%\\r\\n'; {sys.executable} -c \"{noise}\"; echo; seq 360; printf 'end'"
    )
    shell = a_shell(tmp_path, script, lines)
    await shell.start()
    async for _ in shell.events():
        pass
    await shell.kill()
    assert lines[:3] == ["one", "two", " 3%"]
    noise_lines = [line for line in lines if line.startswith("x")]
    assert sum(map(len, noise_lines)) <= 100_000
    assert all(len(line) <= MAX_LINE_BYTES for line in noise_lines)
    assert lines[-361:] == [*map(str, range(1, 361)), "end"]
    assert list(shell.last_lines) == lines[-KEPT_LINES:]


async def test_a_path_too_long_for_a_socket_is_an_error_not_a_hang(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too long"):
        await Host(tmp_path / ("x" * 100)).start()


_PARENT = """
import asyncio, sys
from pathlib import Path
from typing import Any
from tests.service.engine.hosts import Host

async def main():
    host = await Host(Path(sys.argv[1])).start()
    await host.loaded()
    print(host.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_host_whose_parent_is_killed_is_gone(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PARENT, str(tmp_path), stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 20))
    assert group_of(pid) == [pid]
    parent.kill()
    await parent.wait()
    await until(lambda: not group_of(pid), within_s=5)


def test_the_control_side_imports_no_engine_and_no_web_server() -> None:
    code = "import sys, service.engine.process; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"vllm", "torch", "starlette", "uvicorn"} & set(modules.split())
