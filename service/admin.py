"""The admin HTTP listener: probes, figures and the snapshot for people and for Prometheus."""

import hmac
import socket
from collections.abc import Callable

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from bus.messages import Snapshot
from service.metrics import Metrics


class Admin:
    """Serves one instance's admin address.

    Args:
        token: bearer token for `/state`.
        open_to_all: the address is on loopback, where no token is asked for unless one is set.
    """

    def __init__(
        self, snapshot: Callable[[], Snapshot], metrics: Metrics, token: str | None, open_to_all: bool
    ) -> None:
        self._snapshot, self._metrics, self._token, self._open = snapshot, metrics, token, open_to_all
        app = web.Application()
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._figures)
        app.router.add_get("/state", self._state)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)

    async def start(self, bound: socket.socket) -> None:
        await self._runner.setup()
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
        if not self._allowed(request):
            error = {"code": "unauthorized", "message": "a bearer token is needed", "retryable": False}
            return web.json_response(
                {"error": error}, status=401, headers={"WWW-Authenticate": 'Bearer realm="watchkeeper"'}
            )
        return web.Response(body=msgspec.json.encode(self._snapshot()), content_type="application/json")

    def _allowed(self, request: web.Request) -> bool:
        if self._token is None:
            return self._open
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self._token.encode())


def _probe(good: bool, snapshot: Snapshot) -> web.Response:
    body = {"state": snapshot.state, "reasons": [] if good else snapshot.reasons}
    return web.json_response(body, status=200 if good else 503)
