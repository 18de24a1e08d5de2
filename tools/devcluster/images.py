"""Builds container images without a daemon or an outside registry, and pushes them to the cluster's own.

The base is made from Debian packages under the name that the Dockerfile's BASE_IMAGE has by default. buildah keeps its
layers in the cache, so a change of our code builds one small layer. An image's tag is its id: a pod that names it runs
exactly that build.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from tools.devcluster import debian, gobuild, host
from tools.devcluster.layout import REPOSITORY, Layout, cache_dir
from tools.devcluster.process import run, say, succeeds

TARGETS = ("operator", "trainer")
_BASE = "localhost/pipetransformer/python:3.11"
_RUNTIME = "localhost/pipetransformer/python-runtime:3.11"
_DEBIAN_SUITE = "bookworm"  # its python3 is 3.11
_BASE_PACKAGES = "python3,python3-venv,ca-certificates"
# What the runtime's Python never opens.
_LEFT_OUT = (
    "/usr/share/doc/*",
    "/usr/share/locale/*",
    "/usr/share/man/*",
    "/usr/share/zoneinfo/*",
    "/usr/share/perl/*",
)
_CERTIFICATES = "/etc/ssl/certs"
_PIP_SETTINGS = ("PIP_CERT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")


def _buildah(*arguments: str | Path) -> str:
    store = cache_dir() / "buildah"
    policy = store / "policy.json"
    if not policy.exists():
        policy.parent.mkdir(parents=True, exist_ok=True)
        policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
    command, *rest = arguments
    trust: list[str | Path] = ["--signature-policy", policy] if command in ("bud", "commit", "from", "push") else []
    return run(
        [
            debian.program("buildah"),
            "--root",
            store / "root",
            "--runroot",
            store / "run",
            "--storage-driver",
            "overlay",
            command,
            *trust,
            *rest,
        ],
        env=debian.environment(),
    ).strip()


def _exists(name: str) -> bool:
    store = cache_dir() / "buildah"
    return succeeds(
        [
            debian.program("buildah"),
            "--root",
            store / "root",
            "--runroot",
            store / "run",
            "--storage-driver",
            "overlay",
            "inspect",
            "--type",
            "image",
            name,
        ],
        env=debian.environment(),
    )


def _from_scratch(name: str, content: Path, destination: str, *entrypoint: str) -> None:
    container = _buildah("from", "scratch")
    try:
        _buildah("add", "--quiet", container, content, destination)
        if entrypoint:
            _buildah("config", "--entrypoint", json.dumps(entrypoint), container)
        _buildah("commit", "--quiet", container, name)
    finally:
        _buildah("rm", container)


def unmount() -> None:
    """Remove working containers of builds that were cut off, and what the store has mounted."""
    if (cache_dir() / "buildah" / "root").exists():
        _buildah("rm", "--all")
        host.unmount_below(cache_dir() / "buildah")


def make_bases() -> None:
    """Make the base images from Debian packages unless they are there: a small Debian, and Python alone."""
    _make(_BASE, "--variant=minbase", f"--include={_BASE_PACKAGES}")
    left_out = [f"--dpkgopt=path-{rule}" for rule in _LEFT_OUT]
    _make(_RUNTIME, "--variant=extract", "--include=python3,base-files,libstdc++6", *left_out)


def _make(name: str, *options: str) -> None:
    if _exists(name):
        return
    say(f"making {name} from Debian {_DEBIAN_SUITE}")
    archive = cache_dir() / "base.tar"
    run([debian.program("mmdebstrap"), *options, _DEBIAN_SUITE, archive], env=debian.environment())
    _from_scratch(name, archive, "/")
    archive.unlink()


def push(layout: Layout, name: str) -> str:
    """Push the local image `name`; return the reference that a pod's `image` takes."""
    short = name.removeprefix("localhost/").partition(":")[0]
    identity = _buildah("images", "--quiet", "--no-trunc", name).removeprefix("sha256:")[:12]
    reference = f"{layout.registry}/{short}:{identity}"
    _buildah("push", "--quiet", "--tls-verify=false", name, f"docker://{reference}")
    return reference


def push_program(layout: Layout, program: Path, *, entry: str = "") -> str:
    """Push an image that holds just one static program, at `entry` or else under its name; return its reference."""
    name = f"localhost/pipetransformer/{program.name}:{program.parent.name}"
    entry = entry or f"/{program.name}"
    if not _exists(name):
        _from_scratch(name, program, entry, entry)
    return push(layout, name)


def build(target: str, source: Path = REPOSITORY) -> str:
    """Build a target of the Dockerfile of the checkout `source`; return its local name."""
    name = f"localhost/pipetransformer/{target}:latest"
    settings = {"PIP_CERT": f"{_CERTIFICATES}/ca-certificates.crt"}
    settings |= {key: os.environ[key] for key in _PIP_SETTINGS if key in os.environ}
    settings["REVISION"] = run(["git", "-C", source, "rev-parse", "HEAD"]).strip()
    arguments = [word for key, value in settings.items() for word in ("--build-arg", f"{key}={value}")]
    _buildah(
        "bud",
        "--isolation",
        "chroot",
        "--network",
        "host",
        "--layers",
        "--force-rm",
        "--pull-never",
        "--volume",
        f"{_CERTIFICATES}:{_CERTIFICATES}:ro",
        *arguments,
        "--target",
        target,
        "--tag",
        name,
        "--file",
        source / "Dockerfile",
        source,
    )
    return name


def publish(layout: Layout, targets: tuple[str, ...] = TARGETS) -> dict[str, str]:
    """Build and push `targets`; return target -> reference, also kept in the state folder as images.json."""
    debian.obtain(debian.IMAGES)
    make_bases()
    record = layout.state / "images.json"
    references: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}
    for target in targets:
        references[target] = push(layout, build(target))
    record.write_text(json.dumps(references, indent=1))
    return references


def pause_reference(layout: Layout) -> str:
    """Push the pod sandbox's image; return its reference."""
    return push_program(layout, gobuild.pause())


def coredns_reference(layout: Layout) -> str:
    """Push CoreDNS's image; return its reference."""
    return push_program(layout, gobuild.coredns())
