"""Who is let in to the engine: ASGI middleware around the engine's HTTP application.

Only inference requests are asked for: POST requests, except those that do not compute, and
websockets. A request that may not run is never cut silently; it gets an error that says that it may
be tried again, in the form in which its answer came so far.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from statemachine.states import Admission

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

RETRY_AFTER_S = 1
CANCEL_S = 5.0
"""How long an application may take to end after it was cancelled; then it is left alone."""

TRY_AGAIN_LATER = 1013
"""WebSocket close code, https://www.iana.org/assignments/websocket/websocket.xhtml"""

_CODES = {
    Admission.OPEN: "engine_paused",
    Admission.HELD: "engine_paused",
    Admission.REFUSED: "engine_paused",
    Admission.CLOSED: "shutting_down",
}

NOT_INFERENCE = frozenset(
    {
        # vLLM 0.32 and 0.33: tokenising and rendering
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        # control
        "/abort_requests",
        "/collective_rpc",
        "/fault_tolerance/apply",
        "/finish_weight_update",
        "/inference/v1/abort_requests",
        "/init_weight_transfer_engine",
        "/is_scaling_elastic_ep",
        "/pause",
        "/ping",
        "/release_kv_cache_memory",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/scale_elastic_ep",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_draft_weight_update",
        "/start_profile",
        "/start_weight_update",
        "/stop_profile",
        "/update_weight_version",
        "/update_weights",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/wake_up",
        "/weight_checker",
    }
)
NOT_INFERENCE_ENDS = ("/render", "/derender", "/cancel")
"""Such as `/v1/chat/completions/render` and `/v1/responses/{id}/cancel`."""


def is_inference(scope: Scope) -> bool:
    """Whether the gate decides about this connection."""
    if scope["type"] == "websocket":
        return True
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    path = "/" + path.strip("/")
    return path not in NOT_INFERENCE and not path.endswith(NOT_INFERENCE_ENDS)


@dataclass(frozen=True)
class Refusal:
    """Why a request does not run, in the words its client gets."""

    code: str
    message: str
    closing: bool = False

    def body(self) -> bytes:
        error = {"code": self.code, "retryable": True, "message": self.message}
        return json.dumps({"error": error}).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self.body())).encode()),
            (b"retry-after", str(RETRY_AFTER_S).encode()),
        ]
        return [*headers, (b"connection", b"close")] if self.closing else headers


class AdmissionGate:
    """The middleware. It starts refusing, and belongs to one event loop."""

    def __init__(
        self,
        app: App,
        on_in_flight: Callable[[int], None],
        lost: Callable[[], Awaitable[str | None]] | None = None,
    ) -> None:
        """
        Args:
            on_in_flight: gets the number of requests let in or held, at each change.
            lost: asked when the application fails a request; the reason if the engine is gone.
        """
        self._app = app
        self._on_in_flight = on_in_flight
        self._lost = lost
        self._admission = Admission.REFUSED
        self._refusal = Refusal("not_ready", "the engine is starting")
        self._exchanges: set[_Exchange] = set()

    @property
    def in_flight(self) -> int:
        return len(self._exchanges)

    def set(self, admission: Admission, reason: str, end_held: bool, code: str = "") -> None:
        """Decide about requests from now on.

        Args:
            reason: told to those who are refused.
            end_held: also end what is held here, and what was let in and has not ended, in the
                engine too.
            code: error code of the refusal; empty: what the admission implies.
        """
        self._admission = admission
        self._refusal = Refusal(code or _CODES[admission], reason, closing=admission is Admission.CLOSED)
        for exchange in tuple(self._exchanges):
            if end_held:
                exchange.end(self._refusal)
            exchange.look_again()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_inference(scope):
            await self._app(scope, receive, send)
            return
        kind = _WebSocket if scope["type"] == "websocket" else _Http
        exchange = kind(scope, receive, send, self._reason_if_lost)
        if self._admission in (Admission.REFUSED, Admission.CLOSED):
            await exchange.refuse(self._refusal)
            return
        self._exchanges.add(exchange)
        self._on_in_flight(len(self._exchanges))
        try:
            await self._let_through(exchange)
        finally:
            self._exchanges.discard(exchange)
            self._on_in_flight(len(self._exchanges))

    async def _let_through(self, exchange: "_Exchange") -> None:
        while self._admission is Admission.HELD and exchange.refusal is None:
            if not await exchange.hold():
                return  # the client left
        if exchange.refusal is not None:
            await exchange.refuse(exchange.refusal)
        elif self._admission is Admission.OPEN:
            await exchange.run(self._app)
        else:
            await exchange.refuse(self._refusal)

    async def _reason_if_lost(self) -> Refusal | None:
        reason = await self._lost() if self._lost is not None else None
        return None if reason is None else Refusal("engine_failed", reason, closing=True)


class _Exchange(ABC):
    """One request and its answer, between the server and the application."""

    LEFT = ""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        lost: Callable[[], Awaitable[Refusal | None]],
    ) -> None:
        self._scope, self._receive, self._send, self._lost = scope, receive, send, lost
        self._early: deque[Message] = deque()
        """Messages that came while the request was held, for the application."""
        self._receiving: asyncio.Future[Message] | None = None
        self._change: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.refusal: Refusal | None = None
        """Why the request does not run or go on."""

    @abstractmethod
    async def refuse(self, refusal: Refusal) -> None:
        """Answer with an error; nothing was answered yet."""

    @abstractmethod
    async def conclude(self, refusal: Refusal) -> None:
        """End with an error an answer that may have begun."""

    @abstractmethod
    async def passed(self, message: Message) -> Refusal | None:
        """Look at a message of the application before it is sent: is it the engine's last word?"""

    @abstractmethod
    def sent(self, message: Message) -> None:
        """Note what has been sent."""

    async def hold(self) -> bool:
        """Wait until the gate changes. False if the client left."""
        self._change = asyncio.get_running_loop().create_future()
        try:
            while not self._change.done():
                if self._receiving is None:
                    self._receiving = asyncio.ensure_future(self._receive())
                ends: set[asyncio.Future[Any]] = {self._change, self._receiving}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if self._receiving.done():
                    message = self._receiving.result()
                    self._receiving = None
                    if message["type"] == self.LEFT:
                        return False
                    self._early.append(message)
        except BaseException:
            self._stop_receiving()
            raise
        return True

    def look_again(self) -> None:
        """The gate changed."""
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    def end(self, refusal: Refusal) -> None:
        """Take the request from the application, or from those that are held; its client is told."""
        if self.refusal is None:
            self.refusal = refusal
            self._ended.set_result(None)

    async def run(self, app: App) -> None:
        task = asyncio.ensure_future(app(self._scope, self._next_message, self._forward))
        try:
            ends: set[asyncio.Future[Any]] = {task, self._ended}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self.refusal is None and (error := task.exception()) is not None:
                if (refusal := await self._lost()) is None:
                    raise error
                self.end(refusal)
            if self.refusal is not None:
                task.cancel()
                await self.conclude(self.refusal)
        finally:
            task.add_done_callback(_look_at_exception)
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_S)
            self._stop_receiving()

    async def _next_message(self) -> Message:
        if self._early:
            return self._early.popleft()
        if self._receiving is not None:
            receiving, self._receiving = self._receiving, None
            return await receiving
        return await self._receive()

    async def _forward(self, message: Message) -> None:
        if self.refusal is None and (refusal := await self.passed(message)) is not None:
            self.end(refusal)
        if self.refusal is None:
            await self._send(message)
            self.sent(message)

    def _stop_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None


def _look_at_exception(task: "asyncio.Future[None]") -> None:
    if not task.cancelled():
        task.exception()


class _Http(_Exchange):
    LEFT = "http.disconnect"

    _started = False
    _events = False
    _between_events = True
    _complete = False

    async def refuse(self, refusal: Refusal) -> None:
        await self._send({"type": "http.response.start", "status": 503, "headers": refusal.headers()})
        await self._send({"type": "http.response.body", "body": refusal.body(), "more_body": False})

    async def conclude(self, refusal: Refusal) -> None:
        if self._complete:
            return
        if not self._started:
            await self.refuse(refusal)
        elif self._events:
            event = b"data: " + refusal.body() + b"\n\n"
            if not self._between_events:
                event = b"\n\n" + event
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        # Else there is no way to say it inside the body. The server breaks the connection, because
        # the body is not complete, and the client sees that.

    async def passed(self, message: Message) -> Refusal | None:
        match message["type"]:
            case "http.response.start" if message["status"] >= 500:
                return await self._lost()
            case "http.response.body" if self._events and b'"error"' in message.get("body", b"")[:80]:
                return await self._lost()
        return None

    def sent(self, message: Message) -> None:
        match message["type"]:
            case "http.response.start":
                self._started = True
                headers = dict(message.get("headers", ()))
                self._events = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            case "http.response.body":
                if body := message.get("body", b""):
                    self._between_events = body.endswith((b"\n\n", b"\r\n\r\n"))
                self._complete = not message.get("more_body", False)


class _WebSocket(_Exchange):
    LEFT = "websocket.disconnect"

    _accepted = False
    _complete = False

    async def refuse(self, refusal: Refusal) -> None:
        if "websocket.http.response" in self._scope.get("extensions", {}):
            start = {"type": "websocket.http.response.start", "status": 503, "headers": refusal.headers()}
            await self._send(start)
            await self._send({"type": "websocket.http.response.body", "body": refusal.body()})
        else:
            await self._close(refusal)

    async def conclude(self, refusal: Refusal) -> None:
        if self._complete:
            return
        if self._accepted:
            await self._close(refusal)
        else:
            await self.refuse(refusal)

    async def passed(self, message: Message) -> Refusal | None:
        failing = message["type"] == "websocket.close" and message.get("code") == 1011
        return await self._lost() if failing else None

    def sent(self, message: Message) -> None:
        self._accepted |= message["type"] == "websocket.accept"
        self._complete |= message["type"] in ("websocket.close", "websocket.http.response.start")

    async def _close(self, refusal: Refusal) -> None:
        # A close frame carries at most 123 bytes of reason.
        reason = f"{refusal.code}: {refusal.message}".encode()[:120].decode(errors="ignore")
        await self._send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": reason})
