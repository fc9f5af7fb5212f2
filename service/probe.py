"""One gRPC health check on a new connection, as a kubelet or grpc-health-probe makes it."""

import asyncio
from dataclasses import dataclass
from enum import IntEnum

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.options import Address

NEW_CONNECTION: tuple[tuple[str, int], ...] = (
    ("grpc.use_local_subchannel_pool", 1),
    # An http_proxy in the environment is not meant for a probe of a named port.
    ("grpc.enable_http_proxy", 0),
)


class Outcome(IntEnum):
    """How a probe ended; the values are the exit codes of grpc-health-probe."""

    SERVING = 0
    NOT_CONNECTED = 2
    RPC_FAILED = 3
    NOT_SERVING = 4


@dataclass(frozen=True)
class Probe:
    """What a probe found.

    Attributes:
        text: `status: SERVING` and the like, or one line about what failed.
    """

    outcome: Outcome
    text: str


async def probe(
    address: Address, service: str = "", connect_timeout_s: float = 1.0, rpc_timeout_s: float = 1.0
) -> Probe:
    """Connect, check once, disconnect. A refused connection is not tried again."""
    async with grpc.aio.insecure_channel(str(address), options=NEW_CONNECTION) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            async with asyncio.timeout(connect_timeout_s):
                connected = await _connect(channel)
        except TimeoutError:
            reason = f"no gRPC server answered within {connect_timeout_s:g} s"
            return Probe(Outcome.NOT_CONNECTED, f"cannot connect to {address}: {reason}")
        try:
            answer = await check(request, timeout=rpc_timeout_s)
        except grpc.aio.AioRpcError as error:
            details = " ".join((error.details() or "").split())
            if not connected:  # the call only repeats why
                return Probe(Outcome.NOT_CONNECTED, f"cannot connect to {address}: {details}")
            return Probe(Outcome.RPC_FAILED, f"the check failed: {error.code().name}: {details}")
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return Probe(Outcome.SERVING if status == "SERVING" else Outcome.NOT_SERVING, f"status: {status}")


async def _connect(channel: grpc.aio.Channel) -> bool:
    """Whether it connected; False as soon as every address of the host was tried in vain."""
    while True:
        state = channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            return True
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            return False
        await channel.wait_for_state_change(state)
