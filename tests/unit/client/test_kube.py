"""Connections to the API server, and errors when they break."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kubernetes import client

from pipetransformer_client.errors import Unavailable
from pipetransformer_client.kube import Kube

pytestmark = pytest.mark.timeout(60)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
HEAD = b"HTTP/1.1 %d OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], str]]:
    """Makes an API server that sends this text to each request and closes the connection. Returns its URL."""
    servers: list[socket.socket] = []

    def serve(server: socket.socket, said: bytes) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(said)

    def make(said: bytes) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)
        threading.Thread(target=serve, args=(server, said), daemon=True).start()
        return f"http://127.0.0.1:{server.getsockname()[1]}"

    yield make
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


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
