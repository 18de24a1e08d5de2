"""The channel's authorities: keys in a Secret of the operator's namespace, certificates in jobs' namespaces.

The Secret outlives the operator, so workers also trust the next one. Any operator may renew it, even one that waits for
the lease, because a write fails if the Secret changed since it was read.
"""

import asyncio
import base64
import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from pipetransformer_operator.channel.tls.certificate import (
    Authority,
    Validity,
    load_new_certificate,
    renewed,
    server_context,
    signing,
    validities,
)
from pipetransformer_operator.clocks import Clock, utc_now
from pipetransformer_operator.controller.ports import Conflict, Refused
from pipetransformer_operator.kube.client.api import REQUEST_FAILED, Api, NotFound

logger = logging.getLogger(__name__)
SECRET = "pipetransformer-channel-ca"
CA_CONFIG_MAP = "pipetransformer-channel-ca"
CA_FILE = "ca.crt"
KEY_FILE = "ca.key"
#: Pause before undoing another client's change, in case two operators serve one namespace by mistake.
RESTORE_SECONDS = 1.0
_KEY_END = b"-----END PRIVATE KEY-----\n"
_CERTIFICATE_END = b"-----END CERTIFICATE-----\n"


class SecretCertificate:
    """A `Certificate` whose authorities are in a Secret.

    Args:
        api: client of the API server.
        namespace: namespace of the operator.
        hosts: DNS names or IP addresses of the channel.
        clock: the present time, with its time zone.
    """

    def __init__(self, api: Api, namespace: str, hosts: Sequence[str], clock: Clock = utc_now) -> None:
        self._api = api
        self._collection = f"/api/v1/namespaces/{namespace}/secrets"
        self._hosts = hosts
        self._clock = clock
        self.context = server_context()
        self.trusted = b""
        self.validities: Mapping[str, Validity] = {}

    async def refresh(self) -> None:
        """See `Certificate`."""
        now = self._clock()
        try:
            authorities = await self._renew(now)
            server = load_new_certificate(self.context, signing(authorities, now), self._hosts, now)
        except (ValueError, TypeError) as error:
            raise ValueError(f"cannot use the Secret {SECRET}: {error}") from error
        self.trusted = b"".join(one.certificate for one in authorities)
        self.validities = validities(server, self.trusted)

    async def _renew(self, now: datetime) -> tuple[Authority, ...]:
        while True:
            secret = await self._read()
            known = _decode(secret) if secret else ()
            wanted = renewed(known, now)
            if wanted == known:
                return known
            try:
                if secret is None:
                    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "type": "Opaque"}
                    await self._api.request("POST", self._collection, {**body, "data": _encode(wanted)})
                else:
                    await self._api.request("PUT", f"{self._collection}/{SECRET}", {**secret, "data": _encode(wanted)})
            except Conflict:  # another operator was quicker
                continue
            return wanted

    async def _read(self) -> Object | None:
        try:
            return await self._api.get(f"{self._collection}/{SECRET}")
        except NotFound:
            return None


class Trust(Protocol):
    """Says what workers trust; a `Certificate` does."""

    @property
    def trusted(self) -> bytes:
        """PEM of the certificates to trust now."""
        ...


class Publisher:
    """Writes the certificates that workers trust into namespaces, once each until they change.

    Args:
        api: client of the API server.
        trust: says which certificates workers trust.
    """

    def __init__(self, api: Api, trust: Trust) -> None:
        self._api = api
        self._trust = trust
        self._done: dict[str, bytes] = {}
        self._writing: dict[str, asyncio.Task[None]] = {}

    async def publish(self, namespace: str) -> None:
        """Makes sure that the namespace holds the certificates. Calls during a write share its result, so that jobs do
        not wait for one slow failure after the other.

        Raises:
            Conflict: the namespace is gone.
            Unavailable: they cannot be written now.
        """
        while self._done.get(namespace) != self._trust.trusted:
            if namespace not in self._writing:
                self._writing[namespace] = asyncio.create_task(self._write(namespace))
                self._writing[namespace].add_done_callback(_take_error)
            await asyncio.shield(self._writing[namespace])

    async def republish(self, namespaces: Iterable[str]) -> None:
        """Writes into each namespace again, whatever was written before.

        A namespace that fails is tried again the next time; a slow one delays no other."""

        async def republish(namespace: str) -> None:
            self.forget(namespace)
            try:
                await self.publish(namespace)
            except REQUEST_FAILED as error:
                logger.warning("cannot renew %s of namespace %s: %s", CA_CONFIG_MAP, namespace, error)

        await asyncio.gather(*map(republish, namespaces))

    async def restore(self, config_map: Object, *, deleted: bool) -> None:
        """Undoes what another client changed or deleted, as a watch shows it. Raises as `publish`."""
        namespace = config_map["metadata"]["namespace"]
        done = self._done.get(namespace)
        if done is None or (not deleted and config_map.get("data", {}).get(CA_FILE) == done.decode()):
            return
        logger.warning("another client changed %s of namespace %s; restoring it", CA_CONFIG_MAP, namespace)
        await asyncio.sleep(RESTORE_SECONDS)
        self.forget(namespace)
        await self.publish(namespace)

    def forget(self, namespace: str) -> None:
        """The namespace may have lost the certificates: the next `publish` writes them again."""
        self._done.pop(namespace, None)

    def written(self, namespace: str) -> list[Object]:
        """The ConfigMaps that were written in the namespace; in all when it is empty."""
        names = [one for one in self._done if namespace in ("", one)]
        return [{"metadata": {"namespace": one, "name": CA_CONFIG_MAP}} for one in names]

    async def _write(self, namespace: str) -> None:
        trusted = self._trust.trusted
        try:
            await self._put(namespace, trusted)
            self._done[namespace] = trusted
        finally:
            del self._writing[namespace]

    async def _put(self, namespace: str, trusted: bytes) -> None:
        path = f"/api/v1/namespaces/{namespace}/configmaps"
        data = {CA_FILE: trusted.decode()}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": CA_CONFIG_MAP}, "data": data}
        try:
            await self._api.request("POST", path, body)
        except NotFound as error:  # the namespace is gone
            raise Conflict(str(error)) from error
        except (Conflict, Refused) as error:  # a full quota also refuses to create an object that exists
            patch = {"data": data}
            try:
                await self._api.request("PATCH", f"{path}/{CA_CONFIG_MAP}", patch, content_type=MERGE_PATCH)
            except NotFound:
                raise error from None


def _take_error(write: asyncio.Task[None]) -> None:
    """Takes the error of a write, because nothing waits for it any longer if the operator is stopping."""
    if not write.cancelled():
        write.exception()


def _decode(secret: Object) -> tuple[Authority, ...]:
    """The authorities; none if the Secret is empty.

    Raises:
        ValueError: the Secret holds something else.
    """
    data = secret.get("data") or {}
    certificates = _split(base64.b64decode(data.get(CA_FILE, "")), _CERTIFICATE_END)
    keys = _split(base64.b64decode(data.get(KEY_FILE, "")), _KEY_END)
    return tuple(Authority(certificate, key) for certificate, key in zip(certificates, keys, strict=True))


def _encode(authorities: Sequence[Authority]) -> dict[str, str]:
    certificates = b"".join(one.certificate for one in authorities)
    keys = b"".join(one.key for one in authorities)
    return {CA_FILE: base64.b64encode(certificates).decode(), KEY_FILE: base64.b64encode(keys).decode()}


def _split(text: bytes, end: bytes) -> list[bytes]:
    return [part + end for part in text.split(end) if part.strip()]
