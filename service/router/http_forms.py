"""What requests and answers look like on their way through: headers, and errors of our own."""

from collections.abc import Iterable, Mapping

import msgspec
from aiohttp import web
from multidict import CIMultiDict

HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "trailers",
    "transfer-encoding",
    "upgrade",
}
# The body is passed on unpacked, and what comes back has to be readable here.
NOT_UPSTREAM = HOP_BY_HOP | {
    "accept-encoding",
    "content-encoding",
    "content-length",
    "expect",
    "host",
    "x-request-id",
}
NOT_DOWNSTREAM = HOP_BY_HOP | {"content-length", "date", "server", "x-request-id"}


def upstream_headers(given: Mapping[str, str], key: str | None) -> CIMultiDict[str]:
    """The client's headers as an instance may see them.

    Args:
        key: the API key of instances, for where the client sends none.
    """
    headers = _without(given, NOT_UPSTREAM)
    if key is not None and "Authorization" not in headers:
        headers["Authorization"] = f"Bearer {key}"
    return headers


def downstream_headers(given: Mapping[str, str]) -> CIMultiDict[str]:
    return _without(given, NOT_DOWNSTREAM)


def _without(given: Mapping[str, str], names: Iterable[str]) -> CIMultiDict[str]:
    headers = CIMultiDict(given)
    for name in names:
        headers.popall(name, None)
    return headers


def error_response(status: int, code: str, message: str) -> web.Response:
    """An error of our own, in the form in which OpenAI's clients read it."""
    retryable = status in (429, 502, 503, 504)
    error = {"code": code, "type": code, "retryable": retryable, "message": message}
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    body = msgspec.json.encode({"error": error})
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
