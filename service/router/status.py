"""What the router knows, as `/state` shows it, and the table that `watchkeeper router-status` makes of it."""

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import click

from service.options import SettingsError
from service.router.membership import Membership
from service.router.pool import Member
from service.router.settings import RouterSettings

HEADER = ("ROLE", "INSTANCE", "IN USE", "LOAD", "IN FLIGHT", "FAILURES", "WEIGHTS", "URL", "WHY NOT")
TIMEOUT_S = 5.0


def snapshot(
    settings: RouterSettings,
    membership: Membership,
    address: str,
    started: float,
    in_flight: int,
    nats: str,
    connected: bool,
) -> dict[str, Any]:
    """Pools, loads, who is out and why.

    Args:
        started: UNIX seconds.
        in_flight: requests of clients.
        connected: whether news from instances arrives now.
    """
    return {
        "v": 1,
        "http": address,
        "policy": settings.policy,
        "weights": settings.weights,
        "min_version": settings.min_version,
        "started": started,
        "in_flight": in_flight,
        "nats": {"url": nats, "connected": connected},
        "pools": {
            role.value: {
                "newest_version": membership.newest(role),
                "admissible": sum(member.admissible for member in pool),
                "instances": [_member(member) for member in sorted(pool, key=lambda member: member.name)],
            }
            for role, pool in membership.pools.items()
            if len(pool)
        },
    }


def _member(member: Member) -> dict[str, Any]:
    return {
        "instance": member.name,
        "incarnation": member.incarnation or None,
        "source": "discovery" if member.incarnation else "static",
        "url": member.url,
        "grpc": member.grpc,
        "models": sorted(member.group.models),
        "weight_version": member.group.version or None,
        "admissible": member.admissible,
        "reason": member.reason,
        "isolation": member.breaker.isolation.value,
        "failures": member.breaker.failures,
        # Contract: an isolated instance's load is infinite, for which JSON has no number.
        "load": None if member.isolated else round(member.load, 1),
        "in_flight": member.in_flight,
    }


def show(url: str, token: str | None, as_json: bool) -> int:
    """Print what a router says of itself.

    Raises:
        SettingsError: it cannot be asked.
    """
    text, found = asyncio.run(_ask(url, token))
    if as_json:
        click.echo(text)
        return 0
    for line in table(found):
        click.echo(line)
    return 0


async def _ask(url: str, token: str | None) -> tuple[str, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session,
            session.get(f"{url}/state", headers=headers) as response,
        ):
            text = await response.text()
            found = await response.json(content_type=None)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise SettingsError(f"no router answers on {url}: {error}") from error
    except TimeoutError:
        raise SettingsError(f"no router answers on {url} within {TIMEOUT_S:g} s") from None
    if response.status != 200 or not isinstance(found, dict) or "pools" not in found:
        said = found.get("error", {}) if isinstance(found, dict) else {}
        reason = said.get("message") if isinstance(said, dict) else None
        raise SettingsError(f"{url}/state answers {response.status}: {reason or 'that is no router'}")
    return text, found


def table(state: Mapping[str, Any]) -> list[str]:
    """The lines of a table."""
    rows = [HEADER, *(_row(role, one) for role, pool in state["pools"].items() for one in pool["instances"])]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(HEADER))]
    lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows] if len(rows) > 1 else []
    used = sum(pool["admissible"] for pool in state["pools"].values())
    known = len(rows) - 1
    away = "" if state["nats"]["connected"] else "; no broker: instances are as they were"
    told = f"{used} of {known} instance{'s' if known != 1 else ''} in use"
    return [*lines, f"{told}, policy {state['policy']}, {state['in_flight']} requests in flight{away}"]


def _row(role: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        role,
        one["instance"],
        "yes" if one["admissible"] else "no",
        "inf" if one["load"] is None else f"{one['load']:g}",
        str(one["in_flight"]),
        str(one["failures"]),
        one["weight_version"] or "-",
        one["url"],
        one["reason"] or "",
    )
