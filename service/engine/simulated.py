"""An engine without a model: the same calls and states as vLLM's, scripted faults, words for tokens.

It behaves as vLLM does where a caller can go wrong, too: a request that is scheduled while the
weights are not there ends the engine.
"""

import asyncio
import importlib
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import Any, TypeVar

from service.engine.protocol import (
    EngineDied,
    EngineError,
    EngineInfo,
    EngineView,
    HostedEngine,
    JsonMap,
)
from service.engine.simulated_kv import KV, RemoteKV
from service.engine.simulated_options import CALL_MS, Options, Script, parse_options, parse_script
from service.engine.simulated_requests import Generation
from service.engine.simulated_words import Prompt, of_text
from statemachine.states import Mode, Tag

__all__ = ["CALL_MS", "NOW_S", "SimulatedEngine"]

NOW_S = 0.01
"""A fault at once comes this long after `simulate` was answered."""

_API = "service.engine.simulated_api"

T = TypeVar("T")


class SimulatedEngine(HostedEngine):
    """See `service.engine.protocol.HostedEngine`."""

    def __init__(
        self,
        model: str,
        engine_args: list[str],
        progress: Callable[[str], None],
        accepted: Callable[[], None],
    ) -> None:
        self.died = asyncio.get_running_loop().create_future()
        self.model = model
        self.options = Options()
        self.kv = KV()
        self.refuses = False
        """Every inference request gets an error, though nothing else shows it."""
        self.cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the streams of this moment are cut; then there is another one."""
        self._engine_args = engine_args
        self._progress, self._accepted = progress, accepted
        self._requests: set[Generation] = set()
        self._idle_or_stopped = asyncio.Event()
        self._stop: Mode | None = None
        self._asleep: set[Tag] = set()
        self._session = False
        self._chunks = 0
        self._broken = False
        """Parameters stay on the meta device because an update failed or was left."""
        self._weight_version = "default"
        self._shut_down = False
        self._hung = False
        self._scripts: dict[str, deque[Script]] = {name: deque() for name in CALL_MS}
        self._drain: asyncio.Future[None] | None = None

    # Requests

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def generate(
        self,
        max_tokens: int,
        prompt: Prompt | None = None,
        keeps_kv: bool = False,
        remote: RemoteKV | None = None,
    ) -> Generation:
        return Generation(self, max_tokens, prompt or of_text(""), keeps_kv, remote)

    def add(self, request: Generation) -> None:
        self.check_alive()
        self._requests.add(request)

    def remove(self, request: Generation) -> None:
        if request in self._requests:
            self._requests.remove(request)
            self._changed()

    def check_alive(self) -> None:
        if self.died.done():
            raise EngineDied(self.died.result())
        if self._shut_down:
            raise EngineDied("the engine is shut down")

    def schedules(self, request: Generation) -> bool:
        """Whether this request runs now."""
        if self._hung:
            return False
        if self._stop is None:
            request.started = True
        elif self._stop is not Mode.WAIT or not request.started:
            return False
        if Tag.WEIGHTS in self._asleep or Tag.KV_CACHE in self._asleep:
            self._die("a request was scheduled on memory that sleeps")
        if self._session or self._broken:
            self._die("a request was scheduled on weights that are not there")
        return not self.died.done()

    def abort_named(self, ids: Iterable[str]) -> None:
        """End the requests of these ids, exactly, as vLLM's own `/abort_requests` does."""
        named = frozenset(ids)
        for request in [one for one in self._requests if one.request_id in named]:
            request.abort()
            self.remove(request)

    async def give_kv(self, engine_id: Any, request_id: Any) -> bool:
        """Let another engine have KV that is pinned here. False: it cannot."""
        await self._block_while_hung()
        self.check_alive()
        return Tag.KV_CACHE not in self._asleep and self.kv.pull(engine_id, request_id)

    # HostedEngine

    async def load(self) -> EngineInfo:
        self.options = parse_options(self._engine_args)
        self._accepted()
        self._progress(f"simulating the load of {self.model} for {self.options.load_s:g} s")
        # The imports of the HTTP side are a part of that time, not on top of it.
        importing = asyncio.to_thread(importlib.import_module, _API)
        await asyncio.gather(asyncio.sleep(self.options.load_s), importing)
        if self.options.load_error is not None:
            raise EngineError(self.options.load_error)
        return EngineInfo(
            kind="sim",
            version=_version(),
            model=self.model,
            max_model_len=self.options.max_model_len,
            weight_transfer=True,
            weight_transfer_backend="sim",
        )

    def app(self) -> Any:
        from service.engine.simulated_api import make_app

        return make_app(self)

    async def serve_http(self, app: Any, sock: socket.socket) -> None:
        from service.engine.simulated_api import serve

        host, port = sock.getsockname()[:2]
        reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.kv.address = (self.options.kv_host or reached, port)
        await serve(app, sock)

    async def pause(self, mode: Mode, clear_cache: bool) -> None:
        await self._stopping("pause", mode, lambda: None)

    async def resume(self) -> None:
        await self._call("resume", self._resume)

    async def sleep(self, level: int, mode: Mode) -> None:
        await self._stopping("sleep", mode, lambda: self._asleep.update(Tag))

    async def wake_up(self, tags: tuple[Tag, ...]) -> None:
        await self._call("wake_up", lambda: self._asleep.difference_update(tags))

    async def init_weight_transfer(self, init_info: JsonMap) -> None:
        await self._call("init_weight_transfer", lambda: None)

    async def start_weight_update(self) -> None:
        await self._call("start_weight_update", self._open_session)

    async def update_weights(self, update_info: JsonMap | list[JsonMap]) -> None:
        """A chunk whose `update_info` has an `error` fails with that text, as in a real engine: the
        session is closed and the weights are incomplete."""
        await self._call("update_weights", lambda: self._load_chunk(update_info))

    async def finish_weight_update(self) -> None:
        await self._call("finish_weight_update", self._close_session)

    async def set_weight_version(self, version: str) -> None:
        def effect() -> None:
            self._weight_version = version

        await self._call("set_weight_version", effect)

    async def reset_caches(self) -> None:
        await self._call("reset_caches", lambda: None)

    async def ask(self) -> EngineView:
        return await self._call("ask", self._view)

    async def shutdown_weight_transfer(self) -> None:
        await self._call("shutdown_weight_transfer", lambda: None)

    async def abort_requests(self, request_ids: Sequence[str] = ()) -> None:
        self.check_alive()
        if request_ids:
            # A completion is `cmpl-X` to its client, and `cmpl-X-0`, `cmpl-X-1` … for each prompt here.
            known = {one.request_id for one in self._requests if one.request_id.startswith("cmpl-")}
            parts = {one for one in known if one.rpartition("-")[0] in request_ids}
            self.abort_named({*request_ids, *parts})
            return
        self._abort_all()
        if self._drain is not None and not self._drain.done():
            self._drain.set_result(None)

    async def simulate(self, script: JsonMap) -> None:
        self.check_alive()
        call, planned = parse_script(script)
        if call != "now":
            self._scripts[call].append(planned)
            return
        delay_s = max(NOW_S, planned.delay_s)
        asyncio.get_running_loop().call_later(delay_s, self._fault_now, planned.outcome)

    async def shutdown(self, timeout_s: float) -> None:
        if self._hung and not self._scripts["shutdown"]:
            # As vLLM: a core that does not answer is killed when the time is over.
            await asyncio.wait({self.died}, timeout=timeout_s)
            self._end()
        else:
            await self._call("shutdown", self._end)

    # The work of the calls, in no time

    def _resume(self) -> None:
        self._stop = None
        self._changed()

    def _stop_in(self, mode: Mode) -> None:
        if mode is Mode.ABORT:
            self._stop = Mode.ABORT
            self._abort_all()
        elif mode is Mode.KEEP or self._stop is None:
            self._stop = mode
        # Else a wait after another stop: as in vLLM frozen requests stay frozen and do not drain.
        self._changed()

    def _open_session(self) -> None:
        if self._session:
            self._broken |= self._chunks > 0
        self._session, self._chunks = True, 0
        self._changed()

    def _load_chunk(self, update_info: JsonMap | list[JsonMap]) -> None:
        if not self._session:
            raise EngineError("start_weight_update must be called before update_weights")
        if Tag.WEIGHTS in self._asleep:
            self._die("weights were loaded into memory that sleeps")
            raise EngineDied(self.died.result())
        self._chunks += 1
        for chunk in update_info if isinstance(update_info, list) else [update_info]:
            if "error" in chunk:
                self._session, self._broken = False, True
                raise EngineError(f"update_weights failed: {chunk['error']}")

    def _close_session(self) -> None:
        if not self._session:
            raise EngineError("finish_weight_update called without a matching start")
        self._session = False
        if self._chunks > 0:
            self._broken = False
        self._changed()

    def _view(self) -> EngineView:
        return EngineView(
            scheduling=self._stop is None,
            asleep=tuple(tag for tag in Tag if tag in self._asleep),
            meta_parameters=self._session or self._broken,
            session_open=self._session,
            weight_version=self._weight_version,
        )

    def _end(self) -> None:
        self._abort_all()
        self._shut_down = True
        self._changed()

    # How calls go

    async def _call(self, name: str, effect: Callable[[], T]) -> T:
        self.check_alive()
        await self._block_while_hung()
        script = self._next_script(name)
        if script is not None:
            await self._wait(script.delay_s)
            self._act(name, script)
        await self._wait(self.options.duration_s(name))
        return effect()

    async def _stopping(self, name: str, mode: Mode, effect: Callable[[], object]) -> None:
        """A stop is in force from the start of its call."""
        self.check_alive()
        await self._block_while_hung()
        script = self._next_script(name)
        if script is not None and script.outcome == "delay":
            await self._drain_for(script.delay_s)
        elif script is not None:
            await self._wait(script.delay_s)
            self._act(name, script)
            await self._block_while_hung()
        self._stop_in(mode)
        await self._wait(self.options.duration_s(name))
        if mode is Mode.WAIT:
            await self._drained()
        effect()

    def _next_script(self, name: str) -> Script | None:
        scripts = self._scripts[name]
        if not scripts:
            return None
        scripts[0].times -= 1
        return scripts.popleft() if scripts[0].times == 0 else scripts[0]

    def _act(self, name: str, script: Script) -> None:
        match script.outcome:
            case "error":
                raise EngineError(f"simulated error of {name}")
            case "die":
                self._die(f"simulated death during {name}")
                raise EngineDied(self.died.result())
            case "hang":
                self._hang()

    async def _wait(self, seconds: float) -> None:
        if seconds > 0:
            await asyncio.wait({self.died}, timeout=seconds)
        self.check_alive()
        await self._block_while_hung()

    async def _block_while_hung(self) -> None:
        if self._hung:
            await asyncio.wait({self.died})
            self.check_alive()

    async def _drain_for(self, seconds: float) -> None:
        """A drain that lasts this long, or until the requests are aborted."""
        if self._stop is None:
            self._stop = Mode.WAIT
            self._changed()
        self._drain = asyncio.get_running_loop().create_future()
        ends: set[asyncio.Future[Any]] = {self._drain, self.died}
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        self._drain = None
        self.check_alive()
        await self._block_while_hung()

    async def _drained(self) -> None:
        while self._stop is Mode.WAIT and any(request.started for request in self._requests):
            self._idle_or_stopped.clear()
            await self._idle_or_stopped.wait()
            self.check_alive()
        await self._block_while_hung()

    # Faults

    def _fault_now(self, outcome: str) -> None:
        match outcome:
            case "die":
                self._die("simulated death")
            case "hang":
                self._hang()
            case "pause_out_of_band":
                self._stop_in(Mode.KEEP)
            case "resume_out_of_band":
                self._resume()
            case "refuse":
                self.refuses = True
            case "admit":
                self.refuses = False
            case "cut":
                self.cut.set_result(None)
                self.cut = asyncio.get_running_loop().create_future()

    def _hang(self) -> None:
        self._hung = True
        self._changed()

    def _die(self, reason: str) -> None:
        if not self.died.done():
            self.died.set_result(reason)
            self._changed()

    def _abort_all(self) -> None:
        for request in tuple(self._requests):
            request.abort()
        self._requests.clear()
        self._changed()

    def _changed(self) -> None:
        self._idle_or_stopped.set()
        for request in self._requests:
            request.notice()


def _version() -> str:
    try:
        return metadata.version("watchkeeper")
    except metadata.PackageNotFoundError:
        return "0+source"
