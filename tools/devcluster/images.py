"""Builds container images without a daemon or an outside registry, and pushes them to the cluster's registry.

The base image is made from Debian packages, with the default name of the Dockerfile's BASE_IMAGE. buildah caches
layers, so a change of our code builds one small layer. An image's tag is its id, so a pod runs the build that it names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from tools.devcluster import debian, gobuild, host
from tools.devcluster.layout import REPOSITORY, Layout, cache_dir
from tools.devcluster.process import CommandError, run, say, succeeds, write_whole

TARGETS = ("operator", "trainer")
# Stages whose files a target copies. Without a name they would be pruned, because no image contains them.
_COPIED_FROM = {"operator": ("operator-build",)}
_BASE = "localhost/pipetransformer/python:3.11"
_RUNTIME = "localhost/pipetransformer/python-runtime:3.11"
_DEBIAN_SUITE = "bookworm"  # its python3 is 3.11
_BASE_PACKAGES = "python3,python3-venv,ca-certificates"
# Files that the runtime's Python does not need.
_LEFT_OUT = (
    "/usr/share/doc/*",
    "/usr/share/locale/*",
    "/usr/share/man/*",
    "/usr/share/zoneinfo/*",
    "/usr/share/perl/*",
)
_CERTIFICATES = "/etc/ssl/certs"
_PIP_SETTINGS = ("PIP_CERT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")


def command(word: str, *arguments: str | Path) -> list[str | Path]:
    """buildah's command line for the store in the cache, with no registry except the cluster's."""
    store = cache_dir() / "buildah"
    policy = store / "policy.json"
    if not policy.exists():
        policy.parent.mkdir(parents=True, exist_ok=True)
        write_whole(policy, json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
    places: list[str | Path] = ["--root", store / "root", "--runroot", store / "run", "--storage-driver", "overlay"]
    needs: list[str | Path] = ["--signature-policy", policy] if word in ("build", "commit", "from", "push") else []
    if word == "build":
        settings = {"PIP_CERT": f"{_CERTIFICATES}/ca-certificates.crt"}
        settings |= {key: os.environ[key] for key in _PIP_SETTINGS if key in os.environ}
        needs += [part for key, value in settings.items() for part in ("--build-arg", f"{key}={value}")]
        # Its own isolation, chroot, restarts buildah without the environment variables that locate its libraries.
        needs += ["--isolation", "oci", "--runtime", debian.program("runc"), "--network", "host"]
        needs += ["--layers", "--force-rm", "--pull-never"]
        needs += ["--volume", f"{_CERTIFICATES}:{_CERTIFICATES}:ro"]
    if word == "push":
        needs += ["--tls-verify=false"]
    return [debian.program("buildah"), *places, word, *needs, *arguments]


def _buildah(word: str, *arguments: str | Path) -> str:
    return run(command(word, *arguments), env=debian.environment()).strip()


def _exists(name: str) -> bool:
    return succeeds(command("inspect", "--type", "image", name), env=debian.environment())


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
    """Remove working containers of interrupted builds, and mounts of the store."""
    if (cache_dir() / "buildah" / "root").exists():
        _buildah("rm", "--all")
        host.unmount_below(cache_dir() / "buildah")


def make_bases() -> None:
    """Make the base images from Debian packages unless they exist: a small Debian, and one with only Python."""
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
    """Push the local image `name` and return its reference for a pod's `image`."""
    short = name.removeprefix("localhost/").partition(":")[0]
    identity = _buildah("images", "--quiet", "--no-trunc", name).removeprefix("sha256:")[:12]
    reference = f"{layout.registry}/{short}:{identity}"
    _buildah("push", "--quiet", name, f"docker://{reference}")
    return reference


def push_program(layout: Layout, program: Path, *, entry: str = "") -> str:
    """Push an image with one static program, at `entry` or by default at its name, and return its reference."""
    name = f"localhost/pipetransformer/{program.name}:{program.parent.name}"
    entry = entry or f"/{program.name}"
    if not _exists(name):
        _from_scratch(name, program, entry, entry)
    return push(layout, name)


def build(target: str, source: Path = REPOSITORY, *, tag: str = "latest") -> str:
    """Build a target of the Dockerfile in the checkout `source`, and return its local name."""
    name = f"localhost/{short_name(target)}:{tag}"
    for stage in _COPIED_FROM.get(target, ()):
        _buildah("build", "--target", stage, "--tag", f"localhost/{short_name(stage)}:{tag}", source)
    _buildah("build", "--build-arg", f"REVISION={_revision(source)}", "--target", target, "--tag", name, source)
    return name


def _revision(source: Path) -> str:
    """Commit of the checkout `source`, which any user may own; empty if it is not a checkout."""
    if not (source / ".git").exists():
        return ""
    return run(["git", "-c", "safe.directory=*", "-C", source, "rev-parse", "HEAD"]).strip()


def short_name(target: str) -> str:
    """Name of a target's image without registry and tag."""
    return f"pipetransformer/{target}"


def published(layout: Layout) -> dict[str, str]:
    """The references that `publish` last made for this cluster, by target."""
    record = layout.state / "images.json"
    text = record.read_text() if record.exists() else ""
    return json.loads(text) if text else {}  # a full disk may have left the file empty


def prune(layout: Layout) -> None:
    """Delete replaced builds and the names under which they were pushed, because each keeps its layers.

    An image that is in use, such as by the build of another checkout, stays until the next time.
    """
    try:
        names = {name for image in json.loads(_buildah("images", "--json")) for name in image.get("names") or ()}
        if pushed := sorted(name for name in names if name.startswith(f"{layout.registry}/")):
            _buildah("rmi", *pushed)
        _buildah("rmi", "--prune")
    except CommandError as error:
        say(f"some replaced builds could not be deleted: {error}")


def publish(layout: Layout, targets: tuple[str, ...] = TARGETS) -> dict[str, str]:
    """Build and push `targets`. Returns references by target, and writes them to images.json in the state folder."""
    obtain()
    references = published(layout)
    for target in targets:
        references[target] = push(layout, build(target))
    write_whole(layout.state / "images.json", json.dumps(references, indent=1))
    prune(layout)
    return references


def publish_revision(layout: Layout, revision: str, folder: Path) -> dict[str, str]:
    """Check out an older revision in `folder`, build and push its images, and return references by target."""
    run(["git", "clone", "--quiet", "--shared", "--no-checkout", REPOSITORY, folder])
    run(["git", "-C", folder, "checkout", "--quiet", "--detach", revision])
    obtain()
    return {target: push(layout, build(target, folder, tag=revision)) for target in TARGETS}


def obtain() -> None:
    """Obtain the programs that builds need, and the base images."""
    debian.obtain(debian.IMAGES)
    make_bases()


def pause_reference(layout: Layout) -> str:
    """Push the pod sandbox's image and return its reference."""
    return push_program(layout, gobuild.pause())


def coredns_reference(layout: Layout) -> str:
    """Push CoreDNS's image and return its reference."""
    return push_program(layout, gobuild.coredns())
