"""One attempt at one instance: send the request, and judge what comes of it before a client sees it."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from service.router import sse
from service.router.breaker import Outcome
from service.router.http_client import HttpClient, NotConnected, Response
from service.router.pool import Booking, Loss

CONNECT_TIMEOUT_S = 2.0
KEEP_ALIVE_S = 3.0
"""Less than the 5 s of uvicorn and vLLM: a connection must not be used while it is being closed."""
LAST_BYTES_S = 1.0
"""How long to wait for the end of a body after its last event, so that the connection can be used again."""

REFUSALS = ("engine_paused", "not_ready", "shutting_down", "busy")
"""Error codes of an instance that is well and takes no requests now."""


class Failure(Exception):
    """The attempt has come to nothing, and the client has seen nothing of it.

    Attributes:
        outcome: what it says about the instance.
        reached: the engine may have begun with the request.
        refused: the instance is well, and says that it takes no requests now.
        retry_after_s: how long it wants to be left alone then.
        timed_out: it did not answer in time.
        response: status, content type and body of its answer, if there was one.
    """

    def __init__(
        self,
        reason: str,
        outcome: Outcome = Outcome.BAD,
        reached: bool = True,
        refused: bool = False,
        retry_after_s: float = 1.0,
        timed_out: bool = False,
        response: "Whole | None" = None,
    ) -> None:
        super().__init__(reason)
        self.timed_out = timed_out
        self.outcome, self.reached, self.refused = outcome, reached, refused
        self.retry_after_s, self.response = retry_after_s, response

    @property
    def told(self) -> str:
        """For the log."""
        return f"{'refused' if self.refused else 'failed'} ({self})"


class Cut(Exception):
    """A stream ended before its end."""


@dataclass(frozen=True)
class Whole:
    """A complete answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _Body:
    """The body of an answer that has begun.

    Attributes:
        broken: it ended before its end.
    """

    def __init__(
        self,
        response: Response | aiohttp.ClientResponse,
        read: Callable[[], Awaitable[bytes]],
        booking: Booking,
    ) -> None:
        self.status, self.broken = response.status, False
        self.headers: Mapping[str, str] = response.headers
        self._response, self._read, self._booking = response, read, booking
        self._gone = False
        booking.on_loss = self._lost

    async def chunk(self) -> bytes:
        """What has come; nothing at the end.

        Raises:
            Cut: the connection broke, or the instance is gone.
        """
        try:
            return await self._read()
        except (aiohttp.ClientError, OSError) as error:
            self.broken = True
            reason = "the instance is gone" if self._gone else f"the connection broke: {_said(error)}"
            raise Cut(reason) from error

    def close(self) -> None:
        """Break the connection unless the body was read to its end; the engine notices."""
        self._booking.on_loss = None
        self._response.close()

    def _lost(self, loss: Loss) -> bool:
        if loss is Loss.GONE:
            self._gone = True
            self._response.close()  # ends the wait in `chunk`
        return self._gone


class Raw(_Body):
    """An answer that is passed on as it is."""

    def __init__(self, response: aiohttp.ClientResponse, booking: Booking) -> None:
        super().__init__(response, response.content.readany, booking)


class Stream(_Body):
    """An answer of events.

    Attributes:
        first: whole events, at least one of them with data.
    """

    def __init__(self, response: Response, booking: Booking, splitter: sse.Splitter, first: bytes) -> None:
        super().__init__(response, response.readany, booking)
        self.first = first
        self._splitter = splitter

    async def block(self) -> bytes:
        """The next whole events; nothing at the end.

        Raises:
            Cut: the connection broke, within an event or between two, or the instance is gone.
        """
        while data := await self.chunk():
            if block := self._splitter.feed(data):
                return block
        if self._splitter.rest:
            raise Cut("it ended within an event")
        return b""

    async def finish(self) -> None:
        """The last event was there: let the connection be used again."""
        with contextlib.suppress(TimeoutError, Cut):
            async with asyncio.timeout(LAST_BYTES_S):
                while await self.chunk():
                    pass
        self.close()


class Upstream:
    """The way to all instances.

    Attributes:
        session: for everything but inference.
    """

    def __init__(self, first_byte_timeout_s: float, key: str | None = None) -> None:
        """
        Args:
            key: the API key of instances, for where the client sends none.
        """
        self.key = key
        self._first_byte_timeout_s = first_byte_timeout_s
        self._client = HttpClient(CONNECT_TIMEOUT_S, KEEP_ALIVE_S)
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
        self._client.close()
        await self.session.close()

    async def begin(
        self,
        booking: Booking,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        leaves: Callable[[Loss], bool],
    ) -> "Whole | Stream":
        """Send a request for inference, and wait until its answer is complete or has begun.

        Args:
            leaves: whether to wait no longer, if this happens to the instance.

        Raises:
            Failure: there is nothing that could be passed on.
        """
        async with _Attempt(booking, leaves, self._first_byte_timeout_s):
            response = await self._client.post(booking.member.url, path, headers, body)
            answer = None
            try:
                answer = await _judged(response, booking)
                return answer
            finally:
                if not isinstance(answer, Stream):
                    response.close()
        raise AssertionError("an attempt ends with an answer or a failure")

    async def begin_raw(
        self,
        booking: Booking,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        leaves: Callable[[Loss], bool],
    ) -> "Raw":
        """Send any other request, and wait for the head of its answer. Arguments and errors as `begin`."""
        async with _Attempt(booking, leaves, self._first_byte_timeout_s):
            url = URL(booking.member.url + path, encoded=True)
            response = await self.session.request(
                method, url, data=body, headers=headers, allow_redirects=False
            )
            if response.status < 500 and response.status != 429:
                return Raw(response, booking)
            try:
                whole = Whole(response.status, response.headers, await response.read())
            finally:
                response.close()
            raise _refusal(whole) or Failure(_in_short(whole), response=whole)
        raise AssertionError("an attempt ends with an answer or a failure")


class _Attempt:
    """Bounds an attempt up to its first byte, and makes a Failure of whatever goes wrong with it."""

    def __init__(self, booking: Booking, leaves: Callable[[Loss], bool], limit_s: float) -> None:
        self._booking, self._leaves, self._limit_s = booking, leaves, limit_s
        self._limit = asyncio.timeout(limit_s)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._booking.on_loss = self._lost

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._booking.on_loss == self._lost:  # else an answer that has begun has its own
            self._booking.on_loss = None
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError as timeout:
            if self._booking.lost is not None:
                raise _lost(self._booking.lost) from None
            raise Failure(f"no first byte within {self._limit_s:g} s", timed_out=True) from timeout
        match error:
            case aiohttp.ClientConnectorError() | NotConnected():
                raise Failure(_said(error), reached=False) from error
            case aiohttp.ClientError() | OSError():
                raise Failure(f"the connection broke: {_said(error)}") from error

    def _lost(self, loss: Loss) -> bool:
        if not self._leaves(loss):
            return False
        self._limit.reschedule(0.0)  # now
        return True


def _lost(loss: Loss) -> Failure:
    if loss is Loss.HELD:
        return Failure("it keeps the request until it is resumed", Outcome.UNKNOWN)
    return Failure("the instance is gone", Outcome.UNKNOWN)


def _said(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


async def _judged(response: Response, booking: Booking) -> Whole | Stream:
    if response.status == 200 and response.content_type == "text/event-stream":
        return await _begun(response, booking)
    whole = Whole(response.status, response.headers, await response.read())
    if whole.status >= 500 or whole.status == 429:
        raise _refusal(whole) or Failure(_in_short(whole), response=whole)
    if whole.status >= 400:
        return whole
    if not whole.body.strip():
        raise Failure(f"HTTP {whole.status} with an empty body")
    if b'"error"' in whole.body[:200] or b'"abort"' in whole.body:
        return _checked(whole)
    return whole


def _refusal(whole: Whole) -> Failure | None:
    """An answer that says: not now."""
    said = _error(whole.body) or {}
    if whole.status == 503 and said.get("code") in REFUSALS:
        wait_s = _seconds(whole.headers.get("Retry-After"))
        text = str(said.get("message") or said["code"])
        return Failure(text, Outcome.UNKNOWN, reached=False, refused=True, retry_after_s=wait_s)
    if whole.status == 429:  # busy, and well
        return Failure(_in_short(whole), Outcome.GOOD, reached=False, response=whole)
    return None


def _checked(whole: Whole) -> Whole:
    """Look into an answer that says 200 and may mean something else."""
    try:
        body = msgspec.json.decode(whole.body)
    except (msgspec.DecodeError, RecursionError):
        return whole
    if not isinstance(body, dict):
        return whole
    if "choices" not in body and (error := sse.error_of(body)) is not None:
        return _fault_of_request(error) or _raise(failure_of(error, "HTTP 200 with an error"))
    if sse.is_aborted(body):
        raise Failure("the engine aborted the request", Outcome.UNKNOWN)
    return whole


def _raise(error: Exception) -> NoReturn:
    raise error


async def _begun(response: Response, booking: Booking) -> Whole | Stream:
    splitter = sse.Splitter()
    first = b""
    while data := await response.readany():
        first += splitter.feed(data)
        if first and b"data:" in first:
            break
    else:
        raise Failure("HTTP 200 with an empty stream")
    if sse.notable(first):
        for event in sse.events(first):
            if event.error is not None:
                what = "the stream began with an error"
                return _fault_of_request(event.error) or _raise(failure_of(event.error, what))
            if event.aborted:
                raise Failure("the engine aborted the request", Outcome.UNKNOWN)
            if event.data is not None or event.done:
                break
    return Stream(response, booking, splitter, first)


def failure_of(error: Mapping[str, Any], what: str) -> Failure:
    """What an error inside a 200 says about the instance."""
    code, text = error.get("code"), f"{what}: {error.get('message') or error.get('code')}"
    if code in REFUSALS:
        return Failure(text, Outcome.UNKNOWN, refused=True)
    if _is_request_fault(code):
        return Failure(text, Outcome.GOOD)
    return Failure(text)


def _is_request_fault(code: object) -> bool:
    return isinstance(code, int) and 400 <= code < 500


def _fault_of_request(error: Mapping[str, Any]) -> Whole | None:
    """The answer that an error inside a 200 should have been, if the request is at fault."""
    code = error.get("code")
    if not isinstance(code, int) or not _is_request_fault(code):
        return None
    headers = CIMultiDict({"Content-Type": "application/json"})
    return Whole(code, headers, msgspec.json.encode({"error": error}))


def _error(body: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        found = msgspec.json.decode(body)
        if isinstance(found, dict):
            return sse.error_of(found)
    return None


def _in_short(whole: Whole) -> str:
    said = _error(whole.body) or {}
    text = " ".join(str(said.get("message") or whole.body[:100].decode(errors="replace")).split())
    return f"HTTP {whole.status}: {text[:200]}" if text else f"HTTP {whole.status}"


def _seconds(text: str | None) -> float:
    try:
        return min(60.0, max(0.1, float(text or 1)))
    except ValueError:  # a date
        return 1.0
