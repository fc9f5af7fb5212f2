"""The way to the broker: the one that was named, one that is there, or one of our own."""

import asyncio
import logging
import time
from collections.abc import Callable

from bus.connection import Bus, BusError, Credentials
from bus.embedded import EmbeddedServer, PortTaken, answers
from service.options import BrokerSettings, read_secret
from service.settings import ServeSettings
from service.shutdown import Resources

log = logging.getLogger(__name__)

EMBEDDED = ("127.0.0.1", 4222)
RETRY_S = 0.1


class _OwnServer:
    """The server that we started, until our end: then it is left to others, if there are any, or stopped."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self._others = 0

    async def look(self, bus: Bus) -> None:
        """See who else is connected, while our own connection can still be told from theirs."""
        try:
            self._others = await self._server.clients([bus])
        except BusError as error:
            log.warning("%s, so it is stopped", error)

    async def part(self) -> None:
        if self._others:
            self._server.leave()
            log.info("the embedded NATS server stays until the others on it have left: %d", self._others)
        else:
            await self._server.stop()


async def connect(
    settings: ServeSettings, resources: Resources, on_connected_again: Callable[[], None]
) -> Bus:
    """Connect as the settings say, starting a broker if there is none and none was named.

    Raises:
        BusError: the text is one line for a person.
    """
    urls, own = settings.nats, None
    if urls is None:
        url, own = await local_broker(settings, resources)
        urls = (url,)
    bus = await Bus.connect(
        urls,
        credentials(settings),
        name=f"watchkeeper {settings.instance}",
        wait_s=settings.nats_wait_s,
        on_connected_again=on_connected_again,
        on_lost=lambda reason: log.warning("NATS connection lost: %s", reason),
    )

    async def disconnect() -> None:
        if own is not None:
            await own.look(bus)
        await bus.drain(2.0)

    resources.register("NATS connection", disconnect)
    log.info("NATS: %s", bus.url)
    return bus


async def local_broker(settings: ServeSettings, resources: Resources) -> tuple[str, _OwnServer | None]:
    """One that answers, also if another instance starts it just now; else one that we start."""
    host_name, port = EMBEDDED
    end_s = time.monotonic() + settings.nats_wait_s
    while not await answers(host_name, port):
        try:
            server = await EmbeddedServer.start(host_name, port, data_dir=settings.data_dir)
        except PortTaken:
            if time.monotonic() >= end_s:
                raise
            await asyncio.sleep(RETRY_S)
            continue
        own = _OwnServer(server)
        resources.register("embedded NATS server", own.part)
        log.info("started an embedded NATS server on %s", server.url)
        return server.url, own
    log.info("using the NATS server that answers on %s:%d", host_name, port)
    return f"nats://{host_name}:{port}", None


def credentials(settings: BrokerSettings) -> Credentials:
    """How these settings say to authenticate."""

    def text(path: object) -> str | None:
        return str(path) if path is not None else None

    password = settings.nats_password_file
    return Credentials(
        creds_file=text(settings.nats_creds),
        user=settings.nats_user,
        password=read_secret(password) if password is not None else None,
        tls_ca=text(settings.nats_tls_ca),
        tls_cert=text(settings.nats_tls_cert),
        tls_key=text(settings.nats_tls_key),
    )
