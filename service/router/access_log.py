"""A line for each request, written together with others: at thousands a second one write each would cost
as much as the request itself."""

import asyncio
import sys
import time

FLUSH_S = 0.2


class AccessLog:
    """Lines in the form of our log, on stdout."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._second = 0
        self._stamp = ""

    def line(self, text: str) -> None:
        now = time.time()
        if int(now) != self._second:
            self._second = int(now)
            self._stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        self._lines.append(f"{self._stamp},{int(now * 1000) % 1000:03d} INFO    {text}\n")
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write what there is."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        lines, self._lines = self._lines, []
        if lines:
            sys.stdout.write("".join(lines))
            sys.stdout.flush()
