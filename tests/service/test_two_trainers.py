"""Two trainers that crash, come back, repeat themselves and lose replies, in any order (facts of trainers).

Nothing they do leaves an engine serving weights that are not a complete committed version, or out of
traffic for longer than their lease, unless its weights are tainted.
"""

import itertools
from typing import Any

import msgpack
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bus import messages
from service.control import Control, Order
from service.sessions import Sessions
from statemachine import effects as fx
from statemachine import events as ev
from statemachine.lifecycle import Refused
from statemachine.states import Phase, State
from tests.statemachine.driver import Driver

LEASE_S = 10.0
ACTIONS = st.sampled_from(
    ["pause", "start", "update", "update", "finish", "abort", "resume", "sleep", "wake"]
)
FAILABLE = st.sampled_from([fx.PauseEngine, fx.StartUpdate, fx.LoadChunk, fx.FinishUpdate, fx.ResetCaches])


class Trainer:
    def __init__(self, name: str, epoch: int) -> None:
        self.name, self.epoch = name, epoch
        self.session: str | None = None
        self.version = 0
        self.last: tuple[str, dict[str, Any]] | None = None


class TwoTrainers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.driver = Driver.serving()
        self.life = self.driver.life
        self.orders: list[Order] = []
        self.replies: list[dict[str, Any]] = []
        self.control = Control(
            "one",
            "01LIFE",
            send=lambda to, data: self.replies.append(msgpack.unpackb(data)),
            post=self.orders.append,
            snapshot=self._snapshot,
            in_flight=lambda: 0,
            sessions=Sessions(clock=lambda: self.now_s),
        )
        self.epochs = itertools.count(1)
        self.trainers = [Trainer(name, next(self.epochs)) for name in ("a", "b")]
        self.ids = itertools.count()
        self.committed: dict[int, list[int]] = {}

    def _snapshot(self) -> messages.Snapshot:
        picture = self.life.picture
        return messages.Snapshot(
            namespace="default",
            component="backend",
            instance="one",
            incarnation="01LIFE",
            seq=1,
            time=0.0,
            state=picture.state.value,
            ready=picture.ready,
            live=picture.live,
            settled=picture.settled,
        )

    # --- what the runner does, without waiting ---

    def feed(self, event: ev.Event) -> None:
        try:
            effects = self.driver.feed(event)
        except Refused as refusal:
            assert isinstance(event, ev.Request)
            self.control.refused(event.ticket, refusal.code, refusal.message)
            return
        for effect in effects:
            if isinstance(effect, fx.Answer):
                self.control.answered(effect, 0.0)

    def pump(self) -> None:
        for order in self.orders:
            for event in self.control.arrive(order, self.life):
                self.feed(event)
        self.orders.clear()
        while True:
            while (call := self.life.running_call) is not None:
                self.feed(self.driver.engine.carry_out(call))
            if self.life.state is State.FAILED:
                self.control.flush(self.life)
                return
            if (expired := self.control.overdue(self.life)) is not None:
                self.feed(expired)
                continue
            request = self.control.next_request(self.life)
            if request is None:
                return
            self.feed(request)

    def send(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        before = len(self.replies)
        self.control.on_message(f"x.{verb}", msgpack.packb(body), "inbox")
        self.pump()
        assert len(self.replies) == before + 1, "answered exactly once"
        return self.replies[-1]

    # --- what trainers do ---

    @rule(who=st.integers(0, 1), action=ACTIONS, lost=st.booleans())
    def a_trainer_sends(self, who: int, action: str, lost: bool) -> None:
        trainer = self.trainers[who]
        lease = {"lease_s": LEASE_S}
        verb, args = {
            "pause": ("pause", {"mode": "keep", **lease}),
            "start": ("start_weight_update", lease),
            "update": ("update_weights", {"update_info": {}}),
            "finish": ("finish_weight_update", {"weight_version": f"{trainer.epoch}.{trainer.version + 1}"}),
            "abort": ("abort_weight_update", {}),
            "resume": ("resume", {}),
            "sleep": ("sleep", {"level": 1}),
            "wake": ("wake_up", {}),
        }[action]
        body: dict[str, Any] = {
            "id": f"id{next(self.ids)}",
            "issuer": trainer.name,
            "epoch": trainer.epoch,
            "args": args,
        }
        if verb in ("update_weights", "finish_weight_update", "abort_weight_update"):
            body["session"] = trainer.session
        trainer.last = verb, body
        reply = self.send(verb, body)
        if not lost:
            self.learn(trainer, verb, reply)

    @rule(who=st.integers(0, 1))
    def a_trainer_repeats_itself(self, who: int) -> None:
        """The reply was lost, or so it thinks."""
        trainer = self.trainers[who]
        if trainer.last is not None:
            verb, body = trainer.last
            self.learn(trainer, verb, self.send(verb, body))

    @rule(who=st.integers(0, 1))
    def a_trainer_crashes_and_another_takes_over(self, who: int) -> None:
        self.trainers[who] = Trainer(self.trainers[who].name, 2 + next(self.epochs))

    @rule(seconds=st.floats(0.1, LEASE_S * 1.5))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.pump()

    @rule(kind=FAILABLE)
    @precondition(lambda self: len(self.driver.engine.fail) < 3)
    def the_next_call_of_a_kind_fails(self, kind: type) -> None:
        self.driver.engine.fail.append(kind)

    def learn(self, trainer: Trainer, verb: str, reply: dict[str, Any]) -> None:
        if not reply["ok"]:
            return
        if verb == "start_weight_update":
            trainer.session = reply["result"]["session"]
        if verb == "finish_weight_update":
            epoch, version = map(int, reply["result"]["version"].split("."))
            trainer.version = max(trainer.version, version) if epoch == trainer.epoch else trainer.version

    # --- what must hold ---

    @invariant()
    def only_complete_committed_versions_serve(self) -> None:
        picture, engine = self.life.picture, self.driver.engine
        if picture.ready:
            assert picture.weights.good and not engine.meta and engine.scheduling
            assert picture.weights.version == engine.version

    @invariant()
    def versions_do_not_go_back_within_an_epoch(self) -> None:
        version = self.life.facts.version
        if version == "default":
            return
        epoch, number = map(int, version.split("."))
        seen = self.committed.setdefault(epoch, [])
        if not seen or seen[-1] != number:
            assert not seen or number > seen[-1]
            seen.append(number)

    @invariant()
    def a_lower_epoch_holds_nothing(self) -> None:
        session, highest = self.control.sessions.session, self.control.sessions.highest_epoch
        if session is not None and session.lease.epoch is not None and highest is not None:
            assert session.lease.epoch >= highest

    def teardown(self) -> None:
        """Once the trainers are gone for longer than their lease, only memory and taint keep it out."""
        self.now_s += 3 * LEASE_S
        self.pump()
        self.pump()
        facts = self.life.facts
        assert facts.session is None
        if self.life.state in (State.FAILED, State.ASLEEP, State.PARTIALLY_AWAKE):
            return
        assert self.life.state is State.SERVING or facts.bad is Phase.TAINTED


TwoTrainers.TestCase.settings = settings(max_examples=100, stateful_step_count=50)
TestTwoTrainers = TwoTrainers.TestCase
