"""What a reader's phone makes of a page: its width, its smallest text, and labels that overlap."""

from dataclasses import dataclass
from pathlib import Path

from tools.browser import Browser

WIDTH, HEIGHT = 390, 844
LEAST_TEXT = 11.0  #: CSS pixels
_MEASURE = """(() => {
  const shown = element => element.checkVisibility({opacityProperty: true, visibilityProperty: true})
  const small = [], labels = []
  const walker = document.createTreeWalker(document.documentElement, NodeFilter.SHOW_TEXT)
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim()
    if (!text || /^(script|style|title|noscript)$/i.test(element.tagName) || !shown(element)) continue
    const matrix = element.ownerSVGElement ? element.getScreenCTM() : null
    const size = parseFloat(getComputedStyle(element).fontSize) * (matrix ? matrix.a : 1)
    if (size < LEAST - 0.01) small.push(`${size.toFixed(1)}: ${text}`)
    if (matrix) labels.push([element.getBoundingClientRect(), text])
  }
  const overlaps = []
  labels.forEach(([a, text], place) => labels.slice(place + 1).forEach(([b, other]) => {
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0.5
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.5) overlaps.push(`${text} / ${other}`)
  }))
  const pictures = [...document.images].filter(shown).map(one => [one.currentSrc, one.getBoundingClientRect().width])
  const width = document.documentElement.scrollWidth
  return {width, small, overlaps, labels: labels.map(label => label[1]), pictures}
})()""".replace("LEAST", str(LEAST_TEXT))


@dataclass(frozen=True)
class Look:
    """What was found on a page.

    Attributes:
        width: CSS pixels to which the page scrolls sideways.
        small: texts below `LEAST_TEXT`, each with its size.
        overlaps: pairs of an SVG's labels.
        labels: all labels of the SVGs that are shown.
        pictures: URL and width of each image that is shown.
    """

    width: float
    small: list[str]
    overlaps: list[str]
    labels: list[str]
    pictures: list[tuple[str, float]]


def look(browser: Browser, page: Path, *, width: int = WIDTH) -> Look:
    """Opens a file in the browser and measures it."""
    browser.open(page, width=width, height=HEIGHT)
    return Look(**browser.evaluate(_MEASURE))
