"""One request in the simulated engine, from the queue to its last token."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from service.engine.protocol import JsonMap
from service.engine.simulated_kv import KVLoadFailed, RemoteKV
from service.engine.simulated_words import Prompt

if TYPE_CHECKING:
    from service.engine.simulated import SimulatedEngine


class Generation:
    """
    Attributes:
        request_id: as its client knows it.
        started: it was scheduled once: a drain waits for it.
        kv_transfer_params: where its KV waits to be fetched, once it has ended by length.
    """

    def __init__(
        self,
        engine: "SimulatedEngine",
        max_tokens: int,
        prompt: Prompt,
        keeps_kv: bool,
        remote: RemoteKV | None,
    ) -> None:
        """
        Args:
            keeps_kv: its KV shall be there for a decode side afterwards.
            remote: where KV of its prompt is; None: it is computed here.
        """
        self._engine = engine
        self._max_tokens = max_tokens
        self._prompt = prompt
        self._keeps_kv = keeps_kv
        self._remote = remote
        self._news = asyncio.Event()
        self.request_id = ""
        self.started = False
        self.finish_reason: str | None = None
        self.kv_transfer_params: JsonMap | None = None

    def notice(self) -> None:
        """Something about the engine changed."""
        self._news.set()

    def abort(self) -> None:
        self.finish_reason = "abort"
        self.notice()

    def close(self) -> None:
        """Nobody waits for it any more. KV that it has not fetched is freed at its peer."""
        if self._remote is not None and not self._engine.died.done():
            self._remote.release()
        self._remote = None

    async def tokens(self) -> AsyncIterator[int]:
        """Numbers of the tokens; at the end `finish_reason` is set.

        Raises:
            EngineDied: the engine died before the last one.
            KVLoadFailed
        """
        self._engine.add(self)
        try:
            if not await self._prefill():
                return
            for made in range(1, self._max_tokens + 1):
                if not await self._take(self._engine.options.token_interval_s):
                    return
                if made == self._max_tokens:
                    self._finish()
                yield self._prompt.first + made - 1
        finally:
            self._engine.remove(self)
            self.close()

    def _finish(self) -> None:
        self.finish_reason = "length"
        self._engine.remove(self)
        if self._keeps_kv:
            # As in vLLM without the last token, which was never computed on.
            tokens = len(self._prompt.ids) + self._max_tokens - 1
            lease_s = self._engine.options.kv_lease_s
            self.kv_transfer_params = self._engine.kv.pin(self.request_id, tokens, lease_s)

    async def _prefill(self) -> bool:
        """Have the prompt's KV, from elsewhere or computed here. False: aborted."""
        if not await self._take(0):
            return False
        if self._remote is not None:
            pull = asyncio.ensure_future(self._remote.pull())
            pull.add_done_callback(lambda _: self.notice())
            if not await self._until(pull):
                return False
            self._remote = None
            if pull.result():
                return True
            self._engine.kv.failed_loads += 1
            if self._engine.options.kv_load_failure_policy == "fail":
                self.finish_reason = "error"
                raise KVLoadFailed(self.request_id)
        self._engine.kv.local_prefills += 1
        return await self._take(self._engine.options.prefill_s(len(self._prompt.ids)))

    async def _take(self, seconds: float) -> bool:
        """Compute for that long, then wait as long as the engine is stopped. False: aborted."""
        loop = asyncio.get_running_loop()
        computed = loop.create_future()
        if seconds == 0:
            computed.set_result(None)
            return await self._until(computed)
        timer = loop.call_later(seconds, _resolve, computed, self._news)
        try:
            return await self._until(computed)
        finally:
            timer.cancel()

    async def _until(self, work: "asyncio.Future[Any]") -> bool:
        try:
            while True:
                self._news.clear()
                if self.finish_reason is not None:
                    return False
                self._engine.check_alive()
                if self._engine.schedules(self) and work.done():
                    return True
                await self._news.wait()
        finally:
            work.cancel()


def _resolve(future: "asyncio.Future[None]", news: asyncio.Event) -> None:
    if not future.done():
        future.set_result(None)
    news.set()
