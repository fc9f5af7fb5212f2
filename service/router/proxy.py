"""The router's HTTP: the OpenAI API for clients, and what operators and probes look at."""

import asyncio
import random
import socket
import time
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from service.access import Access
from service.listening import listen
from service.router.access_log import AccessLog
from service.router.breaker import Outcome
from service.router.dispatch import Dispatch, NoInstance
from service.router.exchange import Exchange
from service.router.http_forms import downstream_headers, error_response, upstream_headers
from service.router.orders import INFERENCE, BadOrder, Order
from service.router.pool import Member, Role
from service.router.sse import Splitter, encode
from service.router.upstream import Cut, Failure, Raw

MAX_BODY_BYTES = 256 << 20
"""Prompts with images are large; what a single vLLM takes is not ours to limit."""
BACKLOG = 4096


class Proxy:
    """Serves one address.

    Args:
        snapshot: what `/state` shows.
        why_not_ready: None if requests are taken.
        access: who may see `/state`.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        access: Access,
        snapshot: Callable[[], dict[str, Any]],
        why_not_ready: Callable[[], str | None],
    ) -> None:
        self._dispatch, self._access = dispatch, access
        self._snapshot, self._why_not_ready = snapshot, why_not_ready
        self._log = AccessLog() if dispatch.settings.access_log else None
        self._closing = False
        self._in_flight: dict[asyncio.Task[None], Exchange | None] = {}
        server = web.Server(
            self._handle,
            request_factory=_request,
            handler_cancellation=True,  # a client that leaves ends its request, whatever it waits for
            access_log=None,
            auto_decompress=False,  # aiohttp answers 500 to a body that is not packed as it says
        )
        self._runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=0.5)
        self._site: web.SockSite | None = None
        self._own = {
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/health": self._readyz,
            "/metrics": self._metrics,
            "/state": self._state,
            "/v1/models": self._models,
        }

    @property
    def in_flight(self) -> int:
        """Requests whose answer is not complete."""
        return len(self._in_flight)

    async def start(self, bound: socket.socket) -> None:
        await self._runner.setup()
        listen(bound, BACKLOG)
        self._site = web.SockSite(self._runner, bound, backlog=BACKLOG)
        await self._site.start()

    async def refuse(self) -> None:
        """Take no more requests; those in flight go on."""
        self._closing = True
        if self._site is not None:
            site, self._site = self._site, None
            await site.stop()

    def end_all(self) -> None:
        """Break off what is still in flight. Its clients are told, where that is possible."""
        self._dispatch.give_up_waiting()
        for task, exchange in tuple(self._in_flight.items()):
            if exchange is not None:
                exchange.stop()
            else:
                task.cancel()

    async def close(self) -> None:
        await self._runner.cleanup()
        if self._log is not None:
            self._log.flush()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path, method = request.path, request.method
        if method in ("GET", "HEAD") and (own := self._own.get(path)) is not None:
            return await own(request)
        if not path.startswith("/v1/"):
            return error_response(404, "not_found", f"no such path: {path}")
        if self._closing:
            response = error_response(503, "shutting_down", "the router shuts down")
            response.force_close()
            return response
        if len(self._in_flight) >= self._dispatch.settings.max_requests:
            return error_response(429, "busy", f"{len(self._in_flight)} requests are in flight")
        if request.headers.get("Expect", "").lower() == "100-continue":
            # As aiohttp's applications do; without it curl waits for a second before it sends a large body.
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        task = request.task
        self._in_flight[task] = None
        self._dispatch.metrics.in_flight(len(self._in_flight))
        try:
            if path in INFERENCE and method == "POST":
                return await self._infer(request)
            return await self._pass_through(request)
        finally:
            self._in_flight.pop(task, None)
            self._dispatch.metrics.in_flight(len(self._in_flight))

    async def _infer(self, request: web.BaseRequest) -> web.StreamResponse:
        started_s = time.monotonic()
        try:
            encoding = request.headers.get("Content-Encoding", "").lower()
            order = Order.parse(request.path, _unpacked(await _body(request), encoding))
        except BadOrder as error:
            self._ended(request, "-", started_s, "400", [], None)
            return error_response(400, "invalid_request", str(error))
        request_id = request.headers.get("X-Request-Id") or _new_id()
        exchange = Exchange(self._dispatch, request, order, request_id)
        self._in_flight[request.task] = exchange
        try:
            return await exchange.run()
        except ConnectionResetError:
            return web.Response()  # the client has left
        finally:
            self._ended(request, request_id, started_s, exchange.status, exchange.hops, exchange.first_byte_s)

    async def _pass_through(self, request: web.BaseRequest) -> web.StreamResponse:
        """What is no inference of ours goes to one instance as it is, and its answer comes back as it is."""
        started_s, hops = time.monotonic(), list[str]()
        status = "gone"
        request_id = request.headers.get("X-Request-Id") or _new_id()
        try:
            if "Upgrade" in request.headers:
                status = "501"
                return error_response(501, "not_served", "websockets are not proxied")
            response, status = await self._forward(request, request_id, hops)
            return response
        except ConnectionResetError:
            return web.Response()
        finally:
            self._ended(request, request_id, started_s, status, hops, None)

    async def _forward(
        self, request: web.BaseRequest, request_id: str, hops: list[str]
    ) -> tuple[web.StreamResponse, str]:
        dispatch, failed = self._dispatch, set[Member]()
        role = self._role_for_the_rest()
        try:
            body = await _body(request)
        except BadOrder as error:
            return error_response(400, "invalid_request", str(error)), "400"
        headers = upstream_headers(request.headers, dispatch.upstream.key)
        headers["X-Request-Id"] = request_id
        if "Content-Encoding" in request.headers:
            headers["Content-Encoding"] = request.headers["Content-Encoding"]
        admits = dispatch.admits(role, "", request.headers.get("X-Watchkeeper-Min-Version"))
        until_s = time.monotonic() + dispatch.settings.wait_s
        last: Failure | None = None
        while len(failed) < dispatch.settings.max_attempts:
            try:
                booking = await dispatch.pick(role, len(body) // 4 + 1, admits, failed, until_s)
            except NoInstance as none:
                text = f"{none}; last failure: {last}" if last is not None else str(none)
                return error_response(503, "no_instance", text), "503"
            name = booking.member.name
            try:
                leaves = dispatch.leaves(booking, admits, failed)
                raw = await dispatch.upstream.begin_raw(
                    booking, request.method, request.path_qs, body, headers, leaves
                )
            except Failure as failure:
                hops.append(f"{role}={name} {failure.told}")
                dispatch.failed(booking, failure)
                failed.add(booking.member)
                last = failure
                continue
            except BaseException:
                booking.release()
                raise
            hops.append(f"{role}={name} {raw.status}")
            try:
                return await self._send_raw(request, raw, name, request_id)
            finally:
                raw.close()
                dispatch.succeeded(booking, Outcome.BAD if raw.broken else Outcome.GOOD)
        if last is not None and last.response is not None:
            response = last.response
            answer = web.Response(status=response.status, body=response.body)
            answer.headers.update(downstream_headers(response.headers))
            return answer, str(response.status)
        return error_response(502, "upstream_failed", str(last)), "502"

    async def _send_raw(
        self, request: web.BaseRequest, raw: Raw, name: str, request_id: str
    ) -> tuple[web.StreamResponse, str]:
        headers = downstream_headers(raw.headers)
        headers["X-Request-Id"], headers["X-Watchkeeper-Instance"] = request_id, name
        downstream = web.StreamResponse(status=raw.status, headers=headers)
        is_events = raw.headers.get("Content-Type", "").startswith("text/event-stream")
        splitter = Splitter() if is_events else None
        await downstream.prepare(request)
        try:
            while data := await raw.chunk():
                whole = splitter.feed(data) if splitter is not None else data
                if whole:
                    await downstream.write(whole)
            if splitter is not None and splitter.rest:
                await downstream.write(splitter.rest)
        except Cut as reason:
            error = {"code": "stream_cut", "retryable": True, "message": str(reason)}
            if is_events:
                await downstream.write(encode({"error": error}))
            elif request.transport is not None:
                request.transport.close()  # an end of the body would look like a good one
            return downstream, "cut"
        await downstream.write_eof()
        return downstream, str(raw.status)

    def _role_for_the_rest(self) -> Role:
        pools = self._dispatch.membership.pools
        if self._dispatch.settings.policy == "pd" and not len(pools[Role.AGGREGATED]):
            return Role.DECODE
        return Role.AGGREGATED

    def _ended(
        self,
        request: web.BaseRequest,
        request_id: str,
        started_s: float,
        status: str,
        hops: list[str],
        first_byte_s: float | None,
    ) -> None:
        took_s = time.monotonic() - started_s
        self._dispatch.metrics.ended(status, took_s)
        if first_byte_s is not None:
            self._dispatch.metrics.first_byte(first_byte_s - started_s)
        if self._log is not None:
            told = "; ".join(hops) or "-"
            took = f"{1000 * took_s:.1f}ms"
            self._log.line(f"{request.method} {request.path} {status} {request_id} {took} {told}")

    # What is answered here

    async def _livez(self, request: web.BaseRequest) -> web.Response:
        return web.json_response({"live": True})

    async def _readyz(self, request: web.BaseRequest) -> web.Response:
        reason = "the router shuts down" if self._closing else self._why_not_ready()
        body = {"ready": reason is None, "reasons": [reason] if reason is not None else []}
        return web.json_response(body, status=200 if reason is None else 503)

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        text = self._dispatch.metrics.text()
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _state(self, request: web.BaseRequest) -> web.Response:
        if not self._access.allows(request.headers.get("Authorization", "")):
            response = error_response(401, "unauthorized", self._access.demand)
            response.headers["WWW-Authenticate"] = 'Bearer realm="watchkeeper"'
            return response
        return web.Response(body=msgspec.json.encode(self._snapshot()), content_type="application/json")

    async def _models(self, request: web.BaseRequest) -> web.Response:
        """The models of all instances, also of those that are paused just now."""
        cards: dict[str, dict[str, Any]] = {}
        for member in self._dispatch.membership:
            for card in member.cards:
                cards.setdefault(card["id"], card)
        for member in self._dispatch.membership:
            for name in member.group.models:
                card = {"id": name, "object": "model", "created": 0, "owned_by": "watchkeeper"}
                cards.setdefault(name, card)
        return web.json_response({"object": "list", "data": list(cards.values())})


async def _body(request: web.BaseRequest) -> bytes:
    """
    Raises:
        BadOrder: it is too large, or broken.
    """
    try:
        return await request.read()
    except (RequestPayloadError, web.HTTPException) as error:
        raise BadOrder(f"the body cannot be read: {' '.join(str(error).split())}") from None


def _unpacked(body: bytes, encoding: str) -> bytes:
    """
    Raises:
        BadOrder: it is not packed so, in a way that is not known, or unpacks to too much.
    """
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise BadOrder(f"the content encoding {encoding!r} is not known here")
    unpacking = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # either header
    try:
        unpacked = unpacking.decompress(body, MAX_BODY_BYTES)
    except zlib.error as error:
        raise BadOrder(f"the body is not {encoding}: {error}") from None
    if not unpacking.eof:
        raise BadOrder("the body is not complete, or unpacks to too much")
    return unpacked


def _new_id() -> str:
    """As a UUID, at a tenth of its cost."""
    digits = f"{random.getrandbits(128):032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    return web.BaseRequest(
        message, payload, protocol, writer, task, task.get_loop(), client_max_size=MAX_BODY_BYTES
    )
