"""vLLM's weight-sync client over the bus, against simulated instances and scripted ones."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from bus.client import Client, CommandFailed, NoAnswer
from bus.connection import BusError
from bus.messages import ErrorCode, Snapshot
from bus.weight_sync import NATSWeightSyncClient, WeightSyncFailed
from tests.broker import NatsServer, eventually
from tests.bus.conftest import Connect
from tests.bus.test_client import Scripted
from tests.program import ROOT
from tests.service.serving import Serving, serving

MakeClient = Callable[..., NATSWeightSyncClient]
Simulated = Callable[..., Awaitable[Serving]]


@pytest.fixture
async def trainer(nats_server: NatsServer) -> AsyncIterator[MakeClient]:
    """Makes clients, which are closed in the end."""
    made: list[NATSWeightSyncClient] = []

    def make(**options: Any) -> NATSWeightSyncClient:
        made.append(NATSWeightSyncClient(nats_server.url, **{"issuer": "trainer", **options}))
        return made[-1]

    yield make
    for client in made:
        await asyncio.to_thread(client.close)


@pytest.fixture
async def simulated(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Simulated]:
    async with AsyncExitStack() as stack:

        async def start(name: str, *options: str) -> Serving:
            return await stack.enter_async_context(serving(tmp_path, nats_server.url, *options, name=name))

        yield start


@pytest.fixture
async def scripted(connect: Connect) -> Callable[[str], Awaitable[Scripted]]:
    async def start(name: str) -> Scripted:
        return await Scripted(await connect(), name).start()

    return start


async def call(function: Callable[..., Any], *args: Any) -> Any:
    """As a trainer calls it: from a thread that waits."""
    return await asyncio.to_thread(function, *args)


async def update(client: NATSWeightSyncClient, version: str | None = None, chunks: int = 1) -> None:
    """What vLLM's trainer engines do in `send_weights`."""
    await call(client.start_weight_update)
    for _ in range(chunks):
        await call(client.update_weights, {"names": ["x"], "dtype_names": ["float32"], "shapes": [[1]]})
    await call(client.finish_weight_update, *([version] if version else []))


def shows(snapshot: Snapshot) -> tuple[str, bool, str]:
    return snapshot.state, snapshot.weights.good, snapshot.weights.version


def phase(snapshot: Snapshot) -> str | None:
    return snapshot.weight_update.phase if snapshot.weight_update else None


# --- simulated instances --------------------------------------------------------------------------


async def test_one_instance_step_by_step(simulated: Simulated, trainer: MakeClient) -> None:
    one, client = await simulated("one"), trainer(instances="one")
    await call(client.init_weight_transfer_engine, {"master_port": 1})
    assert (client.members, client.epoch) == (["one"], 1)
    await call(client.start_weight_update)
    opened = await one.snapshot()
    assert (opened.state, phase(opened)) == ("weight_update", "open")
    assert opened.weight_update is not None
    assert opened.weight_update.owner == "trainer" and opened.weight_update.lease_expires is not None
    await call(client.update_weights, {"names": []})
    assert phase(await one.snapshot()) == "loading"
    await call(client.finish_weight_update, "v1")
    after = await one.snapshot()
    assert shows(after) == ("serving", True, "v1")
    assert after.weights.epoch == 1


async def test_the_version_is_told_with_the_finish_or_before_it_or_is_the_sessions(
    simulated: Simulated, trainer: MakeClient
) -> None:
    """vLLM's trainer engines finish without one."""
    one, two, client = await simulated("one"), await simulated("two"), trainer()
    client.weight_version = "before"
    await update(client)
    assert {shows(await each.snapshot())[2] for each in (one, two)} == {"before"}
    await update(client, "with")
    assert {shows(await each.snapshot())[2] for each in (one, two)} == {"with"}
    await update(client)
    [version] = {shows(await each.snapshot())[2] for each in (one, two)}
    assert version not in ("before", "with")


async def test_a_chunk_that_fails_at_one_ends_the_update_at_all_and_the_next_repairs(
    simulated: Simulated, trainer: MakeClient
) -> None:
    """Never partly done without a word, and no engine serves what is not whole."""
    one, two, client = await simulated("one"), await simulated("two"), trainer()
    await two.simulate(call="update_weights", outcome="error")
    with pytest.raises(WeightSyncFailed, match="at two: engine_error") as failure:
        await update(client, "v1")
    assert failure.value.done == ("one",)
    [(name, reason)] = failure.value.failed.items()
    assert name == "two" and isinstance(reason, CommandFailed) and reason.code == "engine_error"
    for each in (one, two):
        await each.until("weight_update")
        assert phase(await each.snapshot()) == "tainted"
    await update(client, "v2")
    assert [shows(await each.snapshot()) for each in (one, two)] == [("serving", True, "v2")] * 2


async def test_a_start_that_one_refuses_is_taken_back_from_the_others(
    simulated: Simulated, trainer: MakeClient
) -> None:
    one, two, client = await simulated("one"), await simulated("two"), trainer()
    await two.instance.sleep()
    with pytest.raises(WeightSyncFailed, match="at two: invalid_state"):
        await update(client, "v1")
    assert shows(await one.snapshot()) == ("serving", True, "default")
    assert (await two.snapshot()).state == "asleep"
    await two.instance.wake_up()
    await update(client, "v1")
    assert [shows(await each.snapshot()) for each in (one, two)] == [("serving", True, "v1")] * 2


async def test_the_lease_is_renewed_between_two_calls(simulated: Simulated, trainer: MakeClient) -> None:
    one, client = await simulated("one"), trainer(lease_s=0.8)
    await call(client.start_weight_update)
    await asyncio.sleep(2.5)
    assert phase(await one.snapshot()) == "open"
    await call(client.update_weights, {"names": []})
    await call(client.finish_weight_update, "v1")
    assert shows(await one.snapshot()) == ("serving", True, "v1")


async def test_a_trainer_that_says_nothing_for_long_loses_the_lease(
    simulated: Simulated, trainer: MakeClient
) -> None:
    """It hangs: its thread is alive, and nothing more will come."""
    one, client = await simulated("one"), trainer(lease_s=0.5, idle_s=0.5)
    await call(client.start_weight_update)
    await one.until("serving")
    with pytest.raises(WeightSyncFailed, match="lease_expired"):
        await call(client.update_weights, {"names": []})
    await update(client, "v1")


@pytest.mark.parametrize(("chunks", "state"), [(0, "serving"), (1, "tainted")])
async def test_a_trainer_that_crashes(
    simulated: Simulated, trainer: MakeClient, nats_server: NatsServer, chunks: int, state: str
) -> None:
    """Before its first chunk the old weights come back by the lease; after it only a new update helps."""
    one = await simulated("one")
    script = f"""
import os
from bus.weight_sync import NATSWeightSyncClient
client = NATSWeightSyncClient({nats_server.url!r}, lease_s=1.0)
client.start_weight_update()
for _ in range({chunks}):
    client.update_weights({{"names": []}})
os.kill(os.getpid(), 9)
"""
    crashed = await asyncio.create_subprocess_exec(sys.executable, "-c", script, cwd=ROOT)
    assert await crashed.wait() == -9
    assert (await one.snapshot()).state == "weight_update"

    async def ended() -> bool:
        seen = await one.snapshot()
        return state in (seen.state, phase(seen)) and seen.cause is not None

    await eventually(ended, within_s=10)
    cause = (await one.snapshot()).cause
    assert cause is not None and cause.verb == "lease_expired"
    client = trainer()
    await update(client, "v2")
    assert shows(await one.snapshot()) == ("serving", True, "v2")
    assert client.epoch == 2


async def test_a_later_trainer_is_in_power(simulated: Simulated, trainer: MakeClient) -> None:
    one, old, new = await simulated("one"), trainer(), trainer()
    await call(old.start_weight_update)
    await update(new, "new")
    assert old.epoch is not None and new.epoch is not None and old.epoch < new.epoch
    with pytest.raises(WeightSyncFailed, match="stale_epoch"):
        await call(old.update_weights, {"names": []})
    with pytest.raises(WeightSyncFailed, match="stale_epoch"):
        await update(old, "old")
    assert shows(await one.snapshot()) == ("serving", True, "new")


async def test_an_instance_that_restarted_has_to_be_initialised_again(
    simulated: Simulated, trainer: MakeClient
) -> None:
    """It is not in the trainer's group any more."""
    one, client = await simulated("one"), trainer(instances="one")
    await call(client.init_weight_transfer_engine, {})
    await update(client, "v1")
    await one.close()
    again = await simulated("one")
    with pytest.raises(WeightSyncFailed, match="one restarted: initialise the transfer again"):
        await update(client, "v2")
    assert shows(await again.snapshot()) == ("serving", True, "default")
    await call(client.init_weight_transfer_engine, {})
    await update(client, "v2")
    assert shows(await again.snapshot()) == ("serving", True, "v2")


async def test_closing_aborts_what_is_open(simulated: Simulated, trainer: MakeClient) -> None:
    one = await simulated("one")
    with trainer() as client:
        await call(client.start_weight_update)
        await call(client.close)
    assert shows(await one.snapshot()) == ("serving", True, "default")
    with pytest.raises(RuntimeError, match="closed"):
        client.start_weight_update()


async def test_a_second_start_ends_the_update_before(simulated: Simulated, trainer: MakeClient) -> None:
    """A trainer whose `send_weights` failed calls it again."""
    one, client = await simulated("one"), trainer()
    await call(client.start_weight_update)
    await update(client, "v1")
    assert shows(await one.snapshot()) == ("serving", True, "v1")


async def test_any_command_to_all_that_take_part(simulated: Simulated, trainer: MakeClient) -> None:
    """What a trainer on the same accelerator needs beside the four calls."""
    one, client = await simulated("one"), trainer(epoch=7)
    replies = await call(client.send, "sleep", {"level": 1, "mode": "keep"})
    assert {name: reply.ok for name, reply in replies.items()} == {"one": True}
    assert (await one.snapshot()).state == "asleep"
    await call(client.send, "wake_up", {"tags": ["weights"]})
    await update(client, "v1")
    await call(client.send, "wake_up")
    assert shows(await one.snapshot()) == ("serving", True, "v1")


# --- scripted instances ---------------------------------------------------------------------------


async def test_ranks_follow_from_one_instance_to_the_next(scripted: Any, trainer: MakeClient) -> None:
    engines = [await scripted(name) for name in ("b", "a", "c")]
    client = trainer()
    info = {"master_address": "h", "master_port": 1, "world_size": 7, "rank_offset": 1}
    await call(client.init_weight_transfer_engine, info)
    offsets = {
        each.name: command.args["init_info"]["rank_offset"]
        for each in engines
        for verb, command in each.got
        if verb == "init_weight_transfer"
    }
    assert offsets == {"a": 1, "b": 3, "c": 5}
    with pytest.raises(ValueError, match="7 ranks do not divide among 3 instances: a, b, c"):
        await call(client.init_weight_transfer_engine, info | {"world_size": 8})


async def test_every_command_names_session_and_epoch(scripted: Any, trainer: MakeClient) -> None:
    engine, client = await scripted("a"), trainer(epoch=4, lease_s=9.0, budgets={"chunk_s": 7.0})
    await update(client, "v1")
    sent = {verb: command for verb, command in engine.got if verb != "status"}
    assert {command.epoch for command in sent.values()} == {4}
    assert sent["start_weight_update"].args == {"pause_mode": "keep", "lease_s": 9.0, "chunk_s": 7.0}
    assert {sent[verb].session for verb in ("update_weights", "finish_weight_update")} == {"s1"}
    assert sent["finish_weight_update"].args == {"weight_version": "v1", "cache": "clear"}


async def test_all_enter_together(scripted: Any, trainer: MakeClient) -> None:
    """A group is complete only when each has entered, so none may wait for another's answer."""
    engines = [await scripted(name) for name in ("a", "b", "c")]
    for engine in engines:
        engine.answers["init_weight_transfer"] = None
    client = trainer(budgets={"init_s": 1.0})
    entering = asyncio.ensure_future(call(client.init_weight_transfer_engine, {}))
    await eventually(lambda: all("init_weight_transfer" in engine.verbs() for engine in engines))
    entering.cancel()


async def test_a_lost_reply_is_asked_for_again(scripted: Any, trainer: MakeClient) -> None:
    engine, client = await scripted("a"), trainer()
    engine.silent_once.add("update_weights")
    engine.answers["status"] = {"reply": {"ok": True}, "running": False}
    began = time.monotonic()
    await update(client, "v1")
    assert time.monotonic() - began < 100
    ids = [command.id for verb, command in engine.got if verb == "update_weights"]
    assert len(ids) == 2 and len(set(ids)) == 1


async def test_an_instance_that_goes_away_is_not_waited_for(scripted: Any, trainer: MakeClient) -> None:
    """Not for the ten minutes that a chunk may take."""
    engine, client = await scripted("a"), trainer()
    await call(client.start_weight_update)
    engine.answers["update_weights"] = None
    updating = asyncio.ensure_future(call(client.update_weights, {"names": []}))
    await eventually(lambda: "update_weights" in engine.verbs())
    await engine.bus.close()
    with pytest.raises(WeightSyncFailed, match="it is gone") as failure:
        await asyncio.wait_for(updating, 30)
    assert isinstance(failure.value.failed["a"], NoAnswer)


async def test_an_instance_that_was_away_for_a_moment_is_waited_for(
    scripted: Any, trainer: MakeClient, connect: Connect
) -> None:
    """It lost its broker, and comes back."""
    engine, client = await scripted("a"), trainer(instances="a")
    await engine.bus.close()
    sending = asyncio.ensure_future(call(client.send, "status"))
    await asyncio.sleep(1)
    assert not sending.done()
    await Scripted(await connect(), "a").start()
    assert (await sending)["a"].ok
    with pytest.raises(WeightSyncFailed, match="no instance of this name listens"):
        await call(trainer(instances="nobody").send, "status")


async def test_one_failure_does_not_wait_for_those_that_hang(scripted: Any, trainer: MakeClient) -> None:
    """They wait for tensors that the trainer will not send."""
    engines = {name: await scripted(name) for name in ("a", "b")}
    client = trainer()
    await call(client.start_weight_update)
    engines["a"].answers["update_weights"] = None
    engines["b"].answers["update_weights"] = ErrorCode.ENGINE_ERROR
    with pytest.raises(WeightSyncFailed) as failure:
        await asyncio.wait_for(call(client.update_weights, {"names": []}), 10)
    assert failure.value.failed["a"] is None
    assert isinstance(failure.value.failed["b"], CommandFailed)
    await eventually(lambda: all("abort_weight_update" in each.verbs() for each in engines.values()))


async def test_who_is_not_up_takes_no_part(
    scripted: Any, trainer: MakeClient, nats_server: NatsServer
) -> None:
    client = trainer()
    with pytest.raises(WeightSyncFailed, match=r"no instance of default\.backend is up"):
        await call(client.start_weight_update)
    starting = await scripted("a")
    await starting.show("starting", seq=2)
    await scripted("b")
    async with Client.connect(nats_server.url) as reader:
        await eventually(lambda: states_are(reader, {"a": "starting", "b": "serving"}))
    await update(client)
    assert client.members == ["b"]


async def states_are(client: Client, wanted: dict[str, str]) -> bool:
    return {name: last.state for name, last in (await client.states()).items()} == wanted


def test_a_broker_that_is_not_there_is_told_at_the_first_call() -> None:
    """And not before: the other ranks of a trainer make a client that they never call."""
    with NATSWeightSyncClient("nats://127.0.0.1:1", connect_wait_s=0.2) as client:
        with pytest.raises(BusError):
            client.start_weight_update()
        client.abort_weight_update()


def test_a_budget_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no such budget: update_s"):
        NATSWeightSyncClient(budgets={"update_s": 1.0})
