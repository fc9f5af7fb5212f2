"""Who is let in, who waits, and what those are told who may not go on."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp.client_exceptions import ClientError

from service.engine.admission import AdmissionGate, App, Message, Receive, Scope, Send, is_inference
from service.engine.simulated_api import serve
from statemachine.states import Admission

OPEN, HELD, REFUSED, CLOSED = Admission.OPEN, Admission.HELD, Admission.REFUSED, Admission.CLOSED


class Client:
    """One request in raw ASGI, and everything that came back."""

    def __init__(self, gate: AdmissionGate, *body: bytes, path: str = "/v1/completions") -> None:
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        chunks = body or (b"{}",)
        for number, chunk in enumerate(chunks, 1):
            more = number < len(chunks)
            self.inbox.put_nowait({"type": "http.request", "body": chunk, "more_body": more})
        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        self.task = asyncio.create_task(self._run(gate, scope))

    async def _run(self, gate: AdmissionGate, scope: Scope) -> None:
        await gate(scope, self.inbox.get, self._send)

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    def leave(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def complete(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


class Application:
    """An application that does what the test tells it, one message at a time."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.release = asyncio.Event()
        self.body = b""
        self.calls = 0
        self.start: Message | None = None
        self.chunks: list[bytes] = []
        self.error: Exception | None = None

    def answers(self, content_type: str, *chunks: bytes, status: int = 200) -> "Application":
        """What is sent before `release`."""
        headers = [(b"content-type", content_type.encode())]
        self.start = {"type": "http.response.start", "status": status, "headers": headers}
        self.chunks = list(chunks)
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.calls += 1
        while True:
            message = await receive()
            self.body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if self.start is not None:
            await send(self.start)
            for chunk in self.chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self.entered.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.error is not None:
            raise self.error
        if self.start is None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"end", "more_body": False})


class Counted:
    """A gate with what it told about the number of requests."""

    def __init__(self, app: App, lost: str | None = None) -> None:
        self.counts: list[int] = []

        async def reason() -> str | None:
            return lost

        self.gate = AdmissionGate(app, self.counts.append, reason)

    def set(self, admission: Admission, reason: str = "", end_held: bool = False, code: str = "") -> None:
        self.gate.set(admission, reason, end_held, code)


async def settled(*tasks: "asyncio.Task[Any]") -> None:
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def test_what_computes_is_inference() -> None:
    def asked(path: str, method: str = "POST", kind: str = "http", root: str = "") -> bool:
        return is_inference({"type": kind, "method": method, "path": path, "root_path": root})

    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/inference/v1/generate", "/x"):
        assert asked(path)
    for path in ("/tokenize", "/detokenize/", "/pause", "/wake_up", "/v1/load_lora_adapter"):
        assert not asked(path)
    for path in ("/v1/completions/render", "/v1/responses/resp_1/cancel", "/inference/v1/abort_requests"):
        assert not asked(path)
    assert not asked("/api/tokenize", root="/api")
    assert asked("/api/v1/completions", root="/api")
    assert not asked("/v1/models", method="GET")
    assert asked("/v1/realtime", kind="websocket")
    assert not is_inference({"type": "lifespan"})


async def test_a_gate_starts_refusing_and_lets_others_pass() -> None:
    app = Application()
    counted = Counted(app)
    client = Client(counted.gate)
    await settled(client.task)
    assert (client.status, client.error["code"], client.complete) == (503, "not_ready", True)
    app.release.set()
    other = Client(counted.gate, path="/tokenize")
    await settled(other.task)
    assert other.status == 200
    assert counted.counts == []


async def test_an_open_gate_counts_each_request_once() -> None:
    app = Application()
    counted = Counted(app)
    counted.set(OPEN)
    clients = [Client(counted.gate, b"12", b"3") for _ in range(2)]
    await until(lambda: app.calls == 2 and app.body == b"123123")
    assert counted.gate.in_flight == 2
    app.release.set()
    await settled(*(client.task for client in clients))
    assert [client.body for client in clients] == [b"end", b"end"]
    assert counted.counts == [1, 2, 1, 0]


async def test_a_refusal_says_when_to_come_again() -> None:
    counted = Counted(Application())
    counted.set(REFUSED, "paused by a trainer")
    paused = Client(counted.gate)
    await settled(paused.task)
    assert paused.error == {"code": "engine_paused", "retryable": True, "message": "paused by a trainer"}
    assert (paused.status, paused.headers[b"retry-after"]) == (503, b"1")
    assert b"connection" not in paused.headers
    counted.set(CLOSED, "good bye")
    closed = Client(counted.gate)
    await settled(closed.task)
    assert (closed.error["code"], closed.headers[b"connection"]) == ("shutting_down", b"close")
    counted.set(CLOSED, "it died", code="engine_failed")
    failed = Client(counted.gate)
    await settled(failed.task)
    assert failed.error["code"] == "engine_failed"


async def test_a_held_request_goes_on_whole_when_the_gate_opens() -> None:
    app = Application()
    app.release.set()
    counted = Counted(app)
    counted.set(HELD)
    client = Client(counted.gate, b"a" * 1000, b"b" * 1000, b"c")
    await until(client.inbox.empty)
    assert (app.calls, counted.counts, client.sent) == (0, [1], [])
    counted.set(OPEN)
    await settled(client.task)
    assert app.body == b"a" * 1000 + b"b" * 1000 + b"c"
    assert (client.body, counted.counts) == (b"end", [1, 0])


async def test_a_held_request_survives_a_gate_that_opens_for_a_moment() -> None:
    app = Application()
    counted = Counted(app)
    counted.set(HELD)
    client = Client(counted.gate)
    await until(client.inbox.empty)
    counted.set(OPEN)
    counted.set(HELD)
    await asyncio.sleep(0.01)
    assert app.calls == 0
    counted.set(OPEN)
    counted.set(REFUSED, "too late")
    await settled(client.task)
    assert (client.error["message"], app.calls) == ("too late", 0)


async def test_a_client_that_leaves_while_held_frees_its_place() -> None:
    app = Application()
    counted = Counted(app)
    counted.set(HELD)
    client = Client(counted.gate)
    await until(lambda: counted.counts == [1])
    client.leave()
    await settled(client.task)
    assert (client.sent, app.calls, counted.counts) == ([], 0, [1, 0])


@pytest.mark.parametrize(("then", "code"), [(REFUSED, "engine_paused"), (CLOSED, "shutting_down")])
async def test_held_requests_end_when_the_gate_closes(then: Admission, code: str) -> None:
    counted = Counted(Application())
    counted.set(HELD)
    client = Client(counted.gate)
    await until(client.inbox.empty)
    counted.set(then, "not any more")
    await settled(client.task)
    assert (client.status, client.error["code"], client.complete) == (503, code, True)
    assert counted.counts == [1, 0]


async def test_held_requests_can_be_ended_while_new_ones_are_held() -> None:
    counted = Counted(Application())
    counted.set(HELD)
    old = Client(counted.gate)
    await until(old.inbox.empty)
    counted.set(HELD, "the weights are gone", end_held=True)
    await settled(old.task)
    assert old.error["message"] == "the weights are gone"
    new = Client(counted.gate)
    await until(new.inbox.empty)
    assert not new.task.done()
    counted.set(CLOSED)
    await settled(new.task)


async def test_a_request_without_an_answer_yet_ends_with_503() -> None:
    app = Application()
    counted = Counted(app)
    counted.set(OPEN)
    client = Client(counted.gate)
    await app.entered.wait()
    counted.set(REFUSED, "asleep")  # leaves alone what was let in
    await asyncio.sleep(0.01)
    assert not client.task.done()
    counted.set(REFUSED, "discarded", end_held=True)
    await settled(client.task)
    assert app.cancelled.is_set()
    assert (client.status, client.error["code"], client.complete) == (503, "engine_paused", True)
    assert counted.counts == [1, 0]


@pytest.mark.parametrize("cut", [b"data: 1\n\n", b"data: 1", b""])
async def test_a_stream_of_events_ends_with_an_event(cut: bytes) -> None:
    app = Application().answers("text/event-stream; charset=utf-8", b"data: 0\n\n", cut)
    counted = Counted(app)
    counted.set(OPEN)
    client = Client(counted.gate)
    await app.entered.wait()
    counted.set(CLOSED, "leaving", end_held=True)
    await settled(client.task)
    *_, last, nothing = client.body.split(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
    assert (nothing, client.complete, client.status) == (b"", True, 200)
    assert app.cancelled.is_set()


async def test_another_body_that_has_begun_stays_incomplete() -> None:
    """The server breaks the connection then; see the test with a real one below."""
    app = Application().answers("application/json", b'{"half":')
    counted = Counted(app)
    counted.set(OPEN)
    client = Client(counted.gate)
    await app.entered.wait()
    counted.set(CLOSED, "leaving", end_held=True)
    await settled(client.task)
    assert (client.body, client.complete, counted.counts) == (b'{"half":', False, [1, 0])


async def test_what_is_complete_is_not_touched() -> None:
    class Lingering(Application):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            self.release.set()
            await super().__call__(scope, receive, send)
            self.release.clear()
            await self.release.wait()  # as a background task does

    counted = Counted(Lingering())
    counted.set(OPEN)
    client = Client(counted.gate)
    await until(lambda: client.complete)
    before = list(client.sent)
    counted.set(CLOSED, "leaving", end_held=True)
    await settled(client.task)
    assert client.sent == before


async def test_an_application_that_goes_on_is_not_heard() -> None:
    class Deaf(Application):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await super().__call__(scope, receive, send)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"too late", "more_body": False})

    app = Deaf()
    counted = Counted(app)
    counted.set(OPEN)
    client = Client(counted.gate)
    await app.entered.wait()
    counted.set(REFUSED, "gone", end_held=True)
    await settled(client.task)
    assert (len(client.sent), client.error["message"]) == (2, "gone")


async def test_an_application_that_fails_because_the_engine_is_lost() -> None:
    app = Application()
    app.error = RuntimeError("socket closed")
    app.release.set()
    counted = Counted(app, lost="EngineCore was killed")
    counted.set(OPEN)
    client = Client(counted.gate)
    await settled(client.task)
    assert (client.status, client.error["code"]) == (503, "engine_failed")
    assert client.error["message"] == "EngineCore was killed"


async def test_an_application_that_fails_by_itself() -> None:
    app = Application()
    app.error = RuntimeError("a bug")
    app.release.set()
    counted = Counted(app)
    counted.set(OPEN)
    client = Client(counted.gate)
    with pytest.raises(RuntimeError, match="a bug"):
        await client.task
    assert counted.counts == [1, 0]


@pytest.mark.parametrize(("lost", "status"), [("it died", 503), (None, 500)])
async def test_an_error_answer_of_a_lost_engine_becomes_retryable(lost: str | None, status: int) -> None:
    """vLLM turns the death of its engine into an error of its own, which says nothing of a retry."""
    app = Application().answers("application/json", b"{", status=500)
    app.release.set()
    counted = Counted(app, lost)
    counted.set(OPEN)
    client = Client(counted.gate)
    await settled(client.task)
    assert (client.status, client.complete) == (status, True)
    assert (b"engine_failed" in client.body) == (lost is not None)


@pytest.mark.parametrize("lost", ["it died", None])
async def test_an_error_event_of_a_lost_engine_becomes_retryable(lost: str | None) -> None:
    theirs = b'data: {"error": {"message": "EngineDeadError"}}\n\n'
    app = Application().answers("text/event-stream", b"data: 0\n\n", theirs)
    app.release.set()
    counted = Counted(app, lost)
    counted.set(OPEN)
    client = Client(counted.gate)
    await settled(client.task)
    assert client.complete
    assert (theirs in client.body) == (lost is None)
    assert (b"engine_failed" in client.body) == (lost is not None)


async def test_a_server_that_cancels_takes_the_application_with_it() -> None:
    app = Application()
    counted = Counted(app)
    counted.set(OPEN)
    client = Client(counted.gate)
    await app.entered.wait()
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert (app.cancelled.is_set(), counted.counts) == (True, [1, 0])
    counted.set(HELD)
    held = Client(counted.gate)
    await until(held.inbox.empty)
    held.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held.task
    assert counted.counts == [1, 0, 1, 0]


class Socket:
    """One websocket in raw ASGI."""

    def __init__(self, gate: AdmissionGate, **extensions: object) -> None:
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        self.inbox.put_nowait({"type": "websocket.connect"})
        self.scope: Scope = {"type": "websocket", "path": "/v1/realtime", "extensions": extensions}
        self.task = asyncio.create_task(self._run(gate))

    async def _run(self, gate: AdmissionGate) -> None:
        await gate(self.scope, self.inbox.get, self._send)

    async def _send(self, message: Message) -> None:
        self.sent.append(message)


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})


async def test_websockets_wait_pass_and_end_too() -> None:
    counted = Counted(_echo)
    counted.set(HELD)
    client = Socket(counted.gate)
    await until(client.inbox.empty)
    counted.set(OPEN)
    client.inbox.put_nowait({"type": "websocket.receive", "text": "hello"})
    await until(lambda: len(client.sent) == 2)
    assert client.sent[1]["text"] == "hello"
    counted.set(REFUSED, "paused", end_held=True)
    await settled(client.task)
    assert client.sent[2] == {"type": "websocket.close", "code": 1013, "reason": "engine_paused: paused"}
    assert counted.counts == [1, 0]


async def test_a_refused_websocket_gets_the_answer_its_server_can_give() -> None:
    counted = Counted(_echo)
    counted.set(REFUSED, "paused")
    plain, answering = Socket(counted.gate), Socket(counted.gate, **{"websocket.http.response": {}})
    await settled(plain.task, answering.task)
    assert plain.sent[0]["code"] == 1013
    assert answering.sent[0]["status"] == 503
    assert json.loads(answering.sent[1]["body"])["error"]["retryable"] is True


# With a real server


@asynccontextmanager
async def served(gate: AdmissionGate) -> AsyncIterator[aiohttp.ClientSession]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = "http://{}:{}".format(*listener.getsockname())
    serving = asyncio.create_task(serve(gate, listener))
    async with aiohttp.ClientSession(url) as client:
        async with asyncio.timeout(5):
            while True:
                try:
                    async with client.get("/nothing"):
                        break
                except ClientError:
                    await asyncio.sleep(0.01)
        yield client
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def but_for_get(app: App) -> App:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return answer


async def test_uvicorn_holds_a_large_body() -> None:
    app = Application()
    app.release.set()
    counted = Counted(but_for_get(app))
    counted.set(HELD)
    body = b"x" * 3_000_000
    async with served(counted.gate) as client:
        asking = asyncio.create_task(_post(client, body))
        await until_slept(lambda: counted.counts == [1])
        counted.set(OPEN)
        assert await asking == (200, b"end")
    assert app.body == body


async def test_uvicorn_refuses_a_large_body_and_the_connection_stays_usable() -> None:
    app = Application()
    app.release.set()
    counted = Counted(but_for_get(app))
    async with served(counted.gate) as client:
        for _ in range(3):
            status, body = await _post(client, b"x" * 3_000_000)
            assert (status, json.loads(body)["error"]["code"]) == (503, "not_ready")
        counted.set(OPEN)
        assert await _post(client, b"{}") == (200, b"end")


async def test_uvicorn_tells_when_a_held_client_leaves() -> None:
    counted = Counted(but_for_get(Application()))
    counted.set(HELD)
    async with served(counted.gate) as client:
        asking = asyncio.create_task(_post(client, b"{}"))
        await until_slept(lambda: counted.counts == [1])
        asking.cancel()
        await until_slept(lambda: counted.counts == [1, 0])


async def test_uvicorn_ends_a_stream_of_events_cleanly() -> None:
    app = Application().answers("text/event-stream", b"data: 0\n\n")
    counted = Counted(but_for_get(app))
    counted.set(OPEN)
    async with served(counted.gate) as client, client.post("/v1/completions", data=b"{}") as answer:
        assert await answer.content.readuntil(b"\n\n") == b"data: 0\n\n"
        counted.set(CLOSED, "leaving", end_held=True)
        event = await answer.content.read()  # raises if the body is cut
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "shutting_down"


async def test_uvicorn_breaks_another_body_visibly() -> None:
    app = Application().answers("application/json", b'{"half":')
    counted = Counted(but_for_get(app))
    counted.set(OPEN)
    async with served(counted.gate) as client, client.post("/v1/completions", data=b"{}") as answer:
        await answer.content.readexactly(8)
        counted.set(CLOSED, "leaving", end_held=True)
        with pytest.raises(ClientError):
            await answer.content.read()


async def _post(client: aiohttp.ClientSession, body: bytes) -> tuple[int, bytes]:
    async with client.post("/v1/completions", data=body) as answer:
        return answer.status, await answer.read()


async def until_slept(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_an_application_sees_the_connection_end_after_it_was_held() -> None:
    """A receive that was waiting in the gate is handed over, not lost."""
    seen: list[str] = []

    async def listening(scope: Scope, receive: Receive, send: Send) -> None:
        while (kind := (await receive())["type"]) != "http.disconnect":
            seen.append(kind)
        seen.append(kind)

    counted = Counted(listening)
    counted.set(HELD)
    client = Client(counted.gate, b"1", b"2")
    await until(client.inbox.empty)
    await asyncio.sleep(0.01)
    counted.set(OPEN)
    await asyncio.sleep(0.01)
    client.leave()
    await settled(client.task)
    assert seen == ["http.request", "http.request", "http.disconnect"]
