"""A command of ours in a process of its own, and whatever it started."""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from pathlib import Path

from tests.broker import eventually

WATCHKEEPER = (sys.executable, "-m", "service")
ROOT = Path(__file__).parents[1]
MARK = "MARK_OF_A_TEST"


class Program:
    """A running command.

    It and all that it starts, wherever those put themselves, carry a mark in their environment, so
    that a test can tell whether anything of it is left.

    Attributes:
        out, err: the files it writes to.
        started_s: monotonic reading at its start.
    """

    def __init__(self, process: asyncio.subprocess.Process, mark: str, out: Path, err: Path) -> None:
        self.process, self.out, self.err = process, out, err
        self.started_s = time.monotonic()
        self._mark = f"{MARK}={mark}".encode()

    @classmethod
    async def start(cls, folder: Path, *arguments: str, **environ: str) -> "Program":
        """Start `watchkeeper ARGUMENTS`; `folder` gets its output."""
        mark = secrets.token_hex(8)
        out, err = folder / f"{mark}.out", folder / f"{mark}.err"
        # vLLM's processes rename themselves; not over their environment.
        ours = {MARK: mark, "SPT_NOENV": "1"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("WATCHKEEPER_")}
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = await asyncio.create_subprocess_exec(
                *WATCHKEEPER,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                cwd=ROOT,
                env=inherited | ours | environ,
                start_new_session=True,
            )
        return cls(process, mark, out, err)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        return self.process.returncode

    def stderr(self) -> str:
        return self.err.read_text(errors="replace")

    def last_words(self) -> str:
        """For the message of a test that fails."""
        out = self.out.read_text(errors="replace")
        return f"exit code {self.exit_code}\n{out[-4000:]}\n{self.stderr()[-2000:]}"

    async def end(self, within_s: float) -> int:
        try:
            async with asyncio.timeout(within_s):
                return await self.process.wait()
        except TimeoutError:
            raise AssertionError(f"it did not end within {within_s:g} s: {self.last_words()}") from None

    async def kill(self) -> None:
        """End it and whatever it started, whatever state they are in."""
        for pid in [*self.left(), *([self.pid] if self.exit_code is None else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.process.wait()
        await eventually(lambda: not self.left(), within_s=10)

    def left(self) -> list[int]:
        """Those of its processes that are alive, itself too."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        try:  # A process that has ended has no environment.
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False


def assert_in_time(what: str, took_s: float, limit_s: float) -> None:
    """Hold something against the time that was promised for it.

    A machine of which others want twice the cores that it has says nothing about us.
    """
    busy = os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
    assert took_s < limit_s or busy, f"{what}: {took_s:.2f} s, allowed are {limit_s:g} s"


def title(pid: int) -> str:
    """How the process calls itself."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
