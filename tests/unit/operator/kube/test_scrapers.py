"""Who may read the metrics."""

from collections.abc import Mapping
from typing import Any

import pytest

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.channel.authenticator import CannotTell, Unauthenticated
from pipetransformer_operator.controller.ports import Refused, Unavailable
from pipetransformer_operator.kube.client.api import Api
from pipetransformer_operator.kube.trust.scrapers import ALLOWED_SECONDS, Forbidden, Scrapers

USERS = {"prometheus": ["monitoring"], "guest": []}
#: What limits a token, as OpenShift says it: an authorizer reads it.
EXTRA = {"scopes.authorization.openshift.io": ["user:check-access"]}


class Reviews(Api):
    """Knows two users by their tokens. Members of one group may read metrics."""

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
            groups = USERS.get(spec["token"])
            user = {"username": spec["token"], "uid": "1", "groups": groups, "extra": EXTRA}
            return {"status": {"error": "no such token"} if groups is None else {"authenticated": True, "user": user}}
        assert spec["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
        assert (spec["uid"], spec["extra"]) == ("1", EXTRA)
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


@pytest.mark.parametrize(
    ("token", "error"),
    [("", Unauthenticated), ("\udcff", Unauthenticated), ("thief", Unauthenticated), ("guest", Forbidden)],
)
async def test_everybody_else_is_refused_each_time(token: str, error: type[Exception]) -> None:
    scrapers = Scrapers(Reviews())
    for _ in range(2):
        with pytest.raises(error):
            await scrapers.check(token)


@pytest.mark.parametrize("error", [Unavailable("no answer"), Refused("403: the operator may not create reviews")])
async def test_an_api_server_that_does_not_decide_allows_nobody(error: Exception) -> None:
    reviews = Reviews()
    scrapers, reviews.error = Scrapers(reviews), error
    with pytest.raises(CannotTell, match=str(error)):
        await scrapers.check("prometheus")
    reviews.error = None
    await scrapers.check("prometheus")
