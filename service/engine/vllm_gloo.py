"""vLLM's weight-transfer backend `gloo`: tensors over torch.distributed, without an accelerator.

    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from service.engine.vllm_gloo import GlooTrainerInitInfo  # registers the backend

    info = GlooTrainerInitInfo("127.0.0.1", 29600, world_size=2, rank=0)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
    engine.send_weights("step-7")

Trainer and workers meet in a group of their own, which no default process group has to exist for: rank 0
is the trainer, which listens on `master_port`; an instance's workers follow from `rank_offset`. Every
tensor goes from rank 0 to each worker by itself, in the order of the update's `names`.

A group in which anything failed is thrown away by both sides: what one side sent and the other did not
take would be taken for the next update. The trainer makes a new one with its next `send_weights`.
"""

import contextlib
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from service.engine.vllm_plugin import GLOO, register_backends
from service.engine.vllm_weights import BadWeights, FileWeightTransferEngine

TIMEOUT_S = 60.0
"""Shorter than an instance gives an init or an update: it ends as an error, not as a wedged engine."""

CHUNK_BYTES = 2**30

_GENERATION = "generation"
_GO, _GIVEN_UP = b"go", b"given up"
_LOOK_S = 0.02
_SLACK = timedelta(seconds=5)
_REASON_WITHIN_S = 5.0
"""When sending failed: how long the instance is given to say why."""


class TransferFailed(RuntimeError):
    """Trainer and workers did not come together, or lost each other."""


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """How an instance's workers find the trainer.

    Attributes:
        master_address, master_port: where the trainer listens.
        world_size: the trainer and all workers of all instances.
        rank_offset: rank of this instance's first worker; at least 1.
        timeout_s: how long to wait for the trainer, in the rendezvous and for each tensor.
    """

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        for name, least in (("master_port", 1), ("world_size", 2), ("rank_offset", 1)):
            value: Any = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"init_info: {name} is a number from {least}, {value!r} is not")
        address: Any = self.master_address
        if not isinstance(address, str) or not address:
            raise ValueError(f"init_info: master_address is text, {address!r} is not")
        patience: Any = self.timeout_s
        if type(patience) not in (int, float) or not 0 < patience < 24 * 3600:
            raise ValueError(f"init_info: timeout_s is above 0 and below a day, {patience!r} is not")


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The tensors of one chunk, in the order in which they come; a dtype as torch calls it (`bfloat16`)."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        lists: dict[str, Any] = asdict(self)
        for field, values in lists.items():
            if not isinstance(values, list) or len(values) != len(self.names):
                raise ValueError(f"update_info: {field} is a list as long as names")
        for name, dtype, shape in zip(*lists.values(), strict=True):
            if not isinstance(getattr(torch, str(dtype), None), torch.dtype):
                raise ValueError(f"update_info: {name} has the unknown dtype {dtype!r}")
            if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"update_info: {name} has the shape {shape!r}")

    def params(self) -> Iterator[ParamMeta]:
        for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            yield ParamMeta(name, getattr(torch, dtype), tuple(shape))


class _Group:
    """The trainer and the workers of one transfer, connected to each other."""

    def __init__(self, store: Any, rank: int, world_size: int, device: Any, timeout_s: float) -> None:
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [device]
        self._workers = range(1, world_size)
        self._peer = 0 if rank else 1
        self._closing = threading.Lock()
        try:
            self._gloo = ProcessGroupGloo(store, rank, world_size, options)
        except RuntimeError as error:
            raise TransferFailed(f"no connection between the ranks: {_first_line(error)}") from error

    def send(self, param: ParamMeta, tensor: torch.Tensor) -> None:
        """From rank 0 to every worker; returns when the last has it."""
        flat = _flat(tensor.detach().to("cpu").contiguous())
        if flat.numel():
            self._wait(param, [self._gloo.send([flat], rank, _tag(param)) for rank in self._workers])

    def receive(self, param: ParamMeta) -> torch.Tensor:
        tensor = torch.empty(param.shape, dtype=param.dtype)
        if tensor.numel():
            self._wait(param, [self._gloo.recv([_flat(tensor)], 0, _tag(param))])
        return tensor

    def close(self) -> None:
        """End it, also for whoever waits in it.

        gloo has no cancel; but a time-out closes every connection of a group, and tells all who wait.
        """
        with self._closing, contextlib.suppress(RuntimeError):
            nothing = self._gloo.recv([torch.empty(1)], self._peer, _NEVER_SENT)
            nothing.wait(timedelta(milliseconds=1))

    def _wait(self, param: ParamMeta, works: Sequence[Any]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise TransferFailed(f"{param.name} did not pass: {_first_line(error)}") from error


class GlooWeightTransferEngine(FileWeightTransferEngine):
    """Runs in a Worker. Receives what the `file` backend reads; loads it in the same way."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    _group: _Group | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        index = parallel.data_parallel_index * parallel.world_size + parallel.rank
        rank = init_info.rank_offset + index
        if rank >= init_info.world_size:
            raise BadWeights(f"worker {index} would be rank {rank} of a world of {init_info.world_size}")
        self._group = _join(init_info, rank)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        if self._group is None:
            raise BadWeights("no trainer is connected: init_weight_transfer comes first")
        current = "the first tensor"

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal current
            assert self._group is not None
            for param in update_info.params():
                current = f"{param.name} of shape {param.shape}"
                yield param.name, self._group.receive(param)

        try:
            self._check_shapes(update_info)
            arriving = tensors()
            with disable_mtp_completeness_check():
                self.model.load_weights(arriving)
            for _ in arriving:  # what the model does not want was sent all the same
                pass
        except (BadWeights, TransferFailed):
            self.shutdown()
            raise
        except Exception as error:
            self.shutdown()
            raise BadWeights(f"{current} does not fit the model: {_first_line(error)}") from error

    def shutdown(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _check_shapes(self, update_info: GlooUpdateInfo) -> None:
        known = self._shapes()
        for param in update_info.params():
            if known.get(param.name, param.shape) != param.shape:
                raise BadWeights(f"{param.name} has shape {param.shape}, the model {known[param.name]}")


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """What the trainer says of itself; `rank` is its own among several trainer processes, 0 sends.

    Attributes:
        master_address: of this machine, as the workers reach it.
        master_port: where rank 0 listens; 0 picks a free one.
        world_size: 1 and all workers of all instances.
        timeout_s: how long the workers and the trainer wait for each other.
        chunk_bytes: about as much is sent with each `update_weights`.
    """

    backend: ClassVar[str] = GLOO

    master_address: str
    master_port: int
    world_size: int
    timeout_s: float = TIMEOUT_S
    chunk_bytes: int = CHUNK_BYTES


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):  # type: ignore[misc]
    """Runs in the trainer, on each of its ranks; made by vLLM's `WeightTransferTrainerFactory`."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(
        self,
        init_info: GlooTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._info = init_info
        self._meeting: _Meeting | None = None
        self._group: _Group | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: GlooTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Meet the workers.

        Raises:
            TransferFailed: some did not come.
            Exception: of the client.
        """
        if source is None:
            raise ValueError("the gloo backend sends what a WeightSource yields: give it one")
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            engine._meet()
        return engine

    def send_weights(self, weight_version: str | None = None) -> None:
        """One whole update: start, all tensors of the source, finish.

        If it fails the session is aborted, where the client knows how to.

        Args:
            weight_version: what the weights are called from now on.

        Raises:
            TransferFailed: a worker left, or did not take a tensor in time.
            ValueError: the source does not yield what its metadata says.
            Exception: of the client.
        """
        params = _metadata(self.source)
        if not self.is_sender:
            for _ in _tensors(self.source):  # materializing is a collective
                pass
            return
        if self._group is None:
            self._meet()
        self.client.start_weight_update()
        try:
            tensors = _tensors(self.source)
            for chunk in _chunks(params, self._info.chunk_bytes):
                self._send(chunk, tensors)
            if (surplus := next(tensors, None)) is not None:
                raise ValueError(f"the source yields {surplus[0]}, which its metadata does not have")
        except BaseException:
            self._drop_group()
            abort = getattr(self.client, "abort_weight_update", None)
            if callable(abort):
                abort()
            raise
        self.client.finish_weight_update(weight_version)

    def shutdown(self) -> None:
        self._drop_group()
        self._meeting = None

    def _meet(self) -> None:
        if self._meeting is None:
            self._meeting = _Meeting(self._info)
        self._group = self._meeting.convene(self.client.init_weight_transfer_engine)

    def _send(self, chunk: list[ParamMeta], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        group = self._group
        assert group is not None
        info = GlooUpdateInfo(
            names=[param.name for param in chunk],
            dtype_names=[str(param.dtype).removeprefix("torch.") for param in chunk],
            shapes=[list(param.shape) for param in chunk],
        )
        taken = _beside(self.client.update_weights, asdict(info))
        # Nobody takes what is sent any more.
        taken.add_done_callback(lambda done: group.close() if done.exception() else None)
        try:
            for param in chunk:
                group.send(param, _expected(param, next(tensors, None)))
        except TransferFailed:
            group.close()  # frees the workers that are still waiting
            wait({taken}, _REASON_WITHIN_S)
            if taken.done() and (reason := taken.exception()) is not None:
                raise reason from None
            raise
        taken.result()

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


class _Meeting:
    """Where workers find the trainer; stays open for the groups that follow a failed one."""

    def __init__(self, info: GlooTrainerInitInfo) -> None:
        self._info = info
        self._groups = 0
        patience = timedelta(seconds=info.timeout_s)
        try:
            self._store = TCPStore(
                info.master_address, info.master_port, None, True, patience, wait_for_workers=False
            )
        except RuntimeError as error:
            where = f"{info.master_address}:{info.master_port}"
            raise TransferFailed(f"cannot listen on {where}: {_first_line(error)}") from error

    def convene(self, init: Callable[[dict[str, Any]], None]) -> _Group:
        """`init` calls the workers, and returns when they are connected."""
        info, ranks = self._info, range(1, self._info.world_size)
        self._groups += 1
        self._store.set(_GENERATION, str(self._groups))
        store = PrefixStore(str(self._groups), self._store)
        called = _beside(
            init,
            asdict(
                GlooInitInfo(
                    info.master_address, self._store.port, info.world_size, 1, timeout_s=info.timeout_s
                )
            ),
        )
        end = time.monotonic() + info.timeout_s
        while absent := [rank for rank in ranks if not store.check([_here(rank)])]:
            if called.done() or time.monotonic() > end:
                store.set(_GO, _GIVEN_UP)
                if called.done():
                    called.result()
                raise TransferFailed(f"no worker came as rank {', '.join(map(str, absent))}")
            time.sleep(_LOOK_S)
        store.set(_GO, _GO)
        device = _device(info.master_address, self._store.port)
        group = _Group(store, 0, info.world_size, device, info.timeout_s)
        called.result()
        return group


def _join(info: GlooInitInfo, rank: int) -> _Group:
    """A worker's side of `_Meeting.convene`."""
    where = f"the trainer at {info.master_address}:{info.master_port}"
    patience = timedelta(seconds=info.timeout_s)
    try:
        address = (info.master_address, info.master_port)
        root = TCPStore(*address, None, False, patience, wait_for_workers=False)
        store = PrefixStore(root.get(_GENERATION).decode(), root)
        store.set(_here(rank), "")
        root.set_timeout(patience + _SLACK)  # the trainer gives up first, and knows who is missing
        go = store.get(_GO)
    except RuntimeError as error:
        raise TransferFailed(f"{where} does not answer: {_first_line(error)}") from error
    if go != _GO:
        raise TransferFailed(f"{where} has given up")
    return _Group(store, rank, info.world_size, _device(*address), info.timeout_s)


def _here(rank: int) -> str:
    return f"here/{rank}"


def _device(address: str, port: int) -> Any:
    """The network device from which this machine reaches the trainer."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ProcessGroupGloo.create_default_device()
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing
        return ProcessGroupGloo.create_device(hostname=probe.getsockname()[0])


def _tag(param: ParamMeta) -> int:
    """What is sent arrives only where the same is expected: a tensor of another size ends gloo's process."""
    return zlib.crc32(f"{param.name} {param.dtype} {param.shape}".encode()) >> 2


_NEVER_SENT = 2**31 - 1


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: gloo need not know the type."""
    return tensor.reshape(-1).view(torch.uint8)


def _metadata(source: Any) -> list[ParamMeta]:
    found = source.metadata
    return list(found() if callable(found) else found)  # a property from vLLM 0.33 on


def _tensors(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(source.iter_full() if hasattr(source, "iter_full") else source)  # vLLM 0.33 has the first


def _chunks(params: list[ParamMeta], limit_bytes: int) -> Iterator[list[ParamMeta]]:
    chunk: list[ParamMeta] = []
    size = 0
    for param in params:
        size += param.dtype.itemsize * torch.Size(param.shape).numel()
        if chunk and size > limit_bytes:
            yield chunk
            chunk, size = [], param.dtype.itemsize * torch.Size(param.shape).numel()
        chunk.append(param)
    if chunk:
        yield chunk


def _expected(param: ParamMeta, found: tuple[str, torch.Tensor] | None) -> torch.Tensor:
    if found is None:
        raise ValueError(f"the source ends before {param.name}, which its metadata has")
    name, tensor = found
    if (name, tensor.dtype, tuple(tensor.shape)) != (param.name, param.dtype, param.shape):
        raise ValueError(
            f"the source yields {name} {tensor.dtype} {tuple(tensor.shape)}, "
            f"its metadata says {param.name} {param.dtype} {param.shape}"
        )
    return tensor


def _beside(function: Callable[[dict[str, Any]], None], argument: dict[str, Any]) -> "Future[None]":
    """Run it in a thread that does not keep the process alive."""
    result: Future[None] = Future()

    def run() -> None:
        try:
            function(argument)
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(None)

    threading.Thread(target=run, name=getattr(function, "__name__", "call"), daemon=True).start()
    return result


def _first_line(error: Exception) -> str:
    """One line of an error's text."""
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


register_backends()
