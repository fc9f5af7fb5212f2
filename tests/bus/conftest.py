"""Buses that are closed at the end of the test, and a loop that hides no failure."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from bus.connection import Bus
from tests.broker import NatsServer

Connect = Callable[..., Awaitable[Bus]]


@pytest.fixture
async def connect(nats_server: NatsServer) -> AsyncIterator[Connect]:
    """Connects to `nats_server`, or to `url=`; takes the options of `Bus.connect`."""
    buses: list[Bus] = []
    lost: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(str(context)))

    async def open_bus(url: str = "", **options: Any) -> Bus:
        bus = await Bus.connect(url or nats_server.url, **options)
        buses.append(bus)
        return bus

    yield open_bus
    for bus in buses:
        await bus.close()
    assert not lost, "failures that nobody saw"


@pytest.fixture
async def bus(connect: Connect) -> Bus:
    return await connect()
