"""Many simulated instances in one process."""

import signal
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bus.client import Client
from tests.broker import eventually, free_port
from tests.program import Program

COUNT = 25
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


async def test_a_fleet_without_a_broker_says_so(tmp_path: Path) -> None:
    options = ("--nats", f"nats://127.0.0.1:{free_port()}", "--nats-wait-s", "0.2")
    program = await Program.start(tmp_path, "sim-fleet", "2", "--grpc-address", "127.0.0.1:0", *options)
    try:
        assert await program.end(20) == 2
        assert program.stderr().startswith("watchkeeper: error: ")
    finally:
        await program.kill()
