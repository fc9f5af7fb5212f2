"""Builds every object of one instance, by hand, in one place; and takes it down again."""

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from ulid import ULID

from bus import subjects
from bus.connection import Bus, BusError, Credentials, Message, NoResponders, NotConnected, Timeout
from bus.discovery import Announcer, ensure_buckets
from bus.embedded import EmbeddedServer, answers
from service.control import Control
from service.engine import process as host
from service.engine.process import EngineProcess
from service.engine.protocol import EngineDied, EngineError, HostSettings
from service.health_server import CannotListen, HealthServer
from service.runner import Runner
from service.settings import Address, ServeSettings, advertised_host, read_secret
from service.shutdown import Resources, Stage, cancel, run_stages
from service.traffic import Identity, Outside
from statemachine import effects as fx
from statemachine import events as ev
from statemachine import health
from statemachine.lifecycle import Lifecycle
from statemachine.states import Admission, State

log = logging.getLogger(__name__)

EMBEDDED = ("127.0.0.1", 4222)
TWIN_WAIT_S = 0.5
"""How long another live instance of our name has to answer."""
LOADING_NOTE_S = 10.0
DRAIN_POLL_S = 0.05
ENGINE_LINES_SHOWN = 15

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_CUT = 0, 1, 2, 70


class StartError(Exception):
    """The surroundings do not allow a start; the text is one line for a person."""


def run(settings: ServeSettings) -> int:
    """Run one instance until it ends.

    Returns:
        The exit code of the contract, section 1.
    """
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s", force=True
    )
    logging.getLogger("transitions").setLevel(logging.WARNING)  # it reports every event
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop_runner:
        return loop_runner.run(_serve(settings))


async def _serve(settings: ServeSettings) -> int:
    signals = _Signals()
    resources = Resources()
    try:
        starting = asyncio.ensure_future(_start(settings, resources))
        asked = asyncio.ensure_future(signals.first.wait())
        await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not starting.done():
            await cancel(starting)
            log.info("stopped before it was started")
            return EXIT_OK
        try:
            instance = starting.result()
        except (StartError, CannotListen, BusError) as error:
            _complain(str(error))
            return EXIT_USAGE
        return await instance.live(signals)
    finally:
        await resources.release()


def _complain(text: str) -> None:
    sys.stdout.flush()
    print(f"watchkeeper: error: {' '.join(text.split())}", file=sys.stderr, flush=True)


class _Signals:
    """SIGTERM and SIGINT: the first begins the shutdown, the second cuts it short."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.name = ""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived, number)

    def _arrived(self, number: signal.Signals) -> None:
        if self.first.is_set():
            self.second.set()
            return
        self.name = signal.Signals(number).name
        self.first.set()


async def _start(settings: ServeSettings, resources: Resources) -> "Instance":
    """Everything up to the ready file; the engine is not started yet."""
    if settings.ready_file:
        settings.ready_file.unlink(missing_ok=True)
    listener = await HealthServer.bind(settings.grpc_address)
    resources.register("gRPC listener", listener.close)
    http = _bind(settings.http_address)
    resources.register("HTTP socket", _closing(http.close))
    admin = _bind(settings.admin_address)
    resources.register("admin socket", _closing(admin.close))

    hooks = _Hooks()
    bus = await _connect(settings, resources, hooks)
    me = _identity(settings, listener, http, admin)
    await _check_twin(bus, me)
    await ensure_buckets(bus)
    announcer = Announcer(bus, me.namespace, me.component, me.instance)
    await announcer.clear_left_over()

    folder = Path(tempfile.mkdtemp(prefix="watchkeeper-"))
    resources.register("runtime directory", _closing(lambda: _remove(folder)))
    instance = Instance(settings, me, listener, bus, announcer, http, folder, resources)
    hooks.connected_again = instance.connected_again
    await instance.open()
    return instance


class _Hooks:
    """Lets the bus call an instance that is built after it."""

    connected_again: Callable[[], None] = staticmethod(lambda: None)


def _closing(action: Callable[[], None]) -> Callable[[], Any]:
    async def close() -> None:
        action()

    return close


def _remove(folder: Path) -> None:
    for entry in folder.iterdir():
        entry.unlink(missing_ok=True)
    folder.rmdir()


def _bind(address: Address) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        CannotListen: the message is one clear line.
    """
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise CannotListen(errno.EADDRNOTAVAIL, address, f"no such host ({error.strerror})") from error
    family, kind, protocol, _, where = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
    except OSError as error:
        bound.close()
        number = error.errno or errno.EADDRNOTAVAIL
        raise CannotListen(number, address, os.strerror(number).lower()) from error
    return bound


async def _connect(settings: ServeSettings, resources: Resources, hooks: _Hooks) -> Bus:
    urls = settings.nats
    if urls is None:
        urls = (await _own_broker(settings, resources),)
    bus = await Bus.connect(
        urls,
        _credentials(settings),
        name=f"watchkeeper {settings.instance}",
        wait_s=settings.nats_wait_s,
        on_connected_again=lambda: hooks.connected_again(),
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


def _credentials(settings: ServeSettings) -> Credentials:
    def text(path: Path | None) -> str | None:
        return str(path) if path else None

    secret = settings.nats_password_file
    return Credentials(
        creds_file=text(settings.nats_creds),
        user=settings.nats_user,
        password=read_secret(secret) if secret else None,
        tls_ca=text(settings.nats_tls_ca),
        tls_cert=text(settings.nats_tls_cert),
        tls_key=text(settings.nats_tls_key),
    )


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


async def _check_twin(bus: Bus, me: Identity) -> None:
    """Two lives under one name would answer each other's commands."""
    subject = subjects.control(me.namespace, me.component, me.instance, "status")
    try:
        await bus.request(subject, b"", TWIN_WAIT_S)
    except (NoResponders, Timeout, NotConnected):
        return
    raise StartError(
        f"another live instance is called {me.instance!r} in {me.namespace}.{me.component}: "
        "stop it, or choose another --instance"
    )


class Instance:
    """One life: from the ready file to the exit code."""

    def __init__(
        self,
        settings: ServeSettings,
        me: Identity,
        listener: HealthServer,
        bus: Bus,
        announcer: Announcer,
        http: socket.socket,
        folder: Path,
        resources: Resources,
    ) -> None:
        self._settings, self._me, self._bus, self._resources = settings, me, bus, resources
        self._output = _EngineOutput()
        kind = settings.engine
        self._engine = EngineProcess(
            HostSettings(kind, settings.model, list(settings.engine_args)), http, folder, self._output.line
        )
        self._life = Lifecycle(frozenset(settings.withdraw_on_pause))
        self._outside = Outside(
            me, listener, bus, announcer, self._life.picture, settings.model, engine_kind=kind
        )
        self._announcer = announcer
        self._replies: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._control = Control(
            me.instance,
            me.incarnation,
            send=lambda to, data: self._replies.put_nowait((to, data)),
            post=lambda order: self._runner.post(order),
            snapshot=self._outside.snapshot,
            in_flight=lambda: self._outside.in_flight,
            simulate=self._simulate if kind == "sim" else None,
        )
        self._runner = Runner(
            self._life,
            self._engine,
            self._outside,
            self._control,
            settings.call_timeouts_s,
            settings.health_interval_s,
            settings.health_timeout_s,
        )
        self._refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._engine_lost = asyncio.Event()

    # --- the beginning --------------------------------------------------------------------------

    async def open(self) -> None:
        """Be there for commands and probes, and say so."""
        self._spawn("replies", self._send_replies())
        self._spawn("key renewal", self._announcer.run())
        me = self._me
        for name in (me.instance, subjects.ALL):
            pattern = subjects.control_pattern(me.namespace, me.component, name)
            await self._bus.subscribe(pattern, self._on_message)
        await self._outside.publish(self._life.picture, ev.Cause("start"))
        if self._settings.ready_file:
            self._write_ready_file(self._settings.ready_file)
            path = self._settings.ready_file
            self._resources.register("ready file", _closing(lambda: path.unlink(missing_ok=True)))
        log.info("instance %s, gRPC health on %s", me.instance, me.grpc)

    def _on_message(self, message: Message) -> None:
        self._control.on_message(message.subject, message.data, message.reply)

    def _write_ready_file(self, path: Path) -> None:
        me = self._me
        content = {
            "instance": me.instance,
            "incarnation": me.incarnation,
            "grpc": me.grpc,
            "http": me.http,
            "admin": me.admin,
            "nats": self._bus.url,
        }
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_text(json.dumps(content) + "\n")
            draft.rename(path)
        except OSError as error:
            raise StartError(f"--ready-file: cannot write {str(path)!r}: {error.strerror}") from error

    async def _send_replies(self) -> None:
        while True:
            reply_to, data = await self._replies.get()
            try:
                await self._bus.respond(reply_to, data)
            except BusError as error:
                log.warning("a reply was not sent (its command can be asked for with status): %s", error)

    def _simulate(self, script: dict[str, Any], done: Callable[[str | None], None]) -> None:
        async def simulate() -> None:
            try:
                await self._engine.simulate(script)
            except (EngineError, EngineDied) as error:
                done(str(error))
            else:
                done(None)

        self._spawn("simulate", simulate())

    def connected_again(self) -> None:
        """Our keys are put right before any command runs."""
        log.info("NATS: connected again to %s", self._bus.url)
        self._runner.hold_commands()

        async def restore() -> None:
            try:
                await self._outside.restored()
            finally:
                self._runner.release_commands()

        self._spawn("restore keys", restore())

    def _spawn(self, name: str, work: Any) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- life -----------------------------------------------------------------------------------

    async def live(self, signals: _Signals) -> int:
        """Load the engine, serve, and end in order.

        Returns:
            The exit code.
        """
        self._resources.register("own tasks", self._cancel_tasks)
        self._resources.register("engine processes", self._kill_engine)
        running = self._spawn("runner", self._runner.run())
        self._spawn("signals", self._follow_signals(signals))
        self._spawn("engine events", self._follow_engine())
        ends = {running, self._runner.failure, self._runner.shutdown, self._refused}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return await self._internal_error(running)
        if self._refused.done():
            code = await self._end_refused()
        elif self._runner.failure.done():
            code = await self._end_failed(self._runner.failure.result(), signals)
        else:
            code = await self._end_in_order(self._runner.shutdown.result(), signals)
        self._runner.post(ev.Stopped())
        await self._runner.caught_up()
        return EXIT_CUT if signals.second.is_set() else code

    async def _follow_signals(self, signals: _Signals) -> None:
        await signals.first.wait()
        log.info("%s: shutting down", signals.name)
        self._runner.post(ev.ShutdownRequested(ev.Cause("signal", issuer=signals.name)))
        await signals.second.wait()
        log.warning("a second signal: not waiting any more")

    async def _follow_engine(self) -> None:
        settings = self._settings
        started = time.monotonic()
        try:
            async with asyncio.timeout(settings.engine_start_timeout_s) as limit:
                await self._engine.start()
                async for event in self._engine.events():
                    self._take(event, started)
                    if isinstance(event, host.Loaded):
                        limit.reschedule(None)
        except TimeoutError:
            self._lost(f"the engine was not loaded within {settings.engine_start_timeout_s:g} s")
        except EngineDied as error:
            self._lost(str(error))

    def _take(self, event: host.HostEvent, started: float) -> None:
        match event:
            case host.Progress():
                log.info("engine: %s (%.0f s)", event.text, time.monotonic() - started)
            case host.Accepted():
                self._output.open()
            case host.Loaded():
                self._output.open()
                self._outside.engine = event.info
                log.info("engine loaded in %.1f s", time.monotonic() - started)
                self._runner.post(ev.EngineLoaded(event.info.weight_transfer))
            case host.InFlight():
                self._outside.in_flight = event.count
            case host.Refused():
                if not self._refused.done():
                    self._refused.set_result(event.message)
            case host.Failed():
                self._lost(f"loading failed: {event.message}")
            case host.Died():
                self._lost(event.reason)

    def _lost(self, reason: str) -> None:
        self._engine_lost.set()
        self._runner.post(ev.EngineDied(reason))

    # --- the end --------------------------------------------------------------------------------

    async def _internal_error(self, running: "asyncio.Task[Any]") -> int:
        error = running.exception()
        log.error("internal error", exc_info=error)
        self._outside.health.set(dict.fromkeys(health.NAMES, False))
        await self._outside.leave()
        _complain(f"internal error: {error!r}")
        return EXIT_FAILED

    async def _end_refused(self) -> int:
        _complain(self._refused.result())
        self._runner.post(ev.ShutdownRequested(ev.Cause("configuration")))
        await self._runner.caught_up()
        await self._kill_engine()
        return EXIT_USAGE

    async def _end_failed(self, failure: fx.BeginFailure, signals: _Signals) -> int:
        """The listener stays for a while, so that probes see why."""
        last = "".join(f"\n    {line}" for line in list(self._engine.last_lines)[-ENGINE_LINES_SHOWN:])
        log.error("the engine failed: %s%s", failure.reason, f"; its last lines:{last}" if last else "")
        _complain(f"the engine failed: {failure.reason}")
        kill = asyncio.ensure_future(self._kill_engine())
        ends = {asyncio.ensure_future(signals.first.wait()), self._runner.shutdown}
        await asyncio.wait(ends, timeout=self._settings.failure_linger_s, return_when=asyncio.FIRST_COMPLETED)
        self._runner.post(ev.ShutdownRequested(ev.Cause("engine")))
        await self._runner.caught_up()
        await kill
        return EXIT_FAILED

    async def _end_in_order(self, begin: fx.BeginShutdown, signals: _Signals) -> int:
        settings = self._settings
        unready_s = time.monotonic() - self._outside.unready_since_s
        cut = False

        async def grace() -> None:
            if begin.drain is fx.Drain.RUN or unready_s < settings.grace_period_s:
                await _first(asyncio.sleep(settings.grace_period_s), self._engine_lost.wait())

        async def refuse() -> None:
            if begin.drain is fx.Drain.RESUME and settings.graceful_shutdown:
                await self._engine.resume()
                await self._engine.set_admission(Admission.OPEN, "")  # lets in what was held
            ending = begin.drain is fx.Drain.END or not settings.graceful_shutdown
            await self._engine.set_admission(Admission.CLOSED, "the instance shuts down", end_held=ending)
            await self._engine.stop_listening()

        async def drain() -> None:
            async def idle() -> None:
                while self._outside.in_flight:
                    await asyncio.sleep(DRAIN_POLL_S)

            await _first(idle(), self._engine_lost.wait())

        async def end_rest() -> None:
            nonlocal cut
            cut = self._outside.in_flight > 0
            if cut:
                log.warning("%d requests did not finish in time", self._outside.in_flight)
                await self._engine.set_admission(Admission.CLOSED, "the instance shuts down", end_held=True)

        async def stop_engine() -> None:
            await self._engine.shutdown_engine(settings.engine_shutdown_timeout_s)

        stages: list[Stage] = []
        if begin.drain is not fx.Drain.SKIP:
            stages = [
                Stage("grace period", grace, settings.grace_period_s + 1, waits=True),
                Stage("no new requests", refuse, 5.0),
                Stage("drain", drain, settings.drain_timeout_s, waits=True),
                Stage("end of the remaining requests", end_rest, 1.0),
                Stage("engine shutdown", stop_engine, settings.engine_shutdown_timeout_s, waits=True),
            ]
        stages.append(Stage("engine processes", self._kill_engine, 6.0))
        await run_stages(stages, settings.shutdown_timeout_s, signals.second)
        return EXIT_FAILED if cut and self._engine_lost.is_set() else EXIT_OK

    async def _kill_engine(self) -> None:
        left = await self._engine.kill()
        if left:
            log.error("processes of the engine that would not go: %s", ", ".join(map(str, left)))

    async def _cancel_tasks(self) -> None:
        # What is still to be told is told first.
        while not self._replies.empty() and self._bus.connected:
            await asyncio.sleep(0)
        for task in list(self._tasks):
            await cancel(task)


async def _first(*work: Any) -> None:
    """Wait for the first of several, and cancel the others."""
    tasks = {asyncio.ensure_future(w) for w in work}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class _EngineOutput:
    """Passes on what the engine writes, once its configuration is known to be good.

    Before that, what goes wrong is told in one line of our own.
    """

    def __init__(self) -> None:
        self._held: list[str] | None = []

    def line(self, text: str) -> None:
        if self._held is not None:
            self._held.append(text)
            del self._held[:-200]
        else:
            print(f"engine | {text}", flush=True)

    def open(self) -> None:
        held, self._held = self._held, None
        for text in held or ():
            self.line(text)


__all__ = ["StartError", "State", "run"]
