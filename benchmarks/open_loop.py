"""Clients of a router: some that send at a fixed rate and read closely, and some that leave."""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

PATH = "/v1/completions"
CLIENT_TIMEOUT_S = 60.0


class Outcome(StrEnum):
    OK = "ok"
    FAILED = "failed"
    """Before the first token: an error status, an error instead of an answer, or no answer."""
    ENDED = "ended"
    """After the first token, and one can see it: by an error event, or since the connection broke."""
    WRONG = "wrong"
    """A token is missing or came twice, or the answer ended early as if that were its end."""


@dataclass
class Answer:
    """One request and what came of it. Times are monotonic.

    Attributes:
        instance, prefill: who answered, as the router says in its headers.
        head_s: when the head of the answer arrived; None: it did not.
        gap_s: the longest time between two tokens.
        detail: of what went wrong.
    """

    sent_s: float
    stream: bool
    outcome: Outcome | None = None
    status: int | None = None
    instance: str | None = None
    prefill: str | None = None
    retry_after: str | None = None
    head_s: float | None = None
    ended_s: float | None = None
    gap_s: float = 0.0
    detail: str = ""

    @property
    def took_s(self) -> float:
        return (self.ended_s or time.monotonic()) - self.sent_s

    def in_flight_between(self, from_s: float, to_s: float) -> bool:
        """Whether there is a time between these when its answer had begun and not ended."""
        begun = self.head_s is not None and self.head_s <= to_s
        return begun and (self.ended_s is None or self.ended_s > from_s)

    def uses(self, name: str) -> bool:
        return name in (self.instance, self.prefill)


class OpenLoop:
    """Sends completions at a fixed rate, whatever becomes of them.

    Attributes:
        late_s: by how much a request was sent later than it should have been, at most; more than a few
            milliseconds say that the machine had no time for us, nor perhaps for others.
    """

    def __init__(
        self,
        url: str,
        rate: float,
        tokens: int = 8,
        streamed: Literal["all", "half"] = "half",
        prompt_words: int = 40,
    ) -> None:
        self.answers: list[Answer] = []
        self.late_s = 0.0
        self._url, self._rate, self._tokens, self._streamed = url + PATH, rate, tokens, streamed
        self._prompt = " ".join(["word"] * prompt_words)
        self._whole = text_of(tokens)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["OpenLoop"]:
        """Send within the block; all answers have ended after it."""
        limit = aiohttp.ClientTimeout(total=CLIENT_TIMEOUT_S)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limit) as http:
            tasks: set[asyncio.Task[None]] = set()
            sending = asyncio.create_task(self._send_all(http, tasks))
            try:
                yield self
            finally:
                sending.cancel()
                await asyncio.wait({sending})
                if tasks:
                    await asyncio.wait(tasks)

    def count(self, outcome: Outcome) -> int:
        return sum(answer.outcome is outcome for answer in self.answers)

    def first_from(self, name: str, after_s: float) -> Answer | None:
        """Whose answer, of those that this instance gave, began first after a time."""
        found = (one for one in self.answers if one.uses(name) and (one.head_s or 0) > after_s)
        return min(found, key=lambda one: one.head_s or 0, default=None)

    async def _send_all(self, http: aiohttp.ClientSession, tasks: set["asyncio.Task[None]"]) -> None:
        begin_s = time.monotonic()
        for number in itertools.count():
            due_s = begin_s + number / self._rate
            await asyncio.sleep(due_s - time.monotonic())
            self.late_s = max(self.late_s, time.monotonic() - due_s)
            answer = Answer(time.monotonic(), self._streamed == "all" or number % 2 == 0)
            self.answers.append(answer)
            task = asyncio.create_task(self._one(http, answer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _one(self, http: aiohttp.ClientSession, answer: Answer) -> None:
        body = {"model": "m", "prompt": self._prompt, "max_tokens": self._tokens, "stream": answer.stream}
        reading = _Reading()
        try:
            async with http.post(self._url, json=body) as response:
                answer.head_s, answer.status = time.monotonic(), response.status
                answer.instance = response.headers.get("X-Watchkeeper-Instance")
                answer.prefill = response.headers.get("X-Watchkeeper-Prefill-Instance")
                answer.retry_after = response.headers.get("Retry-After")
                if response.status != 200:
                    reading.error = await response.text()
                elif answer.stream:
                    await reading.events(response)
                else:
                    reading.whole(await response.json())
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            reading.error = repr(error)
        finally:
            answer.ended_s, answer.gap_s = time.monotonic(), reading.gap_s
            answer.outcome = self._judged(reading)
            answer.detail = reading.error or (
                "" if answer.outcome is Outcome.OK else repr(reading.text[-60:])
            )

    def _judged(self, reading: "_Reading") -> Outcome:
        if not self._whole.startswith(reading.text):
            return Outcome.WRONG
        if reading.error:
            return Outcome.ENDED if reading.text else Outcome.FAILED
        return Outcome.OK if reading.text == self._whole and reading.done else Outcome.WRONG


class _Reading:
    def __init__(self) -> None:
        self.text, self.error, self.done, self.gap_s = "", "", False, 0.0

    def whole(self, body: Any) -> None:
        self.text, self.done = body["choices"][0]["text"], True

    async def events(self, response: aiohttp.ClientResponse) -> None:
        last_s: float | None = None
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                self.done = not self.error
                continue
            event = json.loads(line[6:])
            if "error" in event:
                self.error = str(event["error"])
                continue
            self.text += event["choices"][0]["text"]
            now_s = time.monotonic()
            self.gap_s = max(self.gap_s, now_s - (last_s or now_s))
            last_s = now_s


def text_of(tokens: int) -> str:
    """What the simulated engine answers."""
    return " ".join(f"t{number}" for number in range(tokens))


class Phase(StrEnum):
    """When a client leaves."""

    SENDING = "before its request is complete"
    BEFORE = "at once after its request"
    PREFILL = "during the prefill"
    AFTER = "about when the prefill ends"
    """Before and after the answer to it has reached the router."""
    STREAM = "in the middle of the answer"


@dataclass(frozen=True)
class Leaver:
    """A client that leaves, in some way of its own.

    Attributes:
        share: from 0 to 1: how far into its phase.
        reset: it ends the connection without a goodbye.
    """

    phase: Phase
    share: float
    stream: bool
    reset: bool

    async def run(self, url: str, first_token_s: float, prompt_words: int, tokens: int = 50) -> float | None:
        """Send a request and break the connection.

        Args:
            first_token_s: how long the first token usually takes.

        Returns:
            How long the answer took to begin, if that was waited for.
        """
        parts = urlsplit(url)
        prompt = " ".join(["word"] * prompt_words)
        order = {"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": self.stream}
        body = json.dumps(order).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        if self.phase is Phase.SENDING:
            request = request[: int(self.share * len(request))]
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        sent_s, begun_s = time.monotonic(), None
        try:
            writer.write(request)
            match self.phase:
                case Phase.PREFILL:
                    await asyncio.sleep(0.7 * self.share * first_token_s)
                case Phase.AFTER:
                    await asyncio.sleep((0.7 + 0.5 * self.share) * first_token_s)
                case Phase.STREAM if self.stream:
                    events = 1 + int(0.9 * self.share * tokens)
                    while events > 0 and (data := await reader.read(65536)):
                        begun_s = begun_s or time.monotonic()
                        events -= data.count(b"data:")
                case Phase.STREAM:
                    await asyncio.sleep((1 + self.share) * first_token_s)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        finally:
            if self.reset:
                writer.transport.abort()
            else:
                writer.close()
        return begun_s and begun_s - sent_s
