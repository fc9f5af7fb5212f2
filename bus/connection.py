"""One connection to NATS that is kept; the only module that knows nats-py.

nats-py's own reconnect is not used. It sends what was published during an outage afterwards, hangs
on an untrusted certificate, and leaves a connection deaf or closed for good after some errors. Here a
connection that ends, for whatever reason, is thrown away; a new one is made and given the
subscriptions of the old. So there is one path, and nothing is sent later than it was asked for.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import logging
import math
import os
import random
import secrets
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import nats.errors
import nats.js.errors
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig
from nats.js.kv import KeyValue

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2
"""For one attempt at one server."""
RECONNECT_WAIT_S = (0.1, 1.0)
"""Before the second, and at most before each later attempt; jittered."""
PING_INTERVAL_S = 2.0
PING_TIMEOUT_S = 2.0
"""A server that answers neither of two pings within this time is given up: a frozen one is found
within `PING_INTERVAL_S` + 2 x `PING_TIMEOUT_S`. Two, since a pause of our own loop ends the first."""
MAX_PENDING_BYTES = 64 * 1024 * 1024
"""What the server has not taken yet; beyond it publishing fails."""
WATCH_SILENCE_S = 10.0
"""A key-value watch that heard nothing for this long is made anew: nats-py's may be deaf."""
PASSES = 6
"""Of the loop, from a question that is queued to its answer (sent, received, parsed, handed over), and
some to spare. An idle loop makes them in no time."""
LOOK_EVERY_S = 10.0
"""`changes_on` says so at least this often: what tells of a change may have been lost."""
LOOK_AGAIN_S = (0.02, 0.2, 1.0)
"""After a message, also: it may be heard before the server has stored it."""
WATCH_INACTIVE_S = 15.0
"""The server forgets a consumer that nobody listens to after this time."""
JETSTREAM_TIMEOUT_S = 2.0

_SCHEMES = ("nats", "tls", "ws", "wss")
_NO_RESPONDERS = "503"
# JSNoMessageFoundErr, JSStreamNotFoundErr, JSStreamNameExistErr, and JSStreamWrongLastSequence in two
# forms, of nats-server.
_NO_MESSAGE, _NO_STREAM, _STREAM_EXISTS = 10037, 10059, 10058
_WRONG_SEQUENCE = (10071, 10164)
_T = TypeVar("_T")


class BusError(Exception):
    """The bus could not do it; the text is one line for a person."""


class Unreachable(BusError):
    """No server answered in time."""


class Refused(BusError):
    """The server does not accept our credentials."""


class TlsFailed(BusError):
    """No encrypted connection could be made."""


class NotConnected(BusError):
    """There is no connection now; a new one is being tried, unless the bus is closed."""


class Interrupted(BusError):
    """The connection was lost before the answer came; what was asked may or may not have happened."""


class NoResponders(BusError):
    """Nobody listens on the subject."""


class Timeout(BusError):
    """No answer in time; what was asked may or may not have happened."""


class TooLarge(BusError):
    """The message exceeds the server's `max_payload`."""


class NoJetStream(BusError):
    """The server does not offer JetStream, or is too old."""


class NoBucket(BusError):
    """The key-value bucket does not exist."""


class NoStream(BusError):
    """The stream does not exist."""


class WrongRevision(BusError):
    """Somebody else changed the key first; nothing was stored."""


@dataclass(frozen=True)
class Credentials:
    """How to authenticate; a user in the URL works as well.

    Attributes:
        creds_file: a NATS `.creds` file (JWT and seed), read at each connect.
        tls_ca: the authority to trust instead of the system's. This or a client certificate makes
            an encrypted connection mandatory, as does a `tls://` URL.
    """

    creds_file: str | None = None
    user: str | None = None
    password: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """What arrived. `reply` is empty if no answer is wanted."""

    subject: str
    data: bytes
    reply: str


class UpdateKind(Enum):
    PUT = "put"
    DELETE = "delete"
    """Its writer removed it."""
    EXPIRED = "expired"
    """Nobody renewed it, or it was gone when we looked again after a gap."""
    SYNCED = "synced"
    """No key: all that existed when the watch began, or began anew, has been told."""


@dataclass(frozen=True, slots=True)
class KvUpdate:
    key: str
    value: bytes | None
    kind: UpdateKind


@dataclass(frozen=True, slots=True)
class KvValue:
    """What a key holds.

    Attributes:
        value: None if the key is absent, deleted, expired or empty.
        revision: for `kv_update`; 0 if nothing was ever stored.
    """

    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A message of a stream."""

    sequence: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """
    Attributes:
        created: changes when the stream is deleted and made anew; its numbers begin again then.
        last: sequence of the last message ever stored, 0 before the first.
    """

    created: str
    last: int


class _Inlet(asyncio.Queue[Msg]):
    """Stands in for a subscription's queue and hands each message over at once.

    nats-py runs one task for each subscription, so that messages of two subscriptions overtake
    each other. With this they arrive in the order in which the server sent them.
    """

    def __init__(self, handler: Callable[[Msg], None]) -> None:
        super().__init__()
        self._handler = handler

    def put_nowait(self, item: Msg) -> None:
        try:
            self._handler(item)
        except (Exception, asyncio.CancelledError):
            logger.exception("a message handler failed for %s", item.subject)


class _Link(NatsClient):
    """One connection of nats-py, from its start to its end."""

    def __init__(self, url: str, must_encrypt: bool) -> None:
        super().__init__()
        self.url = url
        self.must_encrypt = must_encrypt
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.buckets: dict[str, KeyValue] = {}
        self.background: set[asyncio.Task[Any]] = set()
        self.js: JetStreamContext = self.jetstream(timeout=JETSTREAM_TIMEOUT_S)

    def end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    @property
    def encrypted(self) -> bool:
        writer = getattr(self._transport, "_io_writer", None)
        return writer is not None and writer.get_extra_info("ssl_object") is not None

    @property
    def offers_jetstream(self) -> bool:
        return bool(self._server_info.get("jetstream", False))

    def _connect_command(self) -> bytes:
        # nats-py would send the password in the clear to a server that does not ask for TLS.
        if self.must_encrypt and not self.encrypted:
            raise nats.errors.SecureConnRequiredError
        command: bytes = super()._connect_command()
        return command

    async def listen(self, subject: str, handler: Callable[[Msg], None]) -> NatsSubscription:
        """Subscribe so that `handler` runs as messages arrive; it must only enqueue."""
        subscription = await self.subscribe(subject, pending_bytes_limit=0)
        early = subscription._pending_queue
        subscription._pending_queue = _Inlet(handler)
        while not early.empty():
            subscription._pending_queue.put_nowait(early.get_nowait())
        return subscription

    async def round_trip(self, timeout_s: float) -> bool:
        """Whether the server answers a ping in time.

        nats-py's reader dies of a pong that comes after its ping was given up, so none is.
        """
        ping = asyncio.create_task(self.rtt(timeout=24 * 3600))
        self.background.add(ping)
        ping.add_done_callback(self.background.discard)
        first: set[asyncio.Future[Any]] = {ping, self.ended}
        await _first_of(first, timeout_s)
        return ping.done() and not ping.cancelled() and ping.exception() is None

    async def barrier(self, timeout_s: float) -> bool:
        """Whether the server has taken in time all that was sent before.

        A ping overtakes what is queued, so one is not enough.
        """
        end = time.monotonic() + timeout_s
        await asyncio.sleep(0)
        return await self.round_trip(timeout_s) and await self.round_trip(end - time.monotonic())

    def discard(self) -> None:
        """Cut the connection and end every task of it, without waiting for the server."""
        self.end("closed")
        self._status = NatsClient.CLOSED
        tasks = [self._reading_task, self._ping_interval_task, self._flusher_task, *self.background]
        for subscription in self._subs.values():
            tasks.append(subscription._wait_for_msgs_task)
            heartbeat = subscription._jsi
            if heartbeat is not None:
                tasks += [heartbeat._hbtask, heartbeat._fctask]
        self._subs.clear()
        for task in tasks:
            if task is not None and not task.done():
                task.cancel()
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        elif self._transport is not None:
            with contextlib.suppress(Exception):
                self._transport.close()  # type: ignore[no-untyped-call]


class Subscription:
    """Interest in a subject, kept over reconnects until `unsubscribe`."""

    def __init__(self, bus: "Bus", subject: str, handler: Callable[[Message], None]) -> None:
        self.subject = subject
        self._bus = bus
        self._handler = handler
        self._link: _Link | None = None
        self._native: NatsSubscription | None = None
        self._open = True

    async def unsubscribe(self) -> None:
        """The handler is not called any more. Never raises."""
        self._open = False
        self._bus._subscriptions.discard(self)
        native, self._native = self._native, None
        if native is not None:
            with contextlib.suppress(Exception):
                await native.unsubscribe()

    async def _attach(self, link: _Link) -> None:
        if self._open and self._link is not link:
            self._link = link
            self._native = await link.listen(self.subject, self._deliver)

    def _deliver(self, msg: Msg) -> None:
        if self._open:
            self._handler(Message(msg.subject, msg.data, msg.reply))


class Bus:
    """A connection that is made again whenever it ends, until it is closed.

    While there is none, everything that needs it raises `NotConnected` at once: nothing is kept
    for later. Subscriptions and key-value watches go on by themselves after a reconnect.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        credentials: Credentials,
        name: str,
        on_connected_again: Callable[[], None] | None,
        on_lost: Callable[[str], None] | None,
        on_closed: Callable[[], None] | None,
        inbox_prefix: str,
    ) -> None:
        self._urls = _checked_urls(urls)
        self._discovered: list[str] = []
        self._credentials = credentials
        self._name = name
        self._on_connected_again = on_connected_again
        self._on_lost = on_lost
        self._on_closed = on_closed
        self._inbox = f"{inbox_prefix}.{secrets.token_hex(11)}"
        self._inbox_prefix = inbox_prefix
        self._tokens = itertools.count(1)
        self._waiting: dict[str, Callable[[Msg | None], None]] = {}
        self._subscriptions: set[Subscription] = set()
        self._link: _Link | None = None
        self._connected = asyncio.Event()
        self._closed = asyncio.get_running_loop().create_future()
        self._keeper: asyncio.Task[None] | None = None
        self._max_payload = 0
        self._connected_since = -math.inf
        self._connections = 0

    @classmethod
    async def connect(
        cls,
        urls: str | Sequence[str],
        credentials: Credentials | None = None,
        name: str = "watchkeeper",
        wait_s: float = 5.0,
        on_connected_again: Callable[[], None] | None = None,
        on_lost: Callable[[str], None] | None = None,
        on_closed: Callable[[], None] | None = None,
        inbox_prefix: str = "_INBOX",
    ) -> "Bus":
        """Connect, trying again for `wait_s` while no server can be reached.

        Args:
            urls: one or more, also separated by commas.
            on_connected_again: called after a reconnect, before messages of the subscriptions
                arrive again: what it enqueues comes before any of them.
            on_lost: called with the reason when the connection is lost.
            on_closed: called once, when `close` or `drain` has ended.

        The callbacks must only enqueue; an exception in one is logged.

        Raises:
            Unreachable, Refused, TlsFailed, BusError: the last attempt's reason. Wrong credentials
                and a failed TLS handshake are not tried again.
        """
        bus = cls(
            urls, credentials or Credentials(), name, on_connected_again, on_lost, on_closed, inbox_prefix
        )
        link = await bus._first_link(wait_s)
        bus._adopt(link)
        bus._keeper = asyncio.create_task(bus._keep_connected(link), name=f"bus {name}")
        return bus

    @property
    def connected(self) -> bool:
        return self._connected.is_set()

    @property
    def closed(self) -> bool:
        return self._closed.done()

    @property
    def url(self) -> str:
        """Where it is, or was last, connected to, without the password."""
        return _redacted(self._link.url if self._link is not None else self._urls[0])

    @property
    def max_payload(self) -> int:
        """The largest message that the server takes, in bytes."""
        return self._max_payload

    @property
    def connected_since(self) -> float:
        """When the connection, or the last one, was made; on the monotonic clock."""
        return self._connected_since

    @property
    def reconnects(self) -> int:
        """How often a new connection had to be made."""
        return max(0, self._connections - 1)

    @property
    def client_id(self) -> int | None:
        """The server's number for this connection; another one after each reconnect."""
        return self._link.client_id if self._link is not None else None

    async def wait_connected(self) -> None:
        """Return when there is a connection.

        Raises:
            NotConnected: the bus was closed.
        """
        if not self._connected.is_set():
            waiter = asyncio.ensure_future(self._connected.wait())
            try:
                await asyncio.wait({waiter, self._closed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiter.cancel()
        if self.closed:
            raise NotConnected("the bus is closed")

    # Core messages

    async def publish(self, subject: str, data: bytes) -> None:
        """Hand a message to the connection. It does not wait for the server.

        Raises:
            NotConnected, TooLarge, BusError: nothing was sent.
        """
        await self._publish(self._usable(), subject, data)

    async def respond(self, to: Message | str, data: bytes) -> None:
        """Answer a message, or publish to its reply subject; nothing happens if it has none."""
        reply = to.reply if isinstance(to, Message) else to
        if reply:
            await self.publish(reply, data)

    async def request(
        self, subject: str, data: bytes, timeout_s: float, over_reconnect: bool = True
    ) -> bytes:
        """Send a message and wait for the first answer, also over a reconnect.

        Args:
            over_reconnect: False if it may be repeated: an answer that was given while we were not
                connected is lost, so it does not wait longer than the connection lasts.

        Raises:
            NoResponders: nobody listens.
            Timeout: no answer in time; the request may still be carried out.
            Interrupted: the connection was lost meanwhile; only without `over_reconnect`.
            NotConnected, TooLarge, BusError: nothing was sent.
        """
        return (await self._request(subject, data, timeout_s, over_reconnect=over_reconnect)).data

    async def scatter(
        self, subject: str, data: bytes, timeout_s: float, expected: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Send one message and yield each answer as it comes.

        Ends after `expected` answers, after `timeout_s`, or at once if nobody listens.

        Raises:
            NotConnected, TooLarge, BusError: nothing was sent.
        """
        answers: asyncio.Queue[Msg | None] = asyncio.Queue()
        count = 0
        with self._inbox_for(answers.put_nowait) as reply:
            end = time.monotonic() + timeout_s
            await self._publish(self._usable(), subject, data, reply)
            while expected is None or count < expected:
                try:
                    async with asyncio.timeout(end - time.monotonic()):
                        msg = await answers.get()
                except TimeoutError:
                    return
                if msg is None or _is_no_responders(msg):
                    return
                count += 1
                yield msg.data

    async def subscribe(self, subject: str, handler: Callable[[Message], None]) -> Subscription:
        """Call `handler` for each message, in the order of arrival over all subscriptions.

        When it returns the server knows of it: a message published from now on arrives.
        The handler must only enqueue.

        Raises:
            NotConnected, BusError: there is no subscription.
        """
        link = self._usable()
        subscription = Subscription(self, subject, handler)
        self._subscriptions.add(subscription)
        try:
            await subscription._attach(link)
            if not await link.barrier(PING_TIMEOUT_S):
                raise NotConnected(f"{self.url} did not confirm the subscription to {subject}")
        except BaseException as error:
            await subscription.unsubscribe()
            if isinstance(error, nats.errors.Error):
                raise BusError(f"cannot subscribe to {subject}: {_text(error)}") from None
            raise
        return subscription

    # Key-value buckets

    async def ensure_bucket(
        self,
        name: str,
        ttl_s: float | None = 10,
        history: int = 1,
        limit_marker_ttl_s: float | None = 60,
    ) -> None:
        """Create a bucket unless it exists, with whatever settings.

        Raises:
            NoJetStream: the server lacks it, or is older than 2.11.
            NotConnected, Timeout, BusError: it may or may not exist now.
        """
        link = self._usable()
        if not link.offers_jetstream:
            raise NoJetStream(f"{self.url} has no JetStream: start nats-server with -js")
        link.buckets.pop(name, None)  # it may have been deleted since
        with contextlib.suppress(NoBucket):
            await self._bucket(link, name)
            return
        config = KeyValueConfig(
            bucket=name,
            ttl=ttl_s,
            history=history,
            limit_marker_ttl=limit_marker_ttl_s,
            direct=True,
        )
        try:
            link.buckets[name] = await self._jetstream(link.js.create_key_value(config))
        except BusError:
            # Somebody else may have made it in between.
            with contextlib.suppress(BusError):
                await self._bucket(link, name)
                return
            raise

    async def kv_put(self, bucket: str, key: str, value: bytes, timeout_s: float) -> int:
        """Store a value; the revision is returned.

        Two puts or deletes that one task starts after another reach the server in this order, even
        if the first is not waited for.

        Raises:
            NoBucket, NotConnected, Timeout, BusError: `Timeout` leaves open whether it happened.
        """
        return await self._store(bucket, key, value, timeout_s, None)

    async def kv_delete(self, bucket: str, key: str, timeout_s: float) -> None:
        """Remove a key, which need not exist. Raises as `kv_put`."""
        await self._store(bucket, key, b"", timeout_s, {"KV-Operation": "DEL"})

    async def kv_update(self, bucket: str, key: str, value: bytes, revision: int, timeout_s: float) -> int:
        """As `kv_put`, but only if the key still has this revision (0: was never stored).

        Raises:
            WrongRevision: it has another one.
            NoBucket, NotConnected, Timeout, BusError: as `kv_put`.
        """
        headers = {"Nats-Expected-Last-Subject-Sequence": str(revision)}
        return await self._store(bucket, key, value, timeout_s, headers)

    async def kv_get(self, bucket: str, key: str, timeout_s: float = JETSTREAM_TIMEOUT_S) -> bytes | None:
        """The value, or None if the key is absent, deleted, expired or empty.

        Raises:
            NoBucket, NotConnected, Timeout, BusError
        """
        return (await self.kv_read(bucket, key, timeout_s)).value

    async def kv_read(self, bucket: str, key: str, timeout_s: float = JETSTREAM_TIMEOUT_S) -> KvValue:
        """The value with its revision. Raises as `kv_get`."""
        try:
            found = await self._stored(f"KV_{bucket}", {"last_by_subj": f"$KV.{bucket}.{key}"}, timeout_s)
        except NoStream:
            raise NoBucket(f"{self.url} has no bucket {bucket}") from None
        # A deleted or expired key leaves a marker without data.
        return KvValue(found.data or None, found.sequence) if found else KvValue(None, 0)

    async def kv_entries(self, bucket: str, pattern: str = ">", timeout_s: float = 5.0) -> dict[str, bytes]:
        """All keys that match, with their values.

        Raises:
            NoBucket, NotConnected, Timeout, BusError
        """
        link = self._usable()
        found: dict[str, bytes] = {}
        try:
            async with asyncio.timeout(timeout_s):
                watcher = await self._watch(link, bucket, pattern)
                try:
                    async for entry in watcher:
                        if entry is None:
                            break
                        if entry.operation is None and entry.value:
                            found[entry.key] = entry.value
                finally:
                    await _stop(watcher)
        except TimeoutError:
            raise Timeout(f"{self.url} did not list {bucket} in {timeout_s:g} s") from None
        return found

    async def kv_watch(self, bucket: str, pattern: str = ">") -> AsyncGenerator[KvUpdate, None]:
        """Yield what exists, `SYNCED`, and then each change, for ever.

        After a reconnect, and after `WATCH_SILENCE_S` without news, all is read anew: what changed
        meanwhile is told, then `SYNCED` again. A bucket that does not exist is waited for, as if it
        were empty. Close it (`contextlib.aclosing`) when done.

        Raises:
            NotConnected: the bus was closed.
        """
        known: dict[str, int] = {}
        told_empty = False
        while True:
            await self.wait_connected()
            link = self._link
            if link is None:
                continue
            try:
                watcher = await self._watch(link, bucket, pattern)
            except BusError as error:
                logger.debug("cannot watch %s: %s", bucket, error)
                if isinstance(error, NoBucket) and (known or not told_empty):
                    for key in list(known):
                        del known[key]
                        yield KvUpdate(key, None, UpdateKind.EXPIRED)
                    told_empty = True
                    yield KvUpdate("", None, UpdateKind.SYNCED)
                await asyncio.wait({link.ended}, timeout=random.uniform(0.5, 1.0))
                continue
            try:
                seen: set[str] | None = set()
                while (entry := await _next_entry(watcher, link)) is not _OVER:
                    if entry is None:
                        for key in known.keys() - (seen or set()):
                            del known[key]
                            yield KvUpdate(key, None, UpdateKind.EXPIRED)
                        seen = None
                        yield KvUpdate("", None, UpdateKind.SYNCED)
                        continue
                    if seen is not None:
                        seen.add(entry.key)
                    update = _update(entry, known, live=seen is None)
                    if update is not None:
                        yield update
            finally:
                await _stop(watcher)

    def kv_changes(self, bucket: str, key: str) -> AsyncGenerator[None, None]:
        """As `changes_on`, for one key. Needs no consumer on the server, unlike `kv_watch`."""
        return self.changes_on(f"$KV.{bucket}.{key}")

    # Streams

    async def ensure_stream(self, name: str, subjects: Sequence[str], max_per_subject: int) -> None:
        """Create a stream in files unless it exists, with whatever settings.

        Raises:
            NoJetStream, NotConnected, Timeout, BusError: it may or may not exist now.
        """
        with contextlib.suppress(NoStream):
            await self.stream_info(name)
            return
        config = {
            "name": name,
            "subjects": list(subjects),
            "max_msgs_per_subject": max_per_subject,
            "storage": "file",
            "retention": "limits",
            "discard": "old",
            "num_replicas": 1,
        }
        answer = await self._ask_jetstream(f"STREAM.CREATE.{name}", config, JETSTREAM_TIMEOUT_S)
        error = answer.get("error")
        if error and error.get("err_code") != _STREAM_EXISTS:
            raise BusError(f"{self.url} did not create the stream {name}: {_reason(error)}")

    async def stream_info(self, name: str, timeout_s: float = JETSTREAM_TIMEOUT_S) -> StreamInfo:
        """
        Raises:
            NoStream, NoJetStream, NotConnected, Timeout, BusError
        """
        answer = await self._ask_jetstream(f"STREAM.INFO.{name}", {}, timeout_s)
        self._check_stream(name, answer)
        try:
            return StreamInfo(str(answer["created"]), int(answer["state"]["last_seq"]))
        except (KeyError, TypeError, ValueError):
            raise BusError(f"{self.url} told nothing readable of the stream {name}") from None

    async def stream_publish(
        self, stream: str, subject: str, data: bytes, timeout_s: float, once: str | None = None
    ) -> int:
        """Store a message; its sequence is returned.

        Args:
            once: a second message with the same text within the server's window (2 minutes) is not
                stored; the sequence is that of the first.

        Raises:
            NoStream: and nobody else listens there either.
            NotConnected, Timeout, TooLarge, BusError: `Timeout` leaves open whether it happened, and
                comes also if there is no stream but somebody who listens.
        """
        headers = {"Nats-Expected-Stream": stream, **({"Nats-Msg-Id": once} if once else {})}
        try:
            msg = await self._request(subject, data, timeout_s, headers)
        except NoResponders:
            raise NoStream(f"{self.url} has no stream {stream}") from None
        return self._sequence(msg, f"a message on {subject} in {stream}")

    async def stream_next(
        self, stream: str, subject: str, after: int, timeout_s: float = JETSTREAM_TIMEOUT_S
    ) -> Stored | None:
        """The first message of the subject whose sequence is higher than `after`, if there is one.

        Raises:
            NoStream, NoJetStream, NotConnected, Timeout, BusError
        """
        return await self._stored(stream, {"seq": after + 1, "next_by_subj": subject}, timeout_s)

    async def changes_on(self, subject: str) -> AsyncGenerator[None, None]:
        """Step when something stored under this subject may have changed, for ever: then look.

        First at once; after each message, more than once, since it may be heard before it is stored;
        after each reconnect; and every `LOOK_EVERY_S`. No step is made while there is no connection.
        Close it (`contextlib.aclosing`) when done.

        Raises:
            NotConnected: the bus was closed.
        """
        heard = asyncio.Event()
        subscription: Subscription | None = None
        last_link: _Link | None = None
        looks = iter(LOOK_AGAIN_S)
        try:
            while True:
                await self.wait_connected()
                link = self._link
                if link is None or link.ended.done():
                    await asyncio.sleep(0.01)  # the one who replaces it is about to
                    continue
                if subscription is None:
                    with contextlib.suppress(BusError):
                        subscription = await self.subscribe(subject, lambda _: heard.set())
                if heard.is_set() or link is not last_link:
                    heard.clear()
                    last_link = link
                    looks = iter(LOOK_AGAIN_S)
                yield
                waiting = asyncio.ensure_future(heard.wait())
                ends: set[asyncio.Future[Any]] = {waiting, link.ended}
                try:
                    wait_s = next(looks, LOOK_EVERY_S)
                    await asyncio.wait(ends, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()
        finally:
            if subscription is not None:
                await subscription.unsubscribe()

    # The end

    async def flush(self, timeout_s: float) -> None:
        """Wait until the server has taken all that was published before.

        Raises:
            NotConnected, Timeout
        """
        link = self._usable()
        if not await link.barrier(timeout_s):
            if link.ended.done():
                raise NotConnected(f"the connection to {self.url} was lost")
            raise Timeout(f"{self.url} did not answer in {timeout_s:g} s")

    async def drain(self, timeout_s: float) -> bool:
        """End all subscriptions, let the server take what was published, and close.

        Returns:
            Whether the server took it; never later than `timeout_s`.
        """
        end = time.monotonic() + timeout_s
        for subscription in list(self._subscriptions):
            await subscription.unsubscribe()
        delivered = False
        if self._link is not None and self.connected:
            delivered = await self._link.barrier(end - time.monotonic())
        await self.close()
        return delivered

    async def close(self) -> None:
        """Cut the connection at once. What was published just before may be lost: see `drain`."""
        if self.closed:
            return
        self._closed.set_result(None)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        self._connected.clear()
        if self._link is not None:
            self._link.discard()
            self._link = None
        for answer in list(self._waiting.values()):
            answer(None)
        await asyncio.sleep(0)  # for the tasks just cancelled
        self._tell(self._on_closed)

    async def __aenter__(self) -> "Bus":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Inside

    async def _keep_connected(self, link: _Link) -> None:
        while True:
            reason = await self._until_lost(link)
            self._connected.clear()
            self._link = None
            link.discard()
            logger.warning("lost the connection to %s: %s", _redacted(link.url), reason)
            self._tell(self._on_lost, reason)
            link = await self._reconnect()
            self._adopt(link)
            logger.info("connected to %s again", _redacted(link.url))
            self._tell(self._on_connected_again)
            try:
                for subscription in list(self._subscriptions):
                    await subscription._attach(link)
            except Exception as error:
                link.end(f"cannot subscribe again: {_text(error)}")

    async def _until_lost(self, link: _Link) -> str:
        while True:
            done, _ = await asyncio.wait({link.ended}, timeout=PING_INTERVAL_S)
            if done:
                return link.ended.result()
            if not (await link.round_trip(PING_TIMEOUT_S) or await link.round_trip(PING_TIMEOUT_S)):
                link.end(f"no answer to pings for {2 * PING_TIMEOUT_S:g} s")

    async def _first_link(self, wait_s: float) -> _Link:
        end = time.monotonic() + wait_s
        delays = _delays()
        while True:
            try:
                return await self._open(self._urls, max(0.1, end - time.monotonic()))
            except (Refused, TlsFailed):
                raise
            except BusError:
                remaining_s = end - time.monotonic()
                if remaining_s <= 0:
                    raise
            await asyncio.sleep(min(next(delays), remaining_s))

    async def _reconnect(self) -> _Link:
        delays = _delays()
        while True:
            urls = random.sample(self._urls, len(self._urls)) + self._discovered
            try:
                return await self._open(urls, CONNECT_TIMEOUT_S * len(urls))
            except BusError as error:
                logger.debug("not connected yet: %s", error)
            except Exception:
                logger.exception("could not reconnect")
            await asyncio.sleep(next(delays))

    def _adopt(self, link: _Link) -> None:
        self._link = link
        self._max_payload = link.max_payload
        self._connected_since = time.monotonic()
        self._connections += 1
        self._connected.set()
        base = urlsplit(link.url)
        user = f"{base.netloc.rpartition('@')[0]}@" if "@" in base.netloc else ""
        known = {urlsplit(url).netloc.rpartition("@")[2] for url in self._urls}
        self._discovered = [
            urlunsplit((base.scheme, user + server.netloc, "", "", ""))
            for server in link.discovered_servers
            if server.netloc not in known
        ]

    async def _open(self, urls: Sequence[str], timeout_s: float) -> _Link:
        """A connection to the first of the servers that takes us."""
        failures: list[BusError] = []
        end = time.monotonic() + timeout_s
        for url in urls:
            try:
                return await self._open_one(url, min(end - time.monotonic(), CONNECT_TIMEOUT_S))
            except BusError as error:
                failures.append(error)
        raise next((f for f in failures if isinstance(f, Refused | TlsFailed)), failures[-1])

    async def _open_one(self, url: str, timeout_s: float) -> _Link:
        context = _tls_context(self._credentials)
        scheme = urlsplit(url).scheme
        must_encrypt = scheme == "tls" or (context is not None and scheme != "wss")
        link = _Link(url, must_encrypt)
        problems: list[Exception] = []

        async def on_error(error: Exception) -> None:
            problems.append(error)
            del problems[:-8]
            if "permissions violation" in str(error):
                logger.error("the broker forbids it: %s", _text(error))

        async def on_end() -> None:
            link.end(_text(link.last_error or (problems[-1] if problems else None)))

        options: dict[str, Any] = {}
        if context is not None:
            options["tls"] = context
        if self._credentials.creds_file is not None:
            _check_creds_file(self._credentials.creds_file)
            options["user_credentials"] = self._credentials.creds_file
        if self._credentials.user is not None:
            options["user"] = self._credentials.user
            options["password"] = self._credentials.password or ""
        try:
            async with asyncio.timeout(max(timeout_s, 0.05)):
                await _cancellable(
                    link.connect(
                        [url],
                        name=self._name,
                        error_cb=on_error,
                        disconnected_cb=on_end,
                        closed_cb=on_end,
                        allow_reconnect=False,
                        max_reconnect_attempts=1,
                        reconnect_time_wait=0,
                        connect_timeout=CONNECT_TIMEOUT_S,
                        ping_interval=24 * 3600,  # pings are sent by `_until_lost`
                        pending_size=0,  # nothing is kept while disconnected
                        inbox_prefix=self._inbox_prefix,
                        **options,
                    )
                )
                if not link.is_connected:
                    raise ConnectionResetError("the broker closed the connection during the handshake")
                await link.listen(f"{self._inbox}.*", self._answered)
        except BaseException as error:
            link.discard()
            if isinstance(error, Exception):
                raise _connect_error(url, error, problems, must_encrypt) from None
            raise

        def deaf(_: object) -> None:
            link.end(_text(link.last_error or (problems[-1] if problems else None)))

        reader = link._reading_task
        if reader is None:
            raise BusError("nats-py has no reading task")
        reader.add_done_callback(deaf)  # closed_cb is not called after every error
        return link

    def _usable(self) -> _Link:
        link = self._link
        if self.closed:
            raise NotConnected("the bus is closed")
        if link is None or link.ended.done() or not link.is_connected:
            raise NotConnected(f"not connected to {self.url}")
        return link

    async def _publish(
        self,
        link: _Link,
        subject: str,
        data: bytes,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # Nothing here may wait before nats-py has queued the message: `kv_put` promises an order.
        if len(data) > link.max_payload:
            raise TooLarge(f"{len(data)} bytes for {subject}: {self.url} takes {link.max_payload}")
        if link.pending_data_size > MAX_PENDING_BYTES:
            raise BusError(f"{self.url} does not take what is sent to it")
        try:
            await link.publish(subject, data, reply, dict(headers) if headers else None)
        except nats.errors.Error as error:
            raise BusError(f"cannot publish to {subject}: {_text(error)}") from None

    async def _request(
        self,
        subject: str,
        data: bytes,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        over_reconnect: bool = True,
    ) -> Msg:
        answer: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()

        def arrived(msg: Msg | None) -> None:
            if not answer.done():
                answer.set_result(msg)

        with self._inbox_for(arrived) as reply:
            link = self._usable()
            await self._publish(link, subject, data, reply, headers)
            ends: set[asyncio.Future[Any]] = {answer} if over_reconnect else {answer, link.ended}
            await _first_of(ends, timeout_s)
            if not answer.done():
                if not over_reconnect and link.ended.done():
                    raise Interrupted(f"the connection to {self.url} was lost")
                raise Timeout(f"no answer on {subject} in {timeout_s:g} s")
            msg = answer.result()
        if msg is None:
            raise NotConnected("the bus was closed")
        if _is_no_responders(msg):
            raise NoResponders(f"nobody listens on {subject}")
        return msg

    @contextlib.contextmanager
    def _inbox_for(self, arrived: Callable[[Msg | None], None]) -> Iterator[str]:
        """A reply subject; `arrived` gets its messages, and None when the bus is closed."""
        token = str(next(self._tokens))
        self._waiting[token] = arrived
        try:
            yield f"{self._inbox}.{token}"
        finally:
            del self._waiting[token]

    def _answered(self, msg: Msg) -> None:
        arrived = self._waiting.get(msg.subject.rpartition(".")[2])
        if arrived is not None:
            arrived(msg)

    async def _store(
        self, bucket: str, key: str, value: bytes, timeout_s: float, headers: Mapping[str, str] | None
    ) -> int:
        try:
            msg = await self._request(f"$KV.{bucket}.{key}", value, timeout_s, headers)
        except NoResponders:
            raise NoBucket(f"{self.url} has no bucket {bucket}") from None
        return self._sequence(msg, f"{key} in {bucket}")

    def _sequence(self, msg: Msg, what: str) -> int:
        """What the server says of a message that was to be stored."""
        try:
            answer = json.loads(msg.data)
            if "error" not in answer:
                return int(answer["seq"])
            reason, code = _reason(answer["error"]), answer["error"].get("err_code")
        except (ValueError, KeyError, TypeError, AttributeError):
            reason, code = "the answer cannot be read", None
        if code in _WRONG_SEQUENCE:
            raise WrongRevision(f"{what} has changed meanwhile")
        raise BusError(f"{self.url} did not store {what}: {reason}")

    async def _stored(self, stream: str, wanted: Mapping[str, Any], timeout_s: float) -> Stored | None:
        answer = await self._ask_jetstream(f"STREAM.MSG.GET.{stream}", wanted, timeout_s)
        if (answer.get("error") or {}).get("err_code") == _NO_MESSAGE:
            return None
        self._check_stream(stream, answer)
        try:
            message = answer["message"]
            return Stored(int(message["seq"]), base64.b64decode(message.get("data", "")))
        except (KeyError, TypeError, ValueError):
            raise BusError(f"{self.url} gave no readable message of {stream}") from None

    async def _ask_jetstream(self, what: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            msg = await self._request(f"$JS.API.{what}", json.dumps(body).encode(), timeout_s)
        except NoResponders:
            raise NoJetStream(_no_jetstream(self.url)) from None
        try:
            answer = json.loads(msg.data)
            if not isinstance(answer, dict) or not isinstance(answer.get("error", {}), dict):
                raise ValueError
        except ValueError:
            raise BusError(f"{self.url} gave no readable answer to {what}") from None
        return answer

    def _check_stream(self, name: str, answer: Mapping[str, Any]) -> None:
        error = answer.get("error")
        if not error:
            return
        if error.get("err_code") == _NO_STREAM:
            raise NoStream(f"{self.url} has no stream {name}")
        raise BusError(f"{self.url}, asked about {name}: {_reason(error)}")

    async def _bucket(self, link: _Link, name: str) -> KeyValue:
        if name not in link.buckets:
            link.buckets[name] = await self._jetstream(link.js.key_value(name))
        return link.buckets[name]

    async def _watch(self, link: _Link, bucket: str, pattern: str) -> KeyValue.KeyWatcher:
        kv = await self._bucket(link, bucket)
        watcher = await self._jetstream(kv.watch(pattern, inactive_threshold=WATCH_INACTIVE_S))
        if watcher._init_done:
            try:
                await self._jetstream(_check_empty(watcher))
            except BaseException:
                await _stop(watcher)
                raise
        return watcher

    async def _jetstream(self, call: Coroutine[Any, Any, _T]) -> _T:
        """Await a JetStream call of nats-py and turn its errors into ours."""
        try:
            return await _cancellable(call)
        except nats.js.errors.KeyValueLimitMarkerTTLNotSupportedError:
            raise NoJetStream(f"{self.url} is too old: nats-server 2.11 or newer is needed") from None
        except nats.js.errors.NotFoundError as error:
            raise NoBucket(f"{self.url} has no such bucket: {_text(error)}") from None
        except (
            nats.js.errors.ServiceUnavailableError,
            nats.js.errors.NoStreamResponseError,
            nats.errors.NoRespondersError,
        ):
            raise NoJetStream(_no_jetstream(self.url)) from None
        except nats.errors.ConnectionClosedError:
            raise NotConnected(f"the connection to {self.url} was lost") from None
        except TimeoutError:
            raise Timeout(f"JetStream at {self.url} did not answer") from None
        except nats.errors.Error as error:
            raise BusError(f"JetStream at {self.url}: {_text(error)}") from None

    def _tell(self, callback: Callable[..., None] | None, *args: Any) -> None:
        if callback is not None:
            try:
                callback(*args)
            except Exception:
                logger.exception("a callback of the bus failed")


_OVER = KeyValue.Entry("", "", None, None, None, None, "over")
"""The watch has ended or is to be made anew."""


async def _check_empty(watcher: KeyValue.KeyWatcher) -> None:
    """Take back the word that there is nothing to read, if it came too early.

    nats-py 2.16 gives it when nothing is left to be sent and nothing has arrived; but what was sent may still
    be on its way. Only what the server has delivered tells.
    """
    info = await watcher._sub.consumer_info()  # type: ignore[union-attr]
    if not info.num_pending and not (info.delivered and info.delivered.consumer_seq):
        return
    queue = watcher._updates
    entries = [entry for _ in range(queue.qsize()) if (entry := queue.get_nowait()) is not None]
    watcher._init_done = False
    for entry in entries:
        queue.put_nowait(entry)
        if isinstance(entry, KeyValue.Entry) and entry.delta == 0 and not watcher._init_done:
            queue.put_nowait(None)
            watcher._init_done = True


async def _next_entry(watcher: KeyValue.KeyWatcher, link: _Link) -> KeyValue.Entry | None:
    """The next entry, None after the last one that existed at the start, or `_OVER`."""
    update = asyncio.ensure_future(watcher.updates(timeout=WATCH_SILENCE_S))  # type: ignore[no-untyped-call]
    try:
        await asyncio.wait({update, link.ended}, return_when=asyncio.FIRST_COMPLETED)
        if link.ended.done():
            return _OVER
        entry: object = update.result()
    except TimeoutError:
        return _OVER
    finally:
        update.cancel()
    return entry if entry is None or isinstance(entry, KeyValue.Entry) else _OVER


def _update(entry: KeyValue.Entry, known: dict[str, int], live: bool) -> KvUpdate | None:
    """What is new in this entry, or None.

    Args:
        known: the revision of each present key.
        live: it has happened now. A key that is gone is told then even if it was never seen: of what
            came and went at once only the end is sent, and others may have told of it.
    """
    if entry.operation is not None or not entry.value:
        if known.pop(entry.key, None) is None and not live:
            return None
        expired = entry.operation == "PURGE"
        return KvUpdate(entry.key, None, UpdateKind.EXPIRED if expired else UpdateKind.DELETE)
    revision = entry.revision or 0
    if known.get(entry.key) == revision:
        return None
    known[entry.key] = revision
    return KvUpdate(entry.key, entry.value, UpdateKind.PUT)


async def _first_of(ends: set[asyncio.Future[Any]], timeout_s: float) -> None:
    """Wait for one of them; a time-out counts only once our own loop has caught up.

    Where hundreds of connections share a loop, it may take longer than the time for an answer to send
    the question and to read what has arrived.
    """
    await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for _ in range(PASSES):
        if any(end.done() for end in ends):
            return
        await asyncio.sleep(0)


async def _cancellable(call: Coroutine[Any, Any, _T]) -> _T:
    """Await a coroutine of nats-py so that a cancellation of ours always arrives.

    It uses `asyncio.wait_for`, which before Python 3.12 swallows a cancellation that comes together
    with the result.
    """
    task = asyncio.create_task(call)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, even if we left
    try:
        await asyncio.wait({task})
    finally:
        if not task.done():
            task.cancel()
    return task.result()


def _reason(error: Mapping[str, Any]) -> str:
    return str(error.get("description", "no reason given"))


def _no_jetstream(url: str) -> str:
    return (
        f"JetStream does not answer at {url}: start nats-server with -js, "
        "and enable JetStream for this account"
    )


async def _stop(watcher: KeyValue.KeyWatcher) -> None:
    with contextlib.suppress(Exception):
        await watcher.stop()  # type: ignore[no-untyped-call]


def _delays() -> Iterator[float]:
    delay_s, longest_s = RECONNECT_WAIT_S
    while True:
        yield random.uniform(0.5, 1.0) * delay_s
        delay_s = min(2 * delay_s, longest_s)


def _is_no_responders(msg: Msg) -> bool:
    return not msg.data and bool(msg.headers) and (msg.headers or {}).get("Status") == _NO_RESPONDERS


def _checked_urls(urls: str | Sequence[str]) -> list[str]:
    listed = urls.split(",") if isinstance(urls, str) else [part for url in urls for part in url.split(",")]
    checked = []
    for url in map(str.strip, listed):
        if not url:
            continue
        full = url if "://" in url else f"nats://{url}"
        try:
            parts = urlsplit(full)
            if (
                parts.scheme not in _SCHEMES
                or not parts.hostname
                or (parts.port is not None and not parts.port)
            ):
                raise ValueError
        except ValueError:
            raise BusError(f"{_redacted(full)!r} is not a NATS URL such as nats://host:4222") from None
        checked.append(full)
    if not checked:
        raise BusError("no NATS URL was given")
    return checked


def _redacted(url: str) -> str:
    scheme, slashes, rest = url.partition("://")
    return f"{scheme}{slashes}{rest.rpartition('@')[2]}"


def _text(error: BaseException | None) -> str:
    if error is None:
        return "the connection was closed"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno:
        return os.strerror(error.errno).lower()
    text = " ".join(str(error).split()).removeprefix("nats: ").strip("'")
    return text or type(error).__name__


def _tls_context(credentials: Credentials) -> ssl.SSLContext | None:
    if credentials.tls_ca is None and credentials.tls_cert is None:
        return None
    try:
        context = ssl.create_default_context(cafile=credentials.tls_ca)
        if credentials.tls_cert is not None:
            context.load_cert_chain(credentials.tls_cert, credentials.tls_key)
    except (OSError, ValueError) as error:
        files = ", ".join(
            file for file in (credentials.tls_ca, credentials.tls_cert, credentials.tls_key) if file
        )
        raise TlsFailed(f"cannot use the TLS files {files}: {_text(error)}") from None
    return context


def _check_creds_file(path: str) -> None:
    # nats-py looks for these lines without ever noticing the end of the file.
    try:
        with open(path, "rb") as file:
            content = file.read(1024 * 1024)
    except OSError as error:
        raise Refused(f"cannot read the credentials file {path}: {error.strerror}") from None
    if b"BEGIN NATS USER JWT" not in content or b"BEGIN USER NKEY SEED" not in content:
        raise Refused(f"{path} is not a NATS credentials file")


def _connect_error(url: str, error: Exception, problems: Sequence[Exception], must_encrypt: bool) -> BusError:
    """Who is at fault when a connection could not be made."""
    where = _redacted(url)
    causes = [error, *reversed(problems)]
    texts = [_text(cause) for cause in causes]
    if isinstance(error, BusError):
        return error
    if isinstance(error, ImportError):
        return Refused(f"a credentials file needs the package nkeys (pip install 'nats-py[nkeys]'): {error}")
    for cause, text in zip(causes, texts, strict=True):
        if isinstance(cause, nats.errors.AuthorizationError) or "auth" in text.lower():
            return Refused(f"the broker at {where} refused the credentials: {text}")
        if isinstance(cause, nats.errors.SecureConnRequiredError):
            return TlsFailed(f"the broker at {where} does not offer TLS, but TLS was asked for")
        if isinstance(cause, ssl.SSLError):
            return TlsFailed(f"no encrypted connection to the broker at {where}: {text}")
    if isinstance(error, ConnectionResetError) and must_encrypt:
        return TlsFailed(f"the broker at {where} ended the TLS handshake; it may want a client certificate")
    reason = next(
        (text for cause, text in zip(causes, texts, strict=True) if isinstance(cause, OSError)), texts[0]
    )
    if isinstance(error, TimeoutError):
        reason = "no answer in time"
    return Unreachable(f"no broker reachable at {where}: {reason}")
