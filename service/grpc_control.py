"""`vllm.Control` on the gRPC port of the instance, and reflection.

Names and numbers are vLLM's (service/engine/control.proto); the dispatcher is that of the bus.
Metadata `x-watchkeeper-id`, `-issuer`, `-epoch`, `-session` and `-deadline` carry what surrounds the
arguments; a call's own deadline is the command's, if none is named: it does not start after it. The
trailing metadata has `x-watchkeeper-session` of a session that was opened, and
`x-watchkeeper-code` and `-retryable` of an error.
"""

import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from bus.codec import BadMessage, decode_json
from bus.messages import Command, ErrorCode, Reply, Verb
from service.access import Access
from service.engine.rpc import control_pb2, control_pb2_grpc
from service.front_desk import PREFIX, CommandRefused, FrontDesk, make_command

API_VERSION = "vllm"
"""What vLLM 0.33 answers."""

MAX_DETAILS_BYTES = 2_000
"""gRPC drops a call whose trailers exceed 8 KiB, and one byte of text may take three there."""

_MODES: dict[int, str] = {
    control_pb2.PAUSE_MODE_UNSPECIFIED: "abort",
    control_pb2.PAUSE_MODE_ABORT: "abort",
    control_pb2.PAUSE_MODE_WAIT: "wait",
    control_pb2.PAUSE_MODE_KEEP: "keep",
}

T = TypeVar("T")
Context = aio.ServicerContext[Any, Any]


def _not_served(reason: str) -> Callable[[Any, Any, Context], Coroutine[Any, Any, Any]]:
    """An RPC that this instance cannot answer."""

    async def method(self: "ControlService", request: Any, context: Context) -> Any:
        await self.desk(context)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, reason)

    return method


_NO_ADAPTERS = "adapters are not managed: an engine loads them with vLLM's own --lora-modules"


class ControlService(control_pb2_grpc.ControlServicer):
    """The servicer; it is registered before there is an instance, and told of it by `open`."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._desk: FrontDesk | None = None

    def open(self, desk: FrontDesk) -> None:
        self._desk = desk

    async def desk(self, context: Context) -> FrontDesk:
        """Let the caller in, or end the call."""
        if not self._access.allows(_metadata(context).get("authorization", "")):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a bearer token is needed")
        if self._desk is None:
            await _refuse(context, CommandRefused.because(ErrorCode.NOT_READY, "the instance starts"))
        return self._desk

    # --- discovery --------------------------------------------------------------------------------

    async def GetServerInfo(
        self, request: control_pb2.GetServerInfoRequest, context: Context
    ) -> control_pb2.ServerInfo:
        desk = await self.desk(context)
        info = await _told(context, desk.engine_info)
        return control_pb2.ServerInfo(
            engine_version=info.version,
            api_version=API_VERSION,
            instance_id=desk.instance,
            parallelism=control_pb2.ParallelismInfo(
                tensor_parallel_size=info.tensor_parallel_size,
                pipeline_parallel_size=info.pipeline_parallel_size,
                data_parallel_size=info.data_parallel_size,
                world_size=info.world_size,
            ),
            max_model_len=info.max_model_len,
            rl_capabilities=control_pb2.RlCapabilities(
                weight_transfer_enabled=info.weight_transfer,
                weight_transfer_backend=info.weight_transfer_backend,
                sleep_mode_enabled=info.sleep_mode,
            ),
        )

    async def GetModelInfo(
        self, request: control_pb2.GetModelInfoRequest, context: Context
    ) -> control_pb2.ModelInfo:
        info = await _told(context, (await self.desk(context)).engine_info)
        return control_pb2.ModelInfo(
            model_id=info.model,
            served_model_name=info.model,
            supports_text_input=True,
            supports_token_ids_input=True,
        )

    GetKvEventSources: Any = _not_served("sources of KV events are not known here")

    # --- the instance and its requests --------------------------------------------------------------

    async def Shutdown(
        self, request: control_pb2.ShutdownRequest, context: Context
    ) -> control_pb2.ShutdownResponse:
        await self._command(context, Verb.SHUTDOWN)
        return control_pb2.ShutdownResponse()

    async def Abort(self, request: control_pb2.AbortRequest, context: Context) -> control_pb2.AbortResponse:
        """As in vLLM nothing is aborted where no id is given."""
        desk = await self.desk(context)
        if request.request_ids:
            await _done(context, desk.abort_requests(list(request.request_ids)))
        return control_pb2.AbortResponse()

    LoadLora: Any = _not_served(_NO_ADAPTERS)
    UnloadLora: Any = _not_served(_NO_ADAPTERS)
    ListLoras: Any = _not_served(_NO_ADAPTERS)

    # --- scheduling and memory ----------------------------------------------------------------------

    async def PauseGeneration(
        self, request: control_pb2.PauseGenerationRequest, context: Context
    ) -> control_pb2.PauseGenerationResponse:
        args: dict[str, Any] = {"mode": await _mode(request.mode, context)}
        if request.HasField("clear_cache"):
            args["clear_cache"] = request.clear_cache
        await self._command(context, Verb.PAUSE, args)
        return control_pb2.PauseGenerationResponse()

    async def ResumeGeneration(
        self, request: control_pb2.ResumeGenerationRequest, context: Context
    ) -> control_pb2.ResumeGenerationResponse:
        await self._command(context, Verb.RESUME)
        return control_pb2.ResumeGenerationResponse()

    async def IsPaused(
        self, request: control_pb2.IsPausedRequest, context: Context
    ) -> control_pb2.IsPausedResponse:
        paused = await _told(context, (await self.desk(context)).is_stopped)
        return control_pb2.IsPausedResponse(paused=paused)

    async def Sleep(self, request: control_pb2.SleepRequest, context: Context) -> control_pb2.SleepResponse:
        args: dict[str, Any] = {"mode": await _mode(request.mode, context)}
        if request.HasField("level"):
            args["level"] = request.level
        await self._command(context, Verb.SLEEP, args)
        return control_pb2.SleepResponse()

    async def WakeUp(
        self, request: control_pb2.WakeUpRequest, context: Context
    ) -> control_pb2.WakeUpResponse:
        await self._command(context, Verb.WAKE_UP, {"tags": list(request.tags)} if request.tags else {})
        return control_pb2.WakeUpResponse()

    async def IsSleeping(
        self, request: control_pb2.IsSleepingRequest, context: Context
    ) -> control_pb2.IsSleepingResponse:
        sleeping = await _told(context, (await self.desk(context)).is_stopped)
        return control_pb2.IsSleepingResponse(sleeping=sleeping)

    # --- weights ------------------------------------------------------------------------------------

    async def InitWeightTransferEngine(
        self, request: control_pb2.InitWeightTransferEngineRequest, context: Context
    ) -> control_pb2.InitWeightTransferEngineResponse:
        await self.desk(context)
        args = {"init_info": await _json(request.init_info_json, "init_info_json", context)}
        await self._command(context, Verb.INIT_WEIGHT_TRANSFER, args)
        return control_pb2.InitWeightTransferEngineResponse()

    async def StartWeightUpdate(
        self, request: control_pb2.StartWeightUpdateRequest, context: Context
    ) -> control_pb2.StartWeightUpdateResponse:
        reply = await self._command(context, Verb.START_WEIGHT_UPDATE)
        if session := (reply.result or {}).get("session"):
            context.set_trailing_metadata(((f"{PREFIX}session", session),))
        return control_pb2.StartWeightUpdateResponse()

    StartDraftWeightUpdate: Any = _not_served(
        "weights of a draft model are not followed: only those of the model itself"
    )

    async def UpdateWeights(
        self, request: control_pb2.UpdateWeightsRequest, context: Context
    ) -> control_pb2.UpdateWeightsResponse:
        await self.desk(context)
        args = {"update_info": await _json(request.update_info_json, "update_info_json", context)}
        await self._command(context, Verb.UPDATE_WEIGHTS, args)
        return control_pb2.UpdateWeightsResponse()

    async def FinishWeightUpdate(
        self, request: control_pb2.FinishWeightUpdateRequest, context: Context
    ) -> control_pb2.FinishWeightUpdateResponse:
        args = {"weight_version": request.weight_version} if request.HasField("weight_version") else {}
        await self._command(context, Verb.FINISH_WEIGHT_UPDATE, args)
        return control_pb2.FinishWeightUpdateResponse()

    async def UpdateWeightVersion(
        self, request: control_pb2.UpdateWeightVersionRequest, context: Context
    ) -> control_pb2.UpdateWeightVersionResponse:
        desk = await self.desk(context)
        command = await _command(context, {})
        await _done(context, desk.name_version(command, request.weight_version))
        return control_pb2.UpdateWeightVersionResponse()

    async def GetWeightVersion(
        self, request: control_pb2.GetWeightVersionRequest, context: Context
    ) -> control_pb2.GetWeightVersionResponse:
        version = await _told(context, (await self.desk(context)).weight_version)
        return control_pb2.GetWeightVersionResponse(weight_version=version)

    async def _command(self, context: Context, verb: Verb, args: dict[str, Any] | None = None) -> Reply:
        desk = await self.desk(context)
        return await _done(context, desk.command(verb, await _command(context, args or {})))


def add_services(server: aio.Server, control: ControlService | None) -> None:
    """Register reflection, and the control service if anybody may use it; before the port opens."""
    names = [health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
    if control is not None:
        control_pb2_grpc.add_ControlServicer_to_server(control, server)
        names.append(control_pb2.DESCRIPTOR.services_by_name["Control"].full_name)
    reflection.enable_server_reflection(names, server)


async def _done(context: Context, work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except CommandRefused as refusal:
        await _refuse(context, refusal)


async def _told(context: Context, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except CommandRefused as refusal:
        await _refuse(context, refusal)


async def _refuse(context: Context, refusal: CommandRefused) -> NoReturn:
    error = refusal.error
    details = f"{error.code}: {error.message}".encode()[:MAX_DETAILS_BYTES].decode(errors="ignore")
    about = ((f"{PREFIX}code", error.code), (f"{PREFIX}retryable", str(error.retryable).lower()))
    await context.abort(grpc.StatusCode[refusal.code.grpc_status], details, about)


async def _command(context: Context, args: dict[str, Any]) -> Command:
    fields = _metadata(context)
    if f"{PREFIX}deadline" not in fields and (left_s := context.time_remaining()) is not None:
        fields[f"{PREFIX}deadline"] = str(time.time() + left_s)
    return await _told(context, lambda: make_command(fields.get, f"grpc {context.peer()}", args))


def _metadata(context: Context) -> dict[str, str]:
    given = context.invocation_metadata() or ()
    return {key: value for key, value in given if isinstance(value, str)}


async def _mode(number: int, context: Context) -> str:
    if number not in _MODES:
        text = f"mode: there is no pause mode {number}"
        await _refuse(context, CommandRefused.because(ErrorCode.INVALID_ARGUMENT, text))
    return _MODES[number]


async def _json(data: bytes, name: str, context: Context) -> Any:
    try:
        return decode_json(data)
    except BadMessage as error:
        await _refuse(context, CommandRefused.because(ErrorCode.INVALID_MESSAGE, f"{name}: {error}"))
