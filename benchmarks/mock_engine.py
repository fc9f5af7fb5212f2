"""An engine that costs next to nothing, so that what is before it can be measured.

    python -m benchmarks.mock_engine

Listens on a free port of 127.0.0.1 and prints it. Answers completions as vLLM does, its part in prefill and
decode too: the word `t{i}` for token i, after 5 ms for a prompt and 2 ms for each token.
"""

import asyncio
import json
from typing import Any, cast

import msgspec
import uvloop

PREFILL_S = 0.005
TOKEN_S = 0.002

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids")


class Engine(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._timers: set[asyncio.TimerHandle] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none, and acts as one

    def connection_lost(self, error: Exception | None) -> None:
        for timer in self._timers:
            timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        lower = head.lower()
        at = lower.find(b"content-length:")
        length = int(lower[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(rest) < length:
            return
        self._received = b""  # nobody sends the next request before the answer
        if head.startswith(b"POST /v1/completions"):
            self._complete(msgspec.json.decode(rest))
        elif head.startswith(b"GET /v1/models"):
            card = {"id": "m", "object": "model", "created": 0, "owned_by": "mock", "max_model_len": 4096}
            self._answer({"object": "list", "data": [card]})
        else:
            self._answer({"status": "ok"})

    def _complete(self, body: dict[str, Any]) -> None:
        tokens = int(body.get("max_tokens") or 16)
        kv = body.get("kv_transfer_params") or {}
        fetched = kv.get("do_remote_prefill") and all(kv.get(name) for name in _NEEDED)
        prefill_s = 0.0 if fetched else PREFILL_S
        if body.get("stream"):
            self._later(prefill_s + TOKEN_S, self._begin, tokens)
            return
        choice = {"index": 0, "text": _text(tokens), "logprobs": None, "finish_reason": "length"}
        usage = {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens}
        answer = {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        if kv.get("do_remote_decode"):
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
                "remote_engine_id": "b2b8f8f0-0000-4000-8000-000000000000",
                "remote_request_id": "cmpl-1-0-12345678",
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
                "tp_size": 1,
            }
        self._later(prefill_s + tokens * TOKEN_S, self._answer, answer)

    def _begin(self, tokens: int) -> None:
        self._transport.write(_STREAM_HEAD)
        self._token(0, tokens)

    def _token(self, index: int, tokens: int) -> None:
        finish = b'"length"' if index + 1 == tokens else b"null"
        event = (
            b'data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"m","choices":[{"index":0,'
            b'"text":"%st%d","logprobs":null,"finish_reason":%s}]}\n\n'
            % (b" " if index else b"", index, finish)
        )
        chunk = b"%x\r\n%s\r\n" % (len(event), event)
        if index + 1 == tokens:
            self._transport.write(chunk + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            return
        self._transport.write(chunk)
        self._later(TOKEN_S, self._token, index + 1, tokens)

    def _answer(self, body: dict[str, Any]) -> None:
        encoded = msgspec.json.encode(body)
        self._transport.write(_HEAD % len(encoded) + encoded)

    def _later(self, delay_s: float, what: Any, *arguments: Any) -> None:
        def run() -> None:
            self._timers.discard(timer)
            what(*arguments)

        timer = self._loop.call_later(delay_s, run)
        self._timers.add(timer)


def _text(tokens: int) -> str:
    return " ".join(f"t{index}" for index in range(tokens))


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=1024)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
