"""vLLM's control routes on the admin address: what its clients send, and what they are answered."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from service.access import Access
from tests.broker import eventually
from tests.service.serving import Serving, serving, words

Answer = tuple[int, Any]


class Admin:
    """The admin address as a script sees it; the last answer's headers are kept."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url
        self.headers: dict[str, str] = {}

    async def post(self, path: str, json: Any = None, **headers: str) -> Answer:
        named = {f"X-Watchkeeper-{name}": value for name, value in headers.items()}
        return await self.ask("POST", path, json=json, headers=named)

    async def get(self, path: str) -> Answer:
        return await self.ask("GET", path)

    async def ask(self, method: str, path: str, **request: Any) -> Answer:
        async with self._http.request(method, self._url + path, **request) as response:
            self.headers = dict(response.headers)
            return response.status, await response.json()

    async def refused(self, path: str, json: Any = None, **headers: str) -> tuple[int, str, bool]:
        """Status, code and whether it may be tried again."""
        status, body = await self.post(path, json, **headers)
        assert set(body) == {"error"} and set(body["error"]) == {"code", "message", "retryable"}
        assert body["error"]["message"]
        return status, body["error"]["code"], body["error"]["retryable"]


@contextlib.asynccontextmanager
async def admin(one: Serving, **options: Any) -> AsyncIterator[Admin]:
    port = one.ready["admin"].rpartition(":")[2]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30), **options) as http:
        yield Admin(http, f"http://127.0.0.1:{port}")


async def test_a_script_for_vllm_runs_unchanged(tmp_path: Path, nats_url: str) -> None:
    """Parameters, answers and their peculiarities are those of vLLM 0.32."""
    async with serving(tmp_path, nats_url) as one, admin(one) as http:
        assert await http.get("/is_paused") == (200, {"is_paused": False})
        assert await http.get("/is_sleeping") == (200, {"is_sleeping": False})
        assert await http.post("/pause?mode=keep&clear_cache=false") == (200, {"status": "paused"})
        assert await http.get("/is_paused") == (200, {"is_paused": True})
        assert await http.get("/is_sleeping") == (200, {"is_sleeping": True})  # of a mere pause, too
        assert await one.check("readiness") == "NOT_SERVING"
        assert await http.post("/resume") == (200, {"status": "resumed"})
        assert await one.check("readiness") == "SERVING"

        assert await http.post("/sleep?level=1") == (200, {"status": "sleeping", "level": 1})
        assert (await one.snapshot()).state == "asleep"
        assert await http.get("/is_sleeping") == (200, {"is_sleeping": True})
        woken = {"status": "sleeping", "tags": ["weights"]}
        assert await http.post("/wake_up?tags=weights") == (200, woken)
        assert (await one.snapshot()).state == "partially_awake"
        woken = {"status": "awake", "tags": ["kv_cache", "scheduling"]}
        assert await http.post("/wake_up?tags=kv_cache&tags=scheduling") == (200, woken)
        assert await http.get("/is_sleeping") == (200, {"is_sleeping": False})
        assert await http.post("/wake_up") == (200, {"status": "awake", "tags": None})
        assert await http.post("/sleep") == (200, {"status": "sleeping", "level": 1})

        assert await http.get("/weight_info") == (200, {"weight_version": "default"})
        assert await http.get("/get_world_size") == (200, {"world_size": 1})
        assert await http.get("/get_world_size?include_dp=false") == (200, {"world_size": 1})


async def test_arguments_may_stand_in_the_body(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one, admin(one) as http:
        assert await http.post("/sleep", {"level": 2}) == (200, {"status": "sleeping", "level": 2})
        assert (await one.snapshot()).sleep is not None
        assert (await http.post("/wake_up", {"tags": ["weights", "kv_cache"]}))[0] == 200
        state = await one.snapshot()
        assert state.weight_update is not None and state.weight_update.phase == "discarded"


CLIENT = """
import json, sys
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
client = HTTPVLLMWeightSyncClient(sys.argv[1])
assert isinstance(client, VLLMWeightSyncClient)
try:
    client.update_weights({})
except Exception as error:
    print(json.dumps([type(error).__name__, error.response.status_code]))
client.init_weight_transfer_engine({"master_address": "127.0.0.1", "master_port": 1})
client.start_weight_update()
client.update_weights({"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]})
client.update_weights([{"ipc_handles": [{"a": (1, b"2")}]}])
client.finish_weight_update(weight_version="step-7")
client.start_weight_update()
client.update_weights({})
client.finish_weight_update()
client.shutdown_weight_transfer_engine()
"""


@pytest.mark.timeout(240)
async def test_vllms_own_client_runs_unchanged(tmp_path: Path, nats_url: str) -> None:
    """`HTTPVLLMWeightSyncClient` as installed; nearly all of the time is the import of vLLM."""
    async with serving(tmp_path, nats_url) as one:
        url = f"http://{one.ready['admin']}"
        pipe = asyncio.subprocess.PIPE
        script = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, url, stdout=pipe, stderr=pipe
        )
        out, err = await script.communicate()
        assert script.returncode == 0, err.decode()[-2000:]
        assert json.loads(out.splitlines()[-1]) == ["HTTPError", 409]
        seen = [event for event in one.events if event.settled and event.state == "serving"]
        versions = list(dict.fromkeys(event.weights.version for event in seen))
        assert versions[:2] == ["default", "step-7"]
        assert len(versions) == 3  # without a version, that of the session
        assert (await one.snapshot()).ready


async def test_refusals_have_the_contracts_codes(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one, admin(one) as http:
        for path, body in (
            ("/pause?mode=now", None),
            ("/pause?clear_cache=perhaps", None),
            ("/sleep?level=7", None),
            ("/sleep?level=one", None),
            ("/wake_up?tags=", None),
            ("/init_weight_transfer_engine", {}),
            ("/init_weight_transfer_engine", {"init_info": []}),
            ("/update_weights", {"update_info": "x"}),
            ("/update_weight_version", {}),
            ("/update_weight_version", {"new_version": ""}),
            ("/abort_requests", {"request_ids": "all"}),
        ):
            assert await http.refused(path, body) == (400, "invalid_argument", False), path
        assert (await http.get("/get_world_size?include_dp=x"))[0] == 400
        for bad in ({"data": b"{"}, {"data": b"[]"}, {"data": b'{"a": NaN}'}, {"data": b"\xff"}):
            status, body = await http.ask("POST", "/pause", **bad)
            assert (status, body["error"]["code"]) == (400, "invalid_message"), bad
        assert await http.refused("/pause", Epoch="new") == (400, "invalid_message", False)
        assert await http.refused("/pause", Deadline="nan") == (400, "invalid_message", False)

        assert await http.refused("/update_weights", {"update_info": {}}) == (409, "invalid_state", False)
        assert await http.refused("/start_draft_weight_update") == (501, "not_served", False)
        assert (await http.ask("POST", "/nothing"))[0] == 404
        status, body = await http.ask("GET", "/pause")
        assert (status, body["error"]["code"]) == (405, "method_not_allowed")
        assert http.headers["Allow"] == "POST"
        status, body = await http.ask("POST", "/update_weights", data=b"x" * (8 * 1024 * 1024 + 1))
        assert status == 413 and not body["error"]["retryable"]

        await one.simulate(call="pause", outcome="error")
        assert await http.refused("/pause") == (500, "engine_error", False)
        assert (await one.until("serving")).ready
        await http.post("/sleep")
        status, body = await http.post("/resume")
        assert status == 409 and "asleep" in body["error"]["message"]


async def test_what_surrounds_the_arguments_comes_in_headers(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one, admin(one) as http:
        assert (await http.post("/pause?mode=abort&clear_cache=true", Id="p1", Issuer="me"))[0] == 200
        again = await one.instance.pause(id="p1")  # the same dispatcher: on the bus it is known
        assert again.duplicate and again.state is not None
        cause = (await one.snapshot()).cause
        assert cause is not None and (cause.id, cause.issuer) == ("p1", "me")
        assert (await http.post("/resume"))[0] == 200
        cause = (await one.snapshot()).cause
        assert cause is not None and cause.issuer == "http 127.0.0.1"

        assert (await http.post("/start_weight_update", Epoch="7"))[0] == 200
        session = http.headers["X-Watchkeeper-Session"]
        chunk: dict[str, Any] = {"update_info": {}}
        assert await http.refused("/update_weights", chunk) == (409, "session_mismatch", False)
        assert (await http.post("/update_weights", chunk, Session=session))[0] == 200
        assert await http.refused("/pause", Epoch="6") == (409, "stale_epoch", False)
        done = await http.post("/finish_weight_update?weight_version=v7", Session=session)
        assert done == (200, {"message": "Weight update finished"})
        assert await http.get("/weight_info") == (200, {"weight_version": "v7"})
        past = str(time.time() - 1)
        assert await http.refused("/pause", Deadline=past) == (504, "deadline_exceeded", False)


async def test_a_version_without_weights_is_an_update_without_a_chunk(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one, admin(one) as http:
        renamed = await http.post("/update_weight_version", {"new_version": "v1"})
        assert renamed == (200, {"success": True, "new_version": "v1"})
        assert (await one.snapshot()).weights.version == "v1" and await one.routable()

        await one.instance.start_weight_update()
        rename: dict[str, Any] = {"new_version": "v2"}
        assert await http.refused("/update_weight_version", rename) == (409, "weight_update_open", False)
        await one.instance.update_weights({})
        await one.instance.abort_weight_update()
        refusal = await http.refused("/update_weight_version", rename)
        assert refusal == (409, "weights_not_ready", False)  # a name does not mend them
        state = await one.snapshot()
        assert state.weight_update is not None and state.weight_update.phase == "tainted"
        assert state.weights.version == "v1"


async def test_a_version_that_cannot_be_set_leaves_no_session_open(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one, admin(one) as http:
        await one.simulate(call="finish_weight_update", outcome="error")
        refusal = await http.refused("/update_weight_version", {"new_version": "v1"})
        assert refusal == (500, "engine_error", False)
        assert (await one.until("serving")).weights.version == "default"


async def test_requests_end_without_a_pause(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url, engine=("--token-interval-ms", "20")) as one, admin(one) as http:
        async with one.complete(10_000) as first, one.complete(10_000) as second:
            head = (await first.content.readline()).removeprefix(b"data: ")
            ids = [json.loads(head)["id"]]
            await eventually(lambda: _in_flight(one, 2))
            answer = await http.post("/abort_requests", {"request_ids": ids})
            assert answer == (200, {"status": "aborted", "aborted": 1})
            assert '"abort"' in (await first.text())
            await eventually(lambda: _in_flight(one, 1))
            assert await http.post("/abort_requests") == (200, {"status": "aborted", "aborted": 1})
            assert '"abort"' in (await second.text())
        assert await http.get("/is_paused") == (200, {"is_paused": False})
        async with one.complete(2) as third:
            assert (await words(third))[0].split() == ["t0", "t1"]


async def test_the_trainers_link_is_released_outside_of_updates(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one, admin(one) as http:
        path = "/shutdown_weight_transfer_engine"
        assert await http.post(path) == (200, {"message": "Weight transfer shut down"})
        assert await one.check("readiness") == "SERVING"
        await one.instance.start_weight_update()
        assert await http.refused(path) == (409, "weight_update_open", False)


async def test_without_an_engine_everything_says_so(tmp_path: Path, nats_url: str) -> None:
    load = ("--load-s", "60")
    async with serving(tmp_path, nats_url, engine=load, state=None) as one, admin(one) as http:
        for path in ("/pause", "/abort_requests", "/shutdown_weight_transfer_engine"):
            assert await http.refused(path) == (503, "not_ready", True)
        assert await http.refused("/update_weight_version", {"new_version": "v"}) == (503, "not_ready", True)
        for path in ("/is_paused", "/is_sleeping", "/weight_info", "/get_world_size"):
            status, body = await http.get(path)
            assert (status, body["error"]["code"], body["error"]["retryable"]) == (503, "not_ready", True)


async def test_who_waits_is_told_when_the_instance_leaves(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one, admin(one) as http:
        await one.simulate(call="pause", outcome="hang")
        running = asyncio.create_task(http.refused("/pause"))
        await eventually(lambda: one.states[-1] == "paused")
        waiting = asyncio.create_task(http.refused("/resume"))
        # Answered only once the one before it has arrived, too.
        await one.snapshot()
        one.signal(signal.SIGTERM)
        assert await running == (503, "shutting_down", True)
        assert await waiting == (503, "shutting_down", True)


async def test_outside_of_loopback_nothing_is_done_without_a_token(tmp_path: Path, nats_url: str) -> None:
    anywhere = ("--admin-address", "0.0.0.0:0")
    async with serving(tmp_path, nats_url, *anywhere) as one, admin(one) as http:
        for method, path in (
            ("POST", "/pause"),
            ("GET", "/state"),
            ("GET", "/is_paused"),
            ("GET", "/nothing"),
        ):
            status, body = await http.ask(method, path)
            assert (status, body["error"]["code"]) == (401, "unauthorized"), path
        assert await http.get("/livez") == (200, {"state": "serving", "reasons": []})
        assert await http.get("/readyz") == (200, {"state": "serving", "reasons": []})

    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    guarded = (*anywhere, "--admin-token-file", str(secret))
    async with serving(tmp_path, nats_url, *guarded) as one:
        for value, status in (
            ("Bearer s3cret", 200),
            ("Bearer other", 401),
            ("Bearer \udcff", 401),
            ("", 401),
        ):
            async with admin(one, headers={"Authorization": value}) as http:
                assert (await http.post("/pause"))[0] == status, value
        # As a client sends it that takes nothing but a URL: http://anything:s3cret@host:port
        basic = {"Authorization": "Basic " + b64encode(b"anything:s3cret").decode()}
        async with admin(one, headers=basic) as http:
            assert await http.get("/is_paused") == (200, {"is_paused": True})


async def test_a_page_in_a_browser_commands_nothing(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one, admin(one) as http:
        status, body = await http.ask("POST", "/pause", headers={"Origin": "http://example.org"})
        assert (status, body["error"]["code"]) == (403, "forbidden")
        assert (await one.snapshot()).state == "serving"


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ("Bearer t", True),
        ("bearer  t ", True),
        ("t", False),
        ("Bearer", False),
        ("Bearer t2", False),
        ("Basic " + b64encode(b"user:t").decode(), True),
        ("Basic " + b64encode(b"t").decode(), False),
        ("Basic ###", False),
        ("Digest t", False),
        ("", False),
    ],
)
def test_a_token_is_a_bearers_or_a_password(given: str, allowed: bool) -> None:
    assert Access("t", loopback=False).allows(given) is allowed
    assert Access("t", loopback=True).allows(given) is allowed


def test_without_a_token_loopback_is_enough_and_nothing_else_is() -> None:
    assert Access(None, loopback=True).allows("") and Access(None, loopback=True).possible
    assert not Access(None, loopback=False).allows("Bearer None")
    assert not Access(None, loopback=False).possible


async def _in_flight(one: Serving, count: int) -> bool:
    return (await one.snapshot()).in_flight == count
