"""Measures how readable the code is, and fails past the bars: `make house`.

Each figure stands for one habit of the codebases that this one follows; `tools/english.py` counts unidiomatic turns.
"""

import ast
import json
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp
import networkx

from tools import english

PACKAGES = {
    "pipetransformer_contract": Path("contract/pipetransformer_contract"),
    "pipetransformer_operator": Path("operator/pipetransformer_operator"),
    "pipetransformer_client": Path("client/pipetransformer_client"),
    "pipetransformer": Path("trainer_image/pipetransformer"),
}
PROSE = ("contract", "operator", "client", "trainer_image", "docs")
#: Names that mean one thing only; the others of each row are gone.
RETIRED_NAMES = ("PublishedPlan", "RegroupPlan", "moments", "monitoring")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Figure:
    """One figure beside its bar; `worst` names where to look."""

    name: str
    value: float
    bar: float
    worst: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.bar


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in PACKAGES.values():
        for path in sorted(folder.rglob("*.py")):
            yield path, ast.parse(path.read_text())


def top_files() -> Figure:
    files = sorted(path.name for path in PACKAGES["pipetransformer"].glob("*.py"))
    return Figure("files at the top of the trainer's package", len(files), 6)


def layer_arrows() -> Figure:
    """Imports against the layers that `pyproject.toml` gives the rooms."""
    contracts = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    graph = grimp.build_graph(*PACKAGES)
    found: list[str] = []
    for contract in contracts:
        if contract["type"] != "layers" or contract["layers"][0].startswith("tests."):
            continue
        layers = [
            grimp.Layer(*layer.split(" : "), independent=False) if " : " in layer else grimp.Layer(*layer.split(" | "))
            for layer in contract["layers"]
        ]
        wrong = graph.find_illegal_dependencies_for_layers(layers, containers=set(contract.get("containers", ())))
        found += [f"{one.importer} -> {one.imported}" for one in wrong]
    return Figure("arrows against the layers", len(found), 0, "; ".join(sorted(found)))


def import_circles() -> Figure:
    graph = grimp.build_graph(*PACKAGES)
    modules: networkx.DiGraph[str] = networkx.DiGraph()
    for module in graph.modules:
        modules.add_edges_from((module, other) for other in graph.find_modules_directly_imported_by(module))
    circles = [sorted(circle) for circle in networkx.strongly_connected_components(modules) if len(circle) > 1]
    return Figure("import circles", len(circles), 0, "; ".join(", ".join(circle) for circle in circles))


def folder_circles() -> Figure:
    """Circles between the folders of one package: a folder imports another that imports it back."""
    graph = grimp.build_graph(*PACKAGES)
    folders: networkx.DiGraph[str] = networkx.DiGraph()
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            ends = [".".join(name.split(".")[:2]) for name in (module, other)]
            if ends[0] != ends[1] and all(name.count(".") for name in ends):
                folders.add_edge(*ends)
    circles = [sorted(circle) for circle in networkx.strongly_connected_components(folders) if len(circle) > 1]
    return Figure("circles of folders", len(circles), 0, "; ".join(", ".join(circle) for circle in circles))


def turns() -> Figure:
    counted = [english.count(folder) for folder in PROSE]
    words = sum(number for number, _ in counted)
    found = sum((more for _, more in counted), start=type(counted[0][1])())
    most = ", ".join(f"{name} {number}" for name, number in found.most_common(3))
    return Figure("unidiomatic turns per 10,000 words", 1e4 * found.total() / words, 15, most)


def long_sentences() -> Figure:
    """Share of the documentation's sentences with more than 30 words, in percent."""
    lengths = []
    for path in sorted(Path("docs").rglob("*.md")):
        lines = [line for line in english.texts(path) if not line.startswith(("#", "<!--", "|"))]
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*] |\s*\d+\. )", "\n".join(lines)):
            lengths += [
                len(sentence.split()) for sentence in re.split(r"(?<=[.!?:;])\s+", paragraph) if sentence.strip()
            ]
    share = 100 * sum(length > 30 for length in lengths) / len(lengths)
    return Figure("sentences of docs over 30 words, %", share, 5, f"median {statistics.median(lengths):.0f} words")


def complexity() -> Figure:
    ruff = str(Path(sys.executable).with_name("ruff"))
    options = ["--select", "C901", "--config", "lint.mccabe.max-complexity=1", "--output-format", "json"]
    command = [ruff, "check", *options, *map(str, PACKAGES.values())]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    worst = max(
        (int(match[2]), match[1], Path(one["filename"]).name)
        for one in found
        if (match := re.search(r"`(.+)` is too complex \((\d+)", one["message"]))
    )
    return Figure("complexity of a function", worst[0], 15, f"{worst[2]}: {worst[1]}")


def function_lines() -> Figure:
    found = [
        (node.end_lineno - node.lineno + 1, f"{path.name}: {node.name}")
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS) and node.end_lineno
    ]
    worst = max(found)
    return Figure("lines of a function", worst[0], 70, worst[1])


def decisions() -> Figure:
    """Branches, loops and boolean operators per 100 lines of code in `plan/`."""
    made = lines = 0
    for path, tree in sources():
        if "plan" not in path.parts:
            continue
        lines += _code_lines(path, tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.If | ast.IfExp | ast.For | ast.AsyncFor | ast.While | ast.comprehension):
                made += 1
            if isinstance(node, ast.BoolOp):
                made += len(node.values) - 1
            if isinstance(node, ast.comprehension):
                made += len(node.ifs)
    return Figure("decisions per 100 lines in plan/", 100 * made / lines, 30)


def _code_lines(path: Path, tree: ast.Module) -> int:
    prose: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and ast.get_docstring(node):
            prose |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(path.read_text().splitlines(), start=1)
    return sum(
        bool(text.strip()) and not text.strip().startswith("#") and number not in prose for number, text in lines
    )


def draft_lines() -> Figure:
    return Figure("lines of draft.py", len(_one("draft.py").read_text().splitlines()), 200)


def _one(name: str) -> Path:
    (found,) = PACKAGES["pipetransformer_operator"].rglob(name)
    return found


def callables() -> Figure:
    """`Callable[` per 1,000 lines, of the package that has most."""
    density = {}
    for name, folder in PACKAGES.items():
        text = "".join(path.read_text() for path in folder.rglob("*.py"))
        density[name] = 1000 * text.count("Callable[") / len(text.splitlines())
    worst = max(density, key=lambda name: density[name])
    return Figure("Callable[ per 1,000 lines", density[worst], 3, worst)


def imports_between_tests() -> Figure:
    found = []
    for path in sorted(Path("tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names if one.name.startswith("tests.")]
            elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("tests")):
                names = [node.module or "", *(one.name for one in node.names)]
            if any(name.split(".")[-1].startswith("test_") for name in names):
                found.append(path.name)
    return Figure("imports of a test module by another", len(found), 0, ", ".join(sorted(set(found))[:5]))


def changelog_bytes() -> Figure:
    return Figure("bytes of CHANGELOG.md", Path("CHANGELOG.md").stat().st_size, 3000)


def names_with_two_meanings() -> Figure:
    found = set()
    for path, tree in sources():
        found |= {name for name in RETIRED_NAMES if name == path.stem or name in path.parts}
        classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        found |= classes & set(RETIRED_NAMES)
    return Figure("names with two meanings", len(found), 0, ", ".join(sorted(found)))


FIGURES = (
    top_files,
    layer_arrows,
    import_circles,
    folder_circles,
    turns,
    long_sentences,
    complexity,
    function_lines,
    decisions,
    draft_lines,
    callables,
    imports_between_tests,
    changelog_bytes,
    names_with_two_meanings,
)


def main() -> int:
    figures = [measure() for measure in FIGURES]
    for figure in figures:
        said = "met" if figure.met else f"past the bar  {figure.worst}"
        print(f"{figure.name:42} {figure.value:10.1f} {figure.bar:8.0f}  {said}")
    return int(any(not figure.met for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
