"""Addresses that are listened on."""

import socket

import pytest

from service.listening import CannotListen, bind, listen
from service.options import Address


def test_an_address_is_free_again_as_soon_as_its_listener_has_ended() -> None:
    """The side that closes first keeps the connection for a minute; a restart must not wait for that."""
    first = bind(Address("127.0.0.1", 0))
    listen(first)
    address = Address("127.0.0.1", first.getsockname()[1])
    with socket.create_connection(("127.0.0.1", address.port)) as client:
        accepted, _ = first.accept()
        accepted.close()
        assert client.recv(1) == b""
    first.close()
    for _ in range(2):
        again = bind(address)
        listen(again)
        again.close()


def test_an_address_is_for_one_alone_before_it_listens_and_after() -> None:
    first = bind(Address("127.0.0.1", 0))
    address = Address("127.0.0.1", first.getsockname()[1])
    with pytest.raises(CannotListen, match="address already in use"):
        bind(address)
    listen(first)
    with pytest.raises(CannotListen, match="address already in use"):
        bind(address)
    first.close()
