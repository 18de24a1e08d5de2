"""A container registry on loopback, from which the nodes pull; its store outlives the cluster."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

from tools.devcluster import debian
from tools.devcluster.layout import Layout, cache_dir
from tools.devcluster.process import Daemon


def daemon(layout: Layout) -> Daemon:
    return Daemon("registry", layout.run)


def _answers(layout: Layout) -> bool:
    try:
        with urllib.request.urlopen(f"http://{layout.registry}/v2/", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def start(layout: Layout) -> None:
    """Start it and return once it answers."""
    config = layout.run / "registry.json"  # JSON is YAML, which the registry reads
    config.write_text(
        json.dumps(
            {
                "version": 0.1,
                "log": {"level": "warn"},
                "storage": {"filesystem": {"rootdirectory": str(cache_dir() / "registry")}},
                "http": {"addr": layout.registry},
            }
        )
    )
    registry = daemon(layout)
    registry.start([debian.program("docker-registry"), "serve", config], env=debian.environment())
    registry.wait_ready(lambda: _answers(layout))
