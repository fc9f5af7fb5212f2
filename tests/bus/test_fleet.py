"""Fleets: one command to many, and updates of all of them, of which some fail."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from bus import fleet as fleet_module
from bus.client import Client
from bus.fleet import End, Fleet, FleetUpdate, PartialUpdate
from bus.messages import ErrorCode
from tests.broker import NatsServer, eventually
from tests.bus.conftest import Connect
from tests.bus.members import Member, start_members

Members = dict[str, Member]
StartMembers = Callable[..., Awaitable[Members]]
CHUNK = {"path": "/v2"}


@pytest.fixture
async def members(connect: Connect) -> StartMembers:
    async def start(*names: str) -> Members:
        return await start_members([await connect()], names or ("a", "b", "c"))

    return start


@pytest.fixture
async def client(nats_server: NatsServer) -> AsyncIterator[Client]:
    async with Client.connect(nats_server.url, issuer="trainer") as client:
        yield client


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests lose replies on purpose, and then do not wait long."""
    monkeypatch.setattr(fleet_module, "AGAIN_S", (0.2, 1.0))
    monkeypatch.setattr(fleet_module, "SETTLE_S", 0.5)
    monkeypatch.setattr(fleet_module, "NOBODY_S", 0.3)


def ends(update: FleetUpdate) -> dict[str, End]:
    return {name: part.end for name, part in update.parts.items()}


def states(members: Members) -> dict[str, str]:
    return {name: member.phase or member.state for name, member in members.items()}


# --- one command -----------------------------------------------------------------------------------


async def test_everybody_answers_to_one_message(client: Client, members: StartMembers) -> None:
    three = await members()
    async with Fleet(client) as fleet:
        outcome = await fleet.send("pause", {"mode": "keep"})
    assert outcome.ok
    assert sorted(outcome.done) == ["a", "b", "c"]
    assert outcome.expected == {name: member.incarnation for name, member in three.items()}
    assert [member.verbs() for member in three.values()] == [["pause"]] * 3
    assert {command.id for member in three.values() for _, command in member.got} == {outcome.id}
    assert outcome.joined == outcome.left == {}


@pytest.mark.parametrize("names", [None, ["a", "b", "c", "d"]], ids=["everybody", "by name"])
async def test_a_part_is_never_ok(
    names: list[str] | None, client: Client, members: StartMembers, connect: Connect
) -> None:
    """Group command, per-engine acks: it means those who lived when the fleet was made, has one deadline
    and goes to all at once; done, failed with its code, and no answer are told apart."""
    four = await members("a", "b", "c", "d")
    four["b"].fails["pause"] = ErrorCode.ENGINE_ERROR
    four["c"].deaf.add("pause")
    four["d"].slow.add("pause")
    async with Fleet(client, names) as fleet:
        joiner = await Member(await connect(), "late").start()
        await eventually(lambda: fleet.joined)
        started = time.monotonic()
        outcome = await fleet.send("pause", timeout_s=0.5)
        assert 0.4 < time.monotonic() - started < 10
        four["d"].release.set()
    assert outcome.expected == {name: member.incarnation for name, member in four.items()}
    assert outcome.joined == {"late": joiner.incarnation}
    assert not outcome.ok
    assert sorted(outcome.done) == ["a"]
    assert outcome.codes == {"b": "engine_error", "c": "no_answer", "d": "no_answer"}
    assert set(outcome.no_answer.values()) == {"no reply in time; it may have been carried out"}
    assert str(outcome) == "pause: 1 of 4 done, b: engine_error, c: no_answer, d: no_answer"


async def test_nobody_is_not_ok(client: Client) -> None:
    async with Fleet(client) as fleet:
        assert not (await fleet.send("pause")).ok
        with pytest.raises(PartialUpdate, match="there is no instance"):
            async with fleet.update("v2"):
                pytest.fail("there is nobody to update")


async def test_a_lost_reply_is_asked_for_under_the_same_id(client: Client, members: StartMembers) -> None:
    three = await members()
    three["b"].loses["pause"] = 2
    async with Fleet(client) as fleet:
        outcome = await fleet.send("pause", timeout_s=10)
    assert outcome.ok
    assert outcome.done["b"].duplicate
    assert len({command.id for _, command in three["b"].got}) == 1
    assert len({command.deadline for _, command in three["b"].got}) == 1
    assert three["a"].verbs() == ["pause"]


async def test_a_command_that_runs_long_is_carried_out_once(client: Client, members: StartMembers) -> None:
    three = await members()
    three["b"].slow.add("pause")
    async with Fleet(client) as fleet:
        sending = asyncio.create_task(fleet.send("pause", timeout_s=10))
        await eventually(lambda: len(three["b"].got) >= 2)  # asked again while it runs
        three["b"].release.set()
        outcome = await sending
    assert outcome.ok
    assert three["b"].stops == ["command"]


async def test_a_narrowed_fleet_leaves_the_others_alone(client: Client, members: StartMembers) -> None:
    three = await members()
    async with Fleet(client, names=["a", "b", "nobody"]) as fleet:
        assert (await fleet.send("pause")).ok
        fleet.drop("a")
        assert (await fleet.send("resume")).ok
    assert [member.verbs() for member in three.values()] == [["pause"], ["pause", "resume"], []]


async def test_args_of_its_own_for_each(client: Client, members: StartMembers) -> None:
    three = await members()
    ranks = {name: {"init_info": {"rank_offset": rank}} for rank, name in enumerate("abc")}
    async with Fleet(client) as fleet:
        assert (await fleet.send_each("init_weight_transfer", ranks)).ok
        with pytest.raises(ValueError, match="not members of the fleet: x"):
            await fleet.send_each("init_weight_transfer", {"x": {}})
    assert [member.got[0][1].args for member in three.values()] == list(ranks.values())


async def test_who_leaves_is_not_waited_for(client: Client, members: StartMembers) -> None:
    three = await members()
    three["b"].slow.add("pause")
    async with Fleet(client) as fleet:
        sending = asyncio.create_task(fleet.send("pause", timeout_s=60))
        await eventually(lambda: three["b"].got)
        await three["b"].end()
        outcome = await sending
    assert outcome.no_answer == {"b": "it ended without an answer"}
    assert outcome.left == {"b": three["b"].incarnation}
    assert not outcome.ok


async def test_who_is_gone_before_is_not_asked(client: Client, members: StartMembers) -> None:
    three = await members()
    async with Fleet(client) as fleet:
        await three["b"].end()
        await eventually(lambda: fleet.left)
        outcome = await fleet.send("pause", timeout_s=60)
        assert outcome.no_answer == {"b": "it ended without an answer"}
        fleet.refresh()
        assert sorted(fleet.members) == ["a", "c"]
        assert (await fleet.send("pause")).ok


async def test_a_restarted_member_left_and_joined(
    client: Client, members: StartMembers, connect: Connect
) -> None:
    """Its new life holds none of what the old one was told: its answer does not count."""
    three = await members()
    async with Fleet(client) as fleet:
        await three["b"].leave_the_bus()
        again = await Member(await connect(), "b").start()
        outcome = await fleet.send("pause", timeout_s=5)
        assert outcome.left == {"b": three["b"].incarnation}
        assert outcome.joined == {"b": again.incarnation}
        assert "b" in outcome.no_answer
        assert not outcome.ok


async def test_a_joiner_is_told_of_but_not_waited_for(
    client: Client, members: StartMembers, connect: Connect
) -> None:
    await members()
    async with Fleet(client) as fleet:
        joiner = await Member(await connect(), "late").start()
        await eventually(lambda: fleet.joined)
        joiner.slow.add("pause")
        outcome = await fleet.send("pause")
        assert outcome.ok
        assert outcome.joined == {"late": joiner.incarnation}
        assert "late" not in outcome.expected
        joiner.release.set()


async def test_who_does_not_listen_is_given_a_moment(client: Client, members: StartMembers) -> None:
    three = await members()
    await three["b"].leave_the_bus()  # as after kill -9: its key is there for a while
    async with Fleet(client) as fleet:
        started = time.monotonic()
        outcome = await fleet.send("pause", timeout_s=60)
        assert time.monotonic() - started < 25
    assert outcome.no_answer == {"b": "no instance of this name listens"}


async def test_answers_lost_with_the_broker_are_asked_for_again(
    nats_server: NatsServer, client: Client, members: StartMembers
) -> None:
    three = await members()
    for member in three.values():
        member.slow.add("pause")
    async with Fleet(client, names=["a", "b", "c"]) as fleet:
        sending = asyncio.create_task(fleet.send("pause", timeout_s=30))
        await eventually(lambda: all(member.got for member in three.values()))
        await nats_server.restart()
        for member in three.values():
            member.release.set()
        outcome = await sending
    assert outcome.ok
    assert all(member.stops == ["command"] for member in three.values())


async def test_without_a_broker_nobody_answers(
    nats_server: NatsServer, client: Client, members: StartMembers
) -> None:
    await members()
    async with Fleet(client) as fleet:
        await nats_server.stop()
        await eventually(lambda: not client.bus.connected)
        outcome = await fleet.send("pause", timeout_s=0.2)
        assert outcome.no_answer == dict.fromkeys("abc", "no broker")
        await nats_server.start()


async def test_200_members(client: Client, connect: Connect) -> None:
    names = [f"m{number:03}" for number in range(200)]
    many = await start_members([await connect() for _ in range(4)], names)
    async with Fleet(client) as fleet:
        started = time.monotonic()
        assert (await fleet.send("pause")).ok
        assert (await fleet.send("resume")).ok
        async with fleet.update("v2") as update:
            await update.load(CHUNK)
        assert time.monotonic() - started < 75
        assert set(ends(update).values()) == {End.COMMITTED}
        assert {member.state for member in many.values()} == {"serving"}
        many["m007"].fails["update_weights"] = ErrorCode.ENGINE_ERROR
        many["m123"].deaf.add("update_weights")
        with pytest.raises(PartialUpdate, match=r"2 of 200 instances failed: m007 \(engine_error, tainted\)"):
            async with fleet.update("v3", on_partial="resume_good", load_timeout_s=5) as update:
                await update.load(CHUNK)
        assert sum(member.version == "v3" and member.state == "serving" for member in many.values()) == 198


# --- a weight update -------------------------------------------------------------------------------


async def test_an_update_of_all(client: Client, members: StartMembers) -> None:
    three = await members()
    await client.new_epoch()
    async with Fleet(client) as fleet:
        async with fleet.update("v2", manifest={"parameters": 2}, lease_s=30) as update:
            assert sorted(update.sessions) == ["a", "b", "c"]
            assert (await update.load(CHUNK)).ok
            per_rank = [{"rank": 0}, {"rank": 1}]
            assert (await update.load(per_rank)).ok
        assert fleet.paused == {}
    for name, member in three.items():
        assert member.verbs() == [
            "pause",
            "start_weight_update",
            "update_weights",
            "update_weights",
            "finish_weight_update",
            "resume",
        ]
        commands = [command for _, command in member.got]
        assert all(command.epoch == 1 for command in commands)
        session = update.parts[name].session
        assert [command.session for command in commands] == [None, None, session, session, session, None]
        assert (commands[0].args["lease_s"], commands[1].args["lease_s"]) == (30, 30)
        assert commands[1].args["manifest"] == {"parameters": 2}
        assert commands[3].args["update_info"] == per_rank
        assert (member.version, member.state) == ("v2", "serving")
    ids = [[command.id for _, command in member.got][:5] for member in three.values()]
    assert ids[0] == ids[1] == ids[2]
    assert len(set(ids[0])) == 5
    assert set(ends(update).values()) == {End.COMMITTED}


async def test_chunks_of_its_own_for_each(client: Client, members: StartMembers) -> None:
    three = await members()
    async with Fleet(client) as fleet, fleet.update("v2") as update:
        assert (await update.load_each({name: {"for": name} for name in "abc"})).ok
        with pytest.raises(ValueError, match="not in the update: x"):
            await update.load_each({"x": {}})
    assert [member.got[2][1].args for member in three.values()] == [
        {"update_info": {"for": name}} for name in "abc"
    ]


@pytest.mark.parametrize(
    "verb", ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]
)
async def test_a_lost_reply_in_any_phase_changes_nothing(
    verb: str, client: Client, members: StartMembers
) -> None:
    """Idempotency: each phase and chunk has an id of its own, and a repeat of it gets the first answer."""
    three = await members()
    three["b"].loses[verb] = 1
    async with Fleet(client) as fleet, fleet.update("v2") as update:
        await update.load(CHUNK)
    assert (three["b"].version, three["b"].state, three["b"].chunks) == ("v2", "serving", 1)
    assert three["b"].verbs().count(verb) == 2


@pytest.mark.parametrize("on_partial", ["hold", "resume_good", "abort"])
async def test_a_pause_that_only_some_accept_is_taken_back(
    on_partial: Any, client: Client, members: StartMembers
) -> None:
    """Partial-pause rollback: exactly those that this update paused are resumed, with what they had."""
    four = await members("a", "b", "c", "d")
    four["b"].fails["pause"] = ErrorCode.INVALID_STATE
    four["c"].stops.append("command")  # somebody else's pause
    four["d"].stops.append("outside")
    for name in "cd":
        await four[name].show()
    async with Fleet(client) as fleet:
        with pytest.raises(PartialUpdate, match=r"1 of 4 instances failed: b \(invalid_state, none\)"):
            async with fleet.update("v2", on_partial):
                pytest.fail("not everybody is paused")
    assert four["a"].verbs() == ["pause", "resume"]
    assert [four[name].verbs() for name in "bcd"] == [["pause"]] * 3
    assert states(four) == {"a": "serving", "b": "serving", "c": "paused", "d": "paused"}
    assert four["c"].stops == ["command"]
    assert {member.version for member in four.values()} == {"default"}


async def test_a_pause_whose_reply_never_came_is_taken_back_too(
    client: Client, members: StartMembers
) -> None:
    three = await members()
    three["b"].slow.add("pause")
    three["c"].deaf.add("pause")
    async with Fleet(client) as fleet:

        async def update() -> None:
            async with fleet.update("v2", pause_timeout_s=0.3):
                pytest.fail("not everybody is paused")

        updating = asyncio.create_task(update())
        await eventually(lambda: three["b"].verbs().count("pause") >= 3)  # asked after its time
        three["b"].release.set()
        with pytest.raises(PartialUpdate):
            await updating
    assert states(three) == {"a": "serving", "b": "serving", "c": "serving"}
    assert "resume" not in three["c"].verbs()


async def test_pauses_of_others_outlive_an_update(client: Client, members: StartMembers) -> None:
    three = await members()
    three["b"].stops.append("command")
    await three["b"].show()
    async with Fleet(client) as fleet, fleet.update("v2") as update:
        await update.load(CHUNK)
    assert states(three) == {"a": "serving", "b": "paused", "c": "serving"}
    assert three["b"].version == "v2"


@pytest.mark.parametrize(
    ("on_partial", "after"),
    [
        ("hold", {"a": "paused", "b": "paused", "c": "paused"}),
        ("abort", {"a": "serving", "b": "serving", "c": "serving"}),
    ],
)
async def test_sessions_that_only_some_open_are_undone(
    on_partial: Any, after: dict[str, str], client: Client, members: StartMembers
) -> None:
    three = await members()
    three["b"].fails["start_weight_update"] = ErrorCode.ENGINE_ERROR
    async with Fleet(client) as fleet:
        with pytest.raises(PartialUpdate) as partial:
            async with fleet.update("v2", on_partial):
                pytest.fail("not everybody is in")
        update = partial.value.update
        assert ends(update) == {"a": End.UNDONE, "b": End.NONE, "c": End.UNDONE}
        assert states(three) == after
        assert update.held == [name for name, state in after.items() if state == "paused"]
        await update.resume()
        assert set(states(three).values()) == {"serving"}


async def test_a_session_whose_reply_never_came_is_aborted(client: Client, members: StartMembers) -> None:
    three = await members()
    three["b"].loses["start_weight_update"] = 2
    async with Fleet(client) as fleet:
        with pytest.raises(PartialUpdate):  # noqa: PT012
            async with fleet.update("v2", "resume_good", start_timeout_s=0.3) as update:
                assert sorted(update.sessions) == ["a", "c"]
                await update.load(CHUNK)
    assert three["b"].verbs()[-1] == "abort_weight_update"
    assert three["b"].session is None
    assert ends(update) == {"a": End.COMMITTED, "b": End.UNDONE, "c": End.COMMITTED}
    assert states(three) == {"a": "serving", "b": "paused", "c": "serving"}


async def test_hold_keeps_the_others_paused_with_what_they_have(
    client: Client, members: StartMembers
) -> None:
    three = await members()
    three["b"].fails["update_weights"] = ErrorCode.ENGINE_ERROR
    async with Fleet(client) as fleet:
        with pytest.raises(PartialUpdate) as partial:  # noqa: PT012
            async with fleet.update("v2", lease_s=0.3) as update:
                outcome = await update.load(CHUNK)
                assert outcome.codes == {"b": "engine_error"}
                assert sorted((await update.load(CHUNK)).done) == ["a", "c"]
        assert str(partial.value) == (
            "v2: 1 of 3 instances failed: b (engine_error, tainted); of the others 2 are committed, paused"
        )
        assert states(three) == {"a": "paused", "b": "tainted", "c": "paused"}
        renewals = three["a"].verbs().count("pause")
        await eventually(lambda: three["a"].verbs().count("pause") >= renewals + 2)

        # The trainer brings the third up to date, and the fleet back: `b` is not forgotten.
        three["b"].fails.clear()
        async with fleet.update("v2") as again:
            await again.load(CHUNK)
        assert states(three) == {"a": "serving", "b": "serving", "c": "serving"}
        assert fleet.paused == {}
        assert update.held == []


@pytest.mark.parametrize("choice", ["retry", "drop", "end"])
async def test_after_a_part_the_trainer_decides(choice: str, client: Client, members: StartMembers) -> None:
    """All-or-report, not all-or-nothing: who has committed has the version and stays paused, and the
    trainer retries, goes on without those that failed, or ends it."""
    three = await members()
    three["b"].fails["update_weights"] = ErrorCode.ENGINE_ERROR
    async with Fleet(client) as fleet:
        with pytest.raises(PartialUpdate):
            async with fleet.update("v2") as update:
                await update.load(CHUNK)
        assert ends(update) == {"a": End.COMMITTED, "b": End.TAINTED, "c": End.COMMITTED}
        assert states(three) == {"a": "paused", "b": "tainted", "c": "paused"}
        assert update.held == ["a", "b", "c"]
        if choice == "retry":
            three["b"].fails.clear()
            async with fleet.update("v2") as again:
                await again.load(CHUNK)
            assert set(ends(again).values()) == {End.COMMITTED}
            assert states(three) == {"a": "serving", "b": "serving", "c": "serving"}
            return
        if choice == "drop":
            fleet.drop("b")
            async with fleet.update("v3") as smaller:
                await smaller.load(CHUNK)
            assert ends(smaller) == {"a": End.COMMITTED, "c": End.COMMITTED}
        else:
            assert sorted((await update.resume()).done) == ["a", "c"]
        assert states(three) == {"a": "serving", "b": "tainted", "c": "serving"}
        assert "resume" not in three["b"].verbs()


async def test_resume_good_resumes_the_others(client: Client, members: StartMembers) -> None:
    three = await members()
    three["b"].fails["finish_weight_update"] = ErrorCode.INCOMPLETE_WEIGHT_UPDATE
    async with Fleet(client) as fleet:
        with pytest.raises(PartialUpdate):
            async with fleet.update("v2", "resume_good") as update:
                await update.load(CHUNK)
    assert states(three) == {"a": "serving", "b": "tainted", "c": "serving"}
    assert ends(update) == {"a": End.COMMITTED, "b": End.TAINTED, "c": End.COMMITTED}


async def test_hold_leaves_a_session_that_a_finish_left_open(client: Client, members: StartMembers) -> None:
    three = await members()
    three["b"].fails["finish_weight_update"] = ErrorCode.INCOMPLETE_WEIGHT_UPDATE
    async with Fleet(client) as fleet:
        with pytest.raises(PartialUpdate):
            async with fleet.update("v2", "hold") as update:
                await update.load(CHUNK)
        assert ends(update)["b"] is End.OPEN
        assert three["b"].phase == "loading"
        await update.abort()
        assert ends(update)["b"] is End.TAINTED


async def test_abort_ends_the_update_for_all(client: Client, members: StartMembers) -> None:
    three = await members()
    three["b"].fails["update_weights"] = ErrorCode.ENGINE_ERROR
    async with Fleet(client) as fleet:
        with pytest.raises(PartialUpdate):  # noqa: PT012
            async with fleet.update("v2", "abort") as update:
                await update.load(CHUNK)
                pytest.fail("it has ended")
    assert ends(update) == {"a": End.TAINTED, "b": End.TAINTED, "c": End.TAINTED}
    assert all(member.session is None for member in three.values())
    assert "abort_weight_update" not in three["b"].verbs()


async def test_nobody_left_ends_the_update(client: Client, members: StartMembers) -> None:
    three = await members()
    for member in three.values():
        member.fails["update_weights"] = ErrorCode.INVALID_ARGUMENT  # refused: nothing was loaded
    async with Fleet(client) as fleet:
        with pytest.raises(PartialUpdate, match="3 of 3"):
            async with fleet.update("v2") as update:
                await update.load({})
    assert set(ends(update).values()) == {End.UNDONE}
    assert set(states(three).values()) == {"serving"}


async def test_what_the_block_raises_undoes_everything(client: Client, members: StartMembers) -> None:
    three = await members()
    async with Fleet(client) as fleet:
        with pytest.raises(RuntimeError, match="out of memory"):
            async with fleet.update("v2") as update:
                raise RuntimeError("out of memory")
    assert set(ends(update).values()) == {End.UNDONE}
    assert set(states(three).values()) == {"serving"}


@pytest.mark.parametrize("verb", ["pause", "start_weight_update", "update_weights", "finish_weight_update"])
async def test_a_trainer_that_is_cancelled_leaves_nothing_behind(
    verb: str, client: Client, members: StartMembers
) -> None:
    """Whatever it was waiting for: the answer it did not wait for is asked for."""
    three = await members()
    three["b"].slow.add(verb)
    async with Fleet(client) as fleet:

        async def train() -> None:
            async with fleet.update("v2") as update:
                await update.load(CHUNK)

        training = asyncio.create_task(train())
        await eventually(lambda: verb in three["b"].verbs())
        training.cancel()
        await eventually(lambda: three["b"].verbs()[-1] != verb or three["b"].verbs().count(verb) > 1)
        three["b"].release.set()
        with pytest.raises(asyncio.CancelledError):
            await training
    loaded = verb in ("update_weights", "finish_weight_update")
    assert all(member.session is None for member in three.values())
    if not loaded:
        assert set(states(three).values()) == {"serving"}
    elif verb == "finish_weight_update":  # done by all before the abort came
        assert {member.version for member in three.values()} == {"v2"}
        assert set(states(three).values()) == {"serving"}
    else:
        assert set(states(three).values()) == {"tainted"}


async def test_leases_are_renewed_while_the_block_runs(client: Client, members: StartMembers) -> None:
    three = await members()
    async with Fleet(client) as fleet, fleet.update("v2", lease_s=0.3) as update:

        def renewals() -> list[str | None]:
            return [command.session for verb, command in three["a"].got if verb == "status"]

        await eventually(lambda: len(renewals()) >= 2)
        assert set(renewals()) == {update.parts["a"].session}
        await update.load(CHUNK)


async def test_a_trainer_that_starts_again_finds_what_it_did(client: Client, members: StartMembers) -> None:
    """The same id, after a crash in the middle: sessions are found again, chunks not loaded twice."""
    three = await members()
    async with Fleet(client) as crashed:
        lost = FleetUpdate(
            crashed,
            "v2",
            "hold",
            {"mode": "keep", "lease_s": 60.0},
            {"pause_mode": "keep", "lease_s": 60.0, "start_s": 60.0, "chunk_s": 600.0, "finish_s": 300.0},
            {},
            None,
            "step-7",
            fleet_module._Limits(30, 30, 30, 30),
        )
        await lost._prepare()
        await lost.load(CHUNK)
    async with Fleet(client) as fleet, fleet.update("v2", id="step-7") as update:
        assert update.sessions == lost.sessions
        await update.load(CHUNK)
        assert {member.chunks for member in three.values()} == {1}
        await update.load({"path": "/rest"})
    assert {member.chunks for member in three.values()} == {2}
    assert states(three) == {"a": "serving", "b": "serving", "c": "serving"}


async def test_who_joins_during_an_update_waits_for_the_next(
    client: Client, members: StartMembers, connect: Connect
) -> None:
    """Version gating of joiners: it is told of, and no part of the update that runs."""
    await members()
    async with Fleet(client) as fleet:
        async with fleet.update("v2") as update:
            late = await Member(await connect(), "late").start()
            await eventually(lambda: fleet.joined)
            assert (await update.load(CHUNK)).joined == {"late": late.incarnation}
        assert sorted(update.parts) == ["a", "b", "c"]
        assert late.verbs() == []
        fleet.refresh()
        async with fleet.update("v3") as update:
            await update.load(CHUNK)
        assert sorted(update.parts) == ["a", "b", "c", "late"]
        assert late.version == "v3"


async def test_without_a_pause(client: Client, members: StartMembers) -> None:
    three = await members()
    async with Fleet(client) as fleet, fleet.update("v2", pause=False) as update:
        await update.load(CHUNK)
    assert three["a"].verbs() == ["start_weight_update", "update_weights", "finish_weight_update"]


async def test_large_chunks_for_many_are_not_too_much(
    client: Client, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of a large model's tensors, to each of many instances at the same time."""
    monkeypatch.setattr("bus.connection.MAX_PENDING_BYTES", 4 * 1024 * 1024)
    monkeypatch.setattr(fleet_module, "BURST_BYTES", 2 * 1024 * 1024)
    monkeypatch.setattr(fleet_module, "AGAIN_S", (10.0, 10.0))
    await start_members([await connect()], [f"m{number}" for number in range(20)])
    async with Fleet(client) as fleet, fleet.update("v2") as update:
        await update.load({"names": "x" * 900_000})
    assert set(ends(update).values()) == {End.COMMITTED}


def test_it_is_found_beside_the_client() -> None:
    from bus import client

    assert client.Fleet is Fleet
    with pytest.raises(AttributeError, match="no attribute 'Fleets'"):
        _ = client.Fleets
