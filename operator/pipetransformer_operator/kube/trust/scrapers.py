"""Who may read the operator's metrics: the API server decides, by TokenReview and SubjectAccessReview."""

import time
from hashlib import sha256

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.channel.authenticator import CannotTell, Unauthenticated
from pipetransformer_operator.clocks import Stopwatch
from pipetransformer_operator.kube.client.api import REQUEST_FAILED, Api

PATH = "/metrics"
#: How long an allowed token is not reviewed again. A scrape comes every 15 to 60 s.
ALLOWED_SECONDS = 60.0


class Forbidden(Exception):
    """The API server knows the sender, but the sender may not read the metrics."""


class Scrapers:
    """Asks the API server who holds a token and may read the metrics, and remembers for a while who may.

    Args:
        api: client of the API server, which also sends reviews (POST requests) while this operator does not lead.
        clock: seconds that only grow.
    """

    def __init__(self, api: Api, clock: Stopwatch = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._allowed: dict[bytes, float] = {}

    async def check(self, token: str) -> None:
        """Returns if the holder of `token` may `get` the path `/metrics`.

        Raises:
            Unauthenticated: the token is refused.
            Forbidden: its holder may not read the metrics.
            CannotTell: the API server does not answer, or refuses the review.
        """
        if not token or not token.isascii():  # a header may have any bytes
            raise Unauthenticated("a bearer token is missing")
        digest, now = sha256(token.encode()).digest(), self._clock()
        if now < self._allowed.get(digest, 0.0):
            return
        status = await self._review("authentication", "TokenReview", {"token": token})
        if not status.get("authenticated"):
            raise Unauthenticated(status.get("error") or "the token is unknown")
        user = status["user"]
        asked = {key: user[key] for key in ("uid", "groups", "extra") if key in user}
        asked |= {"user": user["username"], "nonResourceAttributes": {"path": PATH, "verb": "get"}}
        status = await self._review("authorization", "SubjectAccessReview", asked)
        if not status.get("allowed"):
            raise Forbidden(f"{user['username']} may not get {PATH}: give it the ClusterRole of the metrics' readers")
        self._allowed = {known: until for known, until in self._allowed.items() if now < until}
        self._allowed[digest] = now + ALLOWED_SECONDS

    async def _review(self, group: str, kind: str, spec: Object) -> Object:
        body = {"apiVersion": f"{group}.k8s.io/v1", "kind": kind, "spec": spec}
        try:
            answer = await self._api.request("POST", f"/apis/{group}.k8s.io/v1/{kind.lower()}s", body)
        except REQUEST_FAILED as error:
            raise CannotTell(str(error)) from error
        status: Object = answer["status"]
        return status
