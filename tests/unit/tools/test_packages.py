"""What the package index and a user's `pip install` see of our four packages."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

FOLDERS = ["contract", "operator", "client", "trainer_image"]


def project(folder: str) -> dict[str, Any]:
    return dict(tomllib.loads(Path(folder, "pyproject.toml").read_text())["project"])


def needs(folder: str) -> list[Requirement]:
    found = project(folder)
    lists = [found["dependencies"], *found.get("optional-dependencies", {}).values()]
    return [Requirement(line) for lines in lists for line in lines]


@pytest.fixture(scope="module", params=FOLDERS)
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copytree(
        request.param, folder / "source", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "build")
    )
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--wheel",
        "--outdir",
        str(folder),
        str(folder / "source"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_has_licence_readme_links_and_types(wheel: Path) -> None:
    check = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        (licence,) = (name for name in names if name.endswith("/LICENSE"))
        message = message_from_bytes(archive.read(metadata))
        assert archive.read(licence).decode() == Path("LICENSE").read_text()
    assert [name for name in names if name.endswith("py.typed")]
    assert message["License-Expression"] == "Apache-2.0"
    assert message["Description-Content-Type"] == "text/markdown"
    assert {url.split(",")[0] for url in message.get_all("Project-URL", [])} >= {"Homepage", "Documentation"}
    assert len(message.get_all("Classifier", [])) >= 5


def test_the_trainers_readme_shows_the_example_that_is_tested() -> None:
    assert f"```python\n{Path('examples/train.py').read_text()}```" in Path("trainer_image/README.md").read_text()


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_lower_bound_of_each_dependency_is_what_the_floor_tests(folder: str) -> None:
    lines = [line for line in Path("constraints-floor.txt").read_text().splitlines() if not line.startswith("#")]
    floor = {canonicalize_name(name): Version(version) for name, _, version in (line.partition("==") for line in lines)}
    for need in needs(folder):
        if need.name.startswith("pipetransformer"):
            continue
        (bound,) = need.specifier
        assert bound.operator == ">=", f"{need}: a lower bound is missing"
        assert Version(bound.version) == floor[canonicalize_name(need.name)], f"{need}: run `make constraints`"


def test_the_client_installs_neither_an_operator_nor_torch() -> None:
    """Nor aiohttp, except that newer releases of `kubernetes` need it themselves."""
    seen: set[str] = set()
    rest = [Requirement(need) for need in project("client")["dependencies"]]
    while rest:
        need = rest.pop()
        name = canonicalize_name(need.name)
        if name in seen:
            continue
        seen.add(name)
        extras = [{"extra": extra} for extra in need.extras or {""}]
        further = [] if name == "kubernetes" or not is_installed(name) else map(Requirement, requires(name) or [])
        rest += [one for one in further if one.marker is None or any(one.marker.evaluate(extra) for extra in extras)]
    assert {"pydantic", "cel-python", "kubernetes"} <= seen, "the walk reached what the contract needs"
    assert not seen & {"kopf", "aiohttp", "torch", "cryptography", "pipetransformer-operator"}


def is_installed(name: str) -> bool:
    """Whether it is: some are needed on another system or Python only."""
    try:
        return bool(distribution(name))
    except PackageNotFoundError:
        return False
