"""One request for inference, from the first pick to the last byte: attempts, both hops, migration."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from service.router import orders, sse
from service.router.breaker import Outcome
from service.router.dispatch import Admits, Dispatch, KeptKV, NoInstance
from service.router.http_forms import downstream_headers, error_response, upstream_headers
from service.router.orders import Body, Order
from service.router.pool import Booking, Group, Loss, Member, Role
from service.router.relay import Continuable, End, Relay, cut
from service.router.upstream import Cut, Failure, Stream, Whole

log = logging.getLogger(__name__)

KV_SHARE = 0.3
"""What a prompt's KV cache costs until it is fetched, of what its prefill costs. The share is that of
vLLM-Ascend's proxy."""
GROW_TOKENS = 32
"""The load of a stream is brought up to date this often."""
SPARE_TRIES = 20
"""Beyond the number of instances; a request must not go round for ever among those that refuse it."""

NO_INSTANCE = "no_instance"
SHUTTING_DOWN = {"code": "shutting_down", "message": "the router shuts down"}


class GaveUp(Exception):
    """The request cannot be answered by an instance.

    Attributes:
        status: of the answer.
        code: of its error.
        response: of the last instance, which the client is given instead.
        instance: which that is.
    """

    def __init__(
        self, status: int, code: str, message: str, response: Whole | None = None, instance: str = ""
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.response, self.instance = status, code, response, instance


@dataclass
class Leg:
    """An answer, or a part of it, from one instance.

    Attributes:
        prefill: who made the KV cache of the prompt.
        version: of the weights with which it began.
    """

    booking: Booking
    answer: Whole | Stream
    prefill: Member | None = None
    version: str = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.booking.member.group.version


class _Events(web.StreamResponse):
    """A stream of events, whose head leaves together with the first of them."""

    _send_headers_immediately = False


class Exchange:
    """One request.

    Attributes:
        hops: who was tried, and how it went, for the log.
        status: of the answer, or how it ended otherwise.
        first_byte_s: when the answer began, on the monotonic clock.
    """

    def __init__(self, dispatch: Dispatch, request: web.BaseRequest, order: Order, request_id: str) -> None:
        self.hops: list[str] = []
        self.status = "gone"
        self.first_byte_s: float | None = None
        self._dispatch, self._request, self._order = dispatch, request, order
        self._request_id = request_id
        self._least_version = request.headers.get("X-Watchkeeper-Min-Version")
        self._headers = upstream_headers(request.headers, dispatch.upstream.key)
        self._failed: set[Member] = set()
        self._failures = 0
        self._tries = 0
        self._round = 0
        self._last: Failure | None = None
        self._last_name = ""
        self._bookings: list[Booking] = []
        self._streams: list[Stream] = []
        self._body = order.body
        """What is asked for now: later of a broken stream the rest."""
        self._kept: KeptKV | None = None
        self._migrations = 0
        self._stopped = False
        self._until_s = time.monotonic() + dispatch.settings.wait_s

    async def run(self) -> web.StreamResponse:
        """Answer the request. What was booked is released, however this ends."""
        order, settings = self._order, self._dispatch.settings
        relay: Relay | Continuable = Relay()
        body = order.body
        if settings.migration_limit and order.migratable:
            relay = Continuable(order)
            body = relay.asked(body)
        try:
            try:
                leg = await self._open(body)
            except GaveUp as reason:
                return self._refusal(reason)
            if isinstance(leg.answer, Whole):
                return self._whole(leg, leg.answer)
            return await self._stream(leg, leg.answer, relay)
        finally:
            for stream in self._streams:
                stream.close()
            for booking in self._bookings:
                booking.release()
            self._let_go()

    def stop(self) -> None:
        """The router shuts down: end it, with an error."""
        self._stopped = True
        for booking in self._bookings:
            if booking.on_loss is not None and booking.on_loss(Loss.GONE):
                booking.lost = Loss.GONE

    # Before the first byte

    async def _open(self, body: Body, only_version: str | None = None) -> Leg:
        """Find somebody who answers.

        Args:
            only_version: of the weights, if it has to be a certain one.

        Raises:
            GaveUp
        """
        if self._dispatch.settings.policy == "pd":
            return await self._open_pair(body, only_version)
        raw = self._order.raw if body is self._order.body else msgspec.json.encode(body)
        admits = self._admits(Role.AGGREGATED, only_version)
        booking, answer = await self._attempt(Role.AGGREGATED, raw, admits)
        return Leg(booking, answer)

    async def _open_pair(self, body: Body, only_version: str | None) -> Leg:
        self._body = body
        while True:
            prefill: Booking | None = None
            version, kv = only_version, None
            if self._order.splittable:
                found = await self._prefill(body, only_version)
                if isinstance(found, Leg):
                    return found  # the request's own fault
                prefill, kv = found
                version = prefill.member.group.version
            raw = msgspec.json.encode(orders.for_decode(body, kv))
            try:
                booking, answer = await self._attempt(
                    Role.DECODE, raw, self._admits(Role.DECODE, version), one_use=kv is not None
                )
            except Failure:
                self._let_go()
                self._round += 1
                continue
            finally:
                if prefill is not None:
                    prefill.release()
            self._kept = None
            return Leg(booking, answer, prefill.member if prefill is not None else None)

    async def _prefill(self, body: Body, only_version: str | None) -> tuple[Booking, object] | Leg:
        """Have the prompt's KV cache made by somebody for whom there is somebody to decode."""
        usable = self._admits(Role.PREFILL, only_version)
        decodes, pool = self._admits(Role.DECODE, only_version), self._dispatch.pool(Role.DECODE)

        def admits(group: Group) -> bool:
            def fits(other: Group) -> bool:
                return decodes(other) and _alike(group.version, other.version)

            return usable(group) and pool.least(fits, self._failed) is not None

        raw = msgspec.json.encode(orders.for_prefill(body))
        try:
            booking, answer = await self._attempt(Role.PREFILL, raw, admits)
        except GaveUp as reason:
            if reason.code == NO_INSTANCE and pool.least(decodes, self._failed) is None:
                why = self._dispatch.why_none(pool, decodes, self._failed)
                raise self._gave_up(503, NO_INSTANCE, why) from None
            raise
        if not isinstance(answer, Whole) or answer.status != 200:
            self._kept = None
            return Leg(booking, answer)
        kv = _kv_of(answer)
        self._kept = self._keeping(booking.member, kv)
        booking.report(Outcome.GOOD)
        self._dispatch.metrics.attempt(Role.PREFILL, Outcome.GOOD.value)
        booking.grow(-(1 - KV_SHARE) * self._order.prompt_tokens)
        return booking, kv

    async def _attempt(
        self, role: Role, raw: bytes, admits: Admits, one_use: bool = False
    ) -> tuple[Booking, Whole | Stream]:
        """Try one instance after the other.

        Args:
            one_use: what is sent can be used only once: stop when an engine may have used it.

        Raises:
            GaveUp
            Failure: with `one_use`.
        """
        dispatch, path = self._dispatch, self._order.path
        headers = self._hop_headers()
        most = len(dispatch.pool(role)) + SPARE_TRIES
        while True:
            try:
                booking = await dispatch.pick(
                    role, self._order.prompt_tokens, admits, self._failed, self._until_s
                )
            except NoInstance as none:
                raise self._gave_up(503, NO_INSTANCE, str(none)) from None
            self._bookings.append(booking)
            if role is Role.PREFILL:
                self._kept = KeptKV(booking.member, path, self._engine_ids())
            started_s = time.monotonic()
            try:
                leaves = dispatch.leaves(booking, admits, self._failed)
                begun = dispatch.upstream.begin(booking, path, raw, headers, leaves)
                answer = await (self._unless_left(booking, begun) if role is Role.PREFILL else begun)
            except asyncio.CancelledError:
                self._note(booking, started_s, "left")
                dispatch.metrics.attempt(role, Outcome.UNKNOWN.value)
                raise
            except Failure as failure:
                self._note(booking, started_s, failure.told)
                dispatch.failed(booking, failure)
                self._learn(booking, failure, most)
                if failure.reached and self._kept is not None:
                    # It may have fetched the KV cache; nobody else can then.
                    self._kept = replace(self._kept, fetch=None)
                if role is Role.PREFILL and failure.reached:
                    self._let_go()
                elif role is Role.PREFILL:
                    self._kept = None
                if one_use and failure.reached:
                    raise
                continue
            self._note(booking, started_s, str(answer.status))
            if isinstance(answer, Stream):
                self._streams.append(answer)
            return booking, answer

    def _learn(self, booking: Booking, failure: Failure, most: int) -> None:
        if self._stopped:
            raise GaveUp(503, SHUTTING_DOWN["code"], SHUTTING_DOWN["message"])
        self._last, self._last_name = failure, booking.member.name
        self._tries += 1
        if failure.outcome is not Outcome.UNKNOWN:
            self._failures += 1
        if not failure.refused and booking.lost is None:
            self._failed.add(booking.member)
        name = booking.member.name
        if self._failures >= self._dispatch.settings.max_attempts or self._tries >= most:
            status = 504 if failure.timed_out else 502
            raise self._gave_up(status, "upstream_failed", f"{name}: {failure}")

    def _gave_up(self, status: int, code: str, message: str) -> GaveUp:
        last = self._last
        if last is not None and last.outcome is not Outcome.UNKNOWN:
            if last.response is not None:
                return GaveUp(last.response.status, code, message, last.response, self._last_name)
            message = f"{message}; last failure: {last}" if code == NO_INSTANCE else message
        return GaveUp(status, code, message)

    # The answer

    def _whole(self, leg: Leg, answer: Whole) -> web.Response:
        self._dispatch.succeeded(leg.booking, Outcome.GOOD)
        self.status, self.first_byte_s = str(answer.status), time.monotonic()
        return web.Response(status=answer.status, body=answer.body, headers=self._response_headers(leg))

    def _refusal(self, reason: GaveUp) -> web.Response:
        self.first_byte_s = time.monotonic()
        self.status = str(reason.status)
        if (response := reason.response) is not None:
            headers = downstream_headers(response.headers)
            headers["X-Request-Id"] = self._request_id
            headers["X-Watchkeeper-Instance"] = reason.instance
            return web.Response(status=response.status, body=response.body, headers=headers)
        answer = error_response(reason.status, reason.code, str(reason))
        answer.headers["X-Request-Id"] = self._request_id
        return answer

    async def _stream(self, leg: Leg, stream: Stream, relay: Relay | Continuable) -> web.StreamResponse:
        downstream = _Events(headers=self._response_headers(leg))
        await downstream.prepare(self._request)
        self.first_byte_s = time.monotonic()
        while True:
            end, last = await self._pass_on(leg, stream, relay, downstream)
            if end.error is None:
                await downstream.write_eof(last)
                self.status = "200"
                self._dispatch.succeeded(leg.booking, end.outcome)
                await stream.finish()
                return downstream
            stream.close()
            if self._stopped:
                end = End({**SHUTTING_DOWN, "retryable": True}, Outcome.UNKNOWN)
            self._broke(leg, end)
            if isinstance(relay, Continuable) and self._may_migrate:
                self._migrations += 1
                rest = relay.rest()
                if rest is None:
                    await downstream.write(relay.last_words())
                    await downstream.write_eof()
                    self.status = "200"
                    return downstream
                found = await self._next_leg(leg, relay.asked(rest))
                if found is not None:
                    leg, stream = found
                    self._dispatch.metrics.migrated()
                    continue
            await downstream.write(sse.encode({"error": end.error}))
            await downstream.write_eof()
            self.status = "cut"
            return downstream

    @property
    def _may_migrate(self) -> bool:
        return not self._stopped and self._migrations < self._dispatch.settings.migration_limit

    async def _pass_on(
        self, leg: Leg, stream: Stream, relay: Relay | Continuable, downstream: web.StreamResponse
    ) -> tuple[End, bytes]:
        """How it ended, and what of a good end is not sent yet: it goes with the end of the body."""
        booking = leg.booking
        booking.answering()
        shown = relay.tokens
        block = stream.first
        try:
            while block:
                out, end = relay.take(block)
                if end is not None and end.error is None:
                    return end, out
                if out:
                    await downstream.write(out)
                if end is not None:
                    return end, b""
                if relay.tokens - shown >= GROW_TOKENS:
                    booking.grow(relay.tokens - shown)
                    shown = relay.tokens
                block = await stream.block()
        except Cut as reason:
            return cut(str(reason)), b""
        return cut("the stream ended without its last event"), b""

    def _broke(self, leg: Leg, end: End) -> None:
        """A stream has ended before its end: the instance is judged, and not used again for this request."""
        dispatch, booking = self._dispatch, leg.booking
        message = str((end.error or {}).get("message"))
        self.hops.append(f"{booking.member.name} broke: {message}")
        if end.outcome is Outcome.UNKNOWN and not self._stopped:
            dispatch.failed(booking, Failure(message, Outcome.UNKNOWN))
            return
        dispatch.succeeded(booking, end.outcome)

    async def _next_leg(self, leg: Leg, body: Body) -> tuple[Leg, Stream] | None:
        """Somebody who goes on with a broken stream, or None."""
        settings = self._dispatch.settings
        self._failures = self._tries = 0
        self._failed = {leg.booking.member}  # one that broke an earlier part may be well again
        self._round += settings.policy == "pd"
        self._until_s = time.monotonic() + settings.wait_s
        version = None if settings.migrate_across_versions else leg.version
        try:
            following = await self._open(body, version)
        except GaveUp as reason:
            self.hops.append(f"not continued: {reason}")
            return None
        if isinstance(following.answer, Whole):
            self._dispatch.succeeded(following.booking, Outcome.GOOD)
            self.hops.append(f"not continued: HTTP {following.answer.status}")
            return None
        return following, following.answer

    # Odds and ends

    def _admits(self, role: Role, only_version: str | None) -> Admits:
        admits = self._dispatch.admits(role, self._order.model, self._least_version)
        if only_version is None:
            return admits
        return lambda group: admits(group) and _alike(group.version, only_version)

    async def _unless_left(
        self, booking: Booking, begun: Coroutine[Any, Any, Whole | Stream]
    ) -> Whole | Stream:
        """Wait for a prefill. If the client leaves meanwhile, it is seen to that it keeps nothing."""
        attempt = asyncio.ensure_future(begun)
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            kept, self._kept = self._kept, None
            if kept is not None:
                headers = self._hop_headers()
                self._dispatch.abandon(
                    attempt, kept, headers, lambda answer: self._keeping(booking.member, _kv_of(answer))
                )
            raise

    def _keeping(self, member: Member, kv: object) -> KeptKV | None:
        """What a prefill instance keeps according to the parameters that it gave."""
        if kv is None:
            return None
        ids = self._engine_ids()
        if isinstance(kv, dict) and isinstance(remote_id := kv.get("remote_request_id"), str):
            ids = (remote_id, *ids)
        fetch = msgspec.json.encode(orders.for_fetch(self._body, kv))
        return KeptKV(member, self._order.path, ids, fetch)

    def _let_go(self) -> None:
        """Nobody will fetch the KV cache that may be kept for this request."""
        kept, self._kept = self._kept, None
        if kept is not None:
            headers = self._hop_headers()
            self._dispatch.release(kept, headers)

    def _hop_headers(self) -> CIMultiDict[str]:
        headers = self._headers.copy()
        headers["X-Request-Id"] = self._hop_id()
        return headers

    def _hop_id(self) -> str:
        """Both hops of a pair have the same; a later pair another one, since the first may still be known."""
        return f"{self._request_id}-{self._round}" if self._round else self._request_id

    def _engine_ids(self) -> tuple[str, ...]:
        """How an engine may call the request (vLLM's `base_request_id`)."""
        name = f"{'chatcmpl' if self._order.chat else 'cmpl'}-{self._hop_id()}"
        return (name, f"{name}-0")

    def _note(self, booking: Booking, started_s: float, how: str) -> None:
        took_ms = 1000 * (time.monotonic() - started_s)
        self.hops.append(f"{booking.member.role}={booking.member.name} {how} {took_ms:.1f}ms")

    def _response_headers(self, leg: Leg) -> CIMultiDict[str]:
        headers = downstream_headers(leg.answer.headers)
        headers["X-Request-Id"] = self._request_id
        headers["X-Watchkeeper-Instance"] = leg.booking.member.name
        if leg.version:
            headers["X-Watchkeeper-Weight-Version"] = leg.version
        if leg.prefill is not None:
            headers["X-Watchkeeper-Prefill-Instance"] = leg.prefill.name
        return headers


def _alike(one: str, other: str) -> bool:
    """Whether weights are the same, as far as is known."""
    return one == other or not one or not other


def _kv_of(answer: Whole | Stream) -> object:
    if not isinstance(answer, Whole) or answer.status != 200:
        return None
    try:
        body = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return None
    return body.get("kv_transfer_params") if isinstance(body, dict) else None
