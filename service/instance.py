"""One life of one instance: from the ready file to the exit code."""

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bus import subjects
from bus.connection import Bus, BusError, Message
from bus.discovery import Announcer
from service.control import Control
from service.engine import process as host
from service.engine.process import EngineProcess
from service.engine.protocol import EngineDied, EngineError, HostSettings
from service.health_server import HealthServer
from service.report import EngineOutput, complain
from service.runner import Runner
from service.settings import ServeSettings, SettingsError
from service.shutdown import Resources, Stage, cancel, closing, run_stages
from service.traffic import Identity, Outside
from statemachine import effects as fx
from statemachine import events as ev
from statemachine import health
from statemachine.lifecycle import Lifecycle
from statemachine.states import Admission

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05
ENGINE_LINES_SHOWN = 15

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_CUT = 0, 1, 2, 70


class Signals:
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
        self._output = EngineOutput()
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
        self._spawn("key renewal", self._announcer.run(self._outside.snapshot))
        me = self._me
        for name in (me.instance, subjects.ALL):
            pattern = subjects.control_pattern(me.namespace, me.component, name)
            await self._bus.subscribe(pattern, self._on_message)
        await self._outside.publish(self._life.picture, ev.Cause("start"))
        if self._settings.ready_file:
            self._write_ready_file(self._settings.ready_file)
            path = self._settings.ready_file
            self._resources.register("ready file", closing(lambda: path.unlink(missing_ok=True)))
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
            raise SettingsError(f"--ready-file: cannot write {str(path)!r}: {error.strerror}") from error

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

    async def live(self, signals: Signals) -> int:
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

    async def _follow_signals(self, signals: Signals) -> None:
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
        complain(f"internal error: {error!r}")
        return EXIT_FAILED

    async def _end_refused(self) -> int:
        complain(self._refused.result())
        self._runner.post(ev.ShutdownRequested(ev.Cause("configuration")))
        await self._runner.caught_up()
        await self._kill_engine()
        return EXIT_USAGE

    async def _end_failed(self, failure: fx.BeginFailure, signals: Signals) -> int:
        """The listener stays for a while, so that probes see why."""
        last = "".join(f"\n    {line}" for line in list(self._engine.last_lines)[-ENGINE_LINES_SHOWN:])
        log.error("the engine failed: %s%s", failure.reason, f"; its last lines:{last}" if last else "")
        complain(f"the engine failed: {failure.reason}")
        # Meanwhile the host, if it still lives, tells its clients to try again elsewhere.
        await first(
            asyncio.sleep(self._settings.failure_linger_s),
            signals.first.wait(),
            _end_of(self._runner.shutdown),
        )
        self._runner.post(ev.ShutdownRequested(ev.Cause("engine")))
        await self._runner.caught_up()
        await self._kill_engine()
        return EXIT_FAILED

    async def _end_in_order(self, begin: fx.BeginShutdown, signals: Signals) -> int:
        settings = self._settings
        unready_s = time.monotonic() - self._outside.unready_since_s
        cut = False

        async def grace() -> None:
            if begin.drain is fx.Drain.RUN or unready_s < settings.grace_period_s:
                await first(asyncio.sleep(settings.grace_period_s), self._engine_lost.wait())

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

            await first(idle(), self._engine_lost.wait())

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


async def first(*work: Any) -> None:
    """Wait for the first of several, and cancel the others."""
    tasks = {asyncio.ensure_future(w) for w in work}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _end_of(future: "asyncio.Future[Any]") -> None:
    await asyncio.wait({future})
