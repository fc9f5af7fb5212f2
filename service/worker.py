"""Builds every object of one instance, by hand, in one place; and takes it down again."""

import asyncio
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import uvloop
from ulid import ULID

from bus import subjects
from bus.connection import Bus, BusError, NoResponders, NotConnected, Timeout
from bus.discovery import Announcer
from service.access import Access
from service.admin import Admin
from service.broker import connect
from service.engine.process import EngineProcess
from service.engine.protocol import HostSettings
from service.grpc_control import ControlService, add_services
from service.health_server import HealthServer
from service.http_verbs import HttpVerbs
from service.instance import Instance
from service.listening import CannotListen, bind
from service.metrics import Metrics
from service.options import Address, SettingsError, read_secret
from service.report import EngineOutput, complain, log_to_stdout
from service.settings import ServeSettings, advertised_host
from service.shutdown import EXIT_OK, EXIT_USAGE, Resources, Signals, cancel, closing
from service.traffic import Identity

TWIN_WAIT_S = 0.5
"""How long another live instance of our name has to answer."""


def run(settings: ServeSettings) -> int:
    """Run one instance until it ends.

    Returns:
        The exit code of the contract, section 1.
    """
    log_to_stdout()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop_runner:
        return loop_runner.run(_serve(settings))


async def _serve(settings: ServeSettings) -> int:
    signals = Signals()
    resources = Resources()
    try:
        starting = asyncio.ensure_future(_start(settings, resources))
        asked = asyncio.ensure_future(signals.first.wait())
        await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not starting.done():
            await cancel(starting)
            return EXIT_OK
        try:
            instance = starting.result()
        except (SettingsError, CannotListen, BusError) as error:
            complain(str(error))
            return EXIT_USAGE
        return await instance.live(signals)
    finally:
        await resources.release()


async def _start(settings: ServeSettings, resources: Resources) -> Instance:
    """Everything up to the ready file; the engine is not started yet."""
    if settings.ready_file:
        settings.ready_file.unlink(missing_ok=True)
    token = read_secret(settings.admin_token_file) if settings.admin_token_file else None
    grpc_access = Access(token, settings.grpc_address.loopback)
    control = ControlService(grpc_access) if grpc_access.possible else None
    listener = await HealthServer.bind(
        settings.grpc_address, register=lambda server: add_services(server, control)
    )
    resources.register("gRPC listener", listener.close)
    http = bind(settings.http_address)
    resources.register("HTTP socket", closing(http.close))
    admin = bind(settings.admin_address)
    resources.register("admin socket", closing(admin.close))

    hooks = Hooks()
    bus = await connect(settings, resources, lambda: hooks.connected_again())
    me = _identity(settings, listener, http, admin)
    await check_twin(bus, me)
    announcer = Announcer(bus, me.namespace, me.component, me.instance)
    await announcer.clear_left_over()

    folder = Path(tempfile.mkdtemp(prefix="watchkeeper-"))
    resources.register("runtime directory", closing(lambda: _remove(folder)))
    metrics = Metrics()
    output = EngineOutput()
    what = HostSettings(settings.engine, settings.model, list(settings.engine_args))
    engine = EngineProcess(what, http, folder, output.line)
    instance = Instance(settings, me, listener, bus, announcer, engine, output, resources, metrics)
    hooks.connected_again = instance.connected_again
    if control is not None:
        control.open(instance.desk)
    access = Access(token, settings.admin_address.loopback)
    await _open_admin(admin, instance, metrics, access, resources)
    await instance.open()
    return instance


class Hooks:
    """Lets the bus call an instance that is built after it."""

    connected_again: Callable[[], None] = staticmethod(lambda: None)


def _remove(folder: Path) -> None:
    for entry in folder.iterdir():
        entry.unlink(missing_ok=True)
    folder.rmdir()


async def _open_admin(
    bound: socket.socket, instance: Instance, metrics: Metrics, access: Access, resources: Resources
) -> None:
    admin = Admin(instance.snapshot, metrics, access, HttpVerbs(instance.desk).routes())
    resources.register("admin listener", admin.close)
    resources.register("front desk", closing(instance.desk.close))
    await admin.start(bound)


def _identity(
    settings: ServeSettings, listener: HealthServer, http: socket.socket, admin: socket.socket
) -> Identity:
    def told(bound: Address) -> str:
        return str(Address(advertised_host(settings.advertise_host, bound), bound.port))

    return Identity(
        namespace=settings.namespace,
        component=settings.component,
        instance=settings.instance,
        incarnation=str(ULID()),
        role=settings.role,
        grpc=told(listener.address),
        http=told(Address(settings.http_address.host, http.getsockname()[1])),
        admin=told(Address(settings.admin_address.host, admin.getsockname()[1])),
    )


async def check_twin(bus: Bus, me: Identity) -> None:
    """Two lives under one name would answer each other's commands."""
    subject = subjects.control(me.namespace, me.component, me.instance, "status")
    try:
        await bus.request(subject, b"", TWIN_WAIT_S)
    except (NoResponders, Timeout, NotConnected):
        return
    raise SettingsError(
        f"another live instance is called {me.instance!r} in {me.namespace}.{me.component}: "
        "stop it, or choose another --instance"
    )
