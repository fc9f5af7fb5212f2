"""A real `watchkeeper serve --engine sim` in a process of its own, seen from outside."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bus import subjects
from bus.client import Client, Instance
from bus.codec import decode_snapshot
from bus.messages import Snapshot
from tests.broker import eventually
from tests.program import Program

STATUS = health_pb2.HealthCheckResponse.ServingStatus


class Serving:
    """One instance with everything a test looks at.

    Attributes:
        events: every state event since before the ready file.
        watched: per health name the statuses a Watch stream has reported, and `CLOSED`.
    """

    def __init__(self, program: Program, client: Client, ready: dict[str, str]) -> None:
        self.program, self.client, self.ready = program, client, ready
        self.events: list[Snapshot] = []
        self.watched: dict[str, list[str]] = {}
        self._watches: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        return self.ready["instance"]

    @property
    def instance(self) -> Instance:
        return self.client.instance(self.name)

    @property
    def states(self) -> list[str]:
        return [event.state for event in self.events]

    async def snapshot(self) -> Snapshot:
        state = (await self.instance.status()).state
        assert state is not None
        return state

    async def until(self, state: str, within_s: float = 60.0) -> Snapshot:
        """The settled snapshot once the instance shows this state."""
        return await self.client.wait_for(self.name, state, timeout_s=within_s)

    async def check(self, service: str) -> str:
        async with grpc.aio.insecure_channel(self.ready["grpc"]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=2)
            return str(STATUS.Name(answer.status))

    def watch(self, service: str) -> list[str]:
        """Follow a health name; the list grows."""
        seen = self.watched.setdefault(service, [])

        async def follow() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async with grpc.aio.insecure_channel(self.ready["grpc"]) as channel:
                    request = health_pb2.HealthCheckRequest(service=service)
                    async for answer in health_pb2_grpc.HealthStub(channel).Watch(request):
                        seen.append(STATUS.Name(answer.status))
            seen.append("CLOSED")

        self._watches.append(asyncio.create_task(follow()))
        return seen

    async def routable(self) -> bool:
        return self.name in await self.client.instances()

    async def simulate(self, **script: Any) -> None:
        assert (await self.instance.send("simulate", script)).ok

    def signal(self, number: signal.Signals) -> None:
        self.program.process.send_signal(number)

    async def end(self, within_s: float = 60.0) -> int:
        return await self.program.end(within_s)

    @contextlib.asynccontextmanager
    async def complete(self, tokens: int, stream: bool = True) -> AsyncIterator[aiohttp.ClientResponse]:
        """A completion request; the answer's head has arrived when the block begins."""
        body = {"model": "m", "prompt": "p", "max_tokens": tokens, "stream": stream}
        url = f"http://{self.ready['http']}/v1/completions"
        limit = aiohttp.ClientTimeout(60)
        async with aiohttp.ClientSession(timeout=limit) as http, http.post(url, json=body) as response:
            yield response

    async def close(self) -> None:
        for task in self._watches:
            task.cancel()
        if self._watches:
            await asyncio.wait(self._watches)
        await self.program.kill()


async def words(response: aiohttp.ClientResponse) -> tuple[str, dict[str, Any] | None]:
    """The text of a streamed completion, and the error that ended it, if one did."""
    text = ""
    async for line in response.content:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[6:])
        if "error" in event:
            return text, event["error"]
        text += event["choices"][0]["text"]
    return text, None


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    url: str,
    *options: str,
    engine: tuple[str, ...] = (),
    state: str | None = "serving",
    name: str = "one",
) -> AsyncIterator[Serving]:
    """A simulated instance that shows `state`; whatever is left of it is killed in the end."""
    ready = folder / f"{name}.json"
    ready.unlink(missing_ok=True)
    arguments = ["serve", "m", "--engine", "sim", "--nats", url, "--instance", name]
    for address in ("--grpc-address", "--http-address", "--admin-address"):
        arguments += [address, "127.0.0.1:0"]
    arguments += ["--ready-file", str(ready), "--grace-period-s", "0.2", *options, "--", *engine]
    async with Client.connect(url, issuer="test") as client:
        events: list[Snapshot] = []
        pattern = subjects.state("default", "backend", name)
        await client.bus.subscribe(pattern, lambda message: events.append(decode_snapshot(message.data)))
        program = await Program.start(folder, *arguments)
        try:
            await eventually(lambda: ready.exists() or program.exit_code is not None, within_s=60)
            assert ready.exists(), program.last_words()
            made = Serving(program, client, json.loads(ready.read_text()))
        except BaseException:
            await program.kill()
            raise
        made.events = events
        try:
            if state is not None:
                await made.until(state)
            yield made
        finally:
            await made.close()
