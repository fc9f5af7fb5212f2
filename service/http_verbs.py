"""vLLM's control routes, with vLLM's parameters and answers.

They are those of vLLM 0.32 (entrypoints/rl/online/api_router.py and entrypoints/serve/dev/sleep).
Arguments may stand in the query or in a JSON body, ours beside vLLM's; the headers
`X-Watchkeeper-Id`, `-Issuer`, `-Epoch`, `-Session` and `-Deadline` carry what surrounds them.
`POST /start_weight_update` answers with the session in `X-Watchkeeper-Session`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from bus.codec import BadMessage, decode_json
from bus.messages import ErrorCode, Reply, StateName, Verb
from service.front_desk import CommandRefused, FrontDesk, NotServed, make_command

SESSION_HEADER = "X-Watchkeeper-Session"

Json = dict[str, Any]


def _number(kind: type[int] | type[float]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            return text  # and the arguments are refused with the name of this one

    return read


def _flag(text: str) -> Any:
    return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)


_READ: dict[str, Callable[[str], Any]] = {
    "level": _number(int),
    "lease_s": _number(float),
    "clear_cache": _flag,
    "allow_empty": _flag,
}
"""How a text in the query becomes an argument; others are texts."""


@dataclass(frozen=True)
class _Route:
    """A route that is a verb of ours.

    Attributes:
        query: arguments that may stand in the query.
        answer: what vLLM answers, from the arguments and the reply.
    """

    verb: Verb
    query: tuple[str, ...]
    answer: Callable[[Json, Reply], Json]


def _says(**answer: Any) -> Callable[[Json, Reply], Json]:
    return lambda args, reply: answer


def _woken(args: Json, reply: Reply) -> Json:
    asleep = reply.state is not None and reply.state.state in (StateName.ASLEEP, StateName.PARTIALLY_AWAKE)
    return {"status": "sleeping" if asleep else "awake", "tags": args.get("tags")}


_ROUTES: Mapping[str, _Route] = {
    "/pause": _Route(Verb.PAUSE, ("mode", "clear_cache", "lease_s"), _says(status="paused")),
    "/resume": _Route(Verb.RESUME, (), _says(status="resumed")),
    "/sleep": _Route(
        Verb.SLEEP,
        ("level", "mode"),
        lambda args, reply: {"status": "sleeping", "level": args.get("level", 1)},
    ),
    "/wake_up": _Route(Verb.WAKE_UP, ("tags",), _woken),
    "/init_weight_transfer_engine": _Route(
        Verb.INIT_WEIGHT_TRANSFER, (), _says(message="Weight transfer initialized")
    ),
    "/start_weight_update": _Route(
        Verb.START_WEIGHT_UPDATE, ("pause_mode", "lease_s"), _says(message="Weight update started")
    ),
    "/update_weights": _Route(Verb.UPDATE_WEIGHTS, (), _says(message="Weights updated")),
    "/finish_weight_update": _Route(
        Verb.FINISH_WEIGHT_UPDATE,
        ("weight_version", "cache", "allow_empty"),
        _says(message="Weight update finished"),
    ),
}


class HttpVerbs:
    """The routes of one instance."""

    def __init__(self, desk: FrontDesk) -> None:
        self._desk = desk

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.post(path, self._verb(route)) for path, route in _ROUTES.items()),
            web.post("/start_draft_weight_update", self._start_draft),
            web.post("/update_weight_version", self._update_version),
            web.post("/shutdown_weight_transfer_engine", self._shutdown_transfer),
            web.post("/abort_requests", self._abort_requests),
            web.get("/is_paused", self._is_paused),
            web.get("/is_sleeping", self._is_sleeping),
            web.get("/weight_info", self._weight_info),
            web.get("/get_world_size", self._world_size),
        ]

    def _verb(self, route: _Route) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.Response:
            args = await _body(request)
            for name in route.query:
                if name not in request.query:
                    continue
                if name == "tags":
                    args[name] = request.query.getall(name)
                else:
                    args[name] = _READ.get(name, str)(request.query[name])
            command = make_command(request.headers.get, _issuer(request), args)
            reply = await self._desk.command(route.verb, command)
            session = (reply.result or {}).get("session")
            headers = {SESSION_HEADER: session} if session else None
            return web.json_response(route.answer(args, reply), headers=headers)

        return handle

    async def _start_draft(self, request: web.Request) -> web.Response:
        raise NotServed("weights of a draft model are not followed: only those of the model itself")

    async def _update_version(self, request: web.Request) -> web.Response:
        version = (await _body(request)).get("new_version")
        if not isinstance(version, str):
            raise CommandRefused.because(ErrorCode.INVALID_ARGUMENT, "new_version: a string is needed")
        await self._desk.name_version(make_command(request.headers.get, _issuer(request), {}), version)
        return web.json_response({"success": True, "new_version": version})

    async def _shutdown_transfer(self, request: web.Request) -> web.Response:
        await self._desk.shutdown_weight_transfer()
        return web.json_response({"message": "Weight transfer shut down"})

    async def _abort_requests(self, request: web.Request) -> web.Response:
        ids = (await _body(request)).get("request_ids") or []
        if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
            raise CommandRefused.because(
                ErrorCode.INVALID_ARGUMENT, "request_ids: a list of strings is needed"
            )
        return web.json_response({"status": "aborted", "aborted": await self._desk.abort_requests(ids)})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._desk.is_stopped()})

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self._desk.is_stopped()})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._desk.weight_version()})

    async def _world_size(self, request: web.Request) -> web.Response:
        include_dp = _flag(request.query.get("include_dp", "true"))
        if not isinstance(include_dp, bool):
            raise CommandRefused.because(ErrorCode.INVALID_ARGUMENT, "include_dp: true or false is needed")
        return web.json_response({"world_size": self._desk.world_size(include_dp)})


async def _body(request: web.Request) -> Json:
    data = await request.read()
    if not data.strip():
        return {}
    try:
        body = decode_json(data)
    except BadMessage as error:
        raise CommandRefused.because(ErrorCode.INVALID_MESSAGE, str(error)) from None
    if not isinstance(body, dict):
        raise CommandRefused.because(ErrorCode.INVALID_MESSAGE, "the body is not a JSON object")
    return body


def _issuer(request: web.Request) -> str:
    return f"http {request.remote}"
