"""An engine without a model: the same calls and states as vLLM's, scripted faults, words for tokens.

It behaves as vLLM does where a caller can go wrong, too: a request that is scheduled while the
weights are not there ends the engine.
"""

import argparse
import asyncio
import importlib
import math
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NoReturn, TypeVar

from service.engine.protocol import (
    EngineDied,
    EngineError,
    EngineInfo,
    EngineRefused,
    EngineView,
    HostedEngine,
    JsonMap,
)
from statemachine.states import Mode, Tag

NOW_S = 0.01
"""A fault at once comes this long after `simulate` was answered."""

CALL_MS: dict[str, float] = {
    "pause": 1,
    "resume": 1,
    "sleep": 5,
    "wake_up": 5,
    "init_weight_transfer": 5,
    "start_weight_update": 5,
    "update_weights": 5,
    "finish_weight_update": 5,
    "set_weight_version": 1,
    "reset_caches": 1,
    "shutdown_weight_transfer": 1,
    "ask": 0,
    "shutdown": 5,
}
"""How long each call takes, and the names of those that can be scripted."""

OUTCOMES = ("error", "hang", "delay", "die")
NOW_OUTCOMES = ("die", "hang", "pause_out_of_band", "resume_out_of_band")

_API = "service.engine.simulated_api"

T = TypeVar("T")


@dataclass
class Options:
    """What stands after `--` on the command line."""

    token_interval_s: float = 0.001
    load_s: float = 0.1
    load_error: str | None = None
    max_model_len: int = 131_072
    call_s: dict[str, float] | None = None

    def duration_s(self, call: str) -> float:
        return (self.call_s or {}).get(call, CALL_MS[call] / 1000)


@dataclass
class Script:
    """What one of the next calls of a name does instead of, or before, its work."""

    outcome: str
    delay_s: float
    times: int


class Generation:
    """One request in the engine."""

    def __init__(self, engine: "SimulatedEngine", max_tokens: int) -> None:
        self._engine = engine
        self._max_tokens = max_tokens
        self.request_id = ""
        """As its client knows it."""
        self._news = asyncio.Event()
        self.started = False
        """It was scheduled once: a drain waits for it."""
        self.finish_reason: str | None = None

    def notice(self) -> None:
        """Something about the engine changed."""
        self._news.set()

    def abort(self) -> None:
        self.finish_reason = "abort"
        self.notice()

    async def tokens(self) -> AsyncIterator[int]:
        """Numbers of the tokens; at the end `finish_reason` is set.

        Raises:
            EngineDied: the engine died before the last one.
        """
        self._engine.add(self)
        try:
            for number in range(self._max_tokens):
                if not await self._step():
                    return
                if number == self._max_tokens - 1:
                    self.finish_reason = "length"
                    self._engine.remove(self)
                yield number
        finally:
            self._engine.remove(self)

    async def _step(self) -> bool:
        """Take the time that a token takes, then as long as the engine is stopped. False: aborted."""
        loop = asyncio.get_running_loop()
        computed = loop.create_future()
        timer = loop.call_later(self._engine.options.token_interval_s, _resolve, computed, self._news)
        try:
            while True:
                self._news.clear()
                if self.finish_reason is not None:
                    return False
                self._engine.check_alive()
                if self._engine.schedules(self) and computed.done():
                    return True
                await self._news.wait()
        finally:
            timer.cancel()


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

    def generate(self, max_tokens: int) -> Generation:
        return Generation(self, max_tokens)

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

    # HostedEngine

    async def load(self) -> EngineInfo:
        self.options = _options(self._engine_args)
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
            for request in [one for one in self._requests if one.request_id in request_ids]:
                request.abort()
                self.remove(request)
            return
        self._abort_all()
        if self._drain is not None and not self._drain.done():
            self._drain.set_result(None)

    async def simulate(self, script: JsonMap) -> None:
        self.check_alive()
        call, planned = _script(script)
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise EngineRefused(f"simulated engine: {message}")


def _options(engine_args: list[str]) -> Options:
    parser = _Parser(prog="sim", add_help=False, allow_abbrev=False)
    parser.add_argument("--token-interval-ms", type=_not_negative, default=1.0)
    parser.add_argument("--load-s", type=_not_negative, default=0.1)
    parser.add_argument("--load-error")
    parser.add_argument("--max-model-len", type=int, default=Options.max_model_len)
    parser.add_argument("--call-ms", type=_durations, action="append", default=[])
    given = parser.parse_args(engine_args)
    return Options(
        token_interval_s=given.token_interval_ms / 1000,
        load_s=given.load_s,
        load_error=given.load_error,
        max_model_len=given.max_model_len,
        call_s={name: ms / 1000 for durations in given.call_ms for name, ms in durations.items()},
    )


def _not_negative(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(text)
    return value


def _durations(text: str) -> dict[str, float]:
    durations = {}
    for part in text.split(","):
        name, _, ms = part.partition("=")
        if name not in CALL_MS:
            raise argparse.ArgumentTypeError(f"unknown call {name!r}, known are {', '.join(CALL_MS)}")
        try:
            durations[name] = _not_negative(ms)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=MILLISECONDS") from None
    return durations


def _script(script: JsonMap) -> tuple[str, Script]:
    call, outcome = script.get("call"), script.get("outcome")
    delay_s, times = script.get("delay_s", 0), script.get("times", 1)
    if not isinstance(call, str) or (call != "now" and call not in CALL_MS):
        raise EngineError(f"call must be now or one of {', '.join(CALL_MS)}")
    allowed = NOW_OUTCOMES if call == "now" else OUTCOMES
    if outcome not in allowed:
        raise EngineError(f"outcome must be one of {', '.join(allowed)}")
    if isinstance(delay_s, bool) or not isinstance(delay_s, int | float) or not 0 <= delay_s < math.inf:
        raise EngineError("delay_s must be a number of seconds, not negative")
    if isinstance(times, bool) or not isinstance(times, int) or times < 1:
        raise EngineError("times must be a positive integer")
    return call, Script(outcome, float(delay_s), times)


def _version() -> str:
    try:
        return metadata.version("watchkeeper")
    except metadata.PackageNotFoundError:
        return "0+source"


def _resolve(future: "asyncio.Future[None]", news: asyncio.Event) -> None:
    if not future.done():
        future.set_result(None)
    news.set()
