"""The decode side of a simulated P/D pair: how it reaches the engine that did the prefill."""

import asyncio
import logging
from typing import ClassVar

import aiohttp

from service.engine.protocol import JsonMap
from service.engine.simulated_kv import NEEDED

# A peer that hangs keeps us waiting, as it would keep vLLM; one that cannot be reached does not for long.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5)

log = logging.getLogger(__name__)


class PeerKV:
    """See `service.engine.simulated_kv.RemoteKV`."""

    _releasing: ClassVar[set["asyncio.Task[bool]"]] = set()

    def __init__(self, params: JsonMap) -> None:
        host, port = str(params["remote_host"]), params["remote_port"]
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._names = {name: params[name] for name in ("remote_engine_id", "remote_request_id")}

    async def pull(self) -> bool:
        return await self._ask("pull")

    def release(self) -> None:
        task = asyncio.get_running_loop().create_task(self._ask("release"))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _ask(self, what: str) -> bool:
        # PUT: a POST would be taken for inference, and refused while the peer is paused.
        # A connection of its own: a kept one may lead to the peer that was there before.
        try:
            async with (
                aiohttp.ClientSession(timeout=_TIMEOUT) as client,
                client.put(f"{self._url}/sim/kv/{what}", json=self._names) as answer,
            ):
                return answer.status == 200
        except (aiohttp.ClientError, OSError, ValueError) as error:
            log.warning("%s of KV at %s failed: %s", what, self._url, error)
            return False


def remote_kv(params: JsonMap) -> PeerKV | None:
    """What a request's `kv_transfer_params` lead to; None: the prompt is computed here."""
    if not params.get("do_remote_prefill"):
        return None
    if missing := [name for name in NEEDED if not params.get(name)]:
        log.warning("kv_transfer_params without %s: the prompt is computed here", ", ".join(missing))
        return None
    return PeerKV(params)
