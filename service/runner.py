"""One inbox, one writer: carries out what the state machine decides.

Everything that happens is an item in one queue, and one task takes them out; nothing else touches
the lifecycle. Effects are carried out in order. An engine call is the only slow one: it runs in a
task of its own, and its end is the next event.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextvars import Context
from typing import Any, Protocol, assert_never

from service.control import Control, Order
from service.engine.protocol import EngineDied, EngineError
from service.engine.protocol import EngineView as View
from statemachine import effects as fx
from statemachine import events as ev
from statemachine.lifecycle import EventNotAllowed, Lifecycle, Refused, drains
from statemachine.states import Admission, Mode, Tag
from statemachine.table import LIVING

log = logging.getLogger(__name__)

SETTLE_DELAYS_S = (0.0, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0)
SETTLE_LIMIT_S = 10.0
"""How a failed call is settled: the engine is asked at these intervals for this long."""

SWEEP_ATTEMPTS, SWEEP_S = 10, 0.02
"""After a pause, requests still in flight are ended this often at this interval. A response whose
reader is slow stays in flight without being in the engine, so there is an end to it. The host
reports the number in flight within 10 ms."""

PROGRESS_S = 0.5
"""A long chunk is reported at most this often (the trainer's own rhythm is that of its chunks)."""

LEASE_TICK_S, IDLE_TICK_S = 0.1, 0.5
"""How exactly the end of a lease is noticed, and how often one is looked for while there is none."""

TIMER_EARLY_S = 0.01
"""uvloop's timers count milliseconds from a clock that was read before: they may end early."""

GATE_LIMIT_S = 1.0
"""An order to the host's admission gate takes well under a millisecond. A host that does not take it in
this time must not hold up everybody else; it is told again until it does."""
OPENING_LIMIT_S = 10.0
"""Traffic comes back only to a gate that is open. A host that does not open it in this time hangs, which
the health question finds."""
GATE_RETRY_S = 0.2


class Engine(Protocol):
    """The engine as the control process reaches it."""

    async def pause(self, mode: Mode, clear_cache: bool) -> None: ...
    async def resume(self) -> None: ...
    async def sleep(self, level: int, mode: Mode) -> None: ...
    async def wake_up(self, tags: tuple[Tag, ...]) -> None: ...
    async def init_weight_transfer(self, init_info: ev.JsonMap) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def update_weights(self, update_info: ev.JsonMap | list[ev.JsonMap]) -> None: ...
    async def finish_weight_update(self) -> None: ...
    async def set_weight_version(self, version: str) -> None: ...
    async def reset_caches(self) -> None: ...
    async def ask(self) -> View: ...
    async def abort_requests(self) -> None: ...
    async def set_admission(self, admission: Admission, reason: str, end_held: bool, code: str) -> int: ...


class Traffic(Protocol):
    """What others see of this instance. Every method is bounded."""

    def show_health(self, statuses: Mapping[str, bool]) -> None: ...
    async def leave(self) -> None: ...
    async def join(self, weight_version: str) -> None: ...
    async def publish(self, picture: fx.Picture, cause: ev.Cause | None) -> None: ...
    async def progress(self, seconds: float) -> None: ...


class Runner:
    """Drives one lifecycle.

    The end of a life begins with `shutdown` or `failure`; others carry it out, while commands go
    on being answered here until `run` is cancelled.

    Args:
        call_timeouts_s: limit of an engine call in seconds, by the verbs of `--call-timeout-s`.
        health_interval_s, health_timeout_s: how often the engine is asked, and how long it may
            take to answer.
        called: is told the name, the outcome and the seconds of each engine call.

    Attributes:
        shutdown, failure: resolve when the end begins.
    """

    def __init__(
        self,
        life: Lifecycle,
        engine: Engine,
        traffic: Traffic,
        control: Control,
        call_timeouts_s: Mapping[str, float],
        health_interval_s: float,
        health_timeout_s: float,
        called: Callable[[str, str, float], None] = lambda call, outcome, seconds: None,
    ) -> None:
        self._life, self._engine, self._traffic, self._control = life, engine, traffic, control
        self._timeouts_s = call_timeouts_s
        self._called = called
        self._health_interval_s, self._health_timeout_s = health_interval_s, health_timeout_s
        self._inbox: asyncio.Queue[ev.Event | Order | asyncio.Future[None]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._engine_s = 0.0
        self._late: asyncio.Task[None] | None = None  # the last call that timed out
        self._gate: fx.Admit | None = None
        self._let_in = 0  # requests in flight when the gate was last set
        self.failure: asyncio.Future[fx.BeginFailure] = asyncio.get_running_loop().create_future()
        self.shutdown: asyncio.Future[fx.BeginShutdown] = asyncio.get_running_loop().create_future()

    def post(self, item: ev.Event | Order) -> None:
        """Something happened. Never blocks; callable from callbacks of the loop."""
        self._inbox.put_nowait(item)

    def hold_commands(self) -> None:
        """No command starts until `release_commands`: the keys of the instance must be put right first."""
        self._may_run.clear()

    def release_commands(self) -> None:
        self._may_run.set()
        self.wake()

    def wake(self) -> None:
        """Look again at what waits."""
        self._inbox.put_nowait(asyncio.get_running_loop().create_future())

    async def caught_up(self) -> None:
        """Return when everything posted so far has been dealt with."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(done)
        await done

    async def run(self) -> None:
        """Work until cancelled. An error that is nobody else's fault comes out of here."""
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch_engine())
                leases = group.create_task(self._watch_leases())
                try:
                    while True:
                        await self._deal_with(await self._inbox.get())
                        await self._start_waiting()
                finally:
                    watch.cancel()
                    leases.cancel()
        finally:
            for task in self._tasks:
                task.cancel()

    async def _deal_with(self, item: "ev.Event | Order | asyncio.Future[None]") -> None:
        if isinstance(item, Order):
            for event in self._control.arrive(item, self._life):
                await self._handle(event)
        elif isinstance(item, asyncio.Future):
            item.set_result(None)
        else:
            await self._handle(item)

    async def _start_waiting(self) -> None:
        if self._life.state not in LIVING:
            self._control.flush(self._life)
            return
        while not self._life.busy and self._may_run.is_set():
            if (expired := self._control.overdue(self._life)) is not None:
                await self._handle(expired)
                continue
            request = self._control.next_request(self._life)
            if request is None:
                return
            self._engine_s = 0.0
            try:
                await self._handle(request)
            except Refused as refusal:
                self._control.refused(request.ticket, refusal.code, refusal.message)

    async def _handle(self, event: ev.Event) -> None:
        try:
            effects = self._life.handle(event)
        except EventNotAllowed as error:
            log.debug("ignored: %s", error)
            return
        for effect in effects:
            await self._apply(effect)

    async def _apply(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Call():
                self._spawn(self._call(effect))
            case fx.ShowHealth():
                self._traffic.show_health(effect.statuses)
            case fx.LeaveDiscovery():
                await self._traffic.leave()
            case fx.JoinDiscovery():
                await self._traffic.join(effect.weight_version)
            case fx.Admit():
                await self._admit(effect)
            case fx.Publish():
                await self._traffic.publish(effect.picture, effect.cause)
            case fx.CutDrain():
                self._spawn(self._cut_drain())
            case fx.Answer():
                self._control.answered(effect, self._engine_s)
            case fx.BeginFailure():
                if not self.failure.done():
                    self.failure.set_result(effect)
            case fx.BeginShutdown():
                self._control.acknowledge_shutdown()
                if not self.shutdown.done():
                    self.shutdown.set_result(effect)
            case _:
                assert_never(effect)

    async def _admit(self, effect: fx.Admit) -> None:
        self._gate = effect
        opens = effect.admission is Admission.OPEN
        if not await self._order_gate(effect, OPENING_LIMIT_S if opens else GATE_LIMIT_S):
            self._spawn(self._order_gate_again(effect))

    async def _order_gate(self, effect: fx.Admit, limit_s: float) -> bool:
        """Whether nothing is left to be done."""
        try:
            async with asyncio.timeout(limit_s):
                self._let_in = await self._engine.set_admission(
                    effect.admission, effect.reason, effect.end_held, effect.code
                )
        except EngineDied as error:
            log.debug("admission not set: %r", error)  # found and reported elsewhere
        except (EngineError, TimeoutError) as error:
            log.warning("the engine host has not taken the order about requests: %r", error)
            return False
        return True

    async def _order_gate_again(self, effect: fx.Admit) -> None:
        """Until it is taken, or there is another one; the shutdown gives its own."""
        while self._gate is effect and not self.shutdown.done():
            if await self._order_gate(effect, GATE_LIMIT_S):
                return
            await asyncio.sleep(GATE_RETRY_S)

    async def _cut_drain(self) -> None:
        try:
            await self._engine.abort_requests()
        except (EngineDied, EngineError) as error:
            log.warning("the drain was not cut: %s", error)

    # --- the engine -----------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or not (error := task.exception()):
            return
        if not isinstance(error, EngineError | EngineDied):  # those are told by who waits for the call
            asyncio.get_running_loop().call_exception_handler(
                {"message": "an engine call ended in an error of ours", "exception": error, "task": task}
            )
            self.post(ev.EngineDied(f"internal error: {error!r}"))

    async def _call(self, effect: fx.Call) -> None:
        await asyncio.sleep(effect.after_s)
        started = time.monotonic()
        if isinstance(effect.call, fx.AskEngine):
            event: ev.Event = await self._settle(effect.number, effect.call.timed_out)
        else:
            event = await self._bounded(effect.number, effect.call)
        seconds = time.monotonic() - started
        self._engine_s += seconds
        self._called(_CALLS[type(effect.call)][0], _outcome(event), seconds)
        self.post(event)

    async def _bounded(self, number: int, call: fx.EngineCall) -> ev.Event:
        limit_s = self._limit_s(call)
        work = self._spawn(self._carry_out(call))
        progress = self._spawn(self._tell_progress()) if isinstance(call, fx.LoadChunk) else None
        await asyncio.wait({work}, timeout=limit_s)
        if progress is not None:
            progress.cancel()
        if not work.done():
            self._late = work
            name = _CALLS[type(call)][0]
            return ev.CallFailed(number, f"{name} did not end within {limit_s:g} s", timed_out=True)
        try:
            work.result()
        except EngineError as error:
            return ev.CallFailed(number, str(error))
        except EngineDied as error:
            return ev.EngineDied(str(error))
        return ev.CallSucceeded(number)

    def _limit_s(self, call: fx.EngineCall) -> float | None:
        if drains(call) and isinstance(call, fx.PauseEngine):
            return None
        name = _CALLS[type(call)][1]
        return self._control.budget_s(name, self._timeouts_s[name])

    async def _carry_out(self, call: fx.EngineCall) -> None:
        engine = self._engine
        match call:
            case fx.PauseEngine():
                await engine.pause(call.mode, call.clear_cache)
                if call.mode is not Mode.KEEP:
                    await self._sweep()
            case fx.ResumeEngine():
                await engine.resume()
            case fx.SleepEngine():
                await engine.sleep(call.level, call.mode)
            case fx.WakeEngine():
                await engine.wake_up(call.tags)
            case fx.InitTransfer():
                await engine.init_weight_transfer(call.init_info)
            case fx.StartUpdate():
                await engine.start_weight_update()
            case fx.LoadChunk():
                await engine.update_weights(call.update_info)
            case fx.FinishUpdate():
                await engine.finish_weight_update()
            case fx.SetVersion():
                await engine.set_weight_version(call.version)
            case fx.ResetCaches():
                await engine.reset_caches()
            case fx.AskEngine():
                raise TypeError("a question is settled, not carried out")
            case _:
                assert_never(call)

    async def _tell_progress(self) -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_S)
            await self._traffic.progress(time.monotonic() - started)

    async def _watch_leases(self) -> None:
        """Wake the writer when a lease runs out."""
        while True:
            expires_s = self._control.sessions.next_expiry_s()
            await asyncio.sleep(LEASE_TICK_S if expires_s is not None else IDLE_TICK_S)
            if expires_s is not None and expires_s <= time.monotonic():
                self.wake()

    async def _sweep(self) -> None:
        """End what was let in just before the gate closed and reached the engine after the pause.

        vLLM 0.32 queues such a request silently, until somebody resumes.
        """
        for _ in range(SWEEP_ATTEMPTS if self._let_in else 0):
            await asyncio.sleep(SWEEP_S)
            if not self._control.in_flight():
                return
            await self._engine.abort_requests()

    async def _settle(self, number: int, timed_out: bool) -> ev.Event:
        """Ask until there is an answer.

        A call that timed out may still take effect, so the engine is given half of the time of a
        health question to end it before it is asked.
        """
        limit_s = self._health_timeout_s if timed_out else SETTLE_LIMIT_S
        try:
            async with asyncio.timeout(limit_s):
                if timed_out and self._late is not None:
                    await asyncio.wait({self._late}, timeout=limit_s / 2)
                async for delay_s in _forever(SETTLE_DELAYS_S):
                    await asyncio.sleep(delay_s)
                    try:
                        return ev.CallSucceeded(number, await self._engine.ask())
                    except EngineError as error:
                        log.info("the engine could not say how it is: %s", error)
        except TimeoutError:
            return ev.EngineUnresponsive("wedged")
        except EngineDied as error:
            return ev.EngineDied(str(error))
        raise AssertionError("unreachable: the attempts have no end")

    async def _watch_engine(self) -> None:
        """Ask the engine how it is whenever no call runs."""
        silent_since: float | None = None
        while True:
            await asyncio.sleep(self._health_interval_s)
            life = self._life
            if life.state not in LIVING or life.busy:
                silent_since = None
                continue
            generation, asked = life.generation, time.monotonic()
            try:
                async with asyncio.timeout(self._health_timeout_s):
                    view = await self._engine.ask()
            except EngineDied as error:
                self.post(ev.EngineDied(str(error)))
                return
            except (EngineError, TimeoutError) as error:
                silent_since = silent_since or asked
                if life.generation != generation or life.busy:
                    silent_since = None  # a command started in between; its own limit holds
                elif time.monotonic() - silent_since >= self._health_timeout_s - TIMER_EARLY_S:
                    log.error("the engine did not answer for %g s: %r", self._health_timeout_s, error)
                    self.post(ev.EngineUnresponsive("wedged"))
                    return
                continue
            silent_since = None
            self.post(ev.Observed(generation, view, time.monotonic()))


_CALLS: dict[type, tuple[str, str]] = {
    fx.PauseEngine: ("pause", "pause"),
    fx.ResumeEngine: ("resume", "resume"),
    fx.SleepEngine: ("sleep", "sleep"),
    fx.WakeEngine: ("wake_up", "wake_up"),
    fx.InitTransfer: ("init_weight_transfer", "init"),
    fx.StartUpdate: ("start_weight_update", "start"),
    fx.LoadChunk: ("update_weights", "update"),
    fx.FinishUpdate: ("finish_weight_update", "finish"),
    fx.SetVersion: ("update_weight_version", "finish"),
    fx.ResetCaches: ("reset_caches", "finish"),
    fx.AskEngine: ("ask", ""),
}
"""How a call is named to people, and which of `--call-timeout-s` bounds it."""


def _outcome(event: ev.Event) -> str:
    match event:
        case ev.CallSucceeded():
            return "ok"
        case ev.CallFailed():
            return "timeout" if event.timed_out else "error"
        case _:
            return "lost"


async def _forever(delays_s: tuple[float, ...]) -> AsyncIterator[float]:
    for delay_s in delays_s:
        yield delay_s
    while True:
        yield delays_s[-1]
