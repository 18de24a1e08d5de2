"""Tells metrics what the channel does."""

from .refusal import Refusal


class ChannelListener:
    """Is told of requests and connections. Every method does nothing here: override those that concern you."""

    def on_request(self, path: str, code: int, seconds: float) -> None:
        """A request was answered with this HTTP status code."""

    def on_refusal(self, kind: Refusal) -> None:
        """A request was refused."""

    def on_shut_out(self) -> None:
        """A connection was closed at once, because too many were open."""


#: For a channel without metrics, as in local runs.
NO_LISTENER = ChannelListener()
