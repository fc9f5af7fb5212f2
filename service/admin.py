"""The admin HTTP listener: probes, figures, the snapshot, and the routes of `service.http_verbs`."""

import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from bus.codec import MAX_BYTES
from bus.messages import ErrorBody, ErrorCode, Snapshot
from service.access import Access
from service.front_desk import CommandRefused, NotServed
from service.listening import listen
from service.metrics import Metrics

log = logging.getLogger(__name__)

FOR_ALL = ("/livez", "/readyz", "/metrics")
"""Paths that never need a token."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Admin:
    """Serves one instance's admin address.

    Args:
        access: who may see and do more than `FOR_ALL`.
        routes: further ones.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        metrics: Metrics,
        access: Access,
        routes: Iterable[web.RouteDef] = (),
    ) -> None:
        self._snapshot, self._metrics, self._access = snapshot, metrics, access
        app = web.Application(middlewares=[_tell_errors, self._admit], client_max_size=MAX_BYTES)
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._figures)
        app.router.add_get("/state", self._state)
        app.router.add_routes(routes)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)

    async def start(self, bound: socket.socket) -> None:
        await self._runner.setup()
        listen(bound)
        await web.SockSite(self._runner, bound).start()

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _livez(self, request: web.Request) -> web.Response:
        snapshot = self._snapshot()
        return _probe(snapshot.live, snapshot)

    async def _readyz(self, request: web.Request) -> web.Response:
        snapshot = self._snapshot()
        return _probe(snapshot.ready, snapshot)

    async def _figures(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _state(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._snapshot()), content_type="application/json")

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in FOR_ALL:
            return await handler(request)
        if not self._access.allows(request.headers.get("Authorization", "")):
            response = _error(401, "unauthorized", self._access.demand)
            response.headers["WWW-Authenticate"] = 'Bearer realm="watchkeeper"'
            return response
        if request.method == "POST" and self._access.token is None and "Origin" in request.headers:
            # Any page in a browser on this machine reaches loopback; trainers send no such header.
            return _error(403, "forbidden", "commands from a browser need a token")
        return await handler(request)


@web.middleware
async def _tell_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors have one form, whoever found them."""
    try:
        return await handler(request)
    except CommandRefused as refusal:
        return _answer_error(refusal.code.http_status, refusal.error, refusal.result)
    except NotServed as reason:
        return _error(501, "not_served", str(reason))
    except web.HTTPException as error:
        response = _error(error.status, error.reason.lower().replace(" ", "_"), error.text or error.reason)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except Exception as error:
        log.exception("%s %s", request.method, request.path)
        return _error(500, ErrorCode.INTERNAL.value, repr(error))


def _error(status: int, code: str, message: str) -> web.Response:
    return _answer_error(status, ErrorBody(code=code, message=message), {})


def _answer_error(status: int, error: ErrorBody, result: dict[str, Any]) -> web.Response:
    body: dict[str, Any] = {"error": msgspec.to_builtins(error)}
    if result:  # a command that failed and did something all the same
        body["result"] = result
    return web.json_response(body, status=status)


def _probe(good: bool, snapshot: Snapshot) -> web.Response:
    body = {"state": snapshot.state, "reasons": [] if good else snapshot.reasons}
    return web.json_response(body, status=200 if good else 503)
