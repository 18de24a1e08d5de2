"""What can go wrong between a user and the cluster, sorted by what to do about it."""


class ClientError(Exception):
    """The cluster does not do what was asked; the message says why."""


class InvalidName(ClientError):
    """Nothing can have that name; the cluster was not asked."""


class NotFound(ClientError):
    """No such object, or it is gone."""


class AlreadyExists(ClientError):
    """The name is taken."""


class Refused(ClientError):
    """The API server says no: no right, or an invalid object."""


class Unavailable(ClientError):
    """No answer, or none for now."""


class NothingToFetch(ClientError):
    """The job keeps its results where nobody can read them any more."""
