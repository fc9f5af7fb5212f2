"""What an instance and a client command are told: flags, environment, file, defaults.

Every option stands once, in `SERVE_OPTIONS` or `CLIENT_OPTIONS`; the command line, the variables
`WATCHKEEPER_<NAME>` and the keys of the TOML file all come from there. The first that is given
wins: flag, environment, file, default. An empty variable counts as not given.

In a variable, lists are separated by commas (the empty name is written `""`) and booleans are
1/true/yes/on or 0/false/no/off. `call_timeout_s` is merged verb by verb over the sources; every
other list is taken whole from the first source that has it.
"""

import difflib
import ipaddress
import math
import os
import re
import socket
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from bus.subjects import check_name, default_instance_name
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

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")


class SettingsError(ValueError):
    """An option, a variable, a file or what they point to is wrong. The text is one line."""


@dataclass(frozen=True)
class Address:
    """Where to listen. `str()` of it is what `parse` takes, and a gRPC target."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Take `HOST:PORT` apart; an IPv6 host stands in brackets.

        Raises:
            ValueError: with what is wrong about it.
        """
        host, colon, port_text = text.rpartition(":")
        if not colon or not port_text.isascii() or not port_text.isdecimal():
            raise ValueError(f"{text!r} is not HOST:PORT")
        port = int(port_text)
        if port > 65535:
            raise ValueError(f"{text!r}: a port is at most 65535")
        if not host:
            raise ValueError(f"{text!r} has no host (0.0.0.0 or [::] listens everywhere)")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
            if not _is_ip(host, 6):
                raise ValueError(f"{text!r}: {host!r} is not an IPv6 address")
        elif ":" in host:
            raise ValueError(f"{text!r}: write an IPv6 address in brackets, as in [::1]:{port}")
        elif re.fullmatch(r"[0-9.]+", host) and not _is_ip(host, 4):
            raise ValueError(f"{text!r}: {host!r} is not an IPv4 address")
        elif not _HOST.fullmatch(host):
            raise ValueError(f"{text!r}: {host!r} is not a host name")
        return cls(host, port)

    @property
    def loopback(self) -> bool:
        if self.host.lower() == "localhost":
            return True
        return _is_ip(self.host) and ipaddress.ip_address(self.host).is_loopback

    @property
    def wildcard(self) -> bool:
        return _is_ip(self.host) and ipaddress.ip_address(self.host).is_unspecified

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class BrokerSettings:
    """Which broker, as whom, and which component.

    Attributes:
        nats: URLs, or None where nothing was said.
        nats_wait_s: how long to wait for the broker at the start.
        nats_password_file: readable and not empty; see `read_secret`.
    """

    nats: tuple[str, ...] | None
    nats_wait_s: float
    nats_creds: Path | None
    nats_user: str | None
    nats_password_file: Path | None
    nats_tls_ca: Path | None
    nats_tls_cert: Path | None
    nats_tls_key: Path | None
    namespace: str
    component: str


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


# --- how one value is read -------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """How a value is written.

    Attributes:
        parse: from a flag or a variable; raises ValueError with what is wrong.
        from_toml: from the file; raises TypeError for a value of another type.
        metavar: how help texts call it.
        repeatable: given several times, all values count (`parse` then takes one of them).
    """

    parse: Callable[[str], Any]
    from_toml: Callable[[object], Any]
    metavar: str
    repeatable: bool = False


def _text_kind(parse: Callable[[str], Any], metavar: str) -> Kind:
    def from_toml(value: object) -> Any:
        if not isinstance(value, str):
            raise TypeError("a string")
        return parse(value)

    return Kind(parse, from_toml, metavar)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of seconds") from None
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite number of seconds")
    return value


def _not_negative(value: float) -> float:
    if value < 0:
        raise ValueError(f"{value:g} is negative")
    return value


def _positive(value: float) -> float:
    if value <= 0:
        raise ValueError(f"{value:g} is not above 0")
    return value


def _seconds_kind(check: Callable[[float], float]) -> Kind:
    return Kind(lambda text: check(_seconds(text)), lambda value: check(_toml_seconds(value)), "SECONDS")


def _toml_seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError("a number of seconds")
    return _seconds(str(value))


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return text


def _choice(*choices: str) -> Kind:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return _text_kind(parse, "/".join(choices))


def _boolean(text: str) -> bool:
    match text.strip().lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off":
            return False
    raise ValueError(f"{text!r} is neither true nor false")


def _toml_boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("true or false")
    return value


def _urls(text: str) -> tuple[str, ...]:
    urls = [url.strip() for url in text.split(",")]
    for url in urls:
        scheme, separator, rest = url.rpartition("://")
        if separator and scheme not in ("nats", "tls", "ws", "wss"):
            raise ValueError(f"{url!r}: the scheme is not one of nats, tls, ws, wss")
        if not rest or any(c.isspace() for c in rest):
            raise ValueError(f"{text!r} is not a list of URLs as in nats://127.0.0.1:4222")
    return tuple(url if "://" in url else f"nats://{url}" for url in urls)


def _toml_urls(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return _urls(value)
    return _urls(",".join(_toml_strings(value, "a string, or a list of strings")))


def _toml_strings(value: object, wanted: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError(wanted)
    return value


def _path(text: str) -> Path:
    return Path(_not_empty(text)).expanduser()


def _readable_file(text: str) -> Path:
    path = _path(text)
    _read(path)
    return path


def _secret_file(text: str) -> Path:
    path = _path(text)
    read_secret(path)
    return path


def _file_to_write(text: str) -> Path:
    path = _path(text)
    if not path.absolute().parent.is_dir():
        raise ValueError(f"no such directory: {str(path.parent)!r}")
    if path.is_dir():
        raise ValueError(f"{text!r} is a directory")
    return path


def _host(text: str) -> str:
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not _is_ip(host) and not _HOST.fullmatch(host):
        raise ValueError(f"{text!r} is not a host name or an IP address")
    return host


def _health_name(text: str) -> str:
    name = "" if text == '""' else text
    if name not in LEGACY:
        raise ValueError(f'{text!r} is not one of vllm.Inference, vllm.Control, ""')
    return name


def _call_timeout(text: str) -> tuple[str, float]:
    verb, separator, seconds = text.partition("=")
    if not separator:
        raise ValueError(f"{text!r} is not VERB=SECONDS")
    return _call_verb(verb), _positive(_seconds(seconds))


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
    for verb, seconds in value.items():
        try:
            found.append((_call_verb(verb), _positive(_toml_seconds(seconds))))
        except TypeError as error:
            raise ValueError(f"{verb}: {seconds!r} is not {error}") from error
    return found


TEXT = _text_kind(_not_empty, "TEXT")
NAME = _text_kind(check_name, "NAME")
HOST = _text_kind(_host, "HOST")
ADDRESS = _text_kind(Address.parse, "HOST:PORT")
SECONDS = _seconds_kind(_not_negative)
SECONDS_OR_0 = _seconds_kind(lambda value: max(0.0, value))
POSITIVE_SECONDS = _seconds_kind(_positive)
DIRECTORY = _text_kind(_path, "DIRECTORY")
READABLE_FILE = _text_kind(_readable_file, "FILE")
SECRET_FILE = _text_kind(_secret_file, "FILE")
FILE_TO_WRITE = _text_kind(_file_to_write, "FILE")
URLS = Kind(_urls, _toml_urls, "URL[,URL…]")
BOOLEAN = Kind(_boolean, _toml_boolean, "")
HEALTH_NAMES = Kind(
    _health_name,
    lambda value: [_health_name(name) for name in _toml_strings(value, "a list of strings")],
    "NAME",
    repeatable=True,
)
CALL_TIMEOUTS = Kind(_call_timeout, _toml_call_timeouts, "VERB=SECONDS", repeatable=True)


# --- the options -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        default: the value where no source gives one; None is filled in later, or means none.
        shown: the default as help texts show it, where it is not simply `default`.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    shown: str | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "WATCHKEEPER_" + self.name.upper()

    @property
    def shown_default(self) -> str | None:
        if self.shown is not None or self.default is None:
            return self.shown
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


_BROKER_OPTIONS = (
    Option("nats_wait_s", SECONDS, 5.0, "How long to wait for the broker at the start."),
    Option("nats_creds", READABLE_FILE, None, "Credentials file (JWT and seed) for the broker."),
    Option("nats_user", TEXT, None, "User name for the broker."),
    Option("nats_password_file", SECRET_FILE, None, "File with the password for --nats-user."),
    Option("nats_tls_ca", READABLE_FILE, None, "PEM file with the authorities to check the broker by."),
    Option("nats_tls_cert", READABLE_FILE, None, "PEM file with our certificate."),
    Option("nats_tls_key", READABLE_FILE, None, "PEM file with our private key."),
    Option("namespace", NAME, "default", "Namespace of the instances."),
    Option("component", NAME, "backend", "Component of the instances."),
)

CLIENT_OPTIONS: tuple[Option, ...] = (
    Option("nats", URLS, None, "Broker to talk to.", "nats://127.0.0.1:4222"),
    *_BROKER_OPTIONS,
)

SERVE_OPTIONS: tuple[Option, ...] = (
    Option("engine", _choice("vllm", "sim"), "vllm", "Real vLLM, or the simulated engine."),
    Option(
        "nats",
        URLS,
        None,
        "Broker to use.",
        "one that answers on 127.0.0.1:4222, else an embedded one is started there",
    ),
    *_BROKER_OPTIONS,
    Option("instance", NAME, None, "Name of this instance.", "host name and 6 hex digits"),
    Option("role", _choice("prefill", "decode", "aggregated"), "aggregated", "Its part in serving."),
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
    ours = _given(flags.get("grace_period_s")) or environ.get("WATCHKEEPER_GRACE_PERIOD_S")
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
    options: Iterable[Option],
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    config: str | None,
) -> dict[str, Any]:
    path = config or environ.get("WATCHKEEPER_CONFIG")
    file = _read_config(Path(path).expanduser()) if path else {}
    values: dict[str, Any] = {}
    for option in options:
        found = [
            *_from_flag(option, flags.get(option.name)),
            *_from_variable(option, environ.get(option.variable)),
            *_from_file(option, file.get(option.name), path),
        ]
        if option.kind is CALL_TIMEOUTS:
            values[option.name] = [pair for pairs in reversed(found) for pair in pairs]
        elif option.kind.repeatable:
            values[option.name] = tuple(dict.fromkeys(found[0])) if found else option.default
        else:
            values[option.name] = found[0] if found else option.default
    if values["nats_password_file"] and not values["nats_user"]:
        raise SettingsError("--nats-password-file needs --nats-user")
    if bool(values["nats_tls_cert"]) != bool(values["nats_tls_key"]):
        raise SettingsError("--nats-tls-cert and --nats-tls-key go together")
    return values


def _given(value: object) -> bool:
    return value is not None and value != () and value != []


def _from_flag(option: Option, value: Any) -> list[Any]:
    if not _given(value):
        return []
    if isinstance(value, bool):
        return [value]
    return [_parse(option, [value] if isinstance(value, str) else value, option.flag)]


def _from_variable(option: Option, text: str | None) -> list[Any]:
    if not text:
        return []
    texts = [part.strip() for part in text.split(",")] if option.kind.repeatable else [text]
    return [_parse(option, texts, option.variable)]


def _parse(option: Option, texts: Sequence[str], source: str) -> Any:
    values = [parse_value(option.kind, source, text) for text in texts]
    return values if option.kind.repeatable else values[-1]


def parse_value(kind: Kind, source: str, text: str) -> Any:
    """Read one value, written as on the command line.

    Raises:
        SettingsError: naming `source`.
    """
    try:
        return kind.parse(text)
    except ValueError as error:
        raise SettingsError(_one_line(f"{source}: {error}")) from error


def _from_file(option: Option, entry: tuple[str, object] | None, path: str | None) -> list[Any]:
    if entry is None:
        return []
    key, value = entry
    try:
        return [option.kind.from_toml(value)]
    except TypeError as error:
        raise SettingsError(_one_line(f"{path}: {key}: {value!r} is not {error}")) from error
    except ValueError as error:
        raise SettingsError(_one_line(f"{path}: {key}: {error}")) from error


def _read_config(path: Path) -> dict[str, tuple[str, object]]:
    """The file's values by option name, each with its key as written."""
    try:
        table = tomllib.loads(_read(path).decode())
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(_one_line(f"{path}: not valid TOML: {error}")) from error
    except ValueError as error:
        raise SettingsError(f"--config: {error}") from error
    known = {option.name for option in (*SERVE_OPTIONS, *CLIENT_OPTIONS)}
    entries: dict[str, tuple[str, object]] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" (did you mean {near[0].replace('_', '-')}?)" if near else ""
            raise SettingsError(_one_line(f"{path}: unknown key {key!r}{hint}"))
        if name in entries:
            raise SettingsError(f"{path}: {key} and {entries[name][0]} are the same key")
        entries[name] = (key, value)
    return entries


def _dynamo_grace_s(text: str) -> float:
    """As Dynamo reads it: what is no number counts as its default, below 0 as 0."""
    try:
        return max(0.0, _seconds(text))
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


def read_secret(path: Path) -> str:
    """The content of a token or password file, without white space around it.

    Raises:
        ValueError: it cannot be read, or is empty.
    """
    try:
        secret = _read(path).decode().strip()
    except UnicodeDecodeError:
        raise ValueError(f"{str(path)!r} is not UTF-8") from None
    if not secret:
        raise ValueError(f"{str(path)!r} is empty")
    return secret


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


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r}: {error.strerror}") from error


def _is_ip(text: str, version: int | None = None) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return version is None or address.version == version


def _one_line(text: str) -> str:
    return " ".join(text.split())
