"""Requests to the API server: plain JSON in and out, and one error class for each thing the operator can do."""

import contextlib
import ipaddress
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import yaml
from aiolimiter import AsyncLimiter
from kubernetes.aio import client, config

from pipetransformer_contract.api.requests import APPLY_PATCH, JSON, Object, failure_message
from pipetransformer_operator.controller.ports import Conflict, Invalid, Refused, Unavailable
from pipetransformer_operator.controller.slots import Slots

from .verbs import describe, namespace_of

Query = Mapping[str, str]
NO_QUERY: Query = MappingProxyType({})
TIMEOUT_SECONDS = 15
#: Requests in flight, see `Slots`. The timeout of a request starts when it is sent.
PARALLEL = 64
#: Objects in one answer to a list: 8,000 pods in one answer took 400 MB.
LISTED_AT_ONCE = 250
#: How often the API server sends a bookmark in a watch.
BOOKMARK_SECONDS = 60
#: Read buffer of a connection: an event of a watch is one line, and may be long.
READ_BYTES = 2**21
#: Asks for a list with only the objects' metadata, and for only the metadata of one object.
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
METADATA_OF_ONE = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
FIELD_MANAGER = "pipetransformer-operator"
KUBECONFIG = "~/.kube/config"
_NOT_JSON = "the answer is not JSON: is a proxy in front of the API server?"


class NotFound(Exception):
    """The object does not exist."""


#: All that a request raises, for callers that try again later or do without the answer.
REQUEST_FAILED = (Conflict, NotFound, Unavailable)


class Leadership(Protocol):
    """Knows whether this operator is the one that may write."""

    @property
    def held(self) -> bool:
        """Whether it may write now."""
        ...


class RequestListener(Protocol):
    """Is told of requests to the API server."""

    def on_api_request(self, verb: str, resource: str, code: int | None, seconds: float) -> None:
        """A request was sent. `code` is the HTTP status code of the answer, None if there was none."""
        ...


class Api:
    """A client of one API server. Use `connect` to make one, and `close` it.

    Args:
        api_client: client of the Kubernetes library, which knows the address and the credentials.
        leadership: sends nothing but GET requests unless it is held; None: may always write.
        listener: is told of each request that was sent.
        limiter: delays requests, except the opening of watches; None: no limit.
    """

    def __init__(
        self,
        api_client: client.ApiClient,
        leadership: Leadership | None = None,
        listener: RequestListener | None = None,
        limiter: AsyncLimiter | None = None,
    ) -> None:
        self._client = api_client
        self._limiter = limiter
        self._leadership = leadership
        self._listener = listener
        self._slots = Slots(PARALLEL)

    @classmethod
    async def connect(
        cls,
        leadership: Leadership | None = None,
        listener: RequestListener | None = None,
        limiter: AsyncLimiter | None = None,
        *,
        kubeconfig: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Connects to the API server.

        Args:
            leadership: says whether this operator may write; None to write always.
            listener: is told of each request; None for no listener.
            limiter: delays requests, except the opening of watches; None for no limit.
            kubeconfig: path of the kubeconfig to use. None to use the pod's ServiceAccount in a cluster, and elsewhere
                the same kubeconfig as kubectl.

        Raises:
            Unavailable: there is neither a ServiceAccount nor a kubeconfig, or the kubeconfig cannot be used.
        """
        settings = await _configuration(kubeconfig)
        settings.proxy = settings.proxy or proxy(settings.host or "")
        # No limit: each watch keeps a connection, and slots limit requests.
        settings.connection_pool_maxsize = 0
        # Reading the environment, and a netrc file in a thread, would take twice the time of the request itself.
        settings.client_session_kwargs = {"trust_env": False, "read_bufsize": READ_BYTES}
        return cls(client.ApiClient(configuration=settings), leadership, listener, limiter)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()

    async def get(
        self, path: str, query: Query = NO_QUERY, *, timeout: float = TIMEOUT_SECONDS, accept: str = JSON
    ) -> Object:
        """Reads an object. Raises as `request` does."""
        return await self.request("GET", path, query=query, timeout=timeout, accept=accept)

    async def list(
        self, path: str, query: Query = NO_QUERY, *, timeout: float = TIMEOUT_SECONDS, accept: str = JSON
    ) -> AsyncIterator[Object]:
        """Yields a list in parts, each with some of its `items`. All have the resourceVersion of the whole list.

        Raises as `request` does, also between two parts, because the server may forget that version."""
        asked = {**query, "limit": str(LISTED_AT_ONCE)}
        while True:
            part = await self.get(path, asked, timeout=timeout, accept=accept)
            yield part
            following = part["metadata"].get("continue")
            if not following:
                return
            asked["continue"] = following

    async def watch(
        self,
        path: str,
        version: str,
        seconds: int,
        query: Query = NO_QUERY,
        *,
        bookmarks: bool = True,
        bookmarked: bool = False,
        opened: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[Object]:
        """Yields events of the list at `path`, until the server ends the watch after `seconds`.

        Args:
            path: path of the list.
            version: resourceVersion after which events begin.
            seconds: lifetime of the watch.
            query: query of the list, such as its selectors.
            bookmarks: asks the server to report its progress.
            bookmarked: the server has sent a bookmark before, so a watch without one for a minute is dead. A server
                sends the first only after an object of the kind has changed since the server started.
            opened: called when the server accepts the watch.

        Raises:
            NotFound: the server does not know the kind.
            Refused: this operator may not watch it.
            Unavailable: it cannot be opened, it broke, or the server no longer has that version.
        """
        asked = {**query, "watch": "true", "resourceVersion": version, "timeoutSeconds": str(seconds)}
        if bookmarks:
            asked["allowWatchBookmarks"] = "true"
        silence = min(seconds, BOOKMARK_SECONDS) if bookmarked else seconds
        timeout = aiohttp.ClientTimeout(sock_connect=TIMEOUT_SECONDS, sock_read=silence + TIMEOUT_SECONDS)
        started = time.perf_counter()
        try:
            async with await self._send(
                "GET", f"{path}?{urlencode(asked)}", {"Accept": JSON}, timeout=timeout
            ) as answer:
                self._tell("GET", path, answer.status, time.perf_counter() - started, watch=True)
                if answer.status != 200:
                    raise _error_for("GET", answer.status, f"watch {path}: {answer.status} {answer.reason}")
                opened()
                rest = b""
                async for chunk in answer.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        event = _event(path, line)
                        if event["type"] == "ERROR":
                            raise Unavailable(f"watch {path}: {event['object'].get('message')}")
                        yield event
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"watch {path}: {error!r}") from error

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Query = NO_QUERY,
        content_type: str = JSON,
        strict: bool = False,
        timeout: float = TIMEOUT_SECONDS,
        accept: str = JSON,
    ) -> Object:
        """Sends one request and returns the object in the answer. With `strict` the server refuses unknown fields. The
        `timeout` is in seconds.

        Raises:
            NotFound: 404.
            Conflict: 409.
            Invalid: 400, 413 or 422.
            Refused: any other 4xx; or 500, for example because an admission webhook does not answer. For a GET only
                403, because other failures of a read pass: 401, 410 between two parts of a list, or 500 while etcd
                elects a leader. They are `Unavailable`.
            Unavailable: no answer, an answer that is not JSON, 429, another failure, or this operator does not lead.
        """
        asked = dict(query)
        if strict:
            asked["fieldValidation"] = "Strict"
        if content_type == APPLY_PATCH:
            asked |= {"fieldManager": FIELD_MANAGER, "force": "true"}
        url = f"{path}?{urlencode(asked)}" if asked else path
        headers = {"Accept": accept, "Content-Type": content_type}
        async with self._slots.of(namespace_of(path)):
            if self._limiter is not None:
                await self._limiter.acquire()
            if method != "GET" and self._leadership is not None and not self._leadership.held:
                raise Unavailable(f"{method} {path}: not sent, because this operator does not hold the lease")
            started, code = time.perf_counter(), None
            try:
                async with await self._send(method, url, headers, body, timeout=timeout) as answer:
                    code, data = answer.status, await answer.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise Unavailable(f"{method} {path}: {error!r}") from error
            finally:
                self._tell(method, path, code, time.perf_counter() - started)
        if not 200 <= code <= 299:
            raise _error_for(method, code, f"{method} {path}: {code} {failure_message(data) or answer.reason}")
        try:
            result: Object = json.loads(data)
        except ValueError as error:
            raise Unavailable(f"{method} {path}: {_NOT_JSON}") from error
        return result

    async def _send(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float | aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        """Sends a request without the library's models: they would take half of the time of a request."""
        headers = {**self._client.default_headers, **headers}
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], url, method, body)
        address = f"{self._client.configuration.host}{url}"
        sent = await self._client.rest_client.request(method, address, headers, body, _request_timeout=timeout)
        response: aiohttp.ClientResponse = sent.response
        return response

    def _tell(self, method: str, path: str, code: int | None, seconds: float, *, watch: bool = False) -> None:
        if self._listener is not None:
            self._listener.on_api_request(*describe(method, path, watch=watch), code, seconds)


async def _configuration(kubeconfig: str | os.PathLike[str] | None) -> client.Configuration:
    settings = client.Configuration()
    if kubeconfig is None:
        with contextlib.suppress(config.ConfigException):
            config.load_incluster_config(client_configuration=settings)
            return settings
    # The library reads KUBECONFIG only once, at import, and takes an empty value for a file name.
    paths = os.fspath(kubeconfig or os.environ.get("KUBECONFIG") or KUBECONFIG)
    if not _any_exists(paths):
        raise Unavailable(
            f"no cluster found: there is no kubeconfig {paths}. This is not a pod with a ServiceAccount either. Set"
            " KUBECONFIG to the path of a kubeconfig"
        )
    try:
        await config.load_kube_config(paths, client_configuration=settings)
    except (config.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError) as error:
        raise Unavailable(f"cannot read the kubeconfig {paths}: {error}") from error
    return settings


def _any_exists(paths: str) -> bool:
    return any(Path(path).expanduser().exists() for path in paths.split(os.pathsep))


def proxy(url: str) -> str | None:
    """The environment's proxy for the URL. As with kubectl, a server on loopback has none."""
    server = urlsplit(url)
    host = server.hostname or ""
    return None if _is_loopback(host) or proxy_bypass(host) else getproxies().get(server.scheme)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _event(path: str, line: bytes) -> Object:
    """An event of a watch: its `type` and the `object`."""
    try:
        event: Object = json.loads(line)
    except ValueError as error:
        raise Unavailable(f"watch {path}: {_NOT_JSON}") from error
    return event


def _error_for(method: str, status: int, message: str) -> Exception:
    if status == 404:
        return NotFound(message)
    if method == "GET":
        return Refused(message) if status == 403 else Unavailable(message)
    if status == 409:
        return Conflict(message)
    if status in (400, 413, 422):
        return Invalid(message)
    if 400 <= status <= 500 and status != 429:
        return Refused(message)
    return Unavailable(message)
