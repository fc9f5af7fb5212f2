"""The way to the broker: the one that was named, one that is there, or one of our own."""

import logging
from collections.abc import Callable

from bus.connection import Bus, Credentials
from bus.embedded import EmbeddedServer, answers
from service.settings import BrokerSettings, ServeSettings, read_secret
from service.shutdown import Resources

log = logging.getLogger(__name__)

EMBEDDED = ("127.0.0.1", 4222)


async def connect(
    settings: ServeSettings, resources: Resources, on_connected_again: Callable[[], None]
) -> Bus:
    """Connect as the settings say, starting a broker if there is none and none was named.

    Raises:
        BusError: the text is one line for a person.
    """
    urls = settings.nats
    if urls is None:
        urls = (await _own_broker(settings, resources),)
    bus = await Bus.connect(
        urls,
        credentials(settings),
        name=f"watchkeeper {settings.instance}",
        wait_s=settings.nats_wait_s,
        on_connected_again=on_connected_again,
        on_lost=lambda reason: log.warning("NATS connection lost: %s", reason),
    )
    resources.register("NATS connection", lambda: bus.drain(2.0))
    log.info("NATS: %s", bus.url)
    return bus


async def _own_broker(settings: ServeSettings, resources: Resources) -> str:
    host_name, port = EMBEDDED
    if await answers(host_name, port):
        log.info("using the NATS server that answers on %s:%d", host_name, port)
        return f"nats://{host_name}:{port}"
    server = await EmbeddedServer.start(host_name, port, data_dir=settings.data_dir)
    resources.register("embedded NATS server", server.stop)
    log.info("started an embedded NATS server on %s", server.url)
    return server.url


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
