"""TokenReviews: one for each token, few at a time, and forgotten with the pod."""

import asyncio
import base64
import json
from typing import Any

import pytest

from pipetransformer_contract.wire import TOKEN_AUDIENCE
from pipetransformer_operator.channel.authenticator import CannotTell, Unauthenticated
from pipetransformer_operator.controller.ports import Conflict, JobKey, Unavailable
from pipetransformer_operator.kube.client.api import NotFound
from pipetransformer_operator.kube.trust import tokens as trust
from pipetransformer_operator.kube.trust.tokens import PARALLEL_REVIEWS, TokenReviewer

KEY = JobKey("team", "digits")
POD_NAME, POD_UID = "authentication.kubernetes.io/pod-name", "authentication.kubernetes.io/pod-uid"


class Reviews:
    """An API server that knows every token, and answers when the test lets it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.pending = 0
        self.most_pending = 0
        self.answer = asyncio.Event()
        self.differs: dict[str, Any] = {}
        self.error: Exception | None = None

    async def request(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        token = body["spec"]["token"]
        assert (method, path) == ("POST", "/apis/authentication.k8s.io/v1/tokenreviews")
        spec = {"token": token, "audiences": [TOKEN_AUDIENCE]}
        assert body == {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        self.asked.append(token)
        self.pending += 1
        self.most_pending = max(self.most_pending, self.pending)
        await self.answer.wait()
        self.pending -= 1
        if self.error is not None:
            raise self.error
        extra = {f"authentication.kubernetes.io/pod-{key}": [f"{key}-{token}"] for key in ("name", "uid")}
        user = {"username": "system:serviceaccount:team:default", "extra": extra}
        status = {"authenticated": True, "audiences": [TOKEN_AUDIENCE], "user": user} | self.differs
        return {"status": {key: value for key, value in status.items() if value is not None}}


def token(number: int, expires: int = 100) -> str:
    return token_of({"exp": expires, "n": number})


def token_of(claims: object) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"header.{payload}.signature"


@pytest.fixture
async def reviews() -> Reviews:
    return Reviews()


async def until_sent() -> None:
    """Lets each task run until it waits for an answer."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_requests_that_come_together_are_one_review(reviews: Reviews) -> None:
    tokens = TokenReviewer(reviews, lambda: 0.0)  # type: ignore[arg-type]
    together = [asyncio.create_task(tokens.identify(token(1))) for _ in range(3)]
    await asyncio.sleep(0)
    reviews.answer.set()
    assert len(set(await asyncio.gather(*together))) == 1
    assert await tokens.identify(token(1)) == together[0].result()
    assert reviews.asked == [token(1)]


async def test_a_review_that_somebody_stops_waiting_for_still_serves_the_others(reviews: Reviews) -> None:
    tokens = TokenReviewer(reviews, lambda: 0.0)  # type: ignore[arg-type]
    first, second = (asyncio.create_task(tokens.identify(token(1))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    reviews.answer.set()
    assert (await second).namespace == "team"


async def test_a_thousand_unknown_tokens_do_not_flood_the_api_server(reviews: Reviews) -> None:
    tokens = TokenReviewer(reviews, lambda: 0.0)  # type: ignore[arg-type]
    asked = asyncio.gather(*(tokens.identify(token(number)) for number in range(1000)))
    await until_sent()
    reviews.answer.set()
    await asked
    assert len(reviews.asked) == 1000
    assert reviews.most_pending == PARALLEL_REVIEWS


async def test_of_a_pod_that_goes_while_its_token_is_reviewed_nothing_is_kept(reviews: Reviews) -> None:
    tokens = TokenReviewer(reviews, lambda: 0.0)  # type: ignore[arg-type]
    asked = asyncio.create_task(tokens.identify(token(1)))
    await until_sent()
    tokens.on_pod_gone(KEY, f"uid-{token(1)}")
    slow, reviews.answer = reviews.answer, asyncio.Event()
    reviews.answer.set()
    await tokens.identify(token(2))
    slow.set()
    assert (await asked).namespace == "team"
    assert tokens.known(token(1)) is None
    fresh = vars(TokenReviewer(reviews, lambda: 0.0))  # type: ignore[arg-type]
    assert vars(tokens)["_gone"] == fresh["_gone"]
    assert list(vars(tokens)["_of_pod"]) == [f"uid-{token(2)}"]


async def test_a_token_goes_with_its_pod_and_with_its_time(reviews: Reviews) -> None:
    now = [0.0]
    tokens = TokenReviewer(reviews, lambda: now[0])  # type: ignore[arg-type]
    reviews.answer.set()
    gone, late = await tokens.identify(token(1)), await tokens.identify(token(2, expires=50))
    tokens.on_pod_gone(KEY, gone.uid)
    assert tokens.known(token(1)) is None
    assert tokens.known(token(2, expires=50)) == late
    now[0] = 50.0
    assert tokens.known(token(2, expires=50)) is None


UNBOUND = "the token is not bound to a pod"


@pytest.mark.parametrize(
    ("differs", "text"),
    [
        ({"authenticated": False, "error": "it has expired"}, "it has expired"),
        ({"audiences": ["https://kubernetes.default.svc"]}, f"the token is not for audience {TOKEN_AUDIENCE}"),
        ({"audiences": None}, f"the token is not for audience {TOKEN_AUDIENCE}"),
        ({"user": {"username": "system:serviceaccount:team:default"}}, UNBOUND),
        ({"user": {"username": "system:serviceaccount:team:default", "extra": {POD_NAME: ["digits-w0"]}}}, UNBOUND),
        ({"user": {"username": "system:serviceaccount:team:default", "extra": {POD_UID: ["uid-0"]}}}, UNBOUND),
        ({"user": {"username": "team", "extra": {POD_NAME: ["digits-w0"], POD_UID: ["uid-0"]}}}, UNBOUND),
    ],
    ids=["unknown", "another-audience", "no-audience", "bound-to-no-pod", "no-uid", "no-name", "a-person"],
)
async def test_a_token_is_good_only_for_the_channel_and_of_a_pod(
    differs: dict[str, Any], text: str, reviews: Reviews
) -> None:
    tokens = TokenReviewer(reviews, lambda: 0.0)  # type: ignore[arg-type]
    reviews.differs = differs
    reviews.answer.set()
    with pytest.raises(Unauthenticated, match=f"^{text}$"):
        await tokens.identify(token(1))
    assert tokens.known(token(1)) is None


@pytest.mark.parametrize("error", [Unavailable("no answer"), NotFound("404"), Conflict("409")])
async def test_a_token_that_cannot_be_reviewed_now_is_reviewed_later(reviews: Reviews, error: Exception) -> None:
    tokens = TokenReviewer(reviews, lambda: 0.0)  # type: ignore[arg-type]
    reviews.error = error
    reviews.answer.set()
    with pytest.raises(CannotTell, match=f"the token cannot be checked now: {error}"):
        await tokens.identify(token(1))
    reviews.error = None
    assert (await tokens.identify(token(1))).namespace == "team"


@pytest.mark.parametrize("silent", ["opaque", "not.json.inside", token_of({}), token_of({"exp": None})])
async def test_a_token_that_does_not_say_when_it_expires_is_reviewed_each_time(reviews: Reviews, silent: str) -> None:
    tokens = TokenReviewer(reviews, lambda: 0.0)  # type: ignore[arg-type]
    reviews.answer.set()
    for _ in range(2):
        assert (await tokens.identify(silent)).namespace == "team"
    assert reviews.asked == [silent] * 2


async def test_where_many_tokens_are_known_those_that_expired_are_forgotten(
    reviews: Reviews, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "MAX_CACHED", 2)
    now = [0.0]
    tokens = TokenReviewer(reviews, lambda: now[0])  # type: ignore[arg-type]
    reviews.answer.set()
    await tokens.identify(token(1, expires=50))
    await tokens.identify(token(2))
    now[0] = 50.0
    await tokens.identify(token(3))
    now[0] = 0.0  # a clock that is set back shows what is kept
    kept = [tokens.known(one) is not None for one in (token(1, expires=50), token(2), token(3))]
    assert kept == [False, True, True]
    assert list(vars(tokens)["_of_pod"]) == [f"uid-{token(2)}", f"uid-{token(3)}"]


async def test_where_too_many_tokens_are_known_the_oldest_is_forgotten(
    reviews: Reviews, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "MAX_CACHED", 2)
    tokens = TokenReviewer(reviews, lambda: 0.0)  # type: ignore[arg-type]
    reviews.answer.set()
    for number in range(4):
        await tokens.identify(token(number))
    assert [tokens.known(token(number)) is not None for number in range(4)] == [False, False, True, True]
    assert list(vars(tokens)["_of_pod"]) == [f"uid-{token(2)}", f"uid-{token(3)}"]
