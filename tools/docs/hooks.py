"""Hooks of MkDocs, for what our pages are written in and for what the navigation cannot say."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_DECISIONS = "decisions/"
_RESULTS = "../benchmarks/results/"
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr[ >].*?</tr>", re.DOTALL)
_CELL = re.compile(r"<t[dh]\b[^>]*>(.*?)</t[dh]>", re.DOTALL)
_EMPTY = re.compile(r">\s+</td>")
_TAG = re.compile(r"<[^>]+>")
_SENTENCE = 30  #: characters from which a cell holds text to read, not a value to compare
_LIST_AFTER_TEXT = re.compile(r"^(?![-\s|#>]|\d+\. )(.+)\n(?=- |1\. )", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages of the decisions, whichever there are, where the navigation names their folder."""
    pages = sorted(path.name for path in Path(config.docs_dir, _DECISIONS).glob("[0-9]*.md"))
    for section in config.nav or []:
        for entries in section.values():
            for entry in entries:
                if isinstance(entry, dict) and _DECISIONS in entry.values():
                    (title,) = entry
                    entry[title] = [_DECISIONS + "index.md", *(_DECISIONS + page for page in pages)]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the benchmarks' pictures, which lie beside their figures."""
    for picture in sorted(Path(config.docs_dir, _RESULTS).glob("*.png")):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture.resolve())))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets a list follow its sentence without an empty line, as CommonMark does and Python-Markdown does not; links the
    benchmarks' pictures where `on_files` puts them."""
    parts = _FENCED.split(markdown.replace(f"({_RESULTS}", "(results/"))
    parts[::2] = [_LIST_AFTER_TEXT.sub(r"\1\n\n", part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Names the column in each cell of a table with sentences, so that a phone can show a row's cells below each other
    (`data-stacked` in site.css). A table of values scrolls sideways in its own box."""
    return _TABLE.sub(_stacked, html)


def _stacked(table: re.Match[str]) -> str:
    cells = [_TAG.sub("", cell).strip() for cell in _CELL.findall(table[0])]
    head, *rows = _ROW.findall(table[0])
    if max(map(len, cells)) < _SENTENCE:
        return table[0]
    titles = [_TAG.sub("", cell).strip() for cell in _CELL.findall(head)]
    text = f"<table data-stacked><thead>{head}</thead><tbody>"
    for row in rows:
        parts = _EMPTY.sub("></td>", row).split("<td")
        named = (f' data-title="{title}"{part}' for title, part in zip(titles, parts[1:], strict=True))
        text += "<td".join([parts[0], *named])
    return f"{text}</tbody></table>"
