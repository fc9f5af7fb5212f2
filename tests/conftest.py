"""What all tests may use: a real nats-server on a free port.

async def test_x(nats_server): ...        # running; `nats_server.url`
async def test_y(start_nats): server = await start_nats(config="...")
"""

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.broker import NatsServer
from tests.measured import measured

# The same stories in every run: what a random one would find is found by raising max_examples, not
# by somebody whose change has nothing to do with it.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

ON_REAL_ENGINES = ("tests/integration/", "tests/service/engine/test_vllm_")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2` all tests on real engines stay in one worker: they share instances, and one engine at a
    time is enough for two cores. (Groups by mark have no effect with pytest 9.2 and pytest-xdist 3.8.)"""
    from xdist.scheduler import LoadScopeScheduling

    class RealOnesTogether(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            return "real" if nodeid.startswith(ON_REAL_ENGINES) else nodeid

    return RealOnesTogether(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["measured"] = measured


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    measured.update(getattr(node, "workeroutput", {}).get("measured", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if measured:
        terminalreporter.section("measured")
        for what, how_much in measured.items():
            terminalreporter.line(f"{what}: {how_much}")


StartNats = Callable[..., Awaitable[NatsServer]]


@pytest.fixture
async def start_nats(tmp_path: Path) -> AsyncIterator[StartNats]:
    """Starts nats-servers; takes the arguments of `NatsServer` after the folder."""
    servers: list[NatsServer] = []

    async def start(config: str = "", jetstream: bool = True, port: int | None = None) -> NatsServer:
        folder = tmp_path / f"nats-{len(servers)}"
        folder.mkdir()
        server = NatsServer(folder, config, jetstream, port)
        servers.append(server)
        return await server.start()

    yield start
    for server in servers:
        await server.stop(signal.SIGKILL)


@pytest.fixture
async def nats_server(start_nats: StartNats) -> NatsServer:
    """A running nats-server with JetStream."""
    return await start_nats()


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    return nats_server.url
