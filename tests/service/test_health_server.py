"""The health servicer over real connections."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.health_server import MAX_BEHIND, HealthServer
from service.listening import CannotListen
from service.options import Address
from service.probe import NEW_CONNECTION, Outcome, probe

STATUS = health_pb2.HealthCheckResponse.ServingStatus
UP, DOWN = "SERVING", "NOT_SERVING"


@pytest.fixture
async def server() -> AsyncIterator[HealthServer]:
    server = await HealthServer.bind("127.0.0.1:0")
    yield server
    await server.close()


@asynccontextmanager
async def connection(server: HealthServer, *options: tuple[str, int]) -> AsyncIterator[Any]:
    target = f"127.0.0.1:{server.port}"
    async with grpc.aio.insecure_channel(target, options=(*NEW_CONNECTION, *options)) as channel:
        yield health_pb2_grpc.HealthStub(channel)


class Watch:
    """A Watch stream that is read as fast as it comes."""

    def __init__(self, stub: Any, service: str) -> None:
        self.seen: list[str] = []
        self.end: grpc.StatusCode | None = None
        self._changed = asyncio.Event()
        self._call = stub.Watch(health_pb2.HealthCheckRequest(service=service))
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for answer in self._call:
                self.seen.append(STATUS.Name(answer.status))
                self._changed.set()
        except grpc.aio.AioRpcError:
            pass
        self.end = await self._call.code()
        self._changed.set()

    async def until(self, *wanted: str) -> None:
        """Wait until just this was seen; what else comes shows up as a difference."""
        async with asyncio.timeout(10):
            while len(self.seen) < len(wanted) and self.end is None:
                self._changed.clear()
                await self._changed.wait()
        assert self.seen == list(wanted)

    async def ended(self) -> grpc.StatusCode | None:
        await asyncio.wait_for(self._task, 10)
        return self.end


async def check(server: HealthServer, service: str) -> str:
    return (await probe(Address("127.0.0.1", server.port), service, 5, 5)).text.removeprefix("status: ")


async def test_before_anything_is_set_the_instance_is_alive_and_not_ready(server: HealthServer) -> None:
    names = ("liveness", "readiness", "vllm.Inference", "vllm.Control", "")
    assert [await check(server, name) for name in names] == [UP, DOWN, DOWN, DOWN, DOWN]


async def test_a_check_sees_what_was_set_just_before(server: HealthServer) -> None:
    server.set({"readiness": True, "": True})
    assert await check(server, "readiness") == UP
    assert await check(server, "") == UP
    assert await check(server, "liveness") == UP  # not mentioned, so it stayed
    server.set({"readiness": False})
    assert await check(server, "readiness") == DOWN


async def test_unknown_name_is_not_found(server: HealthServer) -> None:
    async with connection(server) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="readyness"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_of_an_unknown_name_stays_open_and_follows_the_name_once_it_exists(
    server: HealthServer,
) -> None:
    async with connection(server) as stub:
        watch = Watch(stub, "later")
        await watch.until("SERVICE_UNKNOWN")
        server.set({"later": False})
        await watch.until("SERVICE_UNKNOWN", DOWN)


async def test_list_names_every_service(server: HealthServer) -> None:
    async with connection(server) as stub:
        answer = await stub.List(health_pb2.HealthListRequest())
    statuses = {name: STATUS.Name(each.status) for name, each in answer.statuses.items()}
    assert statuses == {
        "liveness": UP,
        "readiness": DOWN,
        "vllm.Inference": DOWN,
        "vllm.Control": DOWN,
        "": DOWN,
    }


async def test_a_watch_sees_every_change_in_order_and_nothing_twice(server: HealthServer) -> None:
    async with connection(server) as stub:
        readiness, liveness = Watch(stub, "readiness"), Watch(stub, "liveness")
        await readiness.until(DOWN)
        await liveness.until(UP)
        wanted = [DOWN]
        for up in [True, True, False, False, True, False]:
            server.set({"readiness": up, "liveness": True})
            if wanted[-1] != (UP if up else DOWN):
                wanted.append(UP if up else DOWN)
                await readiness.until(*wanted)
        server.set({"liveness": False})
        await liveness.until(UP, DOWN)
        assert readiness.seen == wanted


async def test_changes_in_one_go_all_arrive_up_to_the_limit(server: HealthServer) -> None:
    async with connection(server) as stub:
        watch = Watch(stub, "readiness")
        await watch.until(DOWN)
        flips = [number % 2 == 0 for number in range(MAX_BEHIND)]
        for up in flips:
            server.set({"readiness": up})
        await watch.until(DOWN, *(UP if up else DOWN for up in flips))


async def test_a_reader_that_lags_too_far_behind_gets_the_latest(server: HealthServer) -> None:
    async with connection(server) as stub:
        watch = Watch(stub, "readiness")
        await watch.until(DOWN)
        for _ in range(500):
            server.set({"readiness": True})
            server.set({"readiness": False})
        server.set({"readiness": True})
        await server.close()
        assert await watch.ended() is grpc.StatusCode.OK
        assert watch.seen[-1] == UP
        assert len(watch.seen) <= MAX_BEHIND + 2
        assert all(a != b for a, b in zip(watch.seen, watch.seen[1:], strict=False))


async def test_a_watch_that_leaves_does_not_deafen_the_others(server: HealthServer) -> None:
    async with connection(server) as stub:
        stays = Watch(stub, "readiness")
        await stays.until(DOWN)
        async with connection(server) as other:
            await Watch(other, "readiness").until(DOWN)
        server.set({"readiness": True})
        await stays.until(DOWN, UP)
        server.set({"readiness": False})
        await stays.until(DOWN, UP, DOWN)


async def test_closing_ends_watches_without_a_status_of_its_own_and_frees_the_port(
    server: HealthServer,
) -> None:
    async with connection(server) as one, connection(server) as other:
        watches = [Watch(stub, "liveness") for stub in (one, other) for _ in range(100)]
        for watch in watches:
            await watch.until(UP)
        server.set({"liveness": False})
        began = time.monotonic()
        await server.close()
        assert time.monotonic() - began < 10  # 0.05 s on an idle machine: no grace is waited out
        assert {await watch.ended() for watch in watches} == {grpc.StatusCode.OK}
        assert {tuple(watch.seen) for watch in watches} == {(UP, DOWN)}
    gone = await probe(Address("127.0.0.1", server.port), "liveness", 5, 5)
    assert gone.outcome is Outcome.NOT_CONNECTED
    again = await HealthServer.bind(server.address)
    await again.close()


async def test_a_frozen_reader_holds_up_neither_the_others_nor_the_end(server: HealthServer) -> None:
    async with connection(server) as stub, connection(server, ("grpc.http2.bdp_probe", 0)) as frozen:
        call = frozen.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        await call.read()
        watch = Watch(stub, "liveness")
        await watch.until(UP)
        for _ in range(10_000):  # more than its window takes
            server.set({"readiness": True})
            await asyncio.sleep(0)
            server.set({"readiness": False})
            await asyncio.sleep(0)
        server.set({"liveness": False})
        await watch.until(UP, DOWN)
        began = time.monotonic()
        await server.close()
        assert time.monotonic() - began < 10
        call.cancel()


async def test_two_hundred_watches_and_a_prober_with_new_connections(server: HealthServer) -> None:
    async with connection(server) as a, connection(server) as b, connection(server) as c:
        watches = [Watch(stub, "readiness") for stub in (a, b, c, a) for _ in range(50)]
        for watch in watches:
            await watch.until(DOWN)
        wanted = [DOWN]
        for up in [True, False, True, False]:
            server.set({"readiness": up})
            wanted.append(UP if up else DOWN)
            for _ in range(10):
                assert await check(server, "readiness") == wanted[-1]
                assert await check(server, "liveness") == UP
        for watch in watches:
            await watch.until(*wanted)


async def test_pings_of_a_sidecar_are_tolerated(server: HealthServer) -> None:
    """gRPC's default answer to a third ping within five minutes is GOAWAY, too_many_pings.

    Spoken by hand (RFC 9113): the Python client would hold its pings back.
    """
    settings, ping, goaway = 4, 6, 7
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(settings))
    async with asyncio.timeout(10):
        for number in range(10):
            writer.write(_frame(ping, number.to_bytes(8)))
            kind = None
            while kind != ping:
                header = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(header[:3]))
                kind = header[3]
                assert kind != goaway
    writer.close()
    await writer.wait_closed()


def _frame(kind: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, 0, 0, 0, 0, 0)) + payload


async def test_a_taken_port_is_one_clear_line(server: HealthServer) -> None:
    with pytest.raises(CannotListen) as caught:
        await HealthServer.bind(server.address)
    assert str(caught.value) == f"cannot listen on 127.0.0.1:{server.port}: address already in use"


@pytest.mark.parametrize(
    ("address", "reason"),
    [("192.0.2.7:50051", "cannot assign requested address"), ("no-such-host.invalid:0", "no such host")],
)
async def test_an_address_of_somebody_else_is_one_clear_line(address: str, reason: str) -> None:
    with pytest.raises(CannotListen, match=f"cannot listen on {address}: {reason}"):
        await HealthServer.bind(address)


async def test_ipv6_and_wildcard_addresses() -> None:
    listen = [("0.0.0.0:0", "127.0.0.1"), ("localhost:0", "localhost")]
    if Path("/proc/net/if_inet6").exists():
        listen.append(("[::1]:0", "::1"))
    for text, reach in listen:
        server = await HealthServer.bind(text)
        assert (await probe(Address(reach, server.port), "liveness", 5, 5)).outcome is Outcome.SERVING
        await server.close()


async def test_further_services_are_there_when_the_port_opens() -> None:
    seen: list[grpc.aio.Server] = []
    server = await HealthServer.bind("127.0.0.1:0", {"only": True}, seen.append)
    assert len(seen) == 1
    assert await check(server, "only") == UP
    await server.close()
