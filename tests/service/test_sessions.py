"""Trainers that crash, come back, repeat themselves or send too little."""

import asyncio
import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from bus.messages import Manifest
from service.sessions import Received, Sessions, contents, safetensors_header
from service.settings import CALL_TIMEOUTS_S
from tests.service.shell import TIMEOUTS_S, Shell, shell


async def until(s: Shell, **wanted: Any) -> None:
    """Wait until facts of the lifecycle have these values."""
    async with asyncio.timeout(10):
        while any(getattr(s.life.facts, name) != value for name, value in wanted.items()) or s.life.busy:
            await asyncio.sleep(0.01)


async def test_a_session_that_runs_out_before_a_chunk_leads_back() -> None:
    """Lease: it has an owner; if it runs out with nothing loaded, the session is undone and the old version
    serves again. The event says why."""
    async with shell() as s:
        started = await s.do("start_weight_update", {"lease_s": 0.2}, issuer="trainer")
        session = started["result"]["session"]
        assert s.traffic.picture is not None and s.traffic.picture.weight_update is not None
        assert s.traffic.picture.weight_update.owner == "trainer"
        await until(s, session=None)
        assert s.life.state.value == "serving"
        assert s.life.facts.good and s.life.facts.version == "default"
        assert s.engine.calls[-3:] == ["finish", "ask", "resume"]  # the undo, checked
        assert s.causes()[-1] == "lease_expired"
        assert await s.code("update_weights", {"update_info": {}}, session=session) == "lease_expired"
        assert ("state", ("serving", True)) in s.traffic.seen


async def test_a_session_that_runs_out_after_a_chunk_is_tainted() -> None:
    """Lease: if it runs out after a chunk was dispatched, the weights are tainted and nothing resumes."""
    async with shell() as s:
        await s.do("start_weight_update", {"lease_s": 0.2})
        await s.do("update_weights", {"update_info": {}})
        await until(s, session=None)
        assert s.life.facts.bad is not None and s.life.facts.bad.value == "tainted"
        assert s.causes()[-1] == "lease_expired"
        assert "resume" not in s.engine.calls
        assert await s.code("resume") == "weights_not_ready"


async def test_a_session_whose_trainer_shows_signs_of_life_stays() -> None:
    """Lease: every command of its session renews it, and so does a `status` that names it."""
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
    """Lease: a pause can have one, too."""
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
    """Fencing: a command of an epoch lower than the highest seen is refused, and asking is always allowed."""
    async with shell() as s:
        assert (await s.do("pause", epoch=5))["ok"]
        assert await s.code("resume", epoch=4) == "stale_epoch"
        assert (await s.do("status", epoch=4))["ok"]
        assert (await s.do("resume"))["ok"]  # who names no epoch is not a trainer's past life


async def test_a_higher_epoch_ends_the_session_of_a_lower_one() -> None:
    """Fencing: as if its lease had run out; the session's own trainer is told so."""
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


NAMES_OF_ABC = "e6a510b98b08c7b83d4cc5ce989d8142961edfb05347b6c130a551ae7a42707c"
"""printf 'a\\nb\\nç' | sha256sum"""


async def test_a_finish_must_cover_the_manifest() -> None:
    """Update session: what was received is held against the manifest before the engine's finish is called."""
    async with shell() as s:
        manifest = {"parameters": 3, "names_sha256": NAMES_OF_ABC, "chunks": 2}
        await s.do("start_weight_update", {"manifest": manifest})
        await s.do("update_weights", {"update_info": {"names": ["ç", "b"]}})
        reply = await s.do("finish_weight_update")
        assert reply["error"]["code"] == "incomplete_weight_update"
        assert "1 of 2 chunks" in reply["error"]["message"]
        assert "finish" not in s.engine.calls
        await s.do("update_weights", {"update_info": {"names": ["b", "a"]}})
        assert (await s.do("finish_weight_update"))["result"]["chunks"] == 2


PHASES: dict[str, tuple[str, dict[str, Any]]] = {
    "init": ("init_weight_transfer", {"init_info": {}}),
    "start": ("start_weight_update", {}),
    "update": ("update_weights", {"update_info": {}}),
    "finish": ("finish_weight_update", {}),
}
BUDGETS = {"init": "init_s", "start": "start_s", "update": "chunk_s", "finish": "finish_s"}


@pytest.mark.parametrize("given", [True, False], ids=["given by the trainer", "the default"])
@pytest.mark.parametrize("slow", PHASES)
async def test_each_phase_has_a_budget_of_its_own(slow: str, given: bool) -> None:
    """Budgets per phase: init, start, each chunk and the finish have limits given by the trainer; without
    them the instance's own. The others are left at more than the test has time for."""
    long_s, short_s = 600.0, 0.05
    own = {**TIMEOUTS_S, **dict.fromkeys(PHASES, long_s)}
    budgets = {name: long_s for phase, name in BUDGETS.items() if phase != slow}
    if given:
        budgets[BUDGETS[slow]] = short_s
    else:
        own[slow] = short_s
    async with shell(health_timeout_s=0.2, call_timeouts_s=own) as s:
        for phase, (verb, args) in PHASES.items():
            mine: dict[str, float | None] = {
                "init": {"init_s": budgets.get("init_s")},
                "start": {name: budgets.get(name) for name in ("start_s", "chunk_s", "finish_s")},
            }.get(phase, {})
            args = {**args, **{name: limit_s for name, limit_s in mine.items() if limit_s is not None}}
            if phase == slow:
                s.engine.close(phase)
                error = (await s.do(verb, args))["error"]
                assert error["code"] == "engine_timeout" and "within 0.05 s" in error["message"]
                return
            assert (await s.do(verb, args))["ok"]


def test_the_budgets_of_an_instance() -> None:
    """Budgets per phase: small for a pause, large for a chunk."""
    expected = {"pause": 60, "resume": 60, "start": 60, "init": 120, "finish": 300, "update": 600}
    assert {verb: CALL_TIMEOUTS_S[verb] for verb in expected} == expected


async def test_a_long_chunk_is_reported() -> None:
    """Budgets per phase: whoever waits sees that it goes on, at most twice a second."""
    async with shell() as s:
        await s.do("start_weight_update")
        s.engine.close("update")
        started_s = time.monotonic()
        reply_to = s.send("update_weights", {"update_info": {}})
        async with asyncio.timeout(20):
            while s.traffic.seen.count(("progress", True)) < 3:
                await asyncio.sleep(0.01)
        assert time.monotonic() - started_s >= 3 * 0.5
        s.engine.open("update")
        assert (await s.reply(reply_to))["ok"]
        reported = s.traffic.seen.count(("progress", True))
        await asyncio.sleep(0.7)
        assert s.traffic.seen.count(("progress", True)) == reported


@pytest.mark.parametrize(
    ("args", "after"),
    [({}, ["finish", "version", "caches", "resume"]), ({"cache": "keep"}, ["finish", "version", "resume"])],
)
async def test_a_finish_says_what_becomes_of_the_caches(args: dict[str, str], after: list[str]) -> None:
    """Explicit cache policy: cleared before anything is scheduled, kept only if the trainer says so."""
    async with shell() as s:
        await s.do("start_weight_update")
        await s.do("update_weights", {"update_info": {}})
        assert await s.code("finish_weight_update", {"cache": "salted"}) == "invalid_argument"
        s.engine.calls.clear()
        assert (await s.do("finish_weight_update", args))["ok"]
        assert s.engine.calls == after


@pytest.mark.parametrize(
    ("chunks", "finish"),
    [
        ([{"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}], {}),
        ([{"path": "/checkpoints/v2"}], {}),
        ([[{"ipc_handles": "rank 0"}, {"ipc_handles": "rank 1"}]], {}),
        ([], {"allow_empty": True}),
    ],
    ids=["tensors", "a disk", "one for each rank", "past us, by collective_rpc"],
)
async def test_the_bracket_is_the_same_whatever_carries_the_weights(
    chunks: list[Any], finish: dict[str, Any]
) -> None:
    """Bracket, do not own, the transfer: begin and commit work for each of them, and keep traffic away in
    between. What goes past the instance is declared."""
    async with shell() as s:
        await s.do("start_weight_update")
        assert not s.engine.scheduling
        for chunk in chunks:
            assert (await s.do("update_weights", {"update_info": chunk}))["ok"]
        if not chunks:
            assert await s.code("finish_weight_update", {"weight_version": "v2"}) == "empty_weight_update"
        assert ("routable", "v2") not in s.traffic.seen
        reply = await s.do("finish_weight_update", {"weight_version": "v2", **finish})
        assert reply["result"] == {"committed": True, "version": "v2", "chunks": len(chunks)}
        assert s.engine.scheduling and ("routable", "v2") in s.traffic.seen


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


@pytest.mark.parametrize(
    ("manifest", "missing"),
    [
        (Manifest(parameters=3), None),
        (Manifest(parameters=3, names_sha256=NAMES_OF_ABC, chunks=3), None),
        (Manifest(parameters=3, names_sha256=NAMES_OF_ABC.upper()), None),
        (Manifest(parameters=4), "3 of 4 parameters"),
        (Manifest(parameters=2), "3 of 2 parameters"),
        (Manifest(parameters=3, chunks=2), "3 of 2 chunks"),
        (Manifest(parameters=3, names_sha256="0" * 64), "names of the parameters"),
    ],
)
def test_names_count_once_and_in_any_order(manifest: Manifest, missing: str | None) -> None:
    """Update session: the checksum is of the distinct names, sorted, joined by newlines, in UTF-8."""
    received = Received()
    for names in (["ç"], ["b"], ["a", "b"]):
        received.add({"names": names})
    said = received.missing_from(manifest)
    assert said is None if missing is None else missing in (said or "")


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
