"""Many simulated instances in one process."""

import contextlib
import signal
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bus.client import Client
from bus.fleet import End, Fleet, PartialUpdate
from tests.broker import eventually, free_port
from tests.program import Program
from tests.service.serving import serving

COUNT, MANY = 25, 100
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_each_has_its_own_names_state_and_answers(tmp_path: Path, nats_url: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    options = ("--nats", nats_url, "--grpc-address", address, "--grace-period-s", "0")
    program = await Program.start(tmp_path, "sim-fleet", str(COUNT), *options)
    try:
        async with (
            Client.connect(nats_url, wait_s=20) as client,
            grpc.aio.insecure_channel(address) as channel,
        ):

            async def routable() -> bool:
                assert program.exit_code is None, program.last_words()
                return len(await client.instances()) == COUNT

            await eventually(routable, within_s=60)
            await client.instance("sim-0007").pause()
            stub = health_pb2_grpc.HealthStub(channel)

            async def check(service: str) -> int:
                request = health_pb2.HealthCheckRequest(service=service)
                return int((await stub.Check(request, timeout=5)).status)

            assert await check("sim-0007/readiness") == NOT_SERVING
            assert await check("sim-0007/liveness") == SERVING
            assert await check("sim-0008/readiness") == SERVING
            gathering = await client.send_all("sleep").run()
            assert len(gathering.replies) == COUNT and gathering.complete
            assert {snapshot.state for snapshot in (await client.states()).values()} == {"asleep"}
            program.process.send_signal(signal.SIGTERM)
            assert await program.end(30) == 0
            assert not await client.instances()
    finally:
        await program.kill()


async def test_an_update_of_many_while_one_fails_one_leaves_and_one_joins(
    tmp_path: Path, nats_url: str
) -> None:
    """Group command, per-engine acks; All-or-report, not all-or-nothing; Version gating of joiners."""
    options = ("--nats", nats_url, "--grpc-address", "127.0.0.1:0", "--grace-period-s", "0")
    program = await Program.start(tmp_path, "sim-fleet", str(MANY), *options)
    chunk = {"path": "/v2"}
    try:
        async with (
            Client.connect(nats_url, issuer="trainer", wait_s=20) as client,
            contextlib.AsyncExitStack() as joiner,
        ):

            async def routable() -> bool:
                assert program.exit_code is None, program.last_words()
                return len(await client.instances()) == MANY

            await eventually(routable, within_s=90, every_s=0.2)
            await client.new_epoch()
            async with Fleet(client) as fleet:
                assert len(fleet.members) == MANY
                for verb in ("pause", "resume"):
                    assert len((await fleet.send(verb)).done) == MANY
                fault = {"call": "update_weights", "outcome": "error", "times": 1}
                await client.instance("sim-0007").send("simulate", fault)
                with pytest.raises(PartialUpdate, match=f"2 of {MANY} instances failed"):  # noqa: PT012
                    async with fleet.update("v2", "resume_good") as update:
                        assert len(update.sessions) == MANY
                        await client.instance("sim-0011").shutdown()
                        await joiner.enter_async_context(serving(tmp_path, nats_url, name="late"))
                        await eventually(lambda: fleet.joined and fleet.left, within_s=60)
                        outcome = await update.load(chunk)
                assert outcome.codes == {"sim-0007": "engine_error", "sim-0011": "no_answer"}
                assert set(outcome.joined) == {"late"} and set(outcome.left) == {"sim-0011"}
                assert len(outcome.done) == MANY - 2
                ends = {name: part.end for name, part in update.parts.items()}
                assert (ends.pop("sim-0007"), ends.pop("sim-0011")) == (End.TAINTED, End.UNKNOWN)
                assert set(ends.values()) == {End.COMMITTED}

                def shown(name: str) -> tuple[str, str]:
                    return fleet.states[name].state, fleet.states[name].weights.version

                await eventually(lambda: {shown(name) for name in ends} == {("serving", "v2")}, within_s=60)
                assert shown("sim-0007") == ("weight_update", "default")
                assert shown("late") == ("serving", "default")

                fleet.refresh()
                async with fleet.update("v3") as update:
                    await update.load(chunk)
                assert len(update.parts) == MANY  # one less, one more
                assert {part.end for part in update.parts.values()} == {End.COMMITTED}
    finally:
        await program.kill()


async def test_a_fleet_without_a_broker_says_so(tmp_path: Path) -> None:
    options = ("--nats", f"nats://127.0.0.1:{free_port()}", "--nats-wait-s", "0.2")
    program = await Program.start(tmp_path, "sim-fleet", "2", "--grpc-address", "127.0.0.1:0", *options)
    try:
        assert await program.end(20) == 2
        assert program.stderr().startswith("watchkeeper: error: ")
    finally:
        await program.kill()
