"""A broker, simulated instances and a router before them, each in processes of their own."""

import asyncio
import contextlib
import json
import re
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import aiohttp

from bus import subjects
from bus.client import Client
from bus.codec import BadMessage, decode_snapshot
from bus.connection import Message
from bus.messages import Reply, Snapshot
from tests.broker import NatsServer, eventually
from tests.program import Program

Policy = Literal["aggregated", "pd"]
ROLES: dict[str, tuple[str, ...]] = {
    "aggregated": ("aggregated",) * 4,
    "pd": ("prefill", "prefill", "decode", "decode"),
}
LIMIT_S = 60.0
"""A guard against hangs, also on a machine that has much else to do."""


def tell(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


class Simulated:
    """One `watchkeeper serve --engine sim`, which may be killed and started again under its name."""

    def __init__(self, fleet: "Fleet", name: str, role: str, engine_args: tuple[str, ...]) -> None:
        self.name, self.role, self.engine_args = name, role, engine_args
        self.ready: dict[str, str] = {}
        self._fleet = fleet
        self._program: Program | None = None

    @property
    def http(self) -> str:
        return f"http://{self.ready['http']}"

    @property
    def running(self) -> bool:
        return self._program is not None and self._program.exit_code is None

    async def start(self, *engine_args: str) -> None:
        """Start it, and return once it serves.

        Args:
            engine_args: beside those of the fleet, this time.
        """
        file = self._fleet.folder / f"{self.name}.json"
        file.unlink(missing_ok=True)  # one that was killed leaves it
        arguments = [
            "serve",
            "m",
            "--engine",
            "sim",
            "--nats",
            self._fleet.broker.url,
            "--instance",
            self.name,
        ]
        for address in ("--grpc-address", "--http-address", "--admin-address"):
            arguments += [address, "127.0.0.1:0"]
        arguments += ["--role", self.role, "--ready-file", str(file), "--grace-period-s", "0.2"]
        arguments += [*self._fleet.serve_args, "--", *self.engine_args, *engine_args]
        program = self._program = await Program.start(self._fleet.folder, *arguments)
        await eventually(lambda: file.exists() or program.exit_code is not None, within_s=LIMIT_S)
        if not file.exists():
            raise RuntimeError(f"{self.name} did not start: {program.last_words()}")
        self.ready = json.loads(file.read_text())
        incarnation = self.ready["incarnation"]
        await eventually(lambda: self._fleet.served_s(self.name, incarnation) is not None, within_s=LIMIT_S)

    async def warm_up(self) -> None:
        """The first answers take longer: what makes them is imported then."""
        for stream in (False, True):
            body = {"prompt": "p", "max_tokens": 2, "stream": stream}
            async with self._fleet.http.post(f"{self.http}/v1/completions", json=body) as response:
                await response.read()

    async def kill(self) -> None:
        """SIGKILL to the control process and the engine's."""
        if self._program is not None:
            await self._program.kill()
            self._program = None

    async def ended(self, within_s: float) -> None:
        """Wait until it has ended by itself."""
        if self._program is not None:
            await self._program.end(within_s)
            await self._program.kill()
            self._program = None

    async def send(self, verb: str, **args: Any) -> Reply:
        return await self._fleet.client.instance(self.name).send(verb, args)

    async def kv(self) -> dict[str, int]:
        """What becomes of KV caches, and `in_flight`, as its engine counts."""
        async with self._fleet.http.get(f"{self.http}/sim/kv") as response:
            counts: dict[str, int] = await response.json()
            return counts


class Router:
    """One `watchkeeper router`.

    Attributes:
        changes: of instances from in use to not, or back: when (monotonic), who, and why not.
    """

    def __init__(self, program: Program, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.changes: list[tuple[float, str, str | None]] = []
        self._program, self._http = program, http

    @property
    def pid(self) -> int:
        return self._program.pid

    def last_words(self) -> str:
        return self._program.last_words()

    async def state(self) -> dict[str, Any]:
        async with self._http.get(f"{self.url}/state") as response:
            state: dict[str, Any] = await response.json()
            return state

    async def members(self) -> dict[str, dict[str, Any]]:
        """What `/state` says of each instance."""
        pools = (await self.state())["pools"].values()
        return {one["instance"]: one for pool in pools for one in pool["instances"]}

    async def metrics(self) -> dict[str, float]:
        """Samples by name and labels, as they stand in the text."""
        async with self._http.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name.removeprefix("watchkeeper_router_"): float(value) for name, _, value in pairs}

    async def bad_attempts(self) -> int:
        """Failures of instances that requests have met with."""
        metrics = await self.metrics()
        pattern = re.compile(r'attempts_total\{outcome="bad".*')
        return int(sum(value for name, value in metrics.items() if pattern.fullmatch(name)))

    async def until_used(self, *names: str) -> None:
        """Wait until these instances may be sent requests."""

        async def used() -> bool:
            members = await self.members()
            return all(name in members and members[name]["admissible"] for name in names)

        await eventually(used, within_s=LIMIT_S, every_s=0.05)

    async def follow(self, every_s: float = 0.05) -> None:
        """Fill `changes` until cancelled."""
        before: dict[str, bool] = {}
        while True:
            for name, one in (await self.members()).items():
                if before.setdefault(name, one["admissible"]) != one["admissible"]:
                    before[name] = one["admissible"]
                    self.changes.append((time.monotonic(), name, one["reason"]))
            await asyncio.sleep(every_s)


class Fleet:
    """The instances and their broker.

    Attributes:
        events: state events as they arrived, each with the monotonic time.
    """

    def __init__(self, folder: Path, broker: NatsServer, client: Client, http: aiohttp.ClientSession) -> None:
        self.folder, self.broker, self.client, self.http = folder, broker, client, http
        self.instances: list[Simulated] = []
        self.serve_args: tuple[str, ...] = ()
        self.events: list[tuple[float, Snapshot]] = []

    @property
    def policy(self) -> Policy:
        return "aggregated" if self.instances[0].role == "aggregated" else "pd"

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.instances]

    def served_s(self, name: str, incarnation: str | None = None, after_s: float = 0.0) -> float | None:
        """When the first event arrived that says that it serves.

        Args:
            incarnation: only one of this.
            after_s: only one that arrived later, on the monotonic clock.
        """
        for at_s, event in self.events:
            serves = event.instance == name and event.ready and at_s > after_s
            if serves and incarnation in (None, event.incarnation):
                return at_s
        return None

    async def whole(self) -> None:
        """Start those again that are not running; all have answered a request then."""
        await asyncio.gather(*(one.start() for one in self.instances if not one.running))
        await asyncio.gather(*(one.warm_up() for one in self.instances))

    @contextlib.asynccontextmanager
    async def router(self, *options: str, follow: bool = True) -> AsyncIterator[Router]:
        """A router that uses all of them.

        Args:
            follow: note in `changes` who is in use.
        """
        file = self.folder / f"router-{secrets.token_hex(4)}.json"
        arguments = ["--http-address", "127.0.0.1:0", "--nats", self.broker.url, "--policy", self.policy]
        arguments += ["--grace-period-s", "0", "--ready-file", str(file), *options]
        program = await Program.start(self.folder, "router", *arguments)
        following: asyncio.Task[None] | None = None
        try:
            await eventually(lambda: file.exists() or program.exit_code is not None, within_s=LIMIT_S)
            if not file.exists():
                raise RuntimeError(f"the router did not start: {program.last_words()}")
            router = Router(program, f"http://{json.loads(file.read_text())['http']}", self.http)
            await router.until_used(*self.names)
            if follow:
                following = asyncio.create_task(router.follow())
            yield router
            if program.exit_code is not None:
                raise RuntimeError(f"the router ended: {program.last_words()}")
        finally:
            if following is not None:
                following.cancel()
                await asyncio.wait({following})
            if program.exit_code is None:
                program.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(AssertionError):
                    await program.end(5.0)
            await program.kill()

    def _heard(self, message: Message) -> None:
        with contextlib.suppress(BadMessage):
            self.events.append((time.monotonic(), decode_snapshot(message.data)))


@contextlib.asynccontextmanager
async def a_fleet(
    folder: Path,
    policy: Policy,
    engine_args: tuple[str, ...] = (),
    serve_args: tuple[str, ...] = (),
    roles: tuple[str, ...] | None = None,
) -> AsyncIterator[Fleet]:
    """Instances that serve; everything that was started is killed in the end.

    Args:
        folder: for logs and the broker's data.
        roles: of the instances, instead of those usual for the policy.
    """
    roles = ROLES[policy] if roles is None else roles
    async with contextlib.AsyncExitStack() as stack:
        broker = await NatsServer(folder).start()
        stack.push_async_callback(broker.stop, signal.SIGKILL)
        client = await stack.enter_async_context(Client.connect(broker.url, issuer="drill"))
        http = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S))
        )
        fleet = Fleet(folder, broker, client, http)
        fleet.serve_args = serve_args
        await client.bus.subscribe(subjects.state_pattern("default", "backend"), fleet._heard)
        numbers: dict[str, int] = {}
        for role in roles:
            numbers[role] = numbers.get(role, 0) + 1
            fleet.instances.append(Simulated(fleet, f"{role}-{numbers[role]}", role, engine_args))
            stack.push_async_callback(fleet.instances[-1].kill)
        await fleet.whole()
        yield fleet


async def within(what: str, read: Callable[[], Any], within_s: float) -> Any | None:
    """As `eventually`, but None if it does not come, and that is told."""
    try:
        return await eventually(read, within_s=within_s)
    except AssertionError:
        tell(f"  not within {within_s:g} s: {what}")
        return None
