"""The drills of `benchmarks.router_drills` with smaller numbers: what must never happen."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from benchmarks.routed import Fleet, a_fleet
from benchmarks.router_drills import DRILLS, Plan, engine_args, tables

PLAN = Plan(
    rate=20,
    token_s=0.005,
    warm_s=0.2,
    lead_s=0.5,
    away_s=1.2,
    gone_s=3,
    rest_s=0.5,
    quiet_s=2,
    stream_s=0.5,
    leavers=80,
    probe_s=1,
    bounded=False,
)
HEALTH = ("--health-timeout-s", "3", "--health-interval-s", "0.5")

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def aggregated(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("aggregated")
    async with a_fleet(folder, "aggregated", engine_args(PLAN.token_s), HEALTH) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pairs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Two for prefill and two for decode."""
    folder = tmp_path_factory.mktemp("pairs")
    async with a_fleet(folder, "pd", engine_args(PLAN.token_s), HEALTH) as fleet:
        yield fleet


async def drill(fleet: Fleet, name: str, **plan: Any) -> None:
    """All that is wanted but the speeds."""
    reports = await DRILLS[name].run(fleet, replace(PLAN, **plan))
    missed = [row for report in reports for row in report.missed(speeds=False)]
    assert missed == [], tables(reports)


@pytest.mark.parametrize(
    "name", ["kill", "kill-migrate", "pause", "refuse", "hung", "all-down", "broker-gone", "leave"]
)
async def test_one_of_four(aggregated: Fleet, name: str) -> None:
    await drill(aggregated, name, modes=("wait", "keep"))


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("kill", "prefill"),
        ("kill-migrate", "decode"),
        ("refuse", "prefill"),
        ("leave", None),
    ],
)
async def test_prefill_and_decode(pairs: Fleet, name: str, role: str | None) -> None:
    await drill(pairs, name, role=role)


@pytest.mark.parametrize(("role", "mode"), [("decode", "abort"), ("prefill", "keep")])
async def test_a_pause_of_one_of_a_pair(pairs: Fleet, role: str, mode: str) -> None:
    await drill(pairs, "pause", role=role, modes=(mode,))


async def test_clients_leave_where_an_abort_frees_no_kv_cache(tmp_path: Path) -> None:
    arguments = (*engine_args(PLAN.token_s), *DRILLS["leave-kept"].engine_args)
    async with a_fleet(tmp_path, "pd", arguments, HEALTH, ("prefill", "decode")) as fleet:
        await drill(fleet, "leave-kept")
