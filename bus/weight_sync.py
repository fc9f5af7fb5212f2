"""The weight-sync client of vLLM's trainer engines, over the bus.

    with NATSWeightSyncClient("nats://127.0.0.1:4222", issuer="my-trainer") as client:
        engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
        client.weight_version = "step-7"
        engine.send_weights()

Satisfies vLLM's `VLLMWeightSyncClient`. The trainer may be any synchronous program: the bus has a thread
of its own, which also keeps the sessions alive between two calls.
"""

import asyncio
import base64
import concurrent.futures
import contextlib
import logging
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from bus.client import Client, CommandFailed, Instance, NoAnswer
from bus.connection import BusError, Credentials
from bus.messages import CacheRule, JsonMap, Mode, Reply, StateName, Verb

logger = logging.getLogger(__name__)

LEASE_S = 30.0
IDLE_S = 900.0
_RENEWALS_PER_LEASE = 4
_LOOK_EVERY_S = 2.0
_LOOK_TIMEOUT_S = 5.0
_ABSENT_S = 5.0
"""How long an instance that does not listen is given to return: it may have lost its broker for a moment."""
_GONE_AFTER = 5
"""Looks in a row, while a command of it was running."""
_ABORT_TIMEOUT_S = 30.0
_OTHERS_S = 1.0
_QUEUED_S = 30.0
"""Beyond what a call may take in the engine: commands that are before it."""
_BUDGET_S = {
    Verb.INIT_WEIGHT_TRANSFER: ("init_s", 120.0),
    Verb.START_WEIGHT_UPDATE: ("start_s", 60.0),
    Verb.UPDATE_WEIGHTS: ("chunk_s", 600.0),
    Verb.FINISH_WEIGHT_UPDATE: ("finish_s", 300.0),
}
"""The instance's own defaults (contract, section 1)."""
_NOT_UP = (StateName.STARTING, StateName.FAILED, StateName.SHUTTING_DOWN, StateName.STOPPED)

T = TypeVar("T")


class WeightSyncFailed(Exception):
    """A step did not succeed at every instance. Sessions that were open are aborted.

    Attributes:
        verb: the step.
        done: who did it, by name.
        failed: why the others did not; `NoAnswer` where that is unknown, None for whoever had not
            answered yet when another failed.
    """

    def __init__(
        self, verb: str, done: Sequence[str], failed: Mapping[str, Exception | None], more: str = ""
    ) -> None:
        reasons = [
            str(error) if error is not None else f"{name}: {verb} not awaited"
            for name, error in failed.items()
        ]
        text = "; ".join([more] * bool(more) + reasons)
        super().__init__(f"{text} (done at {', '.join(done)})" if done else text)
        self.verb, self.done, self.failed = verb, tuple(done), dict(failed)


@dataclass
class _Member:
    """An instance that takes part.

    Attributes:
        incarnation: of the life that was initialised; None where no transfer was.
        session: while one is open.
    """

    instance: Instance
    incarnation: str | None = None
    session: str | None = None


class NATSWeightSyncClient:
    """Updates one instance, several, or a whole component as one.

    Connects with the first call, so that the ranks of a trainer that never call may hold one too. Calls
    come from any thread, one at a time. A step is done when every instance has done it; otherwise
    `WeightSyncFailed` is raised, and sessions are aborted: instances that had loaded nothing go back to
    the weights they had, the others stay out of service until the next update succeeds.

    Sessions carry a lease, which is renewed as long as this process lives and calls at least every
    `idle_s`, and an epoch: a trainer that is started later ends the sessions of this one, and this one's
    commands are then refused (`stale_epoch`).

    Attributes:
        weight_version: what the next finish calls the weights, unless it is told itself; used once.
            vLLM's trainer engines do not tell.
    """

    def __init__(
        self,
        urls: str | Sequence[str] = "nats://127.0.0.1:4222",
        *,
        instances: str | Sequence[str] | None = None,
        namespace: str = "default",
        component: str = "backend",
        issuer: str | None = None,
        credentials: Credentials | None = None,
        lease_s: float = LEASE_S,
        idle_s: float = IDLE_S,
        epoch: int | None = None,
        pause_mode: Mode = "keep",
        cache: CacheRule = "clear",
        budgets: Mapping[str, float] | None = None,
        connect_wait_s: float = 5.0,
    ) -> None:
        """
        Args:
            instances: one name or several; without it those that are up when the transfer is initialised,
                or where it is not, at each start.
            lease_s: how long an instance waits for a sign of life before it ends the session.
            idle_s: how long this trainer may be silent between two calls before the lease is not renewed
                any more: it hangs.
            epoch: without it the next one is taken with the first call.
            pause_mode: what becomes of requests in flight during an update.
            budgets: seconds for the engine: `init_s`, `start_s`, `chunk_s`, `finish_s`.
        """
        if unknown := set(budgets or {}) - {name for name, _ in _BUDGET_S.values()}:
            raise ValueError(f"no such budget: {', '.join(sorted(unknown))}")
        self.weight_version: str | None = None
        self._connect_to = (urls, namespace, component, issuer, connect_wait_s, credentials)
        self._names = [instances] if isinstance(instances, str) else list(instances or ())
        self._lease_s, self._idle_s = lease_s, idle_s
        self._pause_mode, self._cache = pause_mode, cache
        self._budgets = dict(budgets or {})
        self._epoch = epoch
        self._members: dict[str, _Member] = {}
        self._initialised = False
        self._called_s = time.monotonic()
        self._calls = 0
        self._aborting: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._thread = _LoopThread()

    # --- vLLM's protocol ----------------------------------------------------------------------------

    def init_weight_transfer_engine(self, init_info: JsonMap) -> None:
        """Every instance meets the trainer; all enter at once.

        Where `init_info` has a `rank_offset`, it is that of the first instance by name; the others follow.

        Raises:
            WeightSyncFailed, BusError
            ValueError: the ranks of the world do not divide among the instances.
        """
        self._do(self._init(init_info))

    def start_weight_update(self, manifest: JsonMap | None = None) -> None:
        """Every instance stops and opens a session. What an earlier update left open is aborted first.

        Raises:
            WeightSyncFailed, BusError
        """
        self._do(self._start(manifest))

    def update_weights(self, update_info: JsonMap | list[JsonMap]) -> None:
        """Every instance loads a chunk; returns when all have it. Send the tensors meanwhile.

        Raises:
            WeightSyncFailed: as soon as one has failed.
            BusError
        """
        self._do(self._update(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Every instance commits, and serves again if it did before.

        Raises:
            WeightSyncFailed, BusError
        """
        self._do(self._finish(weight_version))

    # --- and more -----------------------------------------------------------------------------------

    def abort_weight_update(self) -> None:
        """End the sessions that are open. Never raises: they end by their lease otherwise."""
        try:
            self._do(self._abort())
        except (BusError, RuntimeError) as error:
            logger.warning("the sessions may still be open: %s", error)

    def send(
        self, verb: Verb | str, args: JsonMap | None = None, timeout_s: float = 60.0
    ) -> dict[str, Reply]:
        """Any command to every instance that takes part: pause, resume, sleep, wake_up, status, …

        Raises:
            WeightSyncFailed, BusError
        """
        return self._do(self._send(Verb(verb), args or {}, timeout_s))

    @property
    def members(self) -> list[str]:
        """Who takes part, by name; empty before the first init or start."""
        return sorted(self._members)

    @property
    def epoch(self) -> int | None:
        return self._epoch

    def close(self) -> None:
        """Abort what is open, and leave the bus. The client is of no use any more."""
        if self._thread.running:
            self.abort_weight_update()
            with contextlib.suppress(BusError, RuntimeError):
                self._thread.run(self._disconnect())
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- in the thread ------------------------------------------------------------------------------

    def _do(self, call: Coroutine[Any, Any, T]) -> T:
        self._called_s = time.monotonic()
        self._calls += 1
        try:
            return self._thread.run(call)
        finally:
            self._calls -= 1
            self._called_s = time.monotonic()

    async def _connected(self) -> Client:
        if self._client is None:
            urls, namespace, component, issuer, wait_s, credentials = self._connect_to
            # Left again by `_disconnect`, in this same loop.
            entering = Client.connect(urls, namespace, component, issuer, wait_s, credentials)
            self._client = await self._thread.stack.enter_async_context(entering)
        if self._epoch is None:
            self._epoch = await self._client.new_epoch()
        return self._client

    async def _disconnect(self) -> None:
        await self._thread.stack.aclose()

    async def _choose(self) -> None:
        """Settle who takes part."""
        client = await self._connected()
        names = self._names
        if not names:
            states = await client.states()
            names = sorted(name for name, last in states.items() if last.state not in _NOT_UP)
            if left_out := sorted(states.keys() - set(names)):
                logger.warning("not up, and left out: %s", ", ".join(left_out))
        if not names:
            raise WeightSyncFailed(
                "choose", (), {}, f"no instance of {client.namespace}.{client.component} is up"
            )
        self._members = {name: _Member(client.instance(name)) for name in sorted(names)}

    async def _init(self, init_info: JsonMap) -> None:
        await self._abort()
        await self._choose()
        infos = _rank_offsets(init_info, sorted(self._members))
        budget = self._budget(Verb.INIT_WEIGHT_TRANSFER)
        replies = await self._all(
            Verb.INIT_WEIGHT_TRANSFER,
            lambda member: {"init_info": infos[member.instance.name], **budget},
            hasty=True,
        )
        for name, reply in replies.items():
            self._members[name].incarnation = reply.incarnation
        self._initialised = True

    async def _start(self, manifest: JsonMap | None) -> None:
        await self._abort()
        if not self._initialised:
            await self._choose()
        args: JsonMap = {
            "pause_mode": self._pause_mode,
            "lease_s": self._lease_s,
            "manifest": manifest,
            **self._budget(Verb.START_WEIGHT_UPDATE, Verb.UPDATE_WEIGHTS, Verb.FINISH_WEIGHT_UPDATE),
        }
        try:
            replies = await self._all(Verb.START_WEIGHT_UPDATE, lambda _: args)
            restarted = {
                name: None
                for name, reply in replies.items()
                if self._members[name].incarnation not in (None, reply.incarnation)
            }
            if restarted:
                more = f"{', '.join(restarted)} restarted: initialise the transfer again"
                raise WeightSyncFailed(Verb.START_WEIGHT_UPDATE.value, (), restarted, more)
        except WeightSyncFailed:
            await self._abort()
            raise
        self._thread.background(self._keep_alive())

    async def _update(self, update_info: JsonMap | list[JsonMap]) -> None:
        args = {"update_info": _packable(update_info)}
        try:
            await self._all(Verb.UPDATE_WEIGHTS, lambda _: args, hasty=True)
        except WeightSyncFailed:
            # Queued behind a chunk that may still be loading elsewhere: the trainer need not wait for that.
            self._aborting = self._thread.background(self._abort_open())
            raise

    async def _finish(self, version: str | None) -> None:
        one_for_all = next((member.session for member in self._members.values() if member.session), None)
        version = version or self.weight_version or one_for_all
        args = {"weight_version": version, "cache": self._cache}
        try:
            replies = await self._all(Verb.FINISH_WEIGHT_UPDATE, lambda _: args)
        except WeightSyncFailed as failure:
            for name in failure.done:
                self._members[name].session = None
            await self._abort()
            raise
        self.weight_version = None
        for name in replies:
            self._members[name].session = None

    async def _send(self, verb: Verb, args: JsonMap, timeout_s: float) -> dict[str, Reply]:
        if not self._members:
            await self._choose()
        return await self._all(verb, lambda _: args, timeout_s)

    async def _abort(self) -> None:
        if self._aborting is not None:
            await self._aborting
            self._aborting = None
        await self._abort_open()

    async def _abort_open(self) -> None:
        async def abort(member: _Member, session: str) -> None:
            try:
                await member.instance.abort_weight_update(
                    epoch=self._epoch, session=session, check=False, timeout_s=_ABORT_TIMEOUT_S
                )
            except (NoAnswer, BusError) as error:
                logger.warning("the session at %s ends by its lease: %s", member.instance.name, error)

        opened = [(member, member.session) for member in self._members.values() if member.session]
        for member, _ in opened:
            member.session = None
        await asyncio.gather(*(abort(member, session) for member, session in opened if session))

    async def _keep_alive(self) -> None:
        """Show a sign of life for each session that is open, until there is none."""
        while opened := [(m.instance, m.session) for m in self._members.values() if m.session]:
            if not self._calls and time.monotonic() - self._called_s > self._idle_s:
                logger.warning("no call for %g s: the sessions are left to run out", self._idle_s)
                return
            signs = (
                instance.status(session=session, timeout_s=_LOOK_TIMEOUT_S, check=False)
                for instance, session in opened
            )
            await asyncio.gather(*signs, return_exceptions=True)
            await asyncio.sleep(self._lease_s / _RENEWALS_PER_LEASE)

    async def _all(
        self,
        verb: Verb,
        args: Callable[[_Member], JsonMap],
        timeout_s: float | None = None,
        hasty: bool = False,
    ) -> dict[str, Reply]:
        """One command to every member at once; the replies, all of them good.

        Args:
            hasty: after one failure the others may wait for what does not come any more, so they are
                given only a moment to say what is wrong with them: a worker may have lost the one that
                failed, and be heard first.

        Raises:
            WeightSyncFailed
        """
        if timeout_s is None:
            name, default_s = _BUDGET_S[verb]
            timeout_s = self._budgets.get(name, default_s) + _QUEUED_S
        members = dict(self._members)
        calls = {
            name: asyncio.ensure_future(self._certainly(member, verb, args(member), timeout_s))
            for name, member in members.items()
        }
        when = asyncio.FIRST_EXCEPTION if hasty else asyncio.ALL_COMPLETED
        try:
            if calls:
                _, pending = await asyncio.wait(calls.values(), return_when=when)
                if pending:
                    await asyncio.wait(pending, timeout=_OTHERS_S)
        finally:
            for call in calls.values():
                call.cancel()
        replies: dict[str, Reply] = {}
        failed: dict[str, Exception | None] = {}
        for name, call in calls.items():
            if not call.done() or call.cancelled():
                failed[name] = None
            elif (error := call.exception()) is None:
                replies[name] = call.result()
                if verb is Verb.START_WEIGHT_UPDATE:
                    members[name].session = (call.result().result or {}).get("session")
            elif isinstance(error, Exception):
                failed[name] = error
            else:
                raise error
        if failed or not calls:
            failure = WeightSyncFailed(
                verb.value, sorted(replies), failed, "" if calls else "nobody takes part"
            )
            raise failure from next((error for error in failed.values() if error is not None), None)
        return replies

    async def _certainly(self, member: _Member, verb: Verb, args: JsonMap, timeout_s: float) -> Reply:
        """Send it, and look after it: a lost reply is asked for again, an instance that went is noticed.

        Raises:
            CommandFailed, NoAnswer, BusError
        """
        instance, id = member.instance, secrets.token_hex(12)
        session = member.session if verb is not Verb.START_WEIGHT_UPDATE else None

        async def send() -> Reply:
            end = time.monotonic() + _ABSENT_S
            while True:
                try:
                    return await instance.send(
                        verb, args, id=id, epoch=self._epoch, session=session, timeout_s=timeout_s
                    )
                except NoAnswer as error:
                    if error.sent or time.monotonic() > end:
                        raise
                await asyncio.sleep(0.2)

        answer = asyncio.ensure_future(send())
        look = asyncio.ensure_future(self._look_after(member, verb, id))
        try:
            await asyncio.wait({answer, look}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if look.result():
                raise NoAnswer(verb.value, instance.name, id, look.result(), True)
            logger.warning("the reply to %s of %s was lost; asking again", verb.value, instance.name)
            return await send()
        finally:
            answer.cancel()
            look.cancel()

    async def _look_after(self, member: _Member, verb: Verb, id: str) -> str:
        """Returns when there is a reply to the command: nothing; or when there will be none: why."""
        incarnation, absent = member.incarnation, 0
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                found = await member.instance.status(verb, id, timeout_s=_LOOK_TIMEOUT_S)
            except (NoAnswer, CommandFailed, BusError) as error:
                absent = absent + 1 if isinstance(error, NoAnswer) and not error.sent else 0
                if absent >= _GONE_AFTER:
                    return "it is gone"
                continue
            absent = 0
            incarnation = incarnation or found.incarnation
            if found.incarnation != incarnation:
                return "it restarted"
            if (found.result or {}).get("reply") is not None:
                await asyncio.sleep(_LOOK_EVERY_S)  # the reply itself may be under way
                return ""

    def _budget(self, *verbs: Verb) -> JsonMap:
        names = [_BUDGET_S[verb][0] for verb in verbs]
        return {name: self._budgets[name] for name in names if name in self._budgets}


def _rank_offsets(init_info: JsonMap, names: Sequence[str]) -> dict[str, JsonMap]:
    """Each instance's `init_info`: its workers' ranks follow on those of the instance before."""
    first, world = init_info.get("rank_offset"), init_info.get("world_size")
    if len(names) == 1 or type(first) is not int or type(world) is not int:
        return dict.fromkeys(names, init_info)
    each, left_over = divmod(world - first, len(names))
    if left_over or each < 1:
        raise ValueError(
            f"{world - first} ranks do not divide among {len(names)} instances: {', '.join(names)}"
        )
    return {name: init_info | {"rank_offset": first + n * each} for n, name in enumerate(names)}


def _packable(update_info: JsonMap | list[JsonMap]) -> JsonMap | list[JsonMap]:
    """CUDA IPC handles as vLLM's own HTTP client sends them; everything else as it is."""
    if isinstance(update_info, list):
        return [_packable_map(info) for info in update_info]
    return _packable_map(update_info)


def _packable_map(info: JsonMap) -> JsonMap:
    if info.get("ipc_handles") is None:
        return info
    handles = base64.b64encode(pickle.dumps(info["ipc_handles"])).decode()
    return {key: value for key, value in info.items() if key != "ipc_handles"} | {
        "ipc_handles_pickled": handles
    }


class _LoopThread:
    """An event loop in a daemon thread, started when it is first needed.

    Attributes:
        stack: contexts that are entered and left in the loop.
    """

    def __init__(self) -> None:
        self.stack = contextlib.AsyncExitStack()
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def running(self) -> bool:
        return self._thread is not None

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for it; an exception of the caller, such as an interrupt, cancels it."""
        with self._starting:
            if self._closed:
                call.close()
                raise RuntimeError("the client is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._serve, name="weight sync", daemon=True)
                self._thread.start()
        future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def background(self, call: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Called in the loop."""
        task = asyncio.ensure_future(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        with self._starting:
            self._closed = True
            if self._loop is None or self._thread is None:
                return
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        loop = self._loop
        assert loop is not None
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            loop.close()
