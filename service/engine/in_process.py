"""A simulated engine without a process of its own: for many in one (`sim-fleet`).

It has no HTTP side. Everything else is as `service.engine.process.EngineProcess` has it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from service.engine.process import Accepted, Died, Failed, HostEvent, LastEvent, Loaded, Progress, Refused
from service.engine.protocol import EngineDied, EngineError, EngineRefused
from service.engine.simulated import SimulatedEngine
from statemachine.states import Admission


class InProcessEngine(SimulatedEngine):
    """The simulated engine as the control process sees a host."""

    def __init__(self, model: str, engine_args: list[str]) -> None:
        self._events: asyncio.Queue[HostEvent] = asyncio.Queue()
        super().__init__(
            model,
            engine_args,
            progress=lambda text: self._events.put_nowait(Progress(text)),
            accepted=lambda: self._events.put_nowait(Accepted()),
        )
        self.last_lines: deque[str] = deque(maxlen=1)
        self._loading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.died.add_done_callback(lambda died: self._events.put_nowait(Died(died.result())))
        self._loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        try:
            self._events.put_nowait(Loaded(await self.load()))
        except EngineRefused as error:
            self._events.put_nowait(Refused(str(error)))
        except (EngineError, EngineDied) as error:
            self._events.put_nowait(Failed(str(error)))

    async def events(self) -> AsyncIterator[HostEvent]:
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, LastEvent):
                return

    async def kill(self) -> tuple[int, ...]:
        if self._loading is not None:
            self._loading.cancel()
        if not self.died.done():
            self.died.set_result("the engine was killed")
        return ()

    async def set_admission(
        self, admission: Admission, reason: str, end_held: bool = False, code: str = ""
    ) -> int:
        return 0

    async def stop_listening(self) -> None:
        pass

    async def shutdown_engine(self, timeout_s: float) -> None:
        await self.shutdown(timeout_s)
