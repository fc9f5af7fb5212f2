"""Weight updates from files, good ones and bad ones, and the requests that wait meanwhile."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bus.client import Client, CommandFailed
from tests.broker import eventually
from tests.integration.served import (
    ALL_UP,
    LONG,
    NOT_READY,
    NOT_SERVING,
    REAL,
    SERVING,
    SOON_S,
    Answer,
    Served,
    phase,
    shown,
    snapshot,
)

pytestmark = REAL


def assert_refused(answer: Answer) -> None:
    assert answer.status == 503
    assert int(answer.headers["Retry-After"]) >= 1
    assert answer.error is not None
    assert (answer.error["code"], answer.error["retryable"]) == ("engine_paused", True)
    assert answer.tokens == []


async def assert_serves(served: Served, client: Client, version: str, answers: list[str]) -> None:
    """Everybody is told the same: snapshot, discovery, health, and the outputs themselves."""
    state = await served.state()
    assert (state.state, state.settled, state.ready) == ("serving", True, True)
    assert (state.weights.version, state.weights.good) == (version, True)
    assert state.weight_update is None
    assert (await client.instances())[served.name].weight_version == version
    assert await served.health() == ALL_UP
    assert set(await served.versions()) == {version}
    assert await served.complete_all() == answers


async def test_new_weights_answer_as_an_engine_started_on_them(
    served: Served, client: Client, models: Path, answers_of_b: list[str]
) -> None:
    """And back, to the letter."""
    assert not set(served.answers) & set(answers_of_b)
    before = len(served.watches["readiness"].seen)

    async with served.engine.weight_update(version="b") as update:
        assert await served.health() == NOT_READY
        assert not await served.routable()
        state = await served.state()
        assert (state.state, state.settled, phase(state)) == ("weight_update", True, "open")
        assert state.weight_update is not None
        assert (state.weight_update.owner, state.weight_update.session) == ("integration", update.session)
        loaded = snapshot(await update.load({"path": str(models / "b")}))
        assert (phase(loaded), loaded.weights.version, loaded.weights.good) == (
            "loading",
            state.weights.version,
            False,
        )
        with pytest.raises(CommandFailed) as refusal:
            await served.engine.resume()
        assert refusal.value.code == "weight_update_open"
    assert update.finished is not None
    assert shown(update.finished) == (True, "serving", True)
    assert update.finished.result == {"committed": True, "version": "b", "chunks": 1}
    await assert_serves(served, client, "b", answers_of_b)
    assert served.watches["readiness"].statuses[before:] == [NOT_SERVING, SERVING]

    # From a pause, back into the pause; and from a file rather than a directory.
    await served.engine.pause("keep")
    async with served.engine.weight_update() as update:
        await update.load({"path": str(models / "a" / "model.safetensors")})
    assert update.finished is not None
    assert shown(update.finished) == (True, "paused", True)
    assert await served.health() == NOT_READY
    await served.engine.resume()
    assert update.session is not None
    await assert_serves(served, client, update.session, served.answers)


async def test_a_checkpoint_in_chunks(
    served: Served, client: Client, models: Path, answers_of_b: list[str], tmp_path: Path
) -> None:
    halves = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    split(models / "b" / "model.safetensors", *halves)
    await served.engine.init_weight_transfer({})
    assert await served.health() == ALL_UP  # what the handshake withdrew is back
    async with served.engine.weight_update(version="b in halves") as update:
        for half in halves:
            await update.load({"path": str(half)})
    assert update.finished is not None and update.finished.result is not None
    assert update.finished.result["chunks"] == 2
    await assert_serves(served, client, "b in halves", answers_of_b)
    await served.update(models / "a", "a")
    await assert_serves(served, client, "a", served.answers)


def split(checkpoint: Path, one: Path, two: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(checkpoint)
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, one)
    save_file({name: tensors[name] for name in names[1::2]}, two)


async def test_an_update_that_was_not_begun_is_undone(served: Served, client: Client) -> None:
    version = (await served.state()).weights.version
    started = await served.engine.start_weight_update()
    assert started.result is not None
    with pytest.raises(CommandFailed) as refusal:
        await served.engine.finish_weight_update("nothing", session=started.result["session"])
    assert refusal.value.code == "empty_weight_update"
    aborted = await served.engine.abort_weight_update(session=started.result["session"])
    assert shown(aborted) == (True, "serving", True)
    await assert_serves(served, client, version, served.answers)


def nowhere(models: Path, folder: Path) -> Path:
    return folder / "not-there"


def truncated(models: Path, folder: Path) -> Path:
    whole = (models / "b" / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) * 2 // 3])
    return folder


def half_good(models: Path, folder: Path) -> Path:
    """Some layers fit, one does not: what was loaded of it is of no use."""
    from safetensors.numpy import load_file, save_file

    shutil.copy(models / "b" / "config.json", folder)
    tensors = load_file(models / "b" / "model.safetensors")
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name] = tensors[name][:, :-1].copy()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("make", [nowhere, truncated, half_good], ids=lambda make: make.__name__)
async def test_a_failed_update_keeps_traffic_away_until_a_good_one(
    served: Served, client: Client, models: Path, tmp_path: Path, make: Callable[[Path, Path], Path]
) -> None:
    path = make(models, tmp_path)
    version = (await served.state()).weights.version
    before = len(served.watches["readiness"].seen)
    started = await served.engine.start_weight_update()
    with pytest.raises(CommandFailed) as failure:
        await served.engine.update_weights({"path": str(path)})
    assert failure.value.code == "engine_error"
    assert str(tmp_path) in failure.value.message and "\n" not in failure.value.message
    await assert_tainted(served, version)
    assert started.result is not None
    with pytest.raises(CommandFailed) as refusal:  # that session is over
        await served.engine.finish_weight_update("x", session=started.result["session"])
    assert refusal.value.code in ("session_mismatch", "invalid_state")
    for verb in ("resume", "wake_up"):
        await served.engine.send(verb, check=False)
        await assert_tainted(served, version)

    await served.update(models / "a", "repaired")
    await assert_serves(served, client, "repaired", served.answers)
    assert served.watches["readiness"].statuses[before:] == [NOT_SERVING, SERVING]
    assert (await served.state()).incarnation == served.incarnation


async def assert_tainted(served: Served, version: str) -> None:
    state = await served.state()
    assert (state.state, phase(state), state.settled) == ("weight_update", "tainted", True)
    assert (state.weights.version, state.weights.good) == (version, False)
    assert await served.health() == NOT_READY
    assert not await served.routable()
    assert_refused(await served.stream().end())
    assert served.alive


async def test_a_held_request_gets_new_weights_and_nothing_before(
    served: Served, client: Client, models: Path, answers_of_b: list[str]
) -> None:
    async with served.engine.weight_update(version="b") as update:
        held = served.stream()
        await eventually(lambda: in_flight(served, 1), within_s=SOON_S)
        await update.load({"path": str(models / "b")})
        assert await held.stands_still() == 0
    assert (await held.end()).text == answers_of_b[0]
    assert held.finish_reason == "length"
    await served.update(models / "a", "a")
    await assert_serves(served, client, "a", served.answers)


async def in_flight(served: Served, count: int) -> bool:
    return (await served.state()).in_flight == count


async def test_what_was_frozen_goes_on_with_new_weights(served: Served, client: Client, models: Path) -> None:
    """The part that was computed before stays as it was sent."""
    whole = await served.long_answer()
    answer = await served.stream(max_tokens=LONG).reaches(20)
    async with served.engine.weight_update(version="b") as update:
        frozen_at = await answer.stands_still()
        so_far = answer.text
        await update.load({"path": str(models / "b")})
        assert await answer.stands_still() == frozen_at < LONG
    await answer.end()
    assert (answer.finish_reason, answer.count) == ("length", LONG)
    assert whole.startswith(so_far) and answer.text.startswith(so_far)
    assert answer.text != whole
    await served.update(models / "a", "a")
    await assert_serves(served, client, "a", served.answers)


async def test_requests_end_when_the_weights_are_tainted(
    served: Served, client: Client, models: Path, tmp_path: Path
) -> None:
    """One that waited for its first token, and one in the middle: both are told to try elsewhere."""
    frozen = await served.stream(max_tokens=LONG).reaches(20)
    started = await served.engine.start_weight_update()
    assert started.result is not None
    held = served.stream()
    await eventually(lambda: in_flight(served, 2), within_s=SOON_S)
    frozen_at = await frozen.stands_still()
    await served.engine.update_weights({"path": str(models / "b")})
    assert await frozen.stands_still() == frozen_at and held.tokens == []

    with pytest.raises(CommandFailed):
        await served.engine.update_weights({"path": str(tmp_path / "nowhere")})
    await frozen.end()
    await held.end()
    assert_refused(held)
    assert len(frozen.tokens) == frozen_at and frozen.finish_reason is None
    assert frozen.error is not None
    assert (frozen.error["code"], frozen.error["retryable"]) == ("engine_paused", True)
    await eventually(lambda: in_flight(served, 0), within_s=SOON_S)
    assert phase(await served.state()) == "tainted"
    await served.update(models / "a", "a")
    await assert_serves(served, client, "a", served.answers)


async def test_an_abort_after_a_chunk_taints_too(served: Served, client: Client, models: Path) -> None:
    await served.engine.start_weight_update()
    held = served.stream()
    await eventually(lambda: in_flight(served, 1), within_s=SOON_S)
    await served.engine.update_weights({"path": str(models / "b")})
    aborted = snapshot(await served.engine.abort_weight_update())
    assert (aborted.state, phase(aborted)) == ("weight_update", "tainted")
    assert_refused(await held.end())
    assert await served.health() == NOT_READY
    await served.update(models / "a", "a")
    await assert_serves(served, client, "a", served.answers)


async def test_waking_inside_a_session_schedules_nothing(
    served: Served, client: Client, models: Path, answers_of_b: list[str]
) -> None:
    """What a trainer on the same accelerator does: sleep, wake the weights, load, wake the rest, finish."""
    await served.engine.sleep(1, mode="keep")
    held = served.stream()
    await eventually(lambda: in_flight(served, 1), within_s=SOON_S)
    await served.engine.wake_up(["weights"])
    async with served.engine.weight_update(version="b") as update:
        await update.load({"path": str(models / "b")})
        woken = await served.engine.wake_up()
        assert shown(woken) == (True, "weight_update", True)
        assert woken.result == {"woken": ["kv_cache"]}
        assert await held.stands_still() == 0
        assert await served.health() == NOT_READY
    assert update.finished is not None
    assert shown(update.finished) == (True, "serving", True)
    assert (await held.end()).text == answers_of_b[0]
    await served.update(models / "a", "a")
    await assert_serves(served, client, "a", served.answers)


async def test_waking_onto_discarded_weights_schedules_nothing(
    served: Served, client: Client, models: Path
) -> None:
    """Level 2 drops them. vLLM on the CPU keeps them in truth, and would answer."""
    frozen = await served.stream(max_tokens=LONG).reaches(20)
    slept = await served.engine.sleep(2, mode="keep")
    assert shown(slept) == (True, "asleep", True)
    assert not snapshot(slept).weights.good
    await frozen.end()
    assert frozen.finish_reason is None and frozen.error is not None
    assert (frozen.error["code"], frozen.error["retryable"]) == ("engine_paused", True)

    woken = await served.engine.wake_up()
    assert shown(woken) == (True, "weight_update", True)
    assert phase(snapshot(woken)) == "discarded"
    assert_refused(await served.stream().end())
    with pytest.raises(CommandFailed) as refusal:
        await served.engine.resume()
    assert refusal.value.code == "weights_not_ready"
    assert await served.health() == NOT_READY
    assert not await served.routable()
    await served.update(models / "a", "a")
    await assert_serves(served, client, "a", served.answers)
