"""Connections to the API server, and errors when they break."""

import base64
import hashlib
import itertools
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kubernetes import client
from websocket import WebSocket, WebSocketTimeoutException

from pipetransformer_client import kube as module
from pipetransformer_client.errors import AlreadyExists, ClientError, NotFound, Refused, Unavailable
from pipetransformer_client.kube import Kube

pytestmark = pytest.mark.timeout(60)
#: A client that knows of the close opens another connection for its next request.
ANSWER = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
HEAD = b"HTTP/1.1 %d OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"


@pytest.fixture
def serving() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """Makes an API server that calls a function with each connection, and then closes it. Returns its URL."""
    servers: list[socket.socket] = []

    def serve(server: socket.socket, answer: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                answer(connection)

    def make(answer: Callable[[socket.socket], None]) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)
        threading.Thread(target=serve, args=(server, answer), daemon=True).start()
        return f"http://127.0.0.1:{server.getsockname()[1]}"

    yield make
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def read_request(connection: socket.socket) -> bytes:
    """All of a request. What a server leaves unread when it closes resets the connection, so its answer may be lost."""
    request = b""
    while b"\r\n\r\n" not in request and (part := connection.recv(65536)):
        request += part
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", request)
    end = request.find(b"\r\n\r\n") + 4 + (int(length[1]) if length else 0)
    while len(request) < end and (part := connection.recv(65536)):
        request += part
    return request


@pytest.fixture
def answering(serving: Callable[[Callable[[socket.socket], None]], str]) -> Callable[[bytes], str]:
    """Makes an API server that sends this text to each request. Returns its URL."""

    def make(said: bytes) -> str:
        def answer(connection: socket.socket) -> None:
            read_request(connection)
            connection.sendall(said)

        return serving(answer)

    return make


def frame(kind: int, content: bytes) -> bytes:
    """A frame of a WebSocket (RFC 6455), of less than 126 bytes."""
    return bytes([0x80 | kind, len(content)]) + content


BINARY, CLOSE, PONG = 2, 8, 10
OUT, ERR, RESULT = b"\x01", b"\x02", b"\x03"
SUCCESS = RESULT + b'{"status": "Success"}'


@pytest.fixture
def execute(
    serving: Callable[[Callable[[socket.socket], None]], str],
) -> Callable[[Callable[[socket.socket], None]], Iterator[bytes]]:
    """Runs a command on an API server that calls a function once the WebSocket is open."""

    def start(answer: Callable[[socket.socket], None]) -> Iterator[bytes]:
        def upgrade(connection: socket.socket) -> None:
            (key,) = re.findall(rb"(?i)sec-websocket-key: (\S+)", read_request(connection))
            accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
            connection.sendall(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Protocol: v4.channel.k8s.io\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n"
            )
            answer(connection)

        kube = Kube(client.ApiClient(configuration=client.Configuration(host=serving(upgrade))), "default")
        return kube.execute("default", "digits-w0", "trainer", ["true"])

    return start


Execute = Callable[[Callable[[socket.socket], None]], Iterator[bytes]]


def test_what_a_command_writes_is_passed_on_piece_by_piece(execute: Execute) -> None:
    """A model has more bytes than this machine has memory."""
    pieces = [bytes([number]) * 100 for number in range(100)]
    said = [OUT + piece for piece in pieces] + [ERR + b"a warning", SUCCESS]

    def write(connection: socket.socket) -> None:
        connection.sendall(b"".join(frame(BINARY, one) for one in said) + frame(CLOSE, b"\x03\xe8"))
        connection.recv(64)

    assert list(execute(write)) == pieces


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([ERR + b"first\nlast ", ERR + b"words\n", RESULT + b'{"status": "Failure"}'], "digits-w0 failed: last words"),
        ([RESULT + b'{"status": "Failure", "message": "no python3"}'], "digits-w0 failed: no python3"),
        ([OUT + b"half of it"], "digits-w0 failed: the connection was lost"),
    ],
)
def test_a_command_that_fails_says_why(said: list[bytes], words: str, execute: Execute) -> None:
    def write(connection: socket.socket) -> None:
        connection.sendall(b"".join(frame(BINARY, one) for one in said) + frame(CLOSE, b"\x03\xe8"))
        connection.recv(64)

    with pytest.raises(ClientError, match=words):
        list(execute(write))


def let_silences_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command says nothing for so long that a ping is due, three times. Each answer has its whole time to come."""
    silences, receive = itertools.chain([True, False] * 3, itertools.repeat(False)), WebSocket.recv_data_frame

    def received(socket: WebSocket, control_frame: bool = False) -> object:
        if next(silences):
            raise WebSocketTimeoutException
        return receive(socket, control_frame)

    monkeypatch.setattr(WebSocket, "recv_data_frame", received)


@pytest.mark.parametrize("answers", [True, False])
def test_a_silent_command_is_waited_for_as_long_as_its_connection_works(
    answers: bool, execute: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answers:
        let_silences_end_at_once(monkeypatch)
    else:
        monkeypatch.setattr(module, "PING_SECONDS", 0.1)

    def write(connection: socket.socket) -> None:
        for _ in range(3):
            if not connection.recv(64):
                return
            if answers:
                connection.sendall(frame(PONG, b""))
        connection.sendall(frame(BINARY, OUT + b"at last") + frame(BINARY, SUCCESS) + frame(CLOSE, b"\x03\xe8"))
        connection.recv(64)

    if answers:
        assert list(execute(write)) == [b"at last"]
    else:
        with pytest.raises(Unavailable, match="the connection to a command in digits-w0 was lost"):
            list(execute(write))


@pytest.mark.parametrize("said", [b"", HEAD % 200 + b'{"items": [', HEAD % 500 + b'{"mess'], ids=["no", "200", "500"])
def test_an_answer_that_breaks_off_is_none(said: bytes, answering: Callable[[bytes], str]) -> None:
    kube = Kube(client.ApiClient(configuration=client.Configuration(host=answering(said))), "default")
    with pytest.raises(Unavailable, match="does not answer GET /api/v1/pods"):
        kube.get("/api/v1/pods")
    lines = kube.lines("/api/v1/pods", {"watch": "true"})
    with pytest.raises(Unavailable, match="does not answer GET /api/v1/pods"):
        list(lines)


def test_a_page_in_place_of_an_answer_is_called_so(answering: Callable[[bytes], str]) -> None:
    url = answering(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 5\r\n\r\nlogin")
    kube = Kube(client.ApiClient(configuration=client.Configuration(host=url)), "default")
    with pytest.raises(Unavailable, match="answers GET /api/v1/pods with text/html, not with JSON"):
        kube.get("/api/v1/pods")


@pytest.mark.parametrize(
    ("status", "error"),
    [(403, Refused), (404, NotFound), (409, AlreadyExists), (422, Refused), (429, Unavailable), (503, Unavailable)],
)
def test_a_refusal_has_the_class_by_which_callers_tell_it(
    status: int, error: type[ClientError], answering: Callable[[bytes], str]
) -> None:
    body = b'{"kind": "Status", "message": "it says why"}'
    url = answering(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
    kube = Kube(client.ApiClient(configuration=client.Configuration(host=url)), "default")
    with pytest.raises(ClientError, match="it says why") as refused:
        kube.get("/api/v1/pods")
    assert type(refused.value) is error


def test_a_log_may_end_within_a_line(answering: Callable[[bytes], str]) -> None:
    url = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\none\n\ntwo\xff")
    kube = Kube(client.ApiClient(configuration=client.Configuration(host=url)), "default")
    assert list(kube.lines("/log", {})) == ["one", "", "two\ufffd"]


def test_a_request_has_the_users_token_and_the_type_of_its_body(
    serving: Callable[[Callable[[socket.socket], None]], str],
) -> None:
    heard: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        heard.append(read_request(connection).lower())
        connection.sendall(ANSWER)

    settings = client.Configuration(host=serving(answer), api_key={"authorization": "Bearer secret"})
    kube = Kube(client.ApiClient(configuration=settings), "default")
    for method in ("POST", "PATCH"):
        kube.request(method, "/x", {})
    assert all(b"authorization: bearer secret" in one for one in heard)
    assert [re.findall(rb"content-type: (\S+)", one) for one in heard] == [
        [b"application/json"],
        [b"application/merge-patch+json"],
    ]


def write_kubeconfig(file: Path, **cluster: str) -> str:
    content = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {}}],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    return str(file)


@pytest.fixture
def without_exemptions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("without_exemptions")
def test_a_server_on_loopback_ignores_the_environments_proxy(
    answering: Callable[[bytes], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", write_kubeconfig(tmp_path / "config", server=answering(ANSWER)))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    kube = Kube.connect()
    assert kube.get("/version") == {}
    with pytest.raises(Unavailable, match="Handshake status 200"):  # the WebSocket, which reads the proxy itself
        list(kube.execute("default", "pod", "container", ["true"]))


@pytest.mark.usefixtures("without_exemptions")
@pytest.mark.parametrize("host", ["localhost", "127.1.2.3", "[::1]"])
def test_every_way_to_name_loopback_is_exempt(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", write_kubeconfig(tmp_path / "config", server=f"https://{host}:9"))
    monkeypatch.setenv("https_proxy", "http://proxy.example")
    with pytest.raises(Unavailable, match=r"refused|Cannot assign"):
        Kube.connect().get("/version")


@pytest.mark.usefixtures("without_exemptions")
@pytest.mark.parametrize("of", ["environment", "kubeconfig"])
def test_other_servers_use_the_environments_proxy_unless_kubeconfig_has_one(
    of: str, answering: Callable[[bytes], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = answering(ANSWER)
    if of == "environment":
        monkeypatch.setenv("http_proxy", proxy)
        file = write_kubeconfig(tmp_path / "config", server="http://kubernetes.example")
    else:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        file = write_kubeconfig(tmp_path / "config", server="http://127.0.0.1:9", **{"proxy-url": proxy})
    monkeypatch.setenv("KUBECONFIG", file)
    assert Kube.connect().get("/version") == {}


def test_an_empty_variable_means_the_file_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kubeconfig(tmp_path / ".kube" / "config", server="http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", "")
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:9 does not answer"):
        Kube.connect().get("/version")


def write_contexts(file: Path, current: str | None, **servers: str) -> Path:
    """Writes a kubeconfig with a context for each server, whose namespace has the context's name."""
    content = {
        "contexts": [{"name": one, "context": {"cluster": one, "namespace": one}} for one in servers],
        "clusters": [{"name": one, "cluster": {"server": server}} for one, server in servers.items()],
        **({} if current is None else {"current-context": current}),
    }
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (
            b"HTTP/1.1 404 Not Found\r\nContent-Length: 18\r\n\r\n404 page not found",
            NotFound,
            "does not serve /jobs: is the operator's chart, with its CRD, installed there?",
        ),
        (
            b'HTTP/1.1 401 Unauthorized\r\nContent-Length: 27\r\n\r\n{"message": "Unauthorized"}',
            Refused,
            r"does not accept the credentials of the kubeconfig: log in to the cluster again \(Unauthorized\)",
        ),
    ],
)
def test_an_answer_that_explains_nothing_is_explained(
    answer: bytes, kind: type[ClientError], words: str, answering: Callable[[bytes], str]
) -> None:
    host = answering(answer)
    kube = Kube(client.ApiClient(configuration=client.Configuration(host=host)), "default")
    with pytest.raises(kind, match=f"{host} {words}"):
        kube.get("/jobs")


@pytest.mark.parametrize("current", [None, "", "removed"])
def test_a_context_is_chosen_although_the_current_one_is_missing(
    current: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_contexts(tmp_path / "config", current, one="http://127.0.0.1:9", two="http://127.0.0.1:8")
    monkeypatch.setenv("KUBECONFIG", str(file))
    kube = Kube.connect("two")
    assert kube.namespace == "two"
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:8 does not answer"):
        kube.get("/version")
    with pytest.raises(Unavailable, match="no cluster found"):
        Kube.connect()


@pytest.mark.parametrize("first", [None, "", "one"])
def test_of_several_files_the_first_that_names_a_current_context_decides(
    first: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [
        write_contexts(tmp_path / "first", first, one="http://127.0.0.1:9"),
        write_contexts(tmp_path / "second", "two", two="http://127.0.0.1:8"),
        write_contexts(tmp_path / "third", "three", three="http://127.0.0.1:7"),
    ]
    monkeypatch.setenv("KUBECONFIG", ":".join(map(str, [tmp_path / "none", *files])))
    assert Kube.connect().namespace == (first or "two")


def test_a_certificate_that_is_cut_off_is_an_unreadable_kubeconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_kubeconfig(tmp_path / "config", server="https://127.0.0.1:9", **{"certificate-authority-data": "QUJ"})
    monkeypatch.setenv("KUBECONFIG", file)
    with pytest.raises(Unavailable, match="cannot read the kubeconfig"):
        Kube.connect()


@pytest.mark.parametrize("command", ["no-such-plugin", "false"])
def test_a_credential_plugin_that_fails_is_named(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would send requests without credentials."""
    file = write_kubeconfig(tmp_path / "config", server="https://127.0.0.1:9")
    content = json.loads(Path(file).read_text())
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": command, "interactiveMode": "Never"}
    (user,) = content["users"]
    user["user"] = {"exec": plugin}
    Path(file).write_text(json.dumps(content))
    monkeypatch.setenv("KUBECONFIG", file)
    with pytest.raises(Unavailable, match=f"the credential plugin {command} of user {user['name']} gave no credential"):
        Kube.connect()
