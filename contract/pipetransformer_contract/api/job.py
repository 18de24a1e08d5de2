"""The `PipeTrainingJob` object: the trainer's part of the spec, and the fields that only the operator reads."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from pipetransformer_contract.choose import OnPack, ReleaseDownTo
from pipetransformer_contract.conditions import field, given
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Positive
from pipetransformer_contract.spec import TrainerSpec, TrainingSpec
from pipetransformer_contract.spec_model import Rule, SpecModel

from .status import JobStatus

GROUP = "training.pipetransformer.io"
VERSION = "v1alpha1"
KIND = "PipeTrainingJob"
PLURAL = "pipetrainingjobs"
#: `managedBy` of jobs that this operator controls. Absent means the same.
MANAGER = f"{GROUP}/operator"
TRAINER_CONTAINER = "trainer"
#: Maximum nesting of a spec's fields. A pod has about a dozen levels.
_MAX_DEPTH = 100
_LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"

#: Maximum number of workers of a layout. The status names each worker, and etcd limits objects to 1.5 MiB.
MAX_WORKERS = 4096
Workers = Annotated[int, Field(ge=1, le=8192)]


class ClaimFrom(StrEnum):
    """Where workers beyond the starting size come from."""

    IDLE = "Idle"  #: a free accelerator of an existing node
    AUTOSCALER = "Autoscaler"  #: any node, including one that an autoscaler adds for the pending pod


class ElasticPolicy(SpecModel):
    """How many workers the job may have. A worker is one accelerator."""

    workers: Workers = Field(
        description="Workers at a start, also after a suspend: a multiple of pipeline.stages. If maxWorkers is lower,"
        " the job starts smaller."
    )
    min_workers: Workers = Field(
        default=1, description=f"Minimum number of workers. With more than {MAX_WORKERS:,} no job starts."
    )
    max_workers: Workers = Field(
        description="Maximum number of workers, also at start. The largest valid layout that fits is used. Values above"
        f" {MAX_WORKERS:,} are treated as {MAX_WORKERS:,}."
    )
    min_pipelines: Workers = Field(default=1, description="Minimum number of pipelines.")
    max_pipelines: Workers | None = Field(
        default=None, description="Maximum number of pipelines. By default maxWorkers, or workers if that is more."
    )
    on_pack: OnPack = Field(default=OnPack.WIDEN, description="What happens to workers that packing frees.")
    release_down_to: ReleaseDownTo = Field(
        default=ReleaseDownTo.PRESENT_STEP,
        description="For onPack Release with packing Measured: how slow a step may become when workers are released."
        " PresentStep: 5 % slower than the present step. StartingStep: 5 % slower than a step of the job's first layout"
        " with no frozen layers. Then freezing gives more accelerators back, and the job ends no later than planned."
        " The first layout is that of elasticPolicy.workers, even if maxWorkers or a queue lets the job start with"
        " fewer.",
    )
    claim_from: ClaimFrom = Field(
        default=ClaimFrom.IDLE,
        description="Idle claims workers beyond elasticPolicy.workers only while nodes have free accelerators for them,"
        " and never if the operator sees no nodes. Autoscaler tries a claim at any time, and an autoscaler may add"
        " nodes for it.",
    )
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        default=1.0,
        description="For onPack Auto: how much this job's throughput counts, compared with other jobs of its namespace."
        " With the chart's sharing.weights: Cluster, compared with all jobs.",
    )
    rules = (
        Rule(field("min_workers").at_most(field("workers")), "minWorkers must not exceed workers", ".minWorkers"),
        Rule(
            field("min_workers").at_most(field("max_workers")),
            "minWorkers must not exceed maxWorkers; suspend gives all workers back",
            ".maxWorkers",
        ),
        Rule(
            ~given("max_pipelines") | field("min_pipelines").at_most(field("max_pipelines")),
            "minPipelines must not exceed maxPipelines",
            ".minPipelines",
        ),
        Rule(
            field("release_down_to").is_not("StartingStep") | field("on_pack").is_("Release"),
            "releaseDownTo StartingStep needs onPack Release: only then workers are released",
            ".releaseDownTo",
        ),
    )

    @property
    def ceiling(self) -> int:
        """Maximum number of workers of any layout."""
        return min(self.max_workers, MAX_WORKERS)


class Topology(SpecModel):
    """Nodes that have one value of a label in common."""

    topology_key: Annotated[str, Field(min_length=1, max_length=317, pattern=_LABEL_KEY)] = Field(
        description="Label of the nodes."
    )
    required: bool = Field(
        default=False,
        description="True: a worker waits until such a node is free. False: it takes another node, if need be.",
    )


class Placement(SpecModel):
    """Where workers run, in addition to the affinity of podTemplate."""

    within: Topology | None = Field(
        default=None,
        description="The workers of one pipeline run on nodes with the same value of this label, such as a rack."
        " By default they prefer the same node, then the same zone.",
    )
    spread: Topology | None = Field(
        default=None,
        description="Pipelines run on nodes with different values of this label, so that one failure does not stop"
        " them all. By default they prefer different nodes.",
    )


class CleanPodPolicy(StrEnum):
    """Which pods are deleted when the job ends.

    With None the workers of a failed job write a checkpoint and exit by themselves, and their pods are kept."""

    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


class RunPolicy(SpecModel):
    """How the operator handles failures, delays and the end of the job."""

    backoff_limit: Annotated[int, Field(ge=0, le=10000)] = Field(
        default=3,
        description="Failures before the job fails: lost workers, and generations in a row that make no step. The loss"
        " of a node does not count. Failures are forgotten, see forgetFailuresAfterSteps.",
    )
    forget_failures_after_steps: Positive = Field(
        default=1000,
        description="A failure counts against backoffLimit until this many more steps are committed.",
    )
    stall_timeout_seconds: Positive | None = Field(
        default=None,
        description="If no step is made for this time, or none since a generation was published, the condition Stalled"
        " becomes True and silent members are replaced. By default the longest of 30 minutes, 20 median steps and 2"
        " rounds.",
    )
    resize_timeout_seconds: Positive = Field(
        default=600,
        description="A resize that is not published within this time is cancelled and tried again later.",
    )
    start_timeout_seconds: Positive = Field(
        default=600,
        description="If not all workers of a start have a node within this time, the job releases all of them. It tries"
        " again after 1, 2, 4, at most 5 minutes, or when accelerators are released. If all have a node, the start has"
        " six times as long, and twice that after each start that was too slow.",
    )
    claim_timeout_seconds: Positive = Field(
        default=120,
        description="If the workers of a claim are not all scheduled within this time, the claim is withdrawn and tried"
        " again later.",
    )
    drain_timeout_seconds: Positive = Field(
        default=600,
        description="Evictions from a cordoned node wait until the workers are replaced, at most this long. Another"
        " cordon restarts the time, up to twice this long after the first cordon.",
    )
    stop_timeout_seconds: Positive = Field(
        default=300,
        description="Time for the last checkpoint. If a job is suspended, sent back to its queue or past its deadline,"
        " its workers are told to write one. Workers that have not exited by then are deleted. It is also the grace"
        " period of pods that are deleted or evicted by others, unless the template sets one.",
    )
    active_deadline_seconds: Positive | None = Field(
        default=None,
        description="The job fails if it is not complete within this time. The time starts when the job starts, is"
        " resumed, or is admitted again by its queue.",
    )
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="The job is deleted this long after its end."
    )
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING


class Opaque(SpecModel):
    """A part of the pod template. It declares the fields that the operator reads, and keeps all others unchanged."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow", frozen=True)


Quantities = dict[Annotated[str, Field(max_length=317)], int | str]


class Resources(Opaque):
    """Like Kubernetes' ResourceRequirements."""

    limits: Quantities = Field(
        default_factory=dict, max_length=16, description="Limits. The trainer's must have 1 of acceleratorResource."
    )
    requests: Quantities = Field(default_factory=dict, max_length=16, description="Requests; by default the limits.")


class Container(Opaque):
    """Like Kubernetes' Container. All its fields are kept."""

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(
        description="Name. The container that trains is named `trainer`.",
    )
    resources: Resources = Field(default_factory=Resources)


class PodSpec(Opaque):
    """Like Kubernetes' PodSpec. All its fields are kept. A strict dry run of one pod checks them."""

    containers: list[Container] = Field(
        min_length=1,
        max_length=16,
        description="The trainer container and its sidecars.",
    )


class TemplateMetadata(Opaque):
    """Like Kubernetes' ObjectMeta. Pods get the labels, annotations and finalizers, and no other field."""

    labels: dict[str, str] = Field(
        default_factory=dict,
        max_length=64,
        description="Labels of each pod, in addition to the operator's.",
    )
    annotations: dict[str, str] = Field(default_factory=dict, max_length=64, description="Annotations of each pod.")


class PodTemplate(Opaque):
    metadata: TemplateMetadata = Field(default_factory=TemplateMetadata)
    spec: PodSpec

    def trainer(self) -> Container:
        """The container whose exit counts: the one named `trainer`, otherwise the first."""
        containers = self.spec.containers
        return next((container for container in containers if container.name == TRAINER_CONTAINER), containers[0])


class JobSpec(TrainingSpec):
    elastic_policy: ElasticPolicy
    run_policy: RunPolicy = Field(default_factory=RunPolicy)
    placement: Placement = Field(default_factory=Placement)
    suspend: bool = Field(
        default=False,
        description="True writes a checkpoint and releases all workers. False starts again from the checkpoint.",
    )
    accelerator_resource: Annotated[str, Field(max_length=317)] = Field(
        default="nvidia.com/gpu", description="Extended resource. Each worker has one of it. Empty for CPU."
    )
    pod_template: PodTemplate = Field(
        description="Template of the workers' pods. The trainer is the container named trainer, otherwise the first."
    )
    managed_by: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        default=None,
        description=f"Controller of this job. With a value other than {MANAGER} the operator ignores the job.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_depth(cls, value: object) -> object:
        """Refuses a deeply nested spec. The schema does not limit free-form fields, but some readers do."""
        level = [value]
        for _ in range(_MAX_DEPTH):
            level = [inner for item in level for inner in _items(item)]
        if level:
            raise ValueError(f"fields are nested more than {_MAX_DEPTH} deep, in free-form options or in podTemplate")
        return value

    @property
    def managed(self) -> bool:
        """Whether this operator is the job's controller."""
        return self.managed_by in (None, MANAGER)

    @property
    def initial_layout(self) -> Layout:
        """The layout of a start that no ceiling limits."""
        return Layout(self.pipeline.stages, self.elastic_policy.workers // self.pipeline.stages)

    @property
    def max_pipelines(self) -> int:
        """The largest number of pipelines that the spec allows."""
        elastic = self.elastic_policy
        return elastic.max_pipelines or max(elastic.workers, elastic.max_workers)


class Metadata(SpecModel):
    """The part of the object's metadata that the operator reads."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)
    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 1
    resource_version: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    deletion_timestamp: str | None = None
    finalizers: list[str] = Field(default_factory=list)


class PipeTrainingJob(SpecModel):
    """A training job whose pipelines shrink as its layers freeze."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)
    api_version: str = f"{GROUP}/{VERSION}"
    kind: str = KIND
    metadata: Metadata
    spec: JobSpec
    status: JobStatus = Field(default_factory=JobStatus)

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any]) -> "PipeTrainingJob":
        """Parses an object as the API server returns it.

        Raises:
            pydantic.ValidationError: the object does not match the types. `validate_manifest` has messages for users.
        """
        return cls.model_validate(manifest)

    @property
    def managed(self) -> bool:
        """Whether this operator is the job's controller."""
        return self.spec.managed


def _items(value: object) -> Iterable[object]:
    """The items of a list or the values of an object; empty for other types."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def trainer_spec(spec: JobSpec, *, num_shards: int | None = None, workers: int | None = None) -> TrainerSpec:
    """The spec that a worker gets in `Env.JOB_SPEC`.

    `num_shards` and `workers` are the values of the start, from the status. `elasticPolicy` may have changed since, but
    all workers must get the same values. The defaults are the values of a job that starts now.
    """
    return TrainerSpec(
        **{name: getattr(spec, name) for name in TrainingSpec.model_fields},
        num_shards=num_shards or spec.max_pipelines,
        workers=workers or spec.elastic_policy.workers,
    )
