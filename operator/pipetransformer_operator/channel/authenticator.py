"""Identifies the sender of a request: on a cluster the API server does, in a local run a table of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Identity:
    """The worker that a token was made for."""

    namespace: str
    name: str
    uid: str


class Unauthenticated(Exception):
    """The token is unknown, expired, or made for another audience."""


class CannotTell(Exception):
    """The token cannot be checked now; the same request may succeed later."""


class Authenticator(Protocol):
    """Turns a bearer token into the worker that it was made for."""

    def known(self, token: str) -> Identity | None:
        """The worker that holds `token`, if that is known without a request."""
        ...

    async def identify(self, token: str) -> Identity:
        """The worker that holds `token`.

        Raises:
            Unauthenticated: the token is refused.
            CannotTell: the token cannot be checked now.
        """
        ...


class TokenTable:
    """Tokens that the operator itself made, one for each local worker."""

    def __init__(self, tokens: Mapping[str, Identity]) -> None:
        self._tokens = tokens

    def known(self, token: str) -> Identity | None:
        """See `Authenticator`."""
        return self._tokens.get(token)

    async def identify(self, token: str) -> Identity:
        """See `Authenticator`."""
        identity = self.known(token)
        if identity is None:
            raise Unauthenticated("unknown token")
        return identity
