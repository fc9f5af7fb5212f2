"""The simulated engine's HTTP: the part of the OpenAI API that its users rely on, as vLLM answers it."""

import asyncio
import contextlib
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from service.engine.protocol import EngineDied
from service.engine.simulated import Generation, SimulatedEngine

DEFAULT_MAX_TOKENS = 16

T = TypeVar("T")


class BadRequest(Exception):
    """The request's fault; answered in OpenAI's form."""

    def __init__(self, message: str, status: int = 400, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(frozen=True)
class Order:
    """What a request asks for.

    Attributes:
        prompts: number of tokens of each.
    """

    chat: bool
    prompts: Sequence[int]
    max_tokens: int
    stream: bool
    usage_in_stream: bool


def make_app(engine: SimulatedEngine) -> Starlette:
    api = _Api(engine)
    return Starlette(
        routes=[
            Route("/health", api.health),
            Route("/v1/models", api.models),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
        ]
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
        try:
            order = self._order(await _body(request), chat)
        except BadRequest as error:
            details = {"message": str(error), "type": error.kind, "param": None, "code": error.status}
            return JSONResponse({"error": details}, error.status)
        generations = [self._engine.generate(order.max_tokens) for _ in order.prompts]
        answer = _Answer(order, self._engine.model, generations)
        if order.stream:
            return StreamingResponse(answer.events(), media_type="text/event-stream")
        whole = await _unless_left(request, answer.whole())
        return JSONResponse(whole) if whole is not None else Response(status_code=499)

    def _order(self, body: dict[str, Any], chat: bool) -> Order:
        model = body.get("model", self._engine.model)
        if model != self._engine.model:
            raise BadRequest(f"The model `{model}` does not exist.", 404, "NotFoundError")
        if body.get("n", 1) != 1:
            raise BadRequest("n must be 1: the simulated engine gives one answer a prompt")
        prompts = [_chat_tokens(body.get("messages"))] if chat else _prompt_tokens(body.get("prompt"))
        max_tokens = body.get("max_tokens")
        if chat and max_tokens is None:
            max_tokens = body.get("max_completion_tokens")
        if max_tokens is None:
            max_tokens = DEFAULT_MAX_TOKENS
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise BadRequest(f"max_tokens must be at least 1, got {max_tokens!r}.")
        limit = self._engine.options.max_model_len
        if (asked := max(prompts) + max_tokens) > limit:
            raise BadRequest(
                f"This model's maximum context length is {limit} tokens; {asked} were asked for."
            )
        stream, stream_options = body.get("stream") or False, body.get("stream_options") or {}
        if not isinstance(stream, bool) or not isinstance(stream_options, dict):
            raise BadRequest("stream must be a boolean, and stream_options an object")
        return Order(chat, prompts, max_tokens, stream, bool(stream_options.get("include_usage")))


class _Answer:
    """One answer in OpenAI's form, whole or as a stream of events."""

    def __init__(self, order: Order, model: str, generations: list[Generation]) -> None:
        self._order = order
        self._generations = generations
        self._made = [0] * len(generations)
        prefix, kind = ("chatcmpl", "chat.completion") if order.chat else ("cmpl", "text_completion")
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if order.chat and order.stream else kind,
            "created": int(time.time()),
            "model": model,
        }
        for generation in generations:
            generation.request_id = str(self._head["id"])

    async def whole(self) -> dict[str, Any]:
        texts = await asyncio.gather(*map(self._text, range(len(self._generations))))
        choices = [self._choice(index, text) for index, text in enumerate(texts)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        if self._order.chat:
            for index in range(len(self._generations)):
                yield self._chunk(index, None, None)
        async for index, token in self._merged():
            generation = self._generations[index]
            last = token is None or self._made[index] == self._order.max_tokens
            yield self._chunk(index, token, generation.finish_reason if last else None)
        if self._order.usage_in_stream:
            yield _event({**self._head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    async def _text(self, index: int) -> str:
        words = []
        async for token in self._generations[index].tokens():
            words.append(f"t{token}")
            self._made[index] += 1
        return " ".join(words)

    async def _merged(self) -> AsyncIterator[tuple[int, int | None]]:
        """Tokens of all generations as they come; None for one that ended early."""
        queue: asyncio.Queue[tuple[int, int | None]] = asyncio.Queue()

        async def follow(index: int) -> None:
            async for token in self._generations[index].tokens():
                queue.put_nowait((index, token))
            if self._generations[index].finish_reason == "abort":
                queue.put_nowait((index, None))

        followers = [asyncio.create_task(follow(index)) for index in range(len(self._generations))]
        everyone = asyncio.ensure_future(asyncio.gather(*followers))
        try:
            while not (everyone.done() and queue.empty()):
                item = asyncio.ensure_future(queue.get())
                ends: set[asyncio.Future[Any]] = {item, everyone}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not item.done():
                    item.cancel()
                    await everyone  # raises what ended it
                    continue
                index, token = item.result()
                self._made[index] += token is not None
                yield index, token
            await everyone
        finally:
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        reason = self._generations[index].finish_reason
        if self._order.chat:
            message = {"role": "assistant", "content": text}
            return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def _chunk(self, index: int, token: int | None, reason: str | None) -> bytes:
        text = "" if token is None else f" t{token}" if token else "t0"
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": reason}
        if not self._order.chat:
            choice["text"] = text
        elif token is None and reason is None:
            choice["delta"] = {"role": "assistant", "content": ""}
        else:
            choice["delta"] = {"content": text}
        return _event({**self._head, "choices": [choice]})

    def _usage(self) -> dict[str, int]:
        prompt, completion = sum(self._order.prompts), sum(self._made)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


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


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    return body


def _prompt_tokens(prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return [_words(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return [_words(item) for item in prompt]
        if _is_tokens(prompt):
            return [len(prompt)]
        if all(isinstance(item, list) and _is_tokens(item) for item in prompt):
            return [len(item) for item in prompt]
    raise BadRequest("prompt must be a string, a list of strings, or a list (of lists) of token ids")


def _is_tokens(items: list[Any]) -> bool:
    return bool(items) and all(isinstance(item, int) and not isinstance(item, bool) for item in items)


def _chat_tokens(messages: Any) -> int:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list that is not empty")
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise BadRequest("each message must be an object with a role")
    return sum(_words(str(message.get("content") or "")) for message in messages)


def _words(text: str) -> int:
    return max(1, len(text.split()))


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
