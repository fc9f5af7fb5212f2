"""How a life ends in order: the stages of the shutdown, first to last."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from service.engine.in_process import InProcessEngine
from service.engine.process import EngineProcess
from service.engine.protocol import EngineDied, EngineError
from service.settings import ServeSettings
from service.shutdown import Stage
from service.traffic import Outside
from statemachine.effects import Drain
from statemachine.states import Admission

log = logging.getLogger(__name__)

POLL_S = 0.02
LAST_WORDS_S = 1.0
"""How long clients may take to read the error that ends their request."""
JUST_NOW_S = 0.5
"""Requests that ended so shortly before the engine died were ended by its death."""
KILL_S = 6.0
GOODBYE = "the instance shuts down"


class Ending:
    """The end of one instance's engine and of the requests in it.

    `STAGES` is the order. Discovery and readiness have been withdrawn before the first stage; what
    remains after the last is released by its owner.
    """

    def __init__(
        self,
        settings: ServeSettings,
        engine: EngineProcess | InProcessEngine,
        outside: Outside,
        drain: Drain,
        engine_lost: asyncio.Event,
    ) -> None:
        self._settings, self._engine, self._outside = settings, engine, outside
        self._drain, self._lost = drain, engine_lost
        self._unready_s = time.monotonic() - outside.unready_since_s
        self.cut = False
        """Requests were ended before they had finished, because the engine died."""

    def stages(self) -> list[Stage]:
        """What is to be done from the first stage on; nothing but the kill if the engine is gone."""
        return [
            Stage(name, _bound(self, run), limit_s(self._settings), waits)
            for name, run, limit_s, waits, needs_engine in STAGES
            if not (needs_engine and self._drain is Drain.SKIP)
        ]

    async def grace(self) -> None:
        """Requests are still accepted, so that routers can notice."""
        grace_s = self._settings.grace_period_s
        if self._drain is Drain.RUN or self._unready_s < grace_s:
            await self._unless_lost(asyncio.sleep(grace_s))

    async def refuse(self) -> None:
        """No new requests; what cannot run any more ends, what was only paused goes on."""
        if self._lost.is_set():
            return
        engine, graceful = self._engine, self._settings.graceful_shutdown
        if self._drain is Drain.RESUME and graceful:
            await engine.resume()
            await engine.set_admission(Admission.OPEN, "")  # lets in what was held
        ends = self._drain is Drain.END or not graceful
        await engine.set_admission(Admission.CLOSED, GOODBYE, end_held=ends)
        await engine.stop_listening()

    async def drain(self) -> None:
        await self._unless_lost(self._idle())

    async def end_the_rest(self) -> None:
        """A request that did not make it gets the retryable error, never a silent cut."""
        count = self._outside.in_flight
        if self._lost.is_set():
            self.cut = self.cut or count > 0 or self._outside.busy_within(JUST_NOW_S)
        if not count or self._lost.is_set():
            return
        log.warning("%d requests did not finish in time and end with an error", count)
        await self._engine.set_admission(Admission.CLOSED, GOODBYE, end_held=True)
        await self._unless_lost(self._idle())

    async def stop_engine(self) -> None:
        if not self._lost.is_set():
            await self._engine.shutdown_engine(self._settings.engine_shutdown_timeout_s)

    async def kill(self) -> None:
        left = await self._engine.kill()
        if left:
            log.error("processes of the engine that would not go: %s", ", ".join(map(str, left)))

    async def _idle(self) -> None:
        while self._outside.in_flight:
            await asyncio.sleep(POLL_S)

    async def _unless_lost(self, work: Awaitable[Any]) -> None:
        await first(work, self._lost.wait())


Run = Callable[[Ending], Awaitable[None]]
Limit = Callable[[ServeSettings], float]

STAGES: tuple[tuple[str, Run, Limit, bool, bool], ...] = (
    # name, what is done, its own limit, only waits (a second signal skips it), needs the engine
    ("grace_period", Ending.grace, lambda s: s.grace_period_s + 1.0, True, True),
    ("no_new_requests", Ending.refuse, lambda s: 5.0, False, True),
    ("drain", Ending.drain, lambda s: s.drain_timeout_s, True, True),
    ("end_of_requests", Ending.end_the_rest, lambda s: LAST_WORDS_S, False, True),
    ("engine_shutdown", Ending.stop_engine, lambda s: s.engine_shutdown_timeout_s, True, True),
    ("engine_processes", Ending.kill, lambda s: KILL_S, False, False),
)


def _bound(ending: Ending, run: Run) -> Callable[[], Awaitable[None]]:
    async def stage() -> None:
        try:
            await run(ending)
        except EngineDied as error:
            log.info("the engine is gone: %s", error)
        except EngineError as error:
            log.warning("the engine answered with an error: %s", error)

    return stage


async def first(*work: Awaitable[Any]) -> None:
    """Wait for the first of several, and cancel the others."""
    tasks = {asyncio.ensure_future(w) for w in work}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
