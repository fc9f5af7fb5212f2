"""The trainer of the README, run as it is written there."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.broker import NatsServer
from tests.integration.served import ALL_UP, REAL, SOON_S, Served, phase
from tests.program import ROOT

pytestmark = REAL

DEFAULT_PORT = 4222


@pytest.fixture(scope="module")
def text() -> str:
    [block] = [
        block
        for block in re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
        if block.startswith("# a trainer\n")
    ]
    return str(block)


@pytest_asyncio.fixture(loop_scope="session")
async def trainer(text: str, broker: NatsServer, tmp_path: Path) -> AsyncIterator[Path]:
    """A file with its text, and NATS where it looks for it.

    If somebody has that port, the text is told of another one; nothing else in it is changed.
    """
    file = tmp_path / "trainer.py"
    try:
        passage = await asyncio.start_server(_pass_on_to(broker.port), "127.0.0.1", DEFAULT_PORT)
    except OSError:
        told = text.replace("Client.connect(", f"Client.connect({broker.url!r}, ")
        assert told != text
        file.write_text(told)
        yield file
        return
    file.write_text(text)
    async with passage:
        yield file


def _pass_on_to(port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up, down = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, down), copy(up, writer))

    return connected


async def run(trainer: Path, checkpoint: Path) -> tuple[int | None, str, str]:
    pipe = asyncio.subprocess.PIPE
    # As a user has it: from a folder of their own, with the interpreter into which watchkeeper is installed.
    process = await asyncio.create_subprocess_exec(
        sys.executable, trainer.name, str(checkpoint), cwd=trainer.parent, stdout=pipe, stderr=pipe
    )
    async with asyncio.timeout(SOON_S):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_trainer_gives_every_instance_a_checkpoint(
    served: Served, trainer: Path, models: Path, answers_of_b: list[str]
) -> None:
    assert await run(trainer, models / "b") == (0, f"{served.name} serving b\n", "")
    assert await served.complete_all() == answers_of_b
    assert await served.health() == ALL_UP
    assert set(await served.versions()) == {"b"}
    code, out, err = await run(trainer, models / "a")
    assert (code, out, err) == (0, f"{served.name} serving a\n", "")
    assert await served.complete_all() == served.answers


async def test_the_trainer_does_not_hide_a_failure(
    served: Served, trainer: Path, models: Path, tmp_path: Path
) -> None:
    code, out, err = await run(trainer, tmp_path / "no-checkpoint")
    assert (code, out) == (1, "")
    assert "engine_error" in err and "no-checkpoint" in err
    assert phase(await served.state()) == "tainted"
    assert not await served.routable()
    await served.update(models / "a", "a")
    assert await served.complete_all() == served.answers
