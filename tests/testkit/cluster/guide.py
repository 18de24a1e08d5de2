"""A document's commands as a reader types them: in a checkout of their own, with their own registry and cluster."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.testkit.console import commands
from tools.devcluster import gobuild
from tools.devcluster.layout import REPOSITORY


class Guide:
    """The commands of one document, run section by section.

    Variables that the document exports, `REGISTRY=registry.example.com` for example, are the reader's to set: `values`
    has them.
    """

    def __init__(self, document: str, checkout: Path, values: dict[str, str], environment: dict[str, str]) -> None:
        self._left = commands(REPOSITORY / document)
        self._checkout = checkout
        self._values = values
        self._environment = os.environ | environment | values

    def play(self, section: str, *, seconds: float = 240) -> str:
        """Runs the commands of the section, which must be the next; returns what they printed.

        Raises:
            AssertionError: one fails, or takes longer; with what it said.
        """
        printed = ""
        assert self._left and self._left[0].section == section, f"next is {self._left[:1]}"
        while self._left and self._left[0].section == section:
            printed += self._type(self._left.pop(0).text, seconds)
        return printed

    @property
    def at_its_end(self) -> bool:
        return not self._left

    def _type(self, command: str, seconds: float) -> str:
        if command.startswith("export "):
            names = {word.partition("=")[0] for word in shlex.split(command)[1:]}
            assert names <= self._values.keys(), f"{command}: sets what this test knows no value of"
            return ""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command], cwd=self._checkout, env=self._environment,
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\nended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout


def checkout(folder: Path) -> Path:
    """A copy of the repository's files, as a clone has them."""
    listed = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        source, target = REPOSITORY / name, folder / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return folder


def programs(folder: Path, kubectl: Path) -> str:
    """A PATH with the reader's helm, kubectl and buildah, and the command `pipetransformer` of this environment."""
    folder.mkdir()
    (folder / "kubectl").symlink_to(kubectl)
    (folder / "helm").symlink_to(gobuild.helm())
    buildah = folder / "buildah"
    own = f"env PATH={os.environ['PATH']} PYTHONPATH={REPOSITORY}"  # where the real buildah is found, and not this one
    buildah.write_text(f'#!/bin/sh\nexec {own} {sys.executable} -m tools.devcluster buildah "$@"\n')
    buildah.chmod(0o755)
    return f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def defaults(dockerfile: Path) -> dict[str, str]:
    """What the build arguments of a Dockerfile are by default."""
    return dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile.read_text(), flags=re.MULTILINE))
