"""What the router's /metrics shows, in the Prometheus format."""

from collections.abc import Callable, Iterable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.router.pool import Member

SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """The figures of one router.

    Args:
        members: all that are known now.
    """

    def __init__(self, members: Callable[[], Iterable[Member]]) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "watchkeeper_router_requests",
            "Requests that have ended, by HTTP status; cut: the answer broke, gone: the client left.",
            ["status"],
            registry=registry,
        )
        self._request_s = Histogram(
            "watchkeeper_router_request_seconds",
            "From the request to the end of its answer.",
            buckets=SECONDS,
            registry=registry,
        )
        self._first_byte_s = Histogram(
            "watchkeeper_router_first_byte_seconds",
            "From the request to the first byte of its answer.",
            buckets=SECONDS,
            registry=registry,
        )
        self._attempts = Counter(
            "watchkeeper_router_attempts",
            "Attempts at instances: good, bad (counts for isolation), refused (paused), unknown.",
            ["role", "outcome"],
            registry=registry,
        )
        self._migrations = Counter(
            "watchkeeper_router_migrations", "Streams that went on elsewhere.", registry=registry
        )
        self._probes = Counter(
            "watchkeeper_router_probes", "Probes of instances.", ["outcome"], registry=registry
        )
        self._in_flight = Gauge(
            "watchkeeper_router_requests_in_flight", "Requests that have not ended.", registry=registry
        )
        self._stage_s = Gauge(
            "watchkeeper_router_shutdown_stage_seconds",
            "How long a stage of the shutdown took; cut is 1 if its limit ended it.",
            ["stage", "cut"],
            registry=registry,
        )
        registry.register(_Pools(members))
        # `labels` looks a child up anew each time, which is as dear as counting it.
        self._request = cache(self._requests.labels)
        self._attempt = cache(self._attempts.labels)

    def ended(self, status: str, seconds: float) -> None:
        self._request(status).inc()
        self._request_s.observe(seconds)

    def first_byte(self, seconds: float) -> None:
        self._first_byte_s.observe(seconds)

    def attempt(self, role: str, outcome: str) -> None:
        self._attempt(role, outcome).inc()

    def migrated(self) -> None:
        self._migrations.inc()

    def probed(self, good: bool) -> None:
        self._probes.labels("good" if good else "bad").inc()

    def in_flight(self, count: int) -> None:
        self._in_flight.set(count)

    def stage(self, stage: str, cut: bool, seconds: float) -> None:
        self._stage_s.labels(stage, str(int(cut))).set(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Pools(Collector):
    """Instances by role and whether they may be sent requests, counted when they are asked for."""

    def __init__(self, members: Callable[[], Iterable[Member]]) -> None:
        self._members = members

    def collect(self) -> Iterable[Metric]:
        known = GaugeMetricFamily(
            "watchkeeper_router_instances", "Instances that are known.", labels=["role"]
        )
        admissible = GaugeMetricFamily(
            "watchkeeper_router_instances_admissible", "Instances that may be sent requests.", labels=["role"]
        )
        isolated = GaugeMetricFamily(
            "watchkeeper_router_instances_isolated", "Instances left alone after failures.", labels=["role"]
        )
        load = GaugeMetricFamily("watchkeeper_router_load_tokens", "Load of instances.", labels=["role"])
        attempts = GaugeMetricFamily(
            "watchkeeper_router_attempts_in_flight", "Attempts that have not ended.", labels=["role"]
        )
        counts: dict[str, list[float]] = {}
        for member in self._members():
            of_role = counts.setdefault(member.role.value, [0, 0, 0, 0, 0])
            more = (1, member.admissible, member.isolated, member.load, member.in_flight)
            for index, value in enumerate(more):
                of_role[index] += value
        families = (known, admissible, isolated, load, attempts)
        for role, values in counts.items():
            for family, value in zip(families, values, strict=True):
                family.add_metric([role], value)
        return families
