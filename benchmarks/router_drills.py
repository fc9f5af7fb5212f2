"""What clients notice of a router's bad days: instances killed, paused, refusing, hung, all gone, no broker.

    python -m benchmarks.router_drills [--policy aggregated|pd] [--drill NAME ...] [--rate 40] [--engine-ms 2]

Each drill starts a NATS server, four simulated instances (or two for prefill and two for decode) and a
router, each in processes of its own, sends requests at a fixed rate, does the damage and repairs it.
It prints what happened beside what is wanted. Exit code 1: something wanted was missed.

drills:
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import uvloop

from benchmarks.open_loop import CLIENT_TIMEOUT_S, Answer, Leaver, OpenLoop, Outcome, Phase
from benchmarks.routed import LIMIT_S, Fleet, Policy, Router, Simulated, a_fleet, tell, within

PREFILL_US_PER_TOKEN = 100
SLOW_S = 1.0
AGAIN_S = {"kill": 1.0, "pause": 0.2, "broker-gone": 1.0}
"""How soon an instance is used after its `serving` event (issue 5)."""
REFUSED_WITHIN_S = 0.05
FIRST_BYTE_S = 2.0
LEAVE_AT_ONCE = 20
LEAVE_WORDS = 300


@dataclass(frozen=True)
class Plan:
    """How much of it.

    Attributes:
        token_s: what the engines need for a token.
        lead_s: load before the damage.
        away_s: how long the damage lasts.
        gone_s: how long the broker is away.
        rest_s: load after the repair.
        quiet_s: how long nothing may change after the broker is back; its keys live for 10 s.
        stream_s: how long the streams are that have to go on elsewhere.
        leavers: how many clients leave.
        role: only instances of this role have their bad day.
        modes: of the pauses.
        probe_s: how often the router probes.
        bounded: whether to let an engine hang a second time, with a shorter timeout in the router.
    """

    rate: float = 40
    tokens: int = 8
    token_s: float = 0.002
    streamed: Literal["all", "half"] = "half"
    lead_s: float = 2
    away_s: float = 8
    gone_s: float = 20
    rest_s: float = 3
    quiet_s: float = 12
    stream_s: float = 1.2
    leavers: int = 1000
    warm_s: float = 1
    role: str | None = None
    modes: tuple[str, ...] = ("wait", "keep", "abort")
    probe_s: float = 5
    bounded: bool = True

    def victims(self, fleet: Fleet) -> list[Simulated]:
        """One of each role."""
        of_roles = {one.role: one for one in reversed(fleet.instances) if self.role in (None, one.role)}
        return list(of_roles.values())


@dataclass(frozen=True)
class Row:
    """One thing that was measured.

    Attributes:
        wanted: in words; empty if nothing is.
        good: whether it is as wanted.
        speed: it depends on the machine.
    """

    what: str
    measured: str
    wanted: str = ""
    good: bool = True
    speed: bool = False


@dataclass
class Report:
    """What one drill has shown."""

    title: str
    rows: list[Row] = field(default_factory=list)

    def add(
        self, what: str, measured: object, wanted: str = "", good: bool = True, speed: bool = False
    ) -> None:
        self.rows.append(Row(what, str(measured), wanted, good, speed))

    def exactly(self, what: str, measured: float, wanted: float = 0) -> None:
        self.add(what, f"{measured:g}", f"{wanted:g}", measured == wanted)

    def quick(self, what: str, seconds: float | None, limit_s: float | None = None) -> None:
        """A duration. With a limit None is never."""
        measured = "-" if seconds is None else f"{seconds:.3f} s"
        if limit_s is None:
            self.add(what, measured, speed=True)
        else:
            good = seconds is not None and seconds <= limit_s
            self.add(
                what, "never" if seconds is None else measured, f"at most {limit_s:g} s", good, speed=True
            )

    def missed(self, speeds: bool = True) -> list[Row]:
        return [row for row in self.rows if not row.good and (speeds or not row.speed)]

    def lines(self) -> list[str]:
        lines = [f"{self.title:<62}{'measured':>14}  wanted"]
        for row in self.rows:
            mark = "" if row.good else "   <- MISSED"
            lines.append(f"  {row.what:<60}{row.measured:>14}  {row.wanted}{mark}".rstrip())
        return lines


async def kill(fleet: Fleet, plan: Plan) -> list[Report]:
    """kill -9 of an instance's control process and engine; it is started again some seconds later"""
    return [await _kill(fleet, plan, victim) for victim in plan.victims(fleet)]


async def _kill(fleet: Fleet, plan: Plan, victim: Simulated) -> Report:
    report = Report(f"kill {victim.name} ({fleet.policy})")
    async with _under_load(fleet, plan) as (router, load):
        await asyncio.sleep(plan.lead_s)
        before, killed_s = await router.bad_attempts(), time.monotonic()
        await victim.kill()
        done_s = time.monotonic()
        await asyncio.sleep(plan.away_s)
        failures = await router.bad_attempts() - before
        event_s = await _started(fleet, victim)
        await asyncio.sleep(plan.rest_s)
    _usual(report, load, killed_s, done_s, victims={victim.name})
    report.add("failures of instances that the router has met with", failures)
    _used_again(report, load, victim, event_s, AGAIN_S["kill"])
    return report


async def kill_migrate(fleet: Fleet, plan: Plan) -> list[Report]:
    """the same under long streams, which the router continues elsewhere (--migration-limit)"""
    tokens = round(plan.stream_s / plan.token_s)
    plan = replace(plan, tokens=tokens, streamed="all", rest_s=max(plan.rest_s, 2 * plan.stream_s))
    plan = replace(plan, lead_s=max(plan.lead_s, 2 * plan.stream_s))
    return [await _kill_migrate(fleet, plan, victim) for victim in plan.victims(fleet)]


async def _kill_migrate(fleet: Fleet, plan: Plan, victim: Simulated) -> Report:
    report = Report(
        f"kill {victim.name} under streams of {plan.stream_s:g} s, with migration ({fleet.policy})"
    )
    async with _under_load(fleet, plan, "--migration-limit", "3") as (router, load):
        await asyncio.sleep(plan.lead_s)
        killed_s = time.monotonic()
        await victim.kill()
        done_s = time.monotonic()
        await asyncio.sleep(plan.away_s)
        event_s = await _started(fleet, victim)
        await asyncio.sleep(plan.rest_s)
        migrated = int((await router.metrics())["migrations_total"])
    on_it = [
        one for one in load.answers if one.instance == victim.name and one.in_flight_between(done_s, done_s)
    ]
    _usual(report, load, killed_s, done_s, victims=set(), slow_s=None)
    report.add("streams in flight on it when it was killed", len(on_it))
    enough = migrated >= len(on_it)
    report.add("streams that went on elsewhere", migrated, f"at least {len(on_it)}", enough)
    report.quick("longest time between two tokens of these", max((one.gap_s for one in on_it), default=None))
    _used_again(report, load, victim, event_s, AGAIN_S["kill"])
    return report


async def pause(fleet: Fleet, plan: Plan) -> list[Report]:
    """a pause by command over the bus, in each of its modes, and a resume"""
    return [await _pause(fleet, plan, victim, mode) for victim in plan.victims(fleet) for mode in plan.modes]


async def _pause(fleet: Fleet, plan: Plan, victim: Simulated, mode: str) -> Report:
    report = Report(f"pause {victim.name} in mode {mode} ({fleet.policy})")
    async with _under_load(fleet, plan) as (router, load):
        await asyncio.sleep(plan.lead_s)
        before, paused_s = await router.bad_attempts(), time.monotonic()
        await victim.send("pause", mode=mode)
        done_s = time.monotonic()
        await asyncio.sleep(plan.away_s)
        resumed_s = time.monotonic()
        await victim.send("resume")
        event_s = fleet.served_s(victim.name, after_s=resumed_s)
        await asyncio.sleep(plan.rest_s)
        failures = await router.bad_attempts() - before
    frozen = [
        one
        for one in load.answers
        if mode == "keep"
        and one.instance == victim.name
        and one.stream
        and one.in_flight_between(paused_s, done_s)
    ]
    _usual(report, load, paused_s, done_s, victims={victim.name} if mode == "abort" else set(), but=frozen)
    if mode == "keep":
        report.add("streams that were frozen in their middle, and went on", len(frozen))
    report.exactly("failures of instances that the router has met with", failures)
    theirs = [one for one in load.answers if one.uses(victim.name) and one.head_s is not None]
    in_between = sum(one.sent_s > done_s and (one.head_s or 0) < resumed_s for one in theirs)
    report.exactly("requests answered by it while it was paused", in_between)
    _used_again(report, load, victim, event_s, AGAIN_S["pause"])
    return report


async def refuse(fleet: Fleet, plan: Plan) -> list[Report]:
    """an engine answers 500 while its service knows nothing of it and all its probes are good"""
    return [await _refuse(fleet, plan, victim) for victim in plan.victims(fleet)]


async def _refuse(fleet: Fleet, plan: Plan, victim: Simulated) -> Report:
    report = Report(f"{victim.name} refuses ({fleet.policy})")
    async with _under_load(fleet, plan) as (router, load):
        await asyncio.sleep(plan.lead_s)
        before, refused_s = await router.bad_attempts(), time.monotonic()
        await victim.send("simulate", call="now", outcome="refuse")
        await asyncio.sleep(plan.away_s)
        failures = await router.bad_attempts() - before
        admitted_s = time.monotonic()
        await victim.send("simulate", call="now", outcome="admit")
        again = await within(
            f"{victim.name} is used again",
            lambda: load.first_from(victim.name, admitted_s),
            plan.probe_s + LIMIT_S / 4,
        )
        await asyncio.sleep(plan.rest_s)
    _usual(report, load, refused_s, refused_s, victims=set())
    most = 4 + int(plan.away_s / plan.probe_s) + 1
    report.add(
        "failures that the router has met with", failures, f"at most {most}", failures <= most, speed=True
    )
    report.quick("used again after it admits", again and again.head_s - admitted_s, plan.probe_s + 1)
    return report


async def hung(fleet: Fleet, plan: Plan) -> list[Report]:
    """an engine hangs: it is there, and nothing comes from it; its service finds out after a while"""
    reports = [await _hung(fleet, plan, victim) for victim in plan.victims(fleet)]
    if not plan.bounded:
        return reports
    limit = ("--first-byte-timeout-s", f"{FIRST_BYTE_S:g}")
    return [*reports, await _hung(fleet, plan, fleet.instances[-1], *limit)]


async def _hung(fleet: Fleet, plan: Plan, victim: Simulated, *options: str) -> Report:
    report = Report(f"{' '.join([victim.name, 'hangs', *options])} ({fleet.policy})")
    async with _under_load(fleet, plan, *options) as (router, load):
        await asyncio.sleep(plan.lead_s)
        before, hung_s = await router.bad_attempts(), time.monotonic()
        await victim.send("simulate", call="now", outcome="hang")
        await victim.ended(LIMIT_S)
        failures = await router.bad_attempts() - before
        done_s = time.monotonic()
        event_s = await _started(fleet, victim)
        await asyncio.sleep(plan.rest_s)
    _usual(report, load, hung_s, done_s, victims={victim.name}, slow_s=None)
    slow = sum(one.took_s > SLOW_S for one in load.answers)
    report.add("slower than 1 s", slow, speed=True)
    report.quick("its service ended after", done_s - hung_s)
    report.add("failures that the router has met with", failures)
    _used_again(report, load, victim, event_s, AGAIN_S["kill"])
    return report


async def all_down(fleet: Fleet, plan: Plan) -> list[Report]:
    """all are paused: requests are refused at once and told why, or wait for the first, with --wait-s"""
    report = Report(f"all down ({fleet.policy})")
    wait_s = CLIENT_TIMEOUT_S / 2
    async with fleet.router() as router, fleet.router("--wait-s", str(wait_s)) as patient:
        await asyncio.gather(*(one.send("pause", mode="abort") for one in fleet.instances))
        load = OpenLoop(router.url, plan.rate, plan.tokens, plan.streamed)
        waiting = OpenLoop(patient.url, plan.rate, plan.tokens, plan.streamed)
        async with load.running():
            await asyncio.sleep(plan.lead_s)
        async with waiting.running():
            await asyncio.sleep(plan.lead_s / 2)
            resumed_s = time.monotonic()
            await asyncio.gather(*(one.send("resume") for one in fleet.instances))
            await asyncio.sleep(plan.rest_s)
    told = sum(map(_says_why, load.answers))
    report.add("requests", len(load.answers))
    report.exactly("answered 503 with Retry-After and reasons", told, len(load.answers))
    report.quick("slowest of these answers", max(one.took_s for one in load.answers), REFUSED_WITHIN_S)
    held = [one for one in waiting.answers if one.sent_s < resumed_s]
    report.add("requests with --wait-s, before the resume", len(held))
    report.exactly("of these answered", sum(one.outcome is Outcome.OK for one in held), len(held))
    report.exactly("of all with --wait-s not answered", len(waiting.answers) - waiting.count(Outcome.OK))
    event_s = min(fleet.served_s(name, after_s=resumed_s) or resumed_s for name in fleet.names)
    report.quick("first serving event after the command", event_s - resumed_s)
    last_s = max(one.ended_s or 0.0 for one in held) - event_s
    report.quick("the last that waited was answered after that event", last_s)
    return [report]


def _says_why(answer: Answer) -> bool:
    try:
        error = json.loads(answer.detail)["error"]
    except (ValueError, KeyError):
        return False
    why = error["code"] == "no_instance" and "paused" in error["message"]
    return answer.status == 503 and answer.retry_after is not None and why


async def broker_gone(fleet: Fleet, plan: Plan) -> list[Report]:
    """the broker is killed, an instance too while it is away; both come back"""
    victim = fleet.instances[-1]
    report = Report(f"broker gone for {plan.gone_s:g} s, and {victim.name} killed meanwhile ({fleet.policy})")
    async with _under_load(fleet, plan) as (router, load):
        await asyncio.sleep(plan.lead_s)
        before, gone_s = await router.bad_attempts(), time.monotonic()
        await fleet.broker.stop(signal.SIGKILL)
        await asyncio.sleep(plan.gone_s / 3)
        killed_s = time.monotonic()
        await victim.kill()
        done_s = time.monotonic()
        await asyncio.sleep(plan.gone_s * 2 / 3)
        failures = await router.bad_attempts() - before
        await fleet.broker.start()
        event_s = await _started(fleet, victim)
        await asyncio.sleep(max(plan.quiet_s, plan.rest_s))
        changes = list(router.changes)
    _usual(report, load, killed_s, done_s, victims={victim.name})
    early = [
        one
        for one in load.answers
        if one.outcome is not Outcome.OK and gone_s < (one.ended_s or 0.0) < killed_s
    ]
    report.exactly("not answered before the instance was killed", len(early))
    others = [name for at_s, name, _ in changes if name != victim.name]
    report.exactly("others taken out of use or back", len(others))
    report.exactly("the killed one taken out of use or back", len(changes) - len(others), 2)
    report.add(
        "failures of it that the router has met with", failures, "at most 4", failures <= 4, speed=True
    )
    _used_again(report, load, victim, event_s, AGAIN_S["broker-gone"])
    return [report]


async def client_leaves(fleet: Fleet, plan: Plan) -> list[Report]:
    """clients leave at each phase of a request; whatever was counted for them is taken back"""
    return [await _client_leaves(fleet, plan, f"clients leave ({fleet.policy})")]


async def client_leaves_kept(fleet: Fleet, plan: Plan) -> list[Report]:
    """the same where an abort does not free the KV cache that a prefill engine keeps, as in vLLM"""
    return [await _client_leaves(fleet, plan, "clients leave, aborts free no KV cache (pd)")]


async def _client_leaves(fleet: Fleet, plan: Plan, title: str) -> Report:
    report = Report(title)
    rng = random.Random(5)
    phases = itertools.cycle(Phase)
    # Every pair of streamed or not, with a goodbye or not, in every phase.
    leavers = [
        Leaver(next(phases), rng.random(), bool(number & 1), bool(number & 2))
        for number in (n // len(Phase) for n in range(plan.leavers))
    ]
    async with fleet.router(follow=False) as router, asyncio.timeout(LIMIT_S + plan.leavers / 10):
        await _first_token_s(router)  # the first ones take longer
        first_token_s = await _first_token_s(router)
        free = asyncio.Semaphore(LEAVE_AT_ONCE)

        async def one(leaver: Leaver) -> None:
            async with free:
                await leaver.run(router.url, first_token_s, LEAVE_WORDS)

        await asyncio.gather(*map(one, leavers))
        used = await _until_idle(fleet, router)
        metrics = await router.metrics()
    report.quick("usual time to the first token", first_token_s)
    for phase in Phase:
        count = sum(leaver.phase is phase for leaver in leavers)
        report.add(f"clients that left {phase}", count)
    gone = metrics.get('requests_total{status="gone"}', 0)
    report.add("requests whose client left, as the router counts", f"{gone:g}")
    if fleet.policy == "pd":
        good = metrics.get('attempts_total{outcome="good",role="prefill"}', 0)
        report.add("of these after the prefill", f"{good - 2 * LEAVE_AT_ONCE:g}")
    for what, still in used.items():
        report.exactly(what, still)
    return report


async def _first_token_s(router: Router) -> float:
    """With as much load as the clients that leave will make."""
    stays = [Leaver(Phase.STREAM, 0, stream=True, reset=False)] * LEAVE_AT_ONCE
    took = await asyncio.gather(*(one.run(router.url, 0, LEAVE_WORDS) for one in stays))
    return statistics.median(one for one in took if one is not None)


async def _until_idle(fleet: Fleet, router: Router) -> dict[str, float]:
    """What is still counted once nothing changes for the better any more."""
    end_s = time.monotonic() + 10
    while True:
        used = await _in_use(fleet, router)
        if not any(used.values()) or time.monotonic() > end_s:
            return used
        await asyncio.sleep(0.1)


async def _in_use(fleet: Fleet, router: Router) -> dict[str, float]:
    state, metrics = await router.state(), await router.metrics()
    members = [one for pool in state["pools"].values() for one in pool["instances"]]
    engines = await asyncio.gather(*(one.kv() for one in fleet.instances))
    attempts = (value for name, value in metrics.items() if name.startswith("attempts_in_flight"))
    loads = (value for name, value in metrics.items() if name.startswith("load_tokens"))
    return {
        "left in the router: requests": state["in_flight"] + metrics["requests_in_flight"],
        "left in the router: attempts": sum(one["in_flight"] for one in members) + sum(attempts),
        "left in the router: load": sum(abs(one["load"]) for one in members) + sum(map(abs, loads)),
        "left in the engines: requests": sum(one["in_flight"] for one in engines),
        "left in the engines: KV caches pinned": sum(one["pinned"] for one in engines),
        "KV caches freed only by the end of their lease": sum(one["expired"] for one in engines),
        "failures held against instances": sum(one["failures"] for one in members),
    }


# What they have in common


@contextlib.asynccontextmanager
async def _under_load(fleet: Fleet, plan: Plan, *options: str) -> AsyncIterator[tuple[Router, OpenLoop]]:
    await fleet.whole()
    async with fleet.router("--probe-interval-s", f"{plan.probe_s:g}", *options) as router:
        async with OpenLoop(router.url, plan.rate / 2, 2).running():
            await asyncio.sleep(plan.warm_s)
        load = OpenLoop(router.url, plan.rate, plan.tokens, plan.streamed)
        async with load.running():
            yield router, load


async def _started(fleet: Fleet, victim: Simulated) -> float | None:
    """Start it again; when its `serving` event arrived."""
    await victim.start()
    return fleet.served_s(victim.name, victim.ready["incarnation"])


def _usual(
    report: Report,
    load: OpenLoop,
    damage_s: float,
    done_s: float,
    victims: set[str],
    slow_s: float | None = SLOW_S,
    but: Sequence[Answer] = (),
) -> None:
    """What is looked at in every drill.

    Args:
        damage_s, done_s: when it began, and when it was done.
        victims: whose streams may end, of those that were in flight then.
        but: may be slow.
    """
    answers = load.answers
    failed = [one for one in answers if one.outcome is Outcome.FAILED]
    ended = [one for one in answers if one.outcome is Outcome.ENDED]
    wrong = [one for one in answers if one.outcome is Outcome.WRONG]
    for one in [*failed, *ended, *wrong][:10]:
        tell(
            f"  {one.outcome} at {one.sent_s - damage_s:+.3f} s, after {one.took_s:.3f} s, "
            f"{one.prefill or '-'} {one.instance or '-'}, HTTP {one.status}: {one.detail[:300]}"
        )
    report.add("requests", len(answers))
    report.exactly("failed before the first token", len(failed))
    report.exactly("a token missing or twice, or a quiet end", len(wrong))
    if victims:
        theirs = [
            one
            for one in answers
            if one.stream and one.instance in victims and one.in_flight_between(damage_s, done_s)
        ]
        few = len(ended) <= len(theirs)
        report.add(
            "streams ended visibly", len(ended), f"at most {len(theirs)}, in flight on it", few, speed=True
        )
        elsewhere = [one for one in ended if one.instance not in victims]
        report.exactly("of these not on the victim", len(elsewhere))
    else:
        report.exactly("streams ended visibly", len(ended))
    if slow_s is not None:
        slow = [one for one in answers if one.took_s > slow_s and one not in but]
        for one in slow[:10]:
            tell(
                f"  slow at {one.sent_s - damage_s:+.3f} s: {one.took_s:.3f} s, {one.prefill} {one.instance}"
            )
        report.add(f"slower than {slow_s:g} s", len(slow), "0", not slow, speed=True)
    report.quick("requests were sent late by at most", load.late_s)
    last_s = max((one.ended_s or 0.0 for one in [*failed, *ended, *wrong]), default=None)
    report.quick("last failure after", last_s and last_s - damage_s)


def _used_again(
    report: Report, load: OpenLoop, victim: Simulated, event_s: float | None, limit_s: float
) -> None:
    first = load.first_from(victim.name, event_s) if event_s is not None else None
    took_s = first.head_s - event_s if first and first.head_s and event_s is not None else None
    report.quick("used again after its serving event", took_s, limit_s)
    report.add("used again at all", "yes" if first else "no", "yes", first is not None)


@dataclass(frozen=True)
class Drill:
    """
    Attributes:
        engine_args: what the simulated engines are told besides.
        token_s: what they need for a token, if the drill needs a certain time.
    """

    run: Callable[[Fleet, Plan], Awaitable[list[Report]]]
    policies: tuple[Policy, ...] = ("aggregated", "pd")
    engine_args: tuple[str, ...] = ()
    token_s: float | None = None
    rate: float | None = None


DRILLS = {
    "kill": Drill(kill),
    "kill-migrate": Drill(kill_migrate, token_s=0.02, rate=25),
    "pause": Drill(pause),
    "refuse": Drill(refuse),
    "hung": Drill(hung),
    "all-down": Drill(all_down),
    "broker-gone": Drill(broker_gone),
    "leave": Drill(client_leaves),
    "leave-kept": Drill(client_leaves_kept, ("pd",), ("--abort-keeps-kv",)),
}


def engine_args(token_s: float) -> tuple[str, ...]:
    return ("--token-interval-ms", f"{1000 * token_s:g}", "--prefill-us-per-token", str(PREFILL_US_PER_TOKEN))


def tables(reports: Iterable[Report]) -> str:
    return "\n\n".join("\n".join(report.lines()) for report in reports)


async def run_drill(
    folder: Path, name: str, policy: Policy, plan: Plan, health_timeout_s: float
) -> list[Report]:
    """One drill with a fleet of its own."""
    drill = DRILLS[name]
    plan = replace(plan, token_s=drill.token_s or plan.token_s, rate=drill.rate or plan.rate)
    arguments = (*engine_args(plan.token_s), *drill.engine_args)
    serve_args = ("--health-timeout-s", f"{health_timeout_s:g}")
    async with a_fleet(folder, policy, arguments, serve_args) as fleet:
        return await drill.run(fleet, plan)


async def main(options: argparse.Namespace) -> int:
    plan = Plan(rate=options.rate, token_s=options.engine_ms / 1000, leavers=options.leavers)
    reports: list[Report] = []
    with contextlib.ExitStack() as stack:
        place = options.logs
        if place is None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="router-drills-")))
        for policy, name in itertools.product(options.policy or get_args(Policy), options.drill or DRILLS):
            if policy not in DRILLS[name].policies:
                continue
            tell(f"{name} ({policy})")
            folder = place / f"{name}-{policy}"
            folder.mkdir(parents=True, exist_ok=True)
            made = await run_drill(folder, name, policy, plan, options.health_timeout_s)
            print(tables(made), end="\n\n", flush=True)
            reports += made
    missed = [f"{report.title}: {row.what}" for report in reports for row in report.missed()]
    for line in missed:
        print(f"missed: {line}")
    if not missed:
        print(f"all that is wanted of {len(reports)} drills was seen")
    return 1 if missed else 0


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    width = max(map(len, DRILLS)) + 2
    listed = "\n".join(f"    {name:<{width}}{drill.run.__doc__}" for name, drill in DRILLS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router_drills",
        description=f"{__doc__}{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--policy", choices=get_args(Policy), action="append", help="of the router; both by default"
    )
    parser.add_argument(
        "--drill",
        choices=list(DRILLS),
        metavar="NAME",
        action="append",
        help="only this one; may be repeated",
    )
    parser.add_argument("--rate", type=float, default=Plan.rate, help="requests per second (%(default)g)")
    parser.add_argument(
        "--engine-ms",
        type=float,
        default=1000 * Plan.token_s,
        help="what an engine needs for a token (%(default)g); kill-migrate has its own",
    )
    parser.add_argument("--leavers", type=int, default=Plan.leavers, help="clients that leave (%(default)d)")
    parser.add_argument(
        "--health-timeout-s",
        type=float,
        default=15,
        help="after what time an instance gives up an engine that hangs (%(default)g, as by default)",
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the logs of all processes there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(parsed())))
