"""One health check on a new connection, and what it makes of servers that do not play along."""

import asyncio
import socket
from collections.abc import AsyncIterator

import grpc
import pytest

from service.grpc_listener import make_server
from service.health_server import HealthServer
from service.options import Address
from service.probe import Outcome, probe


@pytest.fixture
async def server() -> AsyncIterator[HealthServer]:
    server = await HealthServer.bind("127.0.0.1:0", {"up": True, "": False})
    yield server
    await server.close()


async def test_the_status_decides_the_exit_code(server: HealthServer) -> None:
    found = await probe(server.address, "up", 5, 5)
    assert (found.outcome, found.text) == (Outcome.SERVING, "status: SERVING")
    found = await probe(server.address, connect_timeout_s=5, rpc_timeout_s=5)
    assert (found.outcome, found.text) == (Outcome.NOT_SERVING, "status: NOT_SERVING")
    found = await probe(server.address, "unknown", 5, 5)
    assert found.outcome is Outcome.RPC_FAILED
    assert found.text == "the check failed: NOT_FOUND: unknown service 'unknown'"
    assert [outcome.value for outcome in Outcome] == [0, 2, 3, 4]


async def test_a_proxy_in_the_environment_is_not_asked(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:9")
    assert (await probe(server.address, "up", 5, 5)).outcome is Outcome.SERVING


async def test_nobody_listens() -> None:
    with socket.socket() as unused:  # bound and not listening: refuses, and nobody else gets it
        unused.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", unused.getsockname()[1])
        found = await probe(address, "", 30, 30)  # refused at once, not when the time is over
    assert found.outcome is Outcome.NOT_CONNECTED
    assert f"cannot connect to {address}: " in found.text
    assert "Connection refused" in found.text
    assert "\n" not in found.text


async def test_no_such_host() -> None:
    found = await probe(Address("no-such-host.invalid", 1), "", 5, 5)
    assert found.outcome is Outcome.NOT_CONNECTED


async def test_a_server_that_accepts_and_says_nothing() -> None:
    connections: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1", 0)
    async with silent:
        address = Address("127.0.0.1", silent.sockets[0].getsockname()[1])
        found = await probe(address, "", connect_timeout_s=0.2)
        for writer in connections:
            writer.close()
    assert found.outcome is Outcome.NOT_CONNECTED
    assert found.text == f"cannot connect to {address}: no gRPC server answered within 0.2 s"


async def test_a_server_that_speaks_http_1() -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    web = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with web:
        found = await probe(Address("127.0.0.1", web.sockets[0].getsockname()[1]), "", 5, 5)
    assert found.outcome is Outcome.NOT_CONNECTED


async def test_a_health_service_that_does_not_answer() -> None:
    async def hang(request: bytes, context: object) -> bytes:
        await asyncio.Event().wait()
        return b""

    handler = grpc.unary_unary_rpc_method_handler(hang)
    service = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler})
    hanging = make_server()
    hanging.add_generic_rpc_handlers((service,))
    port = hanging.add_insecure_port("127.0.0.1:0")
    await hanging.start()
    found = await probe(Address("127.0.0.1", port), "", 5, rpc_timeout_s=0.1)
    await hanging.stop(None)
    assert found.outcome is Outcome.RPC_FAILED
    assert "DEADLINE_EXCEEDED" in found.text
