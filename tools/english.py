"""Counts turns that plain technical English avoids, per 10,000 words of docstrings and comments.

    python -m tools.english DIR [DIR ...]        # each directory is a column

Anchors: kopf 4, torchtitan 1, torchft 1, httpx 7, lightkube 12. Markdown files count too, without code blocks and
tables.
"""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

PATTERNS = {
    "for=because": r"[,;:] for (?!example|instance|each|all|every|who|whom|which|\w+ing\b)"
    r"(it|they|the|a|an|no|that|nobody|this|its|their|others|there|what|some|such|one|as|he|we|to)\b",
    "free-relative Who": r"(?:^|[.;:,(] )[Ww]ho(ever|m)? (?!is |has |are )?[a-z]+",
    "so many/long/few": r"\b[Ss]o (many|long|few|much|often)\b(?! as)",
    "but for": r"\bbut for\b",
    "for ever": r"\bfor ever\b",
    "ever again/more": r"\bever (again|more|longer|the)\b",
    "in vain": r"\bin vain\b",
    "besides": r"\b[Bb]esides\b",
    "nobody/somebody/anybody": r"\b([Nn]obody|[Ss]omebody|[Aa]nybody|[Ee]verybody)\b",
    "of which/in which/of whom": r"\b(of|in|by|for|at|from|with|on) (which|whom|whose)\b",
    "any more/no more": r"\bany more\b",
    "lets/has ... be": r"\bis (none|no (number|name|failure|claim|member|worker|scalar|schedule|block|job|Kueue))\b",
    "of ours/theirs": r"\bof (ours|theirs|its own|yours)\b",
    "what ... is/was as subject": r"(?:^|[.;] )What [a-z ]+ (is|are|was|has)\b",
}


def texts(path: Path) -> list[str]:
    """The docstrings and comments of a Python file, or the lines of a Markdown file without code and tables."""
    source = path.read_text(errors="ignore")
    if path.suffix == ".md":
        source = re.sub(r"```.*?```", "", source, flags=re.S)
        return [line for line in source.splitlines() if not line.startswith("|")]
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [d for node in ast.walk(tree) if isinstance(node, kinds) and (d := ast.get_docstring(node))]
    return found + re.findall(r"#:? (.*)", source)


def count(folder: str) -> tuple[int, Counter[str]]:
    """The number of words in all files below a folder, and of each turn."""
    words = 0
    turns: Counter[str] = Counter()
    for path in Path(folder).rglob("*"):
        if path.suffix not in (".py", ".md") or not path.is_file():
            continue
        for text in texts(path):
            text = re.sub(r"\s+", " ", text)
            words += len(text.split())
            for name, pattern in PATTERNS.items():
                turns[name] += len(re.findall(pattern, text))
    return words, turns


if __name__ == "__main__":
    columns = {folder: count(folder) for folder in sys.argv[1:]}
    print(f"{'per 10,000 words':28}" + "".join(f"{folder[-18:]:>20}" for folder in columns))
    print(f"{'words':28}" + "".join(f"{words:20}" for words, _ in columns.values()))
    for name in PATTERNS:
        print(f"{name:28}" + "".join(f"{1e4 * turns[name] / max(words, 1):20.1f}" for words, turns in columns.values()))
    print(
        f"{'sum':28}"
        + "".join(f"{1e4 * sum(turns.values()) / max(words, 1):20.1f}" for words, turns in columns.values())
    )
