"""What /metrics shows, in the Prometheus format. vLLM's own figures are on its own /metrics."""

from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, generate_latest

from statemachine.states import State

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 600.0)


class Metrics:
    """The figures of one instance."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._state = Enum(
            "watchkeeper_state", "The state shown.", states=[s.value for s in State], registry=registry
        )
        self._ready = Gauge("watchkeeper_ready", "1 while readiness is SERVING.", registry=registry)
        self._live = Gauge("watchkeeper_live", "1 unless the engine failed.", registry=registry)
        self._good = Gauge("watchkeeper_weights_good", "1 while the weights may serve.", registry=registry)
        self._changes = Counter(
            "watchkeeper_state_events", "State events, by the state shown.", ["state"], registry=registry
        )
        self._commands = Counter(
            "watchkeeper_commands",
            "Commands answered, by error code (ok).",
            ["verb", "code"],
            registry=registry,
        )
        self._command_s = Histogram(
            "watchkeeper_command_seconds",
            "From the arrival of a command to its reply.",
            ["verb"],
            buckets=SECONDS,
            registry=registry,
        )
        self._call_s = Histogram(
            "watchkeeper_engine_call_seconds",
            "One engine call.",
            ["call", "outcome"],
            buckets=SECONDS,
            registry=registry,
        )
        self._stage_s = Gauge(
            "watchkeeper_shutdown_stage_seconds",
            "How long a stage of the shutdown took; cut is 1 if its limit ended it.",
            ["stage", "cut"],
            registry=registry,
        )
        self._in_flight = Gauge(
            "watchkeeper_requests_in_flight", "Inference requests accepted and not ended.", registry=registry
        )

    def state(self, state: State, ready: bool, live: bool, good: bool) -> None:
        self._state.state(state.value)
        self._ready.set(ready)
        self._live.set(live)
        self._good.set(good)
        self._changes.labels(state.value).inc()

    def command(self, verb: str, code: str, seconds: float) -> None:
        self._commands.labels(verb, code).inc()
        self._command_s.labels(verb).observe(seconds)

    def call(self, call: str, outcome: str, seconds: float) -> None:
        self._call_s.labels(call, outcome).observe(seconds)

    def stage(self, stage: str, cut: bool, seconds: float) -> None:
        self._stage_s.labels(stage, str(int(cut))).set(seconds)

    def in_flight(self, count: int) -> None:
        self._in_flight.set(count)

    def text(self) -> bytes:
        return generate_latest(self._registry)
