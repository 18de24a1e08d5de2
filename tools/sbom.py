"""Prints the software bill of materials (CycloneDX 1.5, JSON) of the Python that runs it and of the Debian around it,
with the licences that packages state.

It runs while an image is built, so it needs only the standard library: `python sbom.py NAME [DOC]`. NAME is the
distribution that the image is for. DOC is /usr/share/doc of the image that will hold this Python, if it is another
image; each Debian package in it has a folder there.
"""

import json
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, distributions
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
    return [
        _component(key, one.version, f"pkg:pypi/{key}@{one.version}", _python_licence(one))
        for key, one in sorted(found.items())
    ]


def _python_licence(one: Distribution) -> dict[str, Any] | None:
    """The SPDX expression of the package (PEP 639), otherwise the name in its older field or classifiers."""
    if expression := one.metadata["License-Expression"]:
        return {"expression": expression}
    classifiers = one.metadata.get_all("Classifier") or []
    names = [
        text.split(" :: ")[-1] for text in classifiers if text.startswith("License :: ") and text.count(" :: ") > 1
    ]
    lines = (one.metadata["License"] or "").strip().splitlines()
    name = ", ".join(names) or (lines[0] if lines else "")
    return {"license": {"name": name}} if name else None


def _debian(doc: Path) -> list[dict[str, Any]]:
    if shutil.which("dpkg-query") is None:
        return []
    query = ["dpkg-query", "--show", "--showformat=${Package} ${Version} ${Architecture}\n"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return [
        _component(
            name,
            version,
            f"pkg:deb/debian/{name}@{version}?arch={architecture}",
            debian_licence(doc / name / "copyright"),
        )
        for name, version, architecture in map(str.split, lines)
        if (doc / name).exists()
    ]


def debian_licence(copyright_file: Path) -> dict[str, Any] | None:
    """The short names of all licences in a machine-readable copyright file (DEP-5); None for a file in prose."""
    if not copyright_file.exists():
        return None
    text = copyright_file.read_text(errors="replace")
    names = sorted({line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("License:")} - {""})
    return {"license": {"name": ", ".join(names)}} if names else None


def _component(name: str, version: str, url: str, licence: dict[str, Any] | None) -> dict[str, Any]:
    component = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
    return {**component, "licenses": [licence]} if licence else component


if __name__ == "__main__":
    json.dump(bill(sys.argv[1], *map(Path, sys.argv[2:])), sys.stdout, indent=1)
