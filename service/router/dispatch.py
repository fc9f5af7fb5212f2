"""Which instance gets a request, and what is remembered of how that went."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from service.router.breaker import Outcome
from service.router.membership import Membership
from service.router.metrics import Metrics
from service.router.pool import Booking, Group, Loss, Member, Pool, Role
from service.router.settings import RouterSettings
from service.router.upstream import Failure, Stream, Upstream, Whole

log = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 5.0
LAST_WORDS_S = 2.0
"""How long a prefill has to answer after it was told to end; then its connection is broken."""
ABORT_PATHS = ("/abort_requests", "/inference/v1/abort_requests")
"""vLLM has the one in its development mode and with --tokens-only, the other with --enable-scale-out."""
SHOWN_REASONS = 10
"""Of a fleet of hundreds a client needs no list."""

Admits = Callable[[Group], bool]


class NoInstance(Exception):
    """No instance may be sent the request, and none came in the time there was."""


def _anybody(group: Group) -> bool:
    return True


@dataclass(frozen=True)
class KeptKV:
    """A KV cache that a prefill instance keeps until it is fetched.

    Attributes:
        request_ids: as the instance may call the request.
        fetch: what a decode instance is asked on `path` so that it fetches the cache; None where that
            cannot be: it is not known where it is, or somebody may have fetched it.
    """

    member: Member
    path: str
    request_ids: tuple[str, ...]
    fetch: bytes | None = None


class Dispatch:
    """The choice of instances for all requests of one router.

    Attributes:
        probe_soon: called with a member that is set aside, and after how many seconds to ask it.
    """

    def __init__(self, settings: RouterSettings, metrics: Metrics, upstream: Upstream) -> None:
        self.settings, self.metrics, self.upstream = settings, metrics, upstream
        self.membership = Membership(settings.static, self._someone_came)
        self.probe_soon: Callable[[Member, float], None] = lambda member, delay_s: None
        self._waiting: set[asyncio.Future[None]] = set()
        self._no_waiting = False
        self._tasks: set[asyncio.Task[None]] = set()

    def pool(self, role: Role) -> Pool:
        return self.membership.pools[role]

    def admits(self, role: Role, model: str, least_version: str | None) -> Admits:
        """Which members of a role may answer.

        Args:
            model: as the request names it. A name that nobody has said to answer to is anybody's.
            least_version: that the request asks for, beside what the settings do.
        """
        by_name = bool(model) and self.membership.chooses(role, model)
        policy, versions = self.settings.weights, self.membership.versions
        newest = self.membership.newest(role) if policy == "latest" else None
        least = [version for version in (self.settings.min_version, least_version) if version is not None]
        if not (by_name or least or policy == "latest"):
            return _anybody

        def admits(group: Group) -> bool:
            if by_name and group.models and model not in group.models:
                return False
            if policy == "latest" and group.version != newest:
                return False
            return all(bool(group.version) and versions.at_least(group.version, each) for each in least)

        return admits

    async def pick(
        self, role: Role, load: float, admits: Admits, without: Collection[Member], until_s: float
    ) -> Booking:
        """Book an instance, waiting for one until `until_s` on the monotonic clock.

        Raises:
            NoInstance: with the reasons.
        """
        pool = self.pool(role)
        while (booking := pool.pick(load, admits, without)) is None:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or self._no_waiting:
                raise NoInstance(self.why_none(pool, admits, without))
            news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(news)
            try:
                async with asyncio.timeout(left_s):
                    await news
            except TimeoutError:
                pass
            finally:
                self._waiting.discard(news)
        return booking

    def give_up_waiting(self) -> None:
        """From now on nobody waits for an instance."""
        self._no_waiting = True
        self._someone_came()

    def leaves(self, booking: Booking, admits: Admits, without: Collection[Member]) -> Callable[[Loss], bool]:
        """Whether an attempt that waits for its answer had better be made elsewhere."""
        pool, member = self.pool(booking.member.role), booking.member

        def leave(loss: Loss) -> bool:
            return loss is Loss.GONE or pool.least(admits, [*without, member]) is not None

        return leave

    def failed(self, booking: Booking, failure: Failure) -> None:
        """Draw the conclusions from an attempt that came to nothing."""
        member = booking.member
        self._report(booking, failure.outcome)
        booking.release()
        self.metrics.attempt(member.role, "refused" if failure.refused else failure.outcome.value)
        # What was aborted says nothing of an instance that would tell if it were paused.
        mute = not member.incarnation and failure.outcome is Outcome.UNKNOWN and booking.lost is None
        if failure.refused or mute:
            self.pool(member.role).set_aside(member, str(failure))
            self.probe_soon(member, failure.retry_after_s)

    def succeeded(self, booking: Booking, outcome: Outcome) -> None:
        self._report(booking, outcome)
        booking.release()
        self.metrics.attempt(booking.member.role, outcome.value)

    def _report(self, booking: Booking, outcome: Outcome) -> None:
        member, was_isolated = booking.member, booking.member.isolated
        booking.report(outcome)
        if member.isolated and not was_isolated:
            log.warning("%s: %s", member.name, member.reason)

    def release(self, kept: "KeptKV", headers: Mapping[str, str]) -> None:
        """See to it, in the background, that a KV cache that nobody will fetch is not kept."""
        self._in_background(self._release(kept, headers))

    def abandon(
        self,
        attempt: "asyncio.Future[Whole | Stream]",
        kept: "KeptKV",
        headers: Mapping[str, str],
        keeping: Callable[[Whole | Stream], "KeptKV | None"],
    ) -> None:
        """End a prefill for which nobody waits any more, in the background.

        Args:
            kept: what is known of it before its answer.
            keeping: what is kept according to its answer.
        """
        self._in_background(self._abandon(attempt, kept, headers, keeping))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=RELEASE_TIMEOUT_S)

    async def _abandon(
        self,
        attempt: "asyncio.Future[Whole | Stream]",
        kept: "KeptKV",
        headers: Mapping[str, str],
        keeping: Callable[[Whole | Stream], "KeptKV | None"],
    ) -> None:
        # To break the connection would end it too. But if it has just finished, its answer is needed: only
        # that tells where its cache can be fetched.
        answer: Whole | Stream | None = None
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                if await self._abort(kept, headers):
                    answer = await attempt
        except (aiohttp.ClientError, OSError, TimeoutError, Failure):
            pass
        finally:
            attempt.add_done_callback(_look_at)
            attempt.cancel()
        if answer is not None and (left := keeping(answer)) is not None:
            await self._release(left, headers)

    async def _release(self, kept: "KeptKV", headers: Mapping[str, str]) -> None:
        for step in (self._fetch, self._abort):
            try:
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    await step(kept, headers)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                log.info("%s may keep a KV cache until its lease ends: %r", kept.member.name, error)

    async def _fetch(self, kept: "KeptKV", headers: Mapping[str, str]) -> None:
        """vLLM keeps the cache of a request that has ended, whatever is aborted: only a decode instance that
        fetches it sets it free. What that makes of it nobody reads."""
        version = kept.member.group.version
        if kept.fetch is None:
            return
        booking = self.pool(Role.DECODE).pick(1, lambda group: not version or group.version in ("", version))
        if booking is None:
            return
        try:
            await self._post(booking.member, kept.path, kept.fetch, headers)
        finally:
            booking.release()

    async def _abort(self, kept: "KeptKV", headers: Mapping[str, str]) -> bool:
        """Whether the instance knows how."""
        body = msgspec.json.encode({"request_ids": kept.request_ids})
        for path in ABORT_PATHS:
            status = await self._post(kept.member, path, body, headers)
            if status not in (404, 405):
                return status < 400
        return False

    async def _post(self, member: Member, path: str, body: bytes, headers: Mapping[str, str]) -> int:
        url = f"{member.url}{path}"
        async with self.upstream.session.post(url, data=body, headers=headers) as response:
            await response.read()
            return response.status

    def _someone_came(self) -> None:
        for news in self._waiting:
            if not news.done():
                news.set_result(None)

    def why_none(self, pool: Pool, admits: Admits, without: Collection[Member] = ()) -> str:
        """Why nobody of a role can be picked, for the client."""
        reasons = []
        for member in pool:
            if member in without:
                reasons.append(f"{member.name}: failed this request")
            elif member.reason is not None:
                reasons.append(f"{member.name}: {member.reason}")
            elif not admits(member.group):
                version = member.group.version or "unknown"
                reasons.append(f"{member.name}: another model or weight version ({version})")
            if len(reasons) == SHOWN_REASONS:
                break
        more = len(pool) - len(reasons)
        told = "; ".join(reasons) + (f"; and {more} more" if reasons and more > 0 else "")
        return f"no {pool.role} instance takes requests" + (f" ({told})" if told else ": none is known")


def _look_at(attempt: "asyncio.Future[Whole | Stream]") -> None:
    if not attempt.cancelled():
        attempt.exception()
