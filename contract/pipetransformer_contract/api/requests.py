"""What every client of the API server needs for a request, whichever library sends it."""

import json
from typing import Any

from .job import GROUP, PLURAL, VERSION

#: An object of the API, as JSON.
Object = dict[str, Any]

JSON = "application/json"
#: Of a PATCH: what it names replaces the object's, and the rest of the object stays.
MERGE_PATCH = "application/merge-patch+json"
#: Of a PATCH: server-side apply.
APPLY_PATCH = "application/apply-patch+yaml"


def jobs_path(namespace: str | None) -> str:
    """Path of a namespace's jobs; of all jobs when None.

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
