"""Who sent a request? One small interface; a cluster asks the API server, a local run looks into a table."""

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
    """The token is not one of ours, has expired, or was made for another audience."""


class CannotTell(Exception):
    """Whoever knows the token cannot be asked now; the same request may succeed later."""


class Authenticator(Protocol):
    """Turns a bearer token into the worker that it was made for."""

    def known(self, token: str) -> Identity | None:
        """The worker that holds `token`, as far as it can be said without asking anybody."""
        ...

    async def identify(self, token: str) -> Identity:
        """The worker that holds `token`.

        Raises:
            Unauthenticated: the token is refused.
            CannotTell: nobody could be asked.
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
