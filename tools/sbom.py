"""Prints the software bill of materials (CycloneDX 1.5, JSON) of the Python that runs it and of the Debian around it.

It runs inside an image while that is built, so it needs nothing but the standard library: `python sbom.py NAME [DOC]`,
NAME being the distribution that the image is for. DOC is /usr/share/doc of the image that will hold this Python, if
that is another: a package has a folder there.
"""

import json
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any


def bill(name: str, doc: Path = Path("/usr/share/doc")) -> dict[str, Any]:
    """The document. Arguments are those of the command line."""
    components = [*_python(), *_debian(doc)]
    (main,) = (component for component in components if component["name"] == name)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**main, "type": "application"}},
        "components": [component for component in components if component is not main],
    }


def _python() -> list[dict[str, Any]]:
    found = {one.name.lower().replace("_", "-"): one for one in distributions()}
    return [_component(key, one.version, f"pkg:pypi/{key}@{one.version}") for key, one in sorted(found.items())]


def _debian(doc: Path) -> list[dict[str, Any]]:
    if shutil.which("dpkg-query") is None:
        return []
    query = ["dpkg-query", "--show", "--showformat=${Package} ${Version} ${Architecture}\n"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return [
        _component(name, version, f"pkg:deb/debian/{name}@{version}?arch={architecture}")
        for name, version, architecture in map(str.split, lines)
        if (doc / name).exists()
    ]


def _component(name: str, version: str, url: str) -> dict[str, Any]:
    return {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}


if __name__ == "__main__":
    json.dump(bill(sys.argv[1], *map(Path, sys.argv[2:])), sys.stdout, indent=1)
