"""Hostile and careless bytes: whatever arrives, the answer is a command or `BadMessage`."""

import json
import subprocess
import sys
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus import codec
from bus.codec import BadMessage, Format, decode_announcement, decode_command
from bus.messages import Command


def test_commands_spelled_out() -> None:
    assert decode_command(b"") == (Command(), Format.JSON)
    assert decode_command(b"{}") == (Command(), Format.JSON)
    assert decode_command(b"\x80") == (Command(), Format.MSGPACK)
    assert decode_command(b"\x81\xa4args\xc0") == (Command(), Format.MSGPACK)
    assert decode_command(
        b"\x85\xa2id\xa1x\xa5epoch\x07\xa7session\xa1s\xa8deadline\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\xa4args\x81\xa5level\x02"
    ) == (Command(id="x", epoch=7, session="s", deadline=1.5, args={"level": 2}), Format.MSGPACK)
    assert decode_command(b'{"issuer": "me", "deadline": 5, "args": {"mode": "keep"}, "more": []}') == (
        Command(issuer="me", deadline=5.0, args={"mode": "keep"}),
        Format.JSON,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", 1),
        ("id", ""),
        ("id", "x" * 1025),
        ("id", b"x"),
        ("issuer", ["me"]),
        ("epoch", True),
        ("epoch", 1.0),
        ("epoch", "1"),
        ("epoch", 2**63),
        ("session", {}),
        ("deadline", "soon"),
        ("deadline", False),
        ("args", []),
        ("args", "mode=keep"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(BadMessage, match=f"^{field}"):
        decode_command(msgpack.packb({field: value}))


DEEP_JSON = b'{"args":' + b'{"a":' * 40 + b"1" + b"}" * 41
BAD = {
    b"\xc1": "never used",
    b"\x93\x01\x02\x03": "an array",
    b"\x07": "a number",
    b"\x80\x80": "trailing bytes",
    b"\x81\xa2id": "truncated",
    b"\x81\xa2id\xa1\xff": "invalid UTF-8",
    b"\x81\x01\x02": "a key that is no string",
    b"\x81\xc4\x01a\x02": "a key of bytes",
    b"\x81\xa4args\x81\xc4\x01a\x02": "the same below",
    b"\x81\xa1a\xd4\x01a": "an extension",
    b"\x81\xa1a\xc7\x00\x05": "an empty extension",
    b"\x81\xa1a\xd6\xff\x00\x00\x00\x00": "a timestamp",
    b"\x81\xa1a\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00": "not a number",
    b"\x81\xa1a\xca\x7f\x80\x00\x00": "infinity",
    b"\xdd\x7f\xff\xff\xff": "claims to be long",
    b"\x81\xa1a" + b"\x91" * 40 + b"\x90": "deep",
    b"\x81\xa1a" + b"\x91" * 5000 + b"\x90": "very deep",
    b" {}": "neither",
    b"{": "truncated JSON",
    b"{}x": "trailing JSON",
    b'{"a": NaN}': "JSON not a number",
    b'{"a": 1e999}': "JSON infinity",
    b'{"a": ' + b"1" * 30 + b"}": "a large JSON integer",
    b'{"a": ' + b"1" * 6000 + b"}": "a huge JSON integer",
    b'{"a": "\xff"}': "JSON invalid UTF-8",
    b'{"a": "\\ud800"}': "half a surrogate pair",
    DEEP_JSON: "deep JSON",
    b'{"a":' * 100_000: "very deep JSON",
    b"\x81\xa1a\xc6\x00\x80\x00\x00" + b"x" * codec.MAX_BYTES: "too long",
    b'{"a":"' + b"x" * codec.MAX_BYTES + b'"}': "too long in JSON",
}


@pytest.mark.parametrize("data", BAD, ids=BAD.values())
def test_bad_bytes_are_answered_in_their_own_format(data: bytes) -> None:
    with pytest.raises(BadMessage) as bad:
        decode_command(data)
    assert bad.value.format is (Format.JSON if data.startswith(b"{") else Format.MSGPACK)
    text = str(bad.value)
    assert text
    assert len(text) < 300
    with pytest.raises(BadMessage):
        decode_announcement(data)


def test_a_repeated_key_is_read_like_its_last() -> None:
    assert decode_command(b'{"id":"a","id":"b"}')[0].id == "b"
    assert decode_command(b"\x82\xa2id\xa1a\xa2id\xa1b")[0].id == "b"


BOMBS = {
    "empty maps": b"\x81\xa1a\xdd\x00\x0e\x00\x00" + b"\x80" * 0xE0000,
    "arrays of empty maps": b"\x81\xa1a\xdc\x00\x08" + (b"\xdd\x00\x0f\x00\x00" + b"\x80" * 0xF0000) * 8,
    "nested claims": b"\x81\xa1a" + b"\xdd\x00\x0f\x42\x3f" * 1000 + b"\xc0" * 8_000_000,
    "short strings": b"\x81\xa1a\xdd\x00\x0f\x00\x00" + b"\xa2\xc3\xa9" * 0xF0000,
    "JSON arrays": b'{"a":[' + b"[]," * 2_700_000 + b"1]}",
}


MEASURE = """
import resource, sys
from bus.codec import BadMessage, decode_command
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode_command(sys.stdin.buffer.read())
except BadMessage:
    pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_memory_is_bounded(data: bytes) -> None:
    """In a process of its own, since what counts is what the system had to give."""
    ran = subprocess.run([sys.executable, "-c", MEASURE], input=data, capture_output=True, check=True)
    assert int(ran.stdout) < 160


def test_a_large_honest_message_passes() -> None:
    """A weight update that names 50,000 tensors."""
    info = {
        "names": [f"model.layers.{n}.weight" for n in range(50_000)],
        "dtype_names": ["bfloat16"] * 50_000,
        "shapes": [[4096, 4096]] * 50_000,
    }
    for data in (
        msgpack.packb({"args": {"update_info": info}}),
        json.dumps({"args": {"update_info": info}}).encode(),
    ):
        assert decode_command(data)[0].args["update_info"] == info


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_any_bytes(data: bytes) -> None:
    for decode in (
        decode_command,
        decode_announcement,
        codec.decode_reply,
        codec.decode_snapshot,
        codec.decode_entry,
    ):
        for variant in (data, b"{" + data, b"\x81\xa4args" + data):
            try:
                decode(variant)
            except BadMessage as bad:
                told = bad.format
                assert told is (Format.JSON if variant[:1] == b"{" else Format.MSGPACK)


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)
FIELDS = st.sampled_from(["id", "issuer", "epoch", "session", "deadline", "args", "other"])


@given(st.dictionaries(FIELDS, VALUES, max_size=5), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_map_is_a_command_or_refused_and_what_is_accepted_can_be_written(
    raw: dict[str, Any], as_json: bool
) -> None:
    try:
        data = json.dumps(raw).encode() if as_json else msgpack.packb(raw)
    except (TypeError, OverflowError, UnicodeEncodeError):
        return
    try:
        command, format = decode_command(data)
    except BadMessage:
        return
    for kind in Format:
        codec.encode(command, kind)
    again = decode_command(codec.encode({k: v for k, v in raw.items() if k != "other"}, format))
    assert again[0] == command
