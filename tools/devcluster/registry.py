"""A container registry on loopback from which the nodes pull. Its store outlives the cluster."""

from __future__ import annotations

import json

from tools.devcluster import debian
from tools.devcluster.layout import Layout, cache_dir
from tools.devcluster.process import Daemon, answers


def daemon(layout: Layout) -> Daemon:
    return Daemon("registry", layout.run)


def start(layout: Layout) -> None:
    """Start the registry and return once it answers."""
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
    registry.wait_ready(lambda: answers(f"http://{layout.registry}/v2/"))
