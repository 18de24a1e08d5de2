"""What happens in the cluster, told to every part that has to know it.

Watches and the accounting of accelerators tell one `Listeners` object, which tells each part in turn.
"""

from pipetransformer_operator.controller.ports import JobKey


class ClusterListener:
    """Is told what happens in the cluster. Every method does nothing here: override those that concern you."""

    def on_job_changed(self, key: JobKey) -> None:
        """Something new is known of the job."""

    def on_job_gone(self, key: JobKey) -> None:
        """No job has this name any longer."""

    def on_pod_changed(self, key: JobKey) -> None:
        """A pod of the job is new or has changed."""

    def on_pod_gone(self, key: JobKey, uid: str) -> None:
        """The pod of the job with this UID does not exist any longer."""

    def on_pods_listed(self, namespace: str) -> None:
        """All workers' pods of the namespace are known now; of all namespaces when it is empty."""

    def on_cluster_listed(self) -> None:
        """All nodes are known now, or all pods of other owners, or the API server refuses to list them."""

    def on_nodes_changed(self) -> None:
        """A node has a problem that it did not have, or no longer has one."""

    def on_accelerators_released(self, by: JobKey | None) -> None:
        """Pods of the job released accelerators. None: another owner's pod did, or a node has more for pods now."""

    def on_reservation_returned(self, by: JobKey) -> None:
        """The job no longer needs accelerators that it had reserved and never held."""

    def on_quota_changed(self, key: JobKey | None) -> None:
        """The queue of the job answered; None: it may be any job's."""

    def on_protection_touched(self, key: JobKey) -> None:
        """Another client changed or deleted what protects the job's workers."""

    def on_watch_opened(self, path: str) -> None:
        """The API server opened the watch of this path, or of this name if another watch has the same path."""

    def on_watch_refused(self, path: str) -> None:
        """The API server refused this watch: a namespace and the right to see it may be gone."""


class Listeners(ClusterListener):
    """Tells every listener that was added, in the order in which they were added."""

    def __init__(self) -> None:
        self._listeners: list[ClusterListener] = []

    def add(self, *listeners: ClusterListener) -> None:
        """Adds listeners, which are told of every later event."""
        self._listeners += listeners

    def on_job_changed(self, key: JobKey) -> None:
        """See `ClusterListener`."""
        for listener in self._listeners:
            listener.on_job_changed(key)

    def on_job_gone(self, key: JobKey) -> None:
        """See `ClusterListener`."""
        for listener in self._listeners:
            listener.on_job_gone(key)

    def on_pod_changed(self, key: JobKey) -> None:
        """See `ClusterListener`."""
        for listener in self._listeners:
            listener.on_pod_changed(key)

    def on_pod_gone(self, key: JobKey, uid: str) -> None:
        """See `ClusterListener`."""
        for listener in self._listeners:
            listener.on_pod_gone(key, uid)

    def on_pods_listed(self, namespace: str) -> None:
        """See `ClusterListener`."""
        for listener in self._listeners:
            listener.on_pods_listed(namespace)

    def on_cluster_listed(self) -> None:
        """See `ClusterListener`."""
        for listener in self._listeners:
            listener.on_cluster_listed()

    def on_nodes_changed(self) -> None:
        """See `ClusterListener`."""
        for listener in self._listeners:
            listener.on_nodes_changed()

    def on_accelerators_released(self, by: JobKey | None) -> None:
        """See `ClusterListener`."""
        for listener in self._listeners:
            listener.on_accelerators_released(by)

    def on_reservation_returned(self, by: JobKey) -> None:
        """See `ClusterListener`."""
        for listener in self._listeners:
            listener.on_reservation_returned(by)

    def on_quota_changed(self, key: JobKey | None) -> None:
        """See `ClusterListener`."""
        for listener in self._listeners:
            listener.on_quota_changed(key)

    def on_protection_touched(self, key: JobKey) -> None:
        """See `ClusterListener`."""
        for listener in self._listeners:
            listener.on_protection_touched(key)

    def on_watch_opened(self, path: str) -> None:
        """See `ClusterListener`."""
        for listener in self._listeners:
            listener.on_watch_opened(path)

    def on_watch_refused(self, path: str) -> None:
        """See `ClusterListener`."""
        for listener in self._listeners:
            listener.on_watch_refused(path)


#: For parts that nothing listens to, as in tests.
NO_LISTENER = ClusterListener()
