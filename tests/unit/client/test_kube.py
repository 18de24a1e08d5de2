"""The seam to the API server: what a connection that breaks becomes."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from kubernetes import client

from pipetransformer_client.errors import Unavailable
from pipetransformer_client.kube import Kube

pytestmark = pytest.mark.timeout(20)
HEAD = b"HTTP/1.1 %d OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], Kube]]:
    """Makes an API server that says so much to each request, and closes the connection."""
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

    def make(said: bytes) -> Kube:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)
        threading.Thread(target=serve, args=(server, said), daemon=True).start()
        settings = client.Configuration()
        settings.host = f"http://127.0.0.1:{server.getsockname()[1]}"
        return Kube(client.ApiClient(configuration=settings), "default")

    yield make
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


@pytest.mark.parametrize("said", [b"", HEAD % 200 + b'{"items": [', HEAD % 500 + b'{"mess'], ids=["no", "200", "500"])
def test_an_answer_that_breaks_off_is_none(said: bytes, answering: Callable[[bytes], Kube]) -> None:
    kube = answering(said)
    with pytest.raises(Unavailable, match="does not answer: GET /api/v1/pods"):
        kube.get("/api/v1/pods")
    lines = kube.lines("/api/v1/pods", {"watch": "true"})
    with pytest.raises(Unavailable, match="does not answer: GET /api/v1/pods"):
        list(lines)
