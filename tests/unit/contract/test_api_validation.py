"""What `validate_manifest` refuses, and with which words: the CRD's own rules, evaluated without an API server."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic.alias_generators import to_camel, to_snake

from pipetransformer_contract.api.field_error import FieldError
from pipetransformer_contract.api.manifest import checked
from pipetransformer_contract.api.schema import Schema, root_schema
from pipetransformer_contract.api.status import ConditionType, State
from pipetransformer_contract.api.validate import validate_manifest, validate_update
from pipetransformer_contract.spec import (
    Cache,
    Checkpoint,
    Data,
    Evaluation,
    Freeze,
    Model,
    MultiLevel,
    Output,
    Pipeline,
    Training,
)
from pipetransformer_contract.spec_model import SpecModel
from tests.testkit.operator.bounds import Violation, violations
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.operator.manifests import CHANGED, GPU, REFUSED, VALID
from tests.testkit.operator.world import World

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("job", VALID)
def test_a_valid_job_is_accepted(job: JobBuilder) -> None:
    assert validate_manifest(job.manifest()) == []


@pytest.mark.parametrize(("job", "path"), REFUSED, ids=[path for _, path in REFUSED])
def test_a_wrong_job_is_refused_with_the_path_of_the_field(job: JobBuilder, path: str) -> None:
    assert {error.path for error in validate_manifest(job.manifest())} == set(path.split())


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("pipline", "there is no such field: did you mean pipeline?"),
        ("training.max_gradient_norm", "there is no such field: did you mean maxGradientNorm?"),
        ("qqqqq", "there is no such field"),
    ],
)
def test_an_unknown_field_is_refused_with_what_was_meant(field: str, words: str) -> None:
    """So is a name of Python: the API server would drop the field."""
    (error,) = validate_manifest(make_job().set(field, 1.0).manifest())
    assert (error.path, error.message) == (f"spec.{field}", words)


def test_a_job_that_is_nested_deeper_than_others_can_read_is_refused() -> None:
    """The API server takes it: no schema bounds what it leaves open."""
    options: dict[str, Any] = {"b": 1}
    for _ in range(50):
        options = {"a": [options]}
    (error,) = validate_manifest(make_job().set("model", {"name": "m:f", "options": options}).manifest())
    assert (error.path, "nested more than 100 deep" in error.message) == ("spec", True)
    assert (
        validate_manifest(make_job().set("model", {"name": "m:f", "options": options["a"][0]["a"][0]}).manifest()) == []
    )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("a b", "c", "a key has an optional domain and '/', then 1 to 63 letters"),
        ("/team", "c", "a key has"),
        ("a/b/c", "d", "a key has"),
        ("A.b/team", "c", "a key has"),
        ("x" * 64, "c", "a key has"),
        ("team", "-c", "a value has up to 63 letters"),
        ("team", "c d", "a value has"),
        ("team", "x" * 64, "a value has"),
    ],
)
def test_a_label_that_the_api_server_refuses_is_named(key: str, value: str, words: str) -> None:
    (error,) = validate_manifest(make_job().label(key, value).manifest())
    assert error.path == f"metadata.labels[{key}]" and words in error.message


@pytest.mark.parametrize(("key", "value"), [("a.b/c-D_e.1", ""), ("t", "x" * 63), ("x" * 63, "A.b-C_0")])
def test_a_label_that_the_api_server_takes_is_taken(key: str, value: str) -> None:
    assert validate_manifest(make_job().label(key, value).manifest()) == []


def test_two_init_containers_of_one_name_are_refused_as_the_pods_would_be() -> None:
    inits = [{"name": "fetch", "image": "a"}, {"name": "fetch", "image": "b"}]
    (error,) = validate_manifest(make_job().set("podTemplate.spec.initContainers", inits).manifest())
    assert (error.path, error.message) == (
        "spec.podTemplate.spec.initContainers",
        "fetch is the name of 2 containers",
    )


def test_a_program_is_refused_numbers_that_json_has_not() -> None:
    for value in (float("inf"), float("nan")):
        with pytest.raises(ValidationError, match="finite number"):
            Training(steps=1, max_gradient_norm=value)


def test_an_empty_field_of_a_map_is_absent_as_on_the_api_server() -> None:
    job = make_job().set("podTemplate.metadata", {"labels": {"team": None}, "annotations": {"a": "b", "c": None}})
    read = checked(job.set("model.options", {"kept": None}).manifest(), "job.yaml")["spec"]
    assert read["podTemplate"]["metadata"] == {"labels": {}, "annotations": {"a": "b"}}
    assert read["model"]["options"] == {"kept": None}


def test_a_program_is_refused_what_a_manifest_is() -> None:
    """A rule says twice what holds, in CEL and of the types: both agree on all rows."""
    parts: list[type[SpecModel]] = [
        Model, Data, Training, Freeze, Pipeline, Cache, Checkpoint, Output, Evaluation, MultiLevel
    ]  # fmt: skip
    checked = {rule.message for part in parts for rule in part.rules if rule.holds is not None}
    seen = set()
    for job in [*VALID, *(job for job, _ in REFUSED)]:
        manifest = job.manifest()
        broken = set()
        for part in parts:
            try:
                typed = part.model_validate(manifest["spec"].get(to_camel(to_snake(part.__name__)), {}))
            except ValidationError:  # absent, or refused by its type
                continue
            broken |= {rule.message for rule in part.rules if rule.holds is not None and not rule.holds(typed)}
        assert broken == {error.message for error in validate_manifest(manifest)} & checked
        seen |= broken
    assert seen == checked == {rule.message for part in parts for rule in part.rules if "oldSelf" not in rule.cel}


def test_the_container_named_trainer_must_have_the_accelerator_and_not_the_first() -> None:
    sidecar, trainer = {"name": "log"} | GPU, {"name": "trainer"}
    job = make_job().set("acceleratorResource", "nvidia.com/gpu")
    assert validate_manifest(job.set("podTemplate.spec.containers", [sidecar, trainer]).manifest())
    assert not validate_manifest(job.set("podTemplate.spec.containers", [{"name": "log"}, trainer | GPU]).manifest())


SIDECAR = {"name": "side", "image": "x"} | GPU
ALWAYS = SIDECAR | {"restartPolicy": "Always"}
TRAINER = {"name": "trainer", "image": "x"} | GPU


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ({"containers": [TRAINER, SIDECAR]}, "containers"),
        ({"containers": [TRAINER], "initContainers": [ALWAYS]}, "initContainers"),
        ({"containers": [TRAINER], "initContainers": [SIDECAR]}, ""),
        ({"containers": [TRAINER], "initContainers": [ALWAYS | {"resources": [{"limits": {"cpu": 1}}]}]}, ""),
        ({"containers": [TRAINER], "initContainers": [ALWAYS | {"resources": {"limits": ["cpu"]}}]}, ""),
        ({"containers": [TRAINER, SIDECAR | {"resources": {"limits": {"nvidia.com/gpu": 0}}}]}, ""),
        ({"containers": [TRAINER | {"volumeMounts": [{"mountPath": "/var/run/pipetransformer/"}]}]}, "containers"),
        ({"containers": [TRAINER | {"volumeMounts": [{"mountPath": "/scratch"}]}]}, ""),
        ({"containers": [TRAINER | {"volumeMounts": "x"}], "initContainers": {"a": None}}, ""),
    ],
)
def test_a_template_with_a_second_accelerator_or_something_in_the_channels_place_starts_nothing_and_runs_on(
    template: dict[str, Any], path: str
) -> None:
    job = make_job().set("acceleratorResource", "nvidia.com/gpu").set("podTemplate.spec", template)
    expected = [f"spec.podTemplate.spec.{path}"] if path else []
    assert [error.path for error in validate_manifest(job.manifest())] == expected
    world = World(job)
    world.settle()
    assert (world.state() == State.STARTING) == (not path)
    assert bool(world.workers) == (not path)
    builder, world = world.builder, World(make_job())
    world.start()
    world.builder = builder
    world.settle()
    assert world.condition(ConditionType.ADMITTED).reason == ("InvalidSpec" if path else "NoQueue")
    assert world.condition(ConditionType.RUNNING).reason == "Training", "a job of before trains on"


def test_another_kind_is_refused() -> None:
    manifest = make_job().manifest() | {"kind": "Job"}
    assert validate_manifest(manifest) == [FieldError("kind", "must be PipeTrainingJob")]


@pytest.mark.parametrize(("old", "changed", "path"), CHANGED, ids=[path for _, _, path in CHANGED])
def test_what_trains_cannot_be_changed(old: JobBuilder, changed: JobBuilder, path: str) -> None:
    assert [error.path for error in validate_update(old.manifest(), changed.manifest())] == [path]


def rules(schema: Schema, path: str = "") -> Iterator[FieldError]:
    """All CEL rules, as they are told where they are broken."""
    for validation in schema.get("x-kubernetes-validations", ()):
        yield FieldError((path + validation.get("fieldPath", "")).removeprefix("."), validation["message"])
    for name, field in schema.get("properties", {}).items():
        yield from rules(field, f"{path}.{name}")
    for part in ("items", "additionalProperties"):
        if isinstance(schema.get(part), dict):
            yield from rules(schema[part], f"{path}[0]")


def test_each_rule_has_a_row() -> None:
    broken = {error for job, _ in REFUSED for error in validate_manifest(job.manifest())}
    broken |= {error for old, job, _ in CHANGED for error in validate_update(old.manifest(), job.manifest())}
    assert set(rules(root_schema())) <= broken


VIOLATIONS = list(violations())


@pytest.mark.parametrize("violation", VIOLATIONS, ids=str)
def test_each_bound_of_each_field_is_kept(violation: Violation) -> None:
    errors = validate_manifest(violation.manifest)
    assert any(error.path.startswith(violation.path) for error in errors), errors


def test_policies_and_a_suspended_jobs_template_can_be_changed() -> None:
    old = make_job().checkpoint().suspended()
    new = (
        make_job()
        .checkpoint()
        .workers(1, most=4)
        .set("runPolicy.backoffLimit", 9)
        .set("podTemplate.spec.hostNetwork", True)
    )
    assert validate_update(old.manifest(), new.manifest()) == []
