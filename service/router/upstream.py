"""One attempt at one instance: send the request, and judge what comes of it before a client sees it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import aiohttp
import msgspec
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from service.router import sse
from service.router.breaker import Outcome
from service.router.pool import Booking, Loss, Member

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
    headers: CIMultiDictProxy[str]
    body: bytes


class _Body:
    """The body of an answer that has begun.

    Attributes:
        broken: it ended before its end.
    """

    def __init__(self, response: aiohttp.ClientResponse, booking: Booking) -> None:
        self.status, self.headers, self.broken = response.status, response.headers, False
        self._response, self._content, self._booking = response, response.content, booking
        self._gone = False
        booking.on_loss = self._lost

    async def chunk(self) -> bytes:
        """What has come; nothing at the end.

        Raises:
            Cut: the connection broke, or the instance is gone.
        """
        try:
            return await self._content.readany()
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


class Stream(_Body):
    """An answer of events.

    Attributes:
        first: whole events, at least one of them with data.
    """

    def __init__(
        self, response: aiohttp.ClientResponse, booking: Booking, splitter: sse.Splitter, first: bytes
    ) -> None:
        super().__init__(response, booking)
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
    """The way to all instances."""

    def __init__(self, first_byte_timeout_s: float, key: str | None = None) -> None:
        """
        Args:
            key: the API key of instances, for where the client sends none.
        """
        self.key = key
        self._first_byte_timeout_s = first_byte_timeout_s
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
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
        async with self._attempt(booking, leaves):
            response = await self._send(booking.member, "POST", path, body, headers)
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
        async with self._attempt(booking, leaves):
            response = await self._send(booking.member, method, path, body, headers)
            if response.status < 500 and response.status != 429:
                return Raw(response, booking)
            try:
                whole = Whole(response.status, response.headers, await response.read())
            finally:
                response.close()
            raise _refusal(whole) or Failure(_in_short(whole), response=whole)
        raise AssertionError("an attempt ends with an answer or a failure")

    async def _send(
        self, member: Member, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        url = URL(member.url + path, encoded=True)
        return await self.session.request(method, url, data=body, headers=headers, allow_redirects=False)

    @contextlib.asynccontextmanager
    async def _attempt(self, booking: Booking, leaves: Callable[[Loss], bool]) -> AsyncIterator[None]:
        """Bounds an attempt, and makes a Failure of whatever goes wrong with it."""
        try:
            async with asyncio.timeout(self._first_byte_timeout_s) as limit:
                booking.on_loss = on_loss = _on_loss(limit, leaves)
                try:
                    yield
                finally:
                    if booking.on_loss is on_loss:  # else an answer that has begun has its own
                        booking.on_loss = None
        except aiohttp.ClientConnectorError as error:
            raise Failure(f"cannot connect: {_said(error)}", reached=False) from error
        except aiohttp.ConnectionTimeoutError as error:
            raise Failure(f"no connection within {CONNECT_TIMEOUT_S:g} s", reached=False) from error
        except TimeoutError as error:
            if booking.lost is not None:
                raise _lost(booking.lost) from None
            text = f"no first byte within {self._first_byte_timeout_s:g} s"
            raise Failure(text, timed_out=True) from error
        except aiohttp.ServerDisconnectedError as error:
            raise Failure("it closed the connection instead of an answer") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Failure(f"the connection broke: {_said(error)}") from error


def _on_loss(limit: asyncio.Timeout, leaves: Callable[[Loss], bool]) -> Callable[[Loss], bool]:
    def lost(loss: Loss) -> bool:
        if not leaves(loss):
            return False
        limit.reschedule(0.0)  # now
        return True

    return lost


def _lost(loss: Loss) -> Failure:
    if loss is Loss.HELD:
        return Failure("it keeps the request until it is resumed", Outcome.UNKNOWN)
    return Failure("the instance is gone", Outcome.UNKNOWN)


def _said(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


async def _judged(response: aiohttp.ClientResponse, booking: Booking) -> Whole | Stream:
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


async def _begun(response: aiohttp.ClientResponse, booking: Booking) -> Whole | Stream:
    splitter = sse.Splitter()
    first = b""
    while data := await response.content.readany():
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
    return Whole(code, CIMultiDictProxy(headers), msgspec.json.encode({"error": error}))


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
