"""Makes certificates, tokens and kubeconfigs of a cluster. They are kept until `down`."""

from __future__ import annotations

import base64
import json
import secrets
from pathlib import Path

from tools.devcluster import debian
from tools.devcluster.layout import API_SERVICE_IP, CONTEXT, MAX_NODES, Layout
from tools.devcluster.process import run

_USERS = {
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "proxy": ("system:kube-proxy", ""),
    **{f"node{i}": (f"system:node:node{i}", "system:nodes") for i in range(MAX_NODES)},
}
_NAMES = (
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "3650")


def _certificate(pki: Path, name: str, subject: str, *extensions: str) -> None:
    signer: list[str | Path] = [] if name == "ca" else ["-CA", pki / "ca.crt", "-CAkey", pki / "ca.key"]
    extra = [word for extension in extensions for word in ("-addext", extension)]
    run(
        [
            debian.program("openssl"),
            "req",
            "-x509",
            *_NEW_KEY,
            "-subj",
            subject,
            *signer,
            *extra,
            "-keyout",
            pki / f"{name}.key",
            "-out",
            pki / f"{name}.crt",
        ],
        env=debian.environment(),
    )


def _kubeconfig(layout: Layout, name: str, token: str) -> None:
    authority = base64.b64encode((layout.pki / "ca.crt").read_bytes()).decode()
    server = f"https://127.0.0.1:{layout.port}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": CONTEXT, "cluster": {"server": server, "certificate-authority-data": authority}}],
        "users": [{"name": CONTEXT, "user": {"token": token}}],
        "contexts": [{"name": CONTEXT, "context": {"cluster": CONTEXT, "user": CONTEXT}}],
        "current-context": CONTEXT,
    }
    path = layout.user_kubeconfig(name)
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1))


def make(layout: Layout) -> None:
    """Make everything below `layout.pki`, and one kubeconfig for each user, unless they exist."""
    pki = layout.pki
    if (pki / "done").exists():
        return
    pki.mkdir(parents=True, exist_ok=True, mode=0o700)
    leaf = ("basicConstraints=critical,CA:FALSE", "extendedKeyUsage=serverAuth,clientAuth")
    _certificate(pki, "ca", "/CN=kubernetes-ca", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature")
    names = ",".join([f"IP:127.0.0.1,IP:{API_SERVICE_IP}", *(f"DNS:{name}" for name in _NAMES)])
    _certificate(pki, "apiserver", "/CN=kube-apiserver", *leaf, f"subjectAltName={names}")
    _certificate(pki, "kubelet-client", "/O=system:masters/CN=apiserver-kubelet-client", *leaf)
    openssl = debian.program("openssl")
    run([openssl, "genrsa", "-out", pki / "sa.key", "2048"], env=debian.environment())
    run([openssl, "rsa", "-in", pki / "sa.key", "-pubout", "-out", pki / "sa.pub"], env=debian.environment())
    tokens = pki / "tokens.csv"
    tokens.touch(mode=0o600)
    rows = []
    for name, (user, groups) in _USERS.items():
        token = secrets.token_hex(16)
        rows.append(f'{token},{user},{user},"{groups}"\n')
        _kubeconfig(layout, name, token)
    tokens.write_text("".join(rows))
    (pki / "done").touch()
