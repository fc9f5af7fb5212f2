"""Wire types: names, refusals and error codes, each spelled out by hand."""

import json
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from bus import codec, subjects
from bus.messages import (
    ARGS,
    Addresses,
    Args,
    BadArguments,
    Cause,
    Engine,
    ErrorBody,
    ErrorCode,
    FinishWeightUpdateArgs,
    InitWeightTransferArgs,
    InstanceEntry,
    Manifest,
    Operation,
    PauseArgs,
    Paused,
    Progress,
    Reply,
    SimulateArgs,
    Sleep,
    SleepArgs,
    Snapshot,
    StartWeightUpdateArgs,
    StatusArgs,
    Transport,
    UpdateWeightsArgs,
    Verb,
    WakeUpArgs,
    Weights,
    WeightUpdate,
    parse_args,
)

# Subjects and names


def test_subjects_are_spelled_as_the_protocol_says() -> None:
    assert subjects.control("default", "backend", "i1", "wake_up") == (
        "watchkeeper.v1.default.backend.control.i1.wake_up"
    )
    assert subjects.control("n", "c", subjects.ALL, "pause") == "watchkeeper.v1.n.c.control._all.pause"
    assert subjects.control_pattern("n", "c", "i1") == "watchkeeper.v1.n.c.control.i1.*"
    assert subjects.verb_of("watchkeeper.v1.n.c.control.i1.pause") == "pause"
    assert subjects.state("n", "c", "i1") == "watchkeeper.v1.n.c.state.i1"
    assert subjects.state_pattern("n", "c") == "watchkeeper.v1.n.c.state.*"
    assert subjects.state_pattern("n") == "watchkeeper.v1.n.*.state.*"
    assert subjects.weights("n", "c") == "watchkeeper.v1.n.c.weights"
    assert subjects.instance_key("n", "c", "generate", "i1") == "n.c.generate.i1"
    assert subjects.state_key("n", "c", "i1") == "n.c.i1"
    assert subjects.INSTANCES_BUCKET == "watchkeeper-instances"
    assert subjects.STATES_BUCKET == "watchkeeper-states"
    assert subjects.EPOCHS_BUCKET == "watchkeeper-epochs"
    assert subjects.WEIGHTS_STREAM == "WATCHKEEPER_WEIGHTS"


@pytest.mark.parametrize("name", ["a", "A1-b", "9", "a" * 63, "a-"])
def test_names(name: str) -> None:
    assert subjects.check_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", "a.b", "a_b", "*", ">", "a b", "a" * 64, "é", "a\n", "_all"])
def test_what_is_no_name_never_reaches_a_subject(name: str) -> None:
    with pytest.raises(ValueError, match="letters, digits or hyphens"):
        subjects.check_name(name)
    builds: list[Callable[[], str]] = [
        lambda: subjects.control(name, "c", "i", "pause"),
        lambda: subjects.state("n", name, "i"),
        lambda: subjects.state_key("n", "c", name),
        lambda: subjects.instance_key("n", "c", "generate", name),
    ]
    for build in builds:
        with pytest.raises(ValueError, match="is not a name"):
            build()


@pytest.mark.parametrize(
    ("host", "stem"),
    [
        ("Node-7", "node-7"),
        ("gpu_1.example.com", "gpu-1-example-com"),
        ("-x", "x"),
        ("___", "instance"),
        ("", "instance"),
        ("h" * 80, "h" * 56),
        ("käse", "k-se"),
    ],
)
def test_default_name(host: str, stem: str) -> None:
    name = subjects.default_instance_name(host)
    assert subjects.check_name(name) == name
    assert name[:-7] == stem
    assert name[-7] == "-"
    int(name[-6:], 16)
    assert subjects.default_instance_name(host) != name


# Error codes

TABLE = {
    400: ("INVALID_ARGUMENT", "invalid_message invalid_argument unknown_verb"),
    409: (
        "FAILED_PRECONDITION",
        "invalid_state weight_update_open weights_not_ready empty_weight_update incomplete_weight_update "
        "session_mismatch lease_expired stale_epoch",
    ),
    503: ("UNAVAILABLE", "not_ready busy shutting_down engine_failed"),
    504: ("DEADLINE_EXCEEDED", "deadline_exceeded engine_timeout"),
    500: ("INTERNAL", "engine_error internal"),
}


def test_error_codes_have_the_status_of_the_table() -> None:
    expected = {
        code: (http, grpc, code in ("not_ready", "busy", "engine_timeout", "shutting_down", "engine_failed"))
        for http, (grpc, codes) in TABLE.items()
        for code in codes.split()
    }
    assert {c.value: (c.http_status, c.grpc_status, c.retryable) for c in ErrorCode} == expected


# Arguments

GOOD: list[tuple[str, dict[str, Any], Args]] = [
    ("pause", {}, PauseArgs(mode="abort", clear_cache=True, lease_s=None)),
    (
        "pause",
        {"mode": "keep", "clear_cache": False, "lease_s": 5},
        PauseArgs(mode="keep", clear_cache=False, lease_s=5.0),
    ),
    ("pause", {"lease_s": None, "not_known": [1]}, PauseArgs()),
    ("sleep", {}, SleepArgs(level=1, mode="abort")),
    ("sleep", {"level": 2, "mode": "wait"}, SleepArgs(level=2, mode="wait")),
    ("wake_up", {}, WakeUpArgs(tags=None)),
    ("wake_up", {"tags": None}, WakeUpArgs(tags=None)),
    ("wake_up", {"tags": []}, WakeUpArgs(tags=[])),
    (
        "wake_up",
        {"tags": ["weights", "kv_cache", "scheduling", "weights"]},
        WakeUpArgs(tags=["weights", "kv_cache", "scheduling", "weights"]),
    ),
    ("init_weight_transfer", {"init_info": {}}, InitWeightTransferArgs(init_info={})),
    ("start_weight_update", {}, StartWeightUpdateArgs(pause_mode="keep", lease_s=None, manifest=None)),
    (
        "start_weight_update",
        {
            "pause_mode": "abort",
            "lease_s": 0.5,
            "manifest": {"parameters": 0, "names_sha256": "aB" * 32, "chunks": 3, "x": 1},
        },
        StartWeightUpdateArgs(
            pause_mode="abort", lease_s=0.5, manifest=Manifest(parameters=0, names_sha256="aB" * 32, chunks=3)
        ),
    ),
    ("update_weights", {"update_info": {"path": "/x"}}, UpdateWeightsArgs(update_info={"path": "/x"})),
    ("update_weights", {"update_info": [{"a": 1}, {}]}, UpdateWeightsArgs(update_info=[{"a": 1}, {}])),
    (
        "finish_weight_update",
        {},
        FinishWeightUpdateArgs(weight_version=None, cache="clear", allow_empty=False),
    ),
    (
        "finish_weight_update",
        {"weight_version": "v", "cache": "keep", "allow_empty": True},
        FinishWeightUpdateArgs(weight_version="v", cache="keep", allow_empty=True),
    ),
    ("status", {"verb": "pause", "id": "1"}, StatusArgs(verb="pause", id="1")),
    (
        "simulate",
        {"call": "pause", "outcome": "delay", "delay_s": 60, "times": 1},
        SimulateArgs(call="pause", outcome="delay", delay_s=60.0, times=1),
    ),
    ("simulate", {"call": "now", "outcome": "die"}, SimulateArgs(call="now", outcome="die")),
]


@pytest.mark.parametrize(("verb", "raw", "args"), GOOD)
def test_arguments(verb: str, raw: dict[str, Any], args: Args) -> None:
    assert parse_args(Verb(verb), raw) == args


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("pause", {"mode": "maybe"}, "args.mode"),
    ("pause", {"mode": None}, "args.mode"),
    ("pause", {"clear_cache": 1}, "args.clear_cache"),
    ("pause", {"lease_s": 0}, "args.lease_s"),
    ("pause", {"lease_s": -1.5}, "args.lease_s"),
    ("pause", {"lease_s": True}, "args.lease_s"),
    ("pause", {"lease_s": "5"}, "args.lease_s"),
    ("pause", {"lease_s": math.nan}, "lease_s"),
    ("pause", {"lease_s": math.inf}, "lease_s"),
    ("pause", {"lease_s": 10**400}, "lease_s"),
    ("sleep", {"level": 7}, "args.level"),
    ("sleep", {"level": -1}, "args.level"),
    ("sleep", {"level": True}, "args.level"),
    ("sleep", {"level": 1.0}, "args.level"),
    ("sleep", {"level": "1"}, "args.level"),
    ("wake_up", {"tags": ["weigths"]}, r"args.tags\[0\].*weigths"),
    ("wake_up", {"tags": "weights"}, "args.tags"),
    ("wake_up", {"tags": [1]}, "args.tags"),
    ("init_weight_transfer", {}, "init_info"),
    ("init_weight_transfer", {"init_info": []}, "args.init_info"),
    ("start_weight_update", {"pause_mode": "unknown"}, "args.pause_mode"),
    ("start_weight_update", {"manifest": {}}, "parameters"),
    ("start_weight_update", {"manifest": {"parameters": -1}}, "args.manifest.parameters"),
    ("start_weight_update", {"manifest": {"parameters": True}}, "args.manifest.parameters"),
    (
        "start_weight_update",
        {"manifest": {"parameters": 1, "names_sha256": "xyz"}},
        "args.manifest.names_sha256",
    ),
    ("start_weight_update", {"manifest": {"parameters": 1, "chunks": 1.5}}, "args.manifest.chunks"),
    ("start_weight_update", {"manifest": 3}, "args.manifest"),
    ("update_weights", {}, "update_info"),
    ("update_weights", {"update_info": None}, "args.update_info"),
    ("update_weights", {"update_info": []}, "args.update_info"),
    ("update_weights", {"update_info": [1]}, "args.update_info"),
    ("update_weights", {"update_info": "path"}, "args.update_info"),
    ("finish_weight_update", {"weight_version": ""}, "args.weight_version"),
    ("finish_weight_update", {"weight_version": 7}, "args.weight_version"),
    ("finish_weight_update", {"cache": "reset"}, "args.cache"),
    ("finish_weight_update", {"allow_empty": 0}, "args.allow_empty"),
    ("status", {"verb": 1}, "args.verb"),
    ("simulate", {}, "call"),
    ("simulate", {"call": "status", "outcome": "error"}, "args.call"),
    ("simulate", {"call": "now", "outcome": "error"}, "outcome 'error'"),
    ("simulate", {"call": "pause", "outcome": "pause_out_of_band"}, "outcome"),
    ("simulate", {"call": "pause", "outcome": "delay"}, "delay_s"),
    ("simulate", {"call": "pause", "outcome": "error", "times": 0}, "args.times"),
]


@pytest.mark.parametrize(("verb", "raw", "names"), BAD)
def test_bad_arguments_are_refused_and_named(verb: str, raw: dict[str, Any], names: str) -> None:
    with pytest.raises(BadArguments, match=names) as refused:
        parse_args(Verb(verb), raw)
    assert "\n" not in str(refused.value)


def test_every_verb_has_arguments() -> None:
    assert set(ARGS) == set(Verb)
    assert {v.value for v in Verb} == {
        "pause",
        "resume",
        "sleep",
        "wake_up",
        "init_weight_transfer",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "abort_weight_update",
        "status",
        "shutdown",
        "simulate",
    }


# What is published

SNAPSHOT_JSON: dict[str, Any] = {
    "v": 1,
    "namespace": "default",
    "component": "backend",
    "instance": "i1",
    "incarnation": "01J",
    "seq": 7,
    "time": 1700000000.5,
    "state": "weight_update",
    "previous": "paused",
    "ready": False,
    "live": True,
    "settled": False,
    "reasons": ["weight_update"],
    "paused": {"mode": "keep", "by": ["command", "update"], "lease_expires": None},
    "sleep": {"level": 1, "asleep": ["kv_cache"]},
    "weight_update": {
        "phase": "loading",
        "session": "s",
        "owner": "trainer",
        "chunks": 2,
        "since": 1700000000.25,
        "lease_expires": 1700000060.0,
        "progress": {"seconds": 1.5, "bytes": 1024},
    },
    "weights": {"version": "v1", "epoch": 3, "good": False},
    "in_flight": 4,
    "operation": {"verb": "update_weights", "id": "x", "since": 1700000000.5},
    "cause": {"verb": "update_weights", "id": "x", "issuer": "trainer"},
    "role": "decode",
    "model": "m",
    "engine": {"kind": "vllm", "version": "0.32.0"},
    "addresses": {"grpc": "h:1", "http": "h:2", "admin": "h:3"},
}
SNAPSHOT = Snapshot(
    namespace="default",
    component="backend",
    instance="i1",
    incarnation="01J",
    seq=7,
    time=1700000000.5,
    state="weight_update",
    previous="paused",
    ready=False,
    live=True,
    settled=False,
    reasons=["weight_update"],
    paused=Paused(mode="keep", by=["command", "update"]),
    sleep=Sleep(level=1, asleep=["kv_cache"]),
    weight_update=WeightUpdate(
        phase="loading",
        session="s",
        owner="trainer",
        chunks=2,
        since=1700000000.25,
        lease_expires=1700000060.0,
        progress=Progress(seconds=1.5, bytes=1024),
    ),
    weights=Weights(version="v1", epoch=3, good=False),
    in_flight=4,
    operation=Operation(verb="update_weights", id="x", since=1700000000.5),
    cause=Cause(verb="update_weights", id="x", issuer="trainer"),
    role="decode",
    model="m",
    engine=Engine(kind="vllm", version="0.32.0"),
    addresses=Addresses(grpc="h:1", http="h:2", admin="h:3"),
)
PLAIN = Snapshot(
    namespace="n", component="c", instance="i", incarnation="1", seq=1, time=1.0, state="starting",
    ready=False, live=True, settled=True, model="m", engine=Engine(kind="sim"),
)  # fmt: skip


def test_snapshot_on_the_wire() -> None:
    written = json.loads(codec.encode(SNAPSHOT, codec.Format.JSON))
    assert written == SNAPSHOT_JSON
    assert list(written) == list(SNAPSHOT_JSON)
    assert codec.decode_snapshot(json.dumps(SNAPSHOT_JSON).encode()) == SNAPSHOT


def test_every_field_is_present_even_if_there_is_nothing_to_say() -> None:
    written = json.loads(codec.encode(PLAIN, codec.Format.JSON))
    assert list(written) == list(SNAPSHOT_JSON)
    assert written["paused"] is None
    assert written["weights"] == {"version": "default", "epoch": None, "good": True}
    assert written["engine"] == {"kind": "sim", "version": None}
    assert written["addresses"] == {"grpc": None, "http": None, "admin": None}
    assert written["reasons"] == []


def test_entry_on_the_wire() -> None:
    entry = InstanceEntry(
        namespace="n", component="c", endpoint="generate", instance="i", incarnation="1", model="m",
        role="prefill", transport=Transport(http="h:1", grpc="h:2"), weight_version="v", max_model_len=64,
    )  # fmt: skip
    wire = {
        "v": 1,
        "namespace": "n",
        "component": "c",
        "endpoint": "generate",
        "instance": "i",
        "incarnation": "1",
        "model": "m",
        "role": "prefill",
        "transport": {"http": "h:1", "grpc": "h:2"},
        "weight_version": "v",
        "max_model_len": 64,
    }
    assert json.loads(codec.encode(entry, codec.Format.JSON)) == wire
    assert codec.decode_entry(json.dumps({**wire, "later": 1}).encode()) == entry


# Readers of a later version


def test_readers_are_lenient_about_what_they_do_not_know() -> None:
    later = {
        **SNAPSHOT_JSON,
        "v": 2,
        "state": "dreaming",
        "news": {"a": 1},
        "engine": {"kind": "x", "version": None, "y": 1},
    }
    snapshot = codec.decode_snapshot(json.dumps(later).encode())
    assert (snapshot.v, snapshot.state) == (2, "dreaming")
    reply = codec.decode_reply(
        json.dumps(
            {
                "instance": "i",
                "incarnation": "1",
                "ok": False,
                "error": {"code": "later", "message": "m"},
                "x": 1,
            }
        ).encode()
    )
    assert reply.error == ErrorBody(code="later", message="m", retryable=False)


def test_reply_on_the_wire_in_msgpack() -> None:
    reply = Reply(id="x", instance="i", incarnation="1", ok=True, changed=True, result={"session": "s"})
    by_hand = (
        b"\x8b"
        b"\xa2id\xa1x"
        b"\xa8instance\xa1i"
        b"\xabincarnation\xa11"
        b"\xa2ok\xc3"
        b"\xa7changed\xc3"
        b"\xa9duplicate\xc2"
        b"\xa5error\xc0"
        b"\xa6result\x81\xa7session\xa1s"
        b"\xa5state\xc0"
        b"\xa9queued_ms\xcb\x00\x00\x00\x00\x00\x00\x00\x00"
        b"\xa9engine_ms\xcb\x00\x00\x00\x00\x00\x00\x00\x00"
    )
    assert codec.encode(reply, codec.Format.MSGPACK) == by_hand
    assert codec.decode_reply(by_hand) == reply
    refused = Reply(
        instance="i",
        incarnation="1",
        ok=False,
        error=ErrorBody(code=ErrorCode.BUSY, message="64 wait", retryable=ErrorCode.BUSY.retryable),
    )
    assert json.loads(codec.encode(refused, codec.Format.JSON))["error"] == {
        "code": "busy",
        "message": "64 wait",
        "retryable": True,
    }


def test_types_are_frozen() -> None:
    with pytest.raises(AttributeError):
        PLAIN.seq = 2  # type: ignore[misc]
    assert msgspec.structs.replace(PLAIN, seq=2).seq == 2
