"""Asks every instance from time to time whether it is there, beside what it says of itself on the bus."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

import aiohttp
import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.probe import NEW_CONNECTION
from service.router.membership import NOT_PROBED, Membership
from service.router.metrics import Metrics
from service.router.pool import Member
from service.router.settings import RouterSettings
from service.router.upstream import Upstream

log = logging.getLogger(__name__)

TICK_S = 0.05
FIRST_S = 1.0
"""How often an instance is asked that has never answered."""
MODELS_S = 60.0
"""How often an instance is asked for its models; adapters come and go."""
AT_ONCE = 64
NO_ANSWER = 599
NOT_READY = "its readiness is NOT_SERVING"


class _Readiness(Enum):
    READY = "ready"
    NOT_READY = "not ready"
    SILENT = "silent"
    UNKNOWN = "unknown"
    """It has no such service."""


class Prober:
    """Keeps the members' breakers informed.

    Args:
        bus_away: whether nothing is heard from instances now; then what a probe says of an
            instance outranks what it said of itself before.
    """

    def __init__(
        self,
        settings: RouterSettings,
        membership: Membership,
        upstream: Upstream,
        metrics: Metrics,
        bus_away: Callable[[], bool],
    ) -> None:
        self._settings, self._membership, self._upstream = settings, membership, upstream
        self._metrics, self._bus_away = metrics, bus_away
        self._due: dict[Member, float] = {}
        self._models_due: dict[Member, float] = {}
        self._channels: dict[Member, grpc.aio.Channel] = {}
        self._probing: dict[Member, asyncio.Task[None]] = {}
        self._free = asyncio.Semaphore(AT_ONCE)

    def soon(self, member: Member, delay_s: float) -> None:
        """Ask this one after a while, if not before."""
        self._due[member] = min(self._due.get(member, float("inf")), time.monotonic() + delay_s)

    async def first(self) -> None:
        """Probe those of which nothing else is known, once."""
        await asyncio.gather(*(self._probe(one) for one in self._membership if one.unready == NOT_PROBED))

    async def run(self) -> None:
        """Probe until cancelled."""
        try:
            while True:
                now_s = time.monotonic()
                members = set(self._membership)
                for member in members - self._due.keys():
                    self._due[member] = now_s + self._first_delay_s(member)
                for member in self._due.keys() - members:
                    await self._forget(member)
                for member, due_s in self._due.items():
                    if due_s <= now_s and member not in self._probing:
                        self._due[member] = now_s + self._interval_s(member)
                        self._probing[member] = asyncio.create_task(self._probe(member))
                await asyncio.sleep(TICK_S)
        finally:
            for task in self._probing.values():
                task.cancel()
            for channel in self._channels.values():
                await channel.close(None)

    def _first_delay_s(self, member: Member) -> float:
        """Many that come at once are not probed at once."""
        return random.uniform(0, self._interval_s(member))

    def _interval_s(self, member: Member) -> float:
        interval_s = self._settings.probe_interval_s
        return min(FIRST_S, interval_s) if member.unready == NOT_PROBED else interval_s

    async def _forget(self, member: Member) -> None:
        self._due.pop(member, None)
        self._models_due.pop(member, None)
        if (task := self._probing.pop(member, None)) is not None:
            task.cancel()
        if (channel := self._channels.pop(member, None)) is not None:
            await channel.close(None)

    async def _probe(self, member: Member) -> None:
        try:
            async with self._free:
                if member.withdrawn is None or self._bus_away():
                    await self._ask(member)
        except Exception:
            log.exception("probe of %s", member.name)
        finally:
            self._probing.pop(member, None)

    async def _ask(self, member: Member) -> None:
        heard = member.heard
        healthy, readiness = await asyncio.gather(self._healthy(member), self._readiness(member))
        if heard != member.heard:
            return  # its own word is newer
        pool = self._membership.pool(member)
        good = healthy and readiness is not _Readiness.SILENT
        self._metrics.probed(good)
        if member.withdrawn is not None:
            if good and readiness is _Readiness.READY and self._bus_away():
                log.info("%s is ready again, and cannot tell: the broker is away", member.name)
                pool.restore(member)
            return
        before = member.reason
        pool.probed(member, good)
        if good:
            pool.set_unready(member, NOT_READY if readiness is _Readiness.NOT_READY else None)
            pool.set_aside(member, None)
            if time.monotonic() >= self._models_due.get(member, 0.0):
                await self._learn_models(member)
        if member.reason != before:
            log.info("%s: probe %s: %s", member.name, "good" if good else "failed", member.reason or "in use")

    async def _healthy(self, member: Member) -> bool:
        # What has no such page is there all the same.
        return (await self._get(member, "/health"))[0] < 500

    async def _learn_models(self, member: Member) -> None:
        status, body = await self._get(member, "/v1/models")
        cards = _cards(body) if status == 200 else []
        if cards:
            self._models_due[member] = time.monotonic() + MODELS_S
            self._membership.learned(member, cards)

    async def _get(self, member: Member, path: str) -> tuple[int, bytes]:
        """Status and body; `NO_ANSWER` for the status if there was none."""
        headers = {"Authorization": f"Bearer {self._upstream.key}"} if self._upstream.key else {}
        try:
            async with (
                asyncio.timeout(self._settings.probe_timeout_s),
                self._upstream.session.get(member.url + path, headers=headers) as response,
            ):
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return NO_ANSWER, b""

    async def _readiness(self, member: Member) -> _Readiness:
        if member.grpc is None:
            return _Readiness.UNKNOWN
        channel = self._channels.get(member)
        if channel is None:
            channel = self._channels[member] = grpc.aio.insecure_channel(member.grpc, options=NEW_CONNECTION)
        request = health_pb2.HealthCheckRequest(service="readiness")
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                request, timeout=self._settings.probe_timeout_s
            )
        except grpc.aio.AioRpcError as error:
            known = error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)
            return _Readiness.SILENT if known else _Readiness.UNKNOWN
        serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        return _Readiness.READY if serving else _Readiness.NOT_READY


def _cards(body: bytes) -> list[dict[str, Any]]:
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return []
    data = found.get("data") if isinstance(found, dict) else None
    if not isinstance(data, list):
        return []
    return [card for card in data if isinstance(card, dict) and isinstance(card.get("id"), str)]
