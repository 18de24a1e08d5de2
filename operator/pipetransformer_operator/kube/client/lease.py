"""The Lease that makes one operator the writer: its holder renews it, and other operators wait for it.

As in client-go, clocks of machines are never compared. A candidate takes over when its own clock has seen the Lease
unchanged for its duration. The holder counts from before it sent its last renewal, and stops writing (`held`) well
before another may start. It renews with one request, and reads the Lease only after another client changed it.
During an outage of the API server no operator can take over or write. The holder serves workers from memory, and may
write again after its next renewal.
"""

import asyncio
import logging
from typing import Protocol

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.clocks import MACHINE, Sources
from pipetransformer_operator.controller.ports import Conflict

from .api import REQUEST_FAILED, Api, NotFound

logger = logging.getLogger(__name__)
NAME = "pipetransformer-operator"


class LeaseLost(Exception):
    """Another operator holds the Lease, so what this one remembers is out of date."""


class LeaseListener(Protocol):
    """Is told when this operator becomes the writer."""

    def on_lease_gained(self) -> None:
        """This operator may write now: it holds the Lease for the first time, or again after an outage."""
        ...


class Lease:
    """Holds the Lease for this operator, or waits until no other operator holds it.

    Args:
        api: client of the API server, which this lease does not guard.
        namespace: namespace of the Lease.
        identity: name of this operator, which an admin can read. An operator that restarts with the same identity takes
            over at once.
        seconds: how long the Lease must stay unchanged before another operator takes it.
        sources: the clocks to use.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        identity: str,
        *,
        seconds: int,
        sources: Sources = MACHINE,
    ) -> None:
        self._api = api
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._collection}/{NAME}"
        self._identity = identity
        self._seconds = seconds
        self._clock, self._now = sources.seconds, sources.now
        self._held_until = float("-inf")
        self._written: Object | None = None
        self._seen: str | None = None
        self._seen_at = 0.0
        self._listeners: list[LeaseListener] = []

    def add(self, listener: LeaseListener) -> None:
        """Adds a listener, which is told of every later gain."""
        self._listeners.append(listener)

    @property
    def held(self) -> bool:
        """Whether this operator may write now."""
        return self._clock() < self._held_until

    async def attempt(self) -> str:
        """Renews the Lease, or takes it if it is free or has expired. Returns its holder; empty if that is unknown."""
        sent = self._clock()
        try:
            async with asyncio.timeout(self._seconds / 3):
                holder = await self._take()
        except (*REQUEST_FAILED, TimeoutError) as error:
            logger.warning("cannot renew the lease %s: %s", NAME, error or type(error).__name__)
            return ""
        if holder == self._identity:
            held, self._held_until = self.held, sent + self._seconds * 2 / 3
            if not held:
                for listener in self._listeners:
                    listener.on_lease_gained()
        return holder

    async def acquire(self) -> None:
        """Waits until this operator holds the Lease."""
        waiting_for = ""
        while (holder := await self.attempt()) != self._identity:
            if holder and holder != waiting_for:
                logger.warning("%s holds the lease %s: waiting", holder, self._path)
                waiting_for = holder
            await asyncio.sleep(self._pause)
        logger.info("this operator (%s) holds the lease %s", self._identity, NAME)

    async def keep(self) -> None:
        """Renews the Lease until it is lost.

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
        """Releases the Lease, so that another operator takes over at once. Call it after the last write."""
        if not self.held:
            return
        self._held_until = float("-inf")
        try:
            lease = await self._api.get(self._path)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                await self._api.request("PUT", self._path, lease)
        except REQUEST_FAILED as error:
            logger.warning("cannot release the lease, so it will expire: %s", error)

    @property
    def _pause(self) -> float:
        return self._seconds / 7

    async def _take(self) -> str:
        if self.held and self._written is not None:
            try:
                return await self._write(self._written)
            except (Conflict, NotFound) as error:
                logger.warning("another client changed the lease %s: %s", NAME, error)
        return await self._read_and_take()

    async def _read_and_take(self) -> str:
        try:
            lease = await self._api.get(self._path)
        except NotFound:
            metadata = {"name": NAME}
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
            self._written = await self._api.request("POST", self._collection, {**body, "spec": self._spec({})})
            return self._identity
        spec = lease.get("spec", {})
        holder: str = spec.get("holderIdentity") or ""
        if self._seen != lease["metadata"]["resourceVersion"]:
            self._seen, self._seen_at = lease["metadata"]["resourceVersion"], self._clock()
        expired = self._clock() >= self._seen_at + spec.get("leaseDurationSeconds", self._seconds)
        is_other = holder not in ("", self._identity)
        if is_other and (self._held_until > float("-inf") or not expired):
            return holder
        return await self._write(lease)

    async def _write(self, lease: Object) -> str:
        spec = self._spec(lease.get("spec", {}))
        self._written = await self._api.request("PUT", self._path, {**lease, "spec": spec})
        return self._identity

    def _spec(self, before: Object) -> Object:
        now = self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine = before.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._seconds,
            "acquireTime": before.get("acquireTime", now) if mine else now,
            "renewTime": now,
            "leaseTransitions": before.get("leaseTransitions", 0) + (0 if mine or not before else 1),
        }
