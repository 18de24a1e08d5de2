"""Which worker holds a token: the API server decides, by TokenReview."""

import asyncio
import base64
import json
import time
from collections import defaultdict
from hashlib import sha256

from pipetransformer_contract.wire import TOKEN_AUDIENCE
from pipetransformer_operator.channel.authenticator import CannotTell, Identity, Unauthenticated
from pipetransformer_operator.clocks import Stopwatch
from pipetransformer_operator.controller.ports import JobKey
from pipetransformer_operator.kube.client.api import REQUEST_FAILED, Api
from pipetransformer_operator.kube.events import ClusterListener

_PREFIX = "system:serviceaccount:"
_EXTRA = "authentication.kubernetes.io/"
MAX_CACHED = 32768
#: Reviews in flight at a time. After a start of the operator every worker's token is unknown.
PARALLEL_REVIEWS = 32


class TokenReviewer(ClusterListener):
    """An `Authenticator` that asks the API server, and caches each answer until the token expires.

    Args:
        api: client of the API server.
        clock: seconds since the epoch.
    """

    def __init__(self, api: Api, clock: Stopwatch = time.time) -> None:
        self._api = api
        self._clock = clock
        self._known: dict[bytes, tuple[Identity, float]] = {}
        self._of_pod: defaultdict[str, set[bytes]] = defaultdict(set)
        self._asked: dict[bytes, asyncio.Task[Identity]] = {}
        self._gone: set[str] = set()
        self._slots = asyncio.Semaphore(PARALLEL_REVIEWS)

    def known(self, token: str) -> Identity | None:
        """See `Authenticator`. A cached token is served even while the API server is away."""
        known = self._known.get(_digest(token))
        return known[0] if known is not None and self._clock() < known[1] else None

    async def identify(self, token: str) -> Identity:
        """See `Authenticator`."""
        if known := self.known(token):
            return known
        digest = _digest(token)
        asked = self._asked.get(digest)
        if asked is None:  # a worker's first requests come together
            asked = self._asked[digest] = asyncio.create_task(self._learn(token, digest))
            asked.add_done_callback(lambda _: self._answered(digest))
        return await asyncio.shield(asked)

    def on_pod_gone(self, key: JobKey, uid: str) -> None:
        """The pod's tokens are no longer valid."""
        for digest in self._of_pod.pop(uid, ()):
            self._known.pop(digest, None)
        if self._asked:  # a review in flight may be for one of its tokens
            self._gone.add(uid)

    def _answered(self, digest: bytes) -> None:
        del self._asked[digest]
        if not self._asked:
            self._gone.clear()

    async def _learn(self, token: str, digest: bytes) -> Identity:
        async with self._slots:
            identity = await self._review(token)
        if identity.uid in self._gone:
            return identity
        if len(self._known) >= MAX_CACHED:
            self._make_room()
        self._known[digest] = (identity, _expiry(token))
        self._of_pod[identity.uid].add(digest)
        return identity

    def _make_room(self) -> None:
        """Forgets expired tokens, and then the oldest until there is room for one more."""
        now = self._clock()
        for digest in [digest for digest, (_, expiry) in self._known.items() if now >= expiry]:
            self._forget(digest)
        while len(self._known) >= MAX_CACHED:
            self._forget(next(iter(self._known)))

    def _forget(self, digest: bytes) -> None:
        identity, _ = self._known.pop(digest)
        self._of_pod[identity.uid].discard(digest)
        if not self._of_pod[identity.uid]:
            del self._of_pod[identity.uid]

    async def _review(self, token: str) -> Identity:
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [TOKEN_AUDIENCE]},
        }
        try:
            answer = await self._api.request("POST", "/apis/authentication.k8s.io/v1/tokenreviews", review)
        except REQUEST_FAILED as error:
            raise CannotTell(f"the token cannot be checked now: {error}") from error
        status = answer["status"]
        if not status.get("authenticated") or TOKEN_AUDIENCE not in status.get("audiences", []):
            raise Unauthenticated(status.get("error") or f"the token is not for audience {TOKEN_AUDIENCE}")
        user = status.get("user", {})
        extra = user.get("extra", {})
        names, uids = extra.get(f"{_EXTRA}pod-name", []), extra.get(f"{_EXTRA}pod-uid", [])
        if not user.get("username", "").startswith(_PREFIX) or len(names) != 1 or len(uids) != 1:
            raise Unauthenticated("the token is not bound to a pod")
        namespace = user["username"].removeprefix(_PREFIX).split(":")[0]
        return Identity(namespace, names[0], uids[0])


def _digest(token: str) -> bytes:
    return sha256(token.encode()).digest()


def _expiry(token: str) -> float:
    """When the reviewed token expires, in seconds since the epoch. 0 if the token does not say, so it is not cached."""
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return float(claims["exp"])
    except (IndexError, ValueError, KeyError, TypeError):
        return 0.0
