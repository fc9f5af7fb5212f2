"""One simulated instance from outside: commands, probes, discovery, requests, a broker that goes."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from bus import subjects
from bus.client import CommandFailed
from bus.discovery import Change, ChangeKind, Listener
from bus.messages import Snapshot
from tests.broker import NatsServer, eventually
from tests.service.serving import serving, words


async def test_the_ready_file_has_the_addresses_and_goes_with_the_instance(
    tmp_path: Path, nats_url: str
) -> None:
    async with serving(tmp_path, nats_url) as one:
        assert set(one.ready) == {"instance", "incarnation", "grpc", "http", "admin", "nats"}
        snapshot = await one.snapshot()
        assert snapshot.incarnation == one.ready["incarnation"]
        assert snapshot.addresses.grpc == one.ready["grpc"]
        one.signal(signal.SIGTERM)
        assert await one.end() == 0
        assert not (tmp_path / "one.json").exists()


async def test_every_change_is_an_event_with_the_next_number(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one:
        await one.instance.pause(mode="keep", id="p1")
        await one.instance.resume()
        await one.instance.resume()  # changes nothing, so there is no event
        seen = [(e.state, e.settled, e.ready) for e in one.events]
        assert seen == [
            ("starting", True, False),
            ("serving", True, True),
            ("paused", False, False),
            ("paused", True, False),
            ("paused", False, False),
            ("serving", True, True),
        ]
        assert [e.seq for e in one.events] == [1, 2, 3, 4, 5, 6]
        pause = one.events[3]
        assert pause.cause is not None and (pause.cause.verb, pause.cause.id) == ("pause", "p1")
        assert pause.previous == "serving" and pause.cause.issuer == "test"
        assert pause.paused is not None and (pause.paused.mode, pause.paused.by) == ("keep", ["command"])
        running = one.events[2].operation
        assert running is not None and running.verb == "pause"


async def test_present_in_discovery_means_routable(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url, "--role", "decode") as one:
        entry = (await one.client.instances())["one"]
        assert (entry.role, entry.endpoint, entry.weight_version) == ("decode", "generate", "default")
        assert entry.transport.http == one.ready["http"] and entry.incarnation == one.ready["incarnation"]
        assert entry.max_model_len
        await one.instance.pause()
        assert not await one.routable()
        await one.instance.resume()
        assert await one.routable()
        await one.instance.start_weight_update()
        await one.instance.update_weights({})
        await one.instance.finish_weight_update(weight_version="v2")
        assert (await one.client.instances())["one"].weight_version == "v2"


async def test_the_snapshot_has_every_field_on_the_wire(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one:
        key = subjects.state_key("default", "backend", "one")
        stored = await one.client.bus.kv_get(subjects.STATES_BUCKET, key)
        assert stored is not None
        fields = {field.name for field in msgspec.structs.fields(Snapshot)}
        assert set(json.loads(stored)) == fields
        assert json.loads(stored)["engine"]["kind"] == "sim"


async def test_json_is_answered_in_json_so_that_the_nats_command_works(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one:
        for body in (b"", b"{}", b'{"args": {"mode": "keep"}}'):
            subject = subjects.control("default", "backend", "one", "pause")
            reply = json.loads(await one.client.bus.request(subject, body, 5.0))
            assert reply["ok"] and reply["state"]["state"] == "paused"


async def test_a_command_to_all_reaches_every_instance_once(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one, serving(tmp_path, nats_url, name="two") as two:
        gathering = await one.client.send_all("pause").run()
        assert gathering.complete
        assert sorted(gathering.replies) == ["one", "two"]
        assert [(await s.snapshot()).state for s in (one, two)] == ["paused", "paused"]


async def test_a_caller_that_leaves_cancels_nothing(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url, engine=("--call-ms", "pause=300")) as one:
        subject = subjects.control("default", "backend", "one", "pause")
        await one.client.bus.publish(subject, b"")  # nobody waits for a reply
        assert (await one.until("paused")).settled


async def test_requests_are_held_by_keep_and_refused_by_abort(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one:
        await one.instance.pause(mode="keep")
        held = asyncio.create_task(_whole(one.ready["http"]))
        await eventually(lambda: _in_flight(one.ready["admin"]))
        await one.instance.resume()
        status, body = await held
        assert (status, body["choices"][0]["finish_reason"]) == (200, "length")

        await one.instance.pause(mode="abort")
        status, body = await _whole(one.ready["http"])
        assert status == 503
        assert (body["error"]["code"], body["error"]["retryable"]) == ("engine_paused", True)


async def test_an_abort_ends_a_stream_with_its_reason(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url, engine=("--token-interval-ms", "20")) as one:
        async with one.complete(10_000) as response:
            await one.instance.pause(mode="abort")
            body = await response.text()
        assert '"finish_reason":"abort"' in body.replace(" ", "")


async def test_held_requests_end_with_the_retryable_error_when_the_weights_are_tainted(
    tmp_path: Path, nats_url: str
) -> None:
    async with serving(tmp_path, nats_url, engine=("--token-interval-ms", "20")) as one:
        async with one.complete(10_000) as response:
            await one.instance.start_weight_update()
            waiting = asyncio.create_task(_whole(one.ready["http"]))
            await eventually(lambda: _in_flight(one.ready["admin"], 2))
            await one.instance.update_weights({})
            await one.instance.abort_weight_update()
            _, error = await words(response)
        assert error is not None and (error["code"], error["retryable"]) == ("engine_paused", True)
        status, body = await waiting
        assert (status, body["error"]["code"]) == (503, "engine_paused")


async def test_the_admin_listener_tells_probes_and_people(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one, aiohttp.ClientSession() as http:
        base = f"http://{one.ready['admin']}"
        assert await _status(http, f"{base}/readyz") == 200
        await one.instance.pause()
        assert await _status(http, f"{base}/readyz") == 503
        assert await _status(http, f"{base}/livez") == 200
        async with http.get(f"{base}/readyz") as response:
            assert (await response.json())["reasons"] == ["paused by command"]
        async with http.get(f"{base}/state") as response:
            assert (await response.json())["state"] == "paused"
        async with http.get(f"{base}/metrics") as response:
            text = await response.text()
        assert 'watchkeeper_state{watchkeeper_state="paused"} 1.0' in text
        assert 'watchkeeper_commands_total{code="ok",verb="pause"} 1.0' in text


async def test_a_token_guards_the_snapshot_and_not_the_probes(tmp_path: Path, nats_url: str) -> None:
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    async with serving(tmp_path, nats_url, "--admin-token-file", str(secret)) as one:
        base = f"http://{one.ready['admin']}"
        async with aiohttp.ClientSession() as http:
            assert await _status(http, f"{base}/state") == 401
            assert await _status(http, f"{base}/livez") == 200
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer s3cret"}) as http:
            assert await _status(http, f"{base}/state") == 200


async def test_legacy_names_follow_readiness_only_if_told(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url, "--withdraw-on-pause", "vllm.Inference") as one:
        await one.instance.pause()
        seen = {name: await one.check(name) for name in ("vllm.Inference", "vllm.Control", "", "liveness")}
        assert seen == {
            "vllm.Inference": "NOT_SERVING",
            "vllm.Control": "SERVING",
            "": "SERVING",
            "liveness": "SERVING",
        }


async def test_a_watch_sees_every_settled_change_in_order(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one:
        readiness, liveness = one.watch("readiness"), one.watch("liveness")
        await eventually(lambda: readiness and liveness)
        for _ in range(20):
            await one.instance.pause()
            await one.instance.resume()
        await eventually(lambda: len(readiness) == 41)
        assert readiness == ["SERVING", *["NOT_SERVING", "SERVING"] * 20]
        assert liveness == ["SERVING"]


async def test_a_broker_that_restarts_costs_nothing_but_the_bus(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    async with serving(tmp_path, nats_server.url) as one:
        await nats_server.stop(signal.SIGKILL)
        async with aiohttp.ClientSession() as http:
            url = f"http://{one.ready['admin']}/state"
            await eventually(lambda: _reasons(http, url, "discovery_unreachable"))
        assert await one.check("readiness") == "SERVING"
        async with one.complete(3) as response:
            assert (await words(response))[0].split() == ["t0", "t1", "t2"]
        await nats_server.start()
        await eventually(lambda: one.client.bus.connected, within_s=10)
        await eventually(one.routable, within_s=10)
        assert (await one.instance.pause()).ok
        assert not await one.routable()


async def test_with_the_broker_away_the_engine_is_paused_all_the_same(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    """Subscribe before advertise; unregister before sleep: the engine does not wait for a broker that is
    away. The key is put right after the reconnect, before any command runs."""
    async with serving(tmp_path, nats_server.url, "--health-interval-s", "0.2") as one:
        await one.simulate(call="now", outcome="pause_out_of_band")
        await nats_server.stop(signal.SIGKILL)
        await eventually(lambda: _not_ready(one.ready["admin"]))
        await nats_server.start()
        await eventually(lambda: one.client.bus.connected, within_s=10)
        assert (await one.snapshot()).state == "paused"
        assert not await one.routable()


async def test_a_new_life_ends_the_old_one_before_it_begins(tmp_path: Path, nats_url: str) -> None:
    """Even if the old one was killed with -9, and within the life time of its keys."""
    async with serving(tmp_path, nats_url) as old:
        async with Listener(old.client.bus, "default", "backend") as listener:
            changes: list[Change] = []
            listener._on_change = changes.append
            await old.program.kill()
            async with serving(tmp_path, nats_url) as new:
                assert new.ready["incarnation"] != old.ready["incarnation"]
                await eventually(lambda: listener.instances.get("one"))
                await eventually(lambda: listener.instances["one"].incarnation == new.ready["incarnation"])
        order = [c.kind for c in changes if c.kind is not ChangeKind.STATE]
        assert order.index(ChangeKind.NOT_ROUTABLE) < order.index(ChangeKind.ROUTABLE)
        assert ChangeKind.ENDED in order[: order.index(ChangeKind.ROUTABLE)]


async def test_keys_of_a_killed_instance_expire_where_watchers_can_see(tmp_path: Path, nats_url: str) -> None:
    async with (
        serving(tmp_path, nats_url) as one,
        Listener(one.client.bus, "default", "backend") as listener,
    ):
        assert "one" in listener.instances
        await one.program.kill()
        await eventually(lambda: "one" not in listener.instances, within_s=60)


def test_the_control_process_imports_neither_vllm_nor_torch() -> None:
    """It must start in well under a second and not be slowed by them."""
    program = (
        "import sys, service.worker, service.__main__, service.commands\n"
        "bad = sorted({m.split('.')[0] for m in sys.modules} & {'vllm', 'torch', 'transformers'})\n"
        "sys.exit(f'imported: {bad}' if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("verb", ["init_weight_transfer", "start_weight_update"])
async def test_a_refusal_says_what_to_do(tmp_path: Path, nats_url: str, verb: str) -> None:
    async with serving(tmp_path, nats_url) as one:
        await one.instance.sleep(level=1)
        with pytest.raises(CommandFailed, match="asleep") as refusal:
            await one.instance.send(verb, {"init_info": {}})
        assert refusal.value.code == "invalid_state"


async def _whole(address: str) -> tuple[int, Any]:
    body = {"model": "m", "prompt": "p", "max_tokens": 3}
    url = f"http://{address}/v1/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        return response.status, await response.json()


async def _in_flight(address: str, count: int = 1) -> bool:
    async with aiohttp.ClientSession() as http, http.get(f"http://{address}/state") as response:
        return bool((await response.json())["in_flight"] == count)


async def _not_ready(address: str) -> bool:
    async with aiohttp.ClientSession() as http:
        return await _status(http, f"http://{address}/readyz") == 503


async def _status(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(url) as response:
        return response.status


async def _reasons(http: aiohttp.ClientSession, url: str, wanted: str) -> bool:
    async with http.get(url) as response:
        return wanted in (await response.json())["reasons"]
