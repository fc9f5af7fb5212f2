"""message -> event -> reply: who is let in, in which order, and what they are told.

`Control.on_message` decodes and enqueues; everything else is called by the runner's one task.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
from ulid import ULID

from bus.codec import BadMessage, decode_command, encode
from bus.messages import (
    AbortWeightUpdateArgs,
    Args,
    BadArguments,
    Command,
    ErrorBody,
    ErrorCode,
    FinishWeightUpdateArgs,
    InitWeightTransferArgs,
    PauseArgs,
    Reply,
    ResumeArgs,
    SimulateArgs,
    SleepArgs,
    Snapshot,
    StartWeightUpdateArgs,
    StatusArgs,
    UpdateWeightsArgs,
    Verb,
    WakeUpArgs,
    parse_args,
)
from bus.subjects import verb_of
from service.sessions import Lease, Sessions
from statemachine import effects as fx
from statemachine import events as ev
from statemachine.lifecycle import Lifecycle, may_be_cut
from statemachine.states import Mode, Origin, State

log = logging.getLogger(__name__)

LEASE_EXPIRED = "lease_expired"
"""The verb in the cause of what happens when a lease runs out."""

MAX_WAITING = 64
REMEMBER_S = 600.0
REMEMBER_MAX = 10_000
"""Contract, section 3: commands that may wait, and how long and how many replies are remembered."""

_END = {
    State.STARTING: (ErrorCode.NOT_READY, "the engine is still loading"),
    State.FAILED: (ErrorCode.ENGINE_FAILED, "the engine has failed"),
    State.SHUTTING_DOWN: (ErrorCode.SHUTTING_DOWN, "the instance shuts down"),
    State.STOPPED: (ErrorCode.SHUTTING_DOWN, "the instance shuts down"),
}

_WORDS = frozenset(verb.value for verb in Verb)

_OF_A_SESSION = (Verb.UPDATE_WEIGHTS, Verb.FINISH_WEIGHT_UPDATE, Verb.ABORT_WEIGHT_UPDATE)


@dataclass
class Order:
    """A command on its way.

    Attributes:
        answer: takes the one reply.
        arrived_s, started_s: monotonic readings.
        joined: repeats that wait for the same answer.
        leases: those that stand still while it waits or runs.
    """

    verb: Verb
    command: Command
    answer: Callable[[Reply], None]
    arrived_s: float
    started_s: float | None = None
    ticket: int = 0
    args: Args | None = None
    joined: "list[Order]" = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)

    @property
    def cause(self) -> ev.Cause:
        return ev.Cause(self.verb.value, self.command.id, self.command.issuer)


@dataclass
class _Remembered:
    """The order that ran under an id, and its reply once there is one."""

    order: Order
    at_s: float
    reply: Reply | None = None


class Sender(Protocol):
    """Sends bytes to a reply subject; never raises and never waits."""

    def __call__(self, reply_to: str, data: bytes) -> None: ...


class Control:
    """Takes commands for one instance.

    Args:
        post: puts an order into the runner's inbox.
        snapshot: what the instance says of itself now.
        sessions: who holds leases, and which epoch is in power.
        simulate: carries out the simulated engine's verb and then calls back; None if the engine
            is a real one.
        answered: is told verb, error code or `ok`, and seconds since the arrival of each command.
    """

    def __init__(
        self,
        instance: str,
        incarnation: str,
        send: Sender,
        post: Callable[[Order], None],
        snapshot: Callable[[], Snapshot],
        in_flight: Callable[[], int],
        simulate: Callable[[dict[str, Any], Callable[[str | None], None]], None] | None = None,
        sessions: Sessions | None = None,
        answered: Callable[[str, str, float], None] = lambda verb, code, seconds: None,
    ) -> None:
        self._instance, self._incarnation = instance, incarnation
        self._send, self._post, self._snapshot, self.in_flight = send, post, snapshot, in_flight
        self._simulate = simulate
        self.sessions = sessions or Sessions()
        self._count = answered
        self._tickets = 0
        self._running: dict[int, Order] = {}
        self._waiting: deque[Order] = deque()
        self._leaving: list[Order] = []
        self._remembered: OrderedDict[tuple[Verb, str], _Remembered] = OrderedDict()

    # --- from the bus ---------------------------------------------------------------------------

    def on_message(self, subject: str, data: bytes, reply_to: str) -> None:
        """A message on a control subject; called by the bus, so it only decodes and enqueues."""
        arrived_s = time.monotonic()
        try:
            command, format = decode_command(data)
        except BadMessage as error:
            if reply_to:
                reply = self._error(None, ErrorCode.INVALID_MESSAGE, str(error))
                self._send(reply_to, encode(reply, error.format))
            return

        def answer(reply: Reply) -> None:
            code = reply.error.code if reply.error else "ok"
            word = verb_of(subject)
            self._count(word if word in _WORDS else "unknown", code, time.monotonic() - arrived_s)
            if reply_to:
                self._send(reply_to, encode(reply, format))

        try:
            verb = Verb(verb_of(subject))
            if verb is Verb.SIMULATE and self._simulate is None:
                raise ValueError
        except ValueError:
            text = f"no such verb: {verb_of(subject)}"
            answer(self._error(command.id, ErrorCode.UNKNOWN_VERB, text))
            return
        self._post(Order(verb, command, answer, arrived_s))

    def submit(self, verb: Verb, command: Command, answer: Callable[[Reply], None]) -> None:
        """A command that came over HTTP or gRPC: judged, queued and answered as one from the bus."""
        arrived_s = time.monotonic()

        def counted(reply: Reply) -> None:
            code = reply.error.code if reply.error else "ok"
            self._count(verb.value, code, time.monotonic() - arrived_s)
            answer(reply)

        self._post(Order(verb, command, counted, arrived_s))

    # --- in the runner's task -------------------------------------------------------------------

    def arrive(self, order: Order, life: Lifecycle) -> list[ev.Event]:
        """Answer what needs no engine, queue the rest.

        Returns:
            Events that must not wait in the queue.
        """
        match order.verb:
            case Verb.STATUS:
                self._status(order)
                return []
            case Verb.SHUTDOWN:
                return self._shutdown(order, life)
            case Verb.SIMULATE:
                self._simulated(order, life)
                return []
        if self._refused_at_the_door(order, life):
            return []
        self._remember(order)
        self._waiting.append(order)
        self._stand_still(order, life)
        if self._cuts(order, life):
            return [ev.DrainCut(order.cause)]
        return []

    def next_request(self, life: Lifecycle) -> ev.Command | None:
        """The next command to hand to the lifecycle, or None if none waits."""
        while self._waiting:
            order = self._waiting.popleft()
            order.started_s = time.monotonic()
            refusal = self._stale(order) or self._late(order) or self._session_refusal(order, life)
            if refusal is not None:
                self._finish(order, self._error(order.command.id, *refusal, order=order))
                continue
            self._tickets += 1
            order.ticket = self._tickets
            self._running[order.ticket] = order
            return self._requested(order)
        return None

    def overdue(self, life: Lifecycle) -> ev.LeaseExpired | None:
        """A session or a pause whose time is over, before the next command is looked at."""
        facts = life.facts
        self.sessions.follow(facts.session.id if facts.session else None, Origin.COMMAND in facts.stops)
        if self._waiting and not self._stale(self._waiting[0]):
            self.sessions.see_epoch(self._waiting[0].command.epoch)
        session, pause = self.sessions.overdue()
        if session is not None and facts.session is not None:
            self.sessions.end(session)
            return ev.LeaseExpired(ev.Cause(LEASE_EXPIRED, session, facts.session.owner), session)
        if pause:
            self.sessions.pause = None
            return ev.LeaseExpired(ev.Cause(LEASE_EXPIRED))
        return None

    def budget_s(self, call: str, default_s: float) -> float:
        """How long an engine call may take: what the trainer gave, or the instance's own limit.

        Args:
            call: as in `--call-timeout-s`.
        """
        args = next(iter(self._running.values())).args if self._running else None
        given = None
        if isinstance(args, InitWeightTransferArgs) and call == "init":
            given = args.init_s
        elif isinstance(args, StartWeightUpdateArgs) and call == "start":
            given = args.start_s
        elif self.sessions.session is not None:
            given = self.sessions.session.budgets_s.get(call)
        return default_s if given is None else given

    def refused(self, ticket: int, code: str, message: str) -> None:
        order = self._running.pop(ticket)
        self._finish(order, self._error(order.command.id, ErrorCode(code), message, order=order))

    def answered(self, answer: fx.Answer, engine_s: float) -> None:
        """The lifecycle has the answer to a command; what others see has been brought up to date."""
        order = self._running.pop(answer.ticket)
        error = _error_body(ErrorCode(answer.code), answer.message) if answer.code else None
        if error is None:
            self._note(order, answer.result)
        reply = Reply(
            id=order.command.id,
            instance=self._instance,
            incarnation=self._incarnation,
            ok=error is None,
            changed=answer.changed,
            error=error,
            result=answer.result,
            state=self._snapshot(),
            queued_ms=_ms((order.started_s or order.arrived_s) - order.arrived_s),
            engine_ms=_ms(engine_s),
        )
        self._finish(order, reply, keep=answer.called or error is None)

    def flush(self, life: Lifecycle) -> None:
        """Nothing that waits will ever run: say so at once."""
        if life.state not in _END:
            return
        while self._waiting:
            order = self._waiting.popleft()
            self._finish(order, self._error(order.command.id, *_END[life.state], order=order))

    # --- judging, in the order of the contract --------------------------------------------------

    def _refused_at_the_door(self, order: Order, life: Lifecycle) -> bool:
        """Everything that can be judged before the command's turn comes."""
        if life.state in _END:
            self._reject(order, *_END[life.state])
            return True
        if self._repeats(order):
            return True
        if late := self._stale(order) or self._late(order):
            self._reject(order, *late)
            return True
        idle = not self._waiting and not life.busy
        if idle and (mismatch := self._session_refusal(order, life)):
            self._reject(order, *mismatch)
            return True
        try:
            order.args = parse_args(order.verb, order.command.args)
        except BadArguments as error:
            self._reject(order, ErrorCode.INVALID_ARGUMENT, str(error))
            return True
        if len(self._waiting) >= MAX_WAITING:
            if mismatch := self._session_refusal(order, life):
                self._reject(order, *mismatch)
            elif refusal := life.judge(_request(order, self.in_flight())):
                self._reject(order, ErrorCode(refusal.code), refusal.message)
            else:
                self._reject(order, ErrorCode.BUSY, f"{MAX_WAITING} commands wait already")
            return True
        return False

    def _repeats(self, order: Order) -> bool:
        """Whether this id ran, or runs, before; then the first answer is the answer."""
        if order.command.id is None:
            return False
        self._forget_old()
        first = self._remembered.get((order.verb, order.command.id))
        if first is None:
            return False
        if first.order.command.args != order.command.args:
            text = f"id {order.command.id!r} was used with other arguments"
            self._reject(order, ErrorCode.INVALID_ARGUMENT, text)
        elif first.reply is not None:
            order.answer(msgspec.structs.replace(first.reply, duplicate=True))
        else:
            first.order.joined.append(order)
        return True

    def _stale(self, order: Order) -> tuple[ErrorCode, str] | None:
        if not self.sessions.is_stale(order.command.epoch):
            return None
        text = f"epoch {order.command.epoch} is over: {self.sessions.highest_epoch} is in power"
        return ErrorCode.STALE_EPOCH, text

    def _late(self, order: Order) -> tuple[ErrorCode, str] | None:
        deadline = order.command.deadline
        if deadline is None or time.time() <= deadline:
            return None
        return ErrorCode.DEADLINE_EXCEEDED, "the deadline had passed before the command could start"

    def _session_refusal(self, order: Order, life: Lifecycle) -> tuple[ErrorCode, str] | None:
        given, session = order.command.session, life.facts.session
        if given is not None and (session is None or session.id != given):
            if self.sessions.expired(given):
                return ErrorCode.LEASE_EXPIRED, f"the lease of session {given!r} has run out"
            text = f"session {given!r} is not open" + (f"; {session.id!r} is" if session else "")
            return ErrorCode.SESSION_MISMATCH, text
        if given is None and order.verb in _OF_A_SESSION and session and session.epoch is not None:
            text = "the session was opened with an epoch: name it in `session`"
            return ErrorCode.SESSION_MISMATCH, text
        return None

    def _cuts(self, order: Order, life: Lifecycle) -> bool:
        aborts = isinstance(order.args, PauseArgs) and order.args.mode == "abort"
        running = life.running_call
        return aborts and running is not None and may_be_cut(running.call)

    # --- trainers ---------------------------------------------------------------------------------

    def _of_the_session(self, order: Order) -> bool:
        session = self.sessions.session
        if session is None:
            return False
        given = order.command.session
        if given is not None:
            return given == session.id
        # What the one who opened it sends meanwhile is a sign of life, whatever it is.
        return order.verb in _OF_A_SESSION or order.command.issuer == session.owner

    def _stand_still(self, order: Order, life: Lifecycle) -> None:
        """While a command of the session waits or runs, no lease of its trainer runs out."""
        session = self.sessions.session
        if session is not None and self._of_the_session(order):
            order.leases = [lease for lease in (session.lease, self.sessions.pause) if lease]
            for lease in order.leases:
                lease.busy += 1

    def _renew(self, order: Order, reply: Reply) -> None:
        accepted = reply.ok or (order.started_s is not None and order.ticket)
        for lease in order.leases:
            lease.busy -= 1
            if accepted:
                self.sessions.renew(lease)
        order.leases = []

    def _note(self, order: Order, result: dict[str, Any]) -> None:
        """Keep what a command that ended well means for leases and manifests."""
        match order.args:
            case StartWeightUpdateArgs() as args:
                budgets = {"update": args.chunk_s, "finish": args.finish_s}
                self.sessions.open(
                    str(result["session"]),
                    args.lease_s,
                    order.command.epoch,
                    args.manifest,
                    {name: seconds for name, seconds in budgets.items() if seconds is not None},
                    order.command.issuer,
                )
            case PauseArgs() as args:
                self.sessions.hold_pause(args.lease_s, order.command.epoch)
            case UpdateWeightsArgs() as args:
                session = self.sessions.session
                if session is not None and session.manifest is not None:
                    session.received.add(args.update_info)
            case _:
                pass

    def _requested(self, order: Order) -> ev.Command:
        request = _request(order, self.in_flight())
        session = self.sessions.session
        if isinstance(request, ev.FinishUpdateRequested) and session and session.manifest:
            return replace(request, incomplete=session.received.missing_from(session.manifest))
        return request

    # --- verbs that skip the queue --------------------------------------------------------------

    def _status(self, order: Order) -> None:
        try:
            args = parse_args(Verb.STATUS, order.command.args)
        except BadArguments as error:
            self._reject(order, ErrorCode.INVALID_ARGUMENT, str(error))
            return
        assert isinstance(args, StatusArgs)
        session = self.sessions.session
        if session is not None and order.command.session == session.id:
            self.sessions.renew(session.lease, self.sessions.pause)
        result: dict[str, Any] = {}
        if args.verb is not None and args.id is not None:
            self._forget_old()
            try:
                found = self._remembered.get((Verb(args.verb), args.id))
            except ValueError:
                found = None
            reply = found.reply if found else None
            result = {
                "reply": msgspec.to_builtins(reply) if reply else None,
                "running": found is not None and reply is None,
            }
        self._accept_at_once(order, changed=False, result=result)

    def _shutdown(self, order: Order, life: Lifecycle) -> list[ev.Event]:
        """Answered once the state shows it: `acknowledge_shutdown` comes when the event is through."""
        if self._repeats(order):
            return []
        if refusal := self._stale(order) or self._late(order):
            self._reject(order, *refusal)
            return []
        if life.state in (State.SHUTTING_DOWN, State.STOPPED):
            self._accept_at_once(order, changed=False)
            return []
        self._remember(order)
        self._leaving.append(order)
        return [ev.ShutdownRequested(order.cause)]

    def acknowledge_shutdown(self) -> None:
        """The state shows that the instance goes away: tell those who asked for it."""
        for order in self._leaving:
            self._accept_at_once(order, changed=True)
        self._leaving.clear()

    def _simulated(self, order: Order, life: Lifecycle) -> None:
        if life.state in _END and life.state is not State.SHUTTING_DOWN:  # engines die then, too
            self._reject(order, *_END[life.state])
            return
        try:
            args = parse_args(Verb.SIMULATE, order.command.args)
        except BadArguments as error:
            self._reject(order, ErrorCode.INVALID_ARGUMENT, str(error))
            return
        assert isinstance(args, SimulateArgs) and self._simulate is not None

        def done(error: str | None) -> None:
            if error is None:
                self._accept_at_once(order, changed=False)
            else:
                self._reject(order, ErrorCode.INVALID_ARGUMENT, error)

        self._simulate({k: v for k, v in msgspec.to_builtins(args).items() if v is not None}, done)

    # --- replies --------------------------------------------------------------------------------

    def _accept_at_once(self, order: Order, changed: bool, result: dict[str, Any] | None = None) -> None:
        reply = Reply(
            id=order.command.id,
            instance=self._instance,
            incarnation=self._incarnation,
            ok=True,
            changed=changed,
            result=result or {},
            state=self._snapshot(),
            queued_ms=_ms(time.monotonic() - order.arrived_s),
        )
        self._finish(order, reply, keep=True)

    def _reject(self, order: Order, code: ErrorCode, message: str) -> None:
        """Refuse an order that was not remembered."""
        order.answer(self._error(order.command.id, code, message, order=order))

    def _finish(self, order: Order, reply: Reply, keep: bool = False) -> None:
        self._renew(order, reply)
        order.answer(reply)
        for repeat in order.joined:
            repeat.answer(msgspec.structs.replace(reply, duplicate=True))
        order.joined.clear()
        if order.command.id is None:
            return
        key = (order.verb, order.command.id)
        remembered = self._remembered.get(key)
        if remembered is None or remembered.order is not order:
            return
        if keep:
            remembered.reply, remembered.at_s = reply, time.monotonic()
            self._remembered.move_to_end(key)
        else:
            del self._remembered[key]

    def _remember(self, order: Order) -> None:
        if order.command.id is None:
            return
        self._remembered[order.verb, order.command.id] = _Remembered(order, time.monotonic())
        if len(self._remembered) > REMEMBER_MAX:
            done = next((k for k, r in self._remembered.items() if r.reply is not None), None)
            if done is not None:
                del self._remembered[done]

    def _forget_old(self) -> None:
        oldest = time.monotonic() - REMEMBER_S
        while self._remembered:
            key, remembered = next(iter(self._remembered.items()))
            if remembered.reply is None or remembered.at_s >= oldest:
                return
            del self._remembered[key]

    def _error(self, id: str | None, code: ErrorCode, message: str, *, order: Order | None = None) -> Reply:
        now_s = time.monotonic()
        return Reply(
            id=id,
            instance=self._instance,
            incarnation=self._incarnation,
            ok=False,
            error=_error_body(code, message),
            result={},
            state=self._snapshot(),
            queued_ms=_ms((order.started_s or now_s) - order.arrived_s) if order else 0.0,
        )


def _error_body(code: ErrorCode, message: str) -> ErrorBody:
    return ErrorBody(code=code.value, message=message, retryable=code.retryable)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _request(order: Order, held: int) -> ev.Command:
    """The event that stands for this command."""
    ticket, cause, args = order.ticket, order.cause, order.args
    match args:
        case PauseArgs():
            return ev.PauseRequested(
                ticket=ticket, cause=cause, held=held, mode=Mode(args.mode), clear_cache=args.clear_cache
            )
        case ResumeArgs():
            return ev.ResumeRequested(ticket=ticket, cause=cause, held=held)
        case SleepArgs():
            return ev.SleepRequested(
                ticket=ticket, cause=cause, held=held, level=args.level, mode=Mode(args.mode)
            )
        case WakeUpArgs():
            tags = None if args.tags is None else tuple(args.tags)
            return ev.WakeUpRequested(ticket=ticket, cause=cause, held=held, tags=tags)
        case InitWeightTransferArgs():
            return ev.InitTransferRequested(ticket=ticket, cause=cause, held=held, init_info=args.init_info)
        case StartWeightUpdateArgs():
            return ev.StartUpdateRequested(
                ticket=ticket,
                cause=cause,
                held=held,
                session=str(ULID()),
                pause_mode=Mode(args.pause_mode),
                epoch=order.command.epoch,
            )
        case UpdateWeightsArgs():
            return ev.UpdateWeightsRequested(
                ticket=ticket, cause=cause, held=held, update_info=args.update_info
            )
        case FinishWeightUpdateArgs():
            return ev.FinishUpdateRequested(
                ticket=ticket,
                cause=cause,
                held=held,
                weight_version=args.weight_version,
                clear_cache=args.cache == "clear",
                allow_empty=args.allow_empty,
            )
        case AbortWeightUpdateArgs():
            return ev.AbortUpdateRequested(ticket=ticket, cause=cause, held=held)
    raise TypeError(f"{order.verb} is not a command for the engine")
