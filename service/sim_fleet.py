"""Many simulated instances in one process, each with its own bus connection and health names."""

import asyncio
import gc
import sys
import time
from collections.abc import Sequence

import uvloop
from rich.console import Console
from rich.progress import Progress, TaskID
from ulid import ULID

from bus.connection import Bus, BusError
from bus.discovery import Announcer
from service.broker import credentials, local_broker
from service.engine.in_process import InProcessEngine
from service.health_server import HealthOfOne, HealthServer
from service.instance import Instance
from service.listening import CannotListen
from service.metrics import Metrics
from service.options import SettingsError
from service.report import EngineOutput, complain, log_to_stdout
from service.settings import ServeSettings, advertised_host
from service.shutdown import EXIT_OK, EXIT_USAGE, Resources, Signals
from service.traffic import Identity
from service.worker import Hooks, check_twin
from statemachine import health
from statemachine.states import State

GARBAGE = 50_000, 20, 100
"""Thresholds of the collector (`gc.set_threshold`). With the usual ones it walks through the objects of
hundreds of instances again and again, for a third of the time."""

AT_ONCE = 20
"""Instances that start at the same time: the broker answers them within its time-outs."""


def run(settings: Sequence[ServeSettings]) -> int:
    """Run one instance for each of the settings until a signal ends them all.

    Returns:
        0, or 2 if the surroundings do not allow a start. An instance whose engine was made to fail
        ends by itself, and the others go on.
    """
    log_to_stdout(quiet=True)
    gc.set_threshold(*GARBAGE)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop_runner:
        return loop_runner.run(_serve(settings))


async def _serve(settings: Sequence[ServeSettings]) -> int:
    signals = Signals()
    shared = Resources()
    lives: set[asyncio.Task[int]] = set()
    try:
        listener = await HealthServer.bind(settings[0].grpc_address, {})
        shared.register("gRPC listener", listener.close)
        urls = settings[0].nats or ((await local_broker(settings[0], shared))[0],)
        places = asyncio.Semaphore(AT_ONCE)
        started = time.monotonic()
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
            bar = progress.add_task("starting", total=len(settings))
            starts = [_start(one, urls, listener, places, progress, bar) for one in settings]
            instances = await asyncio.gather(*starts)
        gc.freeze()  # they live as long as the process
        print(
            f"{len(instances)} instances, {instances[0][0].name} to {instances[-1][0].name}, "
            f"started in {time.monotonic() - started:.1f} s; gRPC health on {listener.address}, "
            f"names as in {instances[0][0].name}/readiness",
            flush=True,
        )
        lives = {asyncio.create_task(_live(one, own, signals)) for one, own in instances}
        await asyncio.wait(lives)
        for life in lives:
            life.result()
    except (SettingsError, CannotListen, BusError) as error:
        complain(str(error))
        return EXIT_USAGE
    finally:
        for life in lives:
            life.cancel()
        await shared.release()
    return EXIT_OK


async def _live(instance: Instance, resources: Resources, signals: Signals) -> int:
    try:
        return await instance.live(signals)
    finally:
        await resources.release()


async def _start(
    settings: ServeSettings,
    urls: Sequence[str],
    listener: HealthServer,
    places: asyncio.Semaphore,
    progress: Progress,
    bar: TaskID,
) -> tuple[Instance, Resources]:
    resources = Resources()
    async with places:
        hooks = Hooks()
        bus = await Bus.connect(
            urls,
            credentials(settings),
            name=f"watchkeeper {settings.instance}",
            wait_s=settings.nats_wait_s,
            on_connected_again=lambda: hooks.connected_again(),
        )
        resources.register("NATS connection", lambda: bus.drain(2.0))
        me = Identity(
            namespace=settings.namespace,
            component=settings.component,
            instance=settings.instance,
            incarnation=str(ULID()),
            role=settings.role,
            grpc=f"{advertised_host(settings.advertise_host, listener.address)}:{listener.port}",
            http="",
            admin="",
        )
        await check_twin(bus, me)
        announcer = Announcer(bus, me.namespace, me.component, me.instance)
        await announcer.clear_left_over()
        names = HealthOfOne(listener, me.instance)
        names.set(health.statuses(State.STARTING, True, False))
        engine = InProcessEngine(settings.model, list(settings.engine_args))
        output = EngineOutput()
        instance = Instance(settings, me, names, bus, announcer, engine, output, resources, Metrics())
        hooks.connected_again = instance.connected_again
        await instance.open()
        progress.advance(bar)
        return instance, resources
