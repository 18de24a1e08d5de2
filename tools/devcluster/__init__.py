"""A real Kubernetes on one Linux machine, for tests and demos, without an outside container registry.

etcd, the API server, the controller manager and the scheduler run as plain processes. Each node is a containerd and a
kubelet on the same machine. CoreDNS's and the project's images come from a registry. Everything listens on loopback
only. Programs are built from Go modules or unpacked from Debian packages into a cache outside the checkout; `down`
removes everything except the cache.

    python -m tools.devcluster up | down | status | add-node | images | kubectl | helm
"""
