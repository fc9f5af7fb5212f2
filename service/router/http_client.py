"""A lean HTTP/1.1 client for the data path: what aiohttp's takes for a request costs more than all the rest.

Parsing is httptools', as in uvicorn. One request at a time on a connection; idle ones are kept.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools
from multidict import CIMultiDict

HIGH_WATER_BYTES = 256 * 1024
"""So much may wait for a slow client; then the instance has to wait, too."""


class NotConnected(ConnectionError):
    """No connection could be made: the request has reached nobody."""


class Disconnected(ConnectionError):
    """The connection was closed, or broke, before the answer was complete."""


class Origin(NamedTuple):
    host: str
    port: int
    tls: bool

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@lru_cache(maxsize=4096)
def origin_of(url: str) -> Origin:
    """Where `http://host:port` leads."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    return Origin(parts.hostname or "", parts.port or (443 if tls else 80), tls)


class Response:
    """An answer whose head is here, and whose body is or will be.

    Attributes:
        headers: names without regard to case.
    """

    def __init__(self, connection: "_Connection", status: int, headers: CIMultiDict[str]) -> None:
        self.status, self.headers = status, headers
        self._connection: _Connection | None = connection
        self._chunks: list[bytes] = []
        self._size = 0
        self._complete = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def content_type(self) -> str:
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            Disconnected: it was not complete.
        """
        while not self._complete:
            if self._error is not None:
                raise self._error
            self._resume()
            await self._news()
        return self._taken()

    async def readany(self) -> bytes:
        """What has come of the body; nothing at its end. Raises as `read`, once all that came was read."""
        while not self._chunks and not self._complete:
            if self._error is not None:
                raise self._error
            await self._news()
        return self._taken()

    def close(self) -> None:
        """Break the connection, unless the body is complete."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self.failed(Disconnected("closed from here"))
            connection.abort()

    # What the connection tells.

    def body(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size += len(data)
        if self._size > HIGH_WATER_BYTES and self._connection is not None:
            self._connection.pause()
        self._wake()

    def completed(self) -> None:
        self._complete = True
        self._connection = None
        self._wake()

    def failed(self, error: Exception) -> None:
        if not self._complete and self._error is None:
            self._error = error
            self._wake()

    def _taken(self) -> bytes:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._resume()
        return data

    def _resume(self) -> None:
        if self._size > HIGH_WATER_BYTES and self._connection is not None:
            self._connection.resume()
        self._size = 0

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection(asyncio.Protocol):
    """One connection, and the answer that comes on it."""

    def __init__(self, client: "HttpClient", origin: Origin) -> None:
        self._client, self._origin = client, origin
        self._parser = httptools.HttpResponseParser(self)
        self._head: asyncio.Future[Response] | None = None
        self._response: Response | None = None
        self._headers: list[tuple[str, str]] = []
        self._until_close = False
        self.idle_since_s = 0.0

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing()

    def send(self, request: bytes) -> "asyncio.Future[Response]":
        """Send a request; the future is the head of its answer."""
        self._head = asyncio.get_running_loop().create_future()
        self._response = None
        self._transport.write(request)
        return self._head

    def abort(self) -> None:
        self._transport.abort()

    def pause(self) -> None:
        if self.usable:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.usable:
            self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none, and acts as one

    def data_received(self, data: bytes) -> None:
        if self._head is None and self._response is None:
            self.abort()  # nobody has asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(Disconnected(f"no HTTP came back: {error}"))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._client.gone(self._origin, self)
        if error is None and self._until_close and self._response is not None:
            self._response.completed()
        else:
            self._end(Disconnected(str(error) if error else "the connection was closed"))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        given, self._headers = self._headers, []
        if status < 200 or self._head is None:  # 100 Continue and the like: the answer is yet to come
            return
        headers = CIMultiDict(given)
        self._until_close = "Content-Length" not in headers and "Transfer-Encoding" not in headers
        self._response = Response(self, status, headers)
        head, self._head = self._head, None
        if not head.done():
            head.set_result(self._response)

    def on_body(self, data: bytes) -> None:
        if self._response is not None:
            self._response.body(data)

    def on_message_complete(self) -> None:
        response, self._response = self._response, None
        if response is None:
            return
        response.completed()
        if self._parser.should_keep_alive() and self.usable:
            # The parser is in the middle of its work: nothing may be sent before it returns.
            self._client.idle(self._origin, self)
        else:
            self._transport.close()

    def _end(self, error: Exception) -> None:
        if self._head is not None and not self._head.done():
            self._head.set_exception(error)
        self._head = None
        if self._response is not None:
            self._response.failed(error)


class HttpClient:
    """Connections to all instances."""

    def __init__(self, connect_timeout_s: float, keep_alive_s: float) -> None:
        """
        Args:
            keep_alive_s: how long an idle connection is used again; less than servers keep it, lest a
                request goes out while they close it.
        """
        self._connect_timeout_s, self._keep_alive_s = connect_timeout_s, keep_alive_s
        self._idle: dict[Origin, deque[_Connection]] = {}
        self._tls: ssl.SSLContext | None = None
        self._closed = False

    async def post(self, url: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Send a request and wait for the head of its answer. Cancelled, it breaks the connection.

        Args:
            url: `http://host:port`.
            path: from the slash on, with the query.

        Raises:
            NotConnected
            Disconnected
        """
        origin = origin_of(url)
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {origin.authority}\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
        )
        # As aiohttp reads headers.
        request = head.encode("utf-8", "surrogateescape") + body
        connection = self._kept(origin) or await self._connect(origin)
        try:
            return await connection.send(request)
        except BaseException:
            connection.abort()
            raise

    def close(self) -> None:
        self._closed = True
        for kept in self._idle.values():
            for connection in tuple(kept):
                connection.abort()

    def idle(self, origin: Origin, connection: _Connection) -> None:
        """A connection may be used again."""
        if self._closed:
            connection.abort()
            return
        connection.idle_since_s = asyncio.get_running_loop().time()
        self._idle.setdefault(origin, deque()).append(connection)

    def gone(self, origin: Origin, connection: _Connection) -> None:
        """A connection is closed."""
        kept = self._idle.get(origin)
        if kept is not None and connection in kept:
            kept.remove(connection)
            if not kept:
                del self._idle[origin]

    def _kept(self, origin: Origin) -> _Connection | None:
        kept = self._idle.get(origin)
        oldest_s = asyncio.get_running_loop().time() - self._keep_alive_s
        while kept:
            connection = kept.pop()
            if connection.usable and connection.idle_since_s >= oldest_s:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin) -> _Connection:
        tls = None
        if origin.tls:
            tls = self._tls = self._tls or ssl.create_default_context()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self, origin), origin.host, origin.port, ssl=tls
                )
        except TimeoutError:
            raise NotConnected(f"no connection within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            raise NotConnected(f"cannot connect: {' '.join(str(error).split())}") from error
        return connection
