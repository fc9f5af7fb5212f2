"""Leases, epochs and what a weight-update session has received: rules about trainers, not engines."""

import hashlib
import json
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bus.messages import Manifest

EXPIRED_KEPT = 1000
"""Sessions whose end is remembered, so that a trainer that comes back too late is told why."""

MAX_HEADER_BYTES = 100 * 1024 * 1024
"""Of a safetensors file (huggingface/safetensors, MAX_HEADER_SIZE)."""


@dataclass
class Lease:
    """Time that somebody has to show signs of life.

    Attributes:
        length_s: None for ever.
        busy: commands of its holder that wait or run; meanwhile it stands still.
    """

    length_s: float | None
    epoch: int | None
    renewed_s: float
    busy: int = 0

    def expires_s(self) -> float | None:
        """Monotonic reading at which it runs out; None while it cannot."""
        if self.length_s is None or self.busy:
            return None
        return self.renewed_s + self.length_s


@dataclass
class Received:
    """What the chunks of one session have brought.

    Attributes:
        names: distinct tensor names.
        unknown: chunks whose content cannot be told from their `update_info`.
        bytes: as far as known.
    """

    names: set[str] = field(default_factory=set)
    chunks: int = 0
    unknown: int = 0
    bytes: int = 0

    def add(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self.chunks += 1
        for info in update_info if isinstance(update_info, list) else [update_info]:
            names, size = contents(info)
            if names is None:
                self.unknown += 1
            else:
                self.names.update(names)
                self.bytes += size

    def missing_from(self, manifest: Manifest) -> str | None:
        """What stands between this and the manifest, in words; None if nothing does."""
        if manifest.chunks is not None and self.chunks != manifest.chunks:
            return f"{self.chunks} of {manifest.chunks} chunks were loaded"
        if self.unknown:
            return f"{self.unknown} chunks do not say which tensors they hold, so none of them counts"
        if len(self.names) != manifest.parameters:
            return f"{len(self.names)} of {manifest.parameters} parameters were received"
        if manifest.names_sha256 is not None and names_sha256(self.names) != manifest.names_sha256.lower():
            return "the names of the parameters received are not those of the manifest"
        return None


def names_sha256(names: Iterable[str]) -> str:
    """Of the distinct names, sorted, joined by newlines, UTF-8."""
    return hashlib.sha256("\n".join(sorted(set(names))).encode()).hexdigest()


def contents(update_info: dict[str, Any]) -> tuple[list[str] | None, int]:
    """The tensor names that a chunk brings, and their bytes as far as known.

    vLLM's backends list them (`names`); the `file` backend's are in the headers of its files.
    """
    names = update_info.get("names")
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return names, 0
    path = update_info.get("path")
    if not isinstance(path, str):
        return None, 0
    found: list[str] = []
    size = 0
    try:
        for file in safetensors_files(Path(path)):
            for name, tensor in safetensors_header(file).items():
                begin, end = tensor["data_offsets"]
                found.append(name)
                size += end - begin
    except (OSError, ValueError, KeyError, TypeError):
        return None, 0
    return found, size


def safetensors_files(path: Path) -> list[Path]:
    """The files that a path stands for.

    Raises:
        ValueError: there are none.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"no safetensors file in {str(path)!r}")
    return files


def safetensors_header(file: Path) -> dict[str, Any]:
    """Name, type, shape and place of each tensor.

    Raises:
        OSError, ValueError: it cannot be read, or is cut short.
    """
    with file.open("rb") as source:
        (length,) = struct.unpack("<Q", source.read(8).ljust(8, b"\0"))
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise ValueError(f"{str(file)!r} is not a safetensors file")
        header = json.loads(source.read(length))
        size = source.seek(0, 2)
    header.pop("__metadata__", None)
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if size < 8 + length + end:
        raise ValueError(f"{str(file)!r} is cut short: {size} of {8 + length + end} bytes")
    return dict(header)


@dataclass
class Session:
    """What is known of the open weight-update session beside the state machine."""

    id: str
    lease: Lease
    manifest: Manifest | None
    budgets_s: dict[str, float]
    owner: str | None = None
    received: Received = field(default_factory=Received)


class Sessions:
    """Who holds what, until when, and which epoch is in power.

    Args:
        raise_epoch: is told a higher epoch, to keep it for all instances and later lives.
    """

    def __init__(
        self,
        raise_epoch: Callable[[int], None] = lambda epoch: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session: Session | None = None
        self.pause: Lease | None = None
        self.highest_epoch: int | None = None
        self._raise_epoch, self._clock = raise_epoch, clock
        self._expired: deque[str] = deque(maxlen=EXPIRED_KEPT)

    # --- epochs ---------------------------------------------------------------------------------

    def is_stale(self, epoch: int | None) -> bool:
        return epoch is not None and self.highest_epoch is not None and epoch < self.highest_epoch

    def see_epoch(self, epoch: int | None, ours: bool = True) -> None:
        """An epoch was seen in a command, or (not `ours`) in the bucket."""
        if epoch is None or (self.highest_epoch is not None and epoch <= self.highest_epoch):
            return
        self.highest_epoch = epoch
        if ours:
            self._raise_epoch(epoch)

    # --- leases ---------------------------------------------------------------------------------

    def open(
        self,
        id: str,
        lease_s: float | None,
        epoch: int | None,
        manifest: Manifest | None,
        budgets_s: dict[str, float],
        owner: str | None = None,
    ) -> None:
        self.session = Session(id, Lease(lease_s, epoch, self._clock()), manifest, budgets_s, owner)

    def follow(self, open_session: str | None, paused_by_command: bool) -> None:
        """The state machine has moved on: forget what no longer exists."""
        if self.session is not None and self.session.id != open_session:
            self.session = None
        if not paused_by_command:
            self.pause = None

    def hold_pause(self, lease_s: float | None, epoch: int | None) -> None:
        """A pause was accepted. One without a lease stays until somebody resumes."""
        self.pause = Lease(lease_s, epoch, self._clock())

    def renew(self, *leases: Lease | None) -> None:
        """Their holder has shown a sign of life."""
        for lease in filter(None, leases):
            lease.renewed_s = self._clock()

    def expired(self, id: str) -> bool:
        return id in self._expired

    def end(self, id: str) -> None:
        """This session ran out, or a higher epoch ended it."""
        self._expired.append(id)

    def overdue(self) -> "tuple[str | None, bool]":
        """The session, and whether the pause, that must end now.

        They have run out, or belong to a lower epoch than the one in power.
        """
        now_s = self._clock()
        session = self.session.id if self.session and self._is_over(self.session.lease, now_s) else None
        pause = self.pause
        leased = pause is not None and pause.length_s is not None
        return session, leased and pause is not None and self._is_over(pause, now_s)

    def _is_over(self, lease: Lease, now_s: float) -> bool:
        expires_s = lease.expires_s()
        return self.is_stale(lease.epoch) or (expires_s is not None and expires_s <= now_s)

    def next_expiry_s(self) -> float | None:
        """Monotonic reading of the next end of a lease."""
        leases = [self.session.lease if self.session else None, self.pause]
        ends = [end for lease in leases if lease and (end := lease.expires_s()) is not None]
        return min(ends, default=None)
