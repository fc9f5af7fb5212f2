"""How long commands, updates and announcements take for a fleet of simulated instances.

    python -m benchmarks.fleet [--instances 500] [--rounds 5]

Starts `watchkeeper sim-fleet N` as a program and drives it with `bus.fleet.Fleet`; its engines take a
few milliseconds for each call. Beside it in the same run as many bare NATS responders, also with a
connection each and in one process, which answer at once and do nothing else. All times are
milliseconds on one clock, p50 and p99: of the single replies, and of all N together over the rounds.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.control_latency import process, row
from bus.announce import announce
from bus.client import Client
from bus.connection import Bus
from bus.discovery import Change, ChangeKind, Listener
from bus.embedded import EmbeddedServer
from bus.fleet import Fleet
from bus.messages import Announcement, Snapshot, UpdateInfo

RESPONDERS = """
import asyncio, sys
import uvloop
from bus.connection import Bus
url, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
async def responder(number, places):
    async with places:
        bus = await Bus.connect(url)
        replies = asyncio.Queue()
        await bus.subscribe("bench.all", replies.put_nowait)
        await bus.subscribe(f"bench.{number}", replies.put_nowait)
        await bus.flush(10.0)
    async def serve():
        while True:
            await bus.respond(await replies.get(), b"x" * size)
    return asyncio.create_task(serve())
async def main():
    places = asyncio.Semaphore(20)
    tasks = await asyncio.gather(*(responder(number, places) for number in range(count)))
    print("ready", flush=True)
    await asyncio.wait(tasks)
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""

START_LIMIT_S = 300
LIMIT_S = 120.0
COMMAND_BYTES, REPLY_BYTES = 200, 1000
"""Of a pause in msgpack and its reply, about."""


def step(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Stamped:
    """Lets a bus note when each of the answers to one message has come."""

    def __init__(self, bus: Bus) -> None:
        self.times_ms: list[float] = []
        self._scatter = bus.scatter
        bus.scatter = self.scatter  # type: ignore[method-assign, assignment]

    async def scatter(self, subject: str, data: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        started = time.perf_counter()
        async for answer in self._scatter(subject, data, timeout_s):
            self.times_ms.append((time.perf_counter() - started) * 1e3)
            yield answer


class Process:
    """What a process costs, from /proc."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")

    def cpu_s(self) -> float:
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        lines = (self._folder / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    async def idle_share(self, seconds: float) -> float:
        """Of one core, while nobody asks anything of it."""
        before, started = self.cpu_s(), time.perf_counter()
        await asyncio.sleep(seconds)
        return (self.cpu_s() - before) / (time.perf_counter() - started)


async def bare(url: str, count: int, rounds: int) -> dict[str, list[float]]:
    """One message to all, and a message to each, with nothing behind them."""
    times: dict[str, list[float]] = {"reply": [], "all": [], "each": []}
    command = sys.executable, "-c", RESPONDERS, url, str(count), str(REPLY_BYTES)
    async with process(*command) as responders, await Bus.connect(url) as bus:
        assert responders.stdout is not None
        await asyncio.wait_for(responders.stdout.readline(), START_LIMIT_S)
        stamped, body = Stamped(bus), b"x" * COMMAND_BYTES
        for _ in range(2 * rounds):
            started, left = time.perf_counter(), count
            async for _ in bus.scatter("bench.all", body, LIMIT_S):
                left -= 1
                if not left:
                    break
            times["all"].append((time.perf_counter() - started) * 1e3)
            started = time.perf_counter()
            await asyncio.gather(*(bus.request(f"bench.{n}", body, LIMIT_S) for n in range(count)))
            times["each"].append((time.perf_counter() - started) * 1e3)
        times["reply"] = stamped.times_ms
    return times


class Ready:
    """When each instance was ready with a version."""

    def __init__(self, count: int, version: str) -> None:
        self.at: dict[str, float] = {}
        self._count, self._version = count, version
        self.all = asyncio.Event()

    def see(self, state: Snapshot) -> None:
        if state.ready and state.weights.version == self._version:
            self.at.setdefault(state.instance, time.perf_counter())
            if len(self.at) == self._count:
                self.all.set()

    def changed(self, change: Change) -> None:
        if change.kind is ChangeKind.STATE and change.snapshot is not None:
            self.see(change.snapshot)

    async def wait(self) -> None:
        """
        Raises:
            TimeoutError
        """
        try:
            await asyncio.wait_for(self.all.wait(), START_LIMIT_S)
        except TimeoutError:
            text = f"{len(self.at)} of {self._count} instances were ready with {self._version!r}"
            raise TimeoutError(f"{text} within {START_LIMIT_S} s") from None


@contextlib.asynccontextmanager
async def sim_fleet(url: str, count: int, folder: Path) -> AsyncIterator[Process]:
    """The program. If it ends by itself so does the block, with its last words."""
    command = [sys.executable, "-m", "service", "sim-fleet", str(count), "--nats", url]
    command += ["--grpc-address", "127.0.0.1:0", "--grace-period-s", "0"]
    output = folder / "sim-fleet.log"
    with output.open("wb") as file:
        program = await asyncio.create_subprocess_exec(*command, stdout=file, stderr=file)
    ours, ending = asyncio.current_task(), False

    async def watch() -> None:
        await program.wait()
        if not ending and ours is not None:
            ours.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield Process(program.pid)
    except asyncio.CancelledError:
        if program.returncode is None:
            raise
        last = "\n".join(output.read_text(errors="replace").splitlines()[-5:])
        raise SystemExit(f"sim-fleet ended, exit code {program.returncode}:\n{last}") from None
    finally:
        ending = True
        if program.returncode is None:
            program.terminate()
        await watching


async def fleet(url: str, count: int, rounds: int, folder: Path) -> tuple[dict[str, list[float]], list[str]]:
    names = ("reply", "pause", "resume", "begin", "load", "end", "update", "followed", "announced")
    times: dict[str, list[float]] = {name: [] for name in names}
    told: list[str] = []
    step(f"{count} instances: starting")
    started = time.perf_counter()
    async with Client.connect(url, issuer="benchmark") as client, sim_fleet(url, count, folder) as program:
        ready = Ready(count, "default")
        async with Listener(client.bus, client.namespace, client.component, ready.changed):
            await ready.wait()
        took_s = time.perf_counter() - started
        told.append(f"{count} instances known and ready {took_s:.1f} s after the start")
        told.append(f"their process: {program.cpu_s():.1f} s of CPU until then, {program.memory_mb():.0f} MB")
        step("idle")
        await asyncio.sleep(3)
        told.append(f"idle: {100 * await program.idle_share(10):.0f} % of a core")
        await client.new_epoch()
        await commands(client, count, rounds, times)
        await updates(client, rounds, times)
        await announcements(client, count, rounds, times)
        told.append(f"afterwards: {program.cpu_s():.1f} s of CPU in all, {program.memory_mb():.0f} MB")
    return times, told


async def commands(client: Client, count: int, rounds: int, times: dict[str, list[float]]) -> None:
    stamped = Stamped(client.bus)
    async with Fleet(client) as fleet:
        for number in range(rounds):
            step(f"pause and resume, round {number + 1} of {rounds}")
            for verb in ("pause", "resume"):
                began = time.perf_counter()
                outcome = await fleet.send(verb, {"mode": "keep"} if verb == "pause" else {})
                times[verb].append((time.perf_counter() - began) * 1e3)
                if not outcome.ok or len(outcome.done) != count:
                    why = dict(Counter([*outcome.no_answer.values(), *outcome.codes.values()]))
                    raise SystemExit(f"{verb}: {len(outcome.done)} of {count} done: {why}")
    times["reply"] = stamped.times_ms


async def updates(client: Client, rounds: int, times: dict[str, list[float]]) -> None:
    async with Fleet(client) as fleet:
        for number in range(rounds):
            step(f"update, round {number + 1} of {rounds}")
            began = time.perf_counter()
            async with fleet.update(f"v{number}") as update:
                opened = time.perf_counter()
                await update.load({"chunk": number})
                loaded = time.perf_counter()
            ended = time.perf_counter()
            for name, seconds in (
                ("begin", opened - began),
                ("load", loaded - opened),
                ("end", ended - loaded),
                ("update", ended - began),
            ):
                times[name].append(seconds * 1e3)


async def announcements(client: Client, count: int, rounds: int, times: dict[str, list[float]]) -> None:
    for number in range(rounds):
        step(f"announcement, round {number + 1} of {rounds}")
        version, ready = f"announced-{number}", Ready(count, f"announced-{number}")
        async with Listener(client.bus, client.namespace, client.component, ready.changed):
            began = time.perf_counter()
            assert client.epoch is not None
            chunks: list[UpdateInfo] = [{"chunk": number}]
            news = Announcement(id=version, epoch=client.epoch, version=version, updates=chunks)
            await announce(client.bus, client.namespace, client.component, news)
            await ready.wait()
        times["followed"] += [(at - began) * 1e3 for at in ready.at.values()]
        times["announced"].append((max(ready.at.values()) - began) * 1e3)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=500, help="how many (default 500)")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement, at least 2 (default 5)")
    options = parser.parse_args()
    if options.instances < 1 or options.rounds < 2:
        parser.error("--instances must be at least 1 and --rounds at least 2")
    count, rounds = options.instances, options.rounds
    with tempfile.TemporaryDirectory() as name:
        server = await EmbeddedServer.start(port=0, data_dir=Path(name))
        try:
            ours, told = await fleet(server.url, count, rounds, Path(name))
            step(f"{count} bare responders")
            echo = await bare(server.url, count, rounds)
        finally:
            await server.stop()
    print("\n".join(told))
    print(f"\n{'milliseconds':<58}{'p50':>9}{'p99':>9}{'n':>7}")
    print(row("pause, resume: one message to all -> one reply", ours["reply"]))
    print(row(f"pause: all {count} replies", ours["pause"]))
    print(row(f"resume: all {count} replies", ours["resume"]))
    print(row("bare: one message to all -> one reply", echo["reply"]))
    print(row(f"bare: all {count} replies", echo["all"]))
    print(row("update(): all paused, their sessions open", ours["begin"]))
    print(row("update(): a chunk loaded by all", ours["load"]))
    print(row("update(): all finished and resumed", ours["end"]))
    print(row("update(): the whole, 5 messages to each", ours["update"]))
    print(row(f"bare: a message to each, all {count} replies", echo["each"]))
    print(row("announcement -> an instance is ready with it", ours["followed"]))
    print(row(f"announcement -> all {count} are", ours["announced"]))


if __name__ == "__main__":
    asyncio.run(main())
