"""Bytes to wire types and back. What arrives is untrusted: every limit is here."""

import math
from enum import Enum
from typing import Any, TypeVar

import msgpack
import msgspec

from bus.messages import Announcement, Command, InstanceEntry, Reply, Snapshot, describe

MAX_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 32
MAX_ITEMS = 1_000_000
"""Containers and their elements, in one message. An empty map costs 1 byte on the wire and 72 here,
so this, and not `MAX_BYTES`, bounds the memory of a hostile message (to about 80 MB)."""

_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
_T = TypeVar("_T")


class Format(Enum):
    """How a message was written, and so how its answer is."""

    MSGPACK = "msgpack"
    JSON = "json"


class BadMessage(Exception):
    """The bytes are not a message; nothing was changed.

    Attributes:
        format: in which the sender is answered.
    """

    def __init__(self, message: str, format: Format) -> None:
        super().__init__(message)
        self.format = format


def decode_command(data: bytes) -> tuple[Command, Format]:
    """Read a control message.

    A body that starts with `{` is JSON; an empty one is an empty map and is answered in JSON; any
    other must be one msgpack map.

    Raises:
        BadMessage: and never anything else.
    """
    if not data:
        return Command(), Format.JSON
    format = Format.JSON if data[:1] == b"{" else Format.MSGPACK
    raw = _decode_untrusted(data, format)
    if raw.get("args", ...) is None:  # a nil map of other languages
        del raw["args"]
    return _convert(raw, Command, format), format


def decode_announcement(data: bytes) -> Announcement:
    """Read a weight announcement, as strictly as a command.

    Raises:
        BadMessage: and never anything else.
    """
    format = Format.JSON if data[:1] == b"{" else Format.MSGPACK
    return _convert(_decode_untrusted(data, format), Announcement, format)


def decode_json(data: bytes) -> Any:
    """Read JSON that came another way than the bus, within the limits of a message.

    Raises:
        BadMessage: and never anything else.
    """
    if len(data) > MAX_BYTES:
        raise BadMessage(f"{len(data)} bytes are too many, {MAX_BYTES} are allowed", Format.JSON)
    try:
        value = _decode_json(data)
        _check({"": value})
    except Exception as error:
        text = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadMessage(f"not JSON: {text}", Format.JSON) from None
    return value


def encode(value: Any, format: Format) -> bytes:
    """Write a wire type, or plain maps and lists, with every field present."""
    if format is Format.JSON:
        return msgspec.json.encode(value)
    return msgspec.msgpack.encode(value)


def decode_reply(data: bytes) -> Reply:
    return _decode_trusted(data, Reply)


def decode_snapshot(data: bytes) -> Snapshot:
    return _decode_trusted(data, Snapshot)


def decode_entry(data: bytes) -> InstanceEntry:
    return _decode_trusted(data, InstanceEntry)


def _decode_trusted(data: bytes, kind: type[_T]) -> _T:
    """Read what an instance wrote, in either format, ignoring unknown fields.

    Raises:
        BadMessage: it cannot be read.
    """
    format = Format.JSON if data[:1] == b"{" else Format.MSGPACK
    try:
        if len(data) > MAX_BYTES:
            raise BadMessage(f"longer than {MAX_BYTES} bytes", format)
        if format is Format.JSON:
            return msgspec.json.decode(data, type=kind)
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise BadMessage(f"not a {kind.__name__}: {error}", format) from None


def _decode_untrusted(data: bytes, format: Format) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise BadMessage(f"{len(data)} bytes are too many, {MAX_BYTES} are allowed", format)
    try:
        raw = _decode_json(data) if format is Format.JSON else _decode_msgpack(data)
        if not isinstance(raw, dict):
            raise ValueError("it is not a map")
        _check(raw)
    except Exception as error:  # whatever the decoders make of hostile bytes is the sender's fault
        text = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadMessage(f"not a {format.value} message: {text or type(error).__name__}", format) from None
    return raw


def _decode_json(data: bytes) -> Any:
    if data.count(b"{") + data.count(b"[") + data.count(b",") > MAX_ITEMS:
        raise ValueError(f"more than {MAX_ITEMS} items")
    return msgspec.json.decode(data)


def _decode_msgpack(data: bytes) -> Any:
    items = 0

    def count(container: Any) -> Any:
        nonlocal items
        items += len(container) + 1
        if items > MAX_ITEMS:
            raise ValueError(f"more than {MAX_ITEMS} items")
        return container

    return msgpack.unpackb(
        data,
        raw=False,
        strict_map_key=True,
        object_hook=count,
        list_hook=count,
        ext_hook=_refuse_extension,
        max_str_len=MAX_BYTES,
        max_bin_len=MAX_BYTES,
        max_array_len=MAX_ITEMS,
        max_map_len=MAX_ITEMS,
        max_ext_len=0,
    )


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError("extension types are not allowed")


def _check(root: dict[str, Any]) -> None:
    """Refuse what our own encoders or a later reader could not take."""
    level: list[Any] = [root]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        below: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                if any(not isinstance(key, str) for key in container):
                    raise ValueError("a map key is not a string")
                values: Any = container.values()
            else:
                values = container
            for value in values:
                kind = type(value)
                if kind is dict or kind is list:
                    below.append(value)
                elif kind is float:
                    if not math.isfinite(value):
                        raise ValueError("a number is not finite")
                elif kind is int and not _INT_MIN <= value <= _INT_MAX:
                    raise ValueError("an integer is out of range")
        level = below


def _convert(raw: dict[str, Any], kind: type[_T], format: Format) -> _T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise BadMessage(describe(error, ""), format) from None
    except RecursionError:
        raise BadMessage("it is nested too deeply", format) from None
