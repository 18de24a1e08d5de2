"""The site can be built, needs nobody else, and says what is so."""

import ast
import html
import importlib
import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import datasets
import pytest
import torch
import typer
import yaml
from typer.core import TyperGroup

from pipetransformer.data import load_dataset as load_dataset_of
from pipetransformer.data.load import makes_bytes
from pipetransformer.errors import SpecError
from pipetransformer_client.cli.app import app
from pipetransformer_contract.api.schema import Schema, pruned, root_schema
from pipetransformer_contract.api.validate import validate_manifest
from pipetransformer_contract.spec import Data
from pipetransformer_contract.wire import Env
from tests.testkit import ROOT
from tests.testkit.documented import pages
from tools.docs import values, walks, write
from tools.docs.benchmarks import FIGURES

MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_site_is_read_without_any_other_server(site: Path) -> None:
    loads = re.compile(
        r'<(?:script|img|iframe)\b[^>]*\ssrc="?(?:https?:)?//'
        r'|<link\b(?=[^>]*rel="?(?:stylesheet|preload|preconnect|icon))[^>]*href="?(?:https?:)?//'
    )
    found = {page.name: loads.findall(page.read_text()) for page in site.rglob("*.html")}
    assert len(found) > 30
    assert not {page: what for page, what in found.items() if what}
    assert not [style for style in site.rglob("*.css") if re.search(r"url\(['\"]?(?:https?:)?//", style.read_text())]


@pytest.mark.parametrize("path", write.rendered(), ids=lambda path: path.name)
def test_what_is_generated_is_what_make_generate_writes(path: Path) -> None:
    assert path.read_text() == write.rendered()[path], "run `make generate`"


def test_the_page_of_benchmarks_shows_every_result_that_has_figures() -> None:
    shown = set(re.findall(r"^## (.*)$", (ROOT / "docs" / "benchmarks.md").read_text(), flags=re.MULTILINE))

    assert len(FIGURES) > 10
    assert [name for name in FIGURES if not {name, name.removeprefix("worth-")} & shown] == []


def test_the_variable_that_declares_a_workers_memory_is_documented() -> None:
    assert f"`{Env.DEVICE_BYTES}`" in (ROOT / "docs/tuning.md").read_text()


def test_every_field_of_a_job_has_a_description_and_every_value_of_the_chart_or_its_group_a_comment() -> None:
    spec, status = (root_schema()["properties"][name] for name in ("spec", "status"))
    assert not [path for path, field in [*fields(spec), *fields(status)] if not field.get("description")]
    commented = {path for path, comment in values.comments((values.CHART / "values.yaml").read_text()) if comment}
    keys = [path for path, _ in values.comments((values.CHART / "values.yaml").read_text()) if len(path) == 1]
    assert not [key for key in keys if not any(path[:1] == key for path in commented)]


def fields(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field
        yield from fields(field.get("items", field), f"{path}.{name}")


def test_a_command_in_a_sentence_exists_with_its_options() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    texts = {(path.name, text) for path in pages() for text in re.findall(r"`([^`\n]+)`", path.read_text())}
    ours = [(page, text.split()) for page, text in texts if re.match(r"(kubectl )?pipetransformer [a-z]", text)]
    assert len(ours) > 10
    for page, words in ours:
        words = words[words.index("pipetransformer") + 1 :]
        assert words[0] in group.commands, f"{page}: {words}"
        command = group.commands[words[0]]
        if isinstance(command, TyperGroup):
            assert words[1] in command.commands, f"{page}: {words}"
            command = command.commands[words[1]]
        known = {option for parameter in command.params for option in parameter.opts}
        used = {word.strip("[]") for word in words if word.startswith(("-", "[-"))}
        assert used <= known, f"{page}: {words}"
    targets = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, flags=re.MULTILINE))
    made = [(page, text.split()[1:]) for page, text in texts if text.startswith("make ")]
    assert not [
        (page, words) for page, words in made if not {w for w in words if re.fullmatch("[a-z-]+", w)} <= targets
    ]


def blocks(language: str) -> list[tuple[str, str]]:
    """Pages and their blocks of code in a language."""
    fenced = re.compile(rf"^( *)```{language}\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
    return [(path.name, textwrap.dedent(block)) for path in pages() for _, block in fenced.findall(path.read_text())]


def test_a_job_in_a_page_is_one_that_the_operator_takes_and_a_part_of_one_has_fields_that_there_are() -> None:
    written = [(page, yaml.safe_load(block)) for page, block in blocks("yaml")]
    jobs = [(page, job) for page, job in written if job.get("kind") == "PipeTrainingJob"]
    parts = [(page, job["spec"]) for page, job in written if job.keys() == {"spec"}]
    assert len(jobs) >= 2 and len(parts) >= 2
    for page, job in jobs:
        assert validate_manifest(job) == [], page
    for page, spec in parts:
        assert pruned(root_schema()["properties"]["spec"], spec) == spec, page


def test_the_dataset_of_a_job_in_a_page_is_asked_for_as_its_loader_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, *_: object, **__: object) -> None:
        asked.append(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    jobs = [yaml.safe_load(block) for _, block in blocks("yaml")]
    found = [job["spec"]["data"] for job in jobs if job.get("spec", {}).get("data", {}).get("name") == "huggingface"]
    for data in found:
        with pytest.raises(SpecError, match=r"spec\.data\.path: huggingface: FileNotFoundError"):
            load_dataset_of(Data.model_validate(data), dtype=torch.float32)
    assert asked and asked == [data["path"] for data in found]


def test_a_page_shows_the_whole_of_a_file_that_it_includes(site: Path) -> None:
    page = html.unescape(re.sub(r"<[^>]+>", "", (site / "models.html").read_text()))
    assert (ROOT / "examples" / "train.py").read_text().strip() in page


def test_a_pretrained_model_in_a_page_reads_the_tokens_that_it_knows() -> None:
    specs = [(page, job["spec"]) for page, block in blocks("yaml") if "spec" in (job := yaml.safe_load(block))]
    pretrained = [(page, spec) for page, spec in specs if spec.get("model", {}).get("path") and "data" in spec]
    assert len(pretrained) >= 2
    assert not [page for page, spec in pretrained if makes_bytes(Data.model_validate(spec["data"]))]


def test_python_in_a_page_imports_what_there_is() -> None:
    imports = [
        (page, node)
        for page, block in blocks("python")
        if "--8<--" not in block
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("pipetransformer")
    ]
    assert len(imports) >= 3
    for page, node in imports:
        module = importlib.import_module(str(node.module))
        assert not [name.name for name in node.names if not hasattr(module, name.name)], page


def test_the_architecture_names_every_room() -> None:
    paths = re.findall(r"`([\w/]+)`", (ROOT / "docs" / "architecture.md").read_text())
    named = {room for path in paths for room in path.split("/")}
    packages = (ROOT / "trainer_image" / "pipetransformer", ROOT / "operator" / "pipetransformer_operator")
    rooms = [path for package in packages for path in package.rglob("*") if path.is_dir()]
    rooms += [path for package in packages for path in package.glob("*.py")]
    rooms = [room for room in rooms if not room.name.startswith("__")]
    assert len(rooms) > 40
    assert not [room.stem for room in rooms if room.stem not in named]


def test_the_architecture_lists_a_room_of_the_trainer_above_all_rooms_that_it_imports() -> None:
    rooms = (ROOT / "docs" / "architecture.md").read_text().partition("\n### Trainer\n")[2].partition("\n### ")[0]
    cells = re.findall(r"^\| (`[^|]*`) \|", rooms, flags=re.MULTILINE)
    row_of = {room.replace("/", "."): row for row, cell in enumerate(cells) for room in re.findall(r"`([\w/]+)`", cell)}
    assert len(row_of) > 20
    package = ROOT / "trainer_image" / "pipetransformer"
    upward = set()
    for file in package.rglob("*.py"):
        (own,) = _room(row_of, ".".join(file.relative_to(package).with_suffix("").parts)) or [""]
        for module in re.findall(r"^\s*from pipetransformer\.([\w.]+) import", file.read_text(), flags=re.MULTILINE):
            upward |= {(own, room) for room in _room(row_of, module) if own and row_of[room] < row_of[own]}
    assert not upward


def _room(rooms: Iterable[str], module: str) -> list[str]:
    return [room for room in rooms if f"{module}.".startswith(f"{room}.")]


@pytest.mark.parametrize("walk", walks.walks(), ids=lambda walk: walk.title)
def test_a_walk_of_the_architecture_names_files_that_exist(walk: walks.Walk) -> None:
    assert len(walk.names) > 10
    assert {name: len(walks.files_of(name)) for name in walk.names} == dict.fromkeys(walk.names, 1)


@pytest.mark.parametrize("walk", walks.walks(), ids=lambda walk: walk.title)
def test_a_walk_of_the_architecture_is_short_enough(walk: walks.Walk) -> None:
    assert walk.met, f"{len(walk.names)} files, at most {walk.bar}"


def test_the_glossary_explains_each_word_in_one_breath() -> None:
    glossary = (ROOT / "docs" / "concepts.md").read_text().partition("\n## Glossary\n")[2]
    rows = dict(re.findall(r"^\| ([a-zA-Z, -]+) \| ([^|]+) \|$", glossary, flags=re.MULTILINE))
    rows.pop("word")
    assert len(rows) >= 25
    assert list(rows) == sorted(rows, key=str.lower)
    assert not [word for word, meaning in rows.items() if len(meaning.split()) > 25]


def test_one_room_imports_the_stock_pipelining() -> None:
    package = ROOT / "trainer_image" / "pipetransformer"
    imports = re.compile(r"^\s*(?:from|import) torch\.distributed\.pipelining", re.MULTILINE)
    found = {file.parent.name for file in package.rglob("*.py") if imports.search(file.read_text())}
    assert found == {"schedules"}


def test_every_example_is_shown_in_a_page() -> None:
    text = "".join(path.read_text() for path in pages())
    folder = ROOT / "examples"
    examples = [path for path in folder.rglob("*") if path.is_file() and folder / "pretrained" not in path.parents]
    examples += (folder / "pretrained").glob("*/")  # a checkpoint is shown as a whole
    assert len(examples) > 5
    assert not [path.name for path in examples if path.name not in text]


def test_the_readmes_figures_are_those_of_the_page_that_it_links() -> None:
    cases = json.loads((ROOT / "benchmarks/results/regroup.json").read_text())["cases"]
    moves = [move for case in cases.values() for move in case.values()]
    pauses = [move["pause_seconds"]["median"] for move in moves]
    restarts = [move["torchrun_seconds"]["median"] for move in moves if move["torchrun_seconds"]]
    readme = " ".join((ROOT / "README.md").read_text().split())
    longest = max(move["pause_seconds"]["max"] for move in moves)
    medians = f"The median pause is {min(pauses):.2f} to {max(pauses):.2f} s"
    assert f"{medians} for 10 MB to 1 GB of state, the longest {longest:.2f} s" in readme
    assert f"restart from a checkpoint takes {min(restarts):.0f} to {max(restarts):.0f} s" in readme
