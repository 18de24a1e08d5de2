"""A real Kubernetes on one Linux machine, for tests and demos, without an outside container registry.

etcd, the API server, the controller manager and the scheduler run as plain processes; each node is a containerd and a
kubelet of its own on the same machine; CoreDNS and the project's images come from a registry on loopback. Everything
listens on loopback only. Binaries are built from Go modules or unpacked from Debian packages once, into a cache outside
the checkout; the host keeps nothing after `down` but that cache.

    python -m tools.devcluster up | down | status | add-node | images | kubectl | helm
"""
