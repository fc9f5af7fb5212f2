"""The host process by itself: who it listens to, what it imports, how it starts."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from service.engine.process import Accepted, Died, Loaded
from service.engine.protocol import EngineView
from tests.service.engine.hosts import Host, a_host, group_of


def test_a_host_without_its_parent_does_not_start() -> None:
    command = [sys.executable, "-m", "service.engine.host", "--kind", "sim", "--socket", "/nowhere"]
    command += ["--http-fd", "0", "--parent-pid", "1", "model"]
    assert subprocess.run(command, check=False, timeout=20).returncode == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_are_the_control_processs_affair(number: signal.Signals) -> None:
    async with a_host() as host:
        for _ in range(3):
            os.kill(host.pid, number)
        assert await host.process.ask() == EngineView(scheduling=True, session_open=False)


async def test_a_host_has_a_group_and_a_session_of_its_own() -> None:
    async with a_host() as host:
        assert os.getpgid(host.pid) == os.getsid(host.pid) == host.pid != os.getpgid(0)


async def test_its_children_import_nothing_heavy_again() -> None:
    """multiprocessing's spawn imports the main module in each of vLLM's processes."""
    code = "import sys, service.engine.host; print(*sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    assert not {"asyncio", "grpc", "uvloop", "starlette", "vllm"} & set(output.decode().split())


async def test_what_a_folder_holds_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service may be started anywhere, and its packages have everyday names."""
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "bus.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    async with a_host() as host:
        assert host.of(Accepted)


async def test_events_wait_for_their_reader(tmp_path: Path) -> None:
    host = Host(tmp_path, "--load-s", "0")
    await host.process.start()
    async with asyncio.timeout(10):
        async for event in host.process.events():
            if isinstance(event, Loaded):
                break
    assert await host.process.kill() == ()


async def test_start_and_kill_again_and_again_leaves_nothing(tmp_path: Path) -> None:
    """The end may come at any moment of a start."""
    pids = []
    for round_ in range(6):
        host = await Host(tmp_path, "--load-s", "0").start()
        pids.append(host.pid)
        await asyncio.sleep(round_ * 0.1)
        assert await host.process.kill() == ()
        assert isinstance(await host.ended(), Died)
    assert not any(map(group_of, pids))
    assert os.listdir(tmp_path) == []


async def test_a_host_starts_soon(tmp_path: Path) -> None:
    started = time.monotonic()
    host = await Host(tmp_path, "--load-s", "0").start()
    await host.loaded()
    took_s = time.monotonic() - started
    await host.process.kill()
    assert took_s < 10  # 0.5 s on two idle cores; a machine under test load is slower
