"""The command line itself: what reaches the worker, what is refused, how a command ends."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import service
from bus import subjects
from bus.codec import Format, encode
from bus.connection import Bus
from bus.messages import Verb
from service.__main__ import run
from service.health_server import HealthServer
from service.options import SettingsError
from service.settings import SERVE_OPTIONS, ServeSettings
from tests.broker import NatsServer

WATCHKEEPER = (sys.executable, "-m", "service")
ROOT = Path(__file__).parents[2]
VERBS = tuple(verb.value for verb in Verb if verb is not Verb.SIMULATE)


class Program:
    """A command in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        assert process.stdout is not None
        assert process.stderr is not None
        self.out, self.err = process.stdout, process.stderr

    async def end(self) -> tuple[int, str, str]:
        async with asyncio.timeout(20):
            out, err = await self.out.read(), await self.err.read()
            return await self.process.wait(), out.decode(), err.decode()


@pytest.fixture
async def start() -> AsyncIterator[Any]:
    started: list[asyncio.subprocess.Process] = []

    async def start(*arguments: str, command: Sequence[str] = WATCHKEEPER, **environ: str) -> Program:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, *arguments, stdout=pipe, stderr=pipe, cwd=ROOT, env={**os.environ, **environ}
        )
        started.append(process)
        return Program(process)

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeSettings]:
    """What reaches the worker, which is not started."""
    calls: list[ServeSettings] = []

    def run_worker(settings: ServeSettings) -> int:
        calls.append(settings)
        return 70

    worker = SimpleNamespace(run=run_worker)
    monkeypatch.setitem(sys.modules, "service.worker", worker)
    monkeypatch.setattr(service, "worker", worker, raising=False)
    return calls


# --- start-up --------------------------------------------------------------------------------------


def test_help_is_light_and_complete() -> None:
    began = time.perf_counter()
    done = subprocess.run([*WATCHKEEPER, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert time.perf_counter() - began < 20  # 0.12 s on an idle machine
    for command in (
        "serve",
        "tiny-model",
        "probe",
        "events",
        "watch",
        "announce",
        *(verb.replace("_", "-") for verb in VERBS),
    ):
        assert f"\n  {command} " in done.stdout


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    heavy = "{'vllm', 'torch', 'nats', 'grpc', 'rich', 'msgspec', 'asyncio', 'aiohttp', 'transitions'}"
    code = f"import sys, service.__main__; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "command", ["", "serve", "pause", "probe", "update-weights", "status", "events", "watch", "announce"]
)
def test_every_help_has_examples_and_fits(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert not command or "\nExamples:\n  watchkeeper " in out
    assert max(map(len, out.splitlines())) <= 110


def test_help_of_serve_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    run(["serve", "--help"])
    out = capsys.readouterr().out
    for option in SERVE_OPTIONS:
        assert f"  {option.flag}" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("watchkeeper ")


def test_no_command_shows_the_help_and_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "Commands:" in capsys.readouterr().out


# --- serve -----------------------------------------------------------------------------------------


def test_serve_hands_its_settings_to_the_worker(
    served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHKEEPER_COMPONENT", "policy")
    monkeypatch.setenv("WATCHKEEPER_ROLE", "prefill")
    options = (
        "--engine sim --role decode --grace-period-s -1 --call-timeout-s pause=1"
        " --withdraw-on-pause vllm.Inference --withdraw-on-pause '' --no-graceful-shutdown"
        " --drain-timeout-s 8 --drain-timeout-s 9"
    )
    code = run(["serve", "name", *shlex.split(options)])
    assert code == 70
    (settings,) = served
    assert (settings.model, settings.engine, settings.engine_args) == ("name", "sim", ())
    assert (settings.component, settings.role) == ("policy", "decode")
    assert (settings.grace_period_s, settings.drain_timeout_s) == (0, 9)
    assert settings.withdraw_on_pause == ("vllm.Inference", "")
    assert settings.graceful_shutdown is False
    assert settings.call_timeouts_s["pause"] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-model-len", "64", "--help", "--", "-x", "--engine", "vllm", ""],
        ["positional"],
        [],
    ],
)
def test_what_follows_the_dashes_goes_to_the_engine_untouched(
    served: list[ServeSettings], arguments: list[str]
) -> None:
    assert run(["serve", "--engine", "sim", "name", "--", *arguments]) == 70
    assert served[0].engine_args == tuple(arguments)
    assert served[0].engine == "sim"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve"], "MODEL is missing: a model directory or a hub name (see 'watchkeeper serve --help')"),
        (["serve", "--engine", "sim", "--", "name"], "MODEL is missing"),
        (["serve", "a", "b"], "Got unexpected extra argument (b) (see"),
        (["serve", "a", "--max-model-len", "64"], "Options of the engine come after --."),
        (["serve", "a", "--grace-perod-s", "1"], "No such option '--grace-perod-s'"),
        (["serve", "a", "--engine"], "Option '--engine' requires an argument"),
        (["serve", "a", "--engine", "trt"], "--engine: 'trt' is not one of vllm, sim"),
        (["serve", "/no/such/model"], "MODEL '/no/such/model': no such directory"),
        (["serve", "a", "--config", "/no/file"], "--config: cannot read '/no/file': No such file"),
        (["serve", "a", "--grpc-address", "::1:1"], "--grpc-address: '::1:1': write an IPv6 address in"),
        (["serve", "a", "--admin-token-file", "/dev/null"], "--admin-token-file: '/dev/null' is empty"),
        (["serve", "a", "--instance", "a\nb"], "--instance: 'a\\nb' is not a name"),
        (["probe"], "Missing argument 'HOST:PORT'"),
        (["probe", "127.0.0.1"], "'127.0.0.1' is not HOST:PORT"),
        (["probe", "::1:50051"], "write an IPv6 address in brackets"),
        (["probe", "a:1", "--rpc-timeout-s", "x"], "--rpc-timeout-s: 'x' is not a number of seconds"),
        (["tiny-model"], "Missing argument 'DIRECTORY'"),
        (["tiny-model", "d", "--seed", "x"], "Invalid value for '--seed'"),
        (["launch"], "No such command 'launch'"),
        (["--verbose"], "No such option '--verbose'"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    served: list[ServeSettings],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("watchkeeper: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert served == []


def test_what_a_worker_finds_wrong_is_one_line_too(
    served: list[ServeSettings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(settings: ServeSettings) -> int:
        raise SettingsError("cannot listen on 127.0.0.1:50051: address already in use")

    monkeypatch.setattr(service.worker, "run", taken)
    assert run(["serve", "a"]) == 2
    assert capsys.readouterr().err == (
        "watchkeeper: error: cannot listen on 127.0.0.1:50051: address already in use\n"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "75"),
        (["name", "--engine", "sim", "--drain-timeout-s", "120.5"], "166"),
        (["--shutdown-timeout-s", "20"], "25"),
    ],
)
def test_the_grace_a_pod_needs(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], served: list[ServeSettings]
) -> None:
    assert run(["serve", *arguments, "--print-termination-grace"]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert served == []


def test_tiny_model_writes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, int]] = []
    fake = SimpleNamespace(write_tiny_model=lambda directory, seed: calls.append((directory, seed)))
    monkeypatch.setitem(sys.modules, "service.engine.tiny_model", fake)
    assert run(["tiny-model", str(tmp_path / "m"), "--seed", "3"]) == 0
    assert calls == [(tmp_path / "m", 3)]


# --- commands in a process of their own --------------------------------------------------------------


async def test_probe_ends_with_what_it_found(start: Any) -> None:
    server = await HealthServer.bind("127.0.0.1:0", {"up": True, "": False})
    programs = [
        await start("probe", *arguments)
        for arguments in (
            (str(server.address), "up"),
            (str(server.address),),
            (str(server.address), "unknown"),
            ("127.0.0.1:9",),
        )
    ]
    ends = [await program.end() for program in programs]
    await server.close()
    assert ends[0] == (0, "status: SERVING\n", "")
    assert ends[1] == (4, "status: NOT_SERVING\n", "")
    assert ends[2] == (3, "", "watchkeeper: error: the check failed: NOT_FOUND: unknown service 'unknown'\n")
    code, out, err = ends[3]
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("watchkeeper: error: cannot connect to 127.0.0.1:9: ")


async def test_events_are_lines_of_json_until_interrupted(start: Any, nats_server: NatsServer) -> None:
    program = await start("events", "--component", "policy", WATCHKEEPER_NATS=nats_server.url)
    assert (
        await program.err.readline() == b"watchkeeper: listening on watchkeeper.v1.default.policy.state.*\n"
    )
    async with await Bus.connect(nats_server.url) as bus:
        for component, number in (("other", 0), ("policy", 1), ("policy", 2)):
            event = {"instance": "w1", "seq": number, "not_known_yet": [None]}
            await bus.publish(subjects.state("default", component, "w1"), encode(event, Format.MSGPACK))
            if number:  # each line comes at once, not when a buffer is full
                assert json.loads(await program.out.readline()) == event
        await bus.publish(subjects.state("default", "policy", "w1"), b"\xc1")
        await bus.flush(5)
        assert (await program.err.readline()).startswith(b"watchkeeper: an event cannot be read: ")
    program.process.send_signal(signal.SIGINT)
    assert await program.end() == (130, "", "")


async def test_events_end_quietly_when_nobody_reads_them(start: Any, nats_server: NatsServer) -> None:
    program = await start(
        "-c",
        f"{sys.executable} -m service events | head -n 1",
        command=("sh",),
        WATCHKEEPER_NATS=nats_server.url,
    )
    await program.err.readline()
    async with await Bus.connect(nats_server.url) as bus:
        while program.process.returncode is None:
            await bus.publish(subjects.state("default", "backend", "w1"), encode({"seq": 1}, Format.MSGPACK))
            await bus.flush(5)
    assert await program.end() == (0, '{"seq":1}\n', "")


async def test_an_interrupted_command_tells_what_had_come(start: Any, nats_server: NatsServer) -> None:
    async with await Bus.connect(nats_server.url) as bus:
        asked = asyncio.Event()
        await bus.subscribe(
            subjects.control_pattern("default", "backend", "slow"), lambda message: asked.set()
        )
        program = await start(
            "pause", "--instance", "slow", "--instance", "absent", "--nats", nats_server.url
        )
        await asyncio.wait_for(asked.wait(), 20)
        program.process.send_signal(signal.SIGINT)
        code, out, err = await program.end()
    assert (code, err) == (130, "")
    assert "slow" not in out
