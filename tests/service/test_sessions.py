"""Trainers that crash, come back, repeat themselves or send too little."""

import asyncio
import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from bus.messages import Manifest
from service.sessions import Received, Sessions, contents, names_sha256, safetensors_header
from tests.service.shell import Shell, shell


async def until(s: Shell, **wanted: Any) -> None:
    """Wait until facts of the lifecycle have these values."""
    async with asyncio.timeout(10):
        while any(getattr(s.life.facts, name) != value for name, value in wanted.items()) or s.life.busy:
            await asyncio.sleep(0.01)


async def test_a_session_that_runs_out_before_a_chunk_leads_back() -> None:
    async with shell() as s:
        session = (await s.do("start_weight_update", {"lease_s": 0.2}))["result"]["session"]
        await until(s, session=None)
        assert s.life.state.value == "serving"
        assert s.life.facts.good
        assert await s.code("update_weights", {"update_info": {}}, session=session) == "lease_expired"
        assert ("state", ("serving", True)) in s.traffic.seen


async def test_a_session_that_runs_out_after_a_chunk_is_tainted() -> None:
    async with shell() as s:
        await s.do("start_weight_update", {"lease_s": 0.2})
        await s.do("update_weights", {"update_info": {}})
        await until(s, session=None)
        assert s.life.facts.bad is not None and s.life.facts.bad.value == "tainted"
        assert s.causes()[-1] == "lease_expired"


async def test_a_session_whose_trainer_shows_signs_of_life_stays() -> None:
    async with shell() as s:
        session = (await s.do("start_weight_update", {"lease_s": 0.4}))["result"]["session"]
        for n in range(6):
            await asyncio.sleep(0.15)
            if n % 2:
                assert (await s.do("status", session=session))["ok"]
            else:
                assert (await s.do("update_weights", {"update_info": {}}))["ok"]
        assert (await s.do("finish_weight_update"))["ok"]


async def test_a_lease_stands_still_while_a_command_of_the_session_runs() -> None:
    async with shell() as s:
        await s.do("start_weight_update", {"lease_s": 0.15})
        s.engine.close("update")
        reply_to = s.send("update_weights", {"update_info": {}})
        await s.engine.started("update")
        await asyncio.sleep(0.4)
        s.engine.open("update")
        assert (await s.reply(reply_to))["ok"]
        assert s.life.facts.session is not None


async def test_any_command_of_the_one_who_opened_it_is_a_sign_of_life() -> None:
    async with shell() as s:
        await s.do("start_weight_update", {"lease_s": 0.4}, issuer="trainer")
        for _ in range(5):
            await asyncio.sleep(0.15)
            assert (await s.do("pause", {"mode": "keep"}, issuer="trainer"))["ok"]
        assert s.life.facts.session is not None
        async with asyncio.timeout(10):
            while s.life.facts.session is not None:  # an operator's commands keep no trainer alive
                await s.do("pause", {"mode": "keep"}, issuer="operator")
                await asyncio.sleep(0.05)


async def test_the_status_of_somebody_else_renews_nothing() -> None:
    async with shell() as s:
        await s.do("start_weight_update", {"lease_s": 0.3})
        async with asyncio.timeout(10):
            while s.life.facts.session is not None:
                await s.do("status")
                await asyncio.sleep(0.05)


async def test_a_leased_pause_ends_by_itself() -> None:
    async with shell() as s:
        await s.do("pause", {"mode": "keep", "lease_s": 0.15})
        await until(s, stops=())
        assert s.life.state.value == "serving"
        assert s.causes()[-1] == "lease_expired"


async def test_a_leased_pause_that_runs_out_asleep_wakes_nothing() -> None:
    async with shell() as s:
        await s.do("pause", {"lease_s": 0.15})
        await s.do("sleep")
        async with asyncio.timeout(10):
            while any(o.value == "command" for o in s.life.facts.stops):
                await asyncio.sleep(0.01)
        assert s.life.state.value == "asleep"
        assert "resume" not in s.engine.calls


async def test_a_pause_without_a_lease_on_top_stays() -> None:
    async with shell() as s:
        await s.do("pause", {"lease_s": 0.15})
        await s.do("pause")
        await asyncio.sleep(0.4)
        assert s.life.state.value == "paused"


async def test_a_trainer_of_a_lower_epoch_is_fenced_off() -> None:
    async with shell() as s:
        assert (await s.do("pause", epoch=5))["ok"]
        assert await s.code("resume", epoch=4) == "stale_epoch"
        assert (await s.do("status", epoch=4))["ok"]
        assert (await s.do("resume"))["ok"]  # who names no epoch is not a trainer's past life


async def test_a_higher_epoch_ends_the_session_of_a_lower_one() -> None:
    async with shell() as s:
        session = (await s.do("start_weight_update", epoch=1))["result"]["session"]
        await s.do("update_weights", {"update_info": {}}, session=session, epoch=1)
        new = await s.do("start_weight_update", epoch=2)
        assert new["ok"] and new["result"]["session"] != session
        assert await s.code("update_weights", {"update_info": {}}, session=session) == "lease_expired"


async def test_a_higher_epoch_ends_the_leased_pause_of_a_lower_one_and_no_other() -> None:
    async with shell() as s:
        await s.do("pause", {"lease_s": 60}, epoch=1)
        assert (await s.do("wake_up", epoch=2))["state"]["state"] == "serving"
        await s.do("pause", epoch=2)
        assert (await s.do("wake_up", epoch=3))["state"]["state"] == "paused"


async def test_an_epoch_seen_elsewhere_fences_here_too() -> None:
    async with shell() as s:
        s.control.sessions.see_epoch(9, ours=False)
        assert await s.code("pause", epoch=8) == "stale_epoch"


async def test_a_finish_must_cover_the_manifest() -> None:
    async with shell() as s:
        names = ["a", "b", "c"]
        manifest = {"parameters": 3, "names_sha256": names_sha256(names), "chunks": 2}
        await s.do("start_weight_update", {"manifest": manifest})
        await s.do("update_weights", {"update_info": {"names": ["a", "b"]}})
        reply = await s.do("finish_weight_update")
        assert reply["error"]["code"] == "incomplete_weight_update"
        assert "1 of 2 chunks" in reply["error"]["message"]
        assert "finish" not in s.engine.calls
        await s.do("update_weights", {"update_info": {"names": ["c"]}})
        assert (await s.do("finish_weight_update"))["result"]["chunks"] == 2


async def test_a_trainer_may_give_its_own_budgets() -> None:
    async with shell(health_timeout_s=0.2) as s:
        await s.do("start_weight_update", {"chunk_s": 0.05})
        s.engine.close("update")
        reply = await s.do("update_weights", {"update_info": {}})
        assert reply["error"]["code"] == "engine_timeout"
        assert "0.05 s" in reply["error"]["message"]


async def test_a_long_chunk_is_reported() -> None:
    async with shell() as s:
        await s.do("start_weight_update")
        s.engine.close("update")
        reply_to = s.send("update_weights", {"update_info": {}})
        async with asyncio.timeout(10):
            while ("progress", True) not in s.traffic.seen:
                await asyncio.sleep(0.01)
        s.engine.open("update")
        assert (await s.reply(reply_to))["ok"]


def safetensors(file: Path, tensors: dict[str, int], cut: int = 0) -> Path:
    """A file with tensors of so many bytes each, spelled out by hand."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    file.write_bytes((struct.pack("<Q", len(text)) + text + bytes(at))[: -cut or None])
    return file


def test_the_content_of_a_chunk_is_read_from_its_files(tmp_path: Path) -> None:
    safetensors(tmp_path / "1.safetensors", {"a": 3, "b": 4})
    safetensors(tmp_path / "2.safetensors", {"c": 5})
    names, size = contents({"path": str(tmp_path)})
    assert (sorted(names or ()), size) == (["a", "b", "c"], 12)
    assert contents({"path": str(tmp_path / "none")}) == (None, 0)
    assert contents({"chunk": 1}) == (None, 0)


def test_a_file_cut_short_is_found_by_its_header(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cut short"):
        safetensors_header(safetensors(tmp_path / "x.safetensors", {"a": 100}, cut=1))
    (tmp_path / "y.safetensors").write_bytes(b"nonsense of some length")
    with pytest.raises(ValueError, match="not a safetensors"):
        safetensors_header(tmp_path / "y.safetensors")


def test_what_cannot_be_told_does_not_count() -> None:
    received = Received()
    received.add({"handles": 1})
    assert "do not say" in (received.missing_from(Manifest(parameters=1)) or "")


def test_the_pause_of_a_session_lives_as_long_as_the_session() -> None:
    """Otherwise a trainer that pauses, updates and resumes would find itself resumed half-way."""
    sessions = Sessions()
    sessions.hold_pause(10.0, None)
    sessions.open("s", 10.0, None, None, {})
    assert sessions.pause is not None and sessions.session is not None
    sessions.session.lease.busy = sessions.pause.busy = 1
    assert sessions.next_expiry_s() is None
    sessions.session.lease.busy = sessions.pause.busy = 0
    assert (sessions.next_expiry_s() or 0) > time.monotonic()
