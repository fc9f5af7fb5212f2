"""Commands to many instances at once, and weight updates of all of them, without guessing.

    async with Client.connect(url, issuer="trainer") as client, Fleet(client) as fleet:
        await client.new_epoch()
        async with fleet.update("v2") as update:
            await update.load({"path": "/checkpoints/v2"})

Who is meant is fixed beforehand: the instances that live when the fleet is made, each in its present
incarnation. Every one of them ends up in `done`, `failed` or `no_answer`; nothing is ok for some.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Literal, TypeAlias

from bus import subjects
from bus.client import FINISH_TIMEOUT_S, TIMEOUT_S, UPDATE_TIMEOUT_S, Client, new_id
from bus.codec import BadMessage, decode_reply
from bus.connection import BusError, Interrupted, NoResponders, NotConnected, Timeout
from bus.discovery import Change, ChangeKind, Listener
from bus.messages import CacheRule, JsonMap, Mode, Reply, Snapshot, StateName, UpdateInfo, Verb

logger = logging.getLogger(__name__)

OnPartial: TypeAlias = Literal["hold", "resume_good", "abort"]

AGAIN_S = (2.0, 60.0)
"""A reply that does not come is asked for again after the first, and doubling at most after the second."""
AGAIN_PER_MEMBER_S = 0.02
"""Added to the first for each who is asked: a reply that is late because hundreds are on their way would
be asked for by hundreds more."""
NOBODY_S = 3.0
"""Nobody listens under the name for so long: not there. After an outage an instance needs a moment."""
BURST_BYTES = 8 * 1024 * 1024
"""Sent at most before the broker confirms: a large chunk for hundreds would overflow what is pending."""
SETTLE_S = 10.0
"""How long to find out what became of a command whose time is over."""
LEASE_S = 60.0

NO_ANSWER = "no_answer"


@dataclass(frozen=True)
class Outcome:
    """What became of one command at each member.

    Attributes:
        id: of the command, the same at each.
        expected: who was meant: incarnations by name. Each is in one of the next three.
        done: the replies of those who did it.
        failed: the replies of those who refused it or failed at it.
        no_answer: who did not answer, or is gone, and why; they may have done it.
        joined: incarnations that came since the membership was fixed. They are not meant, but a
            command to all reaches them: `others` has their replies.
        left: members that are gone, whatever they had answered. A restarted one left and joined.
    """

    verb: Verb
    id: str
    expected: Mapping[str, str]
    done: Mapping[str, Reply]
    failed: Mapping[str, Reply]
    no_answer: Mapping[str, str]
    joined: Mapping[str, str]
    left: Mapping[str, str]
    others: Mapping[str, Reply]

    @property
    def ok(self) -> bool:
        """Everybody who was meant did it. Never true of nobody."""
        return bool(self.done) and not self.failed and not self.no_answer

    @property
    def codes(self) -> dict[str, str]:
        """Why each of those who did not do it did not: the error code, or `no_answer`."""
        return {name: _code(reply) for name, reply in self.failed.items()} | dict.fromkeys(
            self.no_answer, NO_ANSWER
        )

    def __str__(self) -> str:
        parts = [f"{len(self.done)} of {len(self.expected)} done"]
        parts += [f"{name}: {code}" for name, code in sorted(self.codes.items())]
        return f"{self.verb.value}: {', '.join(parts)}"


class Fleet:
    """The instances of one component that lived when the block began.

    Attributes:
        members: incarnations by name. `drop` takes some out, `refresh` starts afresh.
        paused: incarnations, by name, that updates of this fleet have paused and not resumed.
    """

    def __init__(self, client: Client, names: Collection[str] | None = None) -> None:
        """`names`: only these, of those that live."""
        self.client = client
        self.members: dict[str, str] = {}
        self.paused: dict[str, str] = {}
        self._names = None if names is None else frozenset(names)
        self._known: dict[str, str] = {}
        self._listener = Listener(client.bus, client.namespace, client.component, self._changed)
        self._asks: dict[str, set[asyncio.Task[Reply]]] = {}
        self._sending = asyncio.Lock()
        self._unconfirmed = 0
        self._keepers: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Fleet":
        """
        Raises:
            BusError: who lives cannot be read.
        """
        await self._listener.__aenter__()
        self.refresh()
        return self

    async def __aexit__(self, *error: object) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await self._listener.__aexit__(*error)

    @property
    def states(self) -> Mapping[str, Snapshot]:
        """The last state of every instance of the component that is known to live, members or not."""
        return self._listener.states

    @property
    def joined(self) -> dict[str, str]:
        """Incarnations, by name, that came since the membership was fixed."""
        return {name: life for name, life in self._here().items() if self._known.get(name) != life}

    @property
    def left(self) -> dict[str, str]:
        """Members that are gone."""
        here = self._here()
        return {name: life for name, life in self.members.items() if here.get(name) != life}

    def refresh(self) -> None:
        """From now on the members are those who live now."""
        self._known = self._here()
        self.members = {
            name: life for name, life in self._known.items() if self._names is None or name in self._names
        }

    def drop(self, *names: str) -> None:
        """These are members no longer."""
        for name in names:
            self.members.pop(name, None)

    async def send(
        self,
        verb: Verb | str,
        args: Mapping[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
        id: str | None = None,
        epoch: int | None = None,
    ) -> Outcome:
        """Send one command to all members at once, and gather until each has answered or left.

        While the fleet is all there is, it is one message to the whole component: with 1000 instances
        three times as fast as one message each. It also reaches those who joined.

        Never raises for the bus: who could not be reached is in `no_answer`.
        """
        everybody = bool(self.members) and self._names is None and self.members == self._known
        asked = {name: _Asked(life, args or {}) for name, life in self.members.items()}
        return await self._gather(Verb(verb), asked, timeout_s, id or new_id(), epoch, everybody)

    async def send_each(
        self,
        verb: Verb | str,
        args: Mapping[str, Mapping[str, Any]],
        timeout_s: float = TIMEOUT_S,
        id: str | None = None,
        epoch: int | None = None,
    ) -> Outcome:
        """As `send`, with args of its own for each of these members, such as its rank in a group.

        Raises:
            ValueError: one of them is no member.
        """
        if strangers := sorted(args.keys() - self.members.keys()):
            raise ValueError(f"not members of the fleet: {', '.join(strangers)}")
        asked = {name: _Asked(self.members[name], each) for name, each in args.items()}
        return await self._gather(Verb(verb), asked, timeout_s, id or new_id(), epoch, False)

    @contextlib.asynccontextmanager
    async def update(
        self,
        version: str,
        on_partial: OnPartial = "hold",
        *,
        pause: bool = True,
        pause_mode: Mode = "keep",
        cache: CacheRule = "clear",
        allow_empty: bool = False,
        lease_s: float | None = LEASE_S,
        manifest: JsonMap | None = None,
        epoch: int | None = None,
        id: str | None = None,
        pause_timeout_s: float = TIMEOUT_S,
        start_timeout_s: float = 2 * TIMEOUT_S,
        load_timeout_s: float = UPDATE_TIMEOUT_S,
        finish_timeout_s: float = FINISH_TIMEOUT_S,
    ) -> AsyncIterator["FleetUpdate"]:
        """Bring all members to a version: pause, open sessions, the block, finish, resume.

        Before the block: a pause that only some accept is taken back from exactly those that this
        call paused. If not all sessions can be opened those that were are undone, and with `abort`
        resumed; with `resume_good` the block begins with the others.

        In the block an instance that fails is out of the update. With `abort` the update ends there:
        `load` raises, and all sessions are aborted. Else it goes on with the others; look at what
        `load` returns. At the end they are finished, and then, if any had failed, with `hold` stay
        paused, with `resume_good` are resumed, with `abort` (a finish failed) stay paused too. Those
        that failed stay paused in each case, so as not to serve old weights, and with `hold` keep a
        session that a finish left open. `PartialUpdate` is raised in each of these cases.

        What the block raises aborts all sessions, and resumes those whose weights are good.

        Args:
            pause: False for a fleet whose memory sleeps in part: it cannot be paused, and does not
                schedule.
            lease_s: of the pauses and sessions. They are renewed until the update has ended; those on
                hold until `resume`, or the end of the fleet's block. None leaves instances paused
                for ever if this process dies.
            start_timeout_s, load_timeout_s, finish_timeout_s: also how long the instances give the
                engine.
            id: a trainer that repeats an update under the same id, also after a crash, gets the
                first answers for what was done already.

        Raises:
            PartialUpdate: not all members have the version now; `update.parts` says what each has.
        """
        update = FleetUpdate(
            self,
            version,
            on_partial,
            {"mode": pause_mode, "lease_s": lease_s} if pause else None,
            {
                "pause_mode": pause_mode,
                "lease_s": lease_s,
                "manifest": manifest,
                "start_s": start_timeout_s,
                "chunk_s": load_timeout_s,
                "finish_s": finish_timeout_s,
            },
            {"weight_version": version, "cache": cache, "allow_empty": allow_empty},
            epoch,
            id or new_id(),
            _Limits(pause_timeout_s, start_timeout_s, load_timeout_s, finish_timeout_s),
        )
        keeper: asyncio.Task[None] | None = None
        if lease_s is not None:
            keeper = asyncio.create_task(update._keep(lease_s), name=f"leases of {update.id}")
            self._keepers.add(keeper)
            keeper.add_done_callback(self._keepers.discard)
        try:
            try:
                await update._prepare()
                yield update
                await update._commit()
            except PartialUpdate as failed:
                if failed.update is not update or not update._decided:
                    await _to_the_end(update._give_up())
                raise
            except BaseException:
                await _to_the_end(update._give_up())
                raise
        finally:
            if keeper is not None and not update.held:
                keeper.cancel()  # else it ends with the fleet's block, or when nobody is held

    # --- who is here -----------------------------------------------------------------------------

    def _here(self) -> dict[str, str]:
        return {
            name: state.incarnation
            for name, state in self._listener.states.items()
            if state.state != StateName.STOPPED
        }

    def _changed(self, change: Change) -> None:
        """Nobody waits for an answer of those who are gone."""
        state = change.snapshot
        if state is None or (change.kind is ChangeKind.STATE and state.state != StateName.STOPPED):
            return
        for ask in self._asks.pop(f"{change.instance} {state.incarnation}", ()):
            ask.cancel()

    # --- one command -----------------------------------------------------------------------------

    async def _gather(
        self,
        verb: Verb,
        asked: "Mapping[str, _Asked]",
        timeout_s: float,
        id: str,
        epoch: int | None,
        everybody: bool = False,
        late: bool = False,
    ) -> Outcome:
        """`late`: ask for the answer only; what has not been started is not started any more."""
        expected = {name: each.incarnation for name, each in asked.items()}
        end = time.monotonic() + timeout_s
        gathered = _Gathered()
        deadline = time.time() + (-1.0 if late else timeout_s)

        def body(each: _Asked) -> bytes:
            return self.client.body(id, each.args, deadline, epoch, each.session)

        if everybody:
            await self._ask_all(verb, expected, body(next(iter(asked.values()))), gathered, end)
        here = self._here()
        for name in expected.keys() - gathered.replies.keys() - gathered.silent.keys():
            if here.get(name) != expected[name]:
                gathered.silent[name] = _GONE
        missing = expected.keys() - gathered.replies.keys() - gathered.silent.keys()
        asks: dict[str, asyncio.Task[Reply]] = {}
        for name in missing:
            ask = asyncio.create_task(
                self._ask(verb, name, partial(body, asked[name]), _again_s(len(missing)), end)
            )
            ask.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, even if we left
            asks[name] = ask
            self._asks.setdefault(f"{name} {expected[name]}", set()).add(ask)
        try:
            if asks:
                await asyncio.wait(asks.values())
        finally:
            for name, ask in asks.items():
                ask.cancel()
                key = f"{name} {expected[name]}"
                self._asks.get(key, set()).discard(ask)
                if not self._asks.get(key):
                    self._asks.pop(key, None)
        for name, ask in asks.items():
            if ask.cancelled():
                gathered.silent[name] = _GONE
            elif isinstance(error := ask.exception(), _Silence):
                gathered.silent[name] = str(error)
            else:
                gathered.add(ask.result(), expected)
        done = {name: reply for name, reply in gathered.replies.items() if reply.ok}
        failed = {name: reply for name, reply in gathered.replies.items() if not reply.ok}
        left = {name: life for name, life in expected.items() if self._here().get(name) != life}
        return Outcome(verb, id, expected, done, failed, gathered.silent, self.joined, left, gathered.others)

    async def _ask_all(
        self, verb: Verb, expected: Mapping[str, str], body: bytes, gathered: "_Gathered", end: float
    ) -> None:
        """One message; returns when all have answered, or when it is time to ask each by itself."""
        wait_s = min(_again_s(len(expected)), end - time.monotonic())
        answers = self.client.bus.scatter(self.client.subject(subjects.ALL, verb), body, wait_s)
        with contextlib.suppress(BusError):  # each is asked by itself then
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    with contextlib.suppress(BadMessage):
                        gathered.add(decode_reply(answer), expected)
                    if expected.keys() <= gathered.replies.keys() | gathered.silent.keys():
                        return

    async def _ask(
        self, verb: Verb, name: str, body: Callable[[], bytes], wait_s: float, end: float
    ) -> Reply:
        """Ask one member until it answers; the repeats, the first after `wait_s`, bear the same id.

        Raises:
            _Silence
        """
        bus, subject = self.client.bus, self.client.subject(name, verb)
        longest_s = AGAIN_S[1]
        sent, nobody_since = False, None
        while (left_s := end - time.monotonic()) > 0:
            try:
                if not bus.connected:
                    async with asyncio.timeout(left_s):
                        await bus.wait_connected()
                data = body()  # not kept: hundreds of large ones would be too much
                await self._room(len(data), left_s)
                # What is answered while the connection is away is lost: ask again after it.
                answer = await bus.request(subject, data, min(wait_s, left_s), over_reconnect=False)
                return decode_reply(answer)
            except NoResponders:
                now = time.monotonic()
                nobody_since = nobody_since or max(now, bus.connected_since)
                if now - nobody_since > NOBODY_S:
                    raise _Silence(_sentence("no instance of this name listens", sent)) from None
                await asyncio.sleep(min(0.1, max(0.0, end - now)))
            except Timeout:
                sent, nobody_since = True, None
                wait_s = min(2 * wait_s, longest_s)
            except Interrupted:
                sent, nobody_since = True, None
            except NotConnected:
                if bus.closed:
                    raise _Silence(_sentence("the bus is closed", sent)) from None
                await asyncio.sleep(0.01)  # it is about to be known
            except TimeoutError:
                raise _Silence(_sentence("no broker", sent)) from None
            except (BusError, BadMessage) as error:
                raise _Silence(_sentence(str(error), sent)) from None
        raise _Silence(_sentence("no reply in time", sent))

    async def _room(self, size: int, timeout_s: float) -> None:
        """Return when the broker has taken enough of what was sent before."""
        async with self._sending:
            if self._unconfirmed and self._unconfirmed + size > BURST_BYTES:
                await self.client.bus.flush(timeout_s)
                self._unconfirmed = 0
            self._unconfirmed += size


def _again_s(members: int) -> float:
    return AGAIN_S[0] + members * AGAIN_PER_MEMBER_S


_GONE = "it ended without an answer"


class _Silence(Exception):
    """No answer; the text says why."""


def _sentence(reason: str, sent: bool) -> str:
    return f"{reason}; it may have been carried out" if sent else reason


@dataclass(frozen=True)
class _Asked:
    incarnation: str
    args: Mapping[str, Any]
    session: str | None = None


@dataclass
class _Gathered:
    """What has come so far, by name."""

    replies: dict[str, Reply] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    others: dict[str, Reply] = field(default_factory=dict)

    def add(self, reply: Reply, expected: Mapping[str, str]) -> None:
        name = reply.instance
        if expected.get(name) == reply.incarnation:
            self.replies[name] = reply
            return
        self.others[name] = reply
        if name in expected:
            self.silent[name] = f"it was restarted: {reply.incarnation} answers"


@dataclass(frozen=True)
class _Limits:
    pause_s: float
    start_s: float
    load_s: float
    finish_s: float


# --- a weight update -------------------------------------------------------------------------------


class End(StrEnum):
    """What became of an instance's session."""

    NONE = "none"
    """There was none."""
    OPEN = "open"
    COMMITTED = "committed"
    """It has the version."""
    UNDONE = "undone"
    """It has what it had before."""
    TAINTED = "tainted"
    """Its weights are not fit to serve until a session ends well."""
    UNKNOWN = "unknown"


@dataclass
class Part:
    """One member in an update.

    Attributes:
        session: its token, once one was opened.
        code: why it is out of the update: an error code, or `no_answer`; None while it is in.
        message: the same for a person.
        state: what it last said of itself.
    """

    instance: str
    incarnation: str
    session: str | None = None
    end: End = End.NONE
    code: str | None = None
    message: str = ""
    state: Snapshot | None = None

    @property
    def good(self) -> bool:
        """In the update, and nothing has failed."""
        return self.code is None


class PartialUpdate(Exception):
    """Not every member has the version.

    Attributes:
        update: `update.parts` says what each has; `update.resume()` and `update.abort()` end it.
    """

    def __init__(self, update: "FleetUpdate") -> None:
        super().__init__(update)
        self.update = update

    def __str__(self) -> str:
        update = self.update
        if not update.parts:
            return f"{update.version}: there is no instance"
        bad = [part for part in update.parts.values() if not part.good]
        told = [f"{part.instance} ({part.code}, {part.end.value})" for part in bad[:5]]
        more = [f"and {len(bad) - 5} more"] if len(bad) > 5 else []
        return (
            f"{update.version}: {len(bad)} of {len(update.parts)} instances failed: "
            f"{', '.join([*told, *more])}; of the others {update._rest()}"
        )


class FleetUpdate:
    """An update of a fleet under way, or ended; made by `Fleet.update`.

    Attributes:
        parts: the members, by name.
        outcomes: of each command so far.
    """

    def __init__(
        self,
        fleet: Fleet,
        version: str,
        on_partial: OnPartial,
        pause: JsonMap | None,
        start: JsonMap,
        finish: JsonMap,
        epoch: int | None,
        id: str,
        limits: _Limits,
    ) -> None:
        self.id, self.version, self.on_partial = id, version, on_partial
        self.parts = {name: Part(name, life) for name, life in fleet.members.items()}
        self.outcomes: list[Outcome] = []
        self._fleet, self._epoch, self._limits = fleet, epoch, limits
        self._pause_args, self._start_args, self._finish_args = pause, start, finish
        self._chunks = 0
        self._decided = False
        self._before: dict[str, Snapshot] = {}
        self._asking: tuple[Verb, str, JsonMap] | None = None

    @property
    def held(self) -> list[str]:
        """Who is still paused by this update, or one before it in this fleet."""
        return sorted(part.instance for part in self.parts.values() if self._paused(part))

    @property
    def sessions(self) -> dict[str, str]:
        """The open sessions of those who are in, by name."""
        return {
            part.instance: part.session
            for part in self.parts.values()
            if part.good and part.end is End.OPEN and part.session is not None
        }

    async def load(self, update_info: UpdateInfo, timeout_s: float | None = None) -> Outcome:
        """Load one chunk into all that are in. Returns when each has it: send tensors meanwhile.

        Args:
            update_info: one map, or one for each worker rank, as for a single instance.

        Raises:
            PartialUpdate: nobody is left, or one failed and the policy is `abort`.
        """
        return await self.load_each(dict.fromkeys(self.sessions, update_info), timeout_s)

    async def load_each(
        self, update_infos: Mapping[str, UpdateInfo], timeout_s: float | None = None
    ) -> Outcome:
        """As `load`, with an `update_info` of its own for each instance named; those out are left out.

        Raises:
            ValueError: one of them was never in.
        """
        if strangers := sorted(update_infos.keys() - self.parts.keys()):
            raise ValueError(f"not in the update: {', '.join(strangers)}")
        self._chunks += 1
        chunk = {name: {"update_info": update_infos[name]} for name in self.sessions if name in update_infos}
        outcome = await self._send(
            Verb.UPDATE_WEIGHTS,
            f"{self.id}-chunk-{self._chunks}",
            chunk,
            self._limits.load_s if timeout_s is None else timeout_s,
        )
        if not self.sessions or (self.on_partial == "abort" and not outcome.ok):
            raise PartialUpdate(self)
        return outcome

    async def resume(self) -> Outcome:
        """Resume those who hold good weights, whichever they are, and are paused by this update."""
        return await self._resume(list(self.parts.values()))

    async def _resume(self, parts: Collection[Part]) -> Outcome:
        wanted = [part for part in parts if self._paused(part) and self._may_resume(part)]
        for part in wanted:
            del self._fleet.paused[part.instance]  # no renewal may follow the resume
        args: dict[str, JsonMap] = {part.instance: {} for part in wanted}
        outcome = await self._send(Verb.RESUME, self._again("resume"), args, TIMEOUT_S)
        for part in wanted:
            if part.instance not in outcome.done.keys() | outcome.left.keys():
                self._fleet.paused[part.instance] = part.incarnation
        return outcome

    async def abort(self) -> None:
        """Abort every session that may be open; then `parts` says which were undone."""
        await self._abort([part for part in self.parts.values() if part.end in (End.OPEN, End.UNKNOWN)])

    # --- the phases ------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        if not self.parts:
            raise PartialUpdate(self)
        if self._pause_args is not None:
            self._before = dict(self._fleet.states)
            outcome = await self._all(Verb.PAUSE, "pause", self._pause_args, self._limits.pause_s)
            if not outcome.ok:
                await self._take_back(outcome)
                self._decided = True
                raise PartialUpdate(self)
        outcome = await self._all(Verb.START_WEIGHT_UPDATE, "start", self._start_args, self._limits.start_s)
        if outcome.ok:
            return
        await self._find_late_sessions(outcome)
        if self.on_partial == "resume_good" and outcome.done:
            return
        if self.on_partial == "hold":
            await self.abort()
            self._decided = True
        raise PartialUpdate(self)

    async def _commit(self) -> None:
        finishing = dict.fromkeys(self.sessions, self._finish_args)
        await self._send(Verb.FINISH_WEIGHT_UPDATE, f"{self.id}-finish", finishing, self._limits.finish_s)
        if all(part.good for part in self.parts.values()):
            await self.resume()
        elif self.on_partial == "resume_good":
            await self.abort()
            await self._resume([part for part in self.parts.values() if part.good])
        elif self.on_partial == "abort":
            await self.abort()
        else:
            await self._look()
        self._decided = True
        if not all(part.good for part in self.parts.values()):
            raise PartialUpdate(self)

    async def _give_up(self) -> None:
        """The block, or a caller who left, ends it: nobody must stay behind paused or in a session."""
        if self._asking is not None:
            verb, id, args = self._asking
            self._note(await self._ask_late(verb, id, args, self.parts))
        await self.abort()
        await self.resume()
        self._decided = True

    async def _abort(self, parts: Collection[Part]) -> None:
        if not parts:
            return
        asked = {part.instance: _Asked(part.incarnation, {}, part.session) for part in parts}
        outcome = await self._fleet._gather(
            Verb.ABORT_WEIGHT_UPDATE, asked, TIMEOUT_S, self._again("abort"), self._epoch
        )
        self.outcomes.append(outcome)
        for name, reply in outcome.done.items():
            self._see(self.parts[name], reply.state, aborted=True)
        for name, reply in outcome.failed.items():  # it had ended already
            self._see(self.parts[name], reply.state)
        for name in outcome.no_answer:
            self.parts[name].end = End.UNKNOWN

    async def _all(self, verb: Verb, phase: str, args: JsonMap, timeout_s: float) -> Outcome:
        """A phase for every part, before anybody can be out."""
        id = f"{self.id}-{phase}"
        self._asking = verb, id, args
        outcome = await self._send(verb, id, dict.fromkeys(self.parts, args), timeout_s)
        self._note(outcome)
        self._asking = None
        return outcome

    async def _take_back(self, outcome: Outcome) -> None:
        """Undo a pause that only some accepted, where it was this pause that stopped the engine."""
        silent = outcome.no_answer.keys() - outcome.left.keys()
        self._note(await self._ask_late(Verb.PAUSE, outcome.id, self._pause_args or {}, silent))
        await self.resume()
        # A restarted member got the pause in its new life.
        strangers = {
            name: _Asked(reply.incarnation, {})
            for name, reply in outcome.others.items()
            if name in self.parts and reply.ok and reply.changed and reply.state and _stops(reply.state)
        }
        if strangers:
            id = self._again("resume")
            self.outcomes.append(
                await self._fleet._gather(Verb.RESUME, strangers, TIMEOUT_S, id, self._epoch)
            )

    async def _find_late_sessions(self, outcome: Outcome) -> None:
        """A start without an answer may have opened a session: it must not stay open."""
        silent = outcome.no_answer.keys() - outcome.left.keys()
        late = await self._ask_late(Verb.START_WEIGHT_UPDATE, outcome.id, self._start_args, silent)
        self._note(late)
        for name in outcome.no_answer.keys() - late.done.keys() - late.failed.keys():
            self.parts[name].end = End.UNKNOWN
        await self._abort([self.parts[name] for name in late.done])

    async def _ask_late(self, verb: Verb, id: str, args: JsonMap, names: Collection[str]) -> Outcome:
        """What became of a command at those who did not answer; it is not started any more."""
        asked = {name: _Asked(self.parts[name].incarnation, _given(args)) for name in names}
        late = await self._fleet._gather(verb, asked, SETTLE_S, id, self._epoch, late=True)
        self.outcomes.append(late)
        return late

    async def _look(self) -> None:
        """Learn what those have whose end is not known."""
        asked = {
            part.instance: _Asked(part.incarnation, {})
            for part in self.parts.values()
            if not part.good and part.end in (End.OPEN, End.UNKNOWN)
        }
        if asked:
            outcome = await self._fleet._gather(
                Verb.STATUS, asked, SETTLE_S, self._again("status"), self._epoch
            )
            for name, reply in outcome.done.items():
                self._see(self.parts[name], reply.state)

    async def _send(
        self, verb: Verb, id: str, args: Mapping[str, Mapping[str, Any]], timeout_s: float
    ) -> Outcome:
        """One phase; those who fail are out of the update."""
        sessions = self.sessions if verb in _IN_SESSION else {}
        asked = {
            name: _Asked(self.parts[name].incarnation, _given(each), sessions.get(name))
            for name, each in args.items()
        }
        outcome = await self._fleet._gather(verb, asked, timeout_s, id, self._epoch)
        self.outcomes.append(outcome)
        for name, reply in {**outcome.done, **outcome.failed}.items():
            self.parts[name].state = reply.state
        for name, reply in outcome.failed.items():
            self._fail(self.parts[name], _code(reply), reply.error.message if reply.error else "")
        for name, reason in outcome.no_answer.items():
            self._fail(self.parts[name], NO_ANSWER, reason)
        if verb is Verb.FINISH_WEIGHT_UPDATE:
            for name in outcome.done:
                self.parts[name].end = End.COMMITTED
        if verb in _IN_SESSION:
            for name in asked.keys() - outcome.done.keys():
                part = self.parts[name]
                part.end = End.UNKNOWN
                if name not in outcome.failed:
                    continue
                if (outcome.failed[name].result or {}).get("committed"):
                    part.end = End.COMMITTED
                self._see(part, outcome.failed[name].state)
        return outcome

    # --- what is known ---------------------------------------------------------------------------

    def _fail(self, part: Part, code: str, message: str) -> None:
        if part.code is None:
            part.code, part.message = code, message

    def _note(self, outcome: Outcome) -> None:
        """Whom a pause has paused, and which sessions a start has opened."""
        for name, reply in outcome.done.items():
            part = self.parts[name]
            if outcome.verb is Verb.START_WEIGHT_UPDATE:
                part.session, part.end = (reply.result or {}).get("session"), End.OPEN
                continue
            # Only if nobody else wants it stopped: a resume ends all stops.
            was = self._before.get(name)
            ran = reply.duplicate or (was is not None and not _stops(was))
            if ran and reply.changed and reply.state is not None and _stops(reply.state) == {"command"}:
                self._fleet.paused[name] = part.incarnation

    def _paused(self, part: Part) -> bool:
        return self._fleet.paused.get(part.instance) == part.incarnation

    def _see(self, part: Part, state: Snapshot | None, aborted: bool = False) -> None:
        """What an instance says of itself tells how its session ended."""
        part.state = state
        if state is None or part.end in (End.NONE, End.COMMITTED):
            return
        update = state.weight_update
        if state.incarnation != part.incarnation:
            part.end = End.UNKNOWN
        elif update is not None and update.phase in ("open", "loading"):
            part.end = End.OPEN if update.session == part.session else End.UNKNOWN
        elif update is not None or not state.weights.good:
            part.end = End.TAINTED
        elif aborted or state.weights.version != self.version:
            part.end = End.UNDONE
        else:
            part.end = End.COMMITTED

    def _may_resume(self, part: Part) -> bool:
        return part.end in (End.NONE, End.COMMITTED, End.UNDONE)

    def _again(self, phase: str) -> str:
        """Never the same: what failed before shall be tried anew."""
        return f"{self.id}-{phase}-{new_id()[:8]}"

    def _rest(self) -> str:
        ends: dict[str, int] = {}
        for part in self.parts.values():
            if part.good:
                word = "as before" if part.end is End.NONE else part.end.value
                word += ", paused" if self._paused(part) else ""
                ends[word] = ends.get(word, 0) + 1
        return " and ".join(f"{count} are {word}" for word, count in sorted(ends.items())) or "none is left"

    # --- leases ----------------------------------------------------------------------------------

    async def _keep(self, lease_s: float) -> None:
        """Renew sessions and pauses three times in each lease, for as long as they are ours."""
        client = self._fleet.client
        while not self._decided or self.held or self.sessions:
            await asyncio.sleep(lease_s / 3)
            here, deadline = self._fleet._here(), time.time() + lease_s / 3
            for part in self.parts.values():
                if here.get(part.instance) != part.incarnation:
                    continue
                with contextlib.suppress(BusError):
                    if part.end is End.OPEN and part.session is not None:
                        body = client.body(new_id(), {}, deadline, self._epoch, part.session)
                        await client.bus.publish(client.subject(part.instance, Verb.STATUS), body)
                    elif self._paused(part) and self._pause_args is not None:
                        body = client.body(new_id(), _given(self._pause_args), deadline, self._epoch)
                        await client.bus.publish(client.subject(part.instance, Verb.PAUSE), body)


_IN_SESSION = (Verb.UPDATE_WEIGHTS, Verb.FINISH_WEIGHT_UPDATE)


def _stops(state: Snapshot) -> set[str]:
    """Who stops scheduling, besides a session."""
    return set(state.paused.by) - {"update"} if state.paused else set()


def _given(args: Mapping[str, Any]) -> JsonMap:
    return {key: value for key, value in args.items() if value is not None}


def _code(reply: Reply) -> str:
    return reply.error.code if reply.error is not None else "internal"


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Do it although we are being cancelled."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("an update could not be given up in good order: %r", error)
