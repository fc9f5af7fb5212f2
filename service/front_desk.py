"""Where commands that come over HTTP and gRPC are handed in, to the dispatcher that the bus uses too.

Both speak vLLM's interface, which has a few calls that are no verbs of ours; what these do stands
here, once for both.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from bus.messages import Command, ErrorBody, ErrorCode, Reply, Snapshot, StateName, Verb, describe
from service.engine.protocol import EngineDied, EngineError, EngineInfo

FIELDS = ("id", "issuer", "epoch", "session", "deadline")
"""What surrounds the arguments of a command; each may come as a header (metadata) `PREFIX` + name."""

PREFIX = "x-watchkeeper-"

_NO_ENGINE = {
    StateName.STARTING: (ErrorCode.NOT_READY, "the engine is still loading"),
    StateName.FAILED: (ErrorCode.ENGINE_FAILED, "the engine has failed"),
    StateName.SHUTTING_DOWN: (ErrorCode.SHUTTING_DOWN, "the instance shuts down"),
    StateName.STOPPED: (ErrorCode.SHUTTING_DOWN, "the instance shuts down"),
}

_STOPPED = (StateName.PAUSED, StateName.ASLEEP, StateName.PARTIALLY_AWAKE, StateName.WEIGHT_UPDATE)

_CONVERT: dict[str, Callable[[str], Any]] = {"epoch": int, "deadline": float}

T = TypeVar("T")


class CommandRefused(Exception):
    """A command was refused, or failed.

    Attributes:
        result: what it did all the same.
    """

    def __init__(self, error: ErrorBody, result: dict[str, Any] | None = None) -> None:
        super().__init__(error.message)
        self.error, self.result = error, result or {}

    @classmethod
    def because(cls, code: ErrorCode, message: str) -> "CommandRefused":
        return cls(ErrorBody(code=code.value, message=message, retryable=code.retryable))

    @property
    def code(self) -> ErrorCode:
        return ErrorCode(self.error.code)


class NotServed(Exception):
    """There is nothing behind this call; the text says why."""


class Engine(Protocol):
    """What is asked of the engine beside the dispatcher, because it changes no state."""

    async def abort_requests(self, request_ids: Sequence[str] = ()) -> None: ...
    async def shutdown_weight_transfer(self) -> None: ...


def make_command(field: Callable[[str], str | None], issuer: str, args: dict[str, Any]) -> Command:
    """A command from what a request carries.

    Args:
        field: the text of the header `PREFIX` + one of `FIELDS`, if it came.
        issuer: of a request that names none.

    Raises:
        CommandRefused: `invalid_message`.
    """
    raw: dict[str, Any] = {"issuer": issuer, "args": args}
    for name in FIELDS:
        if (text := field(PREFIX + name)) is None:
            continue
        try:
            raw[name] = _CONVERT.get(name, str)(text)
        except ValueError:
            message = f"{PREFIX}{name}: {text!r} is not a number"
            raise CommandRefused.because(ErrorCode.INVALID_MESSAGE, message) from None
    try:
        return msgspec.convert(raw, Command)
    except msgspec.ValidationError as error:
        raise CommandRefused.because(ErrorCode.INVALID_MESSAGE, describe(error, "")) from None


class FrontDesk:
    """Takes commands for one instance.

    A caller that leaves cancels nothing.

    Args:
        submit: hands a command to the dispatcher.
        info: what is known of the engine once it is loaded.
        began_bad: whether a session is open that began with weights unfit to serve.
        call_timeout_s: limit of an engine call that is made from here.
    """

    def __init__(
        self,
        submit: Callable[[Verb, Command, Callable[[Reply], None]], None],
        snapshot: Callable[[], Snapshot],
        info: Callable[[], EngineInfo | None],
        engine: Engine,
        began_bad: Callable[[], bool],
        call_timeout_s: float,
    ) -> None:
        self._submit, self._snapshot, self._info, self._engine = submit, snapshot, info, engine
        self._began_bad, self._call_timeout_s = began_bad, call_timeout_s
        self._waiting: set[asyncio.Future[Reply | None]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def close(self) -> None:
        """Nobody answers commands any more: say so to those who wait, and to those who come."""
        self._closed = True
        for answer in self._waiting:
            if not answer.done():
                answer.set_result(None)

    async def command(self, verb: Verb, command: Command) -> Reply:
        """Hand a command in and wait for its reply.

        Raises:
            CommandRefused: the reply is an error.
        """
        answer: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()

        def answered(reply: Reply) -> None:
            if not answer.done():  # else its caller has left
                answer.set_result(reply)

        reply = None
        if not self._closed:
            self._waiting.add(answer)
            try:
                self._submit(verb, command, answered)
                reply = await answer
            finally:
                self._waiting.discard(answer)
        if reply is None:
            raise CommandRefused.because(ErrorCode.SHUTTING_DOWN, "the instance has ended")
        if reply.error is not None:
            raise CommandRefused(reply.error, reply.result)
        return reply

    # --- questions ------------------------------------------------------------------------------

    def is_stopped(self) -> bool:
        """Nothing is scheduled. vLLM says `is_sleeping` of a mere pause too, and a sleep pauses."""
        return self._living().state in _STOPPED

    def weight_version(self) -> str:
        return self._living().weights.version

    def engine_info(self) -> EngineInfo:
        self._living()
        info = self._info()
        assert info is not None
        return info

    @property
    def instance(self) -> str:
        return self._snapshot().instance

    def world_size(self, include_dp: bool) -> int:
        info = self.engine_info()
        return info.world_size * (info.data_parallel_size if include_dp else 1)

    # --- calls that are no verbs ----------------------------------------------------------------

    async def abort_requests(self, request_ids: Sequence[str] = ()) -> int:
        """End requests without a pause; those that come later are served.

        Args:
            request_ids: as their clients know them; none given: all requests.

        Returns:
            How many were asked to end.
        """
        in_flight = self._living().in_flight
        await self._call(self._engine.abort_requests(request_ids))
        return len(request_ids) or in_flight

    async def shutdown_weight_transfer(self) -> None:
        """Release the link to the trainer. It changes nothing that others see."""
        update = self._living().weight_update
        if update is not None and update.session is not None:
            text = "a weight update is open: finish or abort it before the trainer's link is released"
            raise CommandRefused.because(ErrorCode.WEIGHT_UPDATE_OPEN, text)
        await self._call(self._engine.shutdown_weight_transfer())

    async def name_version(self, command: Command, version: str) -> None:
        """Give the weights another version without new weights.

        A version is committed by the finish of an update and in no other way: this is one without a
        chunk. Bad weights stay bad, whatever they are called.
        """
        await self._to_the_end(self._name_version(command, version))

    async def _name_version(self, command: Command, version: str) -> None:
        start = await self.command(Verb.START_WEIGHT_UPDATE, msgspec.structs.replace(command, args={}))
        session = (start.result or {}).get("session")
        # What has begun is ended, whenever it comes to it.
        inside = msgspec.structs.replace(command, session=session, deadline=None, args={})
        args = {"weight_version": version, "allow_empty": True, "cache": "keep"}
        try:
            if self._began_bad():
                text = "the weights are not fit to serve, and another version does not make them so"
                raise CommandRefused.because(ErrorCode.WEIGHTS_NOT_READY, text)
            await self.command(Verb.FINISH_WEIGHT_UPDATE, msgspec.structs.replace(inside, args=args))
        except CommandRefused as refusal:
            if not refusal.result.get("committed"):
                with contextlib.suppress(CommandRefused):  # the first reason is told
                    await self.command(Verb.ABORT_WEIGHT_UPDATE, msgspec.structs.replace(inside, id=None))
            raise

    # --- inside ---------------------------------------------------------------------------------

    def _living(self) -> Snapshot:
        """The snapshot of an instance whose engine can be asked."""
        snapshot = self._snapshot()
        state = StateName(snapshot.state)
        if state in _NO_ENGINE:
            raise CommandRefused.because(*_NO_ENGINE[state])
        return snapshot

    async def _call(self, call: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._call_timeout_s):
                await call
        except TimeoutError:
            text = f"the engine did not answer within {self._call_timeout_s:g} s"
            raise CommandRefused.because(ErrorCode.ENGINE_TIMEOUT, text) from None
        except EngineError as error:
            raise CommandRefused.because(ErrorCode.ENGINE_ERROR, str(error)) from error
        except EngineDied as error:
            raise CommandRefused.because(ErrorCode.ENGINE_FAILED, str(error)) from error

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Several steps that are all taken, even if the caller leaves in between."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: its caller may have left
