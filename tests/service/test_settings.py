"""Where an option's value comes from, and what is said about a wrong one."""

import math
import os
import re
import socket
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import settings
from service.options import Address, SettingsError, read_secret
from service.settings import (
    CALL_TIMEOUTS_S,
    CLIENT_OPTIONS,
    DYNAMO_GRACE,
    SERVE_OPTIONS,
    ClientSettings,
    ServeSettings,
    advertised_host,
    load_client,
    load_serve,
)


def serve(
    flags: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    config: Path | None = None,
    model: str = "hub/name",
) -> ServeSettings:
    return load_serve(
        model, (), {"engine": "sim", **(flags or {})}, environ or {}, str(config) if config else None
    )


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str, name: str = "wk.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_defaults_are_those_of_the_contract() -> None:
    found = load_serve("org/model", ("--max-model-len", "64"), environ={"HOME": "/home/x"})
    assert found.model == "org/model"
    assert found.engine_args == ("--max-model-len", "64")
    assert (found.engine, found.role, found.nats) == ("vllm", "aggregated", None)
    assert (found.namespace, found.component) == ("default", "backend")
    assert [str(a) for a in (found.grpc_address, found.http_address, found.admin_address)] == [
        "127.0.0.1:50051",
        "127.0.0.1:8000",
        "127.0.0.1:9090",
    ]
    assert (found.grace_period_s, found.drain_timeout_s, found.engine_shutdown_timeout_s) == (5, 30, 30)
    assert found.shutdown_timeout_s == 70
    assert found.termination_grace_s == 75
    assert (found.engine_start_timeout_s, found.nats_wait_s, found.failure_linger_s) == (1800, 5, 2)
    assert (found.health_interval_s, found.health_timeout_s) == (2, 15)
    assert found.call_timeouts_s == CALL_TIMEOUTS_S
    assert found.withdraw_on_pause == ()
    assert found.graceful_shutdown is True
    assert found.ready_file is None
    assert found.advertise_host is None


def test_every_setting_has_an_option_and_the_other_way_round() -> None:
    names = {option.name for option in SERVE_OPTIONS}
    renamed = {"call_timeouts_s" if name == "call_timeout_s" else name for name in names}
    assert {field.name for field in fields(ServeSettings)} == renamed | {"model", "engine_args"}
    assert {field.name for field in fields(ClientSettings)} == {option.name for option in CLIENT_OPTIONS}


def test_flag_wins_over_variable_over_file_over_default(write: Any) -> None:
    file = write('role = "prefill"\ncomponent = "from-file"\ndrain_timeout_s = 3\n')
    environ = {"WATCHKEEPER_COMPONENT": "from-env", "WATCHKEEPER_DRAIN_TIMEOUT_S": "4"}
    found = serve({"drain_timeout_s": "5"}, environ, file)
    assert (found.drain_timeout_s, found.component, found.role) == (5, "from-env", "prefill")
    assert found.namespace == "default"


def test_the_file_may_be_named_by_a_variable(write: Any) -> None:
    file = write('namespace = "lab"\n')
    assert serve(environ={"WATCHKEEPER_CONFIG": str(file)}).namespace == "lab"


def test_an_empty_variable_counts_as_not_given() -> None:
    assert (
        serve(environ={"WATCHKEEPER_COMPONENT": "", "WATCHKEEPER_CALL_TIMEOUT_S": ""}).component == "backend"
    )


def test_file_keys_take_dashes_and_underscores(write: Any) -> None:
    found = serve(config=write('grace-period-s = 1\ndrain_timeout_s = 2.5\n"http-address" = "[::1]:0"\n'))
    assert (found.grace_period_s, found.drain_timeout_s, str(found.http_address)) == (1, 2.5, "[::1]:0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grace-perod-s = 1", "unknown key 'grace-perod-s' (did you mean grace-period-s?)"),
        ("zzz = 1", "unknown key 'zzz'"),
        ("[serve]\nrole = 1", "unknown key 'serve'"),
        ('grace-period-s = "5"', "grace-period-s: '5' is not a number of seconds"),
        ("grace-period-s = true", "grace-period-s: True is not a number of seconds"),
        ("drain_timeout_s = -1", "drain_timeout_s: -1 is negative"),
        ("drain_timeout_s = inf", "drain_timeout_s: 'inf' is not a finite number of seconds"),
        ("role = 5", "role: 5 is not a string"),
        ('role = "both"', "role: 'both' is not one of prefill, decode, aggregated"),
        ('graceful-shutdown = "yes"', "graceful-shutdown: 'yes' is not true or false"),
        (
            'withdraw-on-pause = "vllm.Inference"',
            "withdraw-on-pause: 'vllm.Inference' is not a list of strings",
        ),
        ("withdraw-on-pause = [1]", "withdraw-on-pause: [1] is not a list of strings"),
        ("call-timeout-s = 5", "call-timeout-s: 5 is not a table as in {pause = 60, update = 600}"),
        ('call-timeout-s = {pause = "5"}', "call-timeout-s: pause: '5' is not a number of seconds"),
        ("call-timeout-s = {drain = 5}", "call-timeout-s: 'drain' is not one of pause, resume"),
        ("drain_timeout_s = 1\ndrain-timeout-s = 2", "drain-timeout-s and drain_timeout_s are the same key"),
        ("a = 1\nthis is not toml", "not valid TOML: "),
    ],
)
def test_a_wrong_file_is_named_with_its_key_in_one_line(write: Any, text: str, message: str) -> None:
    file = write(text)
    with pytest.raises(SettingsError) as caught:
        serve(config=file)
    assert str(caught.value).startswith(f"{file}: {message}")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*No such file"):
        serve(config=tmp_path / "absent.toml")
    with pytest.raises(SettingsError, match=r"cannot read .*Is a directory"):
        serve(config=tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"role = '\xe9'")
    with pytest.raises(SettingsError, match="not UTF-8"):
        serve(config=tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("drain_timeout_s", "soon", "'soon' is not a number of seconds"),
        ("drain_timeout_s", "nan", "'nan' is not a finite number of seconds"),
        ("drain_timeout_s", "-0.1", "-0.1 is negative"),
        ("health_interval_s", "0", "0 is not above 0"),
        ("engine", "trt", "'trt' is not one of vllm, sim"),
        ("component", "a.b", "'a.b' is not a name"),
        ("instance", "-a", "'-a' is not a name"),
        ("namespace", "a" * 64, "is not a name"),
        ("grpc_address", "50051", "'50051' is not HOST:PORT"),
        ("nats", "http://x", "'http://x': the scheme is not one of nats, tls, ws, wss"),
        ("nats", "nats://a,,nats://b", "is not a list of URLs"),
        ("graceful_shutdown", "maybe", "'maybe' is neither true nor false"),
        ("withdraw_on_pause", "readiness", "'readiness' is not one of vllm.Inference, vllm.Control, \"\""),
        ("call_timeout_s", "pause", "'pause' is not VERB=SECONDS"),
        ("call_timeout_s", "pause=0", "0 is not above 0"),
        ("call_timeout_s", "drain=1", "'drain' is not one of pause, resume"),
        ("advertise_host", "a b", "'a b' is not a host name or an IP address"),
        ("ready_file", "/no/such/place/ready", "no such directory: '/no/such/place'"),
        ("nats_tls_ca", "/no/such.pem", "cannot read '/no/such.pem': No such file or directory"),
        ("data_dir", " ", "is empty"),
    ],
)
def test_a_wrong_value_is_named_with_where_it_came_from(name: str, text: str, message: str) -> None:
    option = next(option for option in SERVE_OPTIONS if option.name == name)
    value = [text] if option.kind.repeatable else text
    with pytest.raises(SettingsError, match=f"^{option.flag}: .*{re.escape(message)}"):
        serve({name: value})
    if text.strip():
        with pytest.raises(SettingsError, match=f"^{option.variable}: "):
            load_serve("m", (), {} if name == "engine" else {"engine": "sim"}, {option.variable: text})


def test_booleans_and_lists_in_variables() -> None:
    environ = {
        "WATCHKEEPER_GRACEFUL_SHUTDOWN": "off",
        "WATCHKEEPER_WITHDRAW_ON_PAUSE": 'vllm.Inference, ""',
        "WATCHKEEPER_CALL_TIMEOUT_S": "pause=1, update_weights=2",
        "WATCHKEEPER_NATS": "nats://a:1,b:2",
    }
    found = serve(environ=environ)
    assert found.graceful_shutdown is False
    assert found.withdraw_on_pause == ("vllm.Inference", "")
    assert (found.call_timeouts_s["pause"], found.call_timeouts_s["update"]) == (1, 2)
    assert found.nats == ("nats://a:1", "nats://b:2")


def test_call_timeouts_are_merged_verb_by_verb(write: Any) -> None:
    file = write("call-timeout-s = {pause = 1, resume = 1, wake-up = 1}\n")
    found = serve(
        {"call_timeout_s": ["pause=3", "pause=4"]}, {"WATCHKEEPER_CALL_TIMEOUT_S": "resume=2"}, file
    )
    assert dict(found.call_timeouts_s) == {**CALL_TIMEOUTS_S, "pause": 4, "resume": 2, "wake_up": 1}


def test_a_list_is_taken_whole_from_the_first_source(write: Any) -> None:
    file = write('withdraw-on-pause = ["vllm.Control", ""]\n')
    assert serve({"withdraw_on_pause": ["vllm.Inference"]}, {}, file).withdraw_on_pause == ("vllm.Inference",)
    assert serve({}, {}, file).withdraw_on_pause == ("vllm.Control", "")


@pytest.mark.parametrize(
    ("given", "expected"), [("7.5", 7.5), ("-3", 0), ("soon", 5), ("nan", 5), ("inf", 5), ("", 5)]
)
def test_dynamos_grace_period_is_honoured(given: str, expected: float) -> None:
    found = serve(environ={DYNAMO_GRACE: given})
    assert found.grace_period_s == expected
    assert found.shutdown_timeout_s == expected + 65


def test_our_own_grace_period_comes_before_dynamos(write: Any) -> None:
    assert serve({"grace_period_s": "1"}, {DYNAMO_GRACE: "9"}).grace_period_s == 1
    assert serve({}, {DYNAMO_GRACE: "9", "WATCHKEEPER_GRACE_PERIOD_S": "2"}).grace_period_s == 2
    # The file comes after the environment, and Dynamo's variable is part of that.
    assert serve({}, {DYNAMO_GRACE: "9"}, write("grace_period_s = 3")).grace_period_s == 9


@pytest.mark.parametrize("given", ["-1", "-0.5", "0"])
def test_a_negative_grace_period_means_none(given: str) -> None:
    assert serve({"grace_period_s": given}).grace_period_s == 0


def test_the_budget_of_a_shutdown_may_be_given() -> None:
    found = serve({"shutdown_timeout_s": "12.2"})
    assert (found.shutdown_timeout_s, found.termination_grace_s) == (12.2, 18)


def test_the_instance_is_named_after_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Node_7.Example")
    first, second = serve().instance, serve().instance
    assert re.fullmatch("node-7-example-[0-9a-f]{6}", first)
    assert first != second


def test_data_is_kept_where_the_desktop_rules_say() -> None:
    assert serve(environ={"XDG_STATE_HOME": "/var/s"}).data_dir == Path("/var/s/watchkeeper")
    at_home = Path.home() / ".local/state/watchkeeper"
    assert serve(environ={"XDG_STATE_HOME": "relative"}).data_dir == at_home
    assert serve().data_dir == at_home
    assert serve({"data_dir": "~/x"}).data_dir == Path.home() / "x"


def test_secrets_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "token").write_text("s3cret\n")
    for name in ("admin_token_file", "nats_password_file"):
        with pytest.raises(SettingsError, match=r"--[a-z-]+: '.*empty' is empty"):
            serve({name: str(tmp_path / "empty"), "nats_user": "u"})
        with pytest.raises(SettingsError, match=r"--[a-z-]+: cannot read '.*absent': No such file"):
            serve({name: str(tmp_path / "absent"), "nats_user": "u"})
    found = serve({"admin_token_file": str(tmp_path / "token")})
    assert found.admin_token_file is not None
    assert read_secret(found.admin_token_file) == "s3cret"


def test_credentials_that_need_each_other(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    file = str(tmp_path / "file")
    with pytest.raises(SettingsError, match="--nats-password-file needs --nats-user"):
        serve({"nats_password_file": file})
    with pytest.raises(SettingsError, match="go together"):
        load_client({"nats_tls_key": file}, {})


def test_clients_may_share_the_file_of_an_instance(write: Any) -> None:
    file = write('component = "policy"\nrole = "decode"\nnats = ["nats://a", "b:4223"]\n')
    found = load_client({"namespace": "lab"}, {}, str(file))
    assert (found.namespace, found.component, found.nats) == ("lab", "policy", ("nats://a", "nats://b:4223"))


# --- MODEL ---------------------------------------------------------------------------------------


def test_a_model_directory_or_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("good").mkdir()
    Path("good/config.json").write_text("{}")
    for model in ("good", "./good", str(tmp_path / "good")):
        assert load_serve(model, environ={}).model == model
    assert load_serve("~/good", environ={}).model == str(tmp_path / "good")
    assert load_serve("Qwen/Qwen3-0.6B", environ={}).model == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/model", "MODEL '/no/such/model': no such directory"),
        ("./gone", "MODEL './gone': no such directory"),
        ("~/gone", "MODEL '~/gone': no such directory"),
        ("a/b/c", "MODEL 'a/b/c': no such directory"),
        ("empty", "MODEL 'empty' has no config.json: not a model directory"),
        ("file", "MODEL 'file' is not a directory"),
        ("", "MODEL is empty"),
    ],
)
def test_a_path_without_a_model(
    model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("file").write_text("")
    with pytest.raises(SettingsError) as caught:
        load_serve(model, environ={})
    assert str(caught.value) == message


def test_the_simulated_engine_takes_any_name() -> None:
    assert serve(model="/no/such/model").model == "/no/such/model"


# --- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback", "wildcard"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051, True, False),
        ("127.8.0.1:0", "127.8.0.1", 0, True, False),
        ("[::1]:0", "::1", 0, True, False),
        ("localhost:65535", "localhost", 65535, True, False),
        ("0.0.0.0:80", "0.0.0.0", 80, False, True),
        ("[::]:80", "::", 80, False, True),
        ("my-host.example:1", "my-host.example", 1, False, False),
    ],
)
def test_addresses(text: str, host: str, port: int, loopback: bool, wildcard: bool) -> None:
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert (address.loopback, address.wildcard) == (loopback, wildcard)
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("::1:50051", "write an IPv6 address in brackets, as in"),
        ("[::1]", "is not HOST:PORT"),
        ("[::g]:1", "is not an IPv6 address"),
        ("[127.0.0.1]:1", "is not an IPv6 address"),
        ("127.0.0.1", "is not HOST:PORT"),
        ("127.0.0.1:", "is not HOST:PORT"),
        ("127.0.0.1:-1", "is not HOST:PORT"),
        ("127.0.0.1:٣", "is not HOST:PORT"),
        ("127.0.0.1:65536", "a port is at most 65535"),
        ("127.0.0.256:1", "is not an IPv4 address"),
        (":8000", "has no host"),
        ("a b:1", "is not a host name"),
        ("http://a:1", "write an IPv6 address|is not a host name"),
    ],
)
def test_what_is_no_address(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Address.parse(text)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_refused_in_one_line(text: str) -> None:
    try:
        assert Address.parse(str(Address.parse(text))) == Address.parse(text)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017


def test_what_others_are_told_to_connect_to() -> None:
    assert advertised_host("given", Address("0.0.0.0", 1), {}) == "given"
    assert advertised_host(None, Address("10.1.1.1", 1), {"POD_IP": "10.9.9.9"}) == "10.1.1.1"
    assert advertised_host(None, Address("0.0.0.0", 1), {"POD_IP": "10.9.9.9"}) == "10.9.9.9"
    found = advertised_host(None, Address("0.0.0.0", 1), {})
    assert socket.inet_aton(found)
    assert found != "0.0.0.0"


def test_help_shows_every_default() -> None:
    """A float would print as 5.0, a tuple as (): what people see is written for people."""
    for option in SERVE_OPTIONS:
        shown = option.shown_default
        assert shown is None or not re.search(r"None|\(\)|\.0\b(?!\.)", shown.replace("127.0.0.1", "")), (
            option
        )
        assert option.help.endswith(".")
    assert math.isclose(settings.DEFAULT_GRACE_S, 5)
    assert os.environ.get(DYNAMO_GRACE) is None
