"""The channel's authorities on a cluster: keys in a Secret beside the operator, certificates where jobs are.

The Secret outlives the operator, so workers trust the next one too. Any operator may renew it, the one that waits for
the lease as well: each write is made on what was read.
"""

import asyncio
import base64
import logging
import ssl
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

from pipetransformer_operator.channel.tls.certificate import (
    Authority,
    load_new_certificate,
    renewed,
    server_context,
    signing,
)
from pipetransformer_operator.controller.ports import Conflict, Refused, Unavailable
from pipetransformer_operator.kube.client.api import MERGE_PATCH, Api, NotFound, Object

logger = logging.getLogger(__name__)
SECRET = "pipetransformer-channel-ca"
CA_CONFIG_MAP = "pipetransformer-channel-ca"
CA_FILE = "ca.crt"
KEY_FILE = "ca.key"
#: Before a change of others is undone: two operators that serve one namespace by mistake would not stop to undo theirs.
RESTORE_SECONDS = 1.0
_KEY_END = b"-----END PRIVATE KEY-----\n"
_CERTIFICATE_END = b"-----END CERTIFICATE-----\n"


def _utc_now() -> datetime:
    return datetime.now(UTC)


class KeptAuthority:
    """A `Certificate` of authorities that are kept in a Secret.

    Args:
        api: of the cluster.
        namespace: of the operator.
        hosts: names of the channel.
        clock: the present time, aware of its zone.
    """

    def __init__(
        self, api: Api, namespace: str, hosts: Sequence[str], clock: Callable[[], datetime] = _utc_now
    ) -> None:
        self._api = api
        self._folder = f"/api/v1/namespaces/{namespace}/secrets"
        self._hosts = hosts
        self._clock = clock
        self._context = server_context()
        self._trusted = b""

    @property
    def context(self) -> ssl.SSLContext:
        """See `Certificate`."""
        return self._context

    @property
    def trusted(self) -> bytes:
        """See `Certificate`."""
        return self._trusted

    async def refresh(self) -> None:
        """See `Certificate`."""
        now = self._clock()
        authorities = await self._renew(now)
        load_new_certificate(self._context, signing(authorities, now), self._hosts, now)
        self._trusted = b"".join(one.certificate for one in authorities)

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
                    await self._api.request("POST", self._folder, {**body, "data": _encode(wanted)})
                else:
                    await self._api.request("PUT", f"{self._folder}/{SECRET}", {**secret, "data": _encode(wanted)})
            except Conflict:  # another operator was quicker
                continue
            return wanted

    async def _read(self) -> Object | None:
        try:
            return await self._api.get(f"{self._folder}/{SECRET}")
        except NotFound:
            return None


class Publisher:
    """Puts what workers are to trust into namespaces, once each as long as it does not change.

    Args:
        api: of the cluster.
        trusted: PEM of the certificates to trust now.
    """

    def __init__(self, api: Api, trusted: Callable[[], bytes]) -> None:
        self._api = api
        self._trusted = trusted
        self._done: dict[str, bytes] = {}
        self._writing: dict[str, asyncio.Task[None]] = {}

    async def publish(self, namespace: str) -> None:
        """Makes sure that the namespace holds the certificates. Who asks while they are written shares what comes of
        it: where that takes long, and fails, jobs would wait for one attempt after the other.

        Raises:
            Unavailable: they cannot be written now.
        """
        while self._done.get(namespace) != self._trusted():
            if namespace not in self._writing:
                self._writing[namespace] = asyncio.create_task(self._write(namespace))
            await asyncio.shield(self._writing[namespace])

    async def publish_anew(self, namespaces: Iterable[str]) -> None:
        """Writes into each whatever was written before; one that does not take it now is told the next time, and one
        that is slow holds up no other."""

        async def publish_anew(namespace: str) -> None:
            self.forget(namespace)
            try:
                await self.publish(namespace)
            except (Conflict, NotFound, Unavailable) as error:
                logger.warning("%s of namespace %s is not renewed: %s", CA_CONFIG_MAP, namespace, error)

        await asyncio.gather(*map(publish_anew, namespaces))

    async def restore(self, config_map: Object, *, deleted: bool) -> None:
        """Puts back what somebody else deleted or changed, as a watch shows it. Raises as `publish`."""
        namespace = config_map["metadata"]["namespace"]
        done = self._done.get(namespace)
        if done is None or (not deleted and config_map.get("data", {}).get(CA_FILE) == done.decode()):
            return
        logger.warning("%s of namespace %s was changed by others; it is put back", CA_CONFIG_MAP, namespace)
        await asyncio.sleep(RESTORE_SECONDS)
        self.forget(namespace)
        await self.publish(namespace)

    def forget(self, namespace: str) -> None:
        """The namespace may have lost them: it is told again when it is asked for next."""
        self._done.pop(namespace, None)

    def written(self, namespace: str) -> list[Object]:
        """Which ConfigMaps were written, in a namespace; in all when empty."""
        names = [one for one in self._done if namespace in ("", one)]
        return [{"metadata": {"namespace": one, "name": CA_CONFIG_MAP}} for one in names]

    async def _write(self, namespace: str) -> None:
        trusted = self._trusted()
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
        except (Conflict, Refused) as error:  # a full quota refuses what exists, too
            patch = {"data": data}
            try:
                await self._api.request("PATCH", f"{path}/{CA_CONFIG_MAP}", patch, content_type=MERGE_PATCH)
            except NotFound:
                raise error from None


def _decode(secret: Object) -> tuple[Authority, ...]:
    """The authorities; none where somebody emptied the Secret.

    Raises:
        ValueError: it holds something else.
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
