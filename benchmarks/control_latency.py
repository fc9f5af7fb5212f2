"""How long a pause and a resume take, and how soon a probe sees them.

    python -m benchmarks.control_latency [--pairs 200] [--engine vllm|sim]

Runs one instance and, beside it in the same run, what it is built from: a bare NATS request and
reply to another process, and bare `pause_generation` and `resume_generation` calls on an AsyncLLM
of the same model in a process of its own. All times are milliseconds on one clock, p50 and p99.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bus.client import Client
from bus.connection import Bus
from bus.embedded import EmbeddedServer
from service.engine.tiny_model import ENGINE_ARGS, write_tiny_model

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING

ECHO = """
import asyncio, sys
from bus.connection import Bus
async def main():
    replies = asyncio.Queue()
    async with await Bus.connect(sys.argv[1]) as bus:
        await bus.subscribe("bench.echo", replies.put_nowait)
        print("ready", flush=True)
        while True:
            message = await replies.get()
            await bus.respond(message, message.data)
asyncio.run(main())
"""

BARE = """
import asyncio, json, sys, time
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
async def main():
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=sys.argv[1],
            enforce_eager=True,
            max_model_len=2048,
            kv_cache_memory_bytes=64 << 20,
            dtype="float32",
        )
    )
    pause, resume = [], []
    try:
        for n in range(int(sys.argv[2]) + 10):
            t0 = time.perf_counter()
            await engine.pause_generation(mode="keep")
            t1 = time.perf_counter()
            await engine.resume_generation()
            t2 = time.perf_counter()
            if n >= 10:
                pause.append((t1 - t0) * 1e3); resume.append((t2 - t1) * 1e3)
    finally:
        engine.shutdown()
    print("RESULT " + json.dumps([pause, resume]), flush=True)
if __name__ == "__main__":
    asyncio.run(main())
"""

WARM_UP = 10
LOAD_LIMIT_S = 600


class Watch:
    """Readiness as a Watch stream reports it, with the time of each change."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._changes: asyncio.Queue[tuple[int, float]] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        stub = health_pb2_grpc.HealthStub(self._channel)
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(service="readiness")):
            self._changes.put_nowait((answer.status, time.perf_counter()))

    async def until(self, status: int) -> float:
        while True:
            got, at = await asyncio.wait_for(self._changes.get(), LOAD_LIMIT_S)
            if got == status:
                return at

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.wait({self._reading})
        await self._channel.close(None)


@contextlib.asynccontextmanager
async def process(*argv: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        await child.communicate()


async def bare_request(url: str, count: int) -> list[float]:
    """A request to another Python process and its reply, of the size of a command."""
    times = []
    async with process(sys.executable, "-c", ECHO, url) as echo, await Bus.connect(url) as bus:
        assert echo.stdout is not None
        await echo.stdout.readline()
        for n in range(count + WARM_UP):
            started = time.perf_counter()
            await bus.request("bench.echo", b"x" * 200, 5.0)
            if n >= WARM_UP:
                times.append((time.perf_counter() - started) * 1e3)
    return times


async def bare_pause(model: Path, count: int, folder: Path) -> tuple[list[float], list[float]]:
    script = folder / "bare.py"  # vLLM's children import the main module again: it must be a file
    script.write_text(BARE)
    async with process(sys.executable, str(script), str(model), str(count)) as bare:
        output, _ = await bare.communicate()
    line = next(row for row in output.decode().splitlines() if row.startswith("RESULT "))
    pause, resume = json.loads(line.removeprefix("RESULT "))
    return pause, resume


async def instance(url: str, model: str, engine: str, pairs: int, folder: Path) -> dict[str, list[float]]:
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "service", "serve", model, "--engine", engine, "--nats", url]
    command += ["--instance", "bench", "--ready-file", str(ready), "--grace-period-s", "0"]
    for option in ("--grpc-address", "--http-address", "--admin-address"):
        command += [option, "127.0.0.1:0"]
    if engine == "vllm":
        command += ["--", *ENGINE_ARGS]
    times: dict[str, list[float]] = {"seen": [], "pause": [], "resume": [], "back": []}
    async with process(*command) as serve, Client.connect(url) as client:
        assert serve.stdout is not None
        drain = asyncio.create_task(_discard(serve.stdout))
        while not ready.exists():
            await asyncio.sleep(0.02)
        target = client.instance("bench")
        watch = Watch(json.loads(ready.read_text())["grpc"])
        await watch.until(SERVING)
        for n in range(pairs + WARM_UP):
            t0 = time.perf_counter()
            reply = asyncio.create_task(target.pause(mode="keep"))
            seen = await watch.until(NOT_SERVING)
            await reply
            t1 = time.perf_counter()
            reply = asyncio.create_task(target.resume())
            back = await watch.until(SERVING)
            await reply
            t2 = time.perf_counter()
            if n >= WARM_UP:
                for name, seconds in (
                    ("seen", seen - t0),
                    ("pause", t1 - t0),
                    ("resume", t2 - t1),
                    ("back", back - t1),
                ):
                    times[name].append(seconds * 1e3)
        await watch.close()
        drain.cancel()
    return times


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.read(65536):
        pass


def row(name: str, times: list[float]) -> str:
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return f"{name:<58}{cuts[49]:>9.2f}{cuts[98]:>9.2f}{len(times):>7}"


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=200, help="pause and resume pairs (default 200)")
    parser.add_argument("--engine", choices=["vllm", "sim"], default="vllm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = await EmbeddedServer.start(port=0, data_dir=folder)
        try:
            model = folder / "model"
            if options.engine == "vllm":
                print("writing the tiny model", file=sys.stderr)
                write_tiny_model(model, 0)
            print("bare NATS requests", file=sys.stderr)
            echo = await bare_request(server.url, options.pairs)
            print("one instance: loading, then pairs of pause and resume", file=sys.stderr)
            ours = await instance(server.url, str(model), options.engine, options.pairs, folder)
            bare: tuple[list[float], list[float]] | None = None
            if options.engine == "vllm":
                print("bare pause_generation calls: loading, then pairs", file=sys.stderr)
                bare = await bare_pause(model, options.pairs, folder)
        finally:
            await server.stop()
    print(f"{'milliseconds':<58}{'p50':>9}{'p99':>9}{'n':>7}")
    print(row("pause: command sent -> Watch sees NOT_SERVING", ours["seen"]))
    print(row("pause: command sent -> reply", ours["pause"]))
    print(row("resume: command sent -> Watch sees SERVING", ours["back"]))
    print(row("resume: command sent -> reply", ours["resume"]))
    print(row("bare NATS request -> reply of another process", echo))
    if bare:
        print(row("bare AsyncLLM.pause_generation(mode='keep')", bare[0]))
        print(row("bare AsyncLLM.resume_generation()", bare[1]))


if __name__ == "__main__":
    asyncio.run(main())
