"""The client, against scripted instances on a real bus."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from bus import subjects
from bus.announce import Announcements
from bus.client import Client, CommandFailed, NoAnswer
from bus.codec import Format, decode_announcement, decode_command, encode
from bus.connection import Bus, BusError, Message, Timeout
from bus.discovery import Announcer
from bus.messages import (
    Announcement,
    Command,
    ErrorBody,
    ErrorCode,
    InstanceEntry,
    Manifest,
    Reply,
    Snapshot,
    Verb,
    parse_args,
)
from tests.broker import NatsServer, eventually, free_port
from tests.bus.conftest import Connect


class Scripted:
    """An instance that says ok to everything, unless told otherwise.

    `answers` maps a verb to what it does instead: an error code, a result, or None for silence.
    """

    def __init__(self, bus: Bus, name: str) -> None:
        self.bus, self.name = bus, name
        self.got: list[tuple[str, Command]] = []
        self.answers: dict[str, ErrorCode | dict[str, Any] | None] = {
            "start_weight_update": {"session": "s1"},
        }
        self.silent_once: set[str] = set()
        self.announcer = Announcer(bus, "default", "backend", name)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> "Scripted":
        await self.announcer.clear_left_over()
        for who in (self.name, subjects.ALL):
            await self.bus.subscribe(subjects.control_pattern("default", "backend", who), self._arrived)
        await self.show("serving")
        return self

    async def show(self, state: str, settled: bool = True, seq: int = 1) -> None:
        snapshot = self.snapshot(state=state, settled=settled, seq=seq)
        await self.bus.publish(
            subjects.state("default", "backend", self.name), encode(snapshot, Format.MSGPACK)
        )
        await self.announcer.put_state(snapshot)

    def snapshot(self, **changes: Any) -> Snapshot:
        plain = Snapshot(
            namespace="default",
            component="backend",
            instance=self.name,
            incarnation="01A",
            seq=1,
            time=time.time(),
            state="serving",
            ready=True,
            live=True,
            settled=True,
        )
        return msgspec.structs.replace(plain, **changes)

    def _arrived(self, message: Message) -> None:
        task = asyncio.ensure_future(self._answer(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Message) -> None:
        verb = subjects.verb_of(message.subject)
        command, format = decode_command(message.data)
        parse_args(Verb(verb), command.args)
        self.got.append((verb, command))
        answer = self.answers.get(verb, {})
        if answer is None or verb in self.silent_once:
            self.silent_once.discard(verb)
            return
        failed = isinstance(answer, ErrorCode)
        error = (
            ErrorBody(code=answer, message="no", retryable=answer.retryable)
            if isinstance(answer, ErrorCode)
            else None
        )
        reply = Reply(
            id=command.id,
            instance=self.name,
            incarnation="01A",
            ok=not failed,
            changed=not failed,
            error=error,
            result={} if isinstance(answer, ErrorCode) else answer,
            state=self.snapshot(),
        )
        await self.bus.respond(message, encode(reply, format))

    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.got]


StartScripted = Callable[[str], Awaitable[Scripted]]


@pytest.fixture
async def scripted(connect: Connect) -> StartScripted:
    async def start(name: str) -> Scripted:
        return await Scripted(await connect(), name).start()

    return start


@pytest.fixture
async def client(nats_server: NatsServer) -> AsyncIterator[Client]:
    async with Client.connect(nats_server.url, issuer="trainer") as client:
        yield client


async def test_every_verb_and_what_it_sends(client: Client, scripted: StartScripted) -> None:
    engine, instance = await scripted("a"), client.instance("a")
    before = time.time()
    await instance.pause(mode="keep", clear_cache=False, lease_s=5, timeout_s=10)
    await instance.resume(id="mine", epoch=4, session="s")
    await instance.sleep(level=2)
    await instance.wake_up()
    await instance.wake_up(tags=["weights"])
    await instance.init_weight_transfer({"a": 1})
    started = await instance.start_weight_update()
    await instance.update_weights([{"path": "/x"}])
    await instance.finish_weight_update("v1", allow_empty=True)
    await instance.abort_weight_update()
    await instance.status(verb="pause", id="mine")
    await instance.shutdown()
    assert started.result == {"session": "s1"}
    assert [(verb, command.args) for verb, command in engine.got] == [
        ("pause", {"mode": "keep", "clear_cache": False, "lease_s": 5}),
        ("resume", {}),
        ("sleep", {"level": 2, "mode": "abort"}),
        ("wake_up", {}),
        ("wake_up", {"tags": ["weights"]}),
        ("init_weight_transfer", {"init_info": {"a": 1}}),
        ("start_weight_update", {"pause_mode": "keep"}),
        ("update_weights", {"update_info": [{"path": "/x"}]}),
        ("finish_weight_update", {"weight_version": "v1", "cache": "clear", "allow_empty": True}),
        ("abort_weight_update", {}),
        ("status", {"verb": "pause", "id": "mine"}),
        ("shutdown", {}),
    ]
    commands = [command for _, command in engine.got]
    assert all(command.issuer == "trainer" for command in commands)
    assert len({command.id for command in commands}) == len(commands)
    assert (commands[1].id, commands[1].epoch, commands[1].session) == ("mine", 4, "s")
    assert commands[0].deadline == pytest.approx(before + 10, abs=2)
    assert commands[7].deadline == pytest.approx(before + 600, abs=2)


async def test_a_refusal_is_raised_with_its_facts(client: Client, scripted: StartScripted) -> None:
    engine = await scripted("a")
    engine.answers["resume"] = ErrorCode.BUSY
    with pytest.raises(CommandFailed, match="resume at a: busy: no") as failed:
        await client.instance("a").resume()
    assert failed.value.code == ErrorCode.BUSY
    assert failed.value.retryable
    assert failed.value.reply.state is not None
    assert (await client.instance("a").resume(check=False)).ok is False


async def test_nobody_and_silence(client: Client, scripted: StartScripted) -> None:
    started = time.monotonic()
    with pytest.raises(NoAnswer, match="no instance of this name listens") as nobody:
        await client.instance("nobody").pause()
    assert time.monotonic() - started < 5
    assert not nobody.value.sent
    engine = await scripted("a")
    engine.answers["pause"] = None
    with pytest.raises(NoAnswer, match=r"no reply in 0\.1 s") as silence:
        await client.instance("a").pause(timeout_s=0.1, id="x")
    assert silence.value.sent
    assert silence.value.id == "x"


async def test_a_command_waits_for_the_broker_but_no_longer_than_its_time(
    nats_server: NatsServer, client: Client, scripted: StartScripted
) -> None:
    engine = await scripted("a")
    await nats_server.stop()
    await eventually(lambda: not client.bus.connected)
    with pytest.raises(NoAnswer, match=r"no broker for 0\.1 s"):
        await client.instance("a").pause(timeout_s=0.1)
    waiting = asyncio.create_task(client.instance("a").pause(timeout_s=20))
    await nats_server.start()
    assert (await waiting).ok  # even if the instance is back later than we are
    assert len(engine.got) == 1


async def test_wrong_names_are_refused_here(client: Client) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        client.instance("a.b")
    with pytest.raises(ValueError, match="is not a name"):
        Client(client.bus, component="*")


async def test_connect_says_what_is_wrong() -> None:
    with pytest.raises(BusError, match="no broker reachable"):
        async with Client.connect(f"nats://127.0.0.1:{free_port()}", wait_s=0.1):
            pass


async def test_a_weight_update(client: Client, scripted: StartScripted) -> None:
    engine = await scripted("a")
    async with client.instance("a").weight_update(
        version="v2", epoch=3, manifest={"parameters": 1}
    ) as update:
        assert update.session == "s1"
        await update.load({"path": "/x"})
        await update.load({"path": "/y"})
    assert update.finished is not None
    assert update.finished.ok
    assert engine.verbs() == [
        "start_weight_update",
        "update_weights",
        "update_weights",
        "finish_weight_update",
    ]
    assert [command.session for _, command in engine.got] == [None, "s1", "s1", "s1"]
    assert all(command.epoch == 3 for _, command in engine.got)
    assert engine.got[-1][1].args["weight_version"] == "v2"


async def test_a_weight_update_that_fails_is_aborted(client: Client, scripted: StartScripted) -> None:
    engine = await scripted("a")
    with pytest.raises(RuntimeError, match="trainer crashed"):
        async with client.instance("a").weight_update():
            raise RuntimeError("trainer crashed")
    assert engine.verbs() == ["start_weight_update", "abort_weight_update"]
    assert engine.got[-1][1].session == "s1"

    engine.got.clear()
    engine.answers["update_weights"] = ErrorCode.ENGINE_ERROR
    engine.answers["abort_weight_update"] = ErrorCode.INVALID_STATE  # the failure closed it already
    with pytest.raises(CommandFailed, match="engine_error"):
        async with client.instance("a").weight_update() as update:
            await update.load({"path": "/x"})
    assert engine.verbs()[-1] == "abort_weight_update"


async def test_a_cancelled_weight_update_is_aborted(client: Client, scripted: StartScripted) -> None:
    engine = await scripted("a")

    async def train() -> None:
        async with client.instance("a").weight_update():
            await asyncio.sleep(60)

    training = asyncio.create_task(train())
    await eventually(lambda: engine.got)
    await asyncio.sleep(0.05)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert engine.verbs() == ["start_weight_update", "abort_weight_update"]


async def test_a_failed_finish_aborts(client: Client, scripted: StartScripted) -> None:
    engine = await scripted("a")
    engine.answers["finish_weight_update"] = ErrorCode.EMPTY_WEIGHT_UPDATE
    with pytest.raises(CommandFailed, match="empty_weight_update"):
        async with client.instance("a").weight_update():
            pass
    assert engine.verbs() == ["start_weight_update", "finish_weight_update", "abort_weight_update"]


async def test_a_lost_reply_is_asked_for_under_the_same_id(client: Client, scripted: StartScripted) -> None:
    engine = await scripted("a")
    engine.silent_once = {"start_weight_update", "finish_weight_update"}
    async with client.instance("a").weight_update(start_timeout_s=0.2, finish_timeout_s=0.2) as update:
        await update.load({"path": "/x"})
    assert engine.verbs() == [
        "start_weight_update",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "finish_weight_update",
    ]
    ids = [command.id for _, command in engine.got]
    assert ids[0] == ids[1]
    assert ids[3] == ids[4]


async def test_send_all_gathers_and_says_who_is_missing(client: Client, scripted: StartScripted) -> None:
    engines = {name: await scripted(name) for name in "abc"}
    started = time.monotonic()
    gathering = await client.send_all("pause", {"mode": "keep"}, wait_s=10).run()
    assert time.monotonic() - started < 10  # all known ones have answered
    assert gathering.complete
    assert sorted(gathering.replies) == ["a", "b", "c"]
    assert {command.id for e in engines.values() for _, command in e.got} == {gathering.id}

    engines["b"].answers["pause"] = None
    engines["c"].answers["pause"] = ErrorCode.INVALID_STATE
    gathering = client.send_all(Verb.PAUSE, wait_s=0.3)
    assert sorted([reply.instance async for reply in gathering]) == ["a", "c"]
    assert gathering.missing == ["b"]
    assert [reply.instance for reply in gathering.failed] == ["c"]
    assert not gathering.complete


async def test_send_all_to_nobody_is_not_complete(client: Client) -> None:
    started = time.monotonic()
    gathering = await client.send_all("pause", wait_s=5).run()
    assert time.monotonic() - started < 5
    assert gathering.replies == {}
    assert not gathering.complete


async def test_a_stopped_instance_is_not_expected(client: Client, scripted: StartScripted) -> None:
    await scripted("a")
    stopped = await scripted("b")
    await stopped.show("stopped", seq=2)
    stopped.answers["pause"] = None
    assert (await client.send_all("pause", wait_s=5).run()).expected == {"a"}


async def test_instances_states_and_events(client: Client, scripted: StartScripted) -> None:
    engine = await scripted("a")
    entry = InstanceEntry(
        namespace="default", component="backend", endpoint="generate", instance="a", incarnation="01A"
    )
    await engine.announcer.put(entry)
    assert await client.instances() == {"a": entry}
    assert (await client.states())["a"].state == "serving"
    seen: list[str] = []

    async def read() -> None:
        async for snapshot in client.events():
            seen.append(snapshot.state)  # noqa: PERF401

    reading = asyncio.create_task(read())

    async def show() -> bool:
        await engine.show("paused", seq=2)
        return "paused" in seen

    await eventually(show)
    reading.cancel()
    await asyncio.wait({reading})


async def test_wait_for_a_settled_state(client: Client, scripted: StartScripted) -> None:
    engine = await scripted("a")
    assert (await client.wait_for("a")).state == "serving"
    waiting = asyncio.create_task(client.wait_for("a", "asleep", timeout_s=5))
    await engine.show("asleep", settled=False, seq=2)
    with pytest.raises(Timeout, match=r"was not asleep within 0\.2 s; it showed asleep, not settled"):
        await client.wait_for("a", "asleep", timeout_s=0.2)
    assert (await client.wait_for("a", "asleep", settled=False)).seq == 2
    assert not waiting.done()
    await engine.show("asleep", seq=3)
    assert (await waiting).seq == 3
    with pytest.raises(Timeout, match="showed nothing"):
        await client.wait_for("nobody", timeout_s=0.1)


async def test_a_new_epoch_goes_with_every_command(client: Client, scripted: StartScripted) -> None:
    engine = await scripted("a")
    await client.instance("a").pause()
    assert await client.new_epoch() == 1
    await client.instance("a").pause()
    await client.instance("a").resume(epoch=7)
    await client.send_all("resume").run()
    async with client.instance("a").weight_update():
        pass
    assert [command.epoch for _, command in engine.got] == [None, 1, 7, 1, 1, 1]
    assert await client.new_epoch() == 2


async def test_announcing(client: Client) -> None:
    assert await client.announce("v1", [{"path": "/v1"}], manifest={"parameters": 3}, id="mine") == 1
    assert client.epoch == 1
    assert await client.announce("v2", [[{"path": "/0"}, {"path": "/1"}]], epoch=5) == 2
    first, second = [
        decode_announcement(stored.data)
        for stored in await Announcements(client.bus, "default", "backend").stored()
    ]
    assert first == Announcement(
        id="mine",
        epoch=1,
        version="v1",
        updates=[{"path": "/v1"}],
        manifest=Manifest(parameters=3),
        issuer="trainer",
    )
    assert (second.epoch, second.updates) == (5, [[{"path": "/0"}, {"path": "/1"}]])
    with pytest.raises(ValueError, match="cache"):
        await client.announce("v3", [], cache="salted")  # type: ignore[arg-type]
