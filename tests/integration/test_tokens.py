"""Tokens of the real API server: whose are taken, whose are refused, and what is said about it."""

import base64
import json
import ssl
import time
from pathlib import Path

import aiohttp
import pytest
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from pipetransformer_contract.api.requests import Object
from pipetransformer_contract.wire import TOKEN_AUDIENCE
from pipetransformer_operator.kube.client.api import Api
from pipetransformer_operator.kube.trust.authority import CA_FILE, SECRET
from tests.testkit.operator.fake_kubelet import FakeKubelet
from tests.testkit.operator.jobs import packing_job
from tests.testkit.operator.namespace import Namespace, until
from tests.testkit.operator.operating import SYSTEM, Operator

pytestmark = pytest.mark.timeout(180)


async def issue(namespace: Namespace, audience: str, pod: Object | None) -> str:
    """A token of the namespace's ServiceAccount, bound to the pod if there is one."""
    spec: Object = {"audiences": [audience], "expirationSeconds": 3600}
    if pod is not None:
        metadata = pod["metadata"]
        reference = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        spec["boundObjectRef"] = reference
    answer = await namespace.api.request("POST", f"{namespace.core}/serviceaccounts/default/token", {"spec": spec})
    token: str = answer["status"]["token"]
    return token


def sign_anew(token: str, key: Path, *, seconds_left: float) -> str:
    """A copy of the token, with the key of the API server, that ends so many seconds from now."""

    def encode(part: bytes) -> str:
        return base64.urlsafe_b64encode(part).rstrip(b"=").decode()

    header, payload, _ = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    now = int(time.time())
    claims |= {"exp": now + int(seconds_left), "iat": now - 7200, "nbf": now - 7200}
    signed = f"{header}.{encode(json.dumps(claims).encode())}"
    private = load_pem_private_key(key.read_bytes(), None)
    assert isinstance(private, RSAPrivateKey)
    return f"{signed}.{encode(private.sign(signed.encode(), PKCS1v15(), SHA256()))}"


async def test_only_a_jobs_own_pods_are_heard_and_refusals_are_counted_and_logged_without_the_token(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet, kubeconfig: Path
) -> None:
    for name in ("first", "second"):
        await namespace.apply(packing_job(name).stages(1).workers(1))
        await namespace.layout(1, name)
    pod = (await namespace.pods())["first-w0"]
    stranger = {"metadata": {"name": "stranger"}, "spec": {"containers": [{"name": "main", "image": "x"}]}}
    stranger = await namespace.api.request("POST", f"{namespace.core}/pods", stranger)
    authority = await namespace.api.get(f"{namespace.core}/configmaps/pipetransformer-channel-ca")
    certificate = authority["data"]["ca.crt"]
    good, key = await kubelet.token(pod), kubeconfig.parent / "pki" / "sa.key"
    rows = {
        "nonsense": "nonsense",
        "another audience": await issue(namespace, "https://kubernetes.default.svc", pod),
        "bound to no pod": await issue(namespace, TOKEN_AUDIENCE, None),
        "of a pod that is gone": await issue(namespace, TOKEN_AUDIENCE, stranger),
        "expired": sign_anew(good, key, seconds_left=-600),
    }
    await namespace.api.request("DELETE", f"{namespace.core}/pods/stranger", {"gracePeriodSeconds": 0})

    async def ask(job: str, token: str) -> int:
        return await operator.generation(certificate, token, f"{namespace.name}/{job}")

    assert await ask("first", good) == 200
    assert await ask("first", sign_anew(good, key, seconds_left=600)) == 200
    assert await ask("second", good) == 403
    assert {row: await ask("first", token) for row, token in rows.items()} == dict.fromkeys(rows, 401)
    reasons = "pipetransformer_channel_refusals_total"
    assert await operator.figure(f'{reasons}{{reason="InvalidToken"}}') == len(rows)
    log = operator.log.read_text()
    assert "first" in log and not [token for token in (good, *rows.values()) if token in log]


async def test_a_token_is_refused_once_its_pod_is_gone(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(packing_job().stages(1).workers(1))
    await namespace.layout(1)
    pod = (await namespace.pods())["digits-w0"]
    authority = await namespace.api.get(f"{namespace.core}/configmaps/pipetransformer-channel-ca")
    token = await kubelet.token(pod)
    job = f"{namespace.name}/digits"
    assert await operator.generation(authority["data"]["ca.crt"], token, job) == 200
    await namespace.api.request("DELETE", f"{namespace.core}/pods/digits-w0", {"gracePeriodSeconds": 0})

    async def refused() -> bool:  # 401, or 403 as long as the API server remembers the token
        return await operator.generation(authority["data"]["ca.crt"], token, job) in (401, 403)

    await until("the token is refused", refused)


async def test_metrics_with_tls_are_for_accounts_that_may_get_them(
    namespace: Namespace, api: Api, kubeconfig: Path, tmp_path: Path
) -> None:
    operator = Operator(kubeconfig, tmp_path / "operator.log", identity="secure", namespace=namespace.name)
    operator.environment["PIPETRANSFORMER_SECURE_METRICS"] = "true"
    await operator.start()
    secret = await api.get(f"/api/v1/namespaces/{SYSTEM}/secrets/{SECRET}")
    trusted = ssl.create_default_context(cadata=base64.b64decode(secret["data"][CA_FILE]).decode())
    token = await issue(namespace, "https://kubernetes.default.svc", None)

    async def ask(token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = operator.metrics.replace("http:", "https:")
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers, ssl=trusted) as answer:
            return answer.status

    assert await ask("") == 401
    assert await ask("nonsense") == 401
    assert await ask(await issue(namespace, TOKEN_AUDIENCE, None)) == 401
    assert await ask(token) == 403
    rbac, name = "/apis/rbac.authorization.k8s.io/v1", f"{namespace.name}-scraper"
    rules = [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    await api.request("POST", f"{rbac}/clusterroles", {"metadata": {"name": name}, "rules": rules})
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": namespace.name}],
    }
    await api.request("POST", f"{rbac}/clusterrolebindings", binding)

    async def allowed() -> bool:
        return await ask(token) == 200

    await until("the API server knows the binding", allowed)
    for kind in ("clusterrolebindings", "clusterroles"):
        await api.request("DELETE", f"{rbac}/{kind}/{name}")
    await operator.kill()
