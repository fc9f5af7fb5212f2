"""What the router costs: requests per second, latency and CPU, beside direct calls and beside vllm-router.

    python -m benchmarks.router_throughput [--seconds 5] [--rounds 3] [--only compare|fleet]

Four mock engines in processes of their own need 5 ms for a prompt and 2 ms for each of 8 tokens. They are
asked directly (in one hop, and in the two of prefill and decode), through our router, and through vllm-router
from PyPI, in one run and in an order that is reversed each round. Then the router's choice is measured with
10 and with 1,000 instances registered in discovery. Exit code 1: something wanted was missed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import uvloop

from benchmarks.closed_loop import Ask, Connection, Measured, measure, request_of
from benchmarks.routed import tell
from bus import discovery, subjects
from bus.connection import Bus
from bus.messages import InstanceEntry, Transport
from service.router.breaker import Outcome
from service.router.orders import for_prefill
from service.router.pool import Group, Member, Pool, Role
from tests.broker import NatsServer, eventually

ROOT = Path(__file__).parents[1]
BENCH = ROOT / ".venv" / "bench"
"""Where `make bench` puts vllm-router, out of the way of everything else."""
TOKENS = 8
PROMPT = "word " * 80
MANY, FEW = 64, 8
LEAST_SHARE, MOST_MS, MOST_TIMES = 0.75, 1.5, 2.0
FLEETS = (10, 1000)
RENEW_AT_ONCE = 50
START_S = 60.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """What a process has used so far, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@contextlib.asynccontextmanager
async def process(
    *argv: str, log: Path | None = None, path: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Killed at the end of the block.

    Args:
        log: gets what it writes; otherwise its output is to be read.
        path: where Python looks for modules, besides.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WATCHKEEPER_")}
    if path is not None:
        environ["PYTHONPATH"] = str(path)
    with contextlib.ExitStack() as stack:
        out = asyncio.subprocess.PIPE if log is None else stack.enter_context(log.open("wb"))
        child = await asyncio.create_subprocess_exec(
            *argv, stdout=out, stderr=asyncio.subprocess.STDOUT if log else None, cwd=ROOT, env=environ
        )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


@contextlib.asynccontextmanager
async def mock_engine() -> AsyncIterator[int]:
    """Its port."""
    async with process(sys.executable, "-m", "benchmarks.mock_engine") as child:
        assert child.stdout is not None
        yield json.loads(await child.stdout.readline())["port"]


@dataclass
class Target:
    """Something that answers.

    Attributes:
        pids: of the processes between client and engines.
        direct: the name of what it is compared with.
    """

    name: str
    connect: Callable[[int, bool], "AsyncAsk"]
    direct: str | None = None
    pids: tuple[int, ...] = ()
    rounds: dict[int, list[Measured]] = field(default_factory=dict)
    cpu_ms: dict[int, list[float]] = field(default_factory=dict)


AsyncAsk = contextlib.AbstractAsyncContextManager[Ask]


def body(stream: bool) -> dict[str, object]:
    return {"model": "m", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": stream}


def one_hop(ports: Sequence[int]) -> Callable[[int, bool], AsyncAsk]:
    """Clients that ask one server each."""

    @contextlib.asynccontextmanager
    async def connect(number: int, stream: bool) -> AsyncIterator[Ask]:
        port = ports[number % len(ports)]
        connection, request = await Connection.to(port), request_of(port, body(stream))
        try:
            yield lambda: connection.ask(request)
        finally:
            connection.close()

    return connect


def two_hops(prefills: Sequence[int], decodes: Sequence[int]) -> Callable[[int, bool], AsyncAsk]:
    """Clients that do themselves what a router for prefill and decode does."""

    @contextlib.asynccontextmanager
    async def connect(number: int, stream: bool) -> AsyncIterator[Ask]:
        prefill_port = prefills[number % len(prefills)]
        decode_port = decodes[number // len(prefills) % len(decodes)]
        prefill, decode = await Connection.to(prefill_port), await Connection.to(decode_port)

        async def ask() -> bytes:
            name = f"{number}-{time.monotonic_ns()}"
            first = await prefill.ask(request_of(prefill_port, for_prefill(body(stream)), name))
            kv = msgspec.json.decode(first.partition(b"\r\n\r\n")[2])["kv_transfer_params"]
            return await decode.ask(request_of(decode_port, {**body(stream), "kv_transfer_params": kv}, name))

        try:
            yield ask
        finally:
            prefill.close()
            decode.close()

    return connect


def good(stream: bool) -> Callable[[bytes], bool]:
    last = b"t%d" % (TOKENS - 1)

    def check(answer: bytes) -> bool:
        whole = answer.startswith(b"HTTP/1.1 200") and last in answer
        return whole and (not stream or b"[DONE]" in answer)

    return check


async def one_round(target: Target, connections: int, stream: bool, seconds: float) -> None:
    async with contextlib.AsyncExitStack() as stack:
        asks = [
            await stack.enter_async_context(target.connect(number, stream)) for number in range(connections)
        ]
        await measure(asks, min(1.0, seconds / 4), good(stream))  # warm
        before_s = sum(map(cpu_s, target.pids))
        measured = await measure(asks, seconds, good(stream))
        used_s = sum(map(cpu_s, target.pids)) - before_s
    target.rounds.setdefault(connections, []).append(measured)
    target.cpu_ms.setdefault(connections, []).append(1000 * used_s / len(measured.took_s))


# What is measured


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def answers(port: int) -> bool:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(5):
            connection = await Connection.to(port)
            answer = await connection.ask(request_of(port, body(False)))
            connection.close()
            return good(False)(answer)
    return False


@contextlib.asynccontextmanager
async def our_router(folder: Path, name: str, nats: str, *options: str) -> AsyncIterator[tuple[int, int]]:
    """Its port and process id."""
    ready, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, "-m", "service", "router", "--http-address", "127.0.0.1:0", "--nats", nats]
    async with process(*command, "--ready-file", str(ready), *options, log=log) as child:
        await eventually(lambda: ready.exists() or child.returncode is not None, within_s=START_S)
        if not ready.exists():
            raise RuntimeError(f"the router did not start: {log.read_text()}")
        port = int(json.loads(ready.read_text())["http"].rpartition(":")[2])
        yield port, child.pid


@contextlib.asynccontextmanager
async def vllm_router(folder: Path, name: str, *options: str) -> AsyncIterator[tuple[int, int]]:
    """Its port and process id."""
    port, log = free_port(), folder / f"{name}.log"
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--policy", "round_robin", "--log-level", "warning"]
    async with process(*command, *options, log=log, path=BENCH) as child:
        try:
            await eventually(lambda: child.returncode is not None or answers(port), within_s=START_S)
        except AssertionError:
            raise RuntimeError(f"vllm-router did not start: {log.read_text()[-2000:]}") from None
        if child.returncode is not None:
            raise RuntimeError(f"vllm-router ended: {log.read_text()[-2000:]}")
        yield port, child.pid


@contextlib.asynccontextmanager
async def all_targets(folder: Path, nats: str, ports: Sequence[int]) -> AsyncIterator[list[Target]]:
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    aggregated = [word for url in urls for word in ("--static", f"aggregated={url}")]
    pair = [word for url in urls[:2] for word in ("--static", f"prefill={url}")]
    pair += [word for url in urls[2:] for word in ("--static", f"decode={url}")]
    pair_of_vllm = [word for url in urls[:2] for word in ("--prefill", url)]
    pair_of_vllm += [word for url in urls[2:] for word in ("--decode", url)]
    targets = [
        Target("direct", one_hop(ports)),
        Target("direct, two hops", two_hops(ports[:2], ports[2:])),
    ]
    async with contextlib.AsyncExitStack() as stack:

        async def ours(name: str, direct: str, *options: str) -> None:
            made = our_router(folder, name.replace(" ", "-"), nats, *options)
            port, pid = await stack.enter_async_context(made)
            await eventually(lambda: answers(port), within_s=START_S)
            targets.append(Target(name, one_hop([port]), direct, (pid,)))

        async def theirs(name: str, direct: str, *options: str) -> None:
            made = vllm_router(folder, name.replace(" ", "-"), *options)
            port, pid = await stack.enter_async_context(made)
            targets.append(Target(name, one_hop([port]), direct, (pid,)))

        await ours("watchkeeper", "direct", *aggregated)
        await ours("watchkeeper, no access log", "direct", *aggregated, "--no-access-log")
        await ours("watchkeeper pd", "direct, two hops", "--policy", "pd", *pair)
        if (BENCH / "vllm_router").exists():
            await theirs("vllm-router", "direct", "--worker-urls", *urls)
            await theirs("vllm-router pd", "direct, two hops", "--vllm-pd-disaggregation", *pair_of_vllm)
        else:
            tell("vllm-router is not installed: `make bench` does that")
        yield targets


async def compare(targets: list[Target], rounds: int, seconds: float) -> None:
    for number in range(rounds):
        for target in targets if number % 2 == 0 else targets[::-1]:
            tell(f"round {number + 1} of {rounds}: {target.name}")
            await one_round(target, MANY, False, seconds)
            await one_round(target, FEW, True, seconds)


def table(targets: list[Target], connections: int) -> list[str]:
    how = "streamed" if connections == FEW else "not streamed"
    lines = [
        f"{f'{connections} connections, {how}':<30}{'req/s':>7}{'[min-max]':>14}{'of direct':>11}"
        f"{'p50 ms':>8}{'+ms':>7}{'p99 ms':>8}{'CPU ms/req':>12}"
    ]
    for target in targets:
        rounds = target.rounds[connections]
        speeds = [one.per_second for one in rounds]
        share, more = versus(targets, target, connections)
        cpu = f"{statistics.median(target.cpu_ms[connections]):.2f}" if target.pids else "-"
        spread = f"[{min(speeds):.0f}-{max(speeds):.0f}]"
        p50, p99 = median_ms(target, connections, 50), median_ms(target, connections, 99)
        lines.append(
            f"{target.name:<30}{statistics.median(speeds):>7.0f}{spread:>14}{share:>11.2f}"
            f"{p50:>8.1f}{more:>7.1f}{p99:>8.1f}{cpu:>12}"
        )
    return lines


def median_ms(target: Target, connections: int, percent: int) -> float:
    return statistics.median(one.quantile_ms(percent) for one in target.rounds[connections])


def versus(targets: list[Target], target: Target, connections: int) -> tuple[float, float]:
    """Its share of the direct requests per second, and how much longer its median is; each by round."""
    direct = next(one for one in targets if one.name == (target.direct or target.name))
    pairs = list(zip(target.rounds[connections], direct.rounds[connections], strict=True))
    share = statistics.median(one.per_second / other.per_second for one, other in pairs)
    more = statistics.median(one.quantile_ms(50) - other.quantile_ms(50) for one, other in pairs)
    return share, more


# Many instances


async def registered(nats: str, count: int, ports: Sequence[int]) -> None:
    """Hold that many instances in discovery, until cancelled. They are all the same few engines."""
    async with await Bus.connect(nats) as bus:
        await discovery.ensure_buckets(bus)
        entries = {}
        for number in range(count):
            name = f"sim-{number}"
            entry = InstanceEntry(
                namespace="default",
                component="backend",
                endpoint=subjects.ENDPOINT,
                instance=name,
                incarnation="01" * 13,
                model="m",
                transport=Transport(http=f"127.0.0.1:{ports[number % len(ports)]}"),
            )
            key = subjects.instance_key("default", "backend", subjects.ENDPOINT, name)
            entries[key] = msgspec.json.encode(entry)
        while True:
            begin_s = time.monotonic()
            pairs = list(entries.items())
            for at in range(0, count, RENEW_AT_ONCE):
                some = pairs[at : at + RENEW_AT_ONCE]
                puts = (bus.kv_put(subjects.INSTANCES_BUCKET, key, value, 10.0) for key, value in some)
                await asyncio.gather(*puts)
                await asyncio.sleep(discovery.RENEW_S * len(some) / count * 0.8)
            await asyncio.sleep(begin_s + discovery.RENEW_S - time.monotonic())


@dataclass
class FleetOf:
    """A router that knows so many instances.

    Attributes:
        idle_cpu: what it uses without requests: probes, and news from the instances; 1 is a core.
    """

    count: int
    target: Target
    idle_cpu: float


async def with_instances(
    folder: Path, nats: str, ports: Sequence[int], count: int, seconds: float
) -> FleetOf:
    writer = [sys.executable, "-m", "benchmarks.router_throughput", "--register", str(count), "--nats", nats]
    for port in ports:
        writer += ["--engine", str(port)]
    async with (
        process(*writer, log=folder / f"register-{count}.log"),
        our_router(folder, f"fleet-{count}", nats) as (port, pid),
    ):
        connection = await Connection.to(port)

        async def all_known() -> bool:
            state = await connection.ask(f"GET /state HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            pools = msgspec.json.decode(state.partition(b"\r\n\r\n")[2])["pools"]
            return bool(pools.get("aggregated", {}).get("admissible", 0) >= count)

        await eventually(all_known, within_s=START_S, every_s=0.2)
        await asyncio.sleep(2.0)
        before_s = cpu_s(pid)
        await asyncio.sleep(6.0)
        idle_cpu = (cpu_s(pid) - before_s) / 6.0
        target = Target(f"{count} instances", one_hop([port]), None, (pid,))
        for _ in range(2):
            await one_round(target, MANY, False, seconds)
            await one_round(target, FEW, True, seconds)
        connection.close()
        return FleetOf(count, target, idle_cpu)


def pick_us(count: int, in_flight: int = MANY, times: int = 20_000) -> float:
    """A pick, and what follows until the request has ended, with some requests in flight."""
    pool = Pool(Role.AGGREGATED)
    group = Group(frozenset({"m"}), "default")
    for number in range(count):
        pool.add(Member(f"sim-{number}", Role.AGGREGATED, f"http://10.0.0.1:{number}", group, "01"))
    bookings = []
    took = []
    for number in range(times):
        begin_s = time.perf_counter()
        booking = pool.pick(100 + number % 7)
        assert booking is not None
        booking.answering()
        took.append(time.perf_counter() - begin_s)
        bookings.append(booking)
        if len(bookings) > in_flight:
            ended = bookings.pop(number % in_flight)
            begin_s = time.perf_counter()
            ended.report(Outcome.GOOD)
            ended.release()
            took[-1] += time.perf_counter() - begin_s
    return 1e6 * statistics.mean(took)


async def many_instances(folder: Path, nats: str, ports: Sequence[int], seconds: float) -> list[FleetOf]:
    fleets = []
    for count in FLEETS:
        tell(f"{count} instances in discovery")
        fleets.append(await with_instances(folder, nats, ports, count, seconds))
    return fleets


def fleet_table(fleets: Sequence[FleetOf], picks: Sequence[float]) -> list[str]:
    lines = [
        f"{'instances in discovery':<30}{'pick us':>9}{'64 conns: req/s':>17}{'CPU ms/req':>12}"
        f"{'8 conns: p50 ms':>17}{'CPU ms/req':>12}{'idle CPU':>10}"
    ]
    for fleet, pick in zip(fleets, picks, strict=True):
        target = fleet.target
        speed = statistics.median(one.per_second for one in target.rounds[MANY])
        lines.append(
            f"{fleet.count:<30}{pick:>9.1f}{speed:>17.0f}{cpu_ms(fleet, MANY):>12.2f}"
            f"{median_ms(target, FEW, 50):>17.1f}{cpu_ms(fleet, FEW):>12.2f}{100 * fleet.idle_cpu:>9.0f}%"
        )
    return lines


def cpu_ms(fleet: FleetOf, connections: int) -> float:
    """Of a request, without what the router does anyhow."""
    target = fleet.target
    pairs = zip(target.cpu_ms[connections], target.rounds[connections], strict=True)
    return statistics.median(cpu - 1000 * fleet.idle_cpu / one.per_second for cpu, one in pairs)


# Together


@dataclass(frozen=True)
class Wanted:
    what: str
    measured: float
    limit: float
    most: bool = True

    @property
    def met(self) -> bool:
        return self.measured <= self.limit if self.most else self.measured >= self.limit

    def line(self) -> str:
        told = f"{'at most' if self.most else 'at least'} {self.limit:g}"
        return f"{self.what:<70}{self.measured:>8.2f}  {told}{'' if self.met else '   <- MISSED'}"


async def main(options: argparse.Namespace) -> int:
    wanted: list[Wanted] = []
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="router-throughput-")))
        broker = await NatsServer(folder).start()
        stack.push_async_callback(broker.stop)
        ports = [await stack.enter_async_context(mock_engine()) for _ in range(4)]
        if "compare" in options.only:
            async with all_targets(folder, broker.url, ports) as targets:
                await compare(targets, options.rounds, options.seconds)
            for connections in (MANY, FEW):
                print("\n".join(table(targets, connections)), end="\n\n")
            for target in targets:
                if not target.name.startswith("watchkeeper"):
                    continue
                share, _ = versus(targets, target, MANY)
                _, more = versus(targets, target, FEW)
                wanted.append(Wanted(f"{target.name}, {MANY}: share of direct", share, LEAST_SHARE, False))
                wanted.append(Wanted(f"{target.name}, {FEW}, streamed: ms more than direct", more, MOST_MS))
        if "fleet" in options.only:
            picks = [pick_us(count) for count in FLEETS]
            fleets = await many_instances(folder, broker.url, ports, options.seconds)
            print("\n".join(fleet_table(fleets, picks)), end="\n\n")
            few, many = fleets
            what = "1,000 instances against 10"
            wanted.append(Wanted(f"{what}: time of a pick", picks[1] / picks[0], MOST_TIMES))
            for connections in (MANY, FEW):
                ratio = cpu_ms(many, connections) / cpu_ms(few, connections)
                wanted.append(
                    Wanted(f"{what}: CPU per request, {connections} connections", ratio, MOST_TIMES)
                )
    print(f"{'wanted':<70}{'measured':>8}")
    for one in wanted:
        print(one.line())
    return 0 if all(one.met for one in wanted) else 1


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router_throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=5, help="of each measurement (%(default)g)")
    parser.add_argument("--rounds", type=int, default=3, help="of all targets (%(default)d)")
    parser.add_argument(
        "--only",
        choices=["compare", "fleet"],
        nargs="+",
        default=["compare", "fleet"],
        help="beside direct calls and vllm-router, or with 10 and 1,000 instances",
    )
    # For the process that holds entries in discovery.
    parser.add_argument("--register", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--nats", help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=int, action="append", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    given = parsed()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if given.register is not None:
            runner.run(registered(given.nats, given.register, given.engine))
        else:
            sys.exit(runner.run(main(given)))
