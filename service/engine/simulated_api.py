"""The simulated engine's HTTP: the part of the OpenAI API that its users rely on, as vLLM answers it."""

import asyncio
import contextlib
import json
import socket
import time
import uuid
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from service.engine.protocol import EngineDied, JsonMap
from service.engine.simulated import SimulatedEngine
from service.engine.simulated_answer import Answer, Order, error_body
from service.engine.simulated_kv import KVLoadFailed
from service.engine.simulated_peer import remote_kv
from service.engine.simulated_words import Prompt, ids_of, of_ids, of_text

DEFAULT_MAX_TOKENS = 16

T = TypeVar("T")


class BadRequest(Exception):
    """The request's fault; answered in OpenAI's form."""

    def __init__(self, message: str, status: int = 400, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


def make_app(engine: SimulatedEngine) -> Starlette:
    api = _Api(engine)
    return Starlette(
        routes=[
            Route("/health", api.health),
            Route("/v1/models", api.models),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/abort_requests", api.abort, methods=["POST"]),
            Route("/inference/v1/abort_requests", api.abort_of_scale_out, methods=["POST"]),
            Route("/sim/kv", api.kv),
            Route("/sim/kv/pull", api.pull_kv, methods=["PUT"]),
            Route("/sim/kv/release", api.release_kv, methods=["PUT"]),
        ],
        exception_handlers={BadRequest: _refused},
    )


async def serve(app: Any, sock: socket.socket) -> None:
    """Serve on a bound socket until cancelled."""
    config = uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False, ws="none")
    server = _Server(config)
    try:
        await server.serve(sockets=[sock])
    finally:
        for listener in getattr(server, "servers", ()):
            listener.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # the control process decides when the engine ends


class _Api:
    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        try:
            self._engine.check_alive()
        except EngineDied:
            return Response(status_code=503)
        return Response()

    async def models(self, request: Request) -> Response:
        model = {
            "id": self._engine.model,
            "object": "model",
            "created": self._created,
            "owned_by": "watchkeeper",
            "root": self._engine.model,
            "parent": None,
            "max_model_len": self._engine.options.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, chat: bool) -> Response:
        if self._engine.refuses:
            return _internal_error("simulated: the engine refuses requests")
        body = await _body(request)
        params = _kv_params(body)
        try:
            order = self._order(body, params, chat, request.headers.get("x-request-id"))
        except BadRequest:
            # As vLLM: KV that waits for a request that is turned away is freed at once.
            if (remote := remote_kv(params)) is not None:
                remote.release()
            raise
        keeps_kv = bool(params.get("do_remote_decode"))
        generations = [
            self._engine.generate(order.max_tokens, prompt, keeps_kv, remote_kv(params))
            for prompt in order.prompts
        ]
        answer = Answer(order, self._engine.model, generations)
        if order.stream:
            return _Stream(answer, self._engine.cut)
        try:
            whole = await _unless_left(request, answer.whole())
        except KVLoadFailed:
            return _internal_error()
        finally:
            answer.close()
        return JSONResponse(whole) if whole is not None else Response(status_code=499)

    def _order(self, body: JsonMap, params: JsonMap, chat: bool, name: str | None) -> Order:
        model = body.get("model", self._engine.model)
        if model != self._engine.model:
            raise BadRequest(f"The model `{model}` does not exist.", 404, "NotFoundError")
        if body.get("n", 1) != 1:
            raise BadRequest("n must be 1: the simulated engine gives one answer a prompt")
        prompts = [_chat_prompt(body)] if chat else _prompts(body.get("prompt"))
        max_tokens = body.get("max_completion_tokens") if chat else None
        if max_tokens is None:
            max_tokens = body.get("max_tokens")
        if max_tokens is None:
            max_tokens = DEFAULT_MAX_TOKENS
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise BadRequest(f"max_tokens must be at least 1, got {max_tokens!r}.")
        limit = self._engine.options.max_model_len
        if (asked := max(len(prompt.ids) for prompt in prompts) + max_tokens) > limit:
            raise BadRequest(
                f"This model's maximum context length is {limit} tokens; {asked} were asked for."
            )
        stream, stream_options = body.get("stream") or False, body.get("stream_options") or {}
        if not isinstance(stream, bool) or not isinstance(stream_options, dict):
            raise BadRequest("stream must be a boolean, and stream_options an object")
        usage = bool(stream_options.get("include_usage"))
        return Order(
            chat=chat,
            name=name if name is not None else uuid.uuid4().hex,
            prompts=prompts,
            max_tokens=max_tokens,
            stream=stream,
            usage_in_stream=usage,
            usage_in_chunks=usage and bool(stream_options.get("continuous_usage_stats")),
            with_ids=bool(body.get("return_token_ids")),
        )

    async def abort(self, request: Request) -> Response:
        """As vLLM's router for reinforcement learning: no ids are all requests."""
        ids = _request_ids(await _body(request))
        ended = len(ids) or self._engine.in_flight
        if ids:
            self._abort(ids)
        else:
            await self._engine.abort_requests()
        return JSONResponse({"status": "aborted", "aborted": ended})

    async def abort_of_scale_out(self, request: Request) -> Response:
        body = await _body(request)
        if body.get("request_ids") is None:
            raise BadRequest("Missing 'request_ids' in request body")
        self._abort(_request_ids(body))
        return Response()

    def _abort(self, ids: list[str]) -> None:
        self._engine.abort_named(ids)
        if not self._engine.options.abort_keeps_kv:
            self._engine.kv.abort(ids)

    async def kv(self, request: Request) -> Response:
        kv = self._engine.kv
        names = ("pinned", "pulled", "expired", "aborted", "local_prefills", "failed_loads")
        return JSONResponse(
            {name: getattr(kv, name) for name in names} | {"in_flight": self._engine.in_flight}
        )

    async def pull_kv(self, request: Request) -> Response:
        body = await _body(request)
        try:
            found = await self._engine.give_kv(body.get("remote_engine_id"), body.get("remote_request_id"))
        except EngineDied:
            return Response(status_code=503)
        return Response(status_code=200 if found else 404)

    async def release_kv(self, request: Request) -> Response:
        body = await _body(request)
        found = self._engine.kv.release(body.get("remote_engine_id"), body.get("remote_request_id"))
        return Response(status_code=200 if found else 404)


class _Stream(StreamingResponse):
    """An answer as events, until they end or are cut."""

    def __init__(self, answer: Answer, cut: "asyncio.Future[None]") -> None:
        self._answer, self._events, self._cut = answer, answer.events(), cut
        super().__init__(self._events, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streaming = asyncio.ensure_future(super().__call__(scope, receive, send))
        try:
            ends: set[asyncio.Future[Any]] = {streaming, self._cut}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if streaming.done():
                streaming.result()
            # Else the answer stays without its end, and the server breaks the connection.
        finally:
            streaming.cancel()
            await asyncio.wait({streaming})
            await self._events.aclose()
            self._answer.close()


async def _unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """None if the client left first; the work is cancelled then."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        ends: set[asyncio.Future[Any]] = {working, leaving}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> JsonMap:
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    return body


def _kv_params(body: JsonMap) -> JsonMap:
    params = body.get("kv_transfer_params") or {}
    if not isinstance(params, dict):
        raise BadRequest("kv_transfer_params must be an object")
    return params


def _request_ids(body: JsonMap) -> list[str]:
    ids = body.get("request_ids") or []
    if isinstance(ids, str):
        return [ids]
    if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
        raise BadRequest("request_ids must be a list of strings")
    return ids


def _prompts(prompt: Any) -> list[Prompt]:
    if isinstance(prompt, str):
        return [of_text(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return [of_text(item) for item in prompt]
        if _is_ids(prompt):
            return [of_ids(prompt)]
        if all(isinstance(item, list) and _is_ids(item) for item in prompt):
            return [of_ids(item) for item in prompt]
    raise BadRequest("prompt must be a string, a list of strings, or a list (of lists) of token ids")


def _is_ids(items: list[Any]) -> bool:
    return bool(items) and all(isinstance(item, int) and not isinstance(item, bool) for item in items)


def _chat_prompt(body: JsonMap) -> Prompt:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list that is not empty")
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise BadRequest("each message must be an object with a role")
    ids = [one for message in messages for one in ids_of(_content(message))]
    if not body.get("continue_final_message"):
        return Prompt(ids)
    if body.get("add_generation_prompt", True):
        raise BadRequest("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    final = of_text(_content(messages[-1]))
    return Prompt(ids, final.first, final.open_ended)


def _content(message: JsonMap) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    return JSONResponse(error_body(str(error), error.kind, error.status), error.status)


def _internal_error(message: str = "Internal server error") -> Response:
    return JSONResponse(error_body(message, "InternalServerError", 500), 500)
