"""What trainers and operators call.

    async with Client.connect("nats://127.0.0.1:4222", issuer="my-trainer") as client:
        engine = client.instance("gpu-7")
        await engine.pause(mode="keep")
        async with engine.weight_update(version="v2") as update:
            await update.load({"path": "/checkpoints/v2"})
        await engine.resume()

Every command carries an id, so that it may be repeated, and a deadline, so that an instance that
comes to it late leaves it alone. Deadlines are wall-clock times: clocks must agree within seconds.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import msgspec

from bus import announce, discovery, epochs, subjects
from bus.codec import BadMessage, Format, decode_reply, decode_snapshot, encode
from bus.connection import Bus, BusError, Credentials, Message, NoResponders, Timeout
from bus.messages import (
    Announcement,
    CacheRule,
    InstanceEntry,
    JsonMap,
    Mode,
    Reply,
    Snapshot,
    StateName,
    Verb,
    WakeTag,
    describe,
)

logger = logging.getLogger(__name__)

TIMEOUT_S = 30.0
UPDATE_TIMEOUT_S = 600.0
FINISH_TIMEOUT_S = 300.0
_DRAIN_TIMEOUT_S = 1.0
_OTHERS_RETURN_S = 3.0
"""How long after our own reconnect an instance that does not listen is given to return."""


class CommandFailed(Exception):
    """The instance refused the command, or the engine failed at it.

    Attributes:
        reply: the whole answer, with the state that the instance is in now.
        code: an `ErrorCode`, as text.
        retryable: the same command may succeed later, or on another instance.
    """

    def __init__(self, verb: str, reply: Reply) -> None:
        error = reply.error
        self.reply = reply
        self.code = error.code if error is not None else "internal"
        self.message = error.message if error is not None else "refused without a reason"
        self.retryable = error.retryable if error is not None else False
        super().__init__(f"{verb} at {reply.instance}: {self.code}: {self.message}")


class NoAnswer(Exception):
    """No reply in time, or nobody listens. After a time-out the command may have been carried out.

    Attributes:
        id: of the command; `status(verb=…, id=…)` asks what became of it.
        sent: False if it cannot have been carried out.
    """

    def __init__(self, verb: str, instance: str, id: str, reason: str, sent: bool) -> None:
        super().__init__(f"{verb} at {instance}: {reason}")
        self.verb, self.instance, self.id, self.sent = verb, instance, id, sent


class Options(TypedDict, total=False):
    """What every command takes.

    Attributes:
        timeout_s: how long to wait for the reply (30); the command does not start after that.
        id: idempotency key; by default a new one.
        epoch: of the trainer, by default the client's; a lower one than the highest seen is refused.
        session: of a weight update.
        check: False returns a refusal instead of raising `CommandFailed`.
    """

    timeout_s: float
    id: str | None
    epoch: int | None
    session: str | None
    check: bool


class Client:
    """Reaches the instances of one component.

    Attributes:
        epoch: sent with every command that is not given another one.
    """

    def __init__(
        self,
        bus: Bus,
        namespace: str = "default",
        component: str = "backend",
        issuer: str | None = None,
        epoch: int | None = None,
    ) -> None:
        subjects.state_pattern(namespace, component)  # a wrong name is better known now
        self.bus = bus
        self.namespace = namespace
        self.component = component
        self.issuer = issuer
        self.epoch = epoch

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls,
        urls: str | Sequence[str] = "nats://127.0.0.1:4222",
        namespace: str = "default",
        component: str = "backend",
        issuer: str | None = None,
        wait_s: float = 5.0,
        credentials: Credentials | None = None,
        epoch: int | None = None,
    ) -> AsyncIterator["Client"]:
        """A client with a connection of its own, closed at the end of the block.

        Raises:
            BusError: no broker took us within `wait_s`.
        """
        bus = await Bus.connect(urls, credentials, name=issuer or "watchkeeper client", wait_s=wait_s)
        try:
            yield cls(bus, namespace, component, issuer, epoch)
        finally:
            await bus.drain(_DRAIN_TIMEOUT_S)

    async def new_epoch(self) -> int:
        """Take an epoch above all others, and send it with every command from now on.

        A trainer does this once when it starts: whatever an earlier one still sends is refused then.

        Raises:
            BusError
        """
        self.epoch = await epochs.next_epoch(self.bus, self.namespace, self.component)
        return self.epoch

    async def announce(
        self,
        version: str,
        updates: Sequence[JsonMap | list[JsonMap]],
        init_info: JsonMap | None = None,
        cache: CacheRule = "clear",
        pause_mode: Mode = "keep",
        manifest: JsonMap | None = None,
        lease_s: float | None = None,
        epoch: int | None = None,
        id: str | None = None,
    ) -> int:
        """Have every instance apply a version by itself, also those that start later.

        Args:
            updates: one `update_info` for each chunk.
            epoch: by default the client's; without one a new epoch is taken.
            id: of the announcement, for events and logs.

        Returns:
            Its sequence in the stream. It does not say that anybody has applied it yet.

        Raises:
            ValueError: it is not an announcement.
            BusError: it may have been announced; it may be repeated under the same id.
        """
        if epoch is None:
            epoch = self.epoch if self.epoch is not None else await self.new_epoch()
        fields = {
            "id": id or new_id(),
            "epoch": epoch,
            "version": version,
            "updates": list(updates),
            "init_info": init_info,
            "cache": cache,
            "pause_mode": pause_mode,
            "manifest": manifest,
            "issuer": self.issuer,
            "lease_s": lease_s,
        }
        try:
            announcement = msgspec.convert(fields, Announcement)
        except msgspec.ValidationError as error:
            raise ValueError(describe(error, "")) from None
        return await announce.announce(self.bus, self.namespace, self.component, announcement)

    def instance(self, name: str) -> "Instance":
        """The instance of this name, whether it is there or not."""
        return Instance(self, subjects.check_name(name))

    async def instances(self) -> dict[str, InstanceEntry]:
        """Who may be sent requests now, by name.

        Raises:
            BusError
        """
        return await discovery.read_instances(self.bus, self.namespace, self.component)

    async def states(self) -> dict[str, Snapshot]:
        """The last state of every live instance, by name.

        Raises:
            BusError
        """
        return await discovery.read_states(self.bus, self.namespace, self.component)

    async def events(self) -> AsyncGenerator[Snapshot, None]:
        """Yield each state that an instance publishes, beginning with the first step, for ever.

        Raises:
            BusError: it cannot be subscribed to.
        """
        async with self._listening(subjects.state_pattern(self.namespace, self.component)) as queue:
            while True:
                yield await queue.get()

    async def wait_for(
        self, instance: str, state: str = "serving", timeout_s: float = TIMEOUT_S, settled: bool = True
    ) -> Snapshot:
        """Wait until `instance` shows `state`, and no call runs unless `settled` is False.

        Raises:
            Timeout: it did not; the text says what it showed last.
            BusError
        """
        seen = "nothing"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._listening(subjects.state(self.namespace, self.component, instance)) as queue,
            ):
                last: Snapshot | None = (await self.states()).get(instance)
                while last is None or last.state != state or (settled and not last.settled):
                    if last is not None:
                        seen = last.state if last.settled else f"{last.state}, not settled"
                    last = await queue.get()
                return last
        except TimeoutError:
            raise Timeout(f"{instance} was not {state} within {timeout_s:g} s; it showed {seen}") from None

    def send_all(
        self,
        verb: Verb | str,
        args: Mapping[str, Any] | None = None,
        wait_s: float = TIMEOUT_S,
        id: str | None = None,
        epoch: int | None = None,
        session: str | None = None,
    ) -> "Gathering":
        """Send one command to every instance of the component.

        gathering = client.send_all("pause", {"mode": "keep"})
        async for reply in gathering:
            print(reply.instance, reply.ok)
        print(gathering.missing)
        """
        return Gathering(self, Verb(verb), dict(args or {}), wait_s, id, epoch, session)

    def body(
        self,
        id: str,
        args: Mapping[str, Any],
        deadline: float,
        epoch: int | None = None,
        session: str | None = None,
    ) -> bytes:
        """A control message."""
        body: JsonMap = {"id": id, "deadline": deadline, "args": dict(args)}
        epoch = self.epoch if epoch is None else epoch
        for key, value in (("issuer", self.issuer), ("epoch", epoch), ("session", session)):
            if value is not None:
                body[key] = value
        return encode(body, Format.MSGPACK)

    def subject(self, instance: str, verb: Verb) -> str:
        """Where it goes; `instance` may be `subjects.ALL`."""
        return subjects.control(self.namespace, self.component, instance, verb.value)

    @contextlib.asynccontextmanager
    async def _listening(self, subject: str) -> AsyncIterator[asyncio.Queue[Snapshot]]:
        queue: asyncio.Queue[Snapshot] = asyncio.Queue()

        def arrived(message: Message) -> None:
            try:
                queue.put_nowait(decode_snapshot(message.data))
            except BadMessage as error:
                logger.warning("on %s: %s", message.subject, error)

        subscription = await self.bus.subscribe(subject, arrived)
        try:
            yield queue
        finally:
            await subscription.unsubscribe()


class Gathering:
    """The replies to one command to all, as they come: iterate over it once.

    Ends when every instance that was known to live when the command was sent has answered, or after
    `wait_s`. Where none was known, whoever answers in time is heard.

    Attributes:
        id: of the command, the same at each instance.
        replies: what has come so far, by instance.
        expected: who was known to live.
    """

    def __init__(
        self,
        client: Client,
        verb: Verb,
        args: JsonMap,
        wait_s: float,
        id: str | None,
        epoch: int | None,
        session: str | None,
    ) -> None:
        self.verb = verb
        self.id = id or new_id()
        self.replies: dict[str, Reply] = {}
        self.expected: frozenset[str] = frozenset()
        self._client, self._args, self._wait_s = client, args, wait_s
        self._epoch, self._session = epoch, session

    @property
    def missing(self) -> list[str]:
        """Who was known to live and has not answered."""
        return sorted(self.expected - self.replies.keys())

    @property
    def failed(self) -> list[Reply]:
        return [reply for reply in self.replies.values() if not reply.ok]

    @property
    def complete(self) -> bool:
        """Everybody who was known to live has answered, and all are ok. Never true of nobody."""
        return bool(self.replies) and not self.missing and not self.failed

    async def run(self) -> "Gathering":
        """Gather all there is."""
        async for _ in self:
            pass
        return self

    async def __aiter__(self) -> AsyncIterator[Reply]:
        client = self._client
        states = await client.states()
        self.expected = frozenset(name for name, last in states.items() if last.state != StateName.STOPPED)
        data = client.body(self.id, self._args, time.time() + self._wait_s, self._epoch, self._session)
        answers = client.bus.scatter(client.subject(subjects.ALL, self.verb), data, self._wait_s)
        async with contextlib.aclosing(answers):
            async for answer in answers:
                try:
                    reply = decode_reply(answer)
                except BadMessage as error:
                    logger.warning("an answer to %s: %s", self.verb.value, error)
                    continue
                self.replies[reply.instance] = reply
                yield reply
                if self.expected and not self.missing:
                    return


class Instance:
    """One instance, reached by name. Every method sends one command and returns its reply.

    Raises (all of them):
        CommandFailed: refused or failed, unless `check=False`.
        NoAnswer: no reply in time, or nobody of this name listens.
        BusError: it cannot be sent at all.
    """

    def __init__(self, client: Client, name: str) -> None:
        self.client = client
        self.name = name

    async def pause(
        self,
        mode: Mode = "abort",
        clear_cache: bool = True,
        lease_s: float | None = None,
        **options: Unpack[Options],
    ) -> Reply:
        """Stop scheduling; requests in flight end (abort), may finish (wait), or are frozen (keep)."""
        args = {"mode": mode, "clear_cache": clear_cache, "lease_s": lease_s}
        return await self.send(Verb.PAUSE, args, **options)

    async def resume(self, **options: Unpack[Options]) -> Reply:
        return await self.send(Verb.RESUME, None, **options)

    async def sleep(self, level: int = 1, mode: Mode = "abort", **options: Unpack[Options]) -> Reply:
        """Release accelerator memory: 1 keeps the weights in host memory, 2 discards them; 0 only pauses."""
        return await self.send(Verb.SLEEP, {"level": level, "mode": mode}, **options)

    async def wake_up(self, tags: Sequence[WakeTag] | None = None, **options: Unpack[Options]) -> Reply:
        """Make memory resident again; all of it without `tags`."""
        return await self.send(Verb.WAKE_UP, {"tags": list(tags) if tags is not None else None}, **options)

    async def init_weight_transfer(self, init_info: JsonMap, **options: Unpack[Options]) -> Reply:
        return await self.send(Verb.INIT_WEIGHT_TRANSFER, {"init_info": init_info}, **options)

    async def start_weight_update(
        self,
        pause_mode: Mode = "keep",
        lease_s: float | None = None,
        manifest: JsonMap | None = None,
        **options: Unpack[Options],
    ) -> Reply:
        """Open a session; it is `reply.result["session"]`. See `weight_update` for the whole of it."""
        args = {"pause_mode": pause_mode, "lease_s": lease_s, "manifest": manifest}
        return await self.send(Verb.START_WEIGHT_UPDATE, args, **options)

    async def update_weights(self, update_info: JsonMap | list[JsonMap], **options: Unpack[Options]) -> Reply:
        """Load one chunk. It returns when the engine has it: send the tensors meanwhile."""
        options.setdefault("timeout_s", UPDATE_TIMEOUT_S)
        return await self.send(Verb.UPDATE_WEIGHTS, {"update_info": update_info}, **options)

    async def finish_weight_update(
        self,
        weight_version: str | None = None,
        cache: CacheRule = "clear",
        allow_empty: bool = False,
        **options: Unpack[Options],
    ) -> Reply:
        """Commit what was loaded, under this version; the session id without one."""
        options.setdefault("timeout_s", FINISH_TIMEOUT_S)
        args = {"weight_version": weight_version, "cache": cache, "allow_empty": allow_empty}
        return await self.send(Verb.FINISH_WEIGHT_UPDATE, args, **options)

    async def abort_weight_update(self, **options: Unpack[Options]) -> Reply:
        """End the session. If a chunk was loaded, the engine stays out until a good update."""
        return await self.send(Verb.ABORT_WEIGHT_UPDATE, None, **options)

    async def status(
        self,
        verb: Verb | str | None = None,
        id: str | None = None,
        session: str | None = None,
        timeout_s: float = TIMEOUT_S,
        check: bool = True,
    ) -> Reply:
        """The state, and with `verb` and `id` what became of that command.

        That is in `result`: `{reply, running}`. A `session` renews its lease.
        """
        args = {"verb": Verb(verb).value if verb is not None else None, "id": id}
        return await self.send(Verb.STATUS, args, session=session, timeout_s=timeout_s, check=check)

    async def shutdown(self, **options: Unpack[Options]) -> Reply:
        """End the instance; answered before its engine stops."""
        return await self.send(Verb.SHUTDOWN, None, **options)

    @contextlib.asynccontextmanager
    async def weight_update(
        self,
        version: str | None = None,
        pause_mode: Mode = "keep",
        cache: CacheRule = "clear",
        allow_empty: bool = False,
        lease_s: float | None = None,
        manifest: JsonMap | None = None,
        epoch: int | None = None,
        start_timeout_s: float = 2 * TIMEOUT_S,
        finish_timeout_s: float = FINISH_TIMEOUT_S,
    ) -> AsyncIterator["WeightUpdate"]:
        """A whole update: start, `load` as often as needed, finish; abort if anything is raised.

            async with engine.weight_update(version="v2") as update:
                await update.load({"path": "/checkpoints/v2"})

        A lost reply to the finish is asked for again. If the finish fails the session is aborted, and
        the failure raised.
        """
        started = await self._certainly(
            Verb.START_WEIGHT_UPDATE,
            {"pause_mode": pause_mode, "lease_s": lease_s, "manifest": manifest},
            timeout_s=start_timeout_s,
            epoch=epoch,
        )
        update = WeightUpdate(self, started, epoch)
        try:
            yield update
            args = {"weight_version": version, "cache": cache, "allow_empty": allow_empty}
            update.finished = await self._certainly(
                Verb.FINISH_WEIGHT_UPDATE,
                args,
                timeout_s=finish_timeout_s,
                epoch=epoch,
                session=update.session,
            )
        except BaseException:
            await update.abort()
            raise

    async def send(
        self, verb: Verb | str, args: Mapping[str, Any] | None = None, **options: Unpack[Options]
    ) -> Reply:
        """Send any verb. Arguments that are None are left to the instance's defaults."""
        verb = Verb(verb)
        timeout_s = options.get("timeout_s", TIMEOUT_S)
        id = options.get("id") or new_id()
        given = {key: value for key, value in (args or {}).items() if value is not None}
        data = self.client.body(
            id, given, time.time() + timeout_s, options.get("epoch"), options.get("session")
        )
        reply = await self._request(verb, data, id, timeout_s)
        if not reply.ok and options.get("check", True):
            raise CommandFailed(verb.value, reply)
        return reply

    async def _request(self, verb: Verb, data: bytes, id: str, timeout_s: float) -> Reply:
        bus = self.client.bus
        end = time.monotonic() + timeout_s
        try:
            if not bus.connected:  # nothing was sent yet, so waiting is safe
                async with asyncio.timeout(timeout_s):
                    await bus.wait_connected()
        except TimeoutError:
            raise NoAnswer(verb.value, self.name, id, f"no broker for {timeout_s:g} s", False) from None
        subject = self.client.subject(self.name, verb)
        try:
            while True:
                try:
                    return decode_reply(await bus.request(subject, data, max(0.0, end - time.monotonic())))
                except NoResponders:
                    # Just after an outage the instance may not be back yet.
                    back_s = time.monotonic() - bus.connected_since
                    if not bus.reconnects or back_s > _OTHERS_RETURN_S or time.monotonic() + 0.1 > end:
                        raise
                await asyncio.sleep(0.1)
        except NoResponders:
            raise NoAnswer(verb.value, self.name, id, "no instance of this name listens", False) from None
        except Timeout:
            raise NoAnswer(verb.value, self.name, id, f"no reply in {timeout_s:g} s", True) from None
        except BadMessage as error:
            raise NoAnswer(verb.value, self.name, id, str(error), True) from None

    async def _certainly(self, verb: Verb, args: JsonMap, **options: Unpack[Options]) -> Reply:
        """As `send`, and a reply that does not come is asked for once more under the same id."""
        options["id"] = new_id()
        try:
            return await self.send(verb, args, **options)
        except NoAnswer as lost:
            if not lost.sent:
                raise
            logger.warning("%s; asking again", lost)
            return await self.send(verb, args, **options)


class WeightUpdate:
    """An open session; made by `Instance.weight_update`.

    Attributes:
        session: its token, for commands sent in another way.
        started, finished: the replies; `finished` once the block has ended well.
    """

    def __init__(self, instance: Instance, started: Reply, epoch: int | None) -> None:
        self.instance = instance
        self.started = started
        self.finished: Reply | None = None
        self.session: str | None = (started.result or {}).get("session")
        self._epoch = epoch

    async def load(self, update_info: JsonMap | list[JsonMap], timeout_s: float = UPDATE_TIMEOUT_S) -> Reply:
        """Load one chunk; raises as the methods of `Instance`."""
        return await self.instance.update_weights(
            update_info, timeout_s=timeout_s, epoch=self._epoch, session=self.session
        )

    async def abort(self) -> None:
        """End the session without a finish. Never raises: it may have ended already."""
        aborting = asyncio.ensure_future(
            self.instance.abort_weight_update(epoch=self._epoch, session=self.session, check=False)
        )
        try:
            await asyncio.shield(aborting)
        except (NoAnswer, BusError) as error:
            logger.warning("the session may still be open: %s", error)


def new_id() -> str:
    return secrets.token_hex(12)


def __getattr__(name: str) -> Any:
    """`Fleet`, too, is looked for here; its module is built on this one."""
    if name == "Fleet":
        from bus.fleet import Fleet

        return Fleet
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
