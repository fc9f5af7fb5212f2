"""Commands of the command line against a small fleet that answers as told, over a real broker."""

import asyncio
import contextlib
import json
import os
import pty
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from bus import subjects
from bus.codec import Format, encode
from bus.connection import Bus, Message
from bus.messages import ErrorBody, Operation, Reply, Snapshot, WeightUpdate
from service.__main__ import run
from tests.broker import NatsServer, eventually
from tests.program import ROOT, WATCHKEEPER

Answers = Callable[[str, dict[str, Any]], Reply | None]


def snapshot(instance: str, state: str = "serving", **rest: Any) -> Snapshot:
    defaults: dict[str, Any] = {
        "namespace": "default",
        "component": "backend",
        "incarnation": "01ABC",
        "seq": 1,
        "time": 1.5,
        "ready": state == "serving",
        "live": True,
        "settled": True,
    }
    return Snapshot(instance=instance, state=state, **{**defaults, **rest})


def reply(instance: str, state: str | Snapshot = "paused", code: str = "", **rest: Any) -> Reply:
    now = snapshot(instance, state) if isinstance(state, str) else state
    error = ErrorBody(code=code, message=f"not while {now.state}") if code else None
    fields: dict[str, Any] = {"ok": not code, "changed": not code, "error": error, **rest}
    return Reply(instance=instance, incarnation="01ABC", state=now, **fields)


class Fleet:
    """Instances that answer what a test says, and remember what they were asked."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(self, instance: str, answer: Answers | None = None, state: str = "serving") -> None:
        """Start one. `answer` gives its reply, or None to stay silent."""

        def arrived(message: Message) -> None:
            body = msgspec.msgpack.decode(message.data)
            verb = subjects.verb_of(message.subject)
            self.asked.append((instance, verb, body))
            found = answer(verb, body) if answer else reply(instance)
            if found is not None:
                self.later(self.bus.respond(message, encode(found, Format.MSGPACK)))

        for target in (instance, subjects.ALL):
            await self.bus.subscribe(subjects.control_pattern("default", "backend", target), arrived)
        await self.list(instance, state)

    async def list(self, instance: str, state: str = "serving") -> None:
        """Let the bucket say that it exists."""
        key = subjects.state_key("default", "backend", instance)
        value = encode(snapshot(instance, state), Format.JSON)
        await self.bus.kv_put(subjects.STATES_BUCKET, key, value, 5)

    def later(self, sending: Any) -> None:
        task = asyncio.create_task(sending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@pytest.fixture
async def fleet(nats_server: NatsServer) -> AsyncIterator[Fleet]:
    async with await Bus.connect(nats_server.url) as bus:
        await bus.ensure_bucket(subjects.STATES_BUCKET)
        yield Fleet(bus)


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


async def test_one_line_per_instance_and_a_summary(fleet: Fleet, watchkeeper: Watchkeeper) -> None:
    await fleet.add("w2")
    await fleet.add("w1")
    code, out, err = await watchkeeper("pause", "--instance", "w2", "--instance", "w1", "--instance", "w2")
    assert out == ["w1  ok  paused", "w2  ok  paused", "2 instances: 2 ok"]
    assert (code, err) == (0, [])
    assert sorted(instance for instance, _, _ in fleet.asked) == ["w1", "w2"]


async def test_all_asks_whom_the_bucket_lists(fleet: Fleet, watchkeeper: Watchkeeper) -> None:
    for name in ("w1", "w2", "w3"):
        await fleet.add(name)
    await fleet.list("gone", state="stopped")
    code, out, _ = await watchkeeper("pause", "--all")
    assert (code, out[-1]) == (0, "3 instances: 3 ok")
    assert {body["id"] for _, _, body in fleet.asked} == {fleet.asked[0][2]["id"]}


async def test_a_refusal_is_told_and_makes_exit_code_1(fleet: Fleet, watchkeeper: Watchkeeper) -> None:
    await fleet.add("w1")
    await fleet.add("w2", lambda verb, body: reply("w2", "asleep", "invalid_state"))
    code, out, err = await watchkeeper("resume", "--all")
    assert out == [
        "w1  ok             paused",
        "w2  invalid_state  asleep  not while asleep",
        "2 instances: 1 ok, 1 refused or failed",
    ]
    assert (code, err) == (1, [])


async def test_who_does_not_answer_is_told_and_makes_exit_code_3(
    fleet: Fleet, watchkeeper: Watchkeeper
) -> None:
    await fleet.add("w1")
    await fleet.add("w2", lambda verb, body: None, state="weight_update")
    code, out, _ = await watchkeeper("pause", "--all", "--wait-s", "0.3", "--id", "mine")
    assert out == [
        "w1  ok         paused",
        "w2  no_answer  -       no reply in 0.3 s (last seen weight_update);"
        " ask later: watchkeeper status --verb pause --id mine",
        "2 instances: 1 ok, 1 did not answer",
    ]
    assert code == 3
    code, out, _ = await watchkeeper("pause", "--instance", "w2", "--wait-s", "0.3", "--id", "mine")
    assert out[0].endswith("no reply in 0.3 s; ask later: watchkeeper status --verb pause --id mine")
    assert (code, out[-1]) == (3, "1 instance: 0 ok, 1 did not answer")


async def test_who_is_gone_is_not_waited_for(fleet: Fleet, watchkeeper: Watchkeeper) -> None:
    def die(verb: str, body: dict[str, Any]) -> None:
        key = subjects.state_key("default", "backend", "w2")
        fleet.later(fleet.bus.kv_delete(subjects.STATES_BUCKET, key, 5))

    await fleet.add("w1")
    await fleet.add("w2", die)
    code, out, _ = await watchkeeper("pause", "--all", "--wait-s", "600")
    assert out[0] == "w1  ok         paused"
    assert out[1].startswith("w2  no_answer  -       it ended without an answer; ask later: ")
    assert code == 3


async def test_an_instance_that_is_not_there_is_known_at_once(fleet: Fleet, watchkeeper: Watchkeeper) -> None:
    code, out, _ = await watchkeeper("pause", "--instance", "absent")
    assert out[0] == "absent  no_answer  -  no instance of this name listens"
    assert code == 3


async def test_a_terminal_shows_who_is_waited_for(fleet: Fleet, nats_server: NatsServer) -> None:
    """A bar, gone at the end; the result is all that a pipe gets."""
    await fleet.add("w1")
    await fleet.add("w2", lambda verb, body: None)
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *WATCHKEEPER,
        *("pause", "--all", "--wait-s", "2"),
        stdout=asyncio.subprocess.PIPE,
        stderr=theirs,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "WATCHKEEPER_NATS": nats_server.url},
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
        await eventually(lambda: re.search(r"waiting for pause.* 1/2 ", screen()), within_s=60)
        async with asyncio.timeout(20):
            out, _ = await process.communicate()
        assert process.returncode == 3
        assert out.decode().splitlines()[-1] == "2 instances: 1 ok, 1 did not answer"
    finally:
        if process.returncode is None:
            process.kill()
        os.close(ours)


async def test_an_empty_fleet(fleet: Fleet, watchkeeper: Watchkeeper) -> None:
    assert await watchkeeper("status") == (
        3,
        [],
        ["watchkeeper: error: no instance of default.backend is known"],
    )


async def test_json_prints_the_replies(fleet: Fleet, watchkeeper: Watchkeeper) -> None:
    await fleet.add("w1", lambda verb, body: reply("w1", result={"session": "01S"}))
    await fleet.add("w2", lambda verb, body: reply("w2", "asleep", "invalid_state"))
    code, out, err = await watchkeeper("start-weight-update", "--all", "--json")
    first, second = map(json.loads, out)
    assert (first["instance"], first["ok"], first["result"]) == ("w1", True, {"session": "01S"})
    assert (second["instance"], second["error"]["code"]) == ("w2", "invalid_state")
    assert first["state"]["weights"]["version"] == "default"
    assert (code, err) == (1, [])


async def test_json_leaves_the_silent_to_stderr(fleet: Fleet, watchkeeper: Watchkeeper) -> None:
    code, out, err = await watchkeeper("resume", "--instance", "absent", "--json")
    assert (code, out) == (3, [])
    assert err == ["watchkeeper: error: 1 instance: 0 ok, 1 did not answer"]


async def test_status_tells_what_people_want_to_know(fleet: Fleet, watchkeeper: Watchkeeper) -> None:
    update = snapshot(
        "w1",
        "weight_update",
        ready=False,
        settled=False,
        reasons=["weight_update", "unsettled"],
        in_flight=3,
        weight_update=WeightUpdate(phase="loading"),
        operation=Operation(verb="update_weights", since=1.0),
    )
    await fleet.add("w1", lambda verb, body: reply("w1", update, changed=False))
    await fleet.add("w2", lambda verb, body: reply("w2", "serving", changed=False))
    code, out, _ = await watchkeeper("status")
    assert out == [
        "w1  ok  weight_update/loading…"
        "  not ready (weight_update, unsettled) weights=default in_flight=3 running=update_weights",
        "w2  ok  serving                 ready weights=default in_flight=0",
        "2 instances: 2 ok",
    ]
    assert code == 0


async def test_what_changed_nothing_and_what_came_back(fleet: Fleet, watchkeeper: Watchkeeper) -> None:
    await fleet.add("w1", lambda verb, body: reply("w1", "serving", changed=False))
    await fleet.add("w2", lambda verb, body: reply("w2", "asleep", result={"woken": ["weights"]}))
    _, out, _ = await watchkeeper("wake-up", "--all")
    assert out[:2] == ["w1  ok  serving  unchanged", 'w2  ok  asleep   woken=["weights"]']


@pytest.mark.parametrize(
    ("command", "verb", "args"),
    [
        ("pause", "pause", {}),
        (
            "pause --mode keep --no-clear-cache --lease-s 5",
            "pause",
            {"mode": "keep", "clear_cache": False, "lease_s": 5.0},
        ),
        ("resume", "resume", {}),
        ("sleep --level 2 --mode wait", "sleep", {"level": 2, "mode": "wait"}),
        ("wake-up", "wake_up", {}),
        ("wake-up --tag weights --tag kv_cache", "wake_up", {"tags": ["weights", "kv_cache"]}),
        ("init-weight-transfer", "init_weight_transfer", {"init_info": {}}),
        ('init-weight-transfer --init-info {"a":[1]}', "init_weight_transfer", {"init_info": {"a": [1]}}),
        (
            'start-weight-update --pause-mode abort --lease-s 1.5 --manifest {"parameters":7}',
            "start_weight_update",
            {"pause_mode": "abort", "lease_s": 1.5, "manifest": {"parameters": 7}},
        ),
        ("update-weights --path /m/1", "update_weights", {"update_info": {"path": "/m/1"}}),
        ('update-weights --update-info [{"a":1},{}]', "update_weights", {"update_info": [{"a": 1}, {}]}),
        ("finish-weight-update", "finish_weight_update", {}),
        (
            "finish-weight-update --weight-version v7 --cache keep --allow-empty",
            "finish_weight_update",
            {"weight_version": "v7", "cache": "keep", "allow_empty": True},
        ),
        ("abort-weight-update", "abort_weight_update", {}),
        ("status", "status", {}),
        ("status --verb wake-up --id k1", "status", {"verb": "wake_up", "id": "k1"}),
        ("shutdown", "shutdown", {}),
    ],
)
async def test_what_is_sent(
    fleet: Fleet, watchkeeper: Watchkeeper, command: str, verb: str, args: dict[str, Any]
) -> None:
    await fleet.add("w1")
    code, _, err = await watchkeeper(*command.split(), "--instance", "w1")
    assert (code, err) == (0, [])
    ((_, sent_verb, body),) = fleet.asked
    assert (sent_verb, body["args"]) == (verb, args)


async def test_what_every_command_carries(fleet: Fleet, watchkeeper: Watchkeeper) -> None:
    await fleet.add("w1")
    who = ("--id", "k1", "--session", "01S", "--epoch", "4", "--issuer", "trainer")
    await watchkeeper("resume", "--instance", "w1", *who, "--wait-s", "5")
    await watchkeeper("resume", "--instance", "w1", "--wait-s", "5")
    (_, _, first), (_, _, second) = fleet.asked
    deadline = first.pop("deadline")
    assert first == {"id": "k1", "session": "01S", "epoch": 4, "issuer": "trainer", "args": {}}
    assert 0 <= second["deadline"] - deadline < 60
    assert second["id"]
    assert "@" in second["issuer"]
    assert "epoch" not in second
    assert "session" not in second


async def test_another_component(fleet: Fleet, watchkeeper: Watchkeeper) -> None:
    await fleet.add("w1")
    code, _, err = await watchkeeper("pause", "--all", "--component", "policy", "--namespace", "lab")
    assert code == 3
    assert err == ["watchkeeper: error: no instance of lab.policy is known"]
    assert fleet.asked == []


async def test_a_json_argument_from_a_file(fleet: Fleet, watchkeeper: Watchkeeper, tmp_path: Any) -> None:
    await fleet.add("w1")
    (tmp_path / "chunk.json").write_text('{"names": ["a"]}')
    code, _, _ = await watchkeeper(
        "update-weights", "--instance", "w1", "--update-info", f"@{tmp_path}/chunk.json"
    )
    assert (code, fleet.asked[0][2]["args"]) == (0, {"update_info": {"names": ["a"]}})


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("pause", "say --instance ID or --all (see 'watchkeeper pause --help')"),
        ("pause --all --instance w1", "--instance and --all exclude each other"),
        ("pause --instance w.1", "--instance: 'w.1' is not a name"),
        ("pause --all --mode now", "Invalid value for '--mode': 'now' is not one of"),
        ("pause --all --lease-s -1", "args.lease_s"),
        ("pause --all --wait-s 0", "--wait-s: 0 is not above 0"),
        ("sleep --all --level 3", "Invalid value for '--level': 3 is not in the range"),
        ("wake-up --all --tag weigths", "Invalid value for '--tag': 'weigths' is not one of"),
        ("update-weights --all", "say either --update-info JSON or --path PATH"),
        ("update-weights --all --update-info {", "Invalid value for '--update-info': '{' is not JSON"),
        ("update-weights --all --update-info @/no/file", "cannot read '/no/file': No such file"),
        ("update-weights --all --update-info 5", "args.update_info"),
        ("init-weight-transfer --all --init-info []", "args.init_info"),
        ("start-weight-update --all --manifest {}", "args.manifest"),
        ("status --verb pause", "--verb and --id go together"),
        ("status --nats-user", "Option '--nats-user' requires an argument"),
        ("resume --all --epoch x", "Invalid value for '--epoch'"),
    ],
)
async def test_wrong_use_is_one_line_and_exit_code_2(
    watchkeeper: Watchkeeper, command: str, message: str
) -> None:
    code, out, err = await watchkeeper(*command.split())
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith("watchkeeper: error: ")
    assert message in err[0]


async def test_no_broker_is_one_line_and_exit_code_2(watchkeeper: Watchkeeper) -> None:
    nats = ("--nats", "nats://127.0.0.1:9", "--nats-wait-s", "0")
    for command in (("status",), ("pause", "--all"), ("events",)):
        code, out, err = await watchkeeper(*command, *nats)
        assert (code, out, len(err)) == (2, [], 1)
        assert err[0].startswith("watchkeeper: error: ")
        assert "127.0.0.1:9" in err[0]


async def test_a_broker_that_refuses(start_nats: Any, watchkeeper: Watchkeeper, tmp_path: Any) -> None:
    server = await start_nats('authorization { user: "ann", password: "right" }')
    (tmp_path / "wrong").write_text("guess\n")
    (tmp_path / "right").write_text("right\n")
    as_ann = ("status", "--nats", server.url, "--nats-user", "ann", "--nats-password-file")
    code, out, err = await watchkeeper(*as_ann, str(tmp_path / "wrong"))
    assert (code, out, len(err)) == (2, [], 1)
    code, _, err = await watchkeeper(*as_ann, str(tmp_path / "right"))
    assert (code, err) == (3, ["watchkeeper: error: no instance of default.backend is known"])


async def test_what_the_broker_forbids_is_told(start_nats: Any, watchkeeper: Watchkeeper) -> None:
    server = await start_nats(
        'authorization { users = [{user: "eve", password: "pw", permissions: '
        '{publish: {deny: ["watchkeeper.>"]}, subscribe: [">"]}}] }'
    )
    url = server.url.replace("//", "//eve:pw@")
    code, out, err = await watchkeeper("resume", "--instance", "w1", "--wait-s", "0.3", "--nats", url)
    assert (code, out[-1]) == (3, "1 instance: 0 ok, 1 did not answer")
    assert len(err) == 1
    assert "permissions violation" in err[0]
