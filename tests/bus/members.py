"""Instances that are only their answers: enough of one to drive a fleet of hundreds."""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from bus import subjects
from bus.codec import Format, decode_command, encode
from bus.connection import Bus, Message, NotConnected
from bus.discovery import ensure_buckets
from bus.messages import (
    Command,
    ErrorBody,
    ErrorCode,
    JsonMap,
    Paused,
    Reply,
    Snapshot,
    Verb,
    Weights,
    WeightUpdate,
    parse_args,
)

_lives = itertools.count(1)


class Member:
    """One instance. It has no engine, and no rules beyond what a fleet must cope with.

    Attributes:
        fails: verb -> the code it is refused with; `engine_error` of a chunk taints the weights.
        loses: how many replies to a verb get lost; the command is carried out.
        deaf: verbs that do not reach it.
        slow: verbs that wait for `release`.
    """

    def __init__(self, bus: Bus, name: str) -> None:
        self.bus, self.name = bus, name
        self.incarnation = f"{next(_lives):026}"
        self.got: list[tuple[str, Command]] = []
        self.fails: dict[str, ErrorCode] = {}
        self.loses: Counter[str] = Counter()
        self.deaf: set[str] = set()
        self.slow: set[str] = set()
        self.release = asyncio.Event()
        self.stops: list[str] = []
        self.session: str | None = None
        self.phase: str | None = None
        self.version, self.chunks, self.seq = "default", 0, 0
        self.stopped = False
        self._remembered: dict[tuple[str, str | None], tuple[JsonMap, asyncio.Future[Reply]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._queue = asyncio.Lock()
        self._subscriptions: list[Any] = []

    async def start(self) -> "Member":
        for who in (self.name, subjects.ALL):
            pattern = subjects.control_pattern("default", "backend", who)
            self._subscriptions.append(await self.bus.subscribe(pattern, self._arrived))
        await self.show()
        return self

    async def end(self) -> None:
        """Leave in good order."""
        self.stopped = True
        await self.leave_the_bus()
        await self.show()

    async def leave_the_bus(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions.clear()

    async def show(self) -> None:
        self.seq += 1
        event = encode(self.snapshot(), Format.MSGPACK)
        await self.bus.publish(subjects.state("default", "backend", self.name), event)
        key = subjects.state_key("default", "backend", self.name)
        await self.bus.kv_put(subjects.STATES_BUCKET, key, encode(self.snapshot(), Format.JSON), 5)

    @property
    def state(self) -> str:
        if self.stopped:
            return "stopped"
        if self.phase is not None:
            return "weight_update"
        return "paused" if self.stops else "serving"

    def snapshot(self) -> Snapshot:
        update = (
            WeightUpdate(phase=self.phase, session=self.session, chunks=self.chunks) if self.phase else None
        )
        return Snapshot(
            namespace="default",
            component="backend",
            instance=self.name,
            incarnation=self.incarnation,
            seq=self.seq,
            time=time.time(),
            state=self.state,
            ready=self.state == "serving",
            live=True,
            settled=True,
            paused=Paused(mode="keep", by=list(self.stops)) if self.stops else None,
            weight_update=update,
            weights=Weights(version=self.version, good=self.phase is None),
        )

    def verbs(self, without: Sequence[str] = ()) -> list[str]:
        return [verb for verb, _ in self.got if verb not in without]

    # --- commands --------------------------------------------------------------------------------

    def _arrived(self, message: Message) -> None:
        verb = subjects.verb_of(message.subject)
        if verb in self.deaf:
            return
        task = asyncio.ensure_future(self._handle(verb, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, verb: str, message: Message) -> None:
        command, format = decode_command(message.data)
        parse_args(Verb(verb), command.args)
        self.got.append((verb, command))
        reply = await self._answer(verb, command)
        if self.loses[verb] > 0:
            self.loses[verb] -= 1
            return
        with contextlib.suppress(NotConnected):
            await self.bus.respond(message, encode(reply, format))

    async def _answer(self, verb: str, command: Command) -> Reply:
        first = self._remembered.get((verb, command.id))
        if first is not None:
            if first[0] != command.args:
                return self._reply(command, code=ErrorCode.INVALID_ARGUMENT)
            return msgspec.structs.replace(await asyncio.shield(first[1]), duplicate=True)
        if command.deadline is not None and command.deadline < time.time():
            return self._reply(command, code=ErrorCode.DEADLINE_EXCEEDED)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._remembered[verb, command.id] = command.args, future
        async with self._queue:
            if verb in self.slow:
                await self.release.wait()
            future.set_result(self._carry_out(verb, command))
        return future.result()

    def _carry_out(self, verb: str, command: Command) -> Reply:
        code = self.fails.get(verb)
        if code is not None:
            if verb == "update_weights" and code is ErrorCode.ENGINE_ERROR:
                self.phase, self.session = "tainted", None
            return self._reply(command, code=code)
        if command.session is not None and command.session != self.session:
            return self._reply(command, code=ErrorCode.SESSION_MISMATCH)
        changed, result = True, {}
        match verb:
            case "pause":
                changed = "command" not in self.stops
                self.stops += ["command"] if changed else []
            case "resume":
                if self.phase is not None:
                    return self._reply(command, code=ErrorCode.WEIGHTS_NOT_READY)
                changed = bool(self.stops)
                self.stops.clear()
            case "start_weight_update":
                self.session, self.phase, self.chunks = f"{self.name}-s{len(self.got)}", "open", 0
                result = {"session": self.session}
            case "update_weights" | "finish_weight_update" | "abort_weight_update" if self.session is None:
                return self._reply(command, code=ErrorCode.INVALID_STATE)
            case "update_weights":
                self.phase, self.chunks = "loading", self.chunks + 1
            case "finish_weight_update":
                self.version, self.session, self.phase = command.args["weight_version"], None, None
            case "abort_weight_update":
                self.session, self.phase = None, "tainted" if self.phase == "loading" else None
            case _:
                changed = False
        return self._reply(command, changed=changed, result=result)

    def _reply(
        self, command: Command, changed: bool = False, code: ErrorCode | None = None, result: Any = None
    ) -> Reply:
        return Reply(
            id=command.id,
            instance=self.name,
            incarnation=self.incarnation,
            ok=code is None,
            changed=changed,
            error=ErrorBody(code=code, message="no", retryable=code.retryable) if code else None,
            result=result or {},
            state=self.snapshot(),
        )


async def start_members(buses: Sequence[Bus], names: Sequence[str]) -> dict[str, Member]:
    """Members that share these connections."""
    await ensure_buckets(buses[0])
    members = [Member(bus, name) for name, bus in zip(names, itertools.cycle(buses), strict=False)]
    await asyncio.gather(*(member.start() for member in members))
    return {member.name: member for member in members}
