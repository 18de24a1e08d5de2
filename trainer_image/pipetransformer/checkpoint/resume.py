"""What a run takes over from the checkpoint that it resumes, before it loads its job: the order of the data."""

from pipetransformer.errors import SpecError, storing
from pipetransformer.job.checks import check_location
from pipetransformer.storage import CheckpointInfo, latest
from pipetransformer_contract.spec import TrainerSpec


def newest_checkpoint(spec: TrainerSpec) -> CheckpointInfo | None:
    """The checkpoint that a run of `spec` resumes; None if it starts from the beginning.

    Raises:
        SpecError: the location's URL cannot be opened here.
        StorageError: it cannot be read.
    """
    if spec.checkpoint is None:
        return None
    check_location("spec.checkpoint.location", spec.checkpoint.location)
    with storing(f"spec.checkpoint.location: {spec.checkpoint.location}"):
        return latest(spec.checkpoint.location)


def in_order_of_checkpoint(spec: TrainerSpec) -> tuple[TrainerSpec, int | None]:
    """`spec` with at most as many pipelines as the newest checkpoint has shards (C), and that C; None without a
    checkpoint. With another C, an epoch that has begun would lose some samples and repeat others.

    Raises:
        SpecError: the job starts with more pipelines than C (later the operator knows C from the first report), or the
            location is wrong.
        StorageError: the location cannot be read.
    """
    resumed = newest_checkpoint(spec)
    if resumed is None:
        return spec, None
    num_shards, stages = resumed.num_shards, spec.pipeline.stages
    if (pipelines := spec.workers // stages) > num_shards:
        raise SpecError(
            "spec.elasticPolicy.workers",
            f"{spec.workers} workers start as {pipelines} pipelines, but the data of the checkpoint {resumed.folder} "
            f"have {num_shards} shards: set workers to at most {num_shards * stages}, or name another "
            "spec.checkpoint.location",
        )
    return spec.model_copy(update={"num_shards": min(spec.num_shards, num_shards)}), num_shards
