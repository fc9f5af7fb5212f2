"""Which trainer is in power: one number for each component, in a key-value bucket, that only rises.

A trainer takes a new epoch when it starts and sends it with every command. Whoever has seen a higher
one refuses it, so a trainer that was replaced, but does not know it yet, changes nothing any more.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable

from bus import subjects
from bus.connection import Bus, BusError, KvValue, NoBucket, Timeout, WrongRevision

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
_HIGHEST = 2**63 - 1
_TRY_AGAIN_S = (0.2, 10.0)


async def next_epoch(bus: Bus, namespace: str, component: str, timeout_s: float = TIMEOUT_S) -> int:
    """Take an epoch that nobody has had, higher than all before.

    Raises:
        NotConnected, Timeout, BusError: none was taken, or one that nobody will use.
    """
    return await _change(bus, namespace, component, lambda now: max(now or 0, 0) + 1, timeout_s)


async def highest_epoch(bus: Bus, namespace: str, component: str, timeout_s: float = TIMEOUT_S) -> int | None:
    """The highest epoch so far, or None if there never was one.

    Raises:
        NotConnected, Timeout, BusError
    """
    key = subjects.epoch_key(namespace, component)
    try:
        return _epoch(await bus.kv_read(subjects.EPOCHS_BUCKET, key, timeout_s))
    except NoBucket:
        return None


async def raise_epoch(
    bus: Bus, namespace: str, component: str, epoch: int, timeout_s: float = TIMEOUT_S
) -> int:
    """Make sure that the highest epoch is at least this one; it is returned.

    Raises:
        NotConnected, Timeout, BusError: it may be so or not.
    """

    def higher(now: int | None) -> int:
        return epoch if now is None else max(now, epoch)

    return await _change(bus, namespace, component, higher, timeout_s)


class Epochs:
    """The highest epoch of a component as an instance knows it, also while the broker is away.

    What it has seen never goes down, even if the bucket is lost: then it is put there again.

        async with Epochs(bus, "default", "backend", on_rise) as epochs:
            if command.epoch < epochs.highest: ...
            await epochs.raise_to(command.epoch)

    Attributes:
        highest: None until there was one.
    """

    def __init__(
        self, bus: Bus, namespace: str, component: str, on_rise: Callable[[int], None] | None = None
    ) -> None:
        """`on_rise` is called on the loop with each higher epoch, and must only enqueue."""
        self.highest: int | None = None
        self._bus, self._namespace, self._component = bus, namespace, component
        self._key = subjects.epoch_key(namespace, component)
        self._on_rise = on_rise
        self._known: int | None = None
        self._look = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def stored(self) -> bool:
        """Whether the bucket is known to hold what was seen here."""
        return self.highest == self._known

    async def start(self, timeout_s: float = TIMEOUT_S) -> None:
        """Begin to follow; when it returns the highest epoch so far is known.

        Raises:
            NotConnected, Timeout, BusError: it does not follow.
        """
        found = await highest_epoch(self._bus, self._namespace, self._component, timeout_s)
        self._found(found)
        self._task = asyncio.create_task(self._follow(), name=f"epochs {self._key}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def __aenter__(self) -> "Epochs":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def note(self, epoch: int) -> None:
        """A command brought this epoch. It counts here at once; the bucket learns of it soon."""
        self._rise(epoch)
        if not self.stored:
            self._look.set()

    async def raise_to(self, epoch: int, timeout_s: float = 1.0) -> int:
        """As `note`, but wait until the bucket knows, so that a later life will know it too.

        Never raises for the bus: what it could not store is stored later (`stored` tells).

        Returns:
            The highest epoch, which may be higher than `epoch`.
        """
        self._rise(epoch)
        if not self.stored:
            await self._store(timeout_s)
            if not self.stored:
                self._look.set()
        return self.highest if self.highest is not None else epoch

    def _rise(self, epoch: int | None) -> None:
        if epoch is None or (self.highest is not None and epoch <= self.highest):
            return
        self.highest = epoch
        if self._on_rise is not None:
            try:
                self._on_rise(epoch)
            except Exception:
                logger.exception("on_rise failed")

    def _found(self, epoch: int | None) -> None:
        """What the bucket holds."""
        self._known = epoch
        self._rise(epoch)

    async def _follow(self) -> None:
        with contextlib.suppress(BusError):  # the bus was closed
            notes = asyncio.create_task(self._store_noted())
            try:
                looks = self._bus.kv_changes(subjects.EPOCHS_BUCKET, self._key)
                async with contextlib.aclosing(looks):
                    async for _ in looks:
                        try:
                            self._found(await highest_epoch(self._bus, self._namespace, self._component))
                        except BusError as error:
                            logger.debug("the epoch of %s is not known: %s", self._key, error)
                            continue
                        if not self.stored:  # the bucket was lost
                            self._look.set()
            finally:
                notes.cancel()
                await asyncio.wait({notes})

    async def _store_noted(self) -> None:
        while True:
            await self._look.wait()
            self._look.clear()
            wait_s, longest_s = _TRY_AGAIN_S
            while not self.stored:
                await self._bus.wait_connected()
                if not await self._store(TIMEOUT_S):
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, longest_s)

    async def _store(self, timeout_s: float) -> bool:
        wanted = self.highest
        if wanted is None:
            return True
        try:
            self._found(await raise_epoch(self._bus, self._namespace, self._component, wanted, timeout_s))
        except BusError as error:
            logger.warning("epoch %d of %s is not stored yet: %s", wanted, self._key, error)
            return False
        return True


async def _change(
    bus: Bus, namespace: str, component: str, change: Callable[[int | None], int], timeout_s: float
) -> int:
    """Store `change(epoch now)` if nobody else does first, and then try again."""
    bucket, key = subjects.EPOCHS_BUCKET, subjects.epoch_key(namespace, component)
    end = time.monotonic() + timeout_s
    while (left_s := end - time.monotonic()) > 0:
        try:
            found = await bus.kv_read(bucket, key, left_s)
            now = _epoch(found)
            wanted = change(now)
            if wanted > _HIGHEST:
                raise BusError(f"the epochs of {key} are used up")
            if wanted != now:
                await bus.kv_update(bucket, key, json.dumps(wanted).encode(), found.revision, left_s)
            return wanted
        except NoBucket:
            await bus.ensure_bucket(bucket, ttl_s=None, history=1, limit_marker_ttl_s=None)
        except WrongRevision:
            continue
    raise Timeout(f"the epoch of {key} was not changed in {timeout_s:g} s")


def _epoch(found: KvValue) -> int | None:
    if found.value is None:
        return None
    try:
        value = json.loads(found.value)
        epoch = value["epoch"] if isinstance(value, dict) else value
        if type(epoch) is not int:
            raise ValueError
    except (ValueError, KeyError):
        raise BusError(f"revision {found.revision} of the epoch is not a number") from None
    return epoch
