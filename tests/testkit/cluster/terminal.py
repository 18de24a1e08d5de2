"""The command `pipetransformer` as a user of the cluster types it."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.testkit.cluster.cluster import Cluster


class Terminal:
    """It works in one namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._environment = os.environ | {"KUBECONFIG": str(cluster.kubeconfig)}
        self._namespace = namespace

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Begins a command that takes its time."""
        command = [sys.executable, "-m", "pipetransformer_client", *words, "-n", self._namespace]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self._environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *words: str, seconds: float = 120) -> str:
        """What a command prints; `AssertionError` with its complaint when it fails."""
        process = self.start(*words)
        out, err = process.communicate(timeout=seconds)
        assert process.returncode == 0, f"{' '.join(words)}: {err}"
        return out
