"""Errors of the client. Errors that a caller handles differently have different classes."""


class ClientError(Exception):
    """A request failed. The message says why."""


class InvalidName(ClientError):
    """A name of a job or namespace is not valid. No request was sent."""


class NotFound(ClientError):
    """The object does not exist, or was deleted."""


class AlreadyExists(ClientError):
    """An object of that name already exists."""


class Refused(ClientError):
    """The API server refused the request, such as for a missing permission or an invalid object."""


class Unavailable(ClientError):
    """The API server did not answer, or asked to try later."""


class NothingToFetch(ClientError):
    """The job keeps no results, or they cannot be read from this machine."""
