"""What vLLM cannot tell or do, added to it through its `vllm.general_plugins` entry point.

vLLM calls `register` in the host, in EngineCore and in every Worker. A vLLM of somebody else that
finds watchkeeper installed gets the weight-transfer backends `file` and `gloo` and four unused methods,
no more.

Worker calls go through `_on_every_worker`: vLLM's own `collective_rpc` leaves the other workers'
replies unread when one fails, and each later call then reads the reply of the one before.
"""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

HOST_PID_VARIABLE = "WATCHKEEPER_HOST_PID"
"""Set by the engine host: its children are to die with their parent."""

BACKEND = "file"
GLOO = "gloo"

# The methods added to EngineCore, called by name as utilities.
ASK = "watchkeeper_ask"
WAKE = "watchkeeper_wake"
WEIGHTS = "watchkeeper_weights"
PROCESSES = "watchkeeper_processes"

BUSY_WAIT_S = 0.1
"""How long a worker spins for the next call before it waits for it; vLLM's own second, after each of our
questions, would keep half a core busy in every worker of an idle engine."""

_PR_SET_PDEATHSIG = 1


class WorkerError(Exception):
    """At least one worker failed; every one has answered."""


def register() -> None:
    """Entry point; may run any number of times in a process."""
    if os.environ.get(HOST_PID_VARIABLE):
        _die_with_parent()
        _wait_without_spinning()

    from vllm.v1.engine.core import EngineCore

    for name, method in ((ASK, _ask), (WAKE, _wake), (WEIGHTS, _weights), (PROCESSES, _processes)):
        setattr(EngineCore, name, method)
    register_backends()


def register_backends() -> None:
    """Tell vLLM's factories of ours; nothing of a backend is imported before it is chosen."""
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    gloo = "service.engine.vllm_gloo"
    for factory, backend in (
        (WeightTransferEngineFactory, (BACKEND, "service.engine.vllm_weights", "FileWeightTransferEngine")),
        (WeightTransferEngineFactory, (GLOO, gloo, "GlooWeightTransferEngine")),
        (WeightTransferTrainerFactory, (GLOO, gloo, "GlooTrainerWeightTransferEngine")),
    ):
        # Registered already: this is not the first call, or somebody else has a backend of that name.
        with contextlib.suppress(ValueError):
            factory.register_engine(*backend)


def _wait_without_spinning() -> None:
    try:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    except ImportError:
        return  # another vLLM than those that were tested; it costs processor time, and nothing else
    original = SpinCondition.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def shorter(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.busy_loop_s = min(self.busy_loop_s, BUSY_WAIT_S)

    SpinCondition.__init__ = shorter


def _die_with_parent() -> None:
    """Nobody may hold the accelerator's memory once the host is gone, however it went.

    The signal comes when the *thread* that started this process ends.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return  # the host itself
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not parent.is_alive():
        os._exit(1)  # it went before the signal was asked for


# In EngineCore. `core` is vLLM's EngineCore; its one main thread runs these, so nothing is scheduled
# in between.


def _ask(core: Any) -> dict[str, Any]:
    """The engine's state; waits for every worker, so that one that is stopped is found."""
    workers = _on_every_worker(core.model_executor, _worker_view)
    return {
        "scheduling": core.scheduler.pause_state.name == "UNPAUSED",
        "asleep": sorted(core.model_executor.sleeping_tags),
        "meta_parameters": any(meta for meta, _ in workers),
        "session_open": any(session for _, session in workers),
        "weight_version": core.get_weight_version(),
    }


def _wake(core: Any, tags: list[str]) -> list[str]:
    """Wake those of `tags` that sleep, and schedule nothing: vLLM's own wake-up ends with a resume.

    Returns:
        The tags that still sleep.
    """
    executor = core.model_executor
    asleep = [tag for tag in dict.fromkeys(tags) if tag in executor.sleeping_tags]
    if asleep:
        with _shadowed(core, "resume_scheduler", lambda: None), _every_reply_read(executor):
            core.wake_up(asleep)
    return sorted(executor.sleeping_tags)


def _weights(core: Any, step: str, info: Any = None) -> str | None:
    """One step of a weight transfer on every worker: init, start, update, finish.

    One worker's failure to load closes the session in all of them.

    Returns:
        What went wrong: vLLM would log an exception as if it were its own.
    """
    executor = core.model_executor
    try:
        match step:
            case "init":
                _on_every_worker(executor, _worker_init, info)
            case "start":
                _on_every_worker(executor, _worker_start)
            case "update":
                try:
                    _on_every_worker(executor, _worker_update, info)
                except WorkerError:
                    _on_every_worker(executor, _worker_close)
                    raise
            case "finish":
                _on_every_worker(executor, _worker_finish)
            case _:
                raise ValueError(f"no such step of a weight transfer: {step}")
    except WorkerError as error:
        return str(error)
    return None


def _processes(core: Any) -> dict[str, Any]:
    """Process ids of EngineCore and of the workers it started itself."""
    handles = [getattr(worker, "proc", None) for worker in getattr(core.model_executor, "workers", ())]
    return {"core": os.getpid(), "workers": [handle.pid for handle in handles if handle is not None]}


def _on_every_worker(executor: Any, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(worker, *args)` in every worker and read every reply.

    Raises:
        WorkerError: after all have answered.
    """
    return _results(executor.collective_rpc(_guarded, args=(function, args)))


def _results(replies: list[tuple[bool, Any]]) -> list[Any]:
    failures = list(dict.fromkeys(value for ok, value in replies if not ok))
    if failures:
        raise WorkerError("; ".join(failures))
    return [value for _, value in replies]


@contextlib.contextmanager
def _every_reply_read(executor: Any) -> Iterator[None]:
    """Within it vLLM's own code calls the workers in the way of `_on_every_worker`."""
    original = executor.collective_rpc

    def collective_rpc(
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        return _results(original(_guarded, timeout, (_worker_method, (method, args, kwargs or {}))))

    with _shadowed(executor, "collective_rpc", collective_rpc):
        yield


@contextlib.contextmanager
def _shadowed(instance: Any, name: str, value: Any) -> Iterator[None]:
    """The instance's own attribute hides the class's method, and is taken away again."""
    vars(instance)[name] = value
    try:
        yield
    finally:
        del vars(instance)[name]


# In a Worker. `worker` is vLLM's WorkerWrapperBase, which passes attributes on to the real one.


def _guarded(worker: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, function(worker, *args)
    except Exception as error:
        from vllm.logger import init_logger

        # What is wrong with the caller's input needs no traceback.
        show = not isinstance(error, ValueError)
        init_logger(__name__).warning("%s: %s", function.__name__, error, exc_info=show)
        return False, f"{error}" or type(error).__name__


def _worker_method(worker: Any, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(method, str):
        return getattr(worker, method)(*args, **kwargs)
    return method(worker, *args, **kwargs)


def _worker_view(worker: Any) -> tuple[bool, bool]:
    meta = any(parameter.is_meta for parameter in worker.get_model().parameters())
    return meta, bool(getattr(worker, "_weight_update_active", False))


def _worker_init(worker: Any, init_info: dict[str, Any]) -> None:
    worker.init_weight_transfer_engine(init_info)


def _worker_start(worker: Any) -> None:
    _worker_close(worker)
    try:
        worker.start_weight_update()
    except BaseException:
        _worker_close(worker)
        raise


def _worker_update(worker: Any, update_info: Any) -> None:
    try:
        worker.update_weights(update_info)
    except BaseException:
        _worker_close(worker)
        raise


def _worker_finish(worker: Any) -> None:
    worker.finish_weight_update()


def _worker_close(worker: Any) -> None:
    """Close a session that failed or was left open, and put back what it had taken but not replaced.

    Layers that it had loaded completely keep their new weights.
    """
    from vllm.config import set_current_vllm_config

    from service.engine.vllm_weights import put_back_open_layers

    engine = getattr(worker, "weight_transfer_engine", None)
    if engine is None:
        return
    worker = getattr(worker, "worker", worker)  # attributes are set on the real one
    worker._weight_update_active = False
    with set_current_vllm_config(worker.vllm_config):
        put_back_open_layers(engine.model, engine.model_config)  # may be the draft model
        engine.reset_weight_update_target()
        put_back_open_layers(engine.model, engine.model_config)
