"""`watchkeeper watch`: what every instance of a component does now, on a terminal or line by line."""

import asyncio
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import click

from bus.connection import Bus
from bus.discovery import Change, ChangeKind, Listener
from bus.messages import Snapshot
from service.commands import ALL_OK, connect, shown_state
from service.settings import ClientSettings

if TYPE_CHECKING:
    from rich.console import Group

REDRAW_S = 0.1
"""Changes that come within this time are drawn together."""
AGE_S = 1.0
"""Ages are drawn anew this often."""

HEADER = ("INSTANCE", "STATE", "READY", "WEIGHTS", "IN FLIGHT", "OPERATION OR CAUSE", "AGE")
Row: TypeAlias = tuple[str, str, str, str, str, str, str]


def watch(settings: ClientSettings, once: bool) -> int:
    """Show the instances until interrupted, or `once`.

    Raises:
        SettingsError: the broker cannot be used.
    """
    try:
        asyncio.run(_watch(settings, once))
    except KeyboardInterrupt:
        if not once:
            return ALL_OK  # the way to end it
        raise
    return ALL_OK


async def _watch(settings: ClientSettings, once: bool) -> None:
    changes: asyncio.Queue[Change] = asyncio.Queue()
    async with connect(settings, "watchkeeper watch") as bus:
        listener = Listener(bus, settings.namespace, settings.component, changes.put_nowait)
        async with listener:
            where = f"{settings.namespace}.{settings.component}"
            if once:
                for line in aligned(listener.states.values(), time.time()):
                    click.echo(line)
                click.echo(summary(where, listener.states.values()))
            elif sys.stdout.isatty():
                await _draw(where, bus, listener.states, changes)
            else:
                await _tell(changes)


async def _draw(
    where: str, bus: Bus, states: Mapping[str, Snapshot], changes: "asyncio.Queue[Change]"
) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()

    def drawn() -> "Group":
        note = "" if bus.connected else "; no broker: this is how it was"
        return picture(where, states.values(), time.time(), console.size.height, note)

    with Live(drawn(), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            try:
                async with asyncio.timeout(AGE_S):
                    await changes.get()
                await asyncio.sleep(REDRAW_S)
            except TimeoutError:
                pass
            while not changes.empty():
                changes.get_nowait()
            live.update(drawn(), refresh=True)


async def _tell(changes: "asyncio.Queue[Change]") -> None:
    """One line for each change; figures that change by themselves make none."""
    told: dict[str, tuple[str, ...]] = {}
    while True:
        change = await changes.get()
        name, snapshot = change.instance, change.snapshot
        if change.kind is ChangeKind.ENDED:
            told.pop(name, None)
            click.echo(f"{name}  gone")
        elif change.kind is ChangeKind.STATE and snapshot is not None:
            _, *facts, _ = row(snapshot, 0.0)
            state, ready, weights, in_flight, what = facts
            fixed = (snapshot.incarnation, str(snapshot.seq), state, ready, weights, what)
            if told.get(name) != fixed:
                told[name] = fixed
                ready = "ready" if snapshot.ready else "not ready"
                parts = [name, state, ready, f"weights={weights}", f"in_flight={in_flight}", what]
                click.echo("  ".join(filter(None, parts)))


# --- what people read ------------------------------------------------------------------------------


def in_order(states: Iterable[Snapshot]) -> list[Snapshot]:
    """By name; numbers in names as numbers."""

    def key(snapshot: Snapshot) -> list[tuple[int, int | str]]:
        parts = re.split(r"(\d+)", snapshot.instance)
        return [(0, int(part)) if part.isdigit() else (1, part) for part in parts if part]

    return sorted(states, key=key)


def row(snapshot: Snapshot, now: float) -> Row:
    operation, cause = snapshot.operation, snapshot.cause
    since = snapshot.time
    what = ""
    if operation is not None:
        what, since = f"{operation.verb} …", operation.since
    elif cause is not None:
        what = f"{cause.verb} by {cause.issuer}" if cause.issuer else cause.verb
    return (
        snapshot.instance,
        shown_state(snapshot),
        "yes" if snapshot.ready else "no",
        snapshot.weights.version,
        str(snapshot.in_flight),
        what,
        age(now - since),
    )


def age(seconds: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length_s:
            return f"{int(seconds // length_s)}{unit}"
    return f"{max(0, int(seconds))}s"


def aligned(states: Iterable[Snapshot], now: float) -> list[str]:
    """The table as text; no lines at all if there is nobody."""
    rows: list[Sequence[str]] = [row(snapshot, now) for snapshot in in_order(states)]
    if not rows:
        return []
    rows.insert(0, HEADER)
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(HEADER))]
    return ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows]


def summary(where: str, states: Iterable[Snapshot]) -> str:
    """How many there are of which state."""
    counts = Counter(snapshot.state for snapshot in states)
    total = counts.total()
    parts = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    told = f"{total} instance{'s' if total != 1 else ''} of {where}"
    return f"{told}: {parts}" if parts else told


def picture(where: str, states: Iterable[Snapshot], now: float, height: int, note: str = "") -> "Group":
    """As many rows as fit; only those are made, so that hundreds of instances cost little."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    ordered = in_order(states)
    fit = max(1, height - 3)
    hidden = len(ordered) - fit
    told = summary(where, ordered) + note + (f"; {hidden} do not fit" if hidden > 0 else "")
    made = Table(box=None, pad_edge=False)
    for heading in HEADER:
        made.add_column(heading, no_wrap=True, justify="right" if heading in ("IN FLIGHT", "AGE") else "left")
    for snapshot in ordered[:fit]:
        made.add_row(*map(Text, row(snapshot, now)), style=_style(snapshot))
    return Group(made, Text(told, style="dim", no_wrap=True, overflow="ellipsis"))


def _style(snapshot: Snapshot) -> str:
    if not snapshot.live:
        return "red"
    return "" if snapshot.ready else "yellow"
