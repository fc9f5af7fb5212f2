"""One life of one instance: from the ready file to the exit code."""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bus import subjects
from bus.announce import Announcements
from bus.connection import Bus, BusError, Message
from bus.discovery import Announcer
from bus.epochs import Epochs
from bus.messages import Snapshot
from service.control import Control
from service.ending import Ending, first
from service.engine import process as host
from service.engine.in_process import InProcessEngine
from service.engine.process import EngineProcess
from service.engine.protocol import EngineDied, EngineError
from service.follower import Follower
from service.front_desk import FrontDesk
from service.health_server import HealthOfOne, HealthServer
from service.metrics import Metrics
from service.report import EngineOutput, complain, welcome, write_ready_file
from service.runner import Runner
from service.sessions import Sessions
from service.settings import ServeSettings
from service.shutdown import (
    EXIT_CUT,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    Resources,
    Signals,
    cancel,
    closing,
    run_stages,
)
from service.traffic import Identity, Outside
from statemachine import effects as fx
from statemachine import events as ev
from statemachine import health
from statemachine.lifecycle import Lifecycle

log = logging.getLogger(__name__)

ENGINE_LINES_SHOWN = 15
ERROR_LINE = re.compile(r"\b\w+(Error|Exception): \S")


class Instance:
    """One life: from the ready file to the exit code."""

    def __init__(
        self,
        settings: ServeSettings,
        me: Identity,
        listener: HealthServer | HealthOfOne,
        bus: Bus,
        announcer: Announcer,
        engine: EngineProcess | InProcessEngine,
        output: EngineOutput,
        resources: Resources,
        metrics: Metrics,
    ) -> None:
        self._settings, self._me, self._bus, self._resources = settings, me, bus, resources
        self._engine, self._output = engine, output
        self._metrics = metrics
        kind = settings.engine
        self._epochs = Epochs(bus, me.namespace, me.component, on_rise=self._epoch_rose)
        self._sessions = sessions = Sessions(self._epochs.note)
        self._life = Lifecycle(frozenset(settings.withdraw_on_pause))
        self._outside = Outside(
            me,
            listener,
            bus,
            announcer,
            self._life.picture,
            settings.model,
            engine_kind=kind,
            sessions=sessions,
            metrics=metrics,
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
            sessions=sessions,
            answered=metrics.command,
        )
        self._runner = Runner(
            self._life,
            self._engine,
            self._outside,
            self._control,
            settings.call_timeouts_s,
            settings.health_interval_s,
            settings.health_timeout_s,
            called=metrics.call,
        )
        self._follower = Follower(
            Announcements(bus, me.namespace, me.component),
            sessions,
            self._life,
            self._runner.post,
            transfer=lambda: self._life.facts.weight_transfer,
        )
        self._outside.on_change = self._changed
        self._outside.trouble = lambda: self._follower.trouble
        self.desk = FrontDesk(
            self._control.submit,
            self._outside.snapshot,
            lambda: self._outside.engine,
            self._engine,
            self._session_began_bad,
            settings.call_timeouts_s["init"],
        )
        self._refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._engine_lost = asyncio.Event()
        self._welcomed = False

    def _changed(self) -> None:
        self._follower.poke()
        if self._outside.picture.ready and not self._welcomed and self._me.http:
            self._welcomed = True
            engine = self._outside.engine
            welcome(self._me, engine.model if engine else self._settings.model, self._bus.url)

    # --- the beginning --------------------------------------------------------------------------

    async def open(self) -> None:
        """Be there for commands and probes, and say so."""
        await self._epochs.start()
        self._resources.register("epochs", self._epochs.close)
        await self._follower.prime()
        self._spawn("announcements", self._follower.run())
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
        write_ready_file(path, content)

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

    def _epoch_rose(self, epoch: int) -> None:
        """Another instance, or an earlier life, has seen a higher epoch."""
        self._sessions.see_epoch(epoch, ours=False)
        self._runner.wake()

    def _session_began_bad(self) -> bool:
        session = self._life.facts.session
        return session is not None and session.bad_before is not None

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
                loaded = ev.EngineLoaded(event.info.weight_transfer, stale=self._follower.behind)
                self._runner.post(loaded)
            case host.InFlight():
                self._outside.count(event.count)
                self._metrics.in_flight(event.count)
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
        lines = list(self._engine.last_lines)
        last = "".join(f"\n    {line}" for line in lines[-ENGINE_LINES_SHOWN:])
        log.error("the engine failed: %s%s", failure.reason, f"; its last lines:{last}" if last else "")
        # The first error stands above the tracebacks of all that it brought down.
        errors = [] if self._life.facts.loaded else [line for line in lines if ERROR_LINE.search(line)]
        cause = f" ({errors[0].strip()[-300:]})" if errors else ""
        complain(f"the engine failed: {failure.reason}{cause}")
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
        ending = Ending(self._settings, self._engine, self._outside, begin.drain, self._engine_lost)
        await run_stages(
            ending.stages(),
            self._settings.shutdown_timeout_s,
            signals.second,
            self._stage_began,
            self._metrics.stage,
        )
        return EXIT_FAILED if ending.cut else EXIT_OK

    def _stage_began(self, stage: str) -> None:
        self._runner.post(ev.StageBegan(stage))

    @property
    def name(self) -> str:
        return self._me.instance

    @property
    def snapshot(self) -> Callable[[], Snapshot]:
        return self._outside.snapshot

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


async def _end_of(future: "asyncio.Future[Any]") -> None:
    await asyncio.wait({future})
