"""A lifecycle with a model engine behind it: calls are answered when the test says so."""

from dataclasses import dataclass, field
from typing import Any

from statemachine import effects as fx
from statemachine import events as ev
from statemachine.facts import Facts
from statemachine.lifecycle import Lifecycle
from statemachine.states import Mode, Tag


def request(kind: type[ev.Request], ticket: int = 1, **fields: object) -> Any:
    if kind is ev.StartUpdateRequested:
        fields.setdefault("session", f"s{ticket}")
    return kind(ticket=ticket, cause=ev.Cause(kind.__name__, f"id{ticket}"), **fields)  # type: ignore[arg-type]


@dataclass
class ModelEngine:
    """What vLLM would make of the calls; `fail` names call types that fail once, without effect."""

    scheduling: bool = True
    asleep: tuple[Tag, ...] = ()
    session: bool = False
    meta: bool = False
    version: str = "default"
    scheduled_where_forbidden: bool = False
    fail: list[type] = field(default_factory=list)

    def view(self) -> ev.EngineView:
        return ev.EngineView(self.scheduling, self.asleep, self.meta, self.session, self.version)

    def carry_out(self, call: fx.Call) -> ev.Event:
        kind = type(call.call)
        if kind in self.fail:
            self.fail.remove(kind)
            if kind is fx.LoadChunk:
                self.session, self.meta = False, True
            return ev.CallFailed(call.number, f"{kind.__name__} failed")
        match call.call:
            case fx.AskEngine():
                return ev.CallSucceeded(call.number, self.view())
            case fx.PauseEngine():
                self.scheduling = False
            case fx.ResumeEngine():
                self.scheduling = True
            case fx.SleepEngine(level=level):
                self.scheduling = False
                self.asleep = tuple(Tag) if level else self.asleep
            case fx.WakeEngine(tags=tags):
                self.asleep = tuple(t for t in self.asleep if t not in tags)
            case fx.StartUpdate():
                self.session = self.meta = True
            case fx.FinishUpdate():
                self.session = self.meta = False
            case fx.SetVersion(version=version):
                self.version = version
            case _:
                pass
        if isinstance(call.call, fx.ResumeEngine | fx.StartUpdate) and self.scheduling:
            self.scheduled_where_forbidden |= bool(self.asleep) or self.meta
        return ev.CallSucceeded(call.number)


class Driver:
    """Feeds a lifecycle and carries out its calls at once, keeping everything it said."""

    def __init__(self, facts: Facts | None = None, engine: ModelEngine | None = None) -> None:
        self.life = Lifecycle(facts=facts)
        self.engine = engine or ModelEngine()
        self.said: list[fx.Effect] = []
        self.answers: dict[int, fx.Answer] = {}
        self.tickets = 0

    @classmethod
    def serving(cls) -> "Driver":
        driver = cls()
        driver.feed(ev.EngineLoaded())
        return driver

    def feed(self, event: ev.Event) -> list[fx.Effect]:
        """Handle one event without carrying out the calls that come of it."""
        effects = self.life.handle(event)
        self.said += effects
        for effect in effects:
            if isinstance(effect, fx.Answer):
                assert effect.ticket not in self.answers, "answered twice"
                self.answers[effect.ticket] = effect
        return effects

    def step(self) -> None:
        """Carry out the call that runs."""
        call = self.life.running_call
        assert call is not None
        self.feed(self.engine.carry_out(call))

    def settle(self) -> None:
        while self.life.running_call is not None:
            self.step()

    def do(self, kind: type[ev.Request], **fields: object) -> fx.Answer:
        """Send a command, let the engine do what it asks, and return the answer.

        Raises:
            Refused: the command was not allowed.
        """
        self.tickets += 1
        ticket = self.tickets
        self.feed(request(kind, ticket, **fields))
        self.settle()
        return self.answers[ticket]

    def calls(self) -> list[fx.EngineCall]:
        return [effect.call for effect in self.said if isinstance(effect, fx.Call)]


__all__ = ["Driver", "Mode", "ModelEngine", "request"]
