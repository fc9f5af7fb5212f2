"""What trainers use today, unchanged, against the real thing: vLLM's HTTP client, routes and gRPC service."""

import asyncio
import sys
from pathlib import Path

import aiohttp
import grpc

from service.engine.rpc import control_pb2 as pb
from service.engine.rpc import control_pb2_grpc
from tests.integration.served import ALL_UP, LONG, NOT_READY, REAL, Served

pytestmark = REAL

CLIENT = """
import sys
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
client = HTTPVLLMWeightSyncClient(sys.argv[1])
client.init_weight_transfer_engine({})
client.start_weight_update()
client.update_weights({"path": sys.argv[2]})
client.finish_weight_update(weight_version=sys.argv[3])
client.shutdown_weight_transfer_engine()
"""


async def test_vllms_own_weight_sync_client(served: Served, models: Path, answers_of_b: list[str]) -> None:
    admin = (await served.state()).addresses.admin
    for folder, answers in (("b", answers_of_b), ("a", served.answers)):
        arguments = (f"http://{admin}", str(models / folder), f"by http: {folder}")
        script = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, *arguments, stderr=asyncio.subprocess.PIPE
        )
        _, error = await script.communicate()
        assert script.returncode == 0, error.decode()[-2000:]
        assert await served.complete_all() == answers
        assert set(await served.versions()) == {f"by http: {folder}"}
        assert await served.health() == ALL_UP


async def test_a_script_of_http_requests(served: Served) -> None:
    admin = (await served.state()).addresses.admin
    async with aiohttp.ClientSession(f"http://{admin}") as http:

        async def post(path: str) -> object:
            async with http.post(path) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        async def get(path: str) -> object:
            async with http.get(path) as response:
                return await response.json()

        assert await get("/get_world_size") == {"world_size": 1}
        assert await post("/pause?mode=keep") == {"status": "paused"}
        assert await get("/is_paused") == {"is_paused": True}
        assert await post("/resume") == {"status": "resumed"}
        assert await post("/sleep?level=1") == {"status": "sleeping", "level": 1}
        assert await get("/is_sleeping") == {"is_sleeping": True}
        assert await served.health() == NOT_READY
        assert await post("/wake_up?tags=weights") == {"status": "sleeping", "tags": ["weights"]}
        assert await post("/wake_up?tags=kv_cache") == {"status": "awake", "tags": ["kv_cache"]}
        assert await get("/is_sleeping") == {"is_sleeping": False}
    assert await served.health() == ALL_UP
    assert await served.complete_all() == served.answers


async def test_the_control_service_of_vllm(served: Served, models: Path, answers_of_b: list[str]) -> None:
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        info = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.parallelism.world_size, info.rl_capabilities.weight_transfer_backend) == (1, "file")
        for folder, answers in (("b", answers_of_b), ("a", served.answers)):
            await stub.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP))
            await stub.StartWeightUpdate(pb.StartWeightUpdateRequest())
            chunk = f'{{"path": "{models / folder}"}}'.encode()
            await stub.UpdateWeights(pb.UpdateWeightsRequest(update_info_json=chunk))
            await stub.FinishWeightUpdate(pb.FinishWeightUpdateRequest(weight_version=folder))
            assert (await stub.IsPaused(pb.IsPausedRequest())).paused  # back where it was
            await stub.ResumeGeneration(pb.ResumeGenerationRequest())
            assert await served.complete_all() == answers

        # A name alone changes nothing but the name.
        await stub.UpdateWeightVersion(pb.UpdateWeightVersionRequest(weight_version="a, renamed"))
        version = await stub.GetWeightVersion(pb.GetWeightVersionRequest())
        assert version.weight_version == "a, renamed"
        assert set(await served.versions()) == {"a, renamed"}
        assert await served.complete_all() == served.answers
    assert await served.health() == ALL_UP


async def test_a_request_is_ended_by_the_id_its_client_knows(served: Served) -> None:
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        await channel.channel_ready()  # what remains to be done is shorter than the answer
        stub = control_pb2_grpc.ControlStub(channel)
        answer = await served.stream(max_tokens=LONG, request_id="drop-in").reaches(3)
        await stub.Abort(pb.AbortRequest(request_ids=["cmpl-drop-in"]))
    await answer.end()
    assert answer.finish_reason == "abort"
    assert await served.health() == ALL_UP
