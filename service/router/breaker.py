"""When an instance that fails is left alone, and how it comes back."""

from dataclasses import dataclass
from enum import Enum

MAX_FAILURES = 3
"""More than so many in a row isolate."""


class Outcome(Enum):
    """What an attempt says about the instance."""

    GOOD = "good"
    """It answered; a refusal of a wrong request is an answer too."""
    BAD = "bad"
    """It did not, or with an error of its own."""
    UNKNOWN = "unknown"
    """The client left, or the instance said that it is paused: nothing is known."""


class Isolation(Enum):
    CLOSED = "closed"
    """Takes requests."""
    ISOLATED = "isolated"
    """Left alone until a probe succeeds."""
    HALF_OPEN = "half_open"
    """A probe succeeded: one request may try."""
    TRIAL = "trial"
    """That one request is on its way."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to send one request.

    Attributes:
        period: of the breaker at that time; reports of an earlier one do not count.
        trial: whether the fate of the instance hangs on it.
    """

    period: int
    trial: bool


class Breaker:
    """Counts failures in a row, of requests and of probes; keeps no clock.

    A probe that succeeds takes back only what probes have failed: `/health` says little about
    whether requests are served. A request that succeeds takes back all.
    """

    def __init__(self) -> None:
        self._isolation = Isolation.CLOSED
        self._period = 0
        self._by_requests = 0
        self._by_probes = 0

    @property
    def isolation(self) -> Isolation:
        return self._isolation

    @property
    def failures(self) -> int:
        """In a row, as counted now."""
        return self._by_requests + self._by_probes

    @property
    def admits(self) -> bool:
        """Whether `admit` would give a ticket."""
        return self._isolation in (Isolation.CLOSED, Isolation.HALF_OPEN)

    def admit(self) -> Ticket | None:
        """Ask to send one request.

        Returns:
            A ticket for `answering` and `report`, or None while the instance is left alone. A ticket
            from before the last change of isolation is ignored by both, so a late success cannot
            bring a sick instance back.
        """
        match self._isolation:
            case Isolation.CLOSED:
                return Ticket(self._period, trial=False)
            case Isolation.HALF_OPEN:
                self._isolation = Isolation.TRIAL
                return Ticket(self._period, trial=True)
        return None

    def answering(self, ticket: Ticket) -> None:
        """The answer has begun. That is enough for others to be let in after a trial, lest a long answer
        keep them out; one more failure isolates again."""
        if ticket.trial and ticket.period == self._period and self._isolation is Isolation.TRIAL:
            self._isolation = Isolation.CLOSED
            self._by_requests, self._by_probes = MAX_FAILURES, 0

    def report(self, ticket: Ticket, outcome: Outcome) -> None:
        """Say how the request ended; once per ticket."""
        if ticket.period != self._period:
            return
        if ticket.trial:
            if outcome is Outcome.GOOD:
                self.answering(ticket)
            elif self._isolation is Isolation.TRIAL:
                # Without a verdict the next request may try: a trial must not stay open for ever.
                self._isolation = Isolation.HALF_OPEN
                if outcome is Outcome.BAD:
                    self._isolate()
                return
        match outcome:
            case Outcome.GOOD:
                self._by_requests = self._by_probes = 0
            case Outcome.BAD:
                self._by_requests += 1
                self._judge()

    def probed(self, good: bool) -> None:
        """A probe has succeeded or failed."""
        if not good:
            self._by_probes += 1
            self._judge()
            return
        self._by_probes = 0
        if self._isolation is Isolation.ISOLATED:
            self._isolation = Isolation.HALF_OPEN

    def restore(self) -> None:
        """The instance itself says that it serves again."""
        self._period += 1
        self._isolation = Isolation.CLOSED
        self._by_requests = self._by_probes = 0

    def _judge(self) -> None:
        if self._isolation is not Isolation.CLOSED or self.failures > MAX_FAILURES:
            self._isolate()

    def _isolate(self) -> None:
        if self._isolation is not Isolation.ISOLATED:
            self._isolation = Isolation.ISOLATED
            self._period += 1
