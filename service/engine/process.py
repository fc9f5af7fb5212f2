"""The engine host as the control process sees it: a child in a process group of its own."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message
from grpc import aio

from service.engine.protocol import EngineDied, EngineError, EngineInfo, EngineView, HostSettings, JsonMap
from service.engine.rpc import control_pb2, control_pb2_grpc, host_pb2, host_pb2_grpc
from statemachine.states import Admission, Mode, Tag

KEPT_LINES = 300
MAX_LINE_BYTES = 16_384
"""A longer line is cut; a progress bar without an end must not fill the memory."""

SETTLE_S = 0.1
"""When the host ends, its exit and the end of its event stream are seen in either order; how long
to wait for the other one, which may say more."""

KILL_S = 5.0
_MAX_SOCKET_PATH = 107
"""sizeof(sockaddr_un.sun_path) - 1 on Linux."""

_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # The first attempts come before the host listens, and fail at once.
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 100),
    # In spite of its name: how long one attempt may take (a host may be busy).
    ("grpc.min_reconnect_backoff_ms", 20_000),
)

_MODES = {
    Mode.ABORT: control_pb2.PAUSE_MODE_ABORT,
    Mode.WAIT: control_pb2.PAUSE_MODE_WAIT,
    Mode.KEEP: control_pb2.PAUSE_MODE_KEEP,
}

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True)
class Progress:
    """A line about loading."""

    text: str


@dataclass(frozen=True)
class Accepted:
    """The engine's arguments and model configuration are good; its weights load now."""


@dataclass(frozen=True)
class Loaded:
    """The engine is there and its HTTP server listens, refusing inference requests."""

    info: EngineInfo


@dataclass(frozen=True)
class Refused:
    """The engine cannot be configured as asked: its arguments or its model are at fault."""

    message: str


@dataclass(frozen=True)
class Failed:
    """Loading failed."""

    message: str


@dataclass(frozen=True)
class InFlight:
    """Inference requests accepted and not yet ended, held ones too."""

    count: int


@dataclass(frozen=True)
class Died:
    """The engine, or its whole host, is gone or can never answer again."""

    reason: str


_Stubs: TypeAlias = "tuple[control_pb2_grpc.ControlAsyncStub, host_pb2_grpc.HostAsyncStub]"

HostEvent = Progress | Accepted | Loaded | Refused | Failed | InFlight | Died
LastEvent = Refused | Failed | Died


class EngineProcess:
    """One engine host, from its start to the end of its process group.

    Every call raises `EngineError` if the engine answered with an error and `EngineDied` if the
    engine is gone, also when it dies during the call. No call has a time limit: cancelling it
    leaves the engine's work running.
    """

    def __init__(
        self,
        settings: HostSettings,
        http_socket: socket.socket,
        runtime_dir: Path,
        on_line: Callable[[str], None],
    ) -> None:
        """Nothing is started yet.

        Args:
            http_socket: bound, not listening. It belongs to the host from `start` on and is
                closed here, so that the port is free when the host is gone.
            runtime_dir: for the host's Unix socket; short, and closed to other users.
            on_line: gets each line that the host or one of its children writes; must not raise.
        """
        self._settings = settings
        self._http_socket = http_socket
        self._socket_path = runtime_dir / f"engine-{secrets.token_hex(4)}.sock"
        self._on_line = on_line
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._queue: asyncio.Queue[HostEvent] = asyncio.Queue()
        self._last_event: LastEvent | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stubs: _Stubs | None = None
        self._killing: asyncio.Task[tuple[int, ...]] | None = None

    @property
    def pid(self) -> int | None:
        """Of the host, and of its process group; None before `start`."""
        return self._process.pid if self._process else None

    # Life

    async def start(self) -> None:
        """Spawn the host; what comes of it is told by `events`.

        Raises:
            EngineDied: the process cannot be spawned, or `kill` came first.
        """
        if len(os.fsencode(self._socket_path)) > _MAX_SOCKET_PATH:
            raise ValueError(f"{self._socket_path} is too long for a Unix socket")
        if self._killing is not None:
            raise EngineDied("the engine host was killed before it was started")
        loop = asyncio.get_running_loop()
        self._dead: asyncio.Future[str] = loop.create_future()
        self._exit: asyncio.Future[str] = loop.create_future()
        self._output_ended: asyncio.Future[None] = loop.create_future()
        try:
            process = self._spawn()
        except OSError as error:
            raise EngineDied(f"the engine host cannot be started: {error}") from error
        finally:
            self._http_socket.close()
        self._process = process
        # Until `kill` nobody reaps the host, so that its group id cannot become another's.
        self._pidfd = os.pidfd_open(process.pid)
        loop.add_reader(self._pidfd, self._exited)
        self._output, _ = await loop.connect_read_pipe(
            lambda: _Lines(self._line, self._output_ended), process.stdout
        )
        self._channel = aio.insecure_channel(f"unix:{self._socket_path}", options=_CHANNEL_OPTIONS)
        self._stubs = (
            control_pb2_grpc.ControlStub(self._channel),
            host_pb2_grpc.HostStub(self._channel),
        )
        self._watching = asyncio.create_task(self._watch(), name="engine-host-watch")

    async def events(self) -> AsyncIterator[HostEvent]:
        """What the host tells, for one reader. Ends after `Refused`, `Failed` or `Died`."""
        while True:
            event = await self._queue.get()
            yield event
            if isinstance(event, LastEvent):
                return

    async def kill(self) -> tuple[int, ...]:
        """End the whole process group with SIGKILL and reap it. May be called at any time, twice too.

        Returns:
            Processes of the group that would not go within 5 s; normally none.
        """
        if self._killing is None:
            self._killing = asyncio.create_task(self._kill(), name="engine-host-kill")
        return await asyncio.shield(self._killing)

    # The engine's calls: see `service.engine.protocol.HostedEngine`

    async def pause(self, mode: Mode, clear_cache: bool) -> None:
        request = control_pb2.PauseGenerationRequest(mode=_MODES[mode], clear_cache=clear_cache)
        await self._call(self._control.PauseGeneration, request)

    async def resume(self) -> None:
        await self._call(self._control.ResumeGeneration, control_pb2.ResumeGenerationRequest())

    async def sleep(self, level: int, mode: Mode) -> None:
        await self._call(self._control.Sleep, control_pb2.SleepRequest(level=level, mode=_MODES[mode]))

    async def wake_up(self, tags: tuple[Tag, ...]) -> None:
        await self._call(self._host.WakeTags, host_pb2.WakeTagsRequest(tags=[tag.value for tag in tags]))

    async def init_weight_transfer(self, init_info: JsonMap) -> None:
        request = control_pb2.InitWeightTransferEngineRequest(init_info_json=_json(init_info))
        await self._call(self._control.InitWeightTransferEngine, request)

    async def start_weight_update(self) -> None:
        await self._call(self._control.StartWeightUpdate, control_pb2.StartWeightUpdateRequest())

    async def update_weights(self, update_info: JsonMap | list[JsonMap]) -> None:
        request = control_pb2.UpdateWeightsRequest(update_info_json=_json(update_info))
        await self._call(self._control.UpdateWeights, request)

    async def finish_weight_update(self) -> None:
        await self._call(self._control.FinishWeightUpdate, control_pb2.FinishWeightUpdateRequest())

    async def set_weight_version(self, version: str) -> None:
        request = control_pb2.UpdateWeightVersionRequest(weight_version=version)
        await self._call(self._control.UpdateWeightVersion, request)

    async def reset_caches(self) -> None:
        await self._call(self._host.ResetCaches, host_pb2.Empty())

    async def ask(self) -> EngineView:
        view = await self._call(self._host.Ask, host_pb2.Empty())
        return EngineView(
            scheduling=view.scheduling,
            asleep=tuple(Tag(tag) for tag in view.asleep),
            meta_parameters=view.meta_parameters,
            session_open=view.session_open if view.HasField("session_open") else None,
            weight_version=view.weight_version,
        )

    async def abort_requests(self, request_ids: Sequence[str] = ()) -> None:
        """End these requests, as their clients know them; without any, all of them."""
        await self._call(self._host.AbortRequests, host_pb2.AbortRequestsRequest(request_ids=request_ids))

    async def shutdown_weight_transfer(self) -> None:
        await self._call(self._host.ShutdownWeightTransfer, host_pb2.Empty())

    async def simulate(self, script: JsonMap) -> None:
        await self._call(self._host.Simulate, host_pb2.SimulateRequest(script_json=_json(script)))

    async def shutdown_engine(self, timeout_s: float) -> None:
        """Shut the engine down in order. The host stays until it is killed."""
        await self._call(self._host.ShutdownEngine, host_pb2.ShutdownRequest(timeout_s=timeout_s))

    # The host's own calls

    async def set_admission(
        self, admission: Admission, reason: str, end_held: bool = False, code: str = ""
    ) -> int:
        """Decide what happens to inference requests, see `service.engine.admission`.

        Args:
            code: error code of a refusal; without it what the admission implies.

        Returns:
            Requests in flight under the new admission. Events about it come later than this answer.
        """
        request = host_pb2.AdmissionRequest(
            admission=admission.value, reason=reason, end_held=end_held, code=code
        )
        return (await self._call(self._host.SetAdmission, request)).in_flight

    async def stop_listening(self) -> None:
        """Accept no more HTTP connections; those that are open stay."""
        await self._call(self._host.StopListening, host_pb2.Empty())

    # Inside

    @property
    def _control(self) -> "control_pb2_grpc.ControlAsyncStub":
        return self._started()[0]

    @property
    def _host(self) -> "host_pb2_grpc.HostAsyncStub":
        return self._started()[1]

    def _started(self) -> _Stubs:
        if self._stubs is None:
            raise EngineDied("the engine host is not started")
        return self._stubs

    def _spawn(self) -> subprocess.Popen[bytes]:
        # Blocks until the exec, a few milliseconds. The thread that forks must live as long as the
        # host: the host dies with it (PR_SET_PDEATHSIG).
        return subprocess.Popen(
            self._command(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env=_environment(),
            start_new_session=True,
            pass_fds=(self._http_socket.fileno(),),
        )

    def _command(self) -> list[str]:
        # -P: nothing is imported from the folder where the service happens to be started.
        command = [sys.executable, "-P", "-m", "service.engine.host", "--kind", self._settings.kind]
        command += ["--socket", str(self._socket_path), "--http-fd", str(self._http_socket.fileno())]
        command += ["--parent-pid", str(os.getpid()), self._settings.model, "--"]
        return command + self._settings.engine_args

    async def _call(
        self, method: aio.UnaryUnaryMultiCallable[Request, Response], request: Request
    ) -> Response:
        if self._dead.done():
            raise EngineDied(self._dead.result())
        call = asyncio.ensure_future(_answer(method, request))
        try:
            ends: set[asyncio.Future[Any]] = {call, self._dead}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise EngineDied(self._dead.result())
            return call.result()
        except aio.AioRpcError as error:
            details = error.details() or error.code().name
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                # The connection breaks before it is known why.
                await asyncio.wait({self._dead}, timeout=2 * SETTLE_S)
                raise EngineDied(self._dead.result() if self._dead.done() else details) from error
            raise EngineError(details) from error
        finally:
            call.cancel()

    async def _watch(self) -> None:
        reading = asyncio.create_task(self._read_events(), name="engine-host-events")
        try:
            ends: set[asyncio.Future[Any]] = {reading, self._exit}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(ends, timeout=SETTLE_S)
            if self._exit.done():
                self._publish(Died(self._exit.result()))
            else:
                self._publish(Died(f"lost the connection to the engine host: {reading.result()}"))
        finally:
            reading.cancel()

    async def _read_events(self) -> str:
        """Returns why the stream ended."""
        try:
            async for message in self._host.Events(host_pb2.Empty(), wait_for_ready=True):
                if (event := _event(message)) is not None:
                    self._publish(event)
        except aio.AioRpcError as error:
            return error.details() or error.code().name
        except Exception as error:  # whatever it is, nothing more will be heard
            return f"{type(error).__name__}: {error}"
        return "it ended"

    def _publish(self, event: HostEvent) -> None:
        if self._last_event is not None:
            return
        self._queue.put_nowait(event)
        if isinstance(event, LastEvent):
            self._last_event = event
            self._dead.set_result(event.reason if isinstance(event, Died) else event.message)

    def _exited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if result is None or self._exit.done():
            return
        if result.si_code == os.CLD_EXITED:
            self._exit.set_result(f"the engine host exited with code {result.si_status}")
        else:
            self._exit.set_result(f"the engine host was killed by {_signal_name(result.si_status)}")

    def _line(self, line: str) -> None:
        self.last_lines.append(line)
        self._on_line(line)

    async def _kill(self) -> tuple[int, ...]:
        if self._process is None:
            self._http_socket.close()
            self._queue.put_nowait(Died("the engine host was killed before it was started"))
            return ()
        left = await self._end_group(self._process)
        if not left:
            await asyncio.wait({self._output_ended}, timeout=SETTLE_S)
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        if not left:
            self._process.wait()
        self._output.close()
        self._watching.cancel()
        await asyncio.wait({self._watching})
        self._publish(Died("the engine host was killed"))
        await self._channel.close(None)
        self._socket_path.unlink(missing_ok=True)
        return left

    async def _end_group(self, process: subprocess.Popen[bytes]) -> tuple[int, ...]:
        loop = asyncio.get_running_loop()
        deadline, nap_s = loop.time() + KILL_S, 0.002
        while True:
            # Again each time: a member may have forked meanwhile.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            alive = _reap_group(process.pid)
            if not alive:
                return ()
            if loop.time() > deadline:
                return alive
            await asyncio.sleep(nap_s)
            nap_s = min(2 * nap_s, 0.1)


class _Lines(asyncio.Protocol):
    """Cuts what arrives into lines; a carriage return ends one too (progress bars)."""

    def __init__(self, on_line: Callable[[str], None], ended: "asyncio.Future[None]") -> None:
        self._on_line, self._ended, self._rest = on_line, ended, b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            self._tell(line)
        if len(self._rest) > MAX_LINE_BYTES:
            self._tell(self._rest)
            self._rest = b""

    def connection_lost(self, exc: Exception | None) -> None:
        self._tell(self._rest)
        if not self._ended.done():
            self._ended.set_result(None)

    def _tell(self, line: bytes) -> None:
        if text := line[:MAX_LINE_BYTES].decode(errors="replace").rstrip():
            self._on_line(text)


async def _answer(method: aio.UnaryUnaryMultiCallable[Request, Response], request: Request) -> Response:
    return await method(request, wait_for_ready=True)


def _event(message: host_pb2.HostEvent) -> HostEvent | None:
    match message.WhichOneof("event"):
        case "progress":
            return Progress(message.progress)
        case "accepted":
            return Accepted()
        case "loaded":
            info = message.loaded
            return Loaded(
                EngineInfo(
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
            )
        case "refused":
            return Refused(message.refused)
        case "failed":
            return Failed(message.failed)
        case "in_flight":
            return InFlight(message.in_flight)
        case "died":
            return Died(message.died)
        case _:
            return None


def _json(value: JsonMap | list[JsonMap]) -> bytes:
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EngineError(f"cannot be passed to the engine as JSON: {error}") from error


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment["PYTHONUNBUFFERED"] = "1"
    # The host never forks without an exec; gRPC's handlers for it only cost.
    environment["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    root = str(Path(__file__).resolve().parents[2])
    if "site-packages" not in root:
        paths = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _reap_group(group: int) -> tuple[int, ...]:
    """Reap dead members that became our children; the leader stays. Returns those that live."""
    alive = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path("/proc", entry.name, "stat").read_bytes()
        except OSError:
            continue
        state, parent, process_group = stat[stat.rindex(b")") + 2 :].split(maxsplit=3)[:3]
        if int(process_group) != group:
            continue
        pid = int(entry.name)
        if state not in (b"Z", b"X"):
            alive.append(pid)
        elif int(parent) == os.getpid() and pid != group:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return tuple(alive)
