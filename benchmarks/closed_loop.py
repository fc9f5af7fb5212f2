"""Clients that ask again as soon as they are answered, at so little cost that they measure the other side."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

import msgspec

PATH = "/v1/completions"


def request_of(port: int, body: dict[str, object], request_id: str | None = None) -> bytes:
    encoded = msgspec.json.encode(body)
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    if request_id is not None:
        head += f"X-Request-Id: {request_id}\r\n"
    return f"{head}Content-Length: {len(encoded)}\r\n\r\n".encode() + encoded


class Connection(asyncio.Protocol):
    """One connection to an HTTP server, with one request at a time."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._left: int | None = None
        """Bytes to come; None: the head is not complete, -1: until the last chunk."""
        self._answer: asyncio.Future[bytes] | None = None

    @classmethod
    async def to(cls, port: int) -> "Connection":
        _, made = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none, and acts as one

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("closed before the answer was complete"))

    async def ask(self, request: bytes) -> bytes:
        """The whole answer, with its head."""
        self._parts, self._left = [], None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if self._left is None:
            so_far = b"".join(self._parts)
            head, separator, body = so_far.partition(b"\r\n\r\n")
            if not separator:
                return
            lower = head.lower()
            at = lower.find(b"content-length:")
            self._left = int(lower[at + 15 :].split(b"\r\n", 1)[0]) - len(body) if at >= 0 else -1
        elif self._left > 0:
            self._left -= len(data)
        ended = self._left == 0 or (self._left == -1 and data.endswith(b"0\r\n\r\n"))
        if ended and self._answer is not None and not self._answer.done():
            self._answer.set_result(b"".join(self._parts))

    def close(self) -> None:
        self._transport.close()


Ask = Callable[[], Awaitable[bytes]]
"""One request, whatever it takes, and the last answer to it."""


@dataclass
class Measured:
    """What one round has shown.

    Attributes:
        took_s: of each request.
    """

    seconds: float
    took_s: list[float] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return len(self.took_s) / self.seconds

    def quantile_ms(self, percent: int) -> float:
        return 1000 * statistics.quantiles(self.took_s, n=100, method="inclusive")[percent - 1]


async def measure(asks: list[Ask], seconds: float, good: Callable[[bytes], bool]) -> Measured:
    """Keep all busy for so long.

    Raises:
        RuntimeError: an answer was not good.
    """
    begin_s = time.perf_counter()
    measured = Measured(seconds)

    async def client(ask: Ask) -> None:
        while (sent_s := time.perf_counter()) < begin_s + seconds:
            answer = await ask()
            if not good(answer):
                raise RuntimeError(f"not a good answer: {answer[:500]!r}")
            measured.took_s.append(time.perf_counter() - sent_s)

    await asyncio.gather(*map(client, asks))
    measured.seconds = time.perf_counter() - begin_s
    return measured
