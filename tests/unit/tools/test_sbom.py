"""What an image says that it holds."""

from pathlib import Path

from tools.sbom import bill, debian_licence


def test_a_bill_lists_what_the_distribution_needs_by_package_url(tmp_path: Path) -> None:
    found = bill("pipetransformer-operator", tmp_path)
    assert found["metadata"]["component"]["name"] == "pipetransformer-operator"
    urls = {component["purl"].partition("@")[0] for component in found["components"]}
    assert {"pkg:pypi/kopf", "pkg:pypi/pydantic", "pkg:pypi/kubernetes"} <= urls
    assert not [url for url in urls if url.startswith("pkg:deb/")], "of Debian only what the image's folder has"
    references = [component["bom-ref"] for component in found["components"]]
    assert len(references) == len(set(references))


def test_each_python_component_names_its_licence(tmp_path: Path) -> None:
    found = bill("pipetransformer-operator", tmp_path)
    licences = {one["name"]: one.get("licenses") for one in [found["metadata"]["component"], *found["components"]]}
    assert licences["pipetransformer-operator"] == [{"expression": "Apache-2.0"}]
    assert licences["kopf"] == [{"license": {"name": "MIT"}}] or licences["kopf"] == [{"expression": "MIT"}]
    nameless = sorted(name for name, licence in licences.items() if not licence)
    assert len(nameless) <= len(licences) / 20, f"too many components without a licence: {nameless}"


def test_a_debian_component_names_the_licences_of_its_copyright_file(tmp_path: Path) -> None:
    file = tmp_path / "copyright"
    file.write_text(
        "Format: dep5\n\nFiles: *\nLicense: Zlib\n\nFiles: contrib/*\nLicense: GPL-2+\n text\n\nLicense: Zlib\n"
    )
    assert debian_licence(file) == {"license": {"name": "GPL-2+, Zlib"}}
    file.write_text("This package was debianised by hand.\n")
    assert debian_licence(file) is None
