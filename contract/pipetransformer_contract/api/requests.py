"""Paths, media types and error messages for requests to the API server, independent of the client library."""

import json
from typing import Any

from .job import GROUP, PLURAL, VERSION

#: An object of the API, as JSON.
Object = dict[str, Any]

JSON = "application/json"
#: Media type of a PATCH that replaces the fields it names and keeps all others.
MERGE_PATCH = "application/merge-patch+json"
#: Media type of a PATCH for server-side apply.
APPLY_PATCH = "application/apply-patch+yaml"


def jobs_path(namespace: str | None) -> str:
    """Path of a namespace's jobs, or of all jobs if None.

    >>> jobs_path("default")
    '/apis/training.pipetransformer.io/v1alpha1/namespaces/default/pipetrainingjobs'
    """
    where = "" if namespace is None else f"/namespaces/{namespace}"
    return f"/apis/{GROUP}/{VERSION}{where}/{PLURAL}"


def failure_message(body: bytes) -> str:
    """The API server's explanation of why a request failed; empty if the answer has none."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return ""
