"""The ordered end: stages with one deadline budget, then everything that was acquired, backwards."""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_CUT = 0, 1, 2, 70

RELEASE_LIMIT_S = 6.0
"""For one resource; the kill of a process group, the longest, is bounded at 5 s."""


@dataclass(frozen=True)
class Stage:
    """One step of the shutdown.

    Attributes:
        limit_s: it is cut after this time, or when the budget is used up.
        waits: it only waits for others, so a second signal skips it.
    """

    name: str
    run: Callable[[], Awaitable[None]]
    limit_s: float
    waits: bool = False


async def run_stages(
    stages: Sequence[Stage],
    budget_s: float,
    hurry: asyncio.Event,
    began: Callable[[str], None],
    took: Callable[[str, bool, float], None],
) -> None:
    """Run the stages in order. One that fails or is cut is logged, and the next one follows.

    Args:
        budget_s: for all stages together; each gets what is left of it, at most its own limit.
        hurry: once set, stages that wait end at once.
        began: is told the name of each stage when it begins.
        took: is told its name, whether its limit cut it, and how many seconds it took.
    """
    end = time.monotonic() + budget_s
    for stage in stages:
        began(stage.name)
        limit_s = max(0.0, min(stage.limit_s, end - time.monotonic()))
        started, cut = time.monotonic(), False
        try:
            await _bounded(stage, limit_s, hurry)
        except TimeoutError:
            cut = True
            log.warning("shutdown: %s was cut after %.1f s", stage.name, limit_s)
        except Exception as error:
            log.warning("shutdown: %s failed: %r", stage.name, error)
        else:
            log.info("shutdown: %s (%.2f s)", stage.name, time.monotonic() - started)
        took(stage.name, cut, time.monotonic() - started)


async def _bounded(stage: Stage, limit_s: float, hurry: asyncio.Event) -> None:
    work = asyncio.ensure_future(stage.run())
    skip = asyncio.ensure_future(hurry.wait()) if stage.waits else None
    try:
        waited_for = {work, skip} if skip else {work}
        await asyncio.wait(waited_for, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        elif not (skip and skip.done()):
            raise TimeoutError
    finally:
        for task in (work, skip):
            if task is not None and not task.done():
                task.cancel()
        await asyncio.wait({t for t in (work, skip) if t is not None})


class Signals:
    """SIGTERM and SIGINT: the first begins the shutdown, the second cuts it short."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.name = ""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived, number)

    def _arrived(self, number: signal.Signals) -> None:
        if self.first.is_set():
            self.second.set()
            return
        self.name = signal.Signals(number).name
        self.first.set()


class Resources:
    """What must be released at the end, in reverse order of registration."""

    def __init__(self) -> None:
        self._releases: list[tuple[str, Callable[[], Awaitable[object]]]] = []

    def register(self, name: str, release: Callable[[], Awaitable[object]]) -> None:
        self._releases.append((name, release))

    async def release(self) -> None:
        """Release everything once. One that fails or hangs is logged, and the others still run."""
        while self._releases:
            name, release = self._releases.pop()
            try:
                async with asyncio.timeout(RELEASE_LIMIT_S):
                    await release()
            except Exception as error:
                log.warning("release of %s failed: %r", name, error)


async def cancel(task: "asyncio.Future[Any]") -> None:
    """Cancel a task of ours and wait for its end."""
    task.cancel()
    await asyncio.wait({task})


def closing(action: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    """The release of a resource that is closed without waiting."""

    async def close() -> None:
        action()

    return close
