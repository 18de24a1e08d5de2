"""Verb, resource and namespace of a request to the API server, as RBAC names them."""

from functools import lru_cache

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def describe(method: str, path: str, *, watch: bool = False) -> tuple[str, str]:
    """Verb and resource, with its subresource, of a request. A path without a resource is `discovery`.

    >>> describe("PUT", "/apis/training.pipetransformer.io/v1alpha1/namespaces/a/pipetrainingjobs/b/status")
    ('update', 'pipetrainingjobs/status')
    """
    _, parts = _split(path)
    if not parts:
        return "get", "discovery"
    resource = "/".join([parts[0], *parts[2:3]])
    if method != "GET":
        return _VERBS.get(method, method.lower()), resource
    return "watch" if watch else "get" if len(parts) > 1 else "list", resource


def namespace_of(path: str) -> str:
    """Namespace of a request; empty if it concerns no namespace or several.

    >>> namespace_of("/api/v1/namespaces/a/pods/b")
    'a'
    """
    namespace, _ = _split(path)
    return namespace


@lru_cache(maxsize=1024)  # two questions a request, and most requests renew the Lease
def _split(path: str) -> tuple[str, tuple[str, ...]]:
    """Namespace of a path, and its parts after the namespace, or after group and version."""
    root, *parts = path.partition("?")[0].strip("/").split("/")
    parts = parts[1:] if root == "api" else parts[2:]
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        return parts[1], tuple(parts[2:])
    return "", tuple(parts)
