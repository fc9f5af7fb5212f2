"""How options are declared and read: flags, environment, file, defaults.

Every option stands once, in a tuple of `Option`; the command line, the variables
`WATCHKEEPER_<NAME>` and the keys of the TOML file all come from there. The first that is given
wins: flag, environment, file, default. An empty variable counts as not given.

In a variable, lists are separated by commas (the empty name is written `""`) and booleans are
1/true/yes/on or 0/false/no/off. A kind that is `merged` collects its values over the sources; every
other list is taken whole from the first source that has it.
"""

import difflib
import ipaddress
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bus.subjects import check_name

DEFAULT_NATS = "nats://127.0.0.1:4222"
"""The broker of everything but `serve`, which may start one there."""

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


# --- how one value is read -------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """How a value is written.

    Attributes:
        parse: from a flag or a variable; raises ValueError with what is wrong.
        from_toml: from the file; raises TypeError for a value of another type.
        metavar: how help texts call it.
        repeatable: given several times, all values count (`parse` then takes one of them).
        merged: what a less important source says is kept, and comes first.
    """

    parse: Callable[[str], Any]
    from_toml: Callable[[object], Any]
    metavar: str
    repeatable: bool = False
    merged: bool = False


def text_kind(parse: Callable[[str], Any], metavar: str) -> Kind:
    def from_toml(value: object) -> Any:
        if not isinstance(value, str):
            raise TypeError("a string")
        return parse(value)

    return Kind(parse, from_toml, metavar)


def seconds(text: str) -> float:
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


def positive(value: float) -> float:
    if value <= 0:
        raise ValueError(f"{value:g} is not above 0")
    return value


def _seconds_kind(check: Callable[[float], float]) -> Kind:
    return Kind(lambda text: check(seconds(text)), lambda value: check(toml_seconds(value)), "SECONDS")


def toml_seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError("a number of seconds")
    return seconds(str(value))


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return text


def choice(*choices: str) -> Kind:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return text_kind(parse, "/".join(choices))


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
    return _urls(",".join(toml_strings(value, "a string, or a list of strings")))


def toml_strings(value: object, wanted: str) -> list[str]:
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


TEXT = text_kind(_not_empty, "TEXT")
NAME = text_kind(check_name, "NAME")
HOST = text_kind(_host, "HOST")
ADDRESS = text_kind(Address.parse, "HOST:PORT")
SECONDS = _seconds_kind(_not_negative)
SECONDS_OR_0 = _seconds_kind(lambda value: max(0.0, value))
POSITIVE_SECONDS = _seconds_kind(positive)
DIRECTORY = text_kind(_path, "DIRECTORY")
READABLE_FILE = text_kind(_readable_file, "FILE")
SECRET_FILE = text_kind(_secret_file, "FILE")
FILE_TO_WRITE = text_kind(_file_to_write, "FILE")
URLS = Kind(_urls, _toml_urls, "URL[,URL…]")
BOOLEAN = Kind(_boolean, _toml_boolean, "")

# --- one option -------------------------------------------------------------------------------------


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


# --- loading -----------------------------------------------------------------------------------


def load(
    options: Iterable[Option],
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    config: str | None,
    known: Collection[str],
) -> dict[str, Any]:
    """Settle `options`.

    Args:
        flags: what the command line gave, by option name: text, bool, or a sequence of texts for
            a repeatable option. None and an empty sequence count as not given.
        config: the TOML file; `WATCHKEEPER_CONFIG` if None.
        known: names that the file may have; commands share one.

    Raises:
        SettingsError: naming the flag, variable, or file and key that is at fault.
    """
    path = config or environ.get("WATCHKEEPER_CONFIG")
    file = _read_config(Path(path).expanduser(), known) if path else {}
    values: dict[str, Any] = {}
    for option in options:
        found = [
            *_from_flag(option, flags.get(option.name)),
            *_from_variable(option, environ.get(option.variable)),
            *_from_file(option, file.get(option.name), path),
        ]
        if option.kind.merged:
            values[option.name] = [pair for pairs in reversed(found) for pair in pairs]
        elif option.kind.repeatable:
            values[option.name] = tuple(dict.fromkeys(found[0])) if found else option.default
        else:
            values[option.name] = found[0] if found else option.default
    return values


def given(value: object) -> bool:
    return value is not None and value != () and value != []


def _from_flag(option: Option, value: Any) -> list[Any]:
    if not given(value):
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
        raise SettingsError(one_line(f"{source}: {error}")) from error


def _from_file(option: Option, entry: tuple[str, object] | None, path: str | None) -> list[Any]:
    if entry is None:
        return []
    key, value = entry
    try:
        return [option.kind.from_toml(value)]
    except TypeError as error:
        raise SettingsError(one_line(f"{path}: {key}: {value!r} is not {error}")) from error
    except ValueError as error:
        raise SettingsError(one_line(f"{path}: {key}: {error}")) from error


def _read_config(path: Path, known: Collection[str]) -> dict[str, tuple[str, object]]:
    """The file's values by option name, each with its key as written."""
    try:
        table = tomllib.loads(_read(path).decode())
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(one_line(f"{path}: not valid TOML: {error}")) from error
    except ValueError as error:
        raise SettingsError(f"--config: {error}") from error
    entries: dict[str, tuple[str, object]] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" (did you mean {near[0].replace('_', '-')}?)" if near else ""
            raise SettingsError(one_line(f"{path}: unknown key {key!r}{hint}"))
        if name in entries:
            raise SettingsError(f"{path}: {key} and {entries[name][0]} are the same key")
        entries[name] = (key, value)
    return entries


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


def one_line(text: str) -> str:
    return " ".join(text.split())


# --- the broker, which nearly every command talks to -------------------------------------------


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


BROKER_OPTIONS = (
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


def check_broker(values: Mapping[str, Any]) -> None:
    """Raise SettingsError for options of the broker that do not go together."""
    if values["nats_password_file"] and not values["nats_user"]:
        raise SettingsError("--nats-password-file needs --nats-user")
    if bool(values["nats_tls_cert"]) != bool(values["nats_tls_key"]):
        raise SettingsError("--nats-tls-cert and --nats-tls-key go together")
