"""gRPC health (grpc.health.v1): what probes and sidecars see.

The servicer is our own because the library's merges fast changes, starts with `""` SERVING, and
holds up the end of the server for as long as somebody watches (facts: grpcio-health-checking
1.85). Statuses are kept by name; which state shows which status is decided elsewhere.
"""

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.grpc_listener import make_server
from service.listening import CannotListen
from service.options import Address
from statemachine import health
from statemachine.states import State

SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

STARTING: Mapping[str, bool] = MappingProxyType(health.statuses(State.STARTING, False, False))
"""What is shown from the moment the port opens until the first `set`."""

MAX_BEHIND = 16
"""Changes that wait for one Watch stream; beyond it they are merged into the latest."""

LAST_WORDS_S = 0.1
"""How long `close` lets the ends of the Watch streams travel; then they are cut. Only a stream whose
reader is frozen, with a full window, needs to be."""

OPTIONS: tuple[tuple[str, int], ...] = (
    # Anybody may connect here: no larger than a command may be.
    ("grpc.max_receive_message_length", 8 * 1024 * 1024),
    ("grpc.keepalive_permit_without_calls", 1),
    # Finds watchers that vanished without a FIN, so that their streams do not stay for ever.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)

_RESPONSE = {
    status: health_pb2.HealthCheckResponse(status=status)
    for status in (SERVING, NOT_SERVING, SERVICE_UNKNOWN)
}


class _Watcher:
    """The statuses that one Watch stream has yet to send."""

    def __init__(self, status: int) -> None:
        self._waiting: deque[int] = deque((status,))
        self._sent: int | None = None
        self._closed = False
        self._wake = asyncio.Event()
        self._wake.set()

    def add(self, status: int) -> None:
        if status == (self._waiting[-1] if self._waiting else self._sent):
            return
        if len(self._waiting) >= MAX_BEHIND:
            self._waiting.clear()
            if status == self._sent:
                return
        self._waiting.append(status)
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def next(self) -> int | None:
        """The next status to send, or None once closed and everything has been handed out."""
        while not self._waiting:
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        self._sent = self._waiting.popleft()
        return self._sent


class _Servicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated without types
    def __init__(self, statuses: Mapping[str, bool]) -> None:
        self._status = {name: _status(serving) for name, serving in statuses.items()}
        self._watchers: dict[str, set[_Watcher]] = {}
        self._closed = False

    def set(self, statuses: Mapping[str, bool]) -> None:
        changed = {name: _status(serving) for name, serving in statuses.items()}
        self._status.update(changed)
        for name, status in changed.items():
            for watcher in self._watchers.get(name, ()):
                watcher.add(status)

    def close(self) -> None:
        self._closed = True
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.close()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return _RESPONSE[status]

    async def List(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return health_pb2.HealthListResponse(
            statuses={name: _RESPONSE[status] for name, status in self._status.items()}
        )

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._closed:
            return
        name: str = request.service
        watcher = _Watcher(self._status.get(name, SERVICE_UNKNOWN))
        self._watchers.setdefault(name, set()).add(watcher)
        try:
            while (status := await watcher.next()) is not None:
                await context.write(_RESPONSE[status])
        finally:
            self._watchers[name].discard(watcher)
            if not self._watchers[name]:
                del self._watchers[name]  # names come from clients: keep none that nobody watches


class HealthServer:
    """The gRPC listener of an instance, with the health service on it.

    Lives on one event loop and is not thread-safe. Answers as soon as `bind` returns, so bind it
    before anything that takes time, and close it last.
    """

    def __init__(self, server: grpc.aio.Server, servicer: _Servicer, address: Address) -> None:
        self._server, self._servicer = server, servicer
        self.address = address

    @classmethod
    async def bind(
        cls,
        address: Address | str,
        statuses: Mapping[str, bool] = STARTING,
        register: Callable[[grpc.aio.Server], None] = lambda server: None,
    ) -> "HealthServer":
        """Open the port and answer.

        Args:
            address: port 0 picks a free one; see `address` for which.
            statuses: every name that is known, True for SERVING. Names may be added by `set`.
            register: adds further services; called before the port opens.

        Raises:
            CannotListen: the message is one clear line.
        """
        address = Address.parse(address) if isinstance(address, str) else address
        servicer = _Servicer(statuses)
        server = make_server(OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        register(server)
        await _check_bindable(address)
        try:
            port = server.add_insecure_port(str(address))
        except RuntimeError as error:  # lost a race for the port, or gRPC knows better than we do
            raise CannotListen(errno.EADDRINUSE, address, "address already in use") from error
        await server.start()
        return cls(server, servicer, Address(address.host, port))

    @property
    def port(self) -> int:
        return self.address.port

    def set(self, statuses: Mapping[str, bool]) -> None:
        """Show these statuses from now on, all of them at once; names not mentioned stay.

        A check that arrives after this returned sees the new status. Watch streams are told in
        the order of the calls; a status that does not change is not told again.
        """
        self._servicer.set(statuses)

    async def close(self) -> None:
        """End every Watch stream cleanly and close the port, without a change of any status."""
        self._servicer.close()
        await self._server.stop(LAST_WORDS_S)


class HealthOfOne:
    """The names of one of many instances that share a listener: `NAME/liveness`, and `NAME` for `""`."""

    def __init__(self, server: HealthServer, instance: str) -> None:
        self._server, self._instance = server, instance

    def set(self, statuses: Mapping[str, bool]) -> None:
        names = {f"{self._instance}/{name}" if name else self._instance: up for name, up in statuses.items()}
        self._server.set(names)


def _status(serving: bool) -> int:
    return SERVING if serving else NOT_SERVING


async def _check_bindable(address: Address) -> None:
    """Raise what gRPC would only write to its own log; it reports all failures alike."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise CannotListen(errno.EADDRNOTAVAIL, address, f"no such host ({error.strerror})") from error
    usable, reason = False, errno.EADDRNOTAVAIL
    for family, kind, protocol, _, sockaddr in found:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                trial.bind(sockaddr)
            usable = True
        except OSError as error:
            reason = error.errno or reason
            if reason == errno.EADDRINUSE:
                usable = False
                break
    if not usable:  # gRPC listens on those of a host's addresses that exist on this machine
        raise CannotListen(reason, address, os.strerror(reason).lower())
