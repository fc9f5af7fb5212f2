"""Addresses that are listened on."""

import errno
import os
import socket

from service.options import Address, SettingsError


class CannotListen(OSError, SettingsError):
    """The address cannot be listened on: it is taken, not ours, not allowed or not resolvable."""

    def __init__(self, number: int, address: Address, reason: str) -> None:
        super().__init__(number, f"cannot listen on {address}: {reason}")
        self.address = address

    def __str__(self) -> str:
        return str(self.strerror)


def bind(address: Address) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        CannotListen: the message is one clear line.
    """
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise CannotListen(errno.EADDRNOTAVAIL, address, f"no such host ({error.strerror})") from error
    family, kind, protocol, _, where = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        try:
            # For ourselves alone: two that allow the address's reuse may both have it until one listens.
            bound.bind(where)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Perhaps only by connections of a life before this one, which take a minute to be forgotten.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(where)
    except OSError as error:
        bound.close()
        number = error.errno or errno.EADDRNOTAVAIL
        raise CannotListen(number, address, os.strerror(number).lower()) from error
    return bound


def listen(bound: socket.socket, backlog: int = 2048) -> None:
    """Listen on what `bind` gave.

    From here on, and not before, the address may be reused: connections inherit it, and the last of
    them, which the kernel remembers for a minute, do not keep out the life after this one.
    """
    bound.listen(backlog)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
