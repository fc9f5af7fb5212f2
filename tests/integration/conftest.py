"""Instances of the real thing. Loading one takes long, so tests share one and leave it serving.

async def test_x(served): ...           # serves the weights it was started on; leave it so
async def test_y(doomed): ...           # one that the test may end
async def test_z(answers_of_b): ...     # what an engine started on the other checkpoint answers
"""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from bus.client import Client
from service.engine.tiny_model import write_tiny_model
from tests.broker import NatsServer
from tests.integration.served import Served


@pytest.fixture(scope="session", autouse=True)
def bytecode(pytestconfig: pytest.Config) -> Iterator[None]:
    """Where Python may not write beside its sources, every process of every engine would compile all of
    vLLM and torch anew."""
    with pytest.MonkeyPatch.context() as patch:
        cache = getattr(pytestconfig, "cache", None)
        if os.environ.get("PYTHONDONTWRITEBYTECODE") and cache is not None:
            patch.delenv("PYTHONDONTWRITEBYTECODE")
            patch.setenv("PYTHONPYCACHEPREFIX", str(cache.mkdir("bytecode")))
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a`, what instances are started on, and `b`, another checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "a", seed=1)
    write_tiny_model(folder / "b", seed=2)
    return folder


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def broker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
    server = await NatsServer(tmp_path_factory.mktemp("nats")).start()
    yield server
    await server.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(broker: NatsServer) -> AsyncIterator[Client]:
    async with Client.connect(broker.url, issuer="integration") as client:
        yield client


class Fleet:
    """Starts instances when they are needed."""

    def __init__(self, folder: Path, models: Path, broker: NatsServer, client: Client) -> None:
        self._folder, self._models, self._broker, self._client = folder, models, broker, client
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        self._started: list[Served] = []
        self._shared: Served | None = None
        self._spare: Served | None = None

    async def _start(self, model: str, client: Client) -> Served:
        served = await Served.start(self._folder, self._models / model, client, self._http, self._broker.url)
        self._started.append(served)
        return await served.loaded()

    async def shared(self) -> Served:
        """One that serves the weights of `a`; another one if a test did not leave it so."""
        if self._shared is None or not await is_as_started(self._shared):
            if self._shared is not None:
                await self._shared.close()
            self._shared = await self._start("a", self._client)
        return self._shared

    async def of_b(self) -> Served:
        """One of another component, so that nobody takes it for the one that is shared."""
        if self._spare is None:
            client = Client(self._client.bus, component="fresh", issuer="integration")
            self._spare = await self._start("b", client)
        return self._spare

    async def another(self) -> Served:
        """One more of the shared one's component, on the same weights; who asks for it ends it."""
        return await self._start("a", self._client)

    async def doomed(self) -> Served:
        """One that serves, and that nobody asks for any more."""
        for served in (self._spare, self._shared):
            if served is not None and await is_as_started(served):
                break
        else:
            served = await self._start("a", self._client)
        if served is self._spare:
            self._spare = None
        if served is self._shared:
            self._shared = None
        return served

    async def close(self) -> None:
        for served in self._started:
            await served.close()
        await self._http.close()


async def is_as_started(served: Served) -> bool:
    if not served.alive:
        return False
    state = await served.state()
    if not (state.state == "serving" and state.settled and state.ready):
        return False
    return await served.complete_all() == served.answers


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet(
    tmp_path_factory: pytest.TempPathFactory, models: Path, broker: NatsServer, client: Client
) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("instances"), models, broker, client)
    yield fleet
    await fleet.close()


@pytest_asyncio.fixture(loop_scope="session")
async def served(fleet: Fleet) -> Served:
    return await fleet.shared()


@pytest_asyncio.fixture(loop_scope="session")
async def doomed(fleet: Fleet) -> Served:
    return await fleet.doomed()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def answers_of_b(fleet: Fleet) -> list[str]:
    """What an engine that was started on `b` makes of the prompts."""
    return (await fleet.of_b()).answers
