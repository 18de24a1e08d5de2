"""Programs that come from Debian: used where the host has them, else unpacked into the cache.

Packages are downloaded by apt with the dependencies that the host lacks and unpacked beside each other. Nothing is
installed, so no service starts and dpkg's database stays as it was.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tools.devcluster.layout import cache_dir
from tools.devcluster.process import CommandError, locked, run, say

PACKAGE_OF = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "runc": "runc",
    "nft": "nftables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "openssl": "openssl",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "docker-registry": "docker-registry",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "chromium": "chromium",
    "bridge-cni": "containernetworking-plugins",
}
CONTROL_PLANE = ("etcd", "openssl")
NODE = ("containerd", "runc", "nft", "conntrack", "ip", "bridge-cni")
MONITORING = ("prometheus", "promtool")
IMAGES = ("buildah", "runc", "mmdebstrap", "docker-registry")
BROWSER = ("chromium",)

# An unpacked chromium is started without its script in /usr/bin, which knows only where it is installed.
_SYSTEM_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/lib/chromium", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


def tested(*, nodes: bool) -> tuple[str, ...]:
    """What the tests run; with `nodes` also what kubelets and images need."""
    return CONTROL_PLANE + MONITORING + BROWSER + (NODE + IMAGES if nodes else ())


def _unpacked() -> Path:
    return cache_dir() / "debian" / "root"


def environment() -> dict[str, str]:
    """Environment for child processes in which host programs come first and unpacked ones after them."""
    env = dict(os.environ)
    root = _unpacked()
    folders = [*env.get("PATH", "").split(":"), *_SYSTEM_PATH, *(f"{root}{p}" for p in _SYSTEM_PATH)]
    env["PATH"] = ":".join(dict.fromkeys(f for f in folders if f))
    if root.exists():
        libraries = [
            str(p)
            for p in (
                *root.glob("usr/lib/*-linux-gnu"),
                *root.glob("lib/*-linux-gnu"),
                *root.glob("usr/lib/*-linux-gnu/pulseaudio"),
            )
        ]
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, [env.get("LD_LIBRARY_PATH", ""), *libraries]))
    return env


def cni_plugins() -> Path:
    """Folder of the CNI plugins."""
    host = Path("/usr/lib/cni")
    return host if (host / "bridge").exists() else _unpacked() / "usr/lib/cni"


def _mark(package: str) -> Path:
    """There while a package and what it depends on are unpacked: one that was cut off is not taken for whole."""
    return cache_dir() / "debian" / f".{package}.unpacking"


def _has(program: str) -> bool:
    where = environment()["PATH"] if program != "bridge-cni" else str(cni_plugins())
    found = shutil.which(program.removesuffix("-cni"), path=where)
    return found is not None and not (Path(found).is_relative_to(_unpacked()) and _mark(PACKAGE_OF[program]).exists())


def program(name: str) -> Path:
    """Path of a program that `obtain` made sure of; raise `CommandError` when it is absent."""
    found = shutil.which(name, path=environment()["PATH"])
    if found is None:
        raise CommandError(f"{name} is not on this machine (Debian package {PACKAGE_OF.get(name, name)})")
    return Path(found)


def lacking(programs: tuple[str, ...]) -> list[str]:
    """Those of `programs` that neither the host nor the cache has."""
    return [program for program in programs if not _has(program)]


def obtain(programs: tuple[str, ...]) -> None:
    """Make sure of `programs`, unpacking Debian packages for those that the host lacks."""
    if lacking(programs):
        with locked(cache_dir() / "debian"):
            _obtain(programs)


def _obtain(programs: tuple[str, ...]) -> None:
    packages = list(dict.fromkeys(PACKAGE_OF[p] for p in lacking(programs)))
    if not packages:  # another process was quicker
        return
    if shutil.which("apt-get") is None:
        raise CommandError(f"install these first (they are Debian's names): {' '.join(packages)}")
    say(f"unpacking from Debian into {_unpacked()}: {' '.join(packages)}")
    marks = [_mark(package) for package in packages]
    for mark in marks:
        mark.touch()
    archives = cache_dir() / "debian" / "archives"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    download = [
        "apt-get",
        "install",
        "--yes",
        "--no-install-recommends",
        "--download-only",
        "-o",
        f"Dir::Cache::archives={archives}",
        "-o",
        "APT::Sandbox::User=root",
        "-o",
        "Debug::NoLocking=true",
        *packages,
    ]
    try:
        run(download)
    except CommandError:
        run(["apt-get", "update"])
        run(download)
    for archive in sorted(archives.glob("*.deb")):
        run(["dpkg-deb", "--extract", archive, _unpacked()])
        archive.unlink()
    for mark in marks:
        mark.unlink()
    if still := lacking(programs):
        raise CommandError(f"unpacked {' '.join(packages)}, but found no {' '.join(still)} in {_unpacked()}")
