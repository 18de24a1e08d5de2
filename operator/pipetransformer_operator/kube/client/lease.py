"""One operator at a time: the Lease that its holder renews and that others wait for.

Clocks of machines are never compared: a candidate takes over once the Lease has not changed for its duration by the
candidate's own clock, as client-go does. The holder counts from before its last renewal was sent and stops writing
(`held`) well before anybody else may start. While the API server is away nobody can take over, and nothing can be
written: the holder goes on serving what it has in memory, and may write again with its next renewal.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from pipetransformer_operator.controller.ports import Conflict, Unavailable

from .api import Api, NotFound, Object

logger = logging.getLogger(__name__)
NAME = "pipetransformer-operator"


class LeaseLost(Exception):
    """Another operator holds the Lease: what this one remembers is of no more use."""


class Lease:
    """See the module.

    Args:
        api: of the cluster; not guarded by this lease.
        namespace: of the lease.
        identity: of this operator, in words that lead to it; one that is started again under the same identity takes
            over at once.
        seconds: how long the Lease must stay unchanged before another operator takes it.
        gained: told when this operator may write, and when it may again.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        identity: str,
        *,
        seconds: int,
        gained: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._folder}/{NAME}"
        self._identity = identity
        self._seconds = seconds
        self._gained = gained
        self._clock = clock
        self._held_until = float("-inf")
        self._seen: str | None = None
        self._seen_at = 0.0

    @property
    def held(self) -> bool:
        """Whether this operator may write now."""
        return self._clock() < self._held_until

    async def attempt(self) -> str:
        """Takes or renews the Lease where that is right; returns who holds it, or nothing when that cannot be told."""
        sent = self._clock()
        try:
            async with asyncio.timeout(self._seconds / 3):
                holder = await self._take()
        except (Conflict, Unavailable, TimeoutError) as error:
            logger.warning("the lease %s cannot be renewed now: %s", NAME, error or type(error).__name__)
            return ""
        if holder == self._identity:
            held, self._held_until = self.held, sent + self._seconds * 2 / 3
            if not held:
                self._gained()
        return holder

    async def acquire(self) -> None:
        """Returns once this operator is the one."""
        waiting_for = ""
        while (holder := await self.attempt()) != self._identity:
            if holder and holder != waiting_for:
                logger.warning("%s holds the lease %s: waiting", holder, self._path)
                waiting_for = holder
            await asyncio.sleep(self._pause)
        logger.info("this operator (%s) holds the lease %s", self._identity, NAME)

    async def keep(self) -> None:
        """Renews for ever.

        Raises:
            LeaseLost: another operator took over.
        """
        while True:
            await asyncio.sleep(self._pause)
            holder = await self.attempt()
            if holder and holder != self._identity:
                self._held_until = float("-inf")
                raise LeaseLost(f"{holder} took over the lease {NAME} from {self._identity}")

    async def release(self) -> None:
        """Lets another operator take over at once, if this one holds the Lease; call it after the last write."""
        if not self.held:
            return
        self._held_until = float("-inf")
        try:
            lease = await self._api.get(self._path)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                await self._api.request("PUT", self._path, lease)
        except (NotFound, Conflict, Unavailable) as error:
            logger.warning("the lease is not released, it will expire: %s", error)

    @property
    def _pause(self) -> float:
        return self._seconds / 7

    async def _take(self) -> str:
        try:
            lease = await self._api.get(self._path)
        except NotFound:
            metadata = {"name": NAME}
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
            await self._api.request("POST", self._folder, {**body, "spec": self._spec({})})
            return self._identity
        spec = lease.get("spec", {})
        holder: str = spec.get("holderIdentity") or ""
        if self._seen != lease["metadata"]["resourceVersion"]:
            self._seen, self._seen_at = lease["metadata"]["resourceVersion"], self._clock()
        expired = self._clock() >= self._seen_at + spec.get("leaseDurationSeconds", self._seconds)
        others = holder not in ("", self._identity)
        if others and (self._held_until > float("-inf") or not expired):
            return holder
        await self._api.request("PUT", self._path, {**lease, "spec": self._spec(spec)})
        return self._identity

    def _spec(self, before: Object) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine = before.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._seconds,
            "acquireTime": before.get("acquireTime", now) if mine else now,
            "renewTime": now,
            "leaseTransitions": before.get("leaseTransitions", 0) + (0 if mine or not before else 1),
        }
