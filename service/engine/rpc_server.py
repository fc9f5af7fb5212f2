"""The engine host's side of the Unix socket, for any engine.

Errors travel as status codes: INTERNAL is `EngineError`, UNAVAILABLE is `EngineDied`. A caller
that goes away does not end the call it made: the engine cannot be stopped half-way either.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
from grpc import aio

from service.engine.protocol import EngineDied, EngineError, HostedEngine, JsonMap
from service.engine.rpc import control_pb2, control_pb2_grpc, host_pb2, host_pb2_grpc
from statemachine.states import Admission, Mode, Tag

MAX_DETAILS_BYTES = 2_000
"""gRPC drops a call whose trailers exceed 8 KiB, and one byte of text may take three there."""

IN_FLIGHT_PAUSE_S = 0.01
"""Between two events about the number of requests; what changes meanwhile is merged."""

_MODES: dict[int, Mode] = {
    control_pb2.PAUSE_MODE_UNSPECIFIED: Mode.ABORT,
    control_pb2.PAUSE_MODE_ABORT: Mode.ABORT,
    control_pb2.PAUSE_MODE_WAIT: Mode.WAIT,
    control_pb2.PAUSE_MODE_KEEP: Mode.KEEP,
}

T = TypeVar("T")
Context = aio.ServicerContext[Any, Any]
Call = Callable[[HostedEngine], Coroutine[Any, Any, T]]
"""A call of the engine that is still to be made."""


class Outbox:
    """Events on their way to the control process. Kept until somebody reads them."""

    def __init__(self) -> None:
        self._events: deque[host_pb2.HostEvent] = deque()
        self._in_flight: int | None = None
        self._news = asyncio.Event()
        self._last = False
        self.delivered = asyncio.Event()
        """Set once the last event was written to the reader."""

    def put(self, event: host_pb2.HostEvent, *, last: bool = False) -> None:
        if not self._last:
            self._events.append(event)
            self._last = last
            self._news.set()

    def put_in_flight(self, count: int) -> None:
        self._in_flight = count
        self._news.set()

    async def read(self) -> AsyncIterator[host_pb2.HostEvent]:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._events:
                yield self._events[0]
                self._events.popleft()
            if self._last:
                self.delivered.set()
                return
            if self._in_flight is not None:
                count, self._in_flight = self._in_flight, None
                yield host_pb2.HostEvent(in_flight=count)
                await asyncio.sleep(IN_FLIGHT_PAUSE_S)


class HostSide(Protocol):
    """What the services need of the host around the engine."""

    outbox: Outbox

    def engine(self) -> HostedEngine:
        """Raises `EngineError` while there is none yet."""
        ...

    def set_admission(self, admission: Admission, reason: str, end_held: bool, code: str) -> int:
        """Returns the number of requests in flight."""
        ...

    async def stop_listening(self) -> None: ...

    async def shutdown_engine(self, timeout_s: float) -> None: ...


class _Calls:
    """Runs calls of the engine: in turn where the engine wants that, raced with its death."""

    def __init__(self, host: HostSide) -> None:
        self._host = host
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()

    async def in_turn(self, context: Context, call: Call[T]) -> T:
        """One call after the other, each only when the one before is really over."""
        # A caller that leaves while it waits here takes its call with it: nothing has begun.
        await self._turn.acquire()
        return await self._run(context, self._raced(call), release=True)

    async def at_once(self, context: Context, call: Call[T]) -> T:
        return await self._run(context, self._raced(call))

    async def to_the_end(self, context: Context, work: Coroutine[Any, Any, T]) -> T:
        """Not raced: the death of the engine is what this call is for."""
        return await self._run(context, work)

    async def _run(self, context: Context, work: Coroutine[Any, Any, T], *, release: bool = False) -> T:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        if release:
            task.add_done_callback(lambda _: self._turn.release())
        try:
            return await asyncio.shield(task)
        except EngineDied as error:
            await refuse(context, grpc.StatusCode.UNAVAILABLE, error)
        except EngineError as error:
            await refuse(context, grpc.StatusCode.INTERNAL, error)

    async def _raced(self, call: Call[T]) -> T:
        engine = self._host.engine()
        if engine.died.done():
            raise EngineDied(engine.died.result())
        task = asyncio.ensure_future(call(engine))
        ends: set[asyncio.Future[Any]] = {task, engine.died}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        raise EngineDied(engine.died.result())

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen: its caller may have left


class ControlService(control_pb2_grpc.ControlServicer):
    """`vllm.Control`, as far as it fits."""

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls

    async def PauseGeneration(
        self, request: control_pb2.PauseGenerationRequest, context: Context
    ) -> control_pb2.PauseGenerationResponse:
        mode = await _mode(request.mode, context)
        clear_cache = request.clear_cache if request.HasField("clear_cache") else True
        await self._calls.in_turn(context, lambda engine: engine.pause(mode, clear_cache))
        return control_pb2.PauseGenerationResponse()

    async def ResumeGeneration(
        self, request: control_pb2.ResumeGenerationRequest, context: Context
    ) -> control_pb2.ResumeGenerationResponse:
        await self._calls.in_turn(context, lambda engine: engine.resume())
        return control_pb2.ResumeGenerationResponse()

    async def Sleep(self, request: control_pb2.SleepRequest, context: Context) -> control_pb2.SleepResponse:
        mode = await _mode(request.mode, context)
        level = request.level if request.HasField("level") else 1
        await self._calls.in_turn(context, lambda engine: engine.sleep(level, mode))
        return control_pb2.SleepResponse()

    async def InitWeightTransferEngine(
        self, request: control_pb2.InitWeightTransferEngineRequest, context: Context
    ) -> control_pb2.InitWeightTransferEngineResponse:
        init_info = await _json_map(request.init_info_json, context)
        await self._calls.in_turn(context, lambda engine: engine.init_weight_transfer(init_info))
        return control_pb2.InitWeightTransferEngineResponse()

    async def StartWeightUpdate(
        self, request: control_pb2.StartWeightUpdateRequest, context: Context
    ) -> control_pb2.StartWeightUpdateResponse:
        await self._calls.in_turn(context, lambda engine: engine.start_weight_update())
        return control_pb2.StartWeightUpdateResponse()

    async def UpdateWeights(
        self, request: control_pb2.UpdateWeightsRequest, context: Context
    ) -> control_pb2.UpdateWeightsResponse:
        update_info = await _json_map_or_list(request.update_info_json, context)
        await self._calls.in_turn(context, lambda engine: engine.update_weights(update_info))
        return control_pb2.UpdateWeightsResponse()

    async def FinishWeightUpdate(
        self, request: control_pb2.FinishWeightUpdateRequest, context: Context
    ) -> control_pb2.FinishWeightUpdateResponse:
        await self._calls.in_turn(context, lambda engine: engine.finish_weight_update())
        if request.HasField("weight_version"):
            version = request.weight_version
            await self._calls.in_turn(context, lambda engine: engine.set_weight_version(version))
        return control_pb2.FinishWeightUpdateResponse()

    async def UpdateWeightVersion(
        self, request: control_pb2.UpdateWeightVersionRequest, context: Context
    ) -> control_pb2.UpdateWeightVersionResponse:
        version = request.weight_version
        await self._calls.in_turn(context, lambda engine: engine.set_weight_version(version))
        return control_pb2.UpdateWeightVersionResponse()


class HostService(host_pb2_grpc.HostServicer):
    """`watchkeeper.engine.Host`."""

    def __init__(self, host: HostSide, calls: _Calls) -> None:
        self._host = host
        self._calls = calls

    async def Events(self, request: host_pb2.Empty, context: Context) -> AsyncIterator[host_pb2.HostEvent]:
        async for event in self._host.outbox.read():
            yield event

    async def Ask(self, request: host_pb2.Empty, context: Context) -> host_pb2.View:
        view = await self._calls.at_once(context, lambda engine: engine.ask())
        return host_pb2.View(
            scheduling=view.scheduling,
            asleep=[tag.value for tag in view.asleep],
            meta_parameters=view.meta_parameters,
            weight_version=view.weight_version,
            session_open=view.session_open,
        )

    async def WakeTags(self, request: host_pb2.WakeTagsRequest, context: Context) -> host_pb2.Empty:
        try:
            tags = tuple(Tag(tag) for tag in request.tags)
        except ValueError as error:
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, error)
        await self._calls.in_turn(context, lambda engine: engine.wake_up(tags))
        return host_pb2.Empty()

    async def ResetCaches(self, request: host_pb2.Empty, context: Context) -> host_pb2.Empty:
        await self._calls.in_turn(context, lambda engine: engine.reset_caches())
        return host_pb2.Empty()

    async def AbortRequests(self, request: host_pb2.AbortRequestsRequest, context: Context) -> host_pb2.Empty:
        ids = tuple(request.request_ids)
        await self._calls.at_once(context, lambda engine: engine.abort_requests(ids))
        return host_pb2.Empty()

    async def ShutdownWeightTransfer(self, request: host_pb2.Empty, context: Context) -> host_pb2.Empty:
        await self._calls.in_turn(context, lambda engine: engine.shutdown_weight_transfer())
        return host_pb2.Empty()

    async def SetAdmission(
        self, request: host_pb2.AdmissionRequest, context: Context
    ) -> host_pb2.AdmissionReply:
        try:
            admission = Admission(request.admission)
        except ValueError as error:
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, error)
        count = self._host.set_admission(admission, request.reason, request.end_held, request.code)
        return host_pb2.AdmissionReply(in_flight=count)

    async def Simulate(self, request: host_pb2.SimulateRequest, context: Context) -> host_pb2.Empty:
        script = await _json_map(request.script_json, context)
        await self._calls.at_once(context, lambda engine: engine.simulate(script))
        return host_pb2.Empty()

    async def StopListening(self, request: host_pb2.Empty, context: Context) -> host_pb2.Empty:
        await self._host.stop_listening()
        return host_pb2.Empty()

    async def ShutdownEngine(self, request: host_pb2.ShutdownRequest, context: Context) -> host_pb2.Empty:
        await self._calls.to_the_end(context, self._host.shutdown_engine(request.timeout_s))
        return host_pb2.Empty()


def add_services(host: HostSide, server: aio.Server) -> None:
    """Register both services, before `server.start()`."""
    calls = _Calls(host)
    control_pb2_grpc.add_ControlServicer_to_server(ControlService(calls), server)
    host_pb2_grpc.add_HostServicer_to_server(HostService(host, calls), server)


async def refuse(context: Context, code: grpc.StatusCode, error: Exception) -> NoReturn:
    text = (str(error) or type(error).__name__).encode()[:MAX_DETAILS_BYTES].decode(errors="ignore")
    await context.abort(code, text)


async def _mode(number: int, context: Context) -> Mode:
    if number not in _MODES:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"unknown pause mode {number}")
    return _MODES[number]


async def _json_map(body: bytes, context: Context) -> JsonMap:
    value = await _json_map_or_list(body, context)
    if isinstance(value, list):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a JSON object is needed, not a list")
    return value


async def _json_map_or_list(body: bytes, context: Context) -> JsonMap | list[JsonMap]:
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, error)
    chunks: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(chunk, dict) for chunk in chunks):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a JSON object is needed")
    return value  # type: ignore[no-any-return]
