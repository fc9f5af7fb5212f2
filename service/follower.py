"""Applies by itself what a trainer announces: the version that the component requires."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bus.announce import Announcements
from bus.codec import BadMessage, decode_announcement
from bus.connection import BusError, NotConnected, Stored
from bus.messages import Announcement, Command, ErrorCode, Reply, Verb
from service.control import Order
from service.sessions import Sessions, safetensors_files, safetensors_header
from statemachine import events as ev
from statemachine.lifecycle import Lifecycle
from statemachine.states import State, Tag

log = logging.getLogger(__name__)

ISSUER = "announcement"
LOOK_AGAIN_S = (1.0, 60.0)
"""How soon a file that is not there yet is looked for again: doubling from the first to the last."""

_LATER = {
    ErrorCode.INVALID_STATE,
    ErrorCode.WEIGHT_UPDATE_OPEN,
    ErrorCode.BUSY,
    ErrorCode.NOT_READY,
    ErrorCode.SESSION_MISMATCH,
}
"""Refusals that only mean that somebody else was first: tried again when the state has changed."""


@dataclass(frozen=True)
class Required:
    """An announcement that counts. `order` says which of two is newer."""

    announcement: Announcement
    sequence: int

    @property
    def order(self) -> tuple[int, int]:
        return self.announcement.epoch, self.sequence


class CannotApply(Exception):
    """This instance cannot get the version; the text says why.

    Attributes:
        again: it may be different when looked at again.
    """

    def __init__(self, message: str, again: bool) -> None:
        super().__init__(message)
        self.again = again


class Follower:
    """Keeps one instance at the version its component requires.

    Args:
        post: puts an order or an event into the runner's inbox.

    Attributes:
        required: the newest valid announcement; one that is fenced off or cannot be read displaces
            nothing.
        trouble: why the required version could not be applied; None while it is, or may be.
    """

    def __init__(
        self,
        announcements: Announcements,
        sessions: Sessions,
        life: Lifecycle,
        post: Callable[[Order | ev.Event], None],
        transfer: Callable[[], bool],
    ) -> None:
        self._announcements, self._sessions, self._life, self._post = announcements, sessions, life, post
        self._transfer = transfer
        self.required: Required | None = None
        self.trouble: str | None = None
        self._applied: Required | None = None
        self._given_up: Required | None = None
        self._changed = asyncio.Event()
        self._attempts = 0

    async def prime(self) -> None:
        """Read what was announced before this life began.

        Raises:
            BusError: it cannot be known which version is required.
        """
        for stored in await self._announcements.stored():
            self._consider(stored)

    @property
    def behind(self) -> bool:
        """A version is required that was not applied in this life."""
        return self.required is not None and self.required is not self._applied

    def poke(self) -> None:
        """The state of the instance has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            group.create_task(self._keep_up())

    async def _listen(self) -> None:
        try:
            async with aclosing(self._announcements.live()) as live:
                async for stored in live:
                    self._consider(stored)
        except NotConnected:
            log.debug("the bus was closed: no more announcements")
        except BusError as error:
            log.warning("announcements cannot be followed: %s", error)

    def _consider(self, stored: Stored) -> None:
        try:
            announcement = decode_announcement(stored.data)
        except BadMessage as error:
            log.warning("announcement %d is ignored: %s", stored.sequence, error)
            return
        if self._sessions.is_stale(announcement.epoch):
            log.warning("announcement %s of epoch %d is ignored: fenced", announcement.id, announcement.epoch)
            return
        found = Required(announcement, stored.sequence)
        if self.required is None or found.order > self.required.order:
            log.info("version %r of epoch %d is required", announcement.version, announcement.epoch)
            self.required, self.trouble = found, None
            self._sessions.see_epoch(announcement.epoch)
            self._changed.set()

    async def _keep_up(self) -> None:
        delay_s = LOOK_AGAIN_S[0]
        while True:
            again_s: float | None = None
            required = self.required
            if required is not None and required is not self._applied and required is not self._given_up:
                try:
                    if await self._apply(required):
                        self._applied, self.trouble, delay_s = required, None, LOOK_AGAIN_S[0]
                        log.info("version %r was applied", required.announcement.version)
                except CannotApply as error:
                    self._cannot(required, error)
                    if error.again:
                        again_s, delay_s = delay_s, min(2 * delay_s, LOOK_AGAIN_S[1])
            try:
                async with asyncio.timeout(again_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()

    def _cannot(self, required: Required, error: CannotApply) -> None:
        version = required.announcement.version
        self.trouble = f"version {version!r} could not be applied: {error}"
        log.error("%s", self.trouble)
        if not error.again:
            self._given_up = required
        self._post(ev.WeightsStale(ev.Cause(ISSUER, required.announcement.id, self._issuer(required))))

    async def _apply(self, required: Required) -> bool:
        """Bring the engine to the version.

        Returns:
            False if it is not the time for it: tried again when the state has changed.

        Raises:
            CannotApply
        """
        announcement = required.announcement
        if not self._life.facts.loaded:
            return False
        if not self._transfer():
            raise CannotApply("this engine has no weight transfer configured", again=False)
        problem = await asyncio.to_thread(check_files, announcement)
        if problem is not None:
            raise CannotApply(problem, again=True)
        if not self._is_time():
            if Tag.WEIGHTS in self._life.facts.asleep:  # after the wake-up, and before it is ready
                self._post(ev.WeightsStale(ev.Cause(ISSUER, announcement.id, self._issuer(required))))
            return False
        self._attempts += 1
        return await self._carry_out(required)

    def _is_time(self) -> bool:
        life = self._life
        if life.facts.session is not None or Tag.WEIGHTS in life.facts.asleep:
            return False
        return life.state in (State.SERVING, State.PAUSED, State.PARTIALLY_AWAKE, State.WEIGHT_UPDATE)

    async def _carry_out(self, required: Required) -> bool:
        announcement = required.announcement
        if announcement.init_info is not None:
            reply = await self._do(required, Verb.INIT_WEIGHT_TRANSFER, {"init_info": announcement.init_info})
            if not _went_well(reply):
                return False
        args: dict[str, Any] = {"pause_mode": announcement.pause_mode}
        if announcement.lease_s is not None:
            args["lease_s"] = announcement.lease_s
        if announcement.manifest is not None:
            manifest = announcement.manifest
            fields = ("parameters", "names_sha256", "chunks")
            args["manifest"] = {f: getattr(manifest, f) for f in fields if getattr(manifest, f) is not None}
        reply = await self._do(required, Verb.START_WEIGHT_UPDATE, args)
        if not _went_well(reply):
            return False
        session = str((reply.result or {})["session"])
        try:
            for info in announcement.updates:
                _insist(await self._do(required, Verb.UPDATE_WEIGHTS, {"update_info": info}, session))
            finish = {"weight_version": announcement.version, "cache": announcement.cache}
            if not announcement.updates:
                finish["allow_empty"] = True  # type: ignore[assignment]
            reply = await self._do(required, Verb.FINISH_WEIGHT_UPDATE, finish, session)
            if not (reply.result or {}).get("committed"):
                _insist(reply)
        except CannotApply:
            if self._life.facts.session is not None and self._life.facts.session.id == session:
                await self._do(required, Verb.ABORT_WEIGHT_UPDATE, {}, session)
            raise
        return True

    async def _do(
        self, required: Required, verb: Verb, args: dict[str, Any], session: str | None = None
    ) -> Reply:
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        command = Command(
            issuer=self._issuer(required), epoch=required.announcement.epoch, session=session, args=args
        )
        self._post(Order(verb, command, answer.set_result, time.monotonic()))
        return await answer

    @staticmethod
    def _issuer(required: Required) -> str:
        return required.announcement.issuer or ISSUER


def check_files(announcement: Announcement) -> str | None:
    """What is wrong with the files that the chunks name, as far as their headers tell."""
    for update in announcement.updates:
        for info in update if isinstance(update, list) else [update]:
            path = info.get("path")
            if not isinstance(path, str):
                continue
            try:
                for file in safetensors_files(Path(path)):
                    safetensors_header(file)
            except OSError as error:
                return f"{path}: {(error.strerror or str(error)).lower()}"
            except (ValueError, KeyError, TypeError) as error:
                return " ".join(str(error).split())
    return None


def _went_well(reply: Reply) -> bool:
    """False if somebody else was first.

    Raises:
        CannotApply: the engine did not do it.
    """
    if reply.ok:
        return True
    if reply.error is not None and reply.error.code in _LATER:
        return False
    _insist(reply)
    return False


def _insist(reply: Reply) -> None:
    if not reply.ok:
        error = reply.error
        raise CannotApply(f"{error.code}: {error.message}" if error else "refused", again=False)
