"""The shell of an instance without processes: a gated engine and a traffic that keeps a record."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgpack

from bus import messages
from service.control import Control, Order
from service.engine.protocol import EngineDied, EngineError, EngineView
from service.runner import Runner
from statemachine import effects as fx
from statemachine import events as ev
from statemachine.lifecycle import Lifecycle
from statemachine.states import Admission, Mode, Tag

TIMEOUTS_S = dict.fromkeys(["pause", "resume", "start", "sleep", "wake_up", "init", "finish", "update"], 5.0)


class GatedEngine:
    """Implements `service.runner.Engine`. A call named in `closed` waits until `open`ed."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.scheduling = True
        self.asleep: tuple[Tag, ...] = ()
        self.admission = Admission.REFUSED
        self.deaf_to_admission = 0
        """So many orders about requests are not taken before `hears`: the host stands still."""
        self.hears = asyncio.Event()
        self.in_flight = 0
        self.aborted = 0
        self.errors: dict[str, Exception] = {}
        self._gates: dict[str, asyncio.Event] = {}
        self._started: dict[str, asyncio.Event] = {}

    def close(self, name: str) -> None:
        self._gates[name] = asyncio.Event()

    def open(self, name: str) -> None:
        self._gates.pop(name).set()

    async def started(self, name: str) -> None:
        await self._started.setdefault(name, asyncio.Event()).wait()

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        self._started.setdefault(name, asyncio.Event()).set()
        if gate := self._gates.get(name):
            await gate.wait()
        if error := self.errors.pop(name, None):
            raise error

    async def pause(self, mode: Mode, clear_cache: bool) -> None:
        await self._call("pause")
        self.scheduling = False

    async def resume(self) -> None:
        await self._call("resume")
        self.scheduling = True

    async def sleep(self, level: int, mode: Mode) -> None:
        await self._call("sleep")
        self.scheduling, self.asleep = False, tuple(Tag) if level else ()

    async def wake_up(self, tags: tuple[Tag, ...]) -> None:
        await self._call("wake_up")
        self.asleep = tuple(t for t in self.asleep if t not in tags)

    async def init_weight_transfer(self, init_info: ev.JsonMap) -> None:
        await self._call("init")

    async def start_weight_update(self) -> None:
        await self._call("start")

    async def update_weights(self, update_info: ev.JsonMap | list[ev.JsonMap]) -> None:
        await self._call("update")

    async def finish_weight_update(self) -> None:
        await self._call("finish")

    async def set_weight_version(self, version: str) -> None:
        await self._call("version")

    async def reset_caches(self) -> None:
        await self._call("caches")

    async def ask(self) -> EngineView:
        await self._call("ask")
        return EngineView(self.scheduling, self.asleep)

    async def abort_requests(self) -> None:
        self.aborted += 1
        self.in_flight = 0
        if "pause" in self._gates:
            self.open("pause")

    async def set_admission(self, admission: Admission, reason: str, end_held: bool, code: str) -> int:
        if self.deaf_to_admission:
            self.deaf_to_admission -= 1
            await self.hears.wait()
        self.admission = admission
        return self.in_flight


class Record:
    """Implements `service.runner.Traffic`: everything that others would see, in order."""

    def __init__(self, engine: GatedEngine) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.picture: fx.Picture | None = None
        self.causes: list[str | None] = []
        self._engine = engine

    def show_health(self, statuses: Mapping[str, bool]) -> None:
        self.seen.append(("readiness", statuses["readiness"]))

    async def leave(self) -> None:
        self.seen.append(("routable", False))

    async def join(self, weight_version: str) -> None:
        self.seen.append(("routable", weight_version))

    async def progress(self, seconds: float) -> None:
        self.seen.append(("progress", seconds > 0))

    async def publish(self, picture: fx.Picture, cause: ev.Cause | None) -> None:
        self.picture = picture
        self.causes.append(cause.verb if cause else None)
        self.seen.append(("state", (picture.state.value, picture.settled)))


class Shell:
    """A runner and its control, fed with messages as the bus would."""

    def __init__(self, **options: Any) -> None:
        self.engine = GatedEngine()
        self.traffic = Record(self.engine)
        self.life = Lifecycle()
        self.replies: dict[str, list[dict[str, Any]]] = {}
        self._arrived = asyncio.Event()
        self._count = 0
        self.simulated: list[dict[str, Any]] = []
        self.control = Control(
            "one",
            "01LIFE",
            send=self._sent,
            post=self._post,
            snapshot=self._snapshot,
            in_flight=lambda: self.engine.in_flight,
            simulate=options.pop("simulate", None),
        )
        settings: dict[str, Any] = {
            "call_timeouts_s": TIMEOUTS_S,
            "health_interval_s": 60.0,
            "health_timeout_s": 1.0,
            **options,
        }
        self.runner = Runner(self.life, self.engine, self.traffic, self.control, **settings)

    def _post(self, order: Order) -> None:
        self.runner.post(order)

    def _sent(self, reply_to: str, data: bytes) -> None:
        self.replies.setdefault(reply_to, []).append(msgpack.unpackb(data))
        self.traffic.seen.append(("reply", reply_to))
        self._arrived.set()

    def _snapshot(self) -> messages.Snapshot:
        picture = self.traffic.picture or self.life.picture
        return messages.Snapshot(
            namespace="default",
            component="backend",
            instance="one",
            incarnation="01LIFE",
            seq=1,
            time=time.time(),
            state=picture.state.value,
            ready=picture.ready,
            live=picture.live,
            settled=picture.settled,
        )

    def send(self, verb: str, args: dict[str, Any] | None = None, **fields: Any) -> str:
        """Send a command without waiting; returns its reply subject."""
        self._count += 1
        reply_to = f"inbox.{self._count}"
        body = msgpack.packb({"args": args or {}, **fields})
        self.control.on_message(f"watchkeeper.v1.default.backend.control.one.{verb}", body, reply_to)
        return reply_to

    def causes(self) -> list[str | None]:
        """The verb in the cause of each state event."""
        return self.traffic.causes

    async def reply(self, reply_to: str) -> dict[str, Any]:
        async with asyncio.timeout(10):
            while reply_to not in self.replies:
                self._arrived.clear()
                await self._arrived.wait()
        return self.replies[reply_to][0]

    async def do(self, verb: str, args: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        return await self.reply(self.send(verb, args, **fields))

    async def code(self, verb: str, args: dict[str, Any] | None = None, **fields: Any) -> str | None:
        error = (await self.do(verb, args, **fields))["error"]
        return error and str(error["code"])


@asynccontextmanager
async def shell(loaded: bool = True, **options: Any) -> AsyncIterator[Shell]:
    """A running shell, serving unless `loaded` is False."""
    made = Shell(**options)
    running = asyncio.create_task(made.runner.run())
    try:
        if loaded:
            made.runner.post(ev.EngineLoaded())
            await made.runner.caught_up()
        yield made
        if running.done():
            running.result()
    finally:
        running.cancel()
        await asyncio.wait({running})


__all__ = ["EngineDied", "EngineError", "GatedEngine", "Shell", "shell"]
