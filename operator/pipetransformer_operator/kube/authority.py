"""The channel's authority on a cluster: its key in a Secret beside the operator, its certificate where jobs are.

The Secret outlives the operator, so workers trust the next one too.
"""

import base64

from ..channel.certificate import Authority, new_authority
from ..controller.ports import Conflict
from .api import MERGE_PATCH, Api, NotFound, Object
from .pods import CA_CONFIG_MAP, CA_FILE

SECRET = "pipetransformer-channel-ca"
KEY_FILE = "ca.key"


async def obtain_authority(api: Api, namespace: str) -> Authority:
    """Reads the authority from its Secret in the operator's namespace, or makes it and writes it there.

    Raises:
        Unavailable: the Secret can be neither read nor written.
    """
    path = f"/api/v1/namespaces/{namespace}/secrets"
    try:
        return _decode(await api.get(f"{path}/{SECRET}"))
    except NotFound:
        made = new_authority()
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET, "namespace": namespace},
        "type": "Opaque",
        "data": {
            CA_FILE: base64.b64encode(made.certificate).decode(),
            KEY_FILE: base64.b64encode(made.key).decode(),
        },
    }
    try:
        await api.request("POST", path, secret)
    except Conflict:  # another operator was quicker
        return _decode(await api.get(f"{path}/{SECRET}"))
    return made


class Publisher:
    """Puts the authority's certificate into namespaces, once each."""

    def __init__(self, api: Api, authority: Authority) -> None:
        self._api = api
        self._certificate = authority.certificate.decode()
        self._done: set[str] = set()

    async def publish(self, namespace: str) -> None:
        """Makes sure that the namespace holds the certificate.

        Raises:
            Unavailable: it cannot be written now.
        """
        if namespace in self._done:
            return
        path = f"/api/v1/namespaces/{namespace}/configmaps"
        data = {CA_FILE: self._certificate}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": CA_CONFIG_MAP}, "data": data}
        try:
            await self._api.request("POST", path, body)
        except Conflict:
            patch = {"data": data}
            await self._api.request("PATCH", f"{path}/{CA_CONFIG_MAP}", patch, content_type=MERGE_PATCH)
        self._done.add(namespace)


def _decode(secret: Object) -> Authority:
    data = secret["data"]
    return Authority(base64.b64decode(data[CA_FILE]), base64.b64decode(data[KEY_FILE]))
