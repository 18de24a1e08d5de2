"""Certificates of the channel: workers trust the server at every instant while authorities follow each other."""

import asyncio
import base64
import gc
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientConnectorCertificateError, ClientSession, web
from aiohttp.test_utils import TestServer
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from pipetransformer_operator.channel.tls.certificate import (
    AUTHORITY_LIFETIME,
    RENEWAL,
    SERVER_LIFETIME,
    SPREAD,
    Authority,
    MountedCertificate,
    load_new_certificate,
    new_authority,
    renewed,
    server_context,
    signing,
)
from pipetransformer_operator.controller.ports import Conflict, Refused, Unavailable
from pipetransformer_operator.kube.client.api import NotFound
from pipetransformer_operator.kube.trust.authority import RESTORE_SECONDS, SECRET, Publisher, SecretCertificate
from tests.testkit.operator.fake_lease_api import FakeApi

pytestmark = pytest.mark.timeout(60)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_workers_trust_an_authority_for_a_day_before_it_signs() -> None:
    authorities: tuple[Authority, ...] = ()
    published: dict[bytes, datetime] = {}
    signers: list[bytes] = []
    for hours in range(0, 3 * 365 * 24, 12):
        now = NOW + timedelta(hours=hours)
        authorities = renewed(authorities, now)
        signer = signing(authorities, now)
        for one in authorities:
            published.setdefault(one.certificate, now)
        assert signer.end > now + RENEWAL - SPREAD - timedelta(days=1)
        assert len(published) == 1 or now - published[signer.certificate] >= SPREAD or signer == authorities[0]
        if signer.certificate not in signers:
            signers.append(signer.certificate)
        assert len(authorities) <= 2
    assert len(signers) == 5  # every eight months


def trusting(*authorities: Authority) -> ssl.SSLContext:
    """As strict as workers are with Python 3.13 and newer."""
    context = ssl.create_default_context(cadata="".join(one.certificate.decode() for one in authorities))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


@dataclass
class Trust:
    """What workers trust now."""

    trusted: bytes


async def test_a_running_server_changes_its_certificate_unnoticed() -> None:
    now = datetime.now(UTC)
    old, new = new_authority(now), new_authority(now)
    context = server_context()

    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.add_routes([web.get("/", hello)])
    server = TestServer(app, scheme="https", host="127.0.0.1")
    load_new_certificate(context, old, ["127.0.0.1"], now)
    await server.start_server(ssl=context)

    async def asked(trusted: ssl.SSLContext) -> int:
        async with ClientSession() as session, session.get(server.make_url("/"), ssl=trusted) as response:
            return response.status

    assert await asked(trusting(old, new)) == 200
    with pytest.raises(ClientConnectorCertificateError):
        await asked(trusting(new))
    load_new_certificate(context, new, ["127.0.0.1"], now)
    assert await asked(trusting(old, new)) == 200
    with pytest.raises(ClientConnectorCertificateError):
        await asked(trusting(old))
    await server.close()


def test_a_channel_of_a_long_name_has_a_certificate() -> None:
    """The names of the release and of its namespace may be longer than a certificate's common name."""
    host = f"{'release' * 7}.{'namespace' * 7}.svc"
    made = load_new_certificate(server_context(), new_authority(NOW), [host], NOW)
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [host]


async def shown_by(context: ssl.SSLContext) -> bytes:
    """The certificate that a server shows to its clients."""
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context) as server:
        address = server.sockets[0].getsockname()
        return (await asyncio.to_thread(ssl.get_server_certificate, address, timeout=10)).encode()


async def test_authorities_outlive_the_operator_and_are_renewed_in_the_secret() -> None:
    api, times = FakeApi(), [NOW]
    first = SecretCertificate(api, "system", ["operator"], clock=lambda: times[-1])
    await first.refresh()
    next_one = SecretCertificate(api, "system", ["operator"], clock=lambda: times[-1])
    await next_one.refresh()
    assert next_one.trusted == first.trusted
    assert api.methods == ["GET", "POST", "GET"], "nothing is written that is there"
    assert first.trusted.count(b"BEGIN CERTIFICATE") == 1
    times.append(NOW + AUTHORITY_LIFETIME - RENEWAL + timedelta(days=1))
    await next_one.refresh()
    assert next_one.trusted.startswith(first.trusted)
    assert next_one.trusted.count(b"BEGIN CERTIFICATE") == 2
    shown = x509.load_pem_x509_certificate(await shown_by(next_one.context))
    shown.verify_directly_issued_by(x509.load_pem_x509_certificate(first.trusted))
    await first.refresh()
    assert first.trusted == next_one.trusted, "the new authority is in the Secret"
    assert api.object is not None and api.object["metadata"]["name"] == SECRET
    del api.object["data"]  # somebody emptied it
    await next_one.refresh()
    assert next_one.trusted.count(b"BEGIN CERTIFICATE") == 1 and next_one.trusted not in first.trusted


async def test_of_two_operators_that_make_an_authority_at_once_both_use_the_first_one() -> None:
    class Slow(FakeApi):
        async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
            await asyncio.sleep(0)
            return await super().request(method, path, body, **options)

    api = Slow()
    first, second = (SecretCertificate(api, "system", ["operator"], clock=lambda: NOW) for _ in range(2))
    await asyncio.gather(first.refresh(), second.refresh())
    assert api.methods == ["GET", "GET", "POST", "POST", "GET"]
    assert first.trusted == second.trusted


@pytest.mark.parametrize("wrong", ["another kind of key", "no key", "no certificate"])
async def test_a_secret_that_somebody_changed_is_refused_by_its_name_and_the_old_certificate_stays(wrong: str) -> None:
    api = FakeApi()
    kept = SecretCertificate(api, "system", ["operator"], clock=lambda: NOW)
    await kept.refresh()
    trusted, shown = kept.trusted, await shown_by(kept.context)
    assert api.object is not None
    if wrong == "another kind of key":
        key = rsa.generate_private_key(65537, 2048)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        api.object["data"]["ca.key"] = base64.b64encode(pem).decode()
    else:
        del api.object["data"]["ca.key" if wrong == "no key" else "ca.crt"]
    with pytest.raises(ValueError, match=f"cannot use the Secret {SECRET}: "):
        await kept.refresh()
    assert (kept.trusted, await shown_by(kept.context)) == (trusted, shown)


async def test_what_is_in_use_says_when_it_expires(tmp_path: Path) -> None:
    times = [NOW]
    kept = SecretCertificate(FakeApi(), "system", ["operator"], clock=lambda: times[-1])
    assert kept.validities == {}
    await kept.refresh()
    assert {name: one.end - NOW for name, one in kept.validities.items()} == {
        "Server": SERVER_LIFETIME,
        "Authority": AUTHORITY_LIFETIME,
    }
    assert {NOW - one.start for one in kept.validities.values()} == {timedelta(hours=1)}, "clocks of nodes differ"
    times.append(NOW + timedelta(days=20))
    await kept.refresh()
    assert kept.validities["Server"].end == times[-1] + SERVER_LIFETIME, "each refresh makes a new one"
    old, new = new_authority(NOW), new_authority(NOW + timedelta(days=7))
    mount(tmp_path, old, trusted=old.certificate + new.certificate)
    mounted = MountedCertificate(tmp_path)
    await mounted.refresh()
    assert mounted.validities["Server"].end == old.end
    assert mounted.validities["Authority"].end == new.end


async def test_namespaces_are_told_again_only_when_there_is_something_new() -> None:
    api, trust = FakeApi(), Trust(b"old")
    publisher = Publisher(api, trust)
    await publisher.publish("team")
    await publisher.publish("team")
    assert api.object is not None
    assert api.object["metadata"]["resourceVersion"] == "1"
    trust.trusted = b"old and new"
    await publisher.publish("team")
    assert api.object["data"] == {"ca.crt": "old and new"}
    api.object = None  # the namespace was deleted with its jobs, and made again
    publisher.forget("team")
    await publisher.publish("team")
    assert api.object is not None


async def test_what_others_wrote_is_put_back_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("asyncio.sleep", sleep)
    api = FakeApi()
    mine, theirs = Publisher(api, Trust(b"mine")), Publisher(api, Trust(b"theirs"))

    async def restored() -> Object:
        assert api.object is not None
        await mine.restore(api.object | {"metadata": {"namespace": "team"}}, deleted=False)
        return api.object

    await mine.publish("team")
    assert (await restored())["metadata"]["resourceVersion"] == "1"
    assert pauses == []
    await theirs.publish("team")
    assert (await restored())["data"] == {"ca.crt": "mine"}
    assert pauses == [RESTORE_SECONDS]
    assert api.object is not None
    del api.object["data"]  # somebody emptied it
    assert (await restored())["data"] == {"ca.crt": "mine"}


@pytest.mark.parametrize("deleted", [False, True])
async def test_certificates_that_this_operator_did_not_write_are_left_alone(deleted: bool) -> None:
    """As those of an earlier operator, which a user deletes where no job is left."""
    api = FakeApi()
    publisher = Publisher(api, Trust(b"mine"))
    await publisher.restore({"metadata": {"namespace": "left"}, "data": {"ca.crt": "old"}}, deleted=deleted)
    assert (api.methods, publisher.written("")) == ([], [])


async def test_what_was_lost_unseen_is_written_again_with_the_next_renewal() -> None:
    api = FakeApi()
    publisher = Publisher(api, Trust(b"mine"))
    await publisher.publish("team")
    api.object = None
    await publisher.republish(["team"])
    assert api.object is not None and api.object["data"] == {"ca.crt": "mine"}


async def test_an_operator_of_two_namespaces_misses_in_the_list_of_one_nothing_of_the_other() -> None:
    publisher = Publisher(FakeApi(), Trust(b"mine"))
    for namespace in ("one", "two"):
        await publisher.publish(namespace)
    written = {where: [one["metadata"]["namespace"] for one in publisher.written(where)] for where in ("two", "")}
    assert written == {"two": ["two"], "": ["one", "two"]}


async def test_a_namespace_that_refuses_or_is_slow_keeps_nobody_else_from_what_is_new() -> None:
    told: list[str] = []
    others = asyncio.Event()

    class Refusing(FakeApi):
        async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
            if "/slow/" in path:
                await others.wait()
            if "/two/" in path:
                others.set()
            if "/closed/" in path:
                raise Refused("a quota says no")
            if "/gone/" in path or method == "PATCH":
                raise NotFound("no such namespace")
            if "/contested/" in path:
                raise Conflict("another client made it, and deleted it meanwhile")
            told.append(path.split("/")[4])
            return {}

    publisher = Publisher(Refusing(), Trust(b"new"))
    await publisher.republish(["one", "slow", "closed", "gone", "contested", "two"])
    assert told == ["one", "two", "slow"]


async def test_a_namespace_with_a_full_quota_still_gets_new_certificates() -> None:
    class Full(FakeApi):
        async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
            if method == "POST":
                raise Refused("exceeded quota")
            assert options == {"content_type": MERGE_PATCH}
            if self.object is None:
                raise NotFound(path)
            return await super().request(method, path, body, **options)

    api = Full()
    publisher = Publisher(api, Trust(b"new"))
    with pytest.raises(Refused, match="exceeded quota"):
        await publisher.publish("team")
    api.object = {"metadata": {"resourceVersion": "1"}, "data": {"ca.crt": "old"}}
    await publisher.publish("team")
    assert api.object["data"] == {"ca.crt": "new"}


def mount(folder: Path, authority: Authority, trusted: bytes = b"") -> None:
    """As cert-manager would, with the authority's own certificate as the server's. Some files end without a newline."""
    files = {
        "ca.crt": (trusted or authority.certificate).strip(),
        "tls.crt": authority.certificate,
        "tls.key": authority.key,
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)


async def test_a_mounted_certificate_of_a_new_authority_waits_for_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, newest = (new_authority(NOW) for _ in range(3))
    mounted = MountedCertificate(tmp_path)
    loaded: list[bytes] = []

    class Context(ssl.SSLContext):
        def load_cert_chain(self, certfile: Any, keyfile: Any = None, password: Any = None) -> None:
            loaded.append(Path(certfile).read_bytes())

    monkeypatch.setattr(mounted, "context", Context(ssl.PROTOCOL_TLS_SERVER))

    def trusts() -> list[Authority]:
        read = ssl.create_default_context(cadata=mounted.trusted.decode()).get_ca_certs(binary_form=True)
        return [one for one in (old, new, newest) if ssl.PEM_cert_to_DER_cert(one.certificate.decode()) in read]

    mount(tmp_path, old)
    await mounted.refresh()
    mount(tmp_path, new)
    await mounted.refresh()
    assert (loaded, trusts()) == ([old.certificate], [old, new])
    await mounted.refresh()
    assert (loaded[1:], trusts()) == ([new.certificate], [new])
    mount(tmp_path, newest)
    await mounted.refresh()
    mount(tmp_path, old)  # taken back meanwhile
    await mounted.refresh()
    assert (loaded[2:], trusts()) == ([], [old, new])
    mount(tmp_path, new, trusted=old.certificate + new.certificate)
    await mounted.refresh()
    assert (loaded[2:], trusts()) == ([new.certificate], [old, new])


async def test_concurrent_calls_share_one_attempt_to_publish() -> None:
    attempts = 0

    class Slow(FakeApi):
        async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
            nonlocal attempts
            attempts += method == "POST"
            await asyncio.sleep(0)
            raise Refused("a webhook does not answer")

    publisher = Publisher(Slow(), Trust(b"new"))
    for each in (1, 2):
        answers = await asyncio.gather(*(publisher.publish("team") for _ in range(8)), return_exceptions=True)
        assert all(isinstance(answer, Refused) for answer in answers) and len(answers) == 8
        assert attempts == each


@pytest.mark.parametrize("cancelled", [False, True], ids=["failed", "cancelled"])
async def test_a_write_that_ends_after_its_callers_have_stopped_complains_to_nobody(cancelled: bool) -> None:
    began, ends = asyncio.Event(), asyncio.Event()
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))

    class Away(FakeApi):
        async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
            began.set()
            await ends.wait()
            raise Unavailable(path)

    caller = asyncio.create_task(Publisher(Away(), Trust(b"one")).publish("team"))
    await began.wait()
    (write,) = asyncio.all_tasks() - {caller, asyncio.current_task()}
    caller.cancel()
    await asyncio.wait([caller])
    if cancelled:
        write.cancel()
    ends.set()
    await asyncio.wait([write])
    del write
    gc.collect()
    assert complaints == []


async def test_who_asks_while_an_older_certificate_is_written_gets_the_new_one() -> None:
    trust, written = Trust(b"old"), []

    class Renewed(FakeApi):
        async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
            written.append(body["data"]["ca.crt"])
            trust.trusted = b"new"
            await asyncio.sleep(0)
            return {}

    publisher = Publisher(Renewed(), trust)
    await asyncio.gather(publisher.publish("team"), publisher.publish("team"))
    assert written == ["old", "new"]


async def test_a_broken_mounted_certificate_does_not_replace_a_good_one(tmp_path: Path) -> None:
    mounted = MountedCertificate(tmp_path)
    with pytest.raises(ValueError, match=r"cannot load tls\.crt, tls\.key and ca\.crt"):
        await mounted.refresh()
    made = new_authority(NOW)
    for name, content in (("ca.crt", made.certificate), ("tls.crt", made.certificate), ("tls.key", made.key)):
        (tmp_path / name).write_bytes(content)
    await mounted.refresh()
    assert mounted.trusted == made.certificate
    (tmp_path / "ca.crt").write_text("torn")
    with pytest.raises(ValueError, match="cannot load"):
        await mounted.refresh()
    assert mounted.trusted == made.certificate


async def test_a_mounted_certificate_whose_key_is_not_there_yet_leaves_the_server_as_it_was(tmp_path: Path) -> None:
    mounted, old, new = MountedCertificate(tmp_path), new_authority(NOW), new_authority(NOW)
    mount(tmp_path, old, trusted=old.certificate + new.certificate)
    await mounted.refresh()
    (tmp_path / "tls.crt").write_bytes(new.certificate)
    with pytest.raises(ValueError, match="cannot load"):
        await mounted.refresh()
    assert await shown_by(mounted.context) == old.certificate


def test_where_no_authority_is_trusted_everywhere_yet_the_oldest_signs() -> None:
    younger, older = new_authority(NOW), new_authority(NOW - timedelta(minutes=1))
    assert signing([younger, older], NOW) == older
    assert signing([younger, older], NOW + SPREAD) == younger
