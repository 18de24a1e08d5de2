"""Sends requests to the API server. Objects are plain JSON, and errors are those of `errors`.

Of the package `kubernetes` this uses only the kubeconfig, the connection pool and how it opens a WebSocket.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.config.kube_config import ConfigNode, KubeConfigLoader, KubeConfigMerger
from kubernetes.stream.ws_client import ERROR_CHANNEL, STDERR_CHANNEL, STDOUT_CHANNEL, create_websocket
from websocket import ABNF, WebSocket, WebSocketException, WebSocketTimeoutException

from pipetransformer_contract.api.requests import JSON, MERGE_PATCH, Object, failure_message

from .errors import AlreadyExists, ClientError, NotFound, Refused, Unavailable

Query = Mapping[str, str | int]
CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0
#: Seconds without a byte from a command, after which a ping asks whether the connection still works.
PING_SECONDS = 30.0
#: Seconds after which a silent stream counts as broken. A log is silent while its container writes nothing.
SILENCE_SECONDS = 24 * 3600.0
#: The file that kubectl reads when KUBECONFIG is not set or empty.
_KUBECONFIG = "~/.kube/config"
#: Addresses of servers that are reached without the proxy of the environment.
_LOOPBACK = "localhost,127.0.0.0/8,::1"
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Kube:
    """A client of one API server.

    Attributes:
        namespace: the namespace of the kubeconfig's context, otherwise `default`. In a pod, the pod's namespace.
    """

    def __init__(self, api_client: client.ApiClient, namespace: str) -> None:
        self.namespace = namespace
        self._configuration = api_client.configuration
        self._pool = api_client.rest_client.pool_manager

    @classmethod
    def connect(cls, context: str | None = None) -> "Kube":
        """Connects by the kubeconfig (KUBECONFIG or ~/.kube/config). Without one, connects as the pod's ServiceAccount.

        Args:
            context: context of the kubeconfig; None for the current one.

        Raises:
            Unavailable: the kubeconfig or the context cannot be used, or there is neither a kubeconfig nor a pod.
        """
        settings = client.Configuration()
        settings.proxy = None  # drops the environment's proxy, so that a proxy set below is that of the kubeconfig
        file = os.environ.get("KUBECONFIG") or _KUBECONFIG  # the library reads KUBECONFIG only once, at import
        try:
            namespace = _load(file, context, settings)
        except (yaml.YAMLError, OSError, ValueError, TypeError) as error:  # not YAML, or not a kubeconfig
            raise Unavailable(f"cannot read the kubeconfig {file}: {error}") from error
        except config.ConfigException as error:
            try:
                if context is not None:
                    raise Unavailable(f"cannot use context {context}: {error}") from error
                config.load_incluster_config(client_configuration=settings)
            except config.ConfigException:
                where = "This is not a pod with a ServiceAccount either. Set KUBECONFIG to the path of a kubeconfig"
                raise Unavailable(f"no cluster found: {error}. {where}") from error
            namespace = _NAMESPACE_FILE.read_text().strip()
        if settings.proxy is None:  # as kubectl does: use the environment's proxy, except for a server on loopback
            settings.proxy = client.Configuration(host=settings.host).proxy
            settings.no_proxy = ",".join(filter(None, (settings.no_proxy, _LOOPBACK)))
        return cls(client.ApiClient(configuration=settings), namespace)

    def get(self, path: str, **query: str | int) -> Object:
        """Reads an object or a list. Raises as `request` does."""
        return self.request("GET", path, query=query)

    def request(self, method: str, path: str, body: Object | None = None, *, query: Query | None = None) -> Object:
        """Sends one request and returns the object in the answer.

        Raises:
            NotFound: 404.
            AlreadyExists: 409.
            Refused: any other 4xx.
            Unavailable: no answer, 429, 5xx, or an answer that no API server gives.
        """
        with self._open(method, path, body, query or {}, READ_SECONDS) as response:
            try:
                answer: Object = json.loads(response.data)
            except ValueError as error:  # such as the page of a proxy that wants a login
                words = f"answers {method} {path} with {response.headers.get('content-type')}, not with JSON"
                raise Unavailable(f"{self._configuration.host} {words}: is it an API server?") from error
            return answer

    def lines(self, path: str, query: Query, *, silence: float = SILENCE_SECONDS) -> Iterator[str]:
        """Yields lines of text as they arrive, of a log or of a watch. Raises as `request` does.

        Args:
            path: path of the resource on the API server.
            query: query parameters of the request.
            silence: seconds without a byte after which the stream counts as broken.
        """
        with self._open("GET", path, None, query, silence) as response:
            rest = b""
            for chunk in response.stream(65536, decode_content=True):
                *whole, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
            if rest:
                yield rest.decode(errors="replace")

    def execute(self, namespace: str, pod: str, container: str, command: Sequence[str]) -> Iterator[bytes]:
        """Runs a command in a container and yields what it writes to standard output.

        Raises:
            ClientError: the command did not run, or its exit code was not 0. The message has the last line of its
                standard error.
        """
        query = [*(("command", word) for word in command), ("container", container), ("stdout", "1"), ("stderr", "1")]
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/exec?{urlencode(query)}"
        url = self._configuration.host.replace("http", "ws", 1) + path
        try:
            socket = create_websocket(self._configuration, url, self._headers())
        except (OSError, WebSocketException) as error:
            raise Unavailable(f"cannot run a command in {pod}: {error}") from error
        written = {STDERR_CHANNEL: b"", ERROR_CHANNEL: b""}
        try:
            for channel, content in _messages(socket):
                if channel == STDOUT_CHANNEL:
                    yield content
                elif channel in written:
                    written[channel] += content
        except (OSError, WebSocketException) as error:
            raise Unavailable(f"the connection to a command in {pod} was lost: {error}") from error
        finally:
            socket.shutdown()
        result = yaml.safe_load(written[ERROR_CHANNEL]) or {}
        if result.get("status") != "Success":
            said = written[STDERR_CHANNEL].decode(errors="replace").strip().rpartition("\n")[2]
            raise ClientError(
                f"the command in {pod} failed: {said or result.get('message') or 'the connection was lost'}"
            )

    @contextmanager
    def _open(
        self, method: str, path: str, body: Object | None, query: Query, read_seconds: float
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """A context with the response to a request whose body is not read yet. Inside, a broken connection raises
        `Unavailable`. A status of 400 or above raises as `request` does."""
        types = {} if body is None else {"content-type": MERGE_PATCH if method == "PATCH" else JSON}
        url = self._configuration.host + path + (f"?{urlencode(query)}" if query else "")
        try:
            response = self._pool.request(
                method,
                url,
                headers=self._headers() | types,
                body=None if body is None else json.dumps(body),
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=read_seconds),
                retries=False,
                preload_content=False,
            )
            assert isinstance(response, urllib3.BaseHTTPResponse)
            with response:
                if response.status >= 400:
                    raise self._failure(response, path)
                yield response
        except urllib3.exceptions.HTTPError as error:
            raise Unavailable(f"{self._configuration.host} does not answer {method} {path}: {error}") from error

    def _failure(self, response: urllib3.BaseHTTPResponse, path: str) -> ClientError:
        """The error for a response whose request failed."""
        host, message = self._configuration.host, failure_message(response.data)
        if response.status == 401:
            words = f"{host} does not accept the credentials of the kubeconfig: log in to the cluster again"
            return Refused(f"{words} ({message or response.reason})")
        if response.status == 404 and not message:  # an API server that knows the kind of object says what is missing
            return NotFound(f"{host} does not serve {path}: is the operator's chart, with its CRD, installed there?")
        return _error_for(response.status, message or str(response.reason))

    def _headers(self) -> dict[str, str]:
        settings = self._configuration.auth_settings().values()
        return {"accept": JSON} | {
            one["key"]: one["value"] for one in settings if one["in"] == "header" and one["value"]
        }


def _load(file: str, context: str | None, settings: client.Configuration) -> str:
    """Reads the kubeconfig at one or several paths into `settings`. Returns the namespace of its context.

    As with kubectl, the first file that names a current context decides. The library would take the last one.
    """
    merged = KubeConfigMerger(file)
    if merged.config is None:
        raise config.ConfigException(f"there is no kubeconfig {file}")
    current = [one["current-context"] for one in merged.config_files.values() if one.get("current-context")]
    loader = KubeConfigLoader(
        merged.config,
        active_context=context or next(iter(current), None),
        config_base_path=None,
        config_persister=merged.save_changes,
    )
    loader.load_and_set(settings)
    chosen = loader.current_context["context"]
    _check_plugin(merged.config, chosen.get("user"), settings)
    return str(chosen.get("namespace") or "default")


def _check_plugin(kubeconfig: ConfigNode, name: str | None, settings: client.Configuration) -> None:
    """Check that the user's credential plugin gave credentials. The library would send requests without any.

    Raises:
        Unavailable: it gave none.
    """
    named = kubeconfig["users"].get_with_name(name, safe=True) if name and kubeconfig.safe_get("users") else None
    plugin = (named.value.get("user") or {}).get("exec") if named else None
    if plugin and not settings.api_key and not settings.cert_file:
        raise Unavailable(f"the credential plugin {plugin.get('command')} of user {name} gave no credentials")


def _messages(socket: WebSocket) -> Iterator[tuple[int, bytes]]:
    """Yields the messages of a command, each with its channel, until the API server closes the connection.

    While the command writes nothing, this sends pings. Without an answer to one the connection counts as lost. The
    library's own reader sends none. It also returns only once no message is left, so on a fast connection it would
    collect all of them in memory.

    Raises:
        OSError, WebSocketException: the connection was lost.
    """
    socket.settimeout(PING_SECONDS)
    pinged = False
    while True:
        try:
            kind, frame = socket.recv_data_frame(control_frame=True)
        except WebSocketTimeoutException:
            if pinged:
                raise
            socket.ping()
            pinged = True
            continue
        pinged = False
        if kind == ABNF.OPCODE_CLOSE:
            return
        if kind in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) and frame.data:
            yield frame.data[0], frame.data[1:]


def _error_for(status: int, message: str) -> ClientError:
    if status == 404:
        return NotFound(message)
    if status == 409:
        return AlreadyExists(message)
    if 400 <= status < 500 and status != 429:
        return Refused(message)
    return Unavailable(message)
