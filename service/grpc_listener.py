"""The gRPC servers of this product; nothing else creates one."""

from collections.abc import Sequence

from grpc import aio

_UNLIMITED = -1

_OPTIONS: tuple[tuple[str, int], ...] = (
    # gRPC shares a port silently by default; a taken port must be an error.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _UNLIMITED),
    ("grpc.max_send_message_length", _UNLIMITED),
    # Clients that ping often to find a dead peer are not sent away (as vLLM's own gRPC launcher).
    ("grpc.http2.max_ping_strikes", 0),
)


def make_server(options: Sequence[tuple[str, int]] = ()) -> aio.Server:
    """A server on the running loop, without a port and not started.

    Args:
        options: gRPC channel arguments; they win over ours.
    """
    ours = dict(_OPTIONS)
    ours.update(options)
    return aio.server(options=tuple(ours.items()))
