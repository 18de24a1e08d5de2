"""On a phone the documentation is read without scrolling sideways, and its words and pictures are large enough."""

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from tests.testkit import ROOT
from tests.testkit.phone import LEAST_TEXT, WIDTH, look
from tools.browser import Browser
from tools.demo.picture import LEAST_TEXT_PIXELS

#: The front page, a page of reference of each kind, and pages with tables of five columns.
PAGES = ("index", "start", "api", "metrics", "operations", "values", "commands", "benchmarks", "python")
_README_MARGIN = 16  #: pixels on each side of a README, as GitHub's page for phones has them


@pytest.mark.parametrize("page", PAGES)
def test_a_page_of_the_documentation_fits_a_phone(page: str, browser: Browser, site: Path) -> None:
    seen = look(browser, site / f"{page}.html")
    assert seen.width <= WIDTH
    assert seen.small == []
    assert all(least_text(file_of(url), width) >= LEAST_TEXT for url, width in seen.pictures if url.endswith(".svg"))


def test_a_row_of_sentences_stands_below_its_name_and_a_row_of_values_beside_it(browser: Browser, site: Path) -> None:
    """On a phone; on a screen both are tables."""
    for width, stacked in ((WIDTH, True), (1280, False)):
        browser.open(site / "api.html", width=width, height=844)
        cells = """[...document.querySelectorAll('table%s tbody tr')].filter(row => row.cells[1].textContent).map(row =>
            row.cells[1].getBoundingClientRect().top > row.cells[0].getBoundingClientRect().top + 1)"""
        sentences = browser.evaluate(cells % "[data-stacked]")
        assert sentences and set(sentences) == {stacked}
        values = browser.evaluate(cells % ":not([data-stacked])")
        assert values and set(values) == {False}


def test_the_readmes_pictures_are_legible_on_a_phone() -> None:
    text = (ROOT / "README.md").read_text()
    narrow = re.findall(r'<source media="\(max-width: \d+px\)" srcset="([^"]+)">', text)
    assert len(narrow) == len(re.findall(r"<img |!\[", text)), "a picture without a narrow one"
    for picture in narrow:
        assert least_text(ROOT / picture, WIDTH - 2 * _README_MARGIN) >= LEAST_TEXT, picture


#: `watch.svg` is left out: the lines of a terminal touch.
PICTURES = [path for path in sorted((ROOT / "docs" / "images").glob("*.svg")) if path.stem != "watch"]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_labels_of_a_picture_do_not_overlap(picture: Path, browser: Browser) -> None:
    seen = look(browser, picture, width=1280)
    assert len(seen.labels) > 3
    assert seen.overlaps == []


def file_of(url: str) -> Path:
    return Path(unquote(urlparse(url).path))


def least_text(picture: Path, width: float) -> float:
    """Pixels of the smallest text of a picture that is shown in this width; a logo has none."""
    if picture.suffix == ".png":  # the demo's; its width is in the header
        return LEAST_TEXT_PIXELS * width / int.from_bytes(picture.read_bytes()[16:20], "big")
    root = ET.parse(picture).getroot()
    styles = "".join(text for element in root.iter() for text in (element.text or "", *element.attrib.values()))
    sizes = [float(size) for size in re.findall(r"font-size:\s*([\d.]+)px", styles)]
    sizes += [float(element.attrib["font-size"]) for element in root.iter() if "font-size" in element.attrib]
    return min(sizes, default=math.inf) * width / float(root.attrib["viewBox"].split()[2])
