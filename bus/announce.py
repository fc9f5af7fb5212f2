"""Weight versions that every instance of a component applies by itself: published, and read in order.

They are kept in a stream, so that an instance that starts later finds the last ones. Newer means a
higher epoch, then a higher sequence in the stream; never the text of the version.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncGenerator

from bus import subjects
from bus.codec import MAX_BYTES, Format, encode
from bus.connection import Bus, BusError, NoStream, NotConnected, Stored, StreamInfo, Timeout, TooLarge
from bus.messages import Announcement

logger = logging.getLogger(__name__)

KEPT = 64
"""Messages of each component that the stream keeps."""
TIMEOUT_S = 5.0
_ATTEMPT_S = 1.0


async def ensure_stream(bus: Bus) -> None:
    """Create the stream of announcements unless it exists.

    Raises:
        NoJetStream, NotConnected, Timeout, BusError
    """
    await bus.ensure_stream(subjects.WEIGHTS_STREAM, [subjects.WEIGHTS_STREAM_SUBJECTS], KEPT)


async def announce(
    bus: Bus, namespace: str, component: str, announcement: Announcement, timeout_s: float = TIMEOUT_S
) -> int:
    """Tell every instance of the component, now and later, to apply a version.

    The same announcement again within two minutes is not stored twice, so it may be repeated after
    a failure.

    Returns:
        Its sequence in the stream.

    Raises:
        TooLarge: the broker, or an instance, would not take it.
        NotConnected, Timeout, BusError: it may have been announced.
    """
    data = encode(announcement, Format.MSGPACK)
    if len(data) > MAX_BYTES:
        raise TooLarge(f"{len(data)} bytes are too many, {MAX_BYTES} are allowed")
    subject = subjects.weights(namespace, component)
    # The id alone would let another announcement that bears it vanish unnoticed.
    once = f"{namespace}.{component}.{hashlib.sha256(data).hexdigest()}"
    end = time.monotonic() + timeout_s
    await ensure_stream(bus)
    while True:
        left_s = end - time.monotonic()
        try:
            # Where the stream was just lost and instances listen, only silence tells.
            return await bus.stream_publish(
                subjects.WEIGHTS_STREAM, subject, data, min(max(left_s, 0.05), _ATTEMPT_S), once
            )
        except (NoStream, Timeout):
            if time.monotonic() >= end:
                raise
        await ensure_stream(bus)


class Announcements:
    """What was announced to one component, in order, each once: as an instance reads it.

        announcements = Announcements(bus, "default", "backend")
        for stored in await announcements.stored(): ...     # all that there is now
        async for stored in announcements.live(): ...       # and what comes, for ever

    Over reconnects and restarts of the broker nothing is repeated or lost. Numbers are those of the
    stream; if the stream itself was lost and made anew they go on from the last one seen, so that
    newer is always higher.
    """

    def __init__(self, bus: Bus, namespace: str, component: str) -> None:
        self._bus = bus
        self._subject = subjects.weights(namespace, component)
        self._created: str | None = None
        self._last = 0
        self._shift = 0

    @property
    def last(self) -> int:
        """The number of the last one given, 0 before the first."""
        return self._shift + self._last

    async def stored(self, timeout_s: float = TIMEOUT_S) -> list[Stored]:
        """Those not given yet that the stream holds, which is created if it is missing.

        Raises:
            NoJetStream, NotConnected, Timeout, BusError: those read so far are given next time.
        """
        last, shift, created = self._last, self._shift, self._created
        try:
            async with asyncio.timeout(timeout_s):
                return [stored async for stored in self._unread()]
        except BaseException as error:
            self._last, self._shift, self._created = last, shift, created
            if isinstance(error, TimeoutError):
                raise Timeout(f"the announcements were not read in {timeout_s:g} s") from None
            raise

    async def live(self) -> AsyncGenerator[Stored, None]:
        """Each one that has not been given yet, as it comes, for ever.

        Close it (`contextlib.aclosing`) when done.

        Raises:
            NotConnected: the bus was closed.
        """
        async with contextlib.aclosing(self._bus.changes_on(self._subject)) as looks:
            async for _ in looks:
                try:
                    async with contextlib.aclosing(self._unread()) as unread:
                        async for stored in unread:
                            yield stored
                except NotConnected as error:
                    logger.debug("announcements are read after the reconnect: %s", error)
                except BusError as error:
                    logger.warning("announcements cannot be read: %s", error)

    async def _unread(self) -> AsyncGenerator[Stored, None]:
        self._compare(await self._info())
        while found := await self._bus.stream_next(subjects.WEIGHTS_STREAM, self._subject, self._last):
            self._last = found.sequence
            yield Stored(self.last, found.data)

    async def _info(self) -> StreamInfo:
        try:
            return await self._bus.stream_info(subjects.WEIGHTS_STREAM)
        except NoStream:
            await ensure_stream(self._bus)
            return await self._bus.stream_info(subjects.WEIGHTS_STREAM)

    def _compare(self, stream: StreamInfo) -> None:
        """Notice that this is not the stream that was read before, or that its end is missing."""
        if self._created is not None and stream.created != self._created:
            logger.warning("the stream of announcements was made anew; it is read from its beginning")
            self._shift, self._last = self.last, 0
        elif stream.last < self._last:
            logger.warning("the stream of announcements has lost its last messages")
            self._shift, self._last = self.last - stream.last, stream.last
        self._created = stream.created
