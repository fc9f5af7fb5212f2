"""A simulated engine in this process, its requests, and a way to its HTTP server."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from service.engine.simulated import SimulatedEngine

QUICK = ["--load-s", "0", "--token-interval-ms", "1"]
NEVER = 10**9


async def loaded(*engine_args: str) -> SimulatedEngine:
    engine = SimulatedEngine("sim-model", [*QUICK, *engine_args], lambda _: None, lambda: None)
    await engine.load()
    return engine


class Stream:
    """One request that runs until it ends or the test does."""

    def __init__(self, engine: SimulatedEngine, max_tokens: int = NEVER) -> None:
        self.request = engine.generate(max_tokens)
        self.tokens: list[int] = []
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> str | None:
        async for token in self.request.tokens():
            self.tokens.append(token)
        return self.request.finish_reason

    async def running(self, tokens: int = 1) -> "Stream":
        goal = len(self.tokens) + tokens
        await until(lambda: len(self.tokens) >= goal or self.task.done())
        return self

    async def stands_still(self) -> None:
        before = len(self.tokens)
        await asyncio.sleep(0.02)
        assert len(self.tokens) == before
        assert not self.task.done()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def ended(task: "asyncio.Task[Any]") -> Any:
    async with asyncio.timeout(5):
        return await task


@asynccontextmanager
async def served(engine: SimulatedEngine) -> AsyncIterator[aiohttp.ClientSession]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = "http://{}:{}".format(*listener.getsockname())
    serving = asyncio.create_task(engine.serve_http(engine.app(), listener))
    async with aiohttp.ClientSession(url) as client:
        async with asyncio.timeout(5):
            while True:
                try:
                    async with client.get("/health"):
                        break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.01)
        try:
            yield client
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving


async def post(client: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with client.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def get(client: aiohttp.ClientSession, path: str) -> Any:
    async with client.get(path) as answer:
        assert answer.status == 200
        return await answer.json()


async def events(answer: aiohttp.ClientResponse) -> list[Any]:
    body = await answer.read()
    *items, last, nothing = body.decode().split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    return [json.loads(item.removeprefix("data: ")) for item in items]
