"""The client of the data path, against servers that say exactly what a test wants."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from service.router.http_client import HIGH_WATER_BYTES, Disconnected, HttpClient, NotConnected, origin_of
from tests.broker import eventually, free_port

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Two: a\r\nx-two: b\r\n\r\nhello"


class Server:
    """
    Attributes:
        connections: how many were ever made.
        open: how many there are.
        requests: heads and bodies as they came.
    """

    def __init__(self, answer: Answer) -> None:
        self.connections = self.open = 0
        self.requests: list[bytes] = []
        self.url = ""
        self._answer = answer

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(size))
                await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[Server, HttpClient]]:
    server = Server(answer)
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    client = HttpClient(connect_timeout_s=5, keep_alive_s=5)
    try:
        yield server, client
    finally:
        client.close()
        listening.close()
        await listening.wait_closed()


def says(*parts: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return answer


def then_closes(*parts: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await says(*parts)(reader, writer)
        writer.close()

    return answer


async def ask(server: Server, client: HttpClient, body: bytes = b"{}") -> bytes:
    response = await client.post(server.url, "/v1/completions?a=%2F", {"X-Request-Id": "é"}, body)
    return await response.read()


async def test_a_request_and_its_answer() -> None:
    async with serving(says(HELLO)) as (server, client):
        response = await client.post(server.url, "/v1/x?a=%2F", {"X-Request-Id": "1"}, b"body")
        assert response.status == 200 and await response.read() == b"hello"
        assert response.headers.getall("x-Two") == ["a", "b"]
        host = server.url.removeprefix("http://").encode()
        lines = server.requests[0].split(b"\r\n")
        assert lines[0] == b"POST /v1/x?a=%2F HTTP/1.1" and lines[-1] == b"body"
        assert set(lines[1:-2]) == {b"Host: " + host, b"X-Request-Id: 1", b"Content-Length: 4"}


async def test_a_connection_is_used_again_and_two_at_once_need_two() -> None:
    async with serving(says(HELLO)) as (server, client):
        for _ in range(3):
            assert await ask(server, client) == b"hello"
        assert server.connections == 1
        assert await asyncio.gather(ask(server, client), ask(server, client)) == [b"hello"] * 2
        assert server.connections == 2


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n"]
)
async def test_a_connection_that_ends_with_its_answer_is_not_used_again(head: bytes) -> None:
    async with serving(then_closes(head + b"hello")) as (server, client):
        for _ in range(2):
            assert await ask(server, client) == b"hello"
        assert server.connections == 2


async def test_one_that_was_closed_meanwhile_is_not_used_again() -> None:
    async with serving(then_closes(HELLO)) as (server, client):
        assert await ask(server, client) == b"hello"
        await eventually(lambda: not client._idle)
        assert await ask(server, client) == b"hello"


async def test_chunks_arrive_as_they_are_sent() -> None:
    go_on = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await go_on.wait()
        writer.write(b"2\r\nde\r\n0\r\n\r\n")

    async with serving(answer) as (server, client):
        response = await client.post(server.url, "/", {}, b"")
        assert await response.readany() == b"abc"
        go_on.set()
        assert [await response.readany(), await response.readany()] == [b"de", b""]
        assert await ask(server, client) == b"abcde" and server.connections == 1


async def test_what_comes_before_the_answer_is_not_the_answer() -> None:
    async with serving(says(b"HTTP/1.1 100 Continue\r\n\r\n", HELLO)) as (server, client):
        assert await ask(server, client) == b"hello"


@pytest.mark.parametrize(
    "part",
    [b"", b"HTTP/1.1 200 OK\r\nContent-", b"no HTTP at all\r\n\r\n"],
    ids=["nothing", "half a head", "nonsense"],
)
async def test_without_a_head_there_is_no_answer(part: bytes) -> None:
    async with serving(then_closes(part)) as (server, client):
        with pytest.raises(Disconnected):
            await client.post(server.url, "/", {}, b"")


@pytest.mark.parametrize(
    "part",
    [HELLO[:-1], b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"],
    ids=["too short", "no last chunk"],
)
async def test_an_answer_that_breaks_is_no_whole_one(part: bytes) -> None:
    async with serving(then_closes(part)) as (server, client):
        response = await client.post(server.url, "/", {}, b"")
        with pytest.raises(Disconnected):
            await response.read()
        response = await client.post(server.url, "/", {}, b"")
        assert (await response.readany()).startswith(b"hell")  # what came is not lost
        with pytest.raises(Disconnected):
            await response.readany()


async def test_a_request_that_is_given_up_ends_its_connection() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)

    async with serving(silent) as (server, client):
        asking = asyncio.create_task(ask(server, client))
        await eventually(lambda: server.requests)
        asking.cancel()
        await eventually(lambda: server.open == 0)


async def test_an_answer_that_is_closed_ends_its_connection_and_wakes_its_reader() -> None:
    async def begins(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO[:-2])
        await reader.read(1)

    async with serving(begins) as (server, client):
        response = await client.post(server.url, "/", {}, b"")
        reading = asyncio.create_task(response.read())
        await eventually(lambda: response._waiter is not None)
        response.close()
        with pytest.raises(Disconnected, match="closed from here"):
            await reading
        await eventually(lambda: server.open == 0)


async def test_a_slow_reader_slows_the_server_down_and_loses_nothing() -> None:
    size = 64 * HIGH_WATER_BYTES
    sent = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(64):
            writer.write(b"x" * HIGH_WATER_BYTES)
            await writer.drain()
            sent += HIGH_WATER_BYTES

    async with serving(answer) as (server, client):
        response = await client.post(server.url, "/", {}, b"")
        await eventually(lambda: response._size > HIGH_WATER_BYTES)
        # What the kernel holds is some MB; the rest waits until it is asked for.
        assert response._size < size and sent < size
        got = 0
        while data := await response.readany():
            got += len(data)
        assert got == size and await ask(server, client) == b"x" * size


async def test_nobody_there() -> None:
    client = HttpClient(connect_timeout_s=5, keep_alive_s=5)
    with pytest.raises(NotConnected, match="cannot connect"):
        await client.post(f"http://127.0.0.1:{free_port()}", "/", {}, b"")


def test_origins() -> None:
    assert (
        origin_of("http://[::1]:80") == ("::1", 80, False)
        and origin_of("http://[::1]:80").authority == "[::1]:80"
    )
    assert origin_of("https://a") == ("a", 443, True)
