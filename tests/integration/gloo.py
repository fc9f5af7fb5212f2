"""An instance of the real thing that takes its weights over gloo; one for all tests, as `served` is."""

import asyncio
import json
import secrets
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from bus.client import Client
from bus.weight_sync import NATSWeightSyncClient
from service.engine.tiny_model import ENGINE_ARGS
from tests.broker import eventually
from tests.integration.conftest import Fleet, is_as_started
from tests.integration.served import SOON_S, Served
from tests.program import Program

BACKEND = ("--weight-transfer-config", json.dumps({"backend": "gloo"}))

COMPONENT = "gloo"
"""Its own: what others send to all of theirs is not for it."""

_shared: "WeakKeyDictionary[Fleet, Served]" = WeakKeyDictionary()


async def shared(fleet: Fleet) -> Served:
    """It serves the weights of `a`; another one if a test did not leave it so."""
    served = _shared.get(fleet)
    if served is None or not await is_as_started(served):
        if served is not None:
            await served.close()
        served = _shared[fleet] = await start(fleet)
    return served


async def start(fleet: Fleet) -> Served:
    name = f"gloo-{secrets.token_hex(4)}"
    client = Client(fleet._client.bus, component=COMPONENT, issuer="integration")
    ready, model = fleet._folder / f"{name}.json", fleet._models / "a"
    program = await Program.start(
        fleet._folder,
        *("serve", str(model), "--instance", name, "--nats", fleet._broker.url, "--ready-file", str(ready)),
        *("--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"),
        *("--admin-address", "127.0.0.1:0", "--grace-period-s", "0.5", "--component", COMPONENT),
        *("--", "--enable-scale-out", *ENGINE_ARGS, *BACKEND),
    )
    try:
        await eventually(lambda: ready.exists() or program.exit_code is not None, within_s=SOON_S)
        assert ready.exists(), program.last_words()
        served = Served(program, client, fleet._http, ready)
    except BaseException:
        await program.kill()
        raise
    fleet._started.append(served)  # closed with the others
    served.model = str(model)
    return await served.loaded()


def load(path: Path) -> Any:
    """A checkpoint as a trainer has it."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


async def send(trainer: NATSWeightSyncClient, path: Path, version: str) -> None:
    """A whole life of a trainer that gives away a checkpoint."""
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from service.engine.vllm_gloo import GlooTrainerInitInfo

    def whole() -> None:
        info = GlooTrainerInitInfo("127.0.0.1", 0, world_size=2, rank=0)
        source = ModuleSource(load(path))
        engine = WeightTransferTrainerFactory.trainer_init(info, client=trainer, source=source)
        engine.send_weights(version)
        engine.shutdown()

    await asyncio.to_thread(whole)
