"""A real engine host with the simulated engine, as the control process has it."""

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from service.engine.process import Died, EngineProcess, Failed, HostEvent, InFlight, Loaded, Refused
from service.engine.protocol import HostSettings


class Host:
    """One host process, the events it sent so far, and a way to its HTTP server."""

    def __init__(self, folder: Path, *engine_args: str) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = "http://{}:{}".format(*listener.getsockname())
        self.lines: list[str] = []
        self.folder = folder
        settings = HostSettings("sim", "sim-model", list(engine_args))
        self.process = EngineProcess(settings, listener, folder, self.lines.append)
        self.events: list[HostEvent] = []
        self.ended_at = 0.0

    async def start(self) -> "Host":
        await self.process.start()
        self._reading = asyncio.create_task(self._read())
        return self

    async def loaded(self) -> "Host":
        await self.saw(Loaded)
        return self

    async def saw(self, kind: type[HostEvent]) -> HostEvent:
        """The first event of that kind."""
        await until(lambda: self.of(kind) or isinstance(self.last, Refused | Failed | Died))
        assert self.of(kind), f"{self.events}\n" + "\n".join(self.process.last_lines)
        return self.of(kind)[0]

    def of(self, kind: type[HostEvent]) -> list[HostEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def last(self) -> HostEvent | None:
        return self.events[-1] if self.events else None

    @property
    def in_flight(self) -> int:
        counts = [event.count for event in self.events if isinstance(event, InFlight)]
        return counts[-1] if counts else 0

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    async def ended(self) -> HostEvent:
        """The last event of this host's life."""
        async with asyncio.timeout(10):
            await self._reading
        return self.events[-1]

    async def _read(self) -> None:
        async for event in self.process.events():
            self.events.append(event)
        self.ended_at = time.monotonic()


@asynccontextmanager
async def a_host(*engine_args: str) -> AsyncIterator[Host]:
    """A host that is loaded; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="wk-") as folder:
        host = await Host(Path(folder), *engine_args).start()
        try:
            yield await host.loaded()
        finally:
            assert await host.process.kill() == ()
            assert not group_of(host.pid)
            assert os.listdir(folder) == []


@asynccontextmanager
async def a_stream(host: Host, max_tokens: int = 100_000) -> AsyncIterator[aiohttp.ClientResponse]:
    """A completion that is being streamed, its first token read."""
    body = {"prompt": "a", "stream": True, "max_tokens": max_tokens}
    async with aiohttp.ClientSession(host.url) as client, client.post("/v1/completions", json=body) as answer:
        assert answer.status == 200
        await answer.content.readuntil(b"\n\n")
        yield answer


def group_of(group: int) -> list[int]:
    """Processes of a group that are alive."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = path.read_bytes().rpartition(b")")[2].split()[:3]
        except OSError:
            continue
        if int(process_group) == group and state not in (b"Z", b"X"):
            members.append(int(path.parent.name))
    return members


async def until(condition: Callable[[], object], within_s: float = 30) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
