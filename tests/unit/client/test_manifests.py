"""Input of `run`, `plan` and `submit`: files with one or several jobs, standard input and `--set`."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipetransformer_client.cli.manifests import all_jobs, one_job
from pipetransformer_client.cli.set_fields import field_paths, with_fields
from pipetransformer_contract.api.manifest import InvalidManifest
from pipetransformer_contract.api.validate import validate_manifest
from tests.testkit.client.command_line import command
from tests.testkit.client.fake_kube import JOBS, FakeKube
from tests.testkit.operator.builders import make_job

CLAIM = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "training"}}


def write(folder: Path, *objects: Any) -> str:
    """Writes a file with one document for each object."""
    file = folder / "jobs.yaml"
    file.write_text("---\n" + yaml.safe_dump_all(objects) + "---\n")
    return str(file)


def submitted(cluster: FakeKube) -> list[str]:
    """Names of the created jobs in order."""
    return [body["metadata"]["name"] for method, path, body in cluster.requests if (method, path) == ("POST", JOBS)]


def test_submit_creates_each_job_of_a_file(
    tmp_path: Path, fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, make_job("one").manifest(), make_job("two").manifest())
    assert command(monkeypatch, "submit", file) == 0
    assert submitted(fake) == ["one", "two"]
    assert capsys.readouterr().out.splitlines() == ["default/one created", "default/two created"]


def test_submit_reads_the_list_that_list_prints(
    tmp_path: Path, fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [make_job("one").manifest(), make_job("two").manifest()]
    file = write(tmp_path, {"apiVersion": "v1", "kind": "List", "items": jobs})
    assert command(monkeypatch, "submit", file) == 0
    assert submitted(fake) == ["one", "two"]


def test_submit_warns_of_results_that_are_lost_with_the_pod(
    tmp_path: Path, fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job("one").set("output.location", "/storage/models").set("checkpoint.location", "/storage2").manifest()
    (trainer,) = job["spec"]["podTemplate"]["spec"]["containers"]
    trainer["volumeMounts"] = [{"name": "disk", "mountPath": "/storage/"}]
    assert command(monkeypatch, "submit", write(tmp_path, job)) == 0
    assert submitted(fake) == ["one"]
    warned = capsys.readouterr().err
    assert "warning: spec.checkpoint.location: /storage2 is on no volume that the trainer mounts" in warned
    assert "output" not in warned


def test_a_dry_run_checks_jobs_without_a_cluster(
    tmp_path: Path, fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, make_job("one").manifest(), make_job("two").manifest())
    assert command(monkeypatch, "submit", file, "--dry-run") == 0
    assert capsys.readouterr().out.splitlines() == ["one is valid (dry run)", "two is valid (dry run)"]
    assert command(monkeypatch, "submit", file, "--dry-run", "-o", "json") == 0
    assert [item["metadata"]["name"] for item in json.loads(capsys.readouterr().out)["items"]] == ["one", "two"]
    assert command(monkeypatch, "submit", file, "--dry-run", "--set", "pipeline.stages=0") == 2
    assert fake.requests == []


def test_programs_read_the_jobs_of_a_file_as_one_list(
    tmp_path: Path, fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, make_job("one").manifest(), make_job("two").manifest())
    assert command(monkeypatch, "submit", file, "-o", "json") == 0
    assert [item["metadata"]["name"] for item in json.loads(capsys.readouterr().out)["items"]] == ["one", "two"]


def test_programs_read_the_jobs_that_exist_though_the_cluster_refuses_a_later_one(
    tmp_path: Path, fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.objects[f"{JOBS}/two"] = make_job("two").manifest()
    file = write(tmp_path, make_job("one").manifest(), make_job("two").manifest())
    assert command(monkeypatch, "submit", file, "-o", "json") == 3
    said = capsys.readouterr()
    assert [item["metadata"]["name"] for item in json.loads(said.out)["items"]] == ["one"]
    assert "two already exists" in said.err


def test_submit_creates_nothing_where_one_job_of_the_file_is_wrong(
    tmp_path: Path, fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, make_job("one").manifest(), make_job("two").stages(4).workers(3).manifest())
    assert command(monkeypatch, "submit", file) == 2
    assert "jobs.yaml, document 2: spec.elasticPolicy.workers: " in capsys.readouterr().err
    assert submitted(fake) == []


def test_submit_refuses_other_kinds_in_words(
    tmp_path: Path, fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, CLAIM, make_job("one").manifest())
    assert command(monkeypatch, "submit", file) == 2
    words = "document 1: PersistentVolumeClaim training is not a PipeTrainingJob. Create it with kubectl apply"
    assert words in capsys.readouterr().err
    assert submitted(fake) == []
    assert command(monkeypatch, "submit", file, "--name", "one") == 0
    assert submitted(fake) == ["one"]


def test_watch_is_for_one_job(
    tmp_path: Path, fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, make_job("one").manifest(), make_job("two").manifest())
    assert command(monkeypatch, "submit", file, "--watch") == 2
    assert "choose one with --name" in " ".join(capsys.readouterr().err.replace("│", "").split())
    assert submitted(fake) == []


@pytest.mark.parametrize("words", [("run", "--run-dir", "run"), ("plan",)], ids=["run", "plan"])
def test_a_file_of_several_jobs_needs_a_name(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, CLAIM, make_job("one").manifest(), make_job("two").manifest())
    assert command(monkeypatch, *words, file) == 2
    assert f"{file}: holds 2 jobs (one, two): choose one with --name" in capsys.readouterr().err
    assert command(monkeypatch, *words, file, "--name", "three") == 2
    assert "--name: " in (told := capsys.readouterr().err) and "holds no job called three; it has one, two" in told
    assert one_job(Path(file), "two", None).name == "two"


def test_other_kinds_beside_the_only_job_do_not_matter_to_run(tmp_path: Path) -> None:
    assert one_job(Path(write(tmp_path, CLAIM, make_job("one").manifest())), None, None).name == "one"


@pytest.mark.parametrize("content", ["", "---\n---\n", "# nothing\n"])
def test_a_file_without_a_job_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text(content)
    with pytest.raises(InvalidManifest, match="must hold"):
        all_jobs(tmp_path / "jobs.yaml", None, None)
    with pytest.raises(InvalidManifest, match="must hold"):
        one_job(tmp_path / "jobs.yaml", None, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [("a: &x {b: *x}", "Circular reference detected"), ("a: " + 3000 * "[", "values are nested too deeply")],
)
def test_a_file_that_json_cannot_express_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(InvalidManifest, match=f"job.yaml: is not YAML: {words}"):
        one_job(tmp_path / "job.yaml", None, None)


def test_a_dash_is_standard_input(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(yaml.safe_dump(make_job("piped").manifest())))
    assert command(monkeypatch, "submit", "-") == 0
    assert submitted(fake) == ["piped"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("a: ["))
    assert command(monkeypatch, "submit", "-") == 2
    assert "standard input: is not YAML" in capsys.readouterr().err


def test_set_changes_fields_before_the_job_is_checked(
    tmp_path: Path, fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, make_job().stages(4).workers(3).manifest())
    settings = ("--set", "elasticPolicy.workers=4", "--set", "spec.elasticPolicy.maxWorkers=8")
    assert command(monkeypatch, "submit", file, *settings) == 0
    ((_, _, sent),) = fake.requests
    assert sent["spec"]["elasticPolicy"] == {"workers": 4, "minWorkers": 1, "maxWorkers": 8}


def test_set_reads_values_as_yaml_and_makes_what_a_path_needs() -> None:
    manifest = make_job().manifest()
    changed = with_fields(
        manifest,
        [
            "training.epochs=",
            "training.steps=100",
            "training.optimizer={name: SGD, learningRate: 3e-4}",
            "training.optimizer.momentum=0.5",
            "freeze.boundaries=[{step: 1, boundary: 2}]",
            "data.options.task=Class",
            "podTemplate.spec.containers[0].env[0]={name: A, value: '1'}",
            r"podTemplate.spec.containers[0].resources.limits.nvidia\.com/gpu=1",
            r"metadata.labels.kueue\.x-k8s\.io/queue-name=team",
            "checkpoint.location=/checkpoints",
        ],
    )
    assert manifest == make_job().manifest(), "the one that was given has changed"
    spec, container = changed["spec"], changed["spec"]["podTemplate"]["spec"]["containers"][0]
    assert spec["training"] == {
        "epochs": None, "steps": 100, "optimizer": {"name": "SGD", "learningRate": 3e-4, "momentum": 0.5},
    }  # fmt: skip
    assert spec["freeze"] == {"boundaries": [{"step": 1, "boundary": 2}]}
    assert spec["data"] == {"name": "digits", "options": {"task": "Class"}}
    assert container["env"] == [{"name": "A", "value": "1"}]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert changed["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    assert validate_manifest({**changed, "spec": {**spec, "training": {"steps": 100}}}) == []


def test_whole_numbers_may_be_written_with_an_exponent_or_a_point_as_for_kubectl() -> None:
    changed = with_fields(make_job().manifest(), ["training.epochs=", "training.steps=1e5", "cache.memoryBytes=4.0e9"])
    spec = changed["spec"]
    assert (spec["training"]["steps"], spec["cache"]["memoryBytes"]) == (100_000, 4_000_000_000)
    assert isinstance(spec["training"]["steps"], int)
    assert validate_manifest({**changed, "spec": {**spec, "training": {"steps": spec["training"]["steps"]}}}) == []
    halves = with_fields(make_job().manifest(), ["training.epochs=", "training.steps=1.5"])
    assert [error.path for error in validate_manifest(halves)] == ["spec.training.steps"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("training.epoch=3", "there is no field training.epoch: did you mean training.epochs?"),
        ("spec.training.epoch=3", "there is no field training.epoch: did you mean training.epochs?"),
        ("training.global_batch_size=3", "did you mean training.globalBatchSize?"),
        ("epochs=3", "did you mean training.epochs?"),
        ("learning_rate=3", "did you mean training.optimizer.learningRate?"),
        ("metadata.nam=a", "there is no field metadata.nam: did you mean metadata.name?"),
        ("qqqqqqq=3", "there is no field qqqqqqq"),
        ("training.epochs.a=3", "training.epochs is not an object, so it has no fields"),
        ("training[0]=3", "training is not a list"),
        ("podTemplate.spec.containers.image=a", "is a list: add an index, such as podTemplate.spec.containers[0]"),
        ("podTemplate.spec.containers[2].image=a", "the list has 1 entries: the next is [1]"),
        ("training.epochs", "must be field=value"),
        ("=3", "must name a field, such as training.epochs"),
        ("training..epochs=3", "must name a field, such as training.epochs"),
        ("training.epochs=[", "'[' is not YAML"),
        ("model.options=&a [*a]", "'&a [*a]' is not YAML: Circular reference detected"),
    ],
)
def test_a_setting_that_names_no_field_is_refused_with_what_was_meant(setting: str, words: str) -> None:
    with pytest.raises(InvalidManifest) as refused:
        with_fields(make_job().manifest(), [setting])
    assert str(refused.value).startswith(f"--set {setting}: ")
    assert words in str(refused.value)


def test_every_field_of_the_schema_can_be_set() -> None:
    for path in field_paths():
        with_fields(make_job().manifest(), [f"{path}=null"])
    assert {"training.epochs", "podTemplate.spec.containers", "metadata.name"} <= set(field_paths())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("submit", "examples"), "examples is a folder: name a YAML file in it"),
        (("submit", "examples/vit-digit.yaml"), "there is no file examples/vit-digit.yaml: did you mean"),
        (("submit", "exampels/vit-digits.yaml"), "there is no folder exampels: did you mean examples?"),
        (
            ("timeline", "examples/vit-digit"),
            "there is no folder examples/vit-digit: did you mean examples/vit-digits.yaml?",
        ),
        (("timeline", "examples/vit-digits.yaml"), "examples/vit-digits.yaml is a file, not a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistyped_path_is_called_so(
    words: tuple[str, ...],
    told: str,
    tmp_path: Path,
    fake: FakeKube,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "vit-digits.yaml").touch()
    assert command(monkeypatch, *words) == 2
    assert told in capsys.readouterr().err
    assert fake.requests == []


def test_a_mistyped_folder_is_named_in_the_error_that_no_such_job_exists(
    tmp_path: Path, fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vit-digits").mkdir()
    assert command(monkeypatch, "timeline", "vit-digit") == 3
    assert "there is no folder vit-digit: did you mean vit-digits?" in capsys.readouterr().err
