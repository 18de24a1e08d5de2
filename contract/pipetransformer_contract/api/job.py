"""The `PipeTrainingJob` object. To the trainer's part of the spec it adds the fields that only the operator reads."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from pipetransformer_contract.cel import field, given
from pipetransformer_contract.choose import Bounds, OnPack, Packing, ReleaseDownTo, choose
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Offer, Positive
from pipetransformer_contract.spec import TrainerSpec, TrainingSpec
from pipetransformer_contract.spec_model import IntOrString, Rule, SpecModel
from pipetransformer_contract.words import counted

from .status import JobStatus

GROUP = "training.pipetransformer.io"
VERSION = "v1alpha1"
KIND = "PipeTrainingJob"
PLURAL = "pipetrainingjobs"
#: Value of `managedBy` of the jobs that this operator controls. It also controls jobs without the field.
MANAGER = f"{GROUP}/operator"
TRAINER_CONTAINER = "trainer"
#: Maximum nesting of a spec's fields. A pod has about a dozen levels.
_MAX_DEPTH = 100
#: What Kubernetes allows as the key of a label.
_LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"

#: Maximum number of workers of a layout. The status names each worker, and etcd limits objects to 1.5 MiB.
MAX_WORKERS = 4096
Workers = Annotated[int, Field(ge=1, le=8192)]


class ClaimFrom(StrEnum):
    """Which nodes workers beyond the starting size may use."""

    IDLE = "Idle"  #: existing nodes with a free accelerator
    AUTOSCALER = "Autoscaler"  #: any nodes, also nodes that an autoscaler adds because of the pending pods


class ElasticPolicy(SpecModel):
    """How many workers the job may have. A worker is one accelerator."""

    workers: Workers = Field(
        description="Number of workers at a start, also after a suspend: a multiple of pipeline.stages. If maxWorkers"
        " is lower, the job starts with fewer."
    )
    min_workers: Workers = Field(
        default=1, description=f"Minimum number of workers. A job with a minimum above {MAX_WORKERS:,} does not start."
    )
    max_workers: Workers = Field(
        description="Maximum number of workers, also at start. The largest valid layout that fits is used. Values above"
        f" {MAX_WORKERS:,} are treated as {MAX_WORKERS:,}."
    )
    min_pipelines: Workers = Field(default=1, description="Minimum number of pipelines.")
    max_pipelines: Workers | None = Field(
        default=None, description="Maximum number of pipelines. By default maxWorkers, or workers if that is more."
    )
    on_pack: OnPack = Field(
        default=OnPack.WIDEN,
        description="What happens to workers that shorter pipelines no longer need. Widen: they become more pipelines."
        " Release: they go back to the cluster. Hold: the job keeps them as idle spares. Auto: as Widen, unless another"
        " job gains more from them.",
    )
    release_down_to: ReleaseDownTo = Field(
        default=ReleaseDownTo.PRESENT_STEP,
        description="With onPack Release and packing Measured: how slow a step may become when workers are released."
        " PresentStep: at most 5 % slower than the present step. StartingStep: at most 5 % slower than a step of the"
        " job's first layout with no frozen layers. Then the job releases more workers, and ends no later than if"
        " nothing had frozen. The first layout is that of elasticPolicy.workers, even if maxWorkers or a queue lets the"
        " job start with fewer.",
    )
    claim_from: ClaimFrom = Field(
        default=ClaimFrom.IDLE,
        description="When the job claims workers beyond elasticPolicy.workers. Idle: only while nodes have free"
        " accelerators for them. If the operator cannot count these, only workers that other jobs release for it. It"
        " cannot if it sees no nodes, if no node lists acceleratorResource, or if that is empty and the pods have"
        " resourceClaims. Autoscaler: at any time, so that an autoscaler may add nodes for their pods.",
    )
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        default=1.0,
        description="With onPack Auto: weight of this job's throughput, compared with other jobs of its namespace. With"
        " sharing.weights: Cluster in the chart, compared with all jobs.",
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
            "releaseDownTo StartingStep needs onPack Release: with other values no workers are released to the cluster",
            ".releaseDownTo",
        ),
    )

    @property
    def ceiling(self) -> int:
        """Maximum number of workers of any layout."""
        return min(self.max_workers, MAX_WORKERS)


class Topology(SpecModel):
    """A label of nodes. Nodes with the same value of the label form a group, such as a rack."""

    topology_key: Annotated[str, Field(min_length=1, max_length=317, pattern=_LABEL_KEY)] = Field(
        description="Key of the label."
    )
    required: bool = Field(
        default=False,
        description="True: a worker waits until a node of such a group is free. False: if none is free, it takes"
        " another node.",
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
    """Which of the job's pods are deleted when it ends: none, those that still run, or all.

    With None, workers of a failed job write a checkpoint and exit by themselves, and their pods are kept. Pods that
    have no node yet are deleted in any case."""

    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


class RunPolicy(SpecModel):
    """How the operator handles failures, delays and the end of the job."""

    backoff_limit: Annotated[int, Field(ge=0, le=10000)] = Field(
        default=3,
        description="Number of failures that the job survives: with one more it fails. Failures are lost workers, and"
        " generations in a row that make no step. The loss of a node does not count. After forgetFailuresAfterSteps a"
        " failure no longer counts.",
    )
    forget_failures_after_steps: Positive = Field(
        default=1000,
        description="Number of steps after which a failure no longer counts against backoffLimit.",
    )
    stall_timeout_seconds: Positive | None = Field(
        default=None,
        description="If no step is made for this time, the condition Stalled becomes True, and members that send no"
        " heartbeats are replaced. The time also begins when a generation is published. By default the longest of 30"
        " minutes, 20 times the median step time and 2 rounds.",
    )
    resize_timeout_seconds: Positive = Field(
        default=600,
        description="If not all new workers of a resize are ready within this time, those that are ready join if they"
        " make a larger layout possible. Otherwise the resize is cancelled and tried again later.",
    )
    start_timeout_seconds: Positive = Field(
        default=600,
        description="If not all workers of a start have a node within this time, the job releases all of them. It tries"
        " again after 1, 2, 4, at most 5 minutes, or when accelerators are released. If all workers have a node, they"
        " have six times as long to become ready. After each start that was too slow, this time doubles.",
    )
    claim_timeout_seconds: Positive = Field(
        default=120,
        description="Like resizeTimeoutSeconds, for a claim while some of its workers have no node. The shorter of the"
        " two counts.",
    )
    drain_timeout_seconds: Positive = Field(
        default=600,
        description="If a node is cordoned, evictions of its workers are held back until these workers are replaced, at"
        " most this long. Another cordon restarts this time, which ends at the latest after twice this long from the"
        " first cordon. Claimed workers are held back only while they may hold the only copies of a stage.",
    )
    stop_timeout_seconds: Positive = Field(
        default=300,
        description="Time for the last checkpoint. When a job is suspended, sent back to its queue or past its"
        " deadline, its workers write a checkpoint and exit. Workers that have not exited after this time are deleted."
        " It is also the grace period of pods that someone else deletes or evicts, unless the template sets one.",
    )
    active_deadline_seconds: Positive | None = Field(
        default=None,
        description="The job fails if it is not complete within this time. The time begins when the job starts. It"
        " begins again when the job is resumed, or when its queue admits it again.",
    )
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="The job is deleted this long after its end."
    )
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING


class Opaque(SpecModel):
    """A part of the pod template. It declares the fields that the operator reads, and keeps all others unchanged."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow", frozen=True)


Quantities = dict[Annotated[str, Field(max_length=317)], IntOrString]


class Resources(Opaque):
    """Like Kubernetes' ResourceRequirements."""

    limits: Quantities = Field(
        default_factory=dict,
        max_length=16,
        description="Limits. The trainer container must have a limit of 1 for acceleratorResource.",
    )
    requests: Quantities = Field(default_factory=dict, max_length=16, description="Requests; by default the limits.")


class Container(Opaque):
    """Like Kubernetes' Container. All its fields are kept."""

    name: Annotated[str, Field(min_length=1, max_length=63)] = Field(
        description="Name of the container. The container that trains is the one named `trainer`, otherwise the first.",
    )
    resources: Resources = Field(default_factory=Resources)


class PodSpec(Opaque):
    """Like Kubernetes' PodSpec. All its fields are kept. The API server checks them when the operator creates a pod."""

    containers: list[Container] = Field(
        min_length=1,
        max_length=16,
        description="The container that trains, and its sidecars.",
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
        """The container that trains: the one named `trainer`, otherwise the first."""
        containers = self.spec.containers
        return next((container for container in containers if container.name == TRAINER_CONTAINER), containers[0])


class JobSpec(TrainingSpec):
    elastic_policy: ElasticPolicy
    run_policy: RunPolicy = Field(default_factory=RunPolicy)
    placement: Placement = Field(default_factory=Placement)
    suspend: bool = Field(
        default=False,
        description="True: the job writes a checkpoint and releases all workers. Back to False: it resumes from the"
        " checkpoint.",
    )
    accelerator_resource: Annotated[str, Field(max_length=317)] = Field(
        default="nvidia.com/gpu",
        description="Extended resource of which each worker has one, its accelerator. Empty to train on CPUs.",
    )
    pod_template: PodTemplate = Field(
        description="Template of the workers' pods. The container that trains is the one named trainer, otherwise the"
        " first."
    )
    managed_by: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        default=None,
        description=f"Controller of this job. The operator ignores a job with a value other than {MANAGER}.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_depth(cls, value: object) -> object:
        """Refuses a deeply nested spec. The CRD's schema allows any depth in free-form fields, but not all readers
        do."""
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
        """The layout of a start with `elasticPolicy.workers` workers, whatever `maxWorkers` is."""
        return Layout(self.pipeline.stages, self.elastic_policy.workers // self.pipeline.stages)

    @property
    def max_pipelines(self) -> int:
        """The largest number of pipelines that the spec allows."""
        elastic = self.elastic_policy
        return elastic.max_pipelines or max(elastic.workers, elastic.max_workers)

    def starting_layout(self) -> Layout:
        """The layout of a start without a checkpoint.

        Raises:
            ValueError: the limits of `elasticPolicy` allow none.
        """
        elastic, stages = self.elastic_policy, self.pipeline.stages
        bounds = Bounds(
            initial=self.initial_layout,
            min_workers=elastic.min_workers,
            max_workers=elastic.ceiling,
            min_pipelines=elastic.min_pipelines,
            max_pipelines=self.max_pipelines,
            bytes_budget=0,
        )
        offers = [Offer(stages=stages, bytes_per_worker=0)]
        found = choose(offers, elastic.workers, bounds, on_pack=elastic.on_pack, packing=Packing.PAPER)
        if found is None:
            raise ValueError(
                f"no layout of {counted(stages, 'stage')} fits {counted(elastic.ceiling, 'worker')}, with minPipelines"
                f" {elastic.min_pipelines} and minWorkers {elastic.min_workers}"
            )
        return found


class Metadata(SpecModel):
    """The part of the object's metadata that the operator reads."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)
    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 1
    resource_version: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
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
    """Make the spec that a worker gets in `Env.JOB_SPEC`.

    Args:
        spec: the job's spec.
        num_shards: largest number of pipelines, as noted in the status when the job started; None if it starts now.
        workers: number of workers at the start, as noted in the status; None if the job starts now.

    All workers of a job must get the same values, although `elasticPolicy` may have changed since the start.
    """
    return TrainerSpec(
        **{name: getattr(spec, name) for name in TrainingSpec.model_fields},
        num_shards=num_shards or spec.max_pipelines,
        workers=workers or spec.elastic_policy.workers,
    )
