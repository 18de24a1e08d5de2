"""The one seam to the API server: plain JSON in and out, streams, and errors sorted by what to do about them.

Of the Kubernetes client only the kubeconfig, the connection pool and the WebSocket are used.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.stream.ws_client import ERROR_CHANNEL, STDERR_CHANNEL, STDOUT_CHANNEL, WSClient
from websocket import WebSocketException

from .errors import AlreadyExists, ClientError, NotFound, Refused, Unavailable

Object = dict[str, Any]
Query = Mapping[str, str | int]
CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0
#: A stream may be silent for so long: a log whose container says nothing.
SILENCE_SECONDS = 24 * 3600.0
#: Where kubectl looks when KUBECONFIG is not set, or empty.
_KUBECONFIG = "~/.kube/config"
#: Servers that the environment's proxy is not for.
_LOOPBACK = "localhost,127.0.0.0/8,::1"
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Kube:
    """One API server.

    Attributes:
        namespace: of the kubeconfig's context; `default` where it names none.
    """

    def __init__(self, api_client: client.ApiClient, namespace: str) -> None:
        self.namespace = namespace
        self._configuration = api_client.configuration
        self._pool = api_client.rest_client.pool_manager

    @classmethod
    def connect(cls, context: str | None = None) -> "Kube":
        """Connects as the kubeconfig says (KUBECONFIG, else ~/.kube/config), else as the pod's ServiceAccount.

        Raises:
            Unavailable: there is no usable kubeconfig.
        """
        settings = client.Configuration()
        settings.proxy = None  # so that what stands there afterwards is the kubeconfig's own
        try:
            file = os.environ.get("KUBECONFIG") or _KUBECONFIG  # the library reads it only once, when it is imported
            contexts, active = config.list_kube_config_contexts(file)
            config.load_kube_config(file, context=context, client_configuration=settings)
            chosen = next((one for one in contexts if one["name"] == context), active)
            namespace = chosen["context"].get("namespace") or "default"
        except (yaml.YAMLError, OSError, UnicodeDecodeError, TypeError) as error:  # no YAML, or of another form
            raise Unavailable(f"the kubeconfig cannot be read: {error}") from error
        except config.ConfigException as error:
            try:
                if context is not None:
                    raise Unavailable(f"context {context}: {error}") from error
                config.load_incluster_config(client_configuration=settings)
            except config.ConfigException:
                raise Unavailable(f"no cluster: {error}") from error
            namespace = _NAMESPACE_FILE.read_text().strip()
        if settings.proxy is None:  # the environment's, and as for kubectl none for a server on loopback
            settings.proxy = client.Configuration(host=settings.host).proxy
            settings.no_proxy = ",".join(filter(None, (settings.no_proxy, _LOOPBACK)))
        return cls(client.ApiClient(configuration=settings), namespace)

    def get(self, path: str, **query: str | int) -> Object:
        """Reads an object. Raises as `request`."""
        return self.request("GET", path, query=query)

    def request(self, method: str, path: str, body: Object | None = None, *, query: Query | None = None) -> Object:
        """Sends one request and returns the answered object.

        Raises:
            NotFound: 404.
            AlreadyExists: 409.
            Refused: any other 4xx.
            Unavailable: no answer, 429 or 5xx.
        """
        with self._open(method, path, body, query or {}, READ_SECONDS) as response:
            answer: Object = json.loads(response.data)
            return answer

    def lines(self, path: str, query: Query, *, silence: float = SILENCE_SECONDS) -> Iterator[str]:
        """Lines of text as they come: a log, or the events of a watch. Raises as `request`.

        Args:
            path: of the resource.
            query: of the request.
            silence: seconds without a byte after which the stream is given up.
        """
        with self._open("GET", path, None, query, silence) as response:
            rest = b""
            for chunk in response.stream(65536, decode_content=True):
                *whole, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
            if rest:
                yield rest.decode(errors="replace")

    def execute(self, namespace: str, pod: str, container: str, command: Sequence[str]) -> Iterator[bytes]:
        """Runs a command in a container and yields what it writes.

        Raises:
            ClientError: it did not run, or ended with another exit code than 0; with what it said.
        """
        query = [*(("command", word) for word in command), ("container", container), ("stdout", "1"), ("stderr", "1")]
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/exec?{urlencode(query)}"
        url = self._configuration.host.replace("http", "ws", 1) + path
        try:
            stream = WSClient(self._configuration, url, self._headers(), capture_all=False, binary=True)
        except (OSError, WebSocketException) as error:
            raise Unavailable(f"exec in {pod}: {error}") from error
        complaint = b""
        try:
            open_still = True
            while open_still:
                open_still = stream.is_open()
                stream.update(timeout=READ_SECONDS)
                if written := stream.read_channel(STDOUT_CHANNEL):
                    yield written
                complaint += stream.read_channel(STDERR_CHANNEL) or b""
        except (OSError, WebSocketException) as error:
            raise Unavailable(f"exec in {pod}: the connection was lost: {error}") from error
        finally:
            stream.close()
        result = yaml.safe_load(stream.read_channel(ERROR_CHANNEL) or b"{}") or {}
        if result.get("status") != "Success":
            said = complaint.decode(errors="replace").strip().rpartition("\n")[2]
            raise ClientError(f"exec in {pod}: {said or result.get('message') or 'the connection was lost'}")

    @contextmanager
    def _open(
        self, method: str, path: str, body: Object | None, query: Query, read_seconds: float
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """An answer that is no error, whose body is still to be read: a connection may break in it, too."""
        url = self._configuration.host + path + (f"?{urlencode(query)}" if query else "")
        try:
            response = self._pool.request(
                method,
                url,
                headers=self._headers() | ({} if body is None else {"content-type": _content_type(method)}),
                body=None if body is None else json.dumps(body),
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=read_seconds),
                retries=False,
                preload_content=False,
            )
            assert isinstance(response, urllib3.BaseHTTPResponse)
            with response:
                if response.status >= 400:
                    raise _sorted(response.status, _message(response.data) or str(response.reason))
                yield response
        except urllib3.exceptions.HTTPError as error:
            raise Unavailable(f"{self._configuration.host} does not answer: {method} {path}: {error}") from error

    def _headers(self) -> dict[str, str]:
        settings = self._configuration.auth_settings().values()
        return {"accept": "application/json"} | {
            one["key"]: one["value"] for one in settings if one["in"] == "header" and one["value"]
        }


def _content_type(method: str) -> str:
    """Of the body: what a PATCH names replaces the object's, and the rest of the object stays."""
    return "application/merge-patch+json" if method == "PATCH" else "application/json"


def _sorted(status: int, message: str) -> ClientError:
    if status == 404:
        return NotFound(message)
    if status == 409:
        return AlreadyExists(message)
    if 400 <= status < 500 and status != 429:
        return Refused(message)
    return Unavailable(message)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return ""
