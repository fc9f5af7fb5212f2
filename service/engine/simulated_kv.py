"""KV between simulated engines, as vLLM's NIXL connector keeps it in pull mode: who holds what for whom.

Nothing is moved. What counts is who may still fetch what, and how each of these matters ended.
"""

import asyncio
import itertools
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from service.engine.protocol import JsonMap

BLOCK_TOKENS = 16

NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids")
"""What a decode side must be told (vLLM 0.32, kv_connector/v1/nixl/pull_scheduler.py)."""


class KVLoadFailed(Exception):
    """KV could not be fetched, and `--kv-load-failure-policy` is `fail`."""


class RemoteKV(Protocol):
    """KV of one prompt that another engine holds."""

    async def pull(self) -> bool:
        """Fetch it. False: it is not there, or the engine is not."""
        ...

    def release(self) -> None:
        """Tell the holder, in the background, that nobody will come for it."""
        ...


@dataclass
class _Pin:
    client_id: str
    """Of the request; unlike the pin's own id it may occur twice."""
    lease: asyncio.TimerHandle


@dataclass
class KV:
    """What this engine holds for others, and how its own prompts got theirs.

    Everything that was ever pinned is in exactly one of `pinned`, `pulled`, `expired` and `aborted`.

    Attributes:
        address: host and port where this engine is asked for its KV.
        aborted: freed without a pull: by an abort, or because the decode side needs it no more.
        local_prefills: prompts that were computed here.
        failed_loads: pulls that brought nothing.
    """

    address: tuple[str, int] = ("127.0.0.1", 0)
    engine_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    pulled: int = 0
    expired: int = 0
    aborted: int = 0
    local_prefills: int = 0
    failed_loads: int = 0
    _pins: dict[str, _Pin] = field(default_factory=dict)
    _blocks: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    @property
    def pinned(self) -> int:
        return len(self._pins)

    def pin(self, client_id: str, tokens: int, lease_s: float) -> JsonMap:
        """Keep the KV of a request that has ended; the `kv_transfer_params` of its answer."""
        request_id = f"{client_id}-{uuid.uuid4().hex[:8]}"
        lease = asyncio.get_running_loop().call_later(lease_s, self._expire, request_id)
        self._pins[request_id] = _Pin(client_id, lease)
        blocks: list[int] = list(itertools.islice(self._blocks, -(-tokens // BLOCK_TOKENS)))
        host, port = self.address
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None,  # vLLM 0.32: only of blocks that a decode side keeps
            "transfer_mode": "pull",
        }

    def pull(self, engine_id: Any, request_id: Any) -> bool:
        """Give it away. False: it is not here, or no longer."""
        found = self._free(engine_id, request_id)
        self.pulled += found
        return found

    def release(self, engine_id: Any, request_id: Any) -> bool:
        """Free what the decode side will not fetch."""
        found = self._free(engine_id, request_id)
        self.aborted += found
        return found

    def abort(self, ids: Collection[str]) -> None:
        """Free what is pinned under the ids of requests, their clients' or `remote_request_id`."""
        for request_id, pin in tuple(self._pins.items()):
            if pin.client_id in ids or request_id in ids:
                self.release(self.engine_id, request_id)

    def _free(self, engine_id: Any, request_id: Any) -> bool:
        if engine_id != self.engine_id or not isinstance(request_id, str):
            return False
        pin = self._pins.pop(request_id, None)
        if pin is not None:
            pin.lease.cancel()
        return pin is not None

    def _expire(self, request_id: str) -> None:
        self.expired += self._free(self.engine_id, request_id)
