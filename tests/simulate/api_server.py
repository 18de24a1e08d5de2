"""An API server in memory: versions, optimistic conflicts, selectors, watches with bookmarks, and a history that ends.

It knows nothing of our operator. Its answers are bytes, as a real one's. `Network` decides when they come, if at all.
"""

import asyncio
import json
import marshal
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pydantic_core import to_json

Object = dict[str, Any]
#: Folder of the API, plural name, namespace, name.
Key = tuple[str, str, str, str]
BOOKMARK_SECONDS = 60.0
_WITHOUT_STATUS = ("metadata", "status")


@dataclass(slots=True, eq=False)
class Stored:
    """One version of an object. Nothing changes it."""

    body: Object
    version: int
    _text: str = ""

    @property
    def text(self) -> str:
        if not self._text:
            self._text = to_json(self.body).decode()
        return self._text


@dataclass(frozen=True, slots=True)
class Target:
    """What a path names."""

    folder: str
    plural: str
    namespace: str
    name: str
    subresource: str

    @classmethod
    def of(cls, path: str) -> "Target":
        parts = path.strip("/").split("/")
        cut = 2 if parts[0] == "api" else 3
        folder, rest = "/".join(parts[:cut]), parts[cut:]
        namespace = ""
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        plural, name, sub = (*rest, "", "", "")[:3]
        return cls(folder, plural, namespace, name, sub)

    @property
    def key(self) -> Key:
        return self.folder, self.plural, self.namespace, self.name


class Failure(Exception):
    """An answer that is not 2xx."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@lru_cache(maxsize=4096)
def _parsed(url: str) -> tuple[Target, Mapping[str, str]]:
    """What an address names, and its query. Operators send the same few addresses all the time."""
    parts = urlsplit(url)
    return Target.of(parts.path), dict(parse_qsl(parts.query))


def _any(_: Object) -> bool:
    return True


def selector(query: Mapping[str, str]) -> Callable[[Object], bool]:
    """Whether an object matches the label and field selectors of a query."""
    return _selector(query.get("labelSelector", ""), query.get("fieldSelector", ""))


@lru_cache(maxsize=1024)
def _selector(labels: str, fields: str) -> Callable[[Object], bool]:
    tests: list[Callable[[Object], bool]] = []
    for term in filter(None, labels.split(",")):
        if term.startswith("!"):
            tests.append(lambda one, key=term[1:]: key not in _labels(one))  # type: ignore[misc]
        elif "=" in term:
            key, _, value = term.partition("=")
            tests.append(lambda one, key=key, value=value: _labels(one).get(key) == value)  # type: ignore[misc]
        else:
            tests.append(lambda one, key=term: key in _labels(one))  # type: ignore[misc]
    for term in filter(None, fields.split(",")):
        differs = "!=" in term
        name, _, value = term.partition("!=" if differs else "=")
        path = name.split(".")
        tests.append(lambda one, path=path, value=value, differs=differs: (_at(one, path) == value) != differs)  # type: ignore[misc]
    if not tests:
        return _any
    return lambda one: all(test(one) for test in tests)


def _labels(one: Object) -> dict[str, str]:
    labels: dict[str, str] = one["metadata"].get("labels") or {}
    return labels


def _at(one: Any, path: list[str]) -> Any:
    for part in path:
        one = one.get(part, {}) if isinstance(one, dict) else {}
    return one


class Stream:
    """What a client reads of a watch, in order; each event comes after a latency."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._ended = False
        self._heard = 0.0

    def put(self, chunk: bytes) -> None:
        self._heard = asyncio.get_running_loop().time()
        self._chunks.append(chunk)
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """The server closes the watch, or the connection breaks."""
        self._ended, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _look(self, silence: float) -> None:
        """Breaks the connection after `silence` seconds without a byte."""
        loop = asyncio.get_running_loop()
        rest = self._heard + silence - loop.time()
        if self._ended:
            return
        if rest <= 0:
            self.end(TimeoutError())
        else:
            loop.call_later(rest, self._look, silence)

    async def iter_any(self, silence: float) -> AsyncIterator[bytes]:
        """Chunks as they arrive, like aiohttp's. Breaks after `silence` seconds without one."""
        self._heard = asyncio.get_running_loop().time()
        self._look(silence)
        while True:
            while self._chunks:
                yield self._chunks.popleft()
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter


@dataclass(eq=False)
class Watch:
    """An open watch on the server's side."""

    target: Target
    matches: Callable[[Object], bool]
    stream: Stream
    bookmarks: bool
    client: str
    last: float = 0.0
    coming: deque[Callable[[], None]] = field(default_factory=deque)
    open: bool = True

    def covers(self, key: Key) -> bool:
        target = self.target
        return key[0] == target.folder and key[1] == target.plural and target.namespace in ("", key[2])


@dataclass(frozen=True, slots=True)
class Change:
    """One write: the object before and after it."""

    version: int
    key: Key
    before: Stored | None
    after: Stored | None


class ApiServer:
    """See the module.

    Attributes:
        objects: the newest version of each.
        watches: that are open.
        listeners: are told of each change at once: the cluster's own controllers, and the oracle.
        latency: draws how long one event of a watch takes to its client, in seconds.
        reads_behind: how many versions lists and reads are behind the newest, as after a fail-over.
    """

    def __init__(self, latency: Callable[[], float], now: Callable[[], str]) -> None:
        self.objects: dict[Key, Stored] = {}
        self.watches: dict[Watch, None] = {}
        self.listeners: list[Callable[[Change, str], None]] = []
        self.latency = latency
        self._now = now
        self._history: list[Change] = []
        self._oldest = 0
        self._version = 100
        self._uids = 0
        self.reads_behind = 0

    # What clients ask.

    def answer(
        self, method: str, url: str, body: Mapping[str, Any] | None, content_type: str, accept: str, client: str
    ) -> tuple[int, bytes]:
        """Answers everything except a watch."""
        code, answer = self._answer(method, url, body, content_type, client)
        return code, _metadata_of(answer) if code < 300 and "as=PartialObjectMetadata" in accept else answer

    def _answer(
        self, method: str, url: str, body: Mapping[str, Any] | None, content_type: str, client: str
    ) -> tuple[int, bytes]:
        target, query = _parsed(url)
        try:
            if method == "GET":
                return 200, (self._read(target) if target.name else self._list(target, query)).encode()
            if target.plural == "tokenreviews" and body is not None:
                return 201, json.dumps(self._review(dict(body))).encode()
            sent: Object = marshal.loads(marshal.dumps(dict(body))) if body is not None else {}
            return self._write(method, target, sent, content_type, client)
        except Failure as failure:
            status = {"kind": "Status", "status": "Failure", "code": failure.code, "message": str(failure)}
            return failure.code, json.dumps(status).encode()

    def watch(self, url: str, client: str) -> Stream:
        """Opens a watch."""
        target, query = _parsed(url)
        stream, since = Stream(), int(query.get("resourceVersion") or 0)
        watch = Watch(target, selector(query), stream, "allowWatchBookmarks" in query, client)
        if since < self._oldest:
            gone = {"kind": "Status", "code": 410, "message": f"too old resource version: {since} ({self._oldest})"}
            stream.put(_line("ERROR", json.dumps(gone)))
            stream.end()
            return stream
        self.watches[watch] = None
        loop = asyncio.get_running_loop()
        for change in self._history:
            if change.version > since and watch.covers(change.key):
                self._show(watch, change)
        loop.call_later(float(query.get("timeoutSeconds", 300)), self.close, watch)
        if watch.bookmarks:
            loop.call_later(BOOKMARK_SECONDS, self._bookmark, watch)
        return stream

    def close(self, watch: Watch, error: Exception | None = None) -> None:
        """Ends a watch, after what is on its way."""
        if watch.open:
            watch.open = False
            del self.watches[watch]
            self._later(watch, lambda: watch.stream.end(error))

    # What the cluster's own parts do, without a network.

    def get(self, *key: str) -> Object | None:
        """The newest version of an object, not to be changed."""
        folder, plural, namespace, name = key
        found = self.objects.get((folder, plural, namespace, name))
        return None if found is None else found.body

    def all(self, folder: str, plural: str) -> Iterator[Object]:
        """All objects of a kind, in the order of their creation."""
        return iter([one.body for key, one in self.objects.items() if key[0] == folder and key[1] == plural])

    def put(self, key: Key, body: Object | None, client: str = "cluster") -> Object | None:
        """Writes a new version of an object; None removes it."""
        before = self.objects.get(key)
        self._version += 1
        after = None
        if body is None:
            self.objects.pop(key, None)
        else:
            metadata = {**body["metadata"], "resourceVersion": str(self._version)}
            after = self.objects[key] = Stored({**body, "metadata": metadata}, self._version)
        change = Change(self._version, key, before, after)
        self._history.append(change)
        for watch in list(self.watches):
            if watch.covers(key):
                self._show(watch, change)
        for listener in self.listeners:
            listener(change, client)
        return after.body if after else None

    def create(self, key: Key, body: Object, client: str = "cluster") -> Object:
        """Creates an object with a UID."""
        self._uids += 1
        _folder, plural, namespace, name = key
        metadata = {**body["metadata"], "name": name, "uid": f"{plural}-{self._uids}", "generation": 1}
        metadata["creationTimestamp"] = self._now()
        if namespace:
            metadata["namespace"] = namespace
        body = {**body, "metadata": metadata}
        if plural == "pods":
            body.setdefault("status", {"phase": "Pending"})
        made = self.put(key, body, client)
        assert made is not None
        return made

    def compact(self) -> None:
        """Forgets all changes: a watch that begins earlier gets 410."""
        self._oldest = self._version
        self._history.clear()

    @property
    def version(self) -> int:
        """Of the newest write."""
        return self._version

    # The rest.

    def _snapshot(self) -> tuple[dict[Key, Stored], int]:
        """The objects as reads show them now, and their version."""
        version = max(self._version - self.reads_behind, self._oldest)
        if not self.reads_behind or version == self._version:
            return self.objects, self._version
        objects = dict(self.objects)
        for change in reversed(self._history):
            if change.version <= version:
                break
            if change.before is None:
                objects.pop(change.key, None)
            else:
                objects[change.key] = change.before
        return objects, version

    def _read(self, target: Target) -> str:
        found = self._snapshot()[0].get(target.key)
        if found is None:
            raise Failure(404, f"{target.plural} {target.name!r} not found")
        return found.text

    def _list(self, target: Target, query: Mapping[str, str]) -> str:
        objects, version = self._snapshot()
        matches = selector(query)
        items = [
            one.text
            for key, one in objects.items()
            if key[0] == target.folder
            and key[1] == target.plural
            and target.namespace in ("", key[2])
            and matches(one.body)
        ]
        return f'{{"metadata": {{"resourceVersion": "{version}"}}, "items": [{", ".join(items)}]}}'

    def _review(self, body: Object) -> Object:
        _, _, rest = body["spec"]["token"].partition(".")
        uid = rest.rpartition(".")[2]
        pod = next((one for one in self.all("api/v1", "pods") if one["metadata"]["uid"] == uid), None)
        if pod is None:
            return {"status": {"authenticated": False, "error": "unknown token"}}
        metadata, extra = pod["metadata"], "authentication.kubernetes.io/"
        user = {
            "username": f"system:serviceaccount:{metadata['namespace']}:default",
            "extra": {f"{extra}pod-name": [metadata["name"]], f"{extra}pod-uid": [uid]},
        }
        return {"status": {"authenticated": True, "audiences": body["spec"]["audiences"], "user": user}}

    def _write(self, method: str, target: Target, sent: Object, content_type: str, client: str) -> tuple[int, bytes]:
        key = target.key
        if target.plural == "events":  # nothing here reads them
            return 201, json.dumps(sent).encode()
        if method == "POST":
            name = sent["metadata"]["name"]
            key = (target.folder, target.plural, target.namespace, name)
            if key in self.objects:
                raise Failure(409, f"{target.plural} {name!r} already exists")
            self.create(key, sent, client)
            return 201, self.objects[key].text.encode()
        present = self.objects.get(key)
        if method == "DELETE":
            return self._delete(key, present, sent, client)
        if present is None:
            code = 409 if sent.get("metadata", {}).get("uid") else 404
            raise Failure(code, f"{target.plural} {target.name!r} not found")
        self._check(present.body, sent.get("metadata", {}))
        body = self._merged(method, target, present.body, sent, content_type)
        if body != present.body:
            self.put(key, body, client)
        return 200, self.objects[key].text.encode()

    def _merged(self, method: str, target: Target, body: Object, sent: Object, content_type: str) -> Object:
        if target.subresource == "status":
            return {**body, "status": sent.get("status", {})}
        if content_type.startswith("application/merge-patch"):
            sent = _merge(body, {name: value for name, value in sent.items() if name not in _WITHOUT_STATUS})
        new = {**body, **{name: value for name, value in sent.items() if name not in _WITHOUT_STATUS}}
        if any(new.get(name) != body.get(name) for name in new if name not in _WITHOUT_STATUS):
            metadata = body["metadata"]
            new["metadata"] = {**metadata, "generation": metadata.get("generation", 1) + 1}
        return new

    def _check(self, body: Object, asked: Object) -> None:
        for name in ("uid", "resourceVersion"):
            if asked.get(name) and asked[name] != body["metadata"][name]:
                raise Failure(409, f"{name} {asked[name]} is not {body['metadata'][name]}")

    def _delete(self, key: Key, present: Stored | None, options: Object, client: str) -> tuple[int, bytes]:
        if present is None:
            raise Failure(404, f"{key[1]} {key[3]!r} not found")
        self._check(present.body, options.get("preconditions") or {})
        body = present.body
        if key[1] == "pods" and body["spec"].get("nodeName"):
            if "deletionTimestamp" not in body["metadata"]:
                metadata = {**body["metadata"], "deletionTimestamp": self._now()}
                self.put(key, {**body, "metadata": metadata}, client)
            return 200, self.objects[key].text.encode()
        self.put(key, None, client)
        return 200, json.dumps({"kind": "Status", "status": "Success"}).encode()

    def _show(self, watch: Watch, change: Change) -> None:
        """Tells one watch of a change, by what its selector saw before and sees now."""
        before = change.before is not None and watch.matches(change.before.body)
        after = change.after is not None and watch.matches(change.after.body)
        if after and change.after is not None:
            line = _line("MODIFIED" if before else "ADDED", change.after.text)
        elif before and change.before is not None:
            last = change.before.body
            metadata = {**last["metadata"], "resourceVersion": str(change.version)}
            line = _line("DELETED", json.dumps({**last, "metadata": metadata}))
        else:
            return
        self._later(watch, lambda: watch.stream.put(line))

    def _bookmark(self, watch: Watch) -> None:
        if watch.open:
            mark = _line("BOOKMARK", json.dumps({"metadata": {"resourceVersion": str(self._version)}}))
            self._later(watch, lambda: watch.stream.put(mark))
            asyncio.get_running_loop().call_later(BOOKMARK_SECONDS, self._bookmark, watch)

    def _later(self, watch: Watch, call: Callable[[], None]) -> None:
        """Events of one watch arrive in order: whichever timer runs first brings the oldest."""
        loop = asyncio.get_running_loop()
        watch.last = max(watch.last, loop.time() + self.latency())
        watch.coming.append(call)
        loop.call_at(watch.last, lambda: watch.coming.popleft()())


def _merge(body: Object, patch: Object) -> Object:
    merged = dict(body)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _merge(merged[name], value)
        else:
            merged[name] = value
    return merged


def _metadata_of(answer: bytes) -> bytes:
    """An object, or each of a list, without anything but its metadata."""
    whole = json.loads(answer)
    partial: Object = {"kind": "PartialObjectMetadata", "metadata": whole["metadata"]}
    if "items" in whole:
        items = [{"kind": "PartialObjectMetadata", "metadata": one["metadata"]} for one in whole["items"]]
        partial = {"kind": "PartialObjectMetadataList", "metadata": whole["metadata"], "items": items}
    return json.dumps(partial).encode()


def _line(kind: str, text: str) -> bytes:
    return f'{{"type": "{kind}", "object": {text}}}\n'.encode()
