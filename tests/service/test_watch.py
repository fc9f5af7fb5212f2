"""`watch` and `announce`: what people see, and what they set going."""

import asyncio
import contextlib
import os
import pty
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bus import epochs, subjects
from bus.announce import Announcements
from bus.codec import Format, decode_announcement, encode
from bus.connection import Bus
from bus.discovery import ensure_buckets
from bus.messages import Announcement, Cause, Manifest, Operation, Snapshot, Weights, WeightUpdate
from service import watch
from service.__main__ import run
from tests.broker import NatsServer, eventually
from tests.program import ROOT, Program

Watchkeeper = Callable[..., Any]


@pytest.fixture
def watchkeeper(
    nats_server: NatsServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Watchkeeper:
    """Run one command; gives exit code, lines of stdout, lines of stderr."""
    monkeypatch.setenv("WATCHKEEPER_NATS", nats_server.url)

    async def watchkeeper(*arguments: str) -> tuple[int, list[str], list[str]]:
        code = await asyncio.to_thread(run, arguments)
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return watchkeeper


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    async with await Bus.connect(nats_server.url) as bus:
        await ensure_buckets(bus)
        yield bus


def snapshot(instance: str, state: str = "serving", **rest: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "namespace": "default",
        "component": "backend",
        "incarnation": "01A",
        "seq": 1,
        "time": time.time(),
        "ready": state == "serving",
        "live": state != "failed",
        "settled": True,
        **rest,
    }
    return Snapshot(instance=instance, state=state, **fields)


async def show(bus: Bus, shown: Snapshot) -> None:
    await bus.publish(subjects.state("default", "backend", shown.instance), encode(shown, Format.MSGPACK))
    key = subjects.state_key("default", "backend", shown.instance)
    await bus.kv_put(subjects.STATES_BUCKET, key, encode(shown, Format.JSON), 5)


# --- watch -----------------------------------------------------------------------------------------


async def test_once_prints_the_table(bus: Bus, watchkeeper: Watchkeeper) -> None:
    now = time.time()
    update = WeightUpdate(phase="loading", session="s", chunks=2)
    loading = snapshot(
        "w10",
        "weight_update",
        settled=False,
        weight_update=update,
        operation=Operation(verb="update_weights", since=now - 65),
    )
    serving = snapshot(
        "w2",
        weights=Weights(version="step-7"),
        in_flight=12,
        time=now - 7200,
        cause=Cause(verb="resume", issuer="ann"),
    )
    for each in (loading, serving):
        await show(bus, each)
    code, out, err = await watchkeeper("watch", "--once")
    assert (code, err) == (0, [])
    assert out == [
        "INSTANCE  STATE                   READY  WEIGHTS  IN FLIGHT  OPERATION OR CAUSE  AGE",
        "w2        serving                 yes    step-7   12         resume by ann       2h",
        "w10       weight_update/loading…  no     default  0          update_weights …    1m",
        "2 instances of default.backend: 1 serving, 1 weight_update",
    ]


async def test_once_with_nobody(watchkeeper: Watchkeeper) -> None:
    assert await watchkeeper("watch", "--once", "--component", "policy") == (
        0,
        ["0 instances of default.policy"],
        [],
    )


async def test_without_a_terminal_each_change_is_a_line(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    await show(bus, snapshot("w1"))
    program = await Program.start(tmp_path, "watch", "--nats", nats_server.url)
    try:

        def lines() -> list[str]:
            return program.out.read_text().splitlines()

        await eventually(lines, within_s=60)
        await show(bus, snapshot("w1", in_flight=3))  # a figure that moves is no change
        await show(bus, snapshot("w1", "paused", seq=2, cause=Cause(verb="pause", issuer="ann")))
        await show(bus, snapshot("w0", "starting"))
        await bus.kv_delete(subjects.STATES_BUCKET, subjects.state_key("default", "backend", "w0"), 5)
        await eventually(lambda: len(lines()) >= 4)
        assert lines() == [
            "w1  serving  ready  weights=default  in_flight=0",
            "w1  paused  not ready  weights=default  in_flight=0  pause by ann",
            "w0  starting  not ready  weights=default  in_flight=0",
            "w0  gone",
        ]
        program.process.send_signal(signal.SIGINT)
        assert await program.end(10) == 0
        assert program.stderr() == ""
    finally:
        await program.kill()


async def test_on_a_terminal_the_table_is_redrawn(bus: Bus, nats_server: NatsServer) -> None:
    await show(bus, snapshot("w1"))
    ours, theirs = pty.openpty()
    environ = {
        **os.environ,
        "TERM": "xterm",
        "COLUMNS": "100",
        "LINES": "20",
        "WATCHKEEPER_NATS": nats_server.url,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "service",
        "watch",
        stdout=theirs,
        stderr=theirs,
        stdin=theirs,
        cwd=ROOT,
        env=environ,
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    seen = ""

    def screen() -> str:
        nonlocal seen
        with contextlib.suppress(OSError):  # nothing new, or its end
            seen += os.read(ours, 65536).decode(errors="replace")
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)

    try:
        await eventually(lambda: re.search(r"w1 +serving +yes +default", screen()), within_s=60)
        assert "1 instance of default.backend: 1 serving" in screen()
        await show(bus, snapshot("w1", "asleep", seq=2))
        await eventually(lambda: re.search(r"w1 +asleep +no", screen()))
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(10):
            assert await process.wait() == 0
        assert "Traceback" not in screen()
    finally:
        if process.returncode is None:
            process.kill()
        os.close(ours)


def drawn(states: list[Snapshot], height: int, width: int = 120) -> list[str]:
    console = Console(width=width, height=height, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(watch.picture("default.backend", states, time.time(), height))
    return console.export_text().splitlines()


def test_500_instances_fit_a_terminal_and_cost_little() -> None:
    states = [snapshot(f"w{number}", "serving" if number % 5 else "paused") for number in range(500)]
    began = time.perf_counter()
    lines = drawn(states, height=40)
    assert time.perf_counter() - began < 10  # 0.03 s on an idle machine
    assert len(lines) < 40
    assert lines[1].startswith("w0 ")
    assert lines[3].startswith("w2 ")
    assert lines[-1].strip() == ("500 instances of default.backend: 100 paused, 400 serving; 463 do not fit")


def test_text_of_others_is_not_taken_for_markup() -> None:
    lines = drawn([snapshot("w1", weights=Weights(version="[red]v1[/]"))], height=10)
    assert "[red]v1[/]" in lines[1]


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0s"), (59.9, "59s"), (60, "1m"), (3600, "1h"), (200_000, "2d")]
)
def test_ages(seconds: float, text: str) -> None:
    assert watch.age(seconds) == text


# --- announce --------------------------------------------------------------------------------------


async def announced(bus: Bus) -> list[Announcement]:
    return [
        decode_announcement(stored.data) for stored in await Announcements(bus, "default", "backend").stored()
    ]


async def test_announcing_a_directory(bus: Bus, watchkeeper: Watchkeeper) -> None:
    """The epoch is the one in power; only the first announcement of all takes one."""
    code, out, err = await watchkeeper("announce", "--version", "v1", "--path", "rel/v1", "--id", "mine")
    assert (code, out, err) == (0, ["announced v1 to default.backend: epoch 1, sequence 1"], [])
    await epochs.raise_epoch(bus, "default", "backend", 7)
    _, out, _ = await watchkeeper("announce", "--version", "v2", "--path", "/v2", "--issuer", "ann")
    assert out == ["announced v2 to default.backend: epoch 7, sequence 2"]
    _, out, _ = await watchkeeper("announce", "--version", "v3", "--path", "/v3", "--epoch", "new")
    assert out == ["announced v3 to default.backend: epoch 8, sequence 3"]
    _, out, _ = await watchkeeper("announce", "--version", "v4", "--path", "/v4", "--epoch", "0")
    assert out == ["announced v4 to default.backend: epoch 0, sequence 4"]
    first, second, *_ = await announced(bus)
    assert first == Announcement(
        id="mine",
        epoch=1,
        version="v1",
        updates=[{"path": os.path.abspath("rel/v1")}],
        issuer=first.issuer,
    )
    assert first.issuer is not None and "@" in first.issuer
    assert second.issuer == "ann"


async def test_everything_that_can_be_announced(bus: Bus, watchkeeper: Watchkeeper) -> None:
    options = (
        '--version v1 --update-info {"a":1} --update-info [{"r":0},{"r":1}] --init-info {} --epoch 3 '
        '--pause-mode abort --cache keep --manifest {"parameters":2} --lease-s 9 --id k'
    )
    code, _, err = await watchkeeper("announce", *options.split(), "--issuer", "ann")
    assert (code, err) == (0, [])
    assert await announced(bus) == [
        Announcement(
            id="k",
            epoch=3,
            version="v1",
            updates=[{"a": 1}, [{"r": 0}, {"r": 1}]],
            init_info={},
            pause_mode="abort",
            cache="keep",
            manifest=Manifest(parameters=2),
            lease_s=9,
            issuer="ann",
        )
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--path /x", "Missing option '--version'"),
        ("--version v1", "say either --update-info JSON or --path PATH"),
        ("--version v1 --path /x --update-info {}", "say either --update-info JSON or --path PATH"),
        ("--version v1 --path /x --epoch now", "'now' is neither a number nor 'new'"),
        ("--version v1 --update-info 5", "updates[0]"),
        ("--version v1 --path /x --lease-s -1", "lease_s"),
        ("--version v1 --path /x --epoch 99999999999999999999", "epoch"),
    ],
)
async def test_wrong_use_is_one_line(watchkeeper: Watchkeeper, options: str, message: str) -> None:
    code, out, err = await watchkeeper("announce", *options.split())
    assert (code, out, len(err)) == (2, [], 1)
    assert message in err[0]


async def test_no_broker(watchkeeper: Watchkeeper) -> None:
    nats = ("--nats", "nats://127.0.0.1:9", "--nats-wait-s", "0")
    for command in (("watch",), ("watch", "--once"), ("announce", "--version", "v", "--path", "/x")):
        code, out, err = await watchkeeper(*command, *nats)
        assert (code, out, len(err)) == (2, [], 1)
        assert "127.0.0.1:9" in err[0]
