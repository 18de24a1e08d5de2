"""A store of objects for tests: S3, as moto knows it, by HTTP from a thread of this process."""

import re
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import make_server

_ERROR = "<?xml version='1.0'?><Error><Code>{0}</Code><Message>{0}, it is said</Message></Error>"


class ObjectStore:
    """Serves until the process ends.

    Attributes:
        requests: what was asked of it, such as `HEAD /bucket/key?`.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self._answer_of: dict[re.Pattern[str], tuple[str, str]] = {}
        self._s3 = DomainDispatcherApplication(create_backend_app)
        server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=MotoRequestHandler)
        self._url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()

    @staticmethod
    def forget_clients() -> None:
        """They keep the environment in which they were made."""
        S3FileSystem.clear_instance_cache()

    @property
    def environment(self) -> dict[str, str]:
        """By which whoever speaks S3 finds it, and nothing of the machine's own."""
        return {
            "AWS_ENDPOINT_URL": self._url,
            "AWS_ACCESS_KEY_ID": "who",
            "AWS_SECRET_ACCESS_KEY": "ever",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def new_bucket(self) -> str:
        bucket = f"bucket-{uuid.uuid4()}"
        self.put(bucket)
        return bucket

    def put(self, path: str, content: bytes = b"") -> None:
        """A bucket, or an object in one, as another process would."""
        headers = {"Authorization": "AWS who:ever", "Content-Type": "application/octet-stream"}
        request = urllib.request.Request(f"{self._url}/{path}", content, headers, method="PUT")
        urllib.request.urlopen(request).close()

    @contextmanager
    def answering(self, pattern: str, status: str, body: str = "") -> Iterator[None]:
        """Every request that `pattern` matches is answered so; with a status such as `403 AccessDenied`, by that error
        of S3, where no body is said."""
        _, _, code = status.partition(" ")
        self._answer_of[matched := re.compile(pattern)] = (status, body or _ERROR.format(code))
        try:
            yield
        finally:
            del self._answer_of[matched]

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = "{REQUEST_METHOD} {PATH_INFO}?{QUERY_STRING}".format_map(environ)
        self.requests.append(request)
        for pattern, (status, body) in self._answer_of.copy().items():
            if pattern.match(request):
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response(status, [("Content-Type", "application/xml")])
                return [b"" if request.startswith("HEAD") else body.encode()]
        answer: Iterable[bytes] = self._s3(environ, start_response)
        return answer
