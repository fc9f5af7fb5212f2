"""An HTTP server that answers as an engine does, well or badly, and a router in this process before it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from service.listening import bind
from service.options import Address
from service.router.pool import Member
from service.router.server import Router
from service.router.settings import load_router
from service.shutdown import Resources
from tests.broker import eventually

TOKENS = 8


@dataclass
class Engine:
    """One engine. Token i of an answer is the word `t{i}`, counted on from those at the end of the prompt.

    Attributes:
        behaves: what it does to a request for inference: see `_infer`.
        times: how often it does that; then it is well.
        at: after how many tokens a stream breaks.
        retry_after: what it says in a refusal.
        healthy: whether `/health` is 200.
        asked: bodies and headers of all that it was asked, by path.
        probed: how often `/health` was asked.
        running: requests in it now.
        gate: streams wait for it before each token after the first.
    """

    behaves: str = "well"
    times: int = 10**9
    at: int = 3
    retry_after: str = "0.2"
    healthy: bool = True
    models: tuple[str, ...] = ("m",)
    asked: list[tuple[str, dict[str, Any], Mapping[str, str]]] = field(default_factory=list)
    probed: int = 0
    running: int = 0
    url: str = ""
    kept: set[str] = field(default_factory=set)
    fetched: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._infer)
        app.router.add_post("/v1/chat/completions", self._infer)
        app.router.add_post("/abort_requests", self._abort)
        app.router.add_post("/v1/embeddings", self._echo)
        app.router.add_route("*", "/v1/stream", self._bytes)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)

    async def start(self, port: int = 0) -> "Engine":
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        await self._runner.cleanup()

    def bodies(self, path: str = "/v1/completions") -> list[dict[str, Any]]:
        return [body for where, body, _ in self.asked if where == path]

    async def _health(self, request: web.Request) -> web.Response:
        self.probed += 1
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        cards = [{"id": name, "object": "model", "owned_by": "engine"} for name in self.models]
        return web.json_response({"object": "list", "data": cards})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.path, body, request.headers))
        self.kept -= set(body["request_ids"])
        return web.json_response({"status": "aborted", "aborted": len(body["request_ids"])})

    async def _echo(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.asked.append((request.path_qs, json.loads(body), request.headers))
        if self.behaves == "500":
            return _error(500, "InternalServerError", "broken")
        return web.Response(body=body, content_type="application/json", headers={"X-Engine": "1"})

    async def _bytes(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": request.query.get("type", "audio/wav")})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        if self.behaves == "cut":
            assert request.transport is not None
            request.transport.abort()
        return response

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append((request.path, body, request.headers))
        self.running += 1
        try:
            behaviour = "well"
            if self.times > 0:
                self.times -= 1
                behaviour = self.behaves
            return await self._answer(request, body, behaviour)
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], behaviour: str) -> web.StreamResponse:
        match behaviour:
            case "500":
                return _error(500, "InternalServerError", "broken")
            case "503":
                return _error(503, "overloaded", "something else")
            case "400":
                return _error(400, "BadRequestError", "no such sampling parameter")
            case "429":
                return _error(429, "busy", "later")
            case "paused":
                response = _error(503, "engine_paused", "paused by command")
                response.headers["Retry-After"] = self.retry_after
                return response
            case "hang":
                await asyncio.Event().wait()
            case "drop":
                assert request.transport is not None
                request.transport.abort()
                await asyncio.Event().wait()
            case "empty":
                return web.Response(status=200, content_type="application/json")
            case "error 200":
                return web.json_response({"error": {"code": 500, "message": "engine is dead"}})
        chat = request.path.endswith("chat/completions")
        first = _next_token(body, chat)
        count = body.get("max_tokens") or body.get("max_completion_tokens") or TOKENS
        tokens = range(first, first + count)
        head = {"id": f"cmpl-{request.headers.get('X-Request-Id', 'x')}", "created": 1, "model": "m"}
        if body.get("stream"):
            return await self._stream(request, body, behaviour, chat, list(tokens), head)
        await self.gate.wait()
        reason = "abort" if behaviour == "abort" else "length"
        text = "".join(map(_word, tokens))
        message = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice = {"index": 0, **message, "finish_reason": reason}
        kv = self._keep(body, request.headers.get("X-Request-Id", ""))
        return web.json_response({**head, "choices": [choice], **kv})

    def _keep(self, body: dict[str, Any], request_id: str) -> dict[str, Any]:
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            self.kept.add(f"cmpl-{request_id}-0")
            given = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.url}
            more = {"remote_request_id": f"cmpl-{request_id}-0", "remote_block_ids": [[1]]}
            return {"kv_transfer_params": {**given, **more, "remote_host": "h", "remote_port": 1}}
        if params.get("do_remote_prefill"):
            self.fetched.add(params["remote_request_id"])
        return {}

    async def _stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        behaviour: str,
        chat: bool,
        tokens: list[int],
        head: dict[str, Any],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        self._keep(body, "")
        if behaviour == "no events":
            return response
        if behaviour == "error first":
            await response.write(_event({"error": {"code": 500, "message": "engine is dead"}}))
            return response
        if behaviour == "400 first":
            await response.write(_event({"error": {"code": 400, "message": "bad"}}))
            return response
        if chat:
            opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            await response.write(_event({**head, "choices": [opening]}))
        for number, token in enumerate(tokens):
            if number == self.at and (end := self._break(behaviour, request)) is not None:
                if end:
                    await response.write(end)
                return response
            text = {"delta": {"content": _word(token)}} if chat else {"text": _word(token)}
            last = number == len(tokens) - 1
            choice = {"index": 0, **text, "finish_reason": "length" if last else None}
            usage = {"prompt_tokens": 1, "completion_tokens": number + 1, "total_tokens": number + 2}
            continuous = (body.get("stream_options") or {}).get("continuous_usage_stats")
            more = {"usage": usage} if continuous else {}
            await response.write(_event({**head, "choices": [choice], **more}))
            if not last:
                await self.gate.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    def _break(self, behaviour: str, request: web.Request) -> bytes | None:
        match behaviour:
            case "cut":
                assert request.transport is not None
                request.transport.abort()
                return b""
            case "half":
                return b'data: {"choices": [{"index": 0, "te'
            case "stop":
                return b""
            case "error":
                return _event({"error": {"code": "engine_failed", "message": "died"}}) + b"data: [DONE]\n\n"
            case "pause":
                return _event({"error": {"code": "engine_paused", "message": "paused", "retryable": True}})
            case "abort":
                choice = {"index": 0, "text": "", "finish_reason": "abort"}
                return _event({"choices": [choice]}) + b"data: [DONE]\n\n"
        return None


def _word(token: int) -> str:
    return f" t{token}"


def _next_token(body: dict[str, Any], chat: bool) -> int:
    text = body["messages"][-1]["content"] if chat else body.get("prompt", "")
    if not isinstance(text, str):
        return 0
    return len([word for word in text.split() if word.startswith("t")])


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _error(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"code": code, "message": message}}, status=status)


class Routing:
    """A router in this process.

    Attributes:
        http: a client of it.
    """

    def __init__(self, router: Router, http: aiohttp.ClientSession) -> None:
        self.router, self.http = router, http

    def member(self, engine: Engine) -> Member:
        return next(one for one in self.router.dispatch.membership if one.url == engine.url)

    async def until_used(self, *engines: Engine) -> None:
        await eventually(lambda: all(self.member(engine).admissible for engine in engines))

    async def until(self, condition: Callable[[], object]) -> None:
        await eventually(condition)

    async def complete(self, **body: Any) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        """Status, answer and headers of a completion that is not streamed."""
        body = {"prompt": "p", "max_tokens": TOKENS, **body}
        async with self.http.post("/v1/completions", json=body) as response:
            return response.status, await response.json(content_type=None), response.headers

    async def stream(self, path: str = "/v1/completions", **body: Any) -> "Streamed":
        body = {"stream": True, "max_tokens": TOKENS, **body}
        if path == "/v1/completions":
            body.setdefault("prompt", "p")
        else:
            body.setdefault("messages", [{"role": "user", "content": "p"}])
        async with self.http.post(path, json=body) as response:
            return Streamed(response.status, response.headers, await response.read())

    def idle(self) -> bool:
        """Whether nothing is booked, and nothing is in flight."""
        members = list(self.router.dispatch.membership)
        return not self.router.proxy.in_flight and all(
            one.load == 0 and one.in_flight == 0 for one in members
        )


@dataclass
class Streamed:
    """A streamed answer as its client got it."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def text(self) -> str:
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices
        )

    @property
    def error(self) -> dict[str, Any] | None:
        return next((event["error"] for event in self.events if "error" in event), None)

    @property
    def done(self) -> bool:
        return self.body.endswith(b"data: [DONE]\n\n")


def text(count: int = TOKENS, start: int = 0) -> str:
    return "".join(map(_word, range(start, start + count)))


@contextlib.asynccontextmanager
async def engines(count: int, **how: Any) -> AsyncIterator[list[Engine]]:
    made = [await Engine(**how).start() for _ in range(count)]
    try:
        yield made
    finally:
        for engine in made:
            engine.gate.set()
            await engine.stop()


@contextlib.asynccontextmanager
async def routing(
    statics: dict[str, list[Engine]] | list[Engine], *flags: str, nats: str | None = None, wait: bool = True
) -> AsyncIterator[Routing]:
    """A router for these engines (by role), with `flags` such as `wait_s=2`."""
    by_role = statics if isinstance(statics, dict) else {"aggregated": statics}
    given: dict[str, Any] = {
        "static": [f"{role}={engine.url}" for role, members in by_role.items() for engine in members],
        "http_address": "127.0.0.1:0",
        "nats": nats or "nats://127.0.0.1:1",
        "nats_wait_s": "5" if nats else "0",
        "probe_interval_s": "600",
        **dict(flag.split("=", 1) for flag in flags),
    }
    settings = load_router(given, environ={})
    resources = Resources()
    try:
        bound = bind(settings.http_address)
        router = Router(settings, resources)
        await router.open(Address("127.0.0.1", bound.getsockname()[1]))
        await router.proxy.start(bound)
        resources.register("HTTP listener", router.proxy.close)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        limit = aiohttp.ClientTimeout(30)
        async with aiohttp.ClientSession(url, timeout=limit) as http:
            made = Routing(router, http)
            if wait:
                await made.until_used(*(engine for members in by_role.values() for engine in members))
            yield made
    finally:
        await resources.release()
