"""Hooks of MkDocs, for what our pages are written in and for what the navigation cannot say."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_DECISIONS = "decisions/"
_RESULTS = "../benchmarks/results/"
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
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
