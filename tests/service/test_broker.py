"""Instances that were told no broker: who starts one, who uses it, and when it ends."""

import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from bus.client import Client
from bus.embedded import answers
from tests.broker import eventually, free_port
from tests.program import Program

TERM = signal.SIGTERM
ELSEWHERE = """
import sys
from service import broker
broker.EMBEDDED = ("127.0.0.1", int(sys.argv.pop(1)))
from service.__main__ import main
main()
"""
"""The program with another default port: on 4222 there may be a server that is not ours."""

Serve = Callable[..., Awaitable[Program]]


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Where programs look for a broker."""
    port = free_port()
    monkeypatch.setattr("tests.program.WATCHKEEPER", (sys.executable, "-c", ELSEWHERE, str(port)))
    return port


@pytest.fixture
async def serve(tmp_path: Path, port: int) -> AsyncIterator[Serve]:
    """Starts simulated instances that share their data folder."""
    programs: list[Program] = []

    async def serve(name: str, *options: str) -> Program:
        arguments = ["serve", "m", "--engine", "sim", "--instance", name, "--grace-period-s", "0.2"]
        for address in ("--grpc-address", "--http-address", "--admin-address"):
            arguments += [address, "127.0.0.1:0"]
        arguments += ["--data-dir", str(tmp_path / "data"), "--ready-file", str(tmp_path / name), *options]
        program = await Program.start(tmp_path, *arguments)
        programs.append(program)
        return program

    yield serve
    for program in programs:
        await program.kill()


async def ready(program: Program, file: Path) -> str:
    """The URL of its broker, once it has said that it is there."""
    await eventually(lambda: file.exists() or program.exit_code is not None, within_s=60)
    assert file.exists(), program.last_words()
    return str(json.loads(file.read_text())["nats"])


def said(program: Program, words: str) -> bool:
    return words in program.out.read_text()


async def test_the_server_stays_for_others_and_ends_after_them(
    serve: Serve, tmp_path: Path, port: int
) -> None:
    first = await serve("first")
    url = await ready(first, tmp_path / "first")
    assert url == f"nats://127.0.0.1:{port}" and said(first, "started an embedded NATS server")
    second = await serve("second")
    assert await ready(second, tmp_path / "second") == url
    assert said(second, f"using the NATS server that answers on 127.0.0.1:{port}")

    first.process.send_signal(TERM)
    assert await first.end(within_s=10) == 0
    assert said(first, "the embedded NATS server stays until the others on it have left: 1")
    async with Client.connect(url) as client:
        await client.wait_for("second", "serving", timeout_s=20)
        assert (await client.instance("second").pause()).ok
        assert (await client.instance("second").resume()).ok
    third = await serve("third")
    assert await ready(third, tmp_path / "third") == url

    for program in (second, third):
        program.process.send_signal(TERM)
    for program in (second, third):
        assert await program.end(within_s=10) == 0
        assert not said(program, "NATS connection lost")
        assert program.left() == []
    await eventually(lambda: not first.left(), within_s=10)
    assert not await answers("127.0.0.1", port)


async def test_the_server_stops_at_once_where_nobody_else_uses_it(serve: Serve, tmp_path: Path) -> None:
    program = await serve("one")
    await ready(program, tmp_path / "one")
    program.process.send_signal(TERM)
    assert await program.end(within_s=10) == 0
    assert program.left() == []


async def test_the_server_dies_with_an_instance_that_is_killed(serve: Serve, tmp_path: Path) -> None:
    first = await serve("first")
    await ready(first, tmp_path / "first")
    second = await serve("second")
    await ready(second, tmp_path / "second")
    first.process.kill()
    await eventually(lambda: not first.left())
    second.process.send_signal(TERM)
    assert await second.end(within_s=10) == 0


async def test_of_two_that_start_together_one_starts_the_server(serve: Serve, tmp_path: Path) -> None:
    programs = {name: await serve(name) for name in ("first", "second")}
    urls = {await ready(program, tmp_path / name) for name, program in programs.items()}
    assert len(urls) == 1
    starters = [p for p in programs.values() if said(p, "started an embedded NATS server")]
    assert len(starters) == 1


async def test_a_port_that_something_else_has(serve: Serve, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        program = await serve("one", "--nats-wait-s", "0.5")
        assert await program.end(within_s=60) == 2
    expected = f"watchkeeper: error: cannot start a NATS server on 127.0.0.1:{port}: the port is taken\n"
    assert program.stderr() == expected
    assert program.left() == []
