"""What the engine host does: builds the engine, serves its HTTP application, answers the RPC."""

import asyncio
import logging
import os
import socket
import sys
import traceback
from typing import Any

import uvloop

from service.engine.admission import AdmissionGate
from service.engine.protocol import EngineDied, EngineError, EngineInfo, EngineRefused, HostedEngine
from service.engine.rpc import host_pb2
from service.engine.rpc_server import Outbox, add_services
from service.grpc_listener import make_server
from service.listening import listen
from statemachine.states import Admission

LOSS_S = 0.5
"""An engine's death is known 0.3 s after it at the latest; how long a failed request waits for
that before it is taken for a failure of its own."""

DELIVERY_S = 5.0
AFTERMATH_S = 3.0
"""How long a host whose engine died still answers HTTP, with an error that says so."""

MAX_MESSAGE_CHARS = 500


class HostLoop(uvloop.Loop):
    """The host's event loop, which knows the HTTP server whoever creates it."""

    def __init__(self) -> None:
        super().__init__()
        self.http_fd = -1
        self.http_server: asyncio.AbstractServer | None = None
        self.listening = asyncio.Event()

    async def create_server(self, *args: Any, **kwargs: Any) -> asyncio.AbstractServer:  # type: ignore[override]
        sock: socket.socket | None = kwargs.get("sock")
        is_http = sock is not None and sock.fileno() == self.http_fd
        server: asyncio.AbstractServer = await super().create_server(*args, **kwargs)
        if is_http:
            self.http_server = server
            self.listening.set()
        return server


def run_host(kind: str, model: str, engine_args: list[str], socket_path: str, http_fd: int) -> int:
    """Run until the engine is lost or cannot be loaded; returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    with asyncio.Runner(loop_factory=HostLoop) as runner:
        host = _Host(kind, model, engine_args, socket_path, http_fd)
        exit_code = runner.run(host.run())
        # Not the end of the `with`, which waits for threads that may hang.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


class _Host:
    """Implements `service.engine.rpc_server.HostSide`."""

    def __init__(self, kind: str, model: str, engine_args: list[str], socket_path: str, http_fd: int) -> None:
        self._kind, self._model, self._engine_args = kind, model, engine_args
        self._socket_path = socket_path
        self._http_fd = http_fd
        self._engine: HostedEngine | None = None
        self._gate: AdmissionGate | None = None
        self._admission: tuple[Admission, str, bool, str] | None = None
        self._shutting_down = False
        self.outbox = Outbox()

    async def run(self) -> int:
        server = make_server()
        add_services(self, server)
        server.add_insecure_port(f"unix:{self._socket_path}")
        await server.start()
        try:
            info = await self._load()
        except EngineRefused as error:
            return await self._leave(host_pb2.HostEvent(refused=_one_line(error)))
        except (EngineError, EngineDied) as error:
            return await self._leave(host_pb2.HostEvent(failed=_one_line(error)))
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            return await self._leave(host_pb2.HostEvent(failed=f"{type(error).__name__}: {_one_line(error)}"))
        return await self._serve(self.engine(), info)

    # HostSide

    def engine(self) -> HostedEngine:
        if self._engine is None:
            raise EngineError("the engine is not there yet")
        return self._engine

    def set_admission(self, admission: Admission, reason: str, end_held: bool, code: str) -> int:
        self._admission = (admission, reason, end_held, code)
        if self._gate is None:
            return 0
        if not self.engine().died.done():  # nothing follows after "the engine died"
            self._gate.set(admission, reason, end_held, code)
        return self._gate.in_flight

    async def stop_listening(self) -> None:
        loop = _loop()
        if loop.http_server is not None:
            await asyncio.sleep(0)  # who has connected already is accepted first
            loop.http_server.close()

    async def shutdown_engine(self, timeout_s: float) -> None:
        self._shutting_down = True
        await self.engine().shutdown(timeout_s)

    # Inside

    async def _load(self) -> EngineInfo:
        self._engine = self._build()
        loading = asyncio.ensure_future(self._engine.load())
        ends: set[asyncio.Future[Any]] = {loading, self._engine.died}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            return loading.result()
        raise EngineDied(self._engine.died.result())

    def _build(self) -> HostedEngine:
        loop = asyncio.get_running_loop()

        # Both may be called from a thread of the engine.
        def progress(text: str) -> None:
            loop.call_soon_threadsafe(self.outbox.put, host_pb2.HostEvent(progress=text))

        def accepted() -> None:
            loop.call_soon_threadsafe(self.outbox.put, host_pb2.HostEvent(accepted=host_pb2.Empty()))

        if self._kind == "sim":
            from service.engine.simulated import SimulatedEngine

            return SimulatedEngine(self._model, self._engine_args, progress, accepted)
        from service.engine.vllm_host import VllmEngine

        return VllmEngine(self._model, self._engine_args, progress, accepted)

    async def _serve(self, engine: HostedEngine, info: EngineInfo) -> int:
        self._gate = AdmissionGate(engine.app(), self.outbox.put_in_flight, self._reason_if_lost)
        if self._admission is not None:
            self._gate.set(*self._admission)
        loop = _loop()
        loop.http_fd = self._http_fd
        http_socket = socket.socket(fileno=self._http_fd)
        http_socket.set_inheritable(False)
        listen(http_socket)
        serving = asyncio.ensure_future(engine.serve_http(self._gate, http_socket))
        listening = asyncio.ensure_future(loop.listening.wait())
        ends: set[asyncio.Future[Any]] = {serving, listening, engine.died}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if serving.done() or engine.died.done():
            return await self._leave(host_pb2.HostEvent(failed=await _end_of(engine, serving)))
        loaded = host_pb2.Info(
            kind=info.kind,
            version=info.version,
            model=info.model,
            max_model_len=info.max_model_len,
            weight_transfer=info.weight_transfer,
            weight_transfer_backend=info.weight_transfer_backend,
            sleep_mode=info.sleep_mode,
            tensor_parallel_size=info.tensor_parallel_size,
            pipeline_parallel_size=info.pipeline_parallel_size,
            data_parallel_size=info.data_parallel_size,
            world_size=info.world_size,
        )
        self.outbox.put(host_pb2.HostEvent(loaded=loaded))
        ends = {serving, engine.died}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._shutting_down:
            await asyncio.Event().wait()  # until the parent kills us
        reason = await _end_of(engine, serving)
        self._gate.set(Admission.CLOSED, reason, end_held=True, code="engine_failed")
        exit_code = await self._leave(host_pb2.HostEvent(died=reason))
        await asyncio.sleep(AFTERMATH_S)
        return exit_code

    async def _leave(self, event: host_pb2.HostEvent) -> int:
        self.outbox.put(event, last=True)
        try:
            await asyncio.wait_for(self.outbox.delivered.wait(), DELIVERY_S)
            await asyncio.sleep(0.05)  # what was written travels
        except TimeoutError:
            pass
        return 1

    async def _reason_if_lost(self) -> str | None:
        died = self.engine().died
        await asyncio.wait({died}, timeout=LOSS_S)
        return died.result() if died.done() else None


def _loop() -> HostLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, HostLoop)
    return loop


async def _end_of(engine: HostedEngine, serving: "asyncio.Future[None]") -> str:
    """Why it is over. Of an engine that died, its HTTP server may be the first to stop."""
    await asyncio.wait({engine.died}, timeout=LOSS_S)
    if engine.died.done():
        return engine.died.result()
    error = serving.exception()
    return "the HTTP server ended" if error is None else f"the HTTP server failed: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + " …"
