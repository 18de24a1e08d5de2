"""A kubeconfig with one context."""

import json
from pathlib import Path


def kubeconfig(folder: Path, server: str, name: str = "kubeconfig") -> str:
    """Write a kubeconfig for a server. Returns its path."""
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    content = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }
    file.write_text(json.dumps(content))
    return str(file)
