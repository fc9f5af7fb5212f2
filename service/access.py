"""Who may give commands over HTTP and gRPC."""

import base64
import binascii
import hmac
from dataclasses import dataclass


@dataclass(frozen=True)
class Access:
    """Who bears the token; where there is none, whoever reaches a loopback address.

    Attributes:
        token: without one nobody is let in from outside.
        loopback: the address that is listened on is on loopback.
    """

    token: str | None
    loopback: bool

    @property
    def possible(self) -> bool:
        """Whether anybody can be let in at all."""
        return self.loopback or self.token is not None

    @property
    def demand(self) -> str:
        """What to tell somebody who is not let in."""
        if self.token is None:
            return "only on a loopback address may this be done without --admin-token-file"
        return "a bearer token is needed"

    def allows(self, authorization: str) -> bool:
        """Judge the value of an `Authorization` header.

        `Bearer TOKEN`, or `Basic` with the token as the password: that is what a client sends which
        takes nothing but a URL (`http://x:TOKEN@host:9090`), such as vLLM's `HTTPVLLMWeightSyncClient`.
        """
        if self.token is None:
            return self.loopback
        scheme, _, given = authorization.strip().partition(" ")
        match scheme.lower():
            case "bearer":
                secret = given.strip().encode(errors="surrogateescape")
            case "basic":
                secret = _password(given)
            case _:
                return False
        return hmac.compare_digest(secret, self.token.encode())


def _password(credentials: str) -> bytes:
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""
