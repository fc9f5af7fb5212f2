"""A real nats-server for tests, and waiting for what can be observed."""

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


async def eventually(
    read: Callable[[], Any | Awaitable[Any]], within_s: float = 5.0, every_s: float = 0.01
) -> Any:
    """Wait until `read` gives something true, and return it; fails after `within_s`."""
    end = time.monotonic() + within_s
    while True:
        got = read()
        value = await got if isinstance(got, Awaitable) else got
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s} s; last seen: {value!r}")
        await asyncio.sleep(every_s)


class NatsServer:
    """A nats-server that can be stopped, started again on the same port and data, and frozen."""

    def __init__(
        self, folder: Path, config: str = "", jetstream: bool = True, port: int | None = None
    ) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.jetstream = jetstream
        self.config = config
        self.log = folder / "nats.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def start(self) -> "NatsServer":
        binary = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or "nats-server"
        file = self.folder / "nats.conf"
        store = f'jetstream {{ store_dir: "{self.folder}/data" }}\n' if self.jetstream else ""
        file.write_text(f"listen: 127.0.0.1:{self.port}\n{store}{self.config}\n")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([binary, "-c", str(file)], stdout=log, stderr=log)  # noqa: ASYNC220
        await eventually(self._answers, within_s=10)
        return self

    async def _answers(self) -> bool:
        process = self._process
        if process is None or process.poll() is not None:
            raise AssertionError(f"nats-server ended: {self.log.read_text()[-600:]}")
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    async def stop(self, sig: signal.Signals = signal.SIGTERM) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(sig)
            await asyncio.to_thread(process.wait)

    async def restart(self) -> None:
        await self.stop(signal.SIGKILL)
        await self.start()

    def freeze(self) -> None:
        """The sockets stay open, and nobody answers."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            tasks = Path(f"/proc/{self._process.pid}/task")
            while not all("\nState:\tT" in (task / "status").read_text() for task in tasks.iterdir()):
                time.sleep(0.001)

    def thaw(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def reload(self, config: str) -> None:
        """Take another configuration without a restart."""
        self.config = config
        file = self.folder / "nats.conf"
        store = f'jetstream {{ store_dir: "{self.folder}/data" }}\n' if self.jetstream else ""
        file.write_text(f"listen: 127.0.0.1:{self.port}\n{store}{config}\n")
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)
