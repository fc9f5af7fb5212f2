"""The connection, against real servers that stop, freeze and refuse."""

import asyncio
import contextlib
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from nats.js import JetStreamContext

from bus import connection, subjects
from bus.connection import (
    Bus,
    BusError,
    Credentials,
    KvUpdate,
    Message,
    NoBucket,
    NoJetStream,
    NoResponders,
    NotConnected,
    Refused,
    Timeout,
    TlsFailed,
    TooLarge,
    Unreachable,
    UpdateKind,
)
from tests.broker import NatsServer, eventually, free_port
from tests.bus.conftest import Connect
from tests.conftest import StartNats

BUCKET = subjects.STATES_BUCKET


class Seen:
    """Collects what a watch tells."""

    def __init__(self, bus: Bus, bucket: str = BUCKET, pattern: str = ">") -> None:
        self.updates: list[KvUpdate] = []
        self._task = asyncio.create_task(self._run(bus, bucket, pattern))

    async def _run(self, bus: Bus, bucket: str, pattern: str) -> None:
        async with contextlib.aclosing(bus.kv_watch(bucket, pattern)) as updates:
            async for update in updates:
                self.updates.append(update)

    def kinds(self, key: str) -> list[UpdateKind]:
        return [u.kind for u in self.updates if u.key == key]

    def syncs(self) -> int:
        return len(self.kinds(""))

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


async def test_request_and_answer(bus: Bus, connect: Connect) -> None:
    other = await connect()

    def answer(message: Message) -> None:
        tasks.append(asyncio.ensure_future(other.respond(message, b"re: " + message.data)))

    tasks: list[asyncio.Future[None]] = []
    await other.subscribe("ask.*", answer)
    assert await bus.request("ask.me", b"hello", timeout_s=1) == b"re: hello"
    await asyncio.gather(*tasks)


async def test_nobody_listens_is_known_at_once(bus: Bus) -> None:
    started = time.monotonic()
    with pytest.raises(NoResponders):
        await bus.request("nobody.here", b"", timeout_s=5)
    assert time.monotonic() - started < 5


async def test_no_answer_is_a_timeout(bus: Bus) -> None:
    await bus.subscribe("silent", lambda _: None)
    with pytest.raises(Timeout):
        await bus.request("silent", b"", timeout_s=0.05)


async def test_a_busy_loop_is_not_taken_for_a_silent_server(bus: Bus, nats_server: NatsServer) -> None:
    """As where hundreds of instances share one: a time-out counts once what has arrived was read."""
    await bus.ensure_bucket(BUCKET, ttl_s=10, limit_marker_ttl_s=60)
    loop = asyncio.get_running_loop()

    busy = True

    def hog() -> None:
        time.sleep(0.1)
        if busy:
            loop.call_soon(hog)

    hog()
    try:
        for _ in range(3):
            await bus.kv_put(BUCKET, "key", b"1", 0.05)
        nats_server.freeze()
        with pytest.raises(Timeout):
            await bus.kv_put(BUCKET, "key", b"2", 0.05)
    finally:
        busy = False
        nats_server.thaw()


async def test_subscription_is_known_to_the_server_when_it_returns(bus: Bus, connect: Connect) -> None:
    """nats-py's flush overtakes the queued subscription, and loses first messages."""
    other = await connect()
    for number in range(200):
        got: list[bytes] = []
        subscription = await bus.subscribe(f"fresh.{number}", lambda m, got=got: got.append(m.data))  # type: ignore[misc]
        await other.publish(f"fresh.{number}", b"x")
        await eventually(lambda got=got: got, within_s=1, every_s=0)  # type: ignore[misc]
        await subscription.unsubscribe()


async def test_messages_of_all_subscriptions_arrive_in_order(bus: Bus, connect: Connect) -> None:
    """A command to everybody must not overtake an earlier one to this instance, nor fall behind."""
    other, got = await connect(), []
    for subject in ("order.one", "order.all", "order.three"):
        await bus.subscribe(subject, lambda m: got.append(int(m.data)))
    for number in range(3000):
        await other.publish(("order.one", "order.all", "order.three")[number * 7 % 3], b"%d" % number)
    await eventually(lambda: len(got) == 3000)
    assert got == sorted(got)


async def test_a_failing_handler_does_not_end_its_subscription(bus: Bus) -> None:
    got: list[bytes] = []

    def handler(message: Message) -> None:
        got.append(message.data)
        if message.data == b"bad":
            raise asyncio.CancelledError if len(got) == 1 else ValueError

    await bus.subscribe("s", handler)
    for data in (b"bad", b"bad", b"good"):
        await bus.publish("s", data)
    await eventually(lambda: got == [b"bad", b"bad", b"good"])


async def test_no_message_after_unsubscribe(bus: Bus) -> None:
    got: list[bytes] = []
    subscription = await bus.subscribe("s", lambda m: got.append(m.data))
    await bus.publish("s", b"1")
    await eventually(lambda: got)
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    await bus.publish("s", b"2")
    await bus.flush(1)
    assert got == [b"1"]


async def test_scatter_gathers_answers_until_all_have_come(bus: Bus, connect: Connect) -> None:
    workers = [await connect() for _ in range(3)]
    tasks = []
    for number, worker in enumerate(workers):
        await worker.subscribe(
            "all",
            lambda m, w=worker, n=number: tasks.append(asyncio.ensure_future(w.respond(m, b"%d" % n))),  # type: ignore[misc]
        )
    started = time.monotonic()
    answers = [data async for data in bus.scatter("all", b"", timeout_s=5, expected=3)]
    assert sorted(answers) == [b"0", b"1", b"2"]
    assert time.monotonic() - started < 5
    assert len([data async for data in bus.scatter("all", b"", timeout_s=0.2)]) == 3
    await asyncio.gather(*tasks)


async def test_scatter_to_nobody_ends_at_once(bus: Bus) -> None:
    started = time.monotonic()
    assert [data async for data in bus.scatter("nobody", b"", timeout_s=5)] == []
    assert time.monotonic() - started < 5


async def test_too_large_a_message_is_refused_and_the_connection_lives(bus: Bus) -> None:
    assert bus.max_payload == 1024 * 1024  # the server's default
    with pytest.raises(TooLarge):
        await bus.publish("big", b"x" * (bus.max_payload + 1))
    await bus.flush(1)


async def test_unreachable_broker_is_tried_for_the_given_time() -> None:
    started = time.monotonic()
    with pytest.raises(Unreachable, match=r"^no broker reachable at nats://127\.0\.0\.1:\d+: .*refused"):
        await Bus.connect(f"nats://127.0.0.1:{free_port()}", wait_s=0.6)
    assert 0.3 < time.monotonic() - started < 7.5


async def test_broker_that_comes_late_is_found(start_nats: StartNats) -> None:
    port = free_port()
    connecting = asyncio.create_task(Bus.connect(f"nats://127.0.0.1:{port}", wait_s=10))
    await start_nats(port=port)
    async with await connecting as bus:
        await bus.flush(1)


async def test_frozen_broker_at_the_start_is_unreachable(nats_server: NatsServer) -> None:
    nats_server.freeze()
    with pytest.raises(Unreachable, match="no answer in time"):
        await Bus.connect(nats_server.url, wait_s=0.5)


@pytest.mark.parametrize("url", ["http://x:1", "nats://", "nats://h:99999", "nats://h:x", "", " , "])
async def test_what_is_no_nats_url_is_refused(url: str) -> None:
    with pytest.raises(BusError, match="NATS URL"):
        await Bus.connect(url, wait_s=0)


PASSWORD = 'authorization { user: "u", password: "secret" }'


async def test_wrong_password_is_refused_quickly(start_nats: StartNats) -> None:
    server = await start_nats(PASSWORD)
    started = time.monotonic()
    with pytest.raises(Refused, match="refused the credentials") as refused:
        await Bus.connect(server.url, Credentials(user="u", password="wrong"), wait_s=20)
    assert time.monotonic() - started < 10
    assert "wrong" not in str(refused.value)
    with pytest.raises(Refused):
        await Bus.connect(f"nats://u:wrong@127.0.0.1:{server.port}", wait_s=20)


async def test_right_password_from_options_or_url(start_nats: StartNats) -> None:
    server = await start_nats(PASSWORD)
    async with await Bus.connect(server.url, Credentials(user="u", password="secret")) as bus:
        await bus.flush(1)
    async with await Bus.connect(f"nats://u:secret@127.0.0.1:{server.port}") as bus:
        await bus.flush(1)
        assert bus.url == server.url


async def test_tls_is_never_silently_left_out(nats_server: NatsServer) -> None:
    """nats-py would connect in the clear."""
    with pytest.raises(TlsFailed, match="does not offer TLS"):
        await Bus.connect(nats_server.url.replace("nats:", "tls:"), wait_s=5)


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, str]:
    """An authority `ca`, and `server` and `client` certificates signed by it; `other` is a stranger."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    files: dict[str, str] = {}
    for name in ("ca", "other", "server", "client"):
        key, cert = str(tmp_path / f"{name}.key"), str(tmp_path / f"{name}.pem")
        signed = ["-CA", files["ca"], "-CAkey", files["ca_key"]] if name in ("server", "client") else []
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-keyout", key, "-out", cert, "-days", "2", "-subj", f"/CN={name}",
             "-addext", "subjectAltName=IP:127.0.0.1", *signed],
            check=True,
            capture_output=True,
        )  # fmt: skip
        files |= {name: cert, f"{name}_key": key}
    return files


def tls(files: dict[str, str], verify: bool = False) -> str:
    return (
        f'tls {{ cert_file: "{files["server"]}", key_file: "{files["server_key"]}", '
        f'ca_file: "{files["ca"]}", verify: {str(verify).lower()} }}'
    )


async def test_tls(start_nats: StartNats, connect: Connect, certificates: dict[str, str]) -> None:
    server = await start_nats(tls(certificates))
    bus = await connect(server.url, credentials=Credentials(tls_ca=certificates["ca"]))
    await bus.flush(1)
    await server.restart()
    await eventually(lambda: bus.reconnects == 1 and bus.connected)
    await bus.flush(1)


async def test_an_untrusted_certificate_is_said_quickly(
    start_nats: StartNats, certificates: dict[str, str]
) -> None:
    """nats-py's own reconnect would hang here for ever."""
    server = await start_nats(tls(certificates))
    for credentials in (None, Credentials(tls_ca=certificates["other"])):
        started = time.monotonic()
        with pytest.raises(TlsFailed, match="certificate verify failed"):
            await Bus.connect(server.url, credentials, wait_s=20)
        assert time.monotonic() - started < 15


async def test_client_certificates(
    start_nats: StartNats, connect: Connect, certificates: dict[str, str]
) -> None:
    server = await start_nats(tls(certificates, verify=True))
    ca, cert, key = certificates["ca"], certificates["client"], certificates["client_key"]
    bus = await connect(server.url, credentials=Credentials(tls_ca=ca, tls_cert=cert, tls_key=key))
    await bus.flush(1)
    with pytest.raises(TlsFailed):
        await Bus.connect(server.url, Credentials(tls_ca=ca), wait_s=20)


async def test_unreadable_tls_and_credential_files(nats_server: NatsServer, tmp_path: Path) -> None:
    nonsense = tmp_path / "creds"
    nonsense.write_text("hello")
    with pytest.raises(TlsFailed, match=r"/no/ca\.pem"):
        await Bus.connect(nats_server.url, Credentials(tls_ca="/no/ca.pem"), wait_s=5)
    with pytest.raises(Refused, match="cannot read the credentials file /no/creds"):
        await Bus.connect(nats_server.url, Credentials(creds_file="/no/creds"), wait_s=5)
    with pytest.raises(Refused, match="is not a NATS credentials file"):
        await Bus.connect(nats_server.url, Credentials(creds_file=str(nonsense)), wait_s=5)


async def test_broker_away_is_said_at_once_and_nothing_is_sent_later(
    nats_server: NatsServer, connect: Connect
) -> None:
    reasons: list[str] = []
    bus = await connect(on_lost=reasons.append)
    got: list[bytes] = []
    await bus.subscribe("s", lambda m: got.append(m.data))
    await nats_server.stop()
    await eventually(lambda: not bus.connected)
    assert len(reasons) == 1
    for call in (
        bus.publish("s", b"stale"),
        bus.request("s", b"stale", 1),
        bus.subscribe("t", print),
        bus.kv_put(BUCKET, "k", b"", 1),
        bus.kv_get(BUCKET, "k"),
        bus.flush(1),
        bus.ensure_bucket(BUCKET),
    ):
        started = time.monotonic()
        with pytest.raises(NotConnected):
            await call
        assert time.monotonic() - started < 5
    await nats_server.start()
    await eventually(lambda: bus.connected)
    await bus.publish("s", b"fresh")
    await eventually(lambda: got)
    await bus.flush(1)
    assert got == [b"fresh"]


async def test_subscriptions_live_on_after_a_restart(nats_server: NatsServer, connect: Connect) -> None:
    """And what `on_connected_again` enqueues comes before the first message."""
    inbox: list[str] = []
    bus = await connect(on_connected_again=lambda: inbox.append("again"))
    other = await connect()
    await bus.subscribe("s", lambda m: inbox.append(m.data.decode()))
    for round in range(3):
        await nats_server.restart()
        await eventually(lambda: other.connected)

        async def arrived(round: int = round) -> bool:
            with contextlib.suppress(NotConnected):
                await other.publish("s", b"%d" % round)
            return str(round) in inbox

        await eventually(arrived)
    assert inbox.index("again") < inbox.index("0")
    assert inbox.count("again") == 3


async def test_answer_after_a_reconnect_still_reaches_the_asker(
    nats_server: NatsServer, connect: Connect
) -> None:
    """A weight update may take minutes; a short outage of the bus must not lose its reply."""
    bus, other = await connect(), await connect()
    asked: list[Message] = []
    await other.subscribe("slow", asked.append)
    waiting = asyncio.create_task(bus.request("slow", b"", timeout_s=10))
    await eventually(lambda: asked)
    before = time.monotonic()
    await nats_server.restart()
    await eventually(lambda: all(one.connected and one.connected_since > before for one in (bus, other)))
    await bus.flush(5)  # its subscription has reached the server before the answer does
    await other.respond(asked[0], b"done")
    assert await waiting == b"done"


async def test_frozen_broker_is_noticed_and_nothing_hangs(
    nats_server: NatsServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PING_INTERVAL_S", 0.6)
    monkeypatch.setattr(connection, "PING_TIMEOUT_S", 0.5)
    bus = await connect()
    nats_server.freeze()
    started = time.monotonic()
    with pytest.raises(Timeout):
        await bus.flush(0.2)
    with pytest.raises(Timeout):
        await bus.kv_delete(BUCKET, "k", 0.2)
    await bus.publish("s", b"x" * 1_000_000)
    assert time.monotonic() - started < 5
    await eventually(lambda: not bus.connected, within_s=3)
    nats_server.thaw()
    await eventually(lambda: bus.connected)
    await bus.flush(1)


async def test_late_pong_does_not_make_us_deaf(nats_server: NatsServer, bus: Bus) -> None:
    """nats-py's reader dies of a pong whose ping was given up."""
    got: list[bytes] = []
    await bus.subscribe("s", lambda m: got.append(m.data))
    nats_server.freeze()
    with pytest.raises(Timeout):
        await bus.flush(0.1)
    nats_server.thaw()
    await bus.flush(2)
    await bus.publish("s", b"1")
    await eventually(lambda: got)


async def test_drain_delivers_and_is_bounded(nats_server: NatsServer, connect: Connect) -> None:
    closed: list[int] = []
    bus, other = await connect(on_closed=lambda: closed.append(1)), await connect()
    got: list[bytes] = []
    await other.subscribe("s", lambda m: got.append(m.data))
    for _ in range(1000):
        await bus.publish("s", b"x" * 1000)
    assert await bus.drain(2) is True
    await eventually(lambda: len(got) == 1000)
    assert bus.closed
    assert closed == [1]
    with pytest.raises(NotConnected):
        await bus.publish("s", b"")
    nats_server.freeze()
    await other.publish("s", b"x" * 1_000_000)
    started = time.monotonic()
    assert await other.drain(0.3) is False
    assert time.monotonic() - started < 5


async def test_drain_without_a_broker_returns_at_once(nats_server: NatsServer, connect: Connect) -> None:
    bus = await connect()
    await nats_server.stop(signal.SIGKILL)
    await eventually(lambda: not bus.connected)
    started = time.monotonic()
    assert await bus.drain(5) is False
    assert time.monotonic() - started < 5


async def test_closing_while_reconnecting_never_hangs(nats_server: NatsServer, connect: Connect) -> None:
    """asyncio.wait_for may swallow the cancellation that comes together with a refused connection."""
    buses = [await connect() for _ in range(100)]
    await nats_server.stop(signal.SIGKILL)
    await eventually(lambda: not any(bus.connected for bus in buses))
    async with asyncio.timeout(5):
        for bus in buses:
            await asyncio.sleep(0.002)
            await bus.close()


async def test_close_ends_what_waits(bus: Bus) -> None:
    await bus.subscribe("silent", lambda _: None)
    waiting = asyncio.create_task(bus.request("silent", b"", timeout_s=30))
    await asyncio.sleep(0)
    await bus.close()
    with pytest.raises(NotConnected):
        await waiting
    with pytest.raises(NotConnected):
        await bus.wait_connected()


async def test_revoked_password_is_not_the_end(start_nats: StartNats, connect: Connect) -> None:
    """nats-py closes for good when the server ends the connection with an error."""
    server = await start_nats(PASSWORD)
    bus = await connect(server.url, credentials=Credentials(user="u", password="secret"))
    server.reload(PASSWORD.replace("secret", "other"))
    await eventually(lambda: not bus.connected)
    server.reload(PASSWORD)
    await eventually(lambda: bus.connected)
    await bus.flush(1)


async def test_bucket_of_two_creators(bus: Bus, connect: Connect) -> None:
    other = await connect()
    await asyncio.gather(bus.ensure_bucket(BUCKET), other.ensure_bucket(BUCKET), bus.ensure_bucket(BUCKET))
    await bus.ensure_bucket("own", ttl_s=30)
    await bus.ensure_bucket("own", ttl_s=10)  # left as it is
    assert await bus.kv_entries(BUCKET) == {}


async def test_what_is_still_on_its_way_is_not_taken_for_nothing(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is asked what has arrived before it has read it: it then takes a bucket for empty."""
    await bus.ensure_bucket(BUCKET)
    assert await bus.kv_entries(BUCKET) == {}
    for key in ("a", "b", "c"):
        await bus.kv_put(BUCKET, key, b"1", 1)
    monkeypatch.setattr(JetStreamContext.PushSubscription, "delivered", 0)
    for _ in range(5):
        assert set(await bus.kv_entries(BUCKET)) == {"a", "b", "c"}
    assert await bus.kv_entries(BUCKET, "x.*") == {}
    async with contextlib.aclosing(bus.kv_watch(BUCKET)) as updates:
        read = []
        async for update in updates:
            read.append(update.key or update.kind)
            if update.kind is UpdateKind.SYNCED:
                break
    assert read == ["a", "b", "c", UpdateKind.SYNCED]


async def test_what_came_and_went_at_once_is_told_to_be_gone(bus: Bus) -> None:
    """Of a key that is put and deleted before the server has sent it only the end is sent."""
    await bus.ensure_bucket(BUCKET)
    await bus.kv_delete(BUCKET, "long-ago", 1)
    async with contextlib.aclosing(bus.kv_watch(BUCKET)) as updates:
        assert (await anext(updates)).kind is UpdateKind.SYNCED
        await bus.kv_delete(BUCKET, "at-once", 1)
        assert await anext(updates) == KvUpdate("at-once", None, UpdateKind.DELETE)


async def test_bucket_values(bus: Bus) -> None:
    with pytest.raises(NoBucket):
        await bus.kv_put(BUCKET, "a.b", b"1", 1)
    with pytest.raises(NoBucket):
        await bus.kv_get(BUCKET, "a.b")
    await bus.ensure_bucket(BUCKET)
    assert await bus.kv_get(BUCKET, "a.b") is None
    first = await bus.kv_put(BUCKET, "a.b", b"1", 1)
    assert await bus.kv_put(BUCKET, "a.b", b"2", 1) > first
    await bus.kv_put(BUCKET, "a.c", b"3", 1)
    await bus.kv_put(BUCKET, "x.c", b"4", 1)
    assert await bus.kv_get(BUCKET, "a.b") == b"2"
    assert await bus.kv_entries(BUCKET, "a.*") == {"a.b": b"2", "a.c": b"3"}
    await bus.kv_delete(BUCKET, "a.b", 1)
    await bus.kv_delete(BUCKET, "never.was", 1)
    await bus.kv_put(BUCKET, "a.c", b"", 1)
    assert await bus.kv_get(BUCKET, "a.b") is None
    assert await bus.kv_get(BUCKET, "a.c") is None  # an empty value is an absent one
    assert await bus.kv_entries(BUCKET) == {"x.c": b"4"}


async def test_without_jetstream_it_is_said(start_nats: StartNats, connect: Connect) -> None:
    server = await start_nats(jetstream=False)
    bus = await connect(server.url)
    with pytest.raises(NoJetStream, match="start nats-server with -js"):
        await bus.ensure_bucket(BUCKET)


async def test_watch_tells_what_is_there_and_what_changes(bus: Bus) -> None:
    await bus.ensure_bucket(BUCKET)
    await bus.kv_put(BUCKET, "a.1", b"old", 1)
    await bus.kv_put(BUCKET, "b.1", b"other", 1)
    await bus.kv_delete(BUCKET, "a.0", 1)
    seen = Seen(bus, pattern="a.*")
    await eventually(seen.syncs)
    assert seen.updates == [
        KvUpdate("a.1", b"old", UpdateKind.PUT),
        KvUpdate("", None, UpdateKind.SYNCED),
    ]
    await bus.kv_put(BUCKET, "a.2", b"new", 1)
    await bus.kv_delete(BUCKET, "a.1", 1)
    await eventually(lambda: len(seen.updates) == 4)
    assert seen.updates[2:] == [
        KvUpdate("a.2", b"new", UpdateKind.PUT),
        KvUpdate("a.1", None, UpdateKind.DELETE),
    ]
    await seen.stop()


async def test_a_key_that_nobody_renews_is_seen_to_expire(bus: Bus) -> None:
    await bus.ensure_bucket(BUCKET, ttl_s=1)
    await bus.kv_put(BUCKET, "k", b"1", 1)
    seen = Seen(bus)
    await eventually(lambda: UpdateKind.EXPIRED in seen.kinds("k"), within_s=5)
    assert seen.kinds("k") == [UpdateKind.PUT, UpdateKind.EXPIRED]
    assert await bus.kv_get(BUCKET, "k") is None  # though the marker is there
    assert await bus.kv_entries(BUCKET) == {}
    await bus.kv_put(BUCKET, "k", b"2", 1)
    await eventually(lambda: seen.kinds("k")[2:] == [UpdateKind.PUT])
    await seen.stop()


async def test_watch_survives_restarts(nats_server: NatsServer, connect: Connect) -> None:
    """nats-py's own watch is deaf for 10 to 20 s after one."""
    bus, other = await connect(), await connect()
    await bus.ensure_bucket(BUCKET, ttl_s=60)
    for key in ("kept", "deleted"):
        await bus.kv_put(BUCKET, key, b"1", 1)
    seen = Seen(bus)
    await eventually(seen.syncs)
    await nats_server.restart()
    await eventually(lambda: bus.connected and other.connected)
    await other.kv_delete(BUCKET, "deleted", 5)
    await other.kv_put(BUCKET, "new", b"2", 5)
    await eventually(lambda: seen.kinds("new") and len(seen.kinds("deleted")) == 2)
    assert seen.kinds("kept") == [UpdateKind.PUT]  # not told twice
    assert seen.kinds("deleted") == [UpdateKind.PUT, UpdateKind.DELETE]
    assert seen.syncs() >= 2
    await seen.stop()


async def test_watch_tells_what_vanished_in_a_gap(start_nats: StartNats, connect: Connect) -> None:
    server = await start_nats()
    bus = await connect(server.url)
    await bus.ensure_bucket(BUCKET)
    await bus.kv_put(BUCKET, "k", b"1", 1)
    seen = Seen(bus)
    await eventually(seen.syncs)
    await server.stop()
    fresh = await start_nats(port=server.port)  # with an empty disk
    assert fresh.port == server.port
    await eventually(lambda: bus.connected)
    await bus.ensure_bucket(BUCKET)
    await eventually(lambda: seen.kinds("k") == [UpdateKind.PUT, UpdateKind.EXPIRED])
    await seen.stop()
