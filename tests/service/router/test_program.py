"""`watchkeeper router` and `watchkeeper router-status` as programs."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from service.options import SettingsError
from service.router.pool import Role
from service.router.settings import Static, load_router
from tests.broker import NatsServer, eventually, free_port
from tests.program import Program
from tests.service.router.engines import Engine, engines
from tests.service.serving import serving

NOWHERE = "nats://127.0.0.1:1"


@asynccontextmanager
async def program(
    folder: Path, *options: str, static: tuple[Engine, ...] = (), nats: str = NOWHERE
) -> AsyncIterator[tuple[Program, str]]:
    """The program and its URL."""
    ready = folder / "router.json"
    arguments = ["router", "--http-address", "127.0.0.1:0", "--ready-file", str(ready), "--nats", nats]
    arguments += ["--nats-wait-s", "0.2" if nats == NOWHERE else "5"]
    for engine in static:
        arguments += ["--static", f"aggregated={engine.url}"]
    started = await Program.start(folder, *arguments, *options)
    try:
        await eventually(lambda: ready.exists() or started.exit_code is not None, within_s=60)
        assert ready.exists(), started.last_words()
        yield started, f"http://{json.loads(ready.read_text())['http']}"
    finally:
        await started.kill()


async def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    started = await Program.start(folder, *arguments)
    code = await started.end(within_s=60)
    return code, started.out.read_text(), started.stderr()


async def get(url: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.get(url, headers=headers) as response:
        return response.status, await response.json(content_type=None)


async def used(url: str) -> int:
    _, state = await get(f"{url}/state")
    return sum(pool["admissible"] for pool in state["pools"].values())


async def test_it_finds_instances_serves_and_shows_them(tmp_path: Path, nats_server: NatsServer) -> None:
    async with (
        engines(1) as (engine,),
        serving(tmp_path, nats_server.url, name="one"),
        program(tmp_path, static=(engine,), nats=nats_server.url) as (router, url),
    ):
        while await used(url) < 2:
            await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as http:
            names = set()
            for _ in range(4):
                async with http.post(f"{url}/v1/completions", json={"prompt": "p"}) as response:
                    names.add(response.headers["X-Watchkeeper-Instance"])
        assert names == {"one", engine.url}
        code, out, _ = await run(tmp_path, "router-status", url)
        assert code == 0
        lines = out.splitlines()
        assert lines[0].split()[:3] == ["ROLE", "INSTANCE", "IN"]
        assert any(line.startswith(f"aggregated  {engine.url}  yes") for line in lines)
        assert lines[-1] == "2 of 2 instances in use, policy aggregated, 0 requests in flight"
        code, out, _ = await run(tmp_path, "router-status", "--json", url.removeprefix("http://"))
        assert code == 0 and json.loads(out)["pools"]["aggregated"]["admissible"] == 2
        log = router.out.read_text()
        assert " aggregated=one 200 " in log and "POST /v1/completions 200" in log
        for path in ("livez", "readyz", "health"):
            assert (await get(f"{url}/{path}"))[0] == 200


async def test_the_log_has_both_hops_of_a_request(tmp_path: Path) -> None:
    async with engines(1) as (prefill,), engines(1) as (decode,):
        statics = ("--static", f"prefill={prefill.url}", "--static", f"decode={decode.url}")
        async with program(tmp_path, "--policy", "pd", *statics) as (router, url):
            headers = {"X-Request-Id": "of-the-client"}
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.post(f"{url}/v1/completions", json={"prompt": "p"}) as response,
            ):
                assert response.status == 200
            await eventually(lambda: "of-the-client" in router.out.read_text(), within_s=10)
            (line,) = (line for line in router.out.read_text().splitlines() if "of-the-client" in line)
            assert "POST /v1/completions 200 of-the-client" in line
            assert f"prefill={prefill.url} 200" in line and f"decode={decode.url} 200" in line


async def test_a_shutdown_lets_requests_finish(tmp_path: Path) -> None:
    async with (
        engines(1) as (engine,),
        program(tmp_path, "--grace-period-s", "0.5", static=(engine,)) as (router, url),
    ):
        while not await used(url):
            await asyncio.sleep(0.02)
        engine.gate.clear()
        body = {"prompt": "p", "stream": True}
        async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/completions", json=body) as response:
            await response.content.readuntil(b"t0")
            router.process.send_signal(signal.SIGTERM)
            while (await get(f"{url}/readyz"))[0] == 200:
                await asyncio.sleep(0.02)
            async with http.get(f"{url}/v1/models") as models:  # routers need time to notice
                assert models.status == 200
            await eventually(lambda: "shutdown: refuse" in router.out.read_text(), within_s=10)
            with pytest.raises(aiohttp.ClientConnectorError):
                await get(f"{url}/livez")
            engine.gate.set()
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert await router.end(within_s=10) == 0
        assert not (tmp_path / "router.json").exists()


async def test_a_request_that_does_not_finish_in_time_is_told(tmp_path: Path) -> None:
    options = ("--grace-period-s", "0", "--drain-timeout-s", "0.2")
    async with engines(1) as (engine,), program(tmp_path, *options, static=(engine,)) as (router, url):
        while not await used(url):
            await asyncio.sleep(0.02)
        engine.gate.clear()
        async with aiohttp.ClientSession() as http:
            whole = asyncio.create_task(post(http, url, {"prompt": "p"}))
            body = {"prompt": "p", "stream": True}
            async with http.post(f"{url}/v1/completions", json=body) as response:
                await response.content.readuntil(b"t0")
                await eventually(lambda: engine.running == 2)
                router.process.send_signal(signal.SIGTERM)
                event = (await response.read()).strip().rpartition(b"\n\n")[2]
            assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
            status, answer = await whole
            assert status == 503 and answer["error"]["code"] == "shutting_down"
        assert await router.end(within_s=10) == 0


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with http.post(f"{url}/v1/completions", json=body) as response:
        return response.status, await response.json()


async def test_a_second_signal_cuts_it_short(tmp_path: Path) -> None:
    options = ("--grace-period-s", "60")
    async with engines(1) as (engine,), program(tmp_path, *options, static=(engine,)) as (router, _):
        router.process.send_signal(signal.SIGTERM)
        await eventually(lambda: "shutdown: withdraw" in router.out.read_text(), within_s=10)
        started = time.monotonic()
        router.process.send_signal(signal.SIGINT)
        assert await router.end(within_s=10) == 70 and time.monotonic() - started < 10


async def test_without_a_broker_and_without_instances_there_is_nothing_to_route_to(tmp_path: Path) -> None:
    code, _, err = await run(tmp_path, "router", "--nats", NOWHERE, "--nats-wait-s", "0.2")
    assert code == 2 and err.startswith("watchkeeper: error: no broker reachable at") and err.count("\n") == 1


async def test_a_broker_that_comes_later_is_found(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    async with (
        engines(1) as (engine,),
        program(tmp_path, "--nats-wait-s", "0.2", static=(engine,), nats=server.url) as (_, url),
    ):
        assert (await get(f"{url}/state"))[1]["nats"]["connected"] is False
        await server.start()
        try:
            async with serving(tmp_path, server.url, name="one"):
                while await used(url) < 2:
                    await asyncio.sleep(0.05)
        finally:
            await server.stop()


async def test_a_port_that_is_taken(tmp_path: Path) -> None:
    async with engines(1) as (engine,):
        address = engine.url.removeprefix("http://")
        code, _, err = await run(
            tmp_path, "router", "--http-address", address, "--static", f"decode={engine.url}"
        )
        assert (code, err) == (2, f"watchkeeper: error: cannot listen on {address}: address already in use\n")


async def test_the_table_needs_the_token_where_there_is_one(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    options = ("--admin-token-file", str(token))
    async with engines(1) as (engine,), program(tmp_path, *options, static=(engine,)) as (_, url):
        assert (await get(f"{url}/state"))[0] == 401
        assert (await get(f"{url}/state", {"Authorization": "Bearer secret"}))[0] == 200
        code, _, err = await run(tmp_path, "router-status", url)
        assert code == 2 and "a bearer token is needed" in err
        assert (await run(tmp_path, "router-status", url, *options))[0] == 0


async def test_status_of_what_is_no_router(tmp_path: Path) -> None:
    code, _, err = await run(tmp_path, "router-status", f"127.0.0.1:{free_port()}")
    assert code == 2 and "no router answers on" in err and err.count("\n") == 1
    async with engines(1) as (engine,):
        code, _, err = await run(tmp_path, "router-status", engine.url)
        assert (code == 2 and "answers 404: that is no router" in err) or "no router answers" in err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"static": ["http://10.0.0.1:8000"]}, "--static: 'http://10.0.0.1:8000' is not ROLE=URL"),
        ({"static": ["both=http://10.0.0.1:8000"]}, "with one of the roles prefill, decode, aggregated"),
        ({"static": ["decode=ftp://10.0.0.1"]}, "the URL is not as in http://10.0.0.7:8000"),
        ({"static": ["decode=http://10.0.0.1:8000/v1"]}, "the URL is not as in"),
        ({"static": ["decode=http://10.0.0.1:99999"]}, "the URL is not as in"),
        ({"weights": "min-version"}, "--weights min-version needs --min-version"),
        ({"min_version": "v1"}, "--min-version goes with --weights min-version only"),
        ({"max_attempts": "0"}, "--max-attempts: 0 is below 1"),
        ({"migration_limit": "1.5"}, "--migration-limit: '1.5' is not a whole number"),
        ({"wait_s": "-1"}, "--wait-s: -1 is negative"),
        ({"policy": "both"}, "--policy: 'both' is not one of aggregated, pd"),
    ],
)
def test_what_does_not_fit_is_told(flags: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_router(flags, environ={})
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_options_come_from_flags_variables_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "wk.toml"
    file.write_text(
        'policy = "pd"\nmigration-limit = 2\nstatic = ["prefill=10.0.0.1:1"]\ndrain_timeout_s = 9\n'
    )
    environ = {"WATCHKEEPER_MIGRATION_LIMIT": "3", "WATCHKEEPER_STATIC": "decode=http://[::1]:2/"}
    loaded = load_router({"grace_period_s": "-4"}, environ=environ, config=str(file))
    assert (loaded.policy, loaded.migration_limit) == ("pd", 3)
    assert loaded.static == (Static(Role.DECODE, "http://[::1]:2"),)
    assert loaded.grace_period_s == 0 and loaded.shutdown_timeout_s == 14
