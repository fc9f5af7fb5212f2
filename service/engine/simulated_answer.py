"""Answers of the simulated engine in OpenAI's form, with what vLLM adds to it."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from service.engine.protocol import JsonMap
from service.engine.simulated_kv import KVLoadFailed
from service.engine.simulated_requests import Generation
from service.engine.simulated_words import Prompt, token_id


@dataclass(frozen=True)
class Order:
    """What a request asks for.

    Attributes:
        name: what its ids are made of.
        usage_in_stream: at the end of a stream.
        usage_in_chunks: in all of them, too.
        with_ids: token ids of prompts and answers.
    """

    chat: bool
    name: str
    prompts: Sequence[Prompt]
    max_tokens: int
    stream: bool
    usage_in_stream: bool
    usage_in_chunks: bool
    with_ids: bool


class Answer:
    """One answer, whole or as a stream of events."""

    def __init__(self, order: Order, model: str, generations: list[Generation]) -> None:
        self._order = order
        self._generations = generations
        self._made = [0] * len(generations)
        prefix, kind = ("chatcmpl", "chat.completion") if order.chat else ("cmpl", "text_completion")
        name = f"{prefix}-{order.name}"
        self._head = {
            "id": name,
            "object": f"{kind}.chunk" if order.chat and order.stream else kind,
            "created": int(time.time()),
            "model": model,
        }
        for index, generation in enumerate(generations):
            generation.request_id = name if order.chat else f"{name}-{index}"

    def close(self) -> None:
        """It is over, even if it never began."""
        for generation in self._generations:
            generation.close()

    async def whole(self) -> JsonMap:
        """
        Raises:
            KVLoadFailed
        """
        everything = await asyncio.gather(*map(self._tokens, range(len(self._generations))))
        answer = {
            **self._head,
            "choices": [self._choice(index, tokens) for index, tokens in enumerate(everything)],
            "usage": self._usage(*range(len(self._generations))),
        }
        if self._order.chat and self._order.with_ids:
            answer["prompt_token_ids"] = self._order.prompts[0].ids
        if (params := self._generations[0].kv_transfer_params) is not None:
            answer["kv_transfer_params"] = params
        return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        # With the first news of the engine, not before.
        openings = [self._opening(index) for index in range(len(self._generations)) if self._order.chat]
        try:
            async with aclosing(self._merged()) as merged:
                async for index, token in merged:
                    while openings:
                        yield openings.pop(0)
                    yield self._chunk(index, token)
        except KVLoadFailed:
            for opening in openings:
                yield opening
            yield _event(error_body("Internal server error", "InternalServerError", 500))
        else:
            if self._order.usage_in_stream:
                usage = self._usage(*range(len(self._generations)))
                yield _event({**self._head, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    async def _tokens(self, index: int) -> list[int]:
        tokens = []
        async for token in self._generations[index].tokens():
            tokens.append(token)
            self._made[index] += 1
        return tokens

    async def _merged(self) -> AsyncGenerator[tuple[int, int | None], None]:
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
            await asyncio.gather(*followers, everyone, return_exceptions=True)

    def _choice(self, index: int, tokens: list[int]) -> JsonMap:
        prompt = self._order.prompts[index]
        text = "".join(map(prompt.text, tokens))
        answer: JsonMap = {"message": {"role": "assistant", "content": text}}
        choice = {
            "index": index,
            **(answer if self._order.chat else {"text": text}),
            "logprobs": None,
            "finish_reason": self._generations[index].finish_reason,
        }
        if self._order.with_ids:
            choice["token_ids"] = list(map(token_id, tokens))
            if not self._order.chat:
                choice["prompt_token_ids"] = prompt.ids
        return choice

    def _opening(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "logprobs": None, "finish_reason": None, "delta": delta}
        chunk = {**self._head, "choices": [choice]}
        if self._order.with_ids:
            chunk["prompt_token_ids"] = self._order.prompts[index].ids
        return self._with_usage(chunk, index)

    def _chunk(self, index: int, token: int | None) -> bytes:
        prompt, generation = self._order.prompts[index], self._generations[index]
        last = token is None or self._made[index] == self._order.max_tokens
        text = "" if token is None else prompt.text(token)
        choice: JsonMap = {
            "index": index,
            "logprobs": None,
            "finish_reason": generation.finish_reason if last else None,
            **({"delta": {"content": text}} if self._order.chat else {"text": text}),
        }
        if self._order.with_ids:
            choice["token_ids"] = [] if token is None else [token_id(token)]
            if not self._order.chat and token == prompt.first:
                choice["prompt_token_ids"] = prompt.ids
        return self._with_usage({**self._head, "choices": [choice]}, index)

    def _with_usage(self, chunk: JsonMap, index: int) -> bytes:
        if self._order.usage_in_chunks:
            chunk["usage"] = self._usage(index)
        return _event(chunk)

    def _usage(self, *indices: int) -> dict[str, int]:
        prompt = sum(len(self._order.prompts[index].ids) for index in indices)
        completion = sum(self._made[index] for index in indices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def error_body(message: str, kind: str, status: int) -> JsonMap:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _event(data: JsonMap) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
