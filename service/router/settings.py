"""What `watchkeeper router` is told; see `service.options` for how."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import urlsplit

from service.options import (
    ADDRESS,
    BOOLEAN,
    BROKER_OPTIONS,
    DEFAULT_NATS,
    FILE_TO_WRITE,
    POSITIVE_SECONDS,
    SECONDS,
    SECONDS_OR_0,
    SECRET_FILE,
    TEXT,
    URLS,
    Address,
    BrokerSettings,
    Kind,
    Option,
    SettingsError,
    check_broker,
    choice,
    load,
    toml_strings,
)
from service.router.pool import ROLES, Role

LAST_STEPS_S = 5.0
"""Part of the shutdown budget for what comes after the last request: bus, listener."""


@dataclass(frozen=True)
class Static:
    """An instance that was named instead of discovered.

    Attributes:
        url: `http://host:port` without a slash at the end.
    """

    role: Role
    url: str


@dataclass(frozen=True)
class RouterSettings(BrokerSettings):
    """What `watchkeeper router` is told. Names are those of the options."""

    http_address: Address
    policy: Literal["aggregated", "pd"]
    static: tuple[Static, ...]
    weights: Literal["any", "latest", "min-version"]
    min_version: str | None
    max_attempts: int
    max_requests: int
    first_byte_timeout_s: float
    wait_s: float
    migration_limit: int
    migrate_across_versions: bool
    probe_interval_s: float
    probe_timeout_s: float
    upstream_key_file: Path | None
    admin_token_file: Path | None
    ready_file: Path | None
    grace_period_s: float
    drain_timeout_s: float
    access_log: bool

    @property
    def shutdown_timeout_s(self) -> float:
        """One budget over all stages of the shutdown."""
        return self.grace_period_s + self.drain_timeout_s + LAST_STEPS_S


def _whole_number(least: int) -> Kind:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number") from None
        return check(value)

    def from_toml(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError("a whole number")
        return check(value)

    def check(value: int) -> int:
        if value < least:
            raise ValueError(f"{value} is below {least}")
        return value

    return Kind(parse, from_toml, "N")


def _static(text: str) -> Static:
    role, separator, url = text.partition("=")
    if not separator or role not in ROLES:
        raise ValueError(f"{text!r} is not ROLE=URL with one of the roles {', '.join(ROLES)}")
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    if not _is_base(url):
        raise ValueError(f"{text!r}: the URL is not as in http://10.0.0.7:8000")
    return Static(Role(role), url)


def _is_base(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    known = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    return known and not (parts.path or parts.query or parts.fragment or parts.username)


STATICS = Kind(
    _static,
    lambda value: [_static(text) for text in toml_strings(value, "a list of strings")],
    "ROLE=URL",
    repeatable=True,
)

ROUTER_OPTIONS: tuple[Option, ...] = (
    Option("http_address", ADDRESS, Address("127.0.0.1", 8080), "Where clients come. Port 0: a free one."),
    Option(
        "policy",
        choice("aggregated", "pd"),
        "aggregated",
        "One hop to an aggregated instance, or a prefill and a decode instance.",
    ),
    Option(
        "static",
        STATICS,
        (),
        "An instance that is not in discovery: role=http://host:port; repeatable.",
        "none",
    ),
    Option("nats", URLS, None, "Broker of the discovery.", DEFAULT_NATS),
    *BROKER_OPTIONS,
    Option(
        "weights",
        choice("any", "latest", "min-version"),
        "any",
        "Which weight versions may answer; min-version: --min-version or newer.",
    ),
    Option("min_version", TEXT, None, "The oldest version for --weights min-version."),
    Option(
        "max_attempts",
        _whole_number(1),
        3,
        "How many instances may fail a request before its client is told.",
    ),
    Option("max_requests", _whole_number(1), 10_000, "Requests in flight; more are answered 429."),
    Option(
        "first_byte_timeout_s",
        POSITIVE_SECONDS,
        300.0,
        "How long an answer may take to its first byte; one that is not streamed comes when it is complete.",
    ),
    Option(
        "wait_s",
        SECONDS,
        0.0,
        "How long a request waits for an instance where there is none, instead of a 503.",
    ),
    Option("migration_limit", _whole_number(0), 0, "How often a stream that broke may go on elsewhere."),
    Option(
        "migrate_across_versions",
        BOOLEAN,
        False,
        "Whether a stream may go on with other weights than it began with.",
        "off",
    ),
    Option("probe_interval_s", POSITIVE_SECONDS, 5.0, "Between two probes of an instance."),
    Option("probe_timeout_s", POSITIVE_SECONDS, 2.0, "No answer to a probe in this time: failed."),
    Option(
        "upstream_key_file",
        SECRET_FILE,
        None,
        "File with an API key for instances, where the client sends none.",
    ),
    Option("admin_token_file", SECRET_FILE, None, "File with the bearer token that /state asks for."),
    Option(
        "ready_file",
        FILE_TO_WRITE,
        None,
        "Gets the address, as JSON, once requests are taken; removed at start and end.",
    ),
    Option(
        "grace_period_s",
        SECONDS_OR_0,
        5.0,
        "Between /readyz saying no and refusing new requests; negative means 0.",
    ),
    Option("drain_timeout_s", SECONDS, 30.0, "How long requests in flight may finish at a shutdown."),
    Option("access_log", BOOLEAN, True, "A line for each request.", "on"),
)


def load_router(
    flags: Mapping[str, Any] = MappingProxyType({}),
    environ: Mapping[str, str] | None = None,
    config: str | None = None,
) -> RouterSettings:
    """Settle every option of `watchkeeper router`, as `service.settings.load_serve` does for its own.

    Raises:
        SettingsError: naming the flag, variable, or file and key that is at fault.
    """
    from service.settings import known_options

    environ = os.environ if environ is None else environ
    values = load(ROUTER_OPTIONS, flags, environ, config, known_options())
    check_broker(values)
    if values["weights"] == "min-version" and values["min_version"] is None:
        raise SettingsError("--weights min-version needs --min-version")
    if values["weights"] != "min-version" and values["min_version"] is not None:
        raise SettingsError("--min-version goes with --weights min-version only")
    return RouterSettings(**values)
