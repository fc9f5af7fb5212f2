"""The example trains for real, and the programs of docs/trainers.md do what they say."""

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest_asyncio

from bus.weight_sync import NATSWeightSyncClient
from tests.broker import NatsServer, free_port
from tests.integration import gloo
from tests.integration.conftest import Fleet
from tests.integration.served import ALL_UP, REAL, Served, phase
from tests.measured import measured
from tests.program import ROOT

pytestmark = REAL

EXAMPLE = ROOT / "examples/train_and_publish.py"
ASK_EVERY_S = 0.3
"""An engine that never rests leaves nothing of a small machine to the trainer."""
PAGE = ROOT / "docs/trainers.md"
TUNE = " do re mi fa so la ti do"
LINE = re.compile(r"step +(\d+), loss ([\d.]+): \S+ serves '(\S+)' and sings '(.*)'")


class Run:
    """One run of the example, with the test as a second client of the engine.

    Attributes:
        heard: what the engine answered meanwhile.
    """

    def __init__(self, code: int, output: str, heard: list[str]) -> None:
        self.code, self.output, self.heard = code, output, heard


@pytest_asyncio.fixture(loop_scope="session")
async def by_file(fleet: Fleet) -> AsyncIterator[Served]:
    served = await fleet.of_b()
    yield served
    await served.update(Path(served.model), "b")


@pytest_asyncio.fixture(loop_scope="session")
async def by_gloo(fleet: Fleet, broker: NatsServer) -> AsyncIterator[Served]:
    served = await gloo.shared(fleet)
    yield served
    trainer = NATSWeightSyncClient(broker.url, component=gloo.COMPONENT)
    await gloo.send(trainer, Path(served.model), "a")
    await asyncio.to_thread(trainer.close)


async def train(served: Served, broker: NatsServer, folder: Path, *options: str) -> Run:
    async with asking(served) as heard:
        code, output = await example(served, broker, folder, *options)
    return Run(code, output, heard)


async def example(served: Served, broker: NatsServer, folder: Path, *options: str) -> tuple[int, str]:
    return await run(
        folder,
        *(str(EXAMPLE), "--nats", broker.url, "--instance", served.name),
        *("--component", served.client.component, "--checkpoints", str(folder), *options),
    )


@asynccontextmanager
async def asking(served: Served) -> AsyncIterator[list[str]]:
    """Every request is answered in full: `complete` fails otherwise."""
    heard: list[str] = []

    async def ask() -> None:
        while True:
            heard.append(await served.complete(max_tokens=8))
            await asyncio.sleep(ASK_EVERY_S)

    client = asyncio.create_task(ask())
    try:
        yield heard
    finally:
        if client.done():
            client.result()
        client.cancel()


async def test_an_engine_learns_from_files_while_it_serves(
    by_file: Served, broker: NatsServer, tmp_path: Path
) -> None:
    await learns(by_file, broker, tmp_path, "file")


async def test_an_engine_learns_over_gloo_while_it_serves(
    by_gloo: Served, broker: NatsServer, tmp_path: Path
) -> None:
    await learns(by_gloo, broker, tmp_path, "gloo")


async def learns(served: Served, broker: NatsServer, folder: Path, way: str) -> None:
    """Loss falls, versions follow, answers change towards the tune, and no request fails."""
    began = time.monotonic()
    ran = await train(served, broker, folder, "--via", way, "--steps", "30", "--publish-every", "10")
    assert ran.code == 0, ran.output
    told = LINE.findall(ran.output)
    assert [(int(step), version) for step, _, version, _ in told] == [
        (10, "step-10"),
        (20, "step-20"),
        (30, "step-30"),
    ], ran.output
    losses = [float(loss) for _, loss, _, _ in told]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 10
    assert told[-1][3] == TUNE
    assert re.search(r"\d+ requests, 0 failed; [3-9] different answers", ran.output), ran.output
    assert ran.heard[-1] == TUNE and len(set(ran.heard)) >= 2
    assert (await served.state()).weights.version == "step-30"
    assert await served.health() == ALL_UP
    measured[f"example, by {way}"] = f"{time.monotonic() - began:.0f} s, {len(ran.heard)} answers meanwhile"


async def test_its_crash_before_anything_is_loaded_leads_back_by_the_lease(
    by_gloo: Served, broker: NatsServer, tmp_path: Path
) -> None:
    """Requests wait for it, and are answered by the weights that were there."""
    served, before = by_gloo, (await by_gloo.state()).weights.version
    ran = await train(served, broker, tmp_path, "--via", "gloo", *CRASH)
    assert ran.code == -9, ran.output
    assert (await served.state()).state == "weight_update"
    waiting = served.stream(max_tokens=8)
    back = await served.settled("serving")
    assert back.cause is not None and back.cause.verb == "lease_expired"
    assert (back.ready, back.weights.version) == (True, before)
    assert (await waiting.end()).text == ran.heard[0]
    assert await served.complete_all() == served.answers


async def test_its_crash_with_weights_loaded_keeps_traffic_away_until_the_next_update(
    by_file: Served, broker: NatsServer, tmp_path: Path
) -> None:
    served, before = by_file, (await by_file.state()).weights.version
    ran = await train(served, broker, tmp_path, "--via", "file", *CRASH, "--crash-when", "loaded")
    assert ran.code == -9, ran.output
    async with asyncio.timeout(30):
        while phase(state := await served.state()) != "tainted":
            await asyncio.sleep(0.05)
    assert state.cause is not None and state.cause.verb == "lease_expired"
    assert (state.ready, state.weights.good, state.weights.version) == (False, False, before)
    assert (await served.stream().end()).status == 503

    code, output = await example(served, broker, tmp_path, "--via", "file", "--steps", "2")
    assert code == 0 and "it gets weights first" in output and " 0 failed" in output, output
    assert (await served.state()).weights.version == "step-2"
    assert await served.health() == ALL_UP


CRASH = ("--steps", "2", "--publish-every", "1", "--crash-at-step", "1", "--lease-s", "4")


# --- the page that describes it -------------------------------------------------------------------


def snippets() -> dict[str, str]:
    """The programs of docs/trainers.md by their first line."""
    found = re.findall(r"^```python\n# (.*?)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    return dict(found)


async def test_the_programs_of_the_page_do_what_it_says(
    by_file: Served, by_gloo: Served, broker: NatsServer, models: Path, tmp_path: Path
) -> None:
    """As they are written, but for the broker and the component."""
    runs = {
        "verbs": (by_file, f"{by_file.name} serves step-100"),
        "synchronous, files": (by_file, f"updated {by_file.name}"),
        "vLLM's trainer engine": (by_gloo, f"{by_gloo.name} serves step-200"),
    }
    assert set(snippets()) == set(runs)
    for first, program in snippets().items():
        served, said = runs[first]
        here = f'"{broker.url}", component="{served.client.component}"'
        file = tmp_path / "program.py"
        file.write_text(program.replace('"nats://127.0.0.1:4222"', here).replace("29600", str(free_port())))
        code, output = await run(tmp_path, str(file), str(models / ("a" if served is by_file else "b")))
        assert code == 0 and said in output, output
    assert (await by_file.state()).weights.version == "step-300"
    assert not set(await by_file.complete_all()) & set(by_file.answers)
    assert await by_gloo.complete_all() == by_file.answers


async def run(folder: Path, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace")
