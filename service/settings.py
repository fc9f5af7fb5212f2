"""What an instance and a client command are told; see `service.options` for how."""

import math
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from bus.subjects import default_instance_name
from service.options import (
    ADDRESS,
    BOOLEAN,
    BROKER_OPTIONS,
    DEFAULT_NATS,
    DIRECTORY,
    FILE_TO_WRITE,
    HOST,
    NAME,
    POSITIVE_SECONDS,
    SECONDS,
    SECONDS_OR_0,
    SECRET_FILE,
    URLS,
    Address,
    BrokerSettings,
    Kind,
    Option,
    SettingsError,
    check_broker,
    choice,
    given,
    load,
    positive,
    seconds,
    toml_seconds,
    toml_strings,
)
from statemachine.health import LEGACY

CALL_TIMEOUTS_S: Mapping[str, float] = MappingProxyType(
    {
        "pause": 60.0,
        "resume": 60.0,
        "start": 60.0,
        "sleep": 120.0,
        "wake_up": 120.0,
        "init": 120.0,
        "finish": 300.0,
        "update": 600.0,
    }
)
"""Engine calls and how long each may take. A drain has no limit here."""

_CALL_ALIASES = {
    "init_weight_transfer": "init",
    "start_weight_update": "start",
    "update_weights": "update",
    "finish_weight_update": "finish",
}

LAST_STEPS_S = 5.0
"""Part of the shutdown budget for what comes after the engine is gone: reports, bus, listeners."""

TERMINATION_MARGIN_S = 5
"""Between the shutdown budget and the moment at which Kubernetes should kill the pod."""

DYNAMO_GRACE = "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"
DEFAULT_GRACE_S = 5.0


@dataclass(frozen=True)
class ClientSettings(BrokerSettings):
    """What every command that talks to instances is told."""


@dataclass(frozen=True)
class ServeSettings(BrokerSettings):
    """What `watchkeeper serve` is told. Names are those of the options.

    Attributes:
        call_timeouts_s: by the names of `CALL_TIMEOUTS_S`; always all of them.
        shutdown_timeout_s: one budget over all stages.
        graceful_shutdown: False skips the drain: requests in flight end at once, retryable.
        engine_args: passed on untouched.
    """

    model: str
    engine_args: tuple[str, ...]
    engine: Literal["vllm", "sim"]
    instance: str
    role: Literal["prefill", "decode", "aggregated"]
    grpc_address: Address
    http_address: Address
    admin_address: Address
    admin_token_file: Path | None
    advertise_host: str | None
    ready_file: Path | None
    data_dir: Path
    grace_period_s: float
    drain_timeout_s: float
    engine_shutdown_timeout_s: float
    shutdown_timeout_s: float
    engine_start_timeout_s: float
    health_interval_s: float
    health_timeout_s: float
    call_timeouts_s: Mapping[str, float]
    failure_linger_s: float
    withdraw_on_pause: tuple[str, ...]
    graceful_shutdown: bool

    @property
    def termination_grace_s(self) -> int:
        """What `terminationGracePeriodSeconds` of a pod with these settings has to be."""
        return math.ceil(self.shutdown_timeout_s) + TERMINATION_MARGIN_S


def _health_name(text: str) -> str:
    name = "" if text == '""' else text
    if name not in LEGACY:
        raise ValueError(f'{text!r} is not one of vllm.Inference, vllm.Control, ""')
    return name


def _call_timeout(text: str) -> tuple[str, float]:
    verb, separator, limit = text.partition("=")
    if not separator:
        raise ValueError(f"{text!r} is not VERB=SECONDS")
    return _call_verb(verb), positive(seconds(limit))


def _call_verb(verb: str) -> str:
    name = verb.strip().replace("-", "_")
    name = _CALL_ALIASES.get(name, name)
    if name not in CALL_TIMEOUTS_S:
        raise ValueError(f"{verb!r} is not one of {', '.join(CALL_TIMEOUTS_S)}")
    return name


def _toml_call_timeouts(value: object) -> list[tuple[str, float]]:
    if not isinstance(value, dict):
        raise TypeError("a table as in {pause = 60, update = 600}")
    found = []
    for verb, limit in value.items():
        try:
            found.append((_call_verb(verb), positive(toml_seconds(limit))))
        except TypeError as error:
            raise ValueError(f"{verb}: {limit!r} is not {error}") from error
    return found


HEALTH_NAMES = Kind(
    _health_name,
    lambda value: [_health_name(name) for name in toml_strings(value, "a list of strings")],
    "NAME",
    repeatable=True,
)
CALL_TIMEOUTS = Kind(_call_timeout, _toml_call_timeouts, "VERB=SECONDS", repeatable=True, merged=True)


CLIENT_OPTIONS: tuple[Option, ...] = (
    Option("nats", URLS, None, "Broker to talk to.", DEFAULT_NATS),
    *BROKER_OPTIONS,
)

SERVE_OPTIONS: tuple[Option, ...] = (
    Option("engine", choice("vllm", "sim"), "vllm", "Real vLLM, or the simulated engine."),
    Option(
        "nats",
        URLS,
        None,
        "Broker to use.",
        "one that answers on 127.0.0.1:4222, else an embedded one is started there",
    ),
    *BROKER_OPTIONS,
    Option("instance", NAME, None, "Name of this instance.", "host name and 6 hex digits"),
    Option("role", choice("prefill", "decode", "aggregated"), "aggregated", "Its part in serving."),
    Option(
        "grpc_address",
        ADDRESS,
        Address("127.0.0.1", 50051),
        "gRPC health, and vllm.Control (on loopback only, unless an admin token is set). Port 0: a free one.",
    ),
    Option("http_address", ADDRESS, Address("127.0.0.1", 8000), "The engine's OpenAI-compatible API."),
    Option(
        "admin_address",
        ADDRESS,
        Address("127.0.0.1", 9090),
        "Admin HTTP: /livez /readyz /metrics /state and the verbs.",
    ),
    Option("admin_token_file", SECRET_FILE, None, "File with the bearer token that admin HTTP asks for."),
    Option(
        "advertise_host",
        HOST,
        None,
        "What discovery tells others.",
        "the bound address; for a wildcard $POD_IP or the primary address",
    ),
    Option(
        "ready_file",
        FILE_TO_WRITE,
        None,
        "Gets all addresses, as JSON, once gRPC listens and the bus is connected; removed at start and end.",
    ),
    Option("data_dir", DIRECTORY, None, "Data of the embedded broker.", "$XDG_STATE_HOME/watchkeeper"),
    Option(
        "grace_period_s",
        SECONDS_OR_0,
        DEFAULT_GRACE_S,
        "Between leaving discovery and refusing new requests; negative means 0.",
        f"{DEFAULT_GRACE_S:g}, or ${DYNAMO_GRACE}",
    ),
    Option("drain_timeout_s", SECONDS, 30.0, "How long requests in flight may finish at a shutdown."),
    Option("engine_shutdown_timeout_s", SECONDS, 30.0, "Then the engine's process group is killed."),
    Option(
        "shutdown_timeout_s",
        SECONDS,
        None,
        "One budget over all stages of a shutdown.",
        f"sum of the three above, and {LAST_STEPS_S:g}",
    ),
    Option("engine_start_timeout_s", POSITIVE_SECONDS, 1800.0, "Loading longer than this fails."),
    Option("health_interval_s", POSITIVE_SECONDS, 2.0, "How often the engine is asked for its state."),
    Option("health_timeout_s", POSITIVE_SECONDS, 15.0, "No answer to that in this time: failed, 'wedged'."),
    Option(
        "call_timeout_s",
        CALL_TIMEOUTS,
        (),
        "Limit of one engine call; repeatable.",
        ", ".join(f"{verb}={seconds:g}" for verb, seconds in CALL_TIMEOUTS_S.items()),
    ),
    Option(
        "failure_linger_s",
        SECONDS,
        2.0,
        "How long the listener stays up with liveness NOT_SERVING after the engine failed.",
    ),
    Option(
        "withdraw_on_pause",
        HEALTH_NAMES,
        (),
        "Legacy health name that follows readiness (vllm.Inference for Dynamo sidecars); repeatable.",
        "none",
    ),
    Option(
        "graceful_shutdown",
        BOOLEAN,
        True,
        "Whether requests in flight may finish at a shutdown, as Dynamo's graceful_shutdown.",
        "on, for every role",
    ),
)


# --- loading -----------------------------------------------------------------------------------


def load_serve(
    model: str,
    engine_args: Sequence[str] = (),
    flags: Mapping[str, Any] = MappingProxyType({}),
    environ: Mapping[str, str] | None = None,
    config: str | None = None,
) -> ServeSettings:
    """Settle every option of `watchkeeper serve`, and check what they point to.

    Args:
        flags: what the command line gave, by option name: text, bool, or a sequence of texts for
            a repeatable option. None and an empty sequence count as not given.
        environ: `os.environ` if None.
        config: the TOML file; `WATCHKEEPER_CONFIG` if None.

    Raises:
        SettingsError: naming the flag, variable, or file and key that is at fault.
    """
    environ = os.environ if environ is None else environ
    values = _load(SERVE_OPTIONS, flags, environ, config)
    ours = given(flags.get("grace_period_s")) or environ.get("WATCHKEEPER_GRACE_PERIOD_S")
    if not ours and (dynamo := environ.get(DYNAMO_GRACE)):
        values["grace_period_s"] = _dynamo_grace_s(dynamo)
    values["call_timeouts_s"] = MappingProxyType({**CALL_TIMEOUTS_S, **dict(values.pop("call_timeout_s"))})
    if values["instance"] is None:
        values["instance"] = default_instance_name(socket.gethostname())
    if values["data_dir"] is None:
        values["data_dir"] = _state_home(environ) / "watchkeeper"
    if values["shutdown_timeout_s"] is None:
        stages = ("grace_period_s", "drain_timeout_s", "engine_shutdown_timeout_s")
        values["shutdown_timeout_s"] = sum(values[stage] for stage in stages) + LAST_STEPS_S
    model = check_model(model, values["engine"])
    return ServeSettings(model=model, engine_args=tuple(engine_args), **values)


def load_client(
    flags: Mapping[str, Any] = MappingProxyType({}),
    environ: Mapping[str, str] | None = None,
    config: str | None = None,
) -> ClientSettings:
    """As `load_serve`, for the commands that talk to instances. They may share its file.

    Raises:
        SettingsError: naming the flag, variable, or file and key that is at fault.
    """
    environ = os.environ if environ is None else environ
    values = _load(CLIENT_OPTIONS, flags, environ, config)
    return ClientSettings(**{field.name: values[field.name] for field in fields(ClientSettings)})


def _load(
    options: Sequence[Option], flags: Mapping[str, Any], environ: Mapping[str, str], config: str | None
) -> dict[str, Any]:
    values = load(options, flags, environ, config, known_options())
    check_broker(values)
    return values


def known_options() -> Collection[str]:
    """Names that a configuration file may have; all commands may share one."""
    from service.router.settings import ROUTER_OPTIONS

    return {option.name for option in (*SERVE_OPTIONS, *CLIENT_OPTIONS, *ROUTER_OPTIONS)}


def _dynamo_grace_s(text: str) -> float:
    """As Dynamo reads it: what is no number counts as its default, below 0 as 0."""
    try:
        return max(0.0, seconds(text))
    except ValueError:
        return DEFAULT_GRACE_S


def check_model(model: str, engine: str) -> str:
    """A hub name, or a directory that holds a model; the simulated engine takes any name.

    Raises:
        SettingsError: it is a path, and no model is there.
    """
    if not model.strip():
        raise SettingsError("MODEL is empty")
    if engine == "sim":
        return model
    path = Path(model).expanduser()
    if not (model.startswith(("/", ".", "~")) or model.count(os.sep) > 1 or path.exists()):
        return model
    if path.is_dir():
        # params.json is what Mistral's own format has instead.
        if not any((path / name).is_file() for name in ("config.json", "params.json")):
            raise SettingsError(f"MODEL {model!r} has no config.json: not a model directory")
    elif not path.exists():
        raise SettingsError(f"MODEL {model!r}: no such directory")
    elif path.suffix != ".gguf":
        raise SettingsError(f"MODEL {model!r} is not a directory")
    return str(path) if model.startswith("~") else model


def advertised_host(given: str | None, bound: Address, environ: Mapping[str, str] | None = None) -> str:
    """What others are told to connect to, for a socket that is bound to `bound`."""
    if given is not None:
        return given
    if not bound.wildcard:
        return bound.host
    return (os.environ if environ is None else environ).get("POD_IP") or _primary_address(bound)


def _primary_address(bound: Address) -> str:
    """The address this machine would use to reach others; nothing is sent."""
    v6 = ":" in bound.host
    attempts = [(socket.AF_INET, "192.0.2.1")]  # a wildcard IPv6 socket serves IPv4 as well
    if v6:
        attempts.append((socket.AF_INET6, "2001:db8::1"))
    for family, elsewhere in attempts:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as trial:
                trial.connect((elsewhere, 9))
                return str(trial.getsockname()[0])
        except OSError:
            continue
    return "::1" if v6 else "127.0.0.1"


def _state_home(environ: Mapping[str, str]) -> Path:
    given = Path(environ.get("XDG_STATE_HOME", ""))
    # The XDG specification: a path that is not absolute counts as not given.
    return given if given.is_absolute() else Path.home() / ".local" / "state"
