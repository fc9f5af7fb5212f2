"""What the command line does with a running fleet: send commands, and listen to events."""

import asyncio
import getpass
import logging
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import click
import msgspec

from bus import subjects
from bus.client import Client, Instance, NoAnswer
from bus.connection import Bus, BusError
from bus.epochs import highest_epoch
from bus.messages import BadArguments, Reply, Snapshot, StateName, Verb, parse_args
from service.broker import credentials
from service.options import DEFAULT_NATS, BrokerSettings, SettingsError
from service.settings import ClientSettings

ALL_OK, SOME_REFUSED, SOME_SILENT = 0, 1, 3

LOOK_AGAIN_S = 1.0
"""How often the bucket is read while answers are missing: who is gone from it is not waited for."""


class _Complaints(logging.Handler):
    """What `bus` warns of, such as a lost connection or what the broker forbids, as lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"watchkeeper: {record.getMessage()}", err=True)


@dataclass(frozen=True)
class Order:
    """A command to be sent.

    Attributes:
        args: only what was given; the instance knows the defaults.
        instances: None for all of the component.
        id: one is made if None.
    """

    verb: str
    args: Mapping[str, Any]
    instances: tuple[str, ...] | None
    id: str | None = None
    issuer: str | None = None
    epoch: int | None = None
    session: str | None = None


@dataclass(frozen=True)
class _Answer:
    """What became of the command at one instance.

    Attributes:
        reply: None if there was none; then `silence` says why.
    """

    instance: str
    reply: Reply | None = None
    silence: str = ""


def send(settings: ClientSettings, order: Order, wait_s: float, as_json: bool) -> int:
    """Send a command, print what became of it, and return the exit code.

    Raises:
        SettingsError: wrong args, or the broker cannot be used; nothing was printed.
    """
    try:
        parse_args(Verb(order.verb), dict(order.args))
    except BadArguments as error:
        raise SettingsError(str(error)) from error
    answers: list[_Answer] = []
    try:
        asyncio.run(_send(settings, order, wait_s, answers))
    finally:  # also what had come before Ctrl-C
        answers.sort(key=lambda answer: answer.instance)
        if as_json:
            for answer in answers:
                if answer.reply is not None:
                    click.echo(msgspec.json.encode(answer.reply))
        elif answers:
            for line in _table(order, answers):
                click.echo(line)
    if not answers:
        click.echo(
            f"watchkeeper: error: no instance of {settings.namespace}.{settings.component} is known", err=True
        )
    if as_json and any(answer.reply is None for answer in answers):
        click.echo(f"watchkeeper: error: {_summary(answers)}", err=True)
    return _exit_code(answers)


def print_events(settings: ClientSettings) -> int:
    """Print state events until interrupted.

    Raises:
        SettingsError: the broker cannot be used.
    """
    asyncio.run(_print_events(settings))
    return ALL_OK


def announce(settings: ClientSettings, announcement: Mapping[str, Any], new_epoch: bool) -> int:
    """Announce a weight version, and say so.

    Args:
        announcement: what `Client.announce` takes; without an epoch the highest so far is used.
        new_epoch: take a new epoch instead.

    Raises:
        SettingsError: it is no announcement, or the broker cannot be used.
    """
    try:
        asyncio.run(_announce(settings, dict(announcement), new_epoch))
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return ALL_OK


async def _announce(settings: ClientSettings, announcement: dict[str, Any], new_epoch: bool) -> None:
    issuer = announcement.pop("issuer", None) or _default_issuer()
    async with connect(settings, "watchkeeper announce") as bus:
        client = Client(bus, settings.namespace, settings.component, issuer)
        if new_epoch:
            await client.new_epoch()
        elif announcement.get("epoch") is None:
            client.epoch = await highest_epoch(bus, settings.namespace, settings.component)
        sequence = await client.announce(**announcement)
        epoch = announcement.get("epoch")
        told = f"announced {announcement['version']} to {settings.namespace}.{settings.component}"
        click.echo(f"{told}: epoch {client.epoch if epoch is None else epoch}, sequence {sequence}")


async def _send(settings: ClientSettings, order: Order, wait_s: float, answers: list[_Answer]) -> None:
    async with connect(settings, f"watchkeeper {order.verb}") as bus:
        client = Client(bus, settings.namespace, settings.component, order.issuer or _default_issuer())
        if order.instances is None:
            await _ask_all(client, order, wait_s, answers)
            return
        with _progress(order.verb, len(order.instances)) as advance:

            async def ask(instance: str) -> None:
                answers.append(await _ask(client.instance(instance), order, wait_s))
                advance()

            await asyncio.gather(*map(ask, order.instances))


async def _ask(instance: Instance, order: Order, wait_s: float) -> _Answer:
    try:
        reply = await instance.send(
            order.verb,
            order.args,
            timeout_s=wait_s,
            id=order.id,
            epoch=order.epoch,
            session=order.session,
            check=False,
        )
    except NoAnswer as lost:
        reason = str(lost).removeprefix(f"{lost.verb} at {lost.instance}: ")
        return _Answer(instance.name, silence=_silence(reason, order.verb, lost.id if lost.sent else None))
    return _Answer(reply.instance, reply)


async def _ask_all(client: Client, order: Order, wait_s: float, answers: list[_Answer]) -> None:
    gathering = client.send_all(order.verb, order.args, wait_s, order.id, order.epoch, order.session)
    states = await client.states()
    ended: set[str] = set()

    async def collect() -> None:
        async for reply in gathering:
            answers.append(_Answer(reply.instance, reply))
            advance()

    async def look_who_ended() -> None:
        while not gathering.missing or ended < set(gathering.missing):
            await asyncio.sleep(LOOK_AGAIN_S)
            with suppress(BusError):  # answers may still come after a reconnect
                ended.update(set(gathering.missing) - _alive(await client.states()))

    with _progress(order.verb, len(_alive(states))) as advance:
        tasks = {asyncio.create_task(collect()), asyncio.create_task(look_who_ended())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in done:
            task.result()
    for name in gathering.missing:
        seen = f" (last seen {states[name].state})" if name in states else ""
        reason = "it ended without an answer" if name in ended else f"no reply in {wait_s:g} s{seen}"
        answers.append(_Answer(name, silence=_silence(reason, order.verb, gathering.id)))


def _alive(states: Mapping[str, Snapshot]) -> set[str]:
    return {name for name, snapshot in states.items() if snapshot.state != StateName.STOPPED}


def _silence(reason: str, verb: str, id: str | None) -> str:
    """`id`: of the command, if it may have been carried out."""
    if id is None or verb == Verb.STATUS:
        return reason
    return f"{reason}; ask later: watchkeeper status --verb {verb} --id {id}"


async def _print_events(settings: ClientSettings) -> None:
    events: asyncio.Queue[bytes] = asyncio.Queue()

    def note(text: str) -> None:
        click.echo(f"watchkeeper: {text}", err=True)

    async with connect(
        settings,
        "watchkeeper events",
        on_connected_again=lambda: note("connected again; events in between are missing"),
    ) as bus:
        pattern = subjects.state_pattern(settings.namespace, settings.component)
        await bus.subscribe(pattern, lambda message: events.put_nowait(message.data))
        note(f"listening on {pattern}")
        while True:
            data = await events.get()
            try:
                event = msgspec.msgpack.decode(data)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                note(f"an event cannot be read: {error}")
                continue
            click.echo(msgspec.json.encode(event))


@asynccontextmanager
async def connect(settings: BrokerSettings, name: str, **callbacks: Any) -> AsyncIterator[Bus]:
    """A connection whose failures are the user's to mend."""
    log = logging.getLogger("bus")
    if not log.handlers:
        log.addHandler(_Complaints(logging.WARNING))
    try:
        bus = await Bus.connect(
            settings.nats or (DEFAULT_NATS,), credentials(settings), name, settings.nats_wait_s, **callbacks
        )
        try:
            yield bus
        finally:
            await bus.close()
    except BusError as error:
        raise SettingsError(str(error)) from error


def _default_issuer() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


@contextmanager
def _progress(verb: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"waiting for {verb}", total=total or None)
        yield lambda: progress.advance(task)


# --- what people read ------------------------------------------------------------------------------


def _table(order: Order, answers: Sequence[_Answer]) -> list[str]:
    rows = [
        (answer.instance, _outcome(answer), _state(answer), _message(order, answer)) for answer in answers
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True)) for row in rows
    ]
    return [*(line.rstrip() for line in lines), _summary(answers)]


def _outcome(answer: _Answer) -> str:
    if answer.reply is None:
        return "no_answer"
    if answer.reply.ok:
        return "ok"
    return answer.reply.error.code if answer.reply.error else "failed"


def _state(answer: _Answer) -> str:
    snapshot = answer.reply.state if answer.reply else None
    return shown_state(snapshot) if snapshot is not None else "-"


def shown_state(snapshot: Snapshot) -> str:
    """The state in a word, with the phase of an update, and … while it is not settled."""
    phase = f"/{snapshot.weight_update.phase}" if snapshot.weight_update else ""
    return f"{snapshot.state}{phase}{'' if snapshot.settled else '…'}"


def _message(order: Order, answer: _Answer) -> str:
    reply = answer.reply
    if reply is None:
        return answer.silence
    parts = [reply.error.message] if reply.error and reply.error.message else []
    if order.verb == Verb.STATUS and not order.args and reply.state:
        parts += _about(reply.state)
    elif reply.ok and order.verb not in (Verb.STATUS, Verb.SHUTDOWN) and not reply.changed:
        parts.append("unchanged")
    parts += [f"{key}={_short(value)}" for key, value in (reply.result or {}).items()]
    return " ".join(" ".join(parts).split())


def _about(snapshot: Snapshot) -> list[str]:
    ready = "ready" if snapshot.ready else f"not ready ({', '.join(snapshot.reasons) or 'no reason given'})"
    parts = [ready, f"weights={snapshot.weights.version}", f"in_flight={snapshot.in_flight}"]
    if snapshot.operation:
        parts.append(f"running={snapshot.operation.verb}")
    return parts


def _short(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _summary(answers: Sequence[_Answer]) -> str:
    silent = sum(answer.reply is None for answer in answers)
    ok = sum(answer.reply is not None and answer.reply.ok for answer in answers)
    refused = len(answers) - ok - silent
    parts = [f"{ok} ok", *([f"{refused} refused or failed"] if refused else [])]
    parts += [f"{silent} did not answer"] if silent else []
    return f"{len(answers)} instance{'s' if len(answers) != 1 else ''}: {', '.join(parts)}"


def _exit_code(answers: Sequence[_Answer]) -> int:
    """Silence weighs more than a refusal: it leaves open what was done."""
    if not answers or any(answer.reply is None for answer in answers):
        return SOME_SILENT
    return ALL_OK if all(answer.reply and answer.reply.ok for answer in answers) else SOME_REFUSED
