"""From the start to the first completion."""

import asyncio
import os
import time
from pathlib import Path

from bus.client import Client
from service.options import Address
from service.probe import Outcome, probe
from tests.broker import NatsServer, eventually, free_port
from tests.integration.served import (
    ALL_UP,
    NAMES,
    NOT_SERVING,
    PROMPT,
    REAL,
    SERVING,
    SOON_S,
    Served,
    measure,
)
from tests.measured import measured
from tests.program import Program

pytestmark = REAL

LIVE_WITHIN_S = 2.0


async def test_liveness_answers_within_two_seconds_while_the_model_loads(
    broker: NatsServer, client: Client, models: Path, tmp_path: Path
) -> None:
    """And who ends it then is not kept waiting. The best of three: whatever else runs can only delay."""
    delays_s: list[float] = []
    while not delays_s or (min(delays_s) >= LIVE_WITHIN_S and len(delays_s) < 3):
        name, address = f"early-{len(delays_s)}", Address("127.0.0.1", free_port())
        program = await Program.start(
            tmp_path,
            *("serve", str(models / "a"), "--instance", name, "--nats", broker.url),
            *("--grpc-address", str(address), "--http-address", "127.0.0.1:0"),
            *("--admin-address", "127.0.0.1:0"),
        )
        try:

            async def is_live(address: Address = address) -> bool:
                return (await probe(address, "liveness")).outcome is Outcome.SERVING

            await eventually(is_live, within_s=SOON_S)
            delays_s.append(time.monotonic() - program.started_s)
            for service in ("readiness", "vllm.Inference", "vllm.Control", ""):
                assert (await probe(address, service)).outcome is Outcome.NOT_SERVING
            state = await client.wait_for(name, "starting", settled=False)
            assert (state.live, state.ready) == (True, False)
            assert state.reasons
            program.process.terminate()
            assert await program.end(SOON_S) == 0, program.last_words()
            assert program.left() == []
            assert program.stderr() == ""
        finally:
            await program.kill()
    measure("start → liveness SERVING", min(delays_s), LIVE_WITHIN_S)


async def test_readiness_discovery_and_a_completion(served: Served, client: Client) -> None:
    loaded_s = served.watches["readiness"].seen[1][1] - served.program.started_s
    measure("start → ready, with the model loaded", loaded_s)
    assert served.watches["readiness"].statuses[:2] == [NOT_SERVING, SERVING]
    assert served.watches["liveness"].statuses == [SERVING]
    for name in ("vllm.Inference", "vllm.Control", ""):
        assert served.watches[name].statuses == [NOT_SERVING, SERVING]
    assert await served.health() == ALL_UP

    entry = (await client.instances())[served.name]
    assert (entry.incarnation, entry.model, entry.role) == (served.incarnation, served.model, "aggregated")
    assert (entry.transport.http, entry.transport.grpc) == (served.http, served.grpc)
    assert entry.max_model_len == 2048

    state = await served.state()
    assert (state.state, state.ready, state.live, state.settled) == ("serving", True, True, True)
    assert state.engine is not None
    assert state.engine.kind == "vllm" and state.engine.version
    assert entry.weight_version == state.weights.version

    answer = await served.stream(PROMPT, max_tokens=20).end()
    assert (answer.status, answer.finish_reason, answer.count) == (200, "length", 20)
    models = await served.get("/v1/models")
    assert [model["id"] for model in models["data"]] == [served.model]


async def test_an_idle_engine_keeps_no_core_busy(served: Served) -> None:
    """Although it is asked how it is every two seconds: vLLM's workers spin after every call."""
    [worker] = served.processes("VLLM::Worker")
    before_s, began_s = cpu_s(worker), time.monotonic()
    await asyncio.sleep(6)
    share = (cpu_s(worker) - before_s) / (time.monotonic() - began_s)
    measured["share of a core that an idle worker uses"] = f"{100 * share:.0f} %"
    assert share < 0.2


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_what_nobody_knows_changes_nothing(served: Served) -> None:
    """A name that is not a health service, a verb that is not one, a resume that is not needed."""
    assert "NOT_FOUND" in await served.check("no-such-service")
    before = {name: served.watches[name].statuses for name in NAMES}
    resumed = await served.engine.resume()
    assert (resumed.ok, resumed.changed) == (True, False)
    woken = await served.engine.wake_up()
    assert (woken.ok, woken.changed) == (True, False)
    assert await served.health() == ALL_UP
    assert {name: served.watches[name].statuses for name in NAMES} == before


async def test_a_second_instance_of_this_name_is_refused(
    served: Served, broker: NatsServer, models: Path, tmp_path: Path
) -> None:
    program = await Program.start(
        tmp_path,
        *("serve", str(models / "a"), "--instance", served.name, "--nats", broker.url),
        *("--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0"),
    )
    try:
        assert await program.end(SOON_S) == 2
        assert program.left() == []
    finally:
        await program.kill()
    assert await served.routable()
    assert (await served.state()).incarnation == served.incarnation
