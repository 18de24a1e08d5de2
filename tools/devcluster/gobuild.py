"""Builds programs from Go modules once for each version. The key of the cache is the digest of go.mod and go.sum.

Each module under `go/` pins its versions; `go mod tidy` writes its go.sum.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from tools.devcluster.layout import SOURCES, cache_dir
from tools.devcluster.process import Argument, CommandError, locked, run, say

KUBERNETES = "1.36.2"
#: The first version whose scheduler knows gangs (`PodGroup`) that can change.
KUBERNETES_WITH_GANGS = "1.37.2"
#: Folder under `go/` that pins each version.
_MODULES = {KUBERNETES: "kubernetes", KUBERNETES_WITH_GANGS: "kubernetes-1.37"}
HELM = "3.19.0"
KUEUE = "0.15.0"
VOLCANO = "1.14.1"
PROMETHEUS_OPERATOR = "0.85.0"
_VERSION_PACKAGE = "k8s.io/component-base/version"
_KUBERNETES_PROGRAMS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
)
_CONTROL_PLANE_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
_MAJOR, _MINOR, _ = KUBERNETES.split(".")
#: How long a download is begun again. Go itself gives up when a name server is silent for 10 s.
_NETWORK_SECONDS = 180
_NO_NETWORK = re.compile("dial tcp|i/o timeout|handshake timeout|reset by peer")


def _go() -> str:
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if found is None:
        raise CommandError("Go 1.26 or newer is needed to build Kubernetes: put `go` on the PATH")
    return found


def _run_go(*arguments: Argument, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run Go and return its stdout. If it did not reach the network, it runs again; it keeps what it has downloaded."""
    deadline = time.monotonic() + _NETWORK_SECONDS
    while True:
        try:
            return run([_go(), *arguments], cwd=cwd, env=env)
        except CommandError as error:
            if not _NO_NETWORK.search(str(error)) or time.monotonic() > deadline:
                raise
            say(f"Go did not reach the network, and tries again: {str(error)[-300:]}")
            time.sleep(1)


def cache_key(module: Path, salt: str) -> str:
    """Digest of a module's sources and of `salt`."""
    digest = hashlib.sha256(salt.encode())
    for file in sorted([*module.glob("go.*"), *module.glob("*.go")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _flags(ldflags: str) -> str:
    return f"-s -w {ldflags}".strip()


def _folder(module: str, version: str, ldflags: str) -> Path:
    return cache_dir() / "go" / f"{module}-{version}-{cache_key(SOURCES / 'go' / module, _flags(ldflags))}"


def _build(module: str, packages: dict[str, str], *, version: str, ldflags: str = "") -> Path:
    """Build `packages` (program name -> import path) of `go/<module>` and return the folder of the programs."""
    folder = _folder(module, version, ldflags)
    if all((folder / name).exists() for name in packages):
        return folder
    env = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false"}
    with locked(folder):
        for name, package in packages.items():
            if (folder / name).exists():
                continue
            say(f"building {name} {version}")
            half = folder / f".{name}.building"
            source = SOURCES / "go" / module
            _run_go("build", "-ldflags", _flags(ldflags), "-o", half, package, cwd=source, env=env)
            half.rename(folder / name)
    return folder


def _module(pins: str, module: str) -> Path:
    """Folder of a Go module's sources, in the version that `go/<pins>` pins."""
    return Path(json.loads(_run_go("mod", "download", "-json", module, cwd=SOURCES / "go" / pins))["Dir"])


def _names(*, nodes: bool) -> tuple[str, ...]:
    return _KUBERNETES_PROGRAMS if nodes else _CONTROL_PLANE_PROGRAMS


def _stamp(version: str) -> str:
    """Flags that make the programs of Kubernetes say their version."""
    major, minor, _ = version.split(".")
    stamps = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor}
    return " ".join(f"-X {_VERSION_PACKAGE}.{field}={value}" for field, value in stamps.items())


def has_kubernetes(*, nodes: bool) -> bool:
    """Whether `kubernetes` has already been built."""
    folder = _folder(_MODULES[KUBERNETES], KUBERNETES, _stamp(KUBERNETES))
    return all((folder / name).exists() for name in _names(nodes=nodes))


def written_folders() -> list[Path]:
    """Folders that builds write to: ours and Go's own caches. Other projects share Go's, so these count only once they
    hold Kubernetes."""
    modules, builds = map(Path, run([_go(), "env", "GOMODCACHE", "GOCACHE"]).splitlines())
    begun = (modules / "k8s.io" / f"kubernetes@v{KUBERNETES}").exists()
    return [cache_dir() / "go", *([modules, builds] if begun else [])]


def kubernetes(*, nodes: bool = True, version: str = KUBERNETES) -> Path:
    """Folder of the Kubernetes programs. `nodes=False` leaves out those that only nodes need."""
    packages = {name: f"k8s.io/kubernetes/cmd/{name}" for name in _names(nodes=nodes)}
    return _build(_MODULES[version], packages, version=version, ldflags=_stamp(version))


def coredns() -> Path:
    """The CoreDNS program."""
    return _build("coredns", {"coredns": "github.com/coredns/coredns"}, version="1.12.4") / "coredns"


def kueue() -> Path:
    """The Kueue program."""
    return _build("kueue", {"kueue": "sigs.k8s.io/kueue/cmd/kueue"}, version=KUEUE) / "kueue"


def kueue_chart() -> Path:
    """Kueue's Helm chart in its Go module, including the CRDs."""
    return _module("kueue", "sigs.k8s.io/kueue") / "charts" / "kueue"


def volcano() -> Path:
    """Folder of Volcano's programs."""
    packages = {f"vc-{name}": f"volcano.sh/volcano/cmd/{name}" for name in ("scheduler", "controller-manager")}
    return _build("volcano", packages, version=VOLCANO)


def volcano_chart() -> Path:
    """Volcano's Helm chart in its Go module, including the CRDs."""
    return _module("volcano", "volcano.sh/volcano") / "installer/helm/chart/volcano"


def pause() -> Path:
    """The pause program of pod sandboxes."""
    return _build("pause", {"pause": "."}, version="1") / "pause"


def helm() -> Path:
    """The Helm program."""
    stamps = {
        "internal/version.version": f"v{HELM}",
        "pkg/chartutil.k8sVersionMajor": _MAJOR,  # the version that `helm template` assumes
        "pkg/chartutil.k8sVersionMinor": _MINOR,
    }
    ldflags = " ".join(["-s -w", *(f"-X helm.sh/helm/v3/{field}={value}" for field, value in stamps.items())])
    folder = cache_dir() / "go" / f"helm-{HELM}-kubernetes-{KUBERNETES}"
    program = folder / "helm"
    with locked(folder):
        if not program.exists():
            say(f"building helm {HELM}")
            half = folder / "building"
            env = os.environ | {"CGO_ENABLED": "0", "GOBIN": str(half)}
            _run_go("install", "-ldflags", ldflags, f"helm.sh/helm/v3/cmd/helm@v{HELM}", env=env)
            (half / "helm").rename(program)
    return program


def prometheus_operator_crds() -> list[Path]:
    """The Prometheus Operator's CustomResourceDefinitions whose objects our chart creates."""
    module = f"github.com/prometheus-operator/prometheus-operator@v{PROMETHEUS_OPERATOR}"
    folder = Path(json.loads(_run_go("mod", "download", "-json", module))["Dir"])
    kinds = ("podmonitors", "prometheusrules", "servicemonitors")
    return [folder / "example" / "prometheus-operator-crd" / f"monitoring.coreos.com_{kind}.yaml" for kind in kinds]
