"""What an image says that it holds."""

from pathlib import Path

from tools.sbom import bill


def test_a_bill_lists_what_the_distribution_needs_by_package_url(tmp_path: Path) -> None:
    found = bill("pipetransformer-operator", tmp_path)
    assert found["metadata"]["component"]["name"] == "pipetransformer-operator"
    urls = {component["purl"].partition("@")[0] for component in found["components"]}
    assert {"pkg:pypi/kopf", "pkg:pypi/pydantic", "pkg:pypi/kubernetes-asyncio"} <= urls
    assert not [url for url in urls if url.startswith("pkg:deb/")], "of Debian only what the image's folder has"
    references = [component["bom-ref"] for component in found["components"]]
    assert len(references) == len(set(references))
