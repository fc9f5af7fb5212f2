"""Wrong use ends at once: one clear line, exit code 2, nothing left running."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.broker import NatsServer, eventually, free_port
from tests.conftest import StartNats
from tests.program import Program, assert_in_time

WITHIN_S = 10.0
GUARD_S = 60.0
pytestmark = pytest.mark.timeout(180)

ANYWHERE = (
    "--grpc-address",
    "127.0.0.1:0",
    "--http-address",
    "127.0.0.1:0",
    "--admin-address",
    "127.0.0.1:0",
)

Serve = Callable[..., Awaitable[Program]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Starts instances of the simulated engine on free ports, unless the arguments say otherwise."""
    programs: list[Program] = []

    async def serve(*arguments: str, model: str = "sim-model") -> Program:
        program = await Program.start(tmp_path, "serve", model, *ANYWHERE, "--engine", "sim", *arguments)
        programs.append(program)
        return program

    yield serve
    for program in programs:
        await program.kill()


async def refused(program: Program) -> str:
    """What it says on stderr, once it has ended as wrong use does."""
    assert await program.end(GUARD_S) == 2, program.last_words()
    took_s = time.monotonic() - program.started_s
    said = program.stderr()
    assert said.startswith("watchkeeper: error: "), said
    assert said.count("\n") == 1 and said.endswith("\n"), said
    assert program.left() == []
    assert_in_time("wrong use", took_s, WITHIN_S)
    return said.removeprefix("watchkeeper: error: ").removesuffix("\n")


@pytest.mark.parametrize("option", ["--grpc-address", "--http-address", "--admin-address"])
async def test_a_port_that_is_taken(serve: Serve, nats_url: str, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = "127.0.0.1:{1}".format(*other.getsockname())
        said = await refused(await serve("--nats", nats_url, option, address))
    assert said == f"cannot listen on {address}: address already in use"


@pytest.mark.parametrize("option", ["--grpc-address", "--http-address", "--admin-address"])
async def test_a_port_that_another_instance_has(
    serve: Serve, nats_url: str, tmp_path: Path, option: str
) -> None:
    """Also while that one still loads: its HTTP port is bound, and does not listen yet."""
    address = f"127.0.0.1:{free_port()}"
    ready = tmp_path / "ready"
    await serve("--nats", nats_url, "--ready-file", str(ready), option, address, "--", "--load-s", "60")
    await eventually(ready.exists, within_s=GUARD_S)
    said = await refused(await serve("--nats", nats_url, option, address))
    assert said == f"cannot listen on {address}: address already in use"


async def test_an_address_that_is_not_ours(serve: Serve, nats_url: str) -> None:
    # TEST-NET-1, RFC 5737
    said = await refused(await serve("--nats", nats_url, "--http-address", "192.0.2.1:8000"))
    assert said == "cannot listen on 192.0.2.1:8000: cannot assign requested address"


async def test_nobody_answers_where_nats_should_be(serve: Serve) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    said = await refused(await serve("--nats", url))
    assert url in said and "refused" in said.lower()


async def test_something_else_answers_where_nats_should_be(serve: Serve) -> None:
    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        url = "nats://127.0.0.1:{1}".format(*server.sockets[0].getsockname())
        assert url in await refused(await serve("--nats", url))


@pytest.mark.parametrize("secret", ["wrong", None], ids=["wrong password", "no password"])
async def test_nats_refuses_us(
    serve: Serve, start_nats: StartNats, tmp_path: Path, secret: str | None
) -> None:
    broker = await start_nats("authorization { user: keeper, password: right }")
    options = ["--nats", broker.url]
    if secret is not None:
        password = tmp_path / "password"
        password.write_text(f"{secret}\n")
        options += ["--nats-user", "keeper", "--nats-password-file", str(password)]
    said = await refused(await serve(*options))
    assert broker.url in said and "authorization" in said.lower()


async def test_a_password_that_nats_takes(serve: Serve, start_nats: StartNats, tmp_path: Path) -> None:
    """What the refusals above are worth."""
    broker = await start_nats("authorization { user: keeper, password: right }")
    password, ready = tmp_path / "password", tmp_path / "ready"
    password.write_text("right\n")
    await serve(
        *("--nats", broker.url, "--nats-user", "keeper", "--nats-password-file", str(password)),
        *("--ready-file", str(ready)),
    )
    await eventually(ready.exists, within_s=GUARD_S)


async def test_a_broker_without_jetstream(serve: Serve, start_nats: StartNats) -> None:
    broker = await start_nats(jetstream=False)
    said = await refused(await serve("--nats", broker.url))
    assert "JetStream" in said


async def test_another_live_instance_of_this_name(serve: Serve, nats_url: str, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    first = await serve("--nats", nats_url, "--instance", "twin", "--ready-file", str(ready))
    await eventually(ready.exists, within_s=GUARD_S)
    said = await refused(await serve("--nats", nats_url, "--instance", "twin"))
    assert "another live instance is called 'twin' in default.backend" in said
    assert first.exit_code is None
    # The name alone does not matter: another component has names of its own.
    other = tmp_path / "other"
    await serve("--nats", nats_url, "--instance", "twin", "--component", "c", "--ready-file", str(other))
    await eventually(other.exists, within_s=GUARD_S)


async def test_an_engine_argument_that_nobody_knows(serve: Serve, nats_url: str) -> None:
    said = await refused(await serve("--nats", nats_url, "--", "--no-such-argument", "1"))
    assert "--no-such-argument" in said


@pytest.mark.parametrize("what", ["missing", "a directory", "not TOML", "unknown option", "bad value"])
async def test_a_configuration_that_cannot_be_read(
    serve: Serve, nats_server: NatsServer, tmp_path: Path, what: str
) -> None:
    file = tmp_path / "config.toml"
    if what == "a directory":
        file.mkdir()
    elif what != "missing":
        text = {"not TOML": "nats = [", "unknown option": "natz = 'x'", "bad value": "role = 'cook'"}[what]
        file.write_text(text)
    said = await refused(await serve("--nats", nats_server.url, "--config", str(file)))
    assert str(file) in said


async def test_a_model_that_is_not_there(serve: Serve, nats_url: str, tmp_path: Path) -> None:
    """Known before anything is loaded, so also of the real engine."""
    model = str(tmp_path / "no-such-model")
    said = await refused(await serve("--nats", nats_url, "--engine", "vllm", model=model))
    assert model in said


async def test_a_ready_file_that_cannot_be_written(serve: Serve, nats_url: str) -> None:
    said = await refused(await serve("--nats", nats_url, "--ready-file", "/no/such/folder/ready"))
    assert "--ready-file" in said and "/no/such/folder" in said


async def test_a_password_file_that_is_not_there(serve: Serve, nats_url: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    said = await refused(
        await serve("--nats", nats_url, "--nats-user", "keeper", "--nats-password-file", missing)
    )
    assert missing in said
