"""Errors of the client, one class for each thing that a caller can do about them."""


class ClientError(Exception):
    """A request failed. The message says why."""


class InvalidName(ClientError):
    """The name is not valid. No request was sent."""


class NotFound(ClientError):
    """The object does not exist, or no longer does."""


class AlreadyExists(ClientError):
    """An object of that name already exists."""


class Refused(ClientError):
    """The API server refused the request: a missing permission, or an invalid object."""


class Unavailable(ClientError):
    """The API server did not answer, or asked to try later."""


class NothingToFetch(ClientError):
    """The job keeps no results, or they cannot be read from here."""
