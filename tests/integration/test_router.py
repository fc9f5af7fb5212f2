"""A router before two real engines: traffic goes on through all that a trainer and an accident do to one."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest_asyncio

from tests.broker import NatsServer, eventually
from tests.integration.conftest import Fleet
from tests.integration.served import LONG, PROMPTS, REAL, SOON_S, Answer, Served
from tests.program import Program

pytestmark = REAL

CLIENTS = 2


class Clients:
    """Clients of a router who ask all the time, streamed and not.

    Attributes:
        broken: answers that began and did not end well.
        versions: which weights answered, how often.
    """

    def __init__(self, url: str, model: str, expected: dict[str, list[str]]) -> None:
        self.url, self.model = url, model
        self.broken: list[Answer] = []
        self.versions: Counter[str] = Counter()
        self.instances: Counter[str] = Counter()
        self._expected = expected
        """By weight version what `PROMPTS` are completed to."""
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120))

    def ask(self, prompt: str, max_tokens: int = 60, stream: bool = True) -> Answer:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return Answer().read(self._http, f"{self.url}/v1/completions", body | options)

    async def one(self, number: int) -> None:
        prompt = number % len(PROMPTS)
        if number % 2:
            body = {"model": self.model, "prompt": PROMPTS[prompt], "max_tokens": 60, "temperature": 0}
            async with self._http.post(f"{self.url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                headers: Mapping[str, str] = response.headers
                answer = (await response.json())["choices"][0]["text"]
        else:
            streamed = await self.ask(PROMPTS[prompt]).end(within_s=120)
            assert streamed.status == 200, streamed
            headers, answer = streamed.headers, streamed.text
            if streamed.error is not None:
                assert streamed.tokens, "it failed before its first byte"
                self.broken.append(streamed)
                return
        version = headers["X-Watchkeeper-Weight-Version"]
        self.versions[version] += 1
        self.instances[headers["X-Watchkeeper-Instance"]] += 1
        assert answer == self._expected[version][prompt], version

    @asynccontextmanager
    async def asking(self) -> AsyncIterator["Clients"]:
        """They ask from here to the end of the block; none may fail."""
        stop = asyncio.Event()

        async def client(number: int) -> None:
            while not stop.is_set():
                await self.one(number)
                number += 1

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(CLIENTS):
                    group.create_task(client(number))
                yield self
                stop.set()
        finally:
            await self._http.close()

    async def are_answered(self, more: int = 4) -> None:
        goal = self.instances.total() + more
        await eventually(lambda: self.instances.total() >= goal, within_s=SOON_S)


@asynccontextmanager
async def routed(folder: Path, broker: NatsServer, *options: str) -> AsyncIterator[str]:
    ready = folder / "router.json"
    arguments = ("--http-address", "127.0.0.1:0", "--ready-file", str(ready), "--nats", broker.url)
    program = await Program.start(folder, "router", *arguments, "--grace-period-s", "0", *options)
    try:
        await eventually(lambda: ready.exists() or program.exit_code is not None, within_s=SOON_S)
        assert ready.exists(), program.last_words()
        url = f"http://{json.loads(ready.read_text())['http']}"
        async with aiohttp.ClientSession() as http:
            while True:
                async with http.get(f"{url}/state") as response:
                    pools = (await response.json())["pools"]
                if pools and pools["aggregated"]["admissible"] == 2:
                    break
                await asyncio.sleep(0.1)
        yield url
    finally:
        await program.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def another(fleet: Fleet) -> AsyncIterator[Served]:
    one = await fleet.another()
    yield one
    await one.close()


async def test_no_request_fails_through_pause_sleep_and_new_weights(
    served: Served,
    another: Served,
    broker: NatsServer,
    models: Path,
    answers_of_b: list[str],
    tmp_path: Path,
) -> None:
    """And whatever the version in the header says answered, answered."""
    expected = {"default": served.answers, "a": served.answers, "b": answers_of_b}
    version = (await served.state()).weights.version
    expected[version] = served.answers
    async with (
        routed(tmp_path, broker) as url,
        Clients(url, served.model, expected).asking() as clients,
    ):
        await eventually(lambda: set(clients.instances) == {served.name, another.name}, within_s=SOON_S)
        await another.engine.pause("wait")
        await clients.are_answered()
        await another.engine.resume()
        await another.engine.pause("keep")
        await clients.are_answered()
        await another.engine.resume()
        await another.engine.sleep(level=1, mode="wait")
        await clients.are_answered()
        await another.engine.wake_up()
        before = clients.instances[another.name]
        await eventually(lambda: clients.instances[another.name] > before, within_s=SOON_S)
        async with another.engine.weight_update(pause_mode="wait", version="b") as update:
            await update.load({"path": str(models / "b")})
        await eventually(lambda: clients.versions["b"] > 3, within_s=SOON_S)
        async with another.engine.weight_update(pause_mode="wait", version="a") as update:
            await update.load({"path": str(models / "a")})
        await eventually(lambda: clients.versions["a"] > 3, within_s=SOON_S)
    assert clients.broken == []


async def test_a_kill_is_not_noticed_where_streams_may_go_on(
    served: Served, another: Served, broker: NatsServer, tmp_path: Path
) -> None:
    """All its processes at once, in the middle of answers."""
    whole = await served.long_answer()
    version = (await served.state()).weights.version
    options = ("--migration-limit", "1", "--migrate-across-versions", "--no-access-log")
    async with (
        routed(tmp_path, broker, *options) as url,
        Clients(url, served.model, {"a": served.answers, version: served.answers}).asking() as clients,
    ):
        streams = [clients.ask(PROMPTS[0], max_tokens=LONG) for _ in range(2)]
        for stream in streams:
            await stream.reaches(20)
        victims = [stream for stream in streams if stream.headers["X-Watchkeeper-Instance"] == another.name]
        assert victims
        for pid in another.program.left():
            os.kill(pid, signal.SIGKILL)
        await clients.are_answered(10)
        for stream in streams:
            await stream.end(within_s=120)
            assert (stream.error, stream.finish_reason, stream.count) == (None, "length", LONG), stream
            assert stream.text == whole
    assert clients.broken == []
