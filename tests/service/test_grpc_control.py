"""`vllm.Control` on the gRPC port: names and numbers, the dispatcher behind it, status codes, reflection."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from service.engine.rpc import control_pb2 as pb
from service.engine.rpc import control_pb2_grpc
from tests.broker import eventually
from tests.service.serving import Serving, serving

FIELDS: dict[str, dict[str, int]] = {
    "PauseGenerationRequest": {"mode": 1, "clear_cache": 2},
    "SleepRequest": {"level": 1, "mode": 2},
    "WakeUpRequest": {"tags": 1},
    "WakeUpResponse": {},
    "IsPausedResponse": {"paused": 1},
    "IsSleepingResponse": {"sleeping": 1},
    "InitWeightTransferEngineRequest": {"init_info_json": 1},
    "UpdateWeightsRequest": {"update_info_json": 1},
    "FinishWeightUpdateRequest": {"weight_version": 1},
    "UpdateWeightVersionRequest": {"weight_version": 1},
    "GetWeightVersionResponse": {"weight_version": 1},
    "AbortRequest": {"request_ids": 1},
    "LoraAdapter": {"lora_id": 1, "lora_name": 2, "source_path": 3},
    "LoadLoraRequest": {"lora_name": 1, "source_path": 2},
    "LoadLoraResponse": {"adapter": 1},
    "UnloadLoraRequest": {"lora_name": 1},
    "UnloadLoraResponse": {"adapter": 1},
    "ListLorasResponse": {"adapters": 1},
    "ServerInfo": {
        "engine_version": 1,
        "api_version": 2,
        "instance_id": 3,
        "parallelism": 4,
        "max_model_len": 5,
        "kv_block_size": 6,
        "total_kv_blocks": 7,
        "max_running_requests": 8,
        "max_batched_tokens": 9,
        "max_loras": 10,
        "rl_capabilities": 11,
        "effective_attention_block_size": 14,
    },
    "RlCapabilities": {
        "weight_transfer_enabled": 1,
        "weight_transfer_backend": 2,
        "sleep_mode_enabled": 3,
        "draft_weight_updates_enabled": 4,
    },
    "ParallelismInfo": {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 2,
        "data_parallel_size": 3,
        "data_parallel_rank": 4,
        "decode_context_parallel_size": 5,
        "world_size": 6,
        "data_parallel_size_local": 7,
    },
    "ModelInfo": {
        "model_id": 1,
        "served_model_name": 2,
        "served_model_aliases": 3,
        "supports_text_input": 20,
        "supports_token_ids_input": 21,
        "supports_lora": 22,
        "supports_multimodal": 23,
        "reasoning_parser": 24,
        "tool_call_parser": 25,
    },
    "KvEventSource": {
        "transport": 1,
        "endpoint": 2,
        "topic": 3,
        "replay_endpoint": 4,
        "data_parallel_rank": 5,
        "encoding": 6,
        "schema_version": 7,
        "buffer_steps": 8,
        "hwm": 9,
        "max_queue_size": 10,
    },
}
"""Of vLLM 0.33, rust/proto/control.proto."""

METHODS = [
    "GetServerInfo",
    "GetModelInfo",
    "Shutdown",
    "Abort",
    "LoadLora",
    "UnloadLora",
    "ListLoras",
    "GetKvEventSources",
    "PauseGeneration",
    "ResumeGeneration",
    "IsPaused",
    "Sleep",
    "WakeUp",
    "IsSleeping",
    "InitWeightTransferEngine",
    "StartWeightUpdate",
    "StartDraftWeightUpdate",
    "UpdateWeights",
    "FinishWeightUpdate",
    "UpdateWeightVersion",
    "GetWeightVersion",
]

NOT_SERVED = {
    "LoadLora": pb.LoadLoraRequest(lora_name="a", source_path="/a"),
    "UnloadLora": pb.UnloadLoraRequest(lora_name="a"),
    "ListLoras": pb.ListLorasRequest(),
    "GetKvEventSources": pb.GetKvEventSourcesRequest(),
    "StartDraftWeightUpdate": pb.StartDraftWeightUpdateRequest(),
}

Code = grpc.StatusCode


@contextlib.asynccontextmanager
async def control(one: Serving) -> AsyncIterator[Any]:
    """A stub, as any client of vLLM's has it."""
    port = one.ready["grpc"].rpartition(":")[2]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield control_pb2_grpc.ControlStub(channel)


async def refused(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str | None, str | None]:
    """Status, and of our own metadata the code and whether it may be tried again."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    trailing: Any = error.value.trailing_metadata()
    about = dict(trailing or ())
    code = about.get("x-watchkeeper-code")
    assert error.value.details()
    if code is not None:
        assert str(error.value.details()).startswith(f"{code}: ")
    return error.value.code(), code, about.get("x-watchkeeper-retryable")


def test_names_and_numbers_are_vllms() -> None:
    service = pb.DESCRIPTOR.services_by_name["Control"]
    assert service.full_name == "vllm.Control"
    assert [method.name for method in service.methods] == METHODS
    messages = pb.DESCRIPTOR.message_types_by_name
    for name, numbers in FIELDS.items():
        assert {field.name: field.number for field in messages[name].fields} == numbers, name
    others = set(messages) - set(FIELDS)
    assert all(not messages[name].fields for name in others - {"GetKvEventSourcesResponse"})
    keep = pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP, clear_cache=False)
    assert keep.SerializeToString() == b"\x08\x03\x10\x00"
    assert pb.SleepRequest(level=0, mode=pb.PAUSE_MODE_WAIT).SerializeToString() == b"\x08\x00\x10\x02"


async def test_scheduling_and_memory(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one, control(one) as stub:
        await stub.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP))
        state = await one.snapshot()
        assert state.paused is not None and state.paused.mode == "keep"
        assert state.cause is not None and (state.cause.issuer or "").startswith("grpc ipv4:127.0.0.1")
        assert (await stub.IsPaused(pb.IsPausedRequest())).paused
        assert (await stub.IsSleeping(pb.IsSleepingRequest())).sleeping  # as vLLM says of a mere pause
        await stub.ResumeGeneration(pb.ResumeGenerationRequest())
        assert not (await stub.IsPaused(pb.IsPausedRequest())).paused
        assert await one.check("readiness") == "SERVING"

        await stub.PauseGeneration(pb.PauseGenerationRequest())
        state = await one.snapshot()
        assert state.paused is not None and state.paused.mode == "abort"  # unspecified is abort
        await stub.Sleep(pb.SleepRequest())
        state = await one.snapshot()
        assert (state.state, state.sleep.level if state.sleep else None) == ("asleep", 1)
        await stub.WakeUp(pb.WakeUpRequest(tags=["weights"]))
        assert (await one.snapshot()).state == "partially_awake"
        await stub.WakeUp(pb.WakeUpRequest())
        assert (await one.snapshot()).state == "serving"
        await stub.Sleep(pb.SleepRequest(level=0, mode=pb.PAUSE_MODE_KEEP))
        assert (await one.snapshot()).state == "paused"


async def test_new_weights(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one, control(one) as stub:
        init = json.dumps({"master_port": 1}).encode()
        await stub.InitWeightTransferEngine(pb.InitWeightTransferEngineRequest(init_info_json=init))
        start = stub.StartWeightUpdate(
            pb.StartWeightUpdateRequest(), metadata=(("x-watchkeeper-epoch", "3"),)
        )
        await start
        session = dict(await start.trailing_metadata())["x-watchkeeper-session"]
        chunk = pb.UpdateWeightsRequest(update_info_json=b'{"names": ["a"]}')
        assert await refused(stub.UpdateWeights(chunk)) == (
            Code.FAILED_PRECONDITION,
            "session_mismatch",
            "false",
        )
        mine = (("x-watchkeeper-session", session),)
        await stub.UpdateWeights(chunk, metadata=mine)
        finish = pb.FinishWeightUpdateRequest(weight_version="v3")
        await stub.FinishWeightUpdate(finish, metadata=mine)
        assert (await stub.GetWeightVersion(pb.GetWeightVersionRequest())).weight_version == "v3"
        state = await one.snapshot()
        assert (state.ready, state.weights.version, state.weights.epoch) == (True, "v3", 3)

        await stub.UpdateWeightVersion(pb.UpdateWeightVersionRequest(weight_version="v4"))
        assert (await stub.GetWeightVersion(pb.GetWeightVersionRequest())).weight_version == "v4"
        assert (await one.snapshot()).ready


async def test_what_it_is(tmp_path: Path, nats_url: str) -> None:
    engine = ("--max-model-len", "1000")
    async with serving(tmp_path, nats_url, engine=engine) as one, control(one) as stub:
        info = await stub.GetServerInfo(pb.GetServerInfoRequest())
        state = await one.snapshot()
        assert state.engine is not None and info.engine_version == state.engine.version
        assert (info.api_version, info.instance_id, info.max_model_len) == ("vllm", "one", 1000)
        assert (info.parallelism.tensor_parallel_size, info.parallelism.world_size) == (1, 1)
        can = info.rl_capabilities
        assert (can.weight_transfer_enabled, can.weight_transfer_backend) == (True, "sim")
        assert (can.sleep_mode_enabled, can.draft_weight_updates_enabled) == (True, False)
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.model_id, model.served_model_name) == ("m", "m")
        assert model.supports_text_input and not model.supports_lora


async def test_errors_are_proper_status_codes(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one, control(one) as stub:
        wrong = (Code.INVALID_ARGUMENT, "invalid_argument", "false")
        assert await refused(stub.Sleep(pb.SleepRequest(level=7))) == wrong
        odd: Any = 9
        assert await refused(stub.PauseGeneration(pb.PauseGenerationRequest(mode=odd))) == wrong
        assert await refused(stub.WakeUp(pb.WakeUpRequest(tags=["memory"]))) == wrong
        nameless = pb.UpdateWeightVersionRequest()
        assert await refused(stub.UpdateWeightVersion(nameless)) == wrong
        for body in (b"", b"{", b"[1]", b"7"):
            chunk = pb.InitWeightTransferEngineRequest(init_info_json=body)
            assert (await refused(stub.InitWeightTransferEngine(chunk)))[0] is Code.INVALID_ARGUMENT
        resume = pb.ResumeGenerationRequest()
        metadata = (("x-watchkeeper-epoch", "new"),)
        assert (await refused(stub.ResumeGeneration(resume, metadata=metadata)))[0] is Code.INVALID_ARGUMENT
        metadata = (("x-watchkeeper-deadline", str(time.time() - 1)),)
        late = (Code.DEADLINE_EXCEEDED, "deadline_exceeded", "false")
        assert await refused(stub.ResumeGeneration(resume, metadata=metadata)) == late

        empty = stub.FinishWeightUpdate(pb.FinishWeightUpdateRequest())
        assert await refused(empty) == (Code.FAILED_PRECONDITION, "invalid_state", "false")
        await one.simulate(call="pause", outcome="error")
        pause = stub.PauseGeneration(pb.PauseGenerationRequest())
        assert await refused(pause) == (Code.INTERNAL, "engine_error", "false")
        for name, request in NOT_SERVED.items():
            assert await refused(getattr(stub, name)(request)) == (Code.UNIMPLEMENTED, None, None), name


async def test_without_an_engine_it_is_unavailable(tmp_path: Path, nats_url: str) -> None:
    load = ("--load-s", "60")
    async with serving(tmp_path, nats_url, engine=load, state=None) as one, control(one) as stub:
        for call in (
            stub.PauseGeneration(pb.PauseGenerationRequest()),
            stub.IsSleeping(pb.IsSleepingRequest()),
            stub.GetServerInfo(pb.GetServerInfoRequest()),
            stub.Abort(pb.AbortRequest(request_ids=["x"])),
        ):
            assert await refused(call) == (Code.UNAVAILABLE, "not_ready", "true")


async def test_a_command_does_not_start_after_its_callers_deadline(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one, control(one) as stub:
        await one.simulate(call="pause", outcome="delay", delay_s=1.0)
        pausing = asyncio.create_task(one.instance.pause(mode="wait"))
        await eventually(lambda: one.states[-1] == "paused")
        resume = stub.ResumeGeneration(pb.ResumeGenerationRequest(), timeout=0.2)
        assert (await refused(resume))[0] is Code.DEADLINE_EXCEEDED
        assert (await pausing).ok
        assert not (await one.instance.pause(mode="wait")).changed  # in order: after the resume
        assert (await one.snapshot()).state == "paused"


async def test_requests_end_by_their_ids_only(tmp_path: Path, nats_url: str) -> None:
    slow = ("--token-interval-ms", "20")
    async with (
        serving(tmp_path, nats_url, engine=slow) as one,
        control(one) as stub,
        one.complete(10_000) as response,
    ):
        head = (await response.content.readline()).removeprefix(b"data: ")
        await stub.Abort(pb.AbortRequest())
        await stub.Abort(pb.AbortRequest(request_ids=["nobody"]))
        assert b"data: " in await response.content.readline() + await response.content.readline()
        await stub.Abort(pb.AbortRequest(request_ids=[json.loads(head)["id"]]))
        assert '"abort"' in await response.text()


async def test_shutdown_is_accepted_and_then_done(tmp_path: Path, nats_url: str) -> None:
    async with serving(tmp_path, nats_url) as one, control(one) as stub:
        await stub.Shutdown(pb.ShutdownRequest())
        assert await one.end() == 0
        assert one.states[-1] == "stopped"


async def test_reflection_names_what_is_served(tmp_path: Path, nats_url: str) -> None:
    health, mirror = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
    async with serving(tmp_path, nats_url) as one:
        assert await _services(one) == {health, mirror, "vllm.Control"}


async def test_outside_of_loopback_it_is_served_only_with_a_token(tmp_path: Path, nats_url: str) -> None:
    anywhere = ("--grpc-address", "0.0.0.0:0")
    pause = pb.PauseGenerationRequest()
    async with serving(tmp_path, nats_url, *anywhere) as one, control(one) as stub:
        assert (await refused(stub.PauseGeneration(pause)))[0] is Code.UNIMPLEMENTED
        assert "vllm.Control" not in await _services(one)
        assert await one.check("readiness") == "SERVING"

    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    guarded = (*anywhere, "--admin-token-file", str(secret))
    async with serving(tmp_path, nats_url, *guarded) as one, control(one) as stub:
        for metadata in ((), (("authorization", "Bearer other"),)):
            call = stub.PauseGeneration(pause, metadata=metadata)
            assert (await refused(call))[0] is Code.UNAUTHENTICATED
        adapters = stub.ListLoras(pb.ListLorasRequest())
        assert (await refused(adapters))[0] is Code.UNAUTHENTICATED
        await stub.PauseGeneration(pause, metadata=(("authorization", "Bearer s3cret"),))
        assert (await one.snapshot()).state == "paused"
        assert await one.check("readiness") == "NOT_SERVING"  # probes need none


async def _services(one: Serving) -> set[str]:
    port = one.ready["grpc"].rpartition(":")[2]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        async for answer in call:
            return {service.name for service in answer.list_services_response.service}
    raise AssertionError("no answer")
