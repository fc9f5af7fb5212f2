"""What an engine offers, on both sides of the socket.

`HostedEngine` is implemented inside the host process by real vLLM and by the simulated engine.
The control process reaches either of them through `service.engine.process.EngineProcess`.
"""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from statemachine.events import EngineView, JsonMap
from statemachine.states import Mode, Tag

__all__ = [
    "EngineDied",
    "EngineError",
    "EngineInfo",
    "EngineRefused",
    "EngineView",
    "HostSettings",
    "HostedEngine",
    "JsonMap",
]


class EngineError(Exception):
    """The engine answered a call with an error; what the call did is unknown until it is asked."""


class EngineDied(Exception):
    """The engine's process is gone, or can never answer again."""


class EngineRefused(Exception):
    """The engine cannot be configured as asked: its arguments or its model are at fault."""


@dataclass(frozen=True)
class EngineInfo:
    """What is known once the engine is loaded.

    Attributes:
        kind: `vllm` or `sim`.
        version: of the engine, such as `0.32.0`.
        model: the name it serves the model under.
        max_model_len: tokens of prompt and answer together.
        weight_transfer: whether a weight-transfer backend is configured.
        weight_transfer_backend: its name.
        sleep_mode: whether it can be put to sleep.
        world_size: workers of one data-parallel replica.
    """

    kind: str
    version: str
    model: str
    max_model_len: int
    weight_transfer: bool
    weight_transfer_backend: str = ""
    sleep_mode: bool = True
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    world_size: int = 1


class HostedEngine(Protocol):
    """An engine inside the host process. Every coroutine runs on the host's loop.

    A coroutine that fails raises `EngineError`; one that can never succeed because the engine is
    gone raises `EngineDied`. Calls come one at a time except `ask`, `abort_requests` and
    `shutdown`, which may come while another one runs.
    """

    died: "asyncio.Future[str]"
    """Resolves to the reason when the engine can never answer again (within 0.3 s of it)."""

    async def load(self) -> EngineInfo:
        """Build the engine.

        Calls `accepted()` of the host once its arguments and model configuration are known to be
        good and before weights are loaded.

        Raises:
            EngineRefused: unknown argument, impossible combination, model not found.
        """
        ...

    def app(self) -> Any:
        """The ASGI application with the OpenAI-compatible API; only after `load`."""
        ...

    async def serve_http(self, app: Any, sock: socket.socket) -> None:
        """Serve `app` on a bound socket until cancelled."""
        ...

    async def pause(self, mode: Mode, clear_cache: bool) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self, level: int, mode: Mode) -> None:
        """Stop scheduling in `mode`, then release memory; level is 1 or 2."""
        ...

    async def wake_up(self, tags: tuple[Tag, ...]) -> None:
        """Make memory resident again. Never schedules, not for one token."""
        ...

    async def init_weight_transfer(self, init_info: JsonMap) -> None: ...

    async def start_weight_update(self) -> None:
        """Open a session in every worker. One that an earlier update left open is closed first."""
        ...

    async def update_weights(self, update_info: JsonMap | list[JsonMap]) -> None: ...

    async def finish_weight_update(self) -> None:
        """Close the session in every worker, without touching the version."""
        ...

    async def set_weight_version(self, version: str) -> None: ...

    async def reset_caches(self) -> None:
        """Drop everything that old weights computed: prefix, multi-modal and encoder caches."""
        ...

    async def ask(self) -> EngineView: ...

    async def abort_requests(self, request_ids: Sequence[str] = ()) -> None:
        """End requests that run, wait or are frozen in the engine.

        Args:
            request_ids: as their clients know them; unknown ones are ignored. None given: all requests.
        """
        ...

    async def shutdown_weight_transfer(self) -> None:
        """Release the link to the trainer; never while a session is open."""
        ...

    async def simulate(self, script: JsonMap) -> None:
        """Simulated engine only; raises `EngineError` elsewhere."""
        ...

    async def shutdown(self, timeout_s: float) -> None: ...


@dataclass
class HostSettings:
    """How the control process starts the host (its command line, see `service.engine.host`)."""

    kind: str
    model: str
    engine_args: list[str] = field(default_factory=list)
