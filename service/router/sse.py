"""An answer as a stream of server-sent events: where one ends, and what it says. No I/O."""

from dataclasses import dataclass
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"


class Splitter:
    """Cuts bytes as they arrive into whole events.

    What a client gets ends at an event, so that an error can follow as one.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """All events that are complete now, as they came."""
        if self._rest:
            data = self._rest + data
        end = _end(data)
        self._rest = data[end:]
        return data[:end]

    @property
    def rest(self) -> bytes:
        """The beginning of an event that is not complete."""
        return self._rest


def _end(data: bytes) -> int:
    """Where the last whole event ends; 0 if none does."""
    lines, with_returns = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
    return max(lines + 2 if lines >= 0 else 0, with_returns + 4 if with_returns >= 0 else 0)


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        raw: as it came, with the empty line.
        data: what it carries, None for a comment or for text that is not JSON.
        done: it is the last word of the stream.
    """

    raw: bytes
    data: dict[str, Any] | None = None
    done: bool = False

    @property
    def error(self) -> dict[str, Any] | None:
        """What an engine that fails says instead of a chunk."""
        if self.data is None or "choices" in self.data:
            return None
        return error_of(self.data)

    @property
    def aborted(self) -> bool:
        """Whether the engine ended an answer before its end."""
        return self.data is not None and is_aborted(self.data)


def events(block: bytes) -> list[Event]:
    """Take whole events apart."""
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
    return [_event(text) for text in block.split(b"\n\n") if text]


def notable(block: bytes) -> bool:
    """Whether whole events may hold more than another piece of the answer: worth taking apart."""
    return b"[DONE]" in block or b'"error"' in block or b'"abort"' in block


def encode(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def error_of(body: dict[str, Any]) -> dict[str, Any] | None:
    """The error in an answer, in one form."""
    error = body.get("error")
    if isinstance(error, dict):
        return error
    if error or body.get("object") == "error":  # vLLM before 0.10 had its fields at the top
        return {"message": str(body.get("message") or error), "code": body.get("code")}
    return None


def is_aborted(body: dict[str, Any]) -> bool:
    choices = body.get("choices")
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") == "abort" for choice in choices
    )


def _event(text: bytes) -> Event:
    lines = [line[5:].strip() for line in text.split(b"\n") if line.startswith(b"data:")]
    raw = text + b"\n\n"
    joined = b"\n".join(lines)
    if joined == b"[DONE]":
        return Event(raw, done=True)
    try:
        data = msgspec.json.decode(joined) if joined else None
    except (msgspec.DecodeError, RecursionError):
        data = None
    return Event(raw, data if isinstance(data, dict) else None)
