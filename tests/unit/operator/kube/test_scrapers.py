"""Who may read the metrics."""

from collections.abc import Mapping
from typing import Any

import pytest

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.channel.authenticator import CannotTell, Unauthenticated
from pipetransformer_operator.controller.ports import Conflict, Refused, Unavailable
from pipetransformer_operator.kube.client.api import Api, NotFound
from pipetransformer_operator.kube.trust.scrapers import ALLOWED_SECONDS, Forbidden, Scrapers

USERS = {"prometheus": ["monitoring"], "second": ["monitoring"], "guest": []}
#: What limits a token, as OpenShift says it: an authorizer reads it.
EXTRA = {"scopes.authorization.openshift.io": ["user:check-access"]}


class Reviews(Api):
    """Knows users by their tokens. Members of one group may read metrics. A guest has no uid, as a user of OIDC."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.error: Exception | None = None

    async def request(self, method: str, path: str, body: Mapping[str, Any] | None = None, **_: Any) -> Object:
        assert method == "POST" and body is not None
        self.asked.append(path)
        if self.error is not None:
            raise self.error
        spec = body["spec"]
        if body["kind"] == "TokenReview":
            token = spec["token"]
            if token not in USERS:
                return {"status": {"error": "it has expired"} if token == "expired" else {}}
            uid = {} if token == "guest" else {"uid": f"uid-{token}"}
            user = {"username": token, "groups": USERS[token], "extra": EXTRA, **uid}
            return {"status": {"authenticated": True, "user": user}}
        assert spec["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
        assert spec["extra"] == EXTRA
        assert spec.get("uid") == (None if spec["user"] == "guest" else f"uid-{spec['user']}")
        return {"status": {"allowed": "monitoring" in spec["groups"]}}


async def test_an_account_that_is_allowed_is_asked_about_once_a_minute() -> None:
    reviews, now = Reviews(), [1000.0]
    scrapers = Scrapers(reviews, clock=lambda: now[0])
    await scrapers.check("prometheus")
    now[0] += ALLOWED_SECONDS - 1
    await scrapers.check("prometheus")
    assert reviews.asked == [
        "/apis/authentication.k8s.io/v1/tokenreviews", "/apis/authorization.k8s.io/v1/subjectaccessreviews",
    ]  # fmt: skip
    now[0] += 1
    await scrapers.check("prometheus")
    assert len(reviews.asked) == 4


async def test_of_two_accounts_each_is_known_until_its_own_minute_ends() -> None:
    reviews, now = Reviews(), [1000.0]
    scrapers = Scrapers(reviews, clock=lambda: now[0])
    await scrapers.check("prometheus")
    now[0] += ALLOWED_SECONDS - 1
    await scrapers.check("second")
    await scrapers.check("prometheus")
    assert len(reviews.asked) == 4
    now[0] += 1
    await scrapers.check("second")
    assert len(reviews.asked) == 4
    now[0] += ALLOWED_SECONDS - 1
    await scrapers.check("second")
    assert len(vars(scrapers)["_allowed"]) == 1, "tokens are renewed, so old ones would add up"


@pytest.mark.parametrize(
    ("token", "error", "text"),
    [
        ("", Unauthenticated, "a bearer token is missing"),
        ("\udcff", Unauthenticated, "a bearer token is missing"),
        ("thief", Unauthenticated, "the token is unknown"),
        ("expired", Unauthenticated, "it has expired"),
        ("guest", Forbidden, "guest may not get /metrics: give it the ClusterRole of the metrics' readers"),
    ],
)
async def test_everybody_else_is_refused_each_time(token: str, error: type[Exception], text: str) -> None:
    scrapers = Scrapers(Reviews())
    await scrapers.check("prometheus")
    for _ in range(2):
        with pytest.raises(error, match=f"^{text}$"):
            await scrapers.check(token)


@pytest.mark.parametrize(
    "error",
    [Unavailable("no answer"), Refused("403: the operator may not create reviews"), NotFound("404"), Conflict("409")],
)
async def test_an_api_server_that_does_not_decide_allows_nobody(error: Exception) -> None:
    reviews = Reviews()
    scrapers, reviews.error = Scrapers(reviews), error
    with pytest.raises(CannotTell, match=str(error)):
        await scrapers.check("prometheus")
    reviews.error = None
    await scrapers.check("prometheus")
