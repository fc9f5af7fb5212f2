"""Builds every object of one router, by hand, in one place; and takes it down again."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import Any

import uvloop

from bus.connection import Bus, BusError, Timeout
from bus.discovery import Change, Listener
from service.access import Access
from service.broker import credentials
from service.listening import CannotListen, bind
from service.options import DEFAULT_NATS, Address, SettingsError, read_secret
from service.report import complain, log_to_stdout, write_ready_file
from service.router import status
from service.router.dispatch import Dispatch
from service.router.metrics import Metrics
from service.router.probes import Prober
from service.router.proxy import Proxy
from service.router.settings import LAST_STEPS_S, RouterSettings
from service.router.upstream import Upstream
from service.shutdown import (
    EXIT_CUT,
    EXIT_OK,
    EXIT_USAGE,
    Resources,
    Signals,
    Stage,
    cancel,
    closing,
    run_stages,
)

log = logging.getLogger(__name__)

POLL_S = 0.02
RETRY_S = 2.0
"""How often a broker is looked for that was not there at the start."""


def run(settings: RouterSettings) -> int:
    """Route until a signal.

    Returns:
        0 after an orderly end, 2 wrong surroundings, 70 if a second signal cut the end short.
    """
    log_to_stdout()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings))


async def _serve(settings: RouterSettings) -> int:
    signals, resources = Signals(), Resources()
    try:
        starting = asyncio.ensure_future(_start(settings, resources))
        asked = asyncio.ensure_future(signals.first.wait())
        await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await cancel(starting)
            return EXIT_OK
        try:
            router = starting.result()
        except (SettingsError, CannotListen, BusError) as error:
            await cancel(asked)
            complain(str(error))
            return EXIT_USAGE
        await asked
        log.info("%s: the router shuts down", signals.name)
        await router.end(signals)
        return EXIT_CUT if signals.second.is_set() else EXIT_OK
    finally:
        await resources.release()


async def _start(settings: RouterSettings, resources: Resources) -> "Router":
    if settings.ready_file is not None:
        settings.ready_file.unlink(missing_ok=True)
    bound = bind(settings.http_address)
    resources.register("HTTP socket", closing(bound.close))
    router = Router(settings, resources)
    await router.open(Address(settings.http_address.host, bound.getsockname()[1]))
    await router.proxy.start(bound)
    resources.register("HTTP listener", router.proxy.close)
    host, port = settings.http_address.host, bound.getsockname()[1]
    address = str(Address(host, port))
    if settings.ready_file is not None:
        path = settings.ready_file
        write_ready_file(path, {"http": address, "nats": router.nats})
        resources.register("ready file", closing(lambda: path.unlink(missing_ok=True)))
    log.info("routing (%s) on http://%s/v1, table on http://%s/state", settings.policy, address, address)
    return router


class Router:
    """One router and all that it consists of."""

    def __init__(self, settings: RouterSettings, resources: Resources) -> None:
        self._settings, self._resources = settings, resources
        key, token = settings.upstream_key_file, settings.admin_token_file
        self._upstream = Upstream(settings.first_byte_timeout_s, read_secret(key) if key else None)
        self._metrics = Metrics(lambda: self.dispatch.membership)
        self.dispatch = Dispatch(settings, self._metrics, self._upstream)
        self._prober = Prober(
            settings, self.dispatch.membership, self._upstream, self._metrics, self._bus_away
        )
        self.dispatch.probe_soon = self._prober.soon
        access = Access(read_secret(token) if token else None, settings.http_address.loopback)
        self.proxy = Proxy(self.dispatch, access, self.snapshot, self._why_not_ready)
        self._bus: Bus | None = None
        self._listener: Listener | None = None
        self._ending = False
        self._address = ""
        self._started = time.time()

    @property
    def nats(self) -> str | None:
        return self._bus.url if self._bus is not None else None

    async def open(self, address: Address) -> None:
        """Find the instances.

        Raises:
            BusError: the broker cannot be used, and no instance is named on the command line.
        """
        self._address = str(address)
        self._resources.register("connections to instances", self._upstream.close)
        self._resources.register("releases", self.dispatch.close)
        if self._settings.static and self._settings.nats is None:
            self._in_background("search for the broker", self._keep_connecting())
        else:
            await self._connect_or_go_on()
        await self._prober.first()
        self._in_background("probes", self._prober.run())

    async def _connect_or_go_on(self) -> None:
        try:
            await self._connect()
        except BusError as error:
            if not self._settings.static:
                raise
            log.warning("%s; until there is one, only --static instances are used", error)
            self._in_background("search for the broker", self._keep_connecting())

    async def end(self, signals: Signals) -> None:
        """Take no more requests, let those in flight finish, and say so."""
        settings = self._settings

        async def drained() -> None:
            while self.proxy.in_flight:
                await asyncio.sleep(POLL_S)

        async def end_the_rest() -> None:
            self.proxy.end_all()
            await drained()

        stages = [
            Stage("withdraw", self._withdraw, 1.0),
            Stage("grace", lambda: asyncio.sleep(settings.grace_period_s), settings.grace_period_s + 1, True),
            Stage("refuse", self.proxy.refuse, 1.0),
            Stage("drain", drained, settings.drain_timeout_s, True),
            Stage("end_the_rest", end_the_rest, LAST_STEPS_S / 2),
        ]
        await run_stages(
            stages, settings.shutdown_timeout_s, signals.second, lambda stage: None, self._metrics.stage
        )

    async def _withdraw(self) -> None:
        self._ending = True

    def _in_background(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(_look_at)

        async def stop() -> None:
            await cancel(task)

        self._resources.register(name, stop)

    def _bus_away(self) -> bool:
        return self._bus is None or not self._bus.connected

    def _why_not_ready(self) -> str | None:
        if self._ending:
            return "the router shuts down"
        if self._listener is None and not self._settings.static:
            return "discovery was not read yet"
        return None

    async def _connect(self) -> None:
        settings = self._settings
        bus = await Bus.connect(
            settings.nats or (DEFAULT_NATS,),
            credentials(settings),
            "watchkeeper router",
            settings.nats_wait_s,
            on_lost=lambda reason: log.warning(
                "NATS connection lost: %s; instances stay as they are", reason
            ),
            on_connected_again=lambda: log.info("NATS: connected again"),
        )
        self._bus = bus
        self._resources.register("NATS connection", bus.close)
        log.info("NATS: %s", bus.url)
        listener = Listener(bus, settings.namespace, settings.component, self._changed)
        self._listener = listener
        self._resources.register("discovery", listener.close)
        try:
            await listener.start(settings.nats_wait_s)
        except Timeout as error:
            log.warning("%s; it goes on in the background", error)
        self.dispatch.membership.versions.started()

    async def _keep_connecting(self) -> None:
        """There may never be one: static instances do without."""
        while True:
            with contextlib.suppress(BusError):
                await self._connect()
                return
            await asyncio.sleep(RETRY_S)

    def _changed(self, change: Change) -> None:
        listener = self._listener
        if listener is None:
            return
        name, membership = change.instance, self.dispatch.membership
        before = membership.reason(name)
        membership.update(name, listener.instances.get(name), listener.states.get(name))
        after = membership.reason(name)
        if after != before:
            log.info("%s: %s", name, after or "in use")

    def snapshot(self) -> dict[str, Any]:
        """What `/state` shows."""
        return status.snapshot(
            self._settings,
            self.dispatch.membership,
            self._address,
            self._started,
            self.proxy.in_flight,
            self.nats or ",".join(self._settings.nats or (DEFAULT_NATS,)),
            not self._bus_away(),
        )


def _look_at(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s ended: %r", task.get_name(), error)
