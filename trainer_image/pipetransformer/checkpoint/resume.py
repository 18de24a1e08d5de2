"""What a run takes over from the checkpoint that it goes on from before it loads its job: the order of the data."""

from pipetransformer.errors import SpecError, storing
from pipetransformer.job.checks import check_location
from pipetransformer.storage import CheckpointInfo, latest
from pipetransformer_contract.spec import TrainerSpec


def newest_checkpoint(spec: TrainerSpec) -> CheckpointInfo | None:
    """The checkpoint that a run of `spec` goes on from; None where it begins.

    Raises:
        SpecError: nothing here can open the location.
        StorageError: it cannot be read.
    """
    if spec.checkpoint is None:
        return None
    check_location("spec.checkpoint.location", spec.checkpoint.location)
    with storing(f"spec.checkpoint.location: {spec.checkpoint.location}"):
        return latest(spec.checkpoint.location)


def in_order_of_checkpoint(spec: TrainerSpec) -> tuple[TrainerSpec, int | None]:
    """`spec` with no more pipelines than the newest checkpoint's data have shards (C), and that C; None where a run
    begins. In another order, samples of an epoch that has begun would be lost and others repeated.

    Raises:
        SpecError: the job starts with more pipelines than C; or the location is wrong. The operator hears of C by the
            first report, and makes no more later.
        StorageError: the location cannot be read.
    """
    resumed = newest_checkpoint(spec)
    if resumed is None:
        return spec, None
    num_shards, stages = resumed.num_shards, spec.pipeline.stages
    if (pipelines := spec.workers // stages) > num_shards:
        raise SpecError(
            "spec.elasticPolicy.workers",
            f"{spec.workers} start as {pipelines} pipelines, but the data of the checkpoint {resumed.folder} are in "
            f"order of {num_shards}: set it to at most {num_shards * stages}, or name another spec.checkpoint.location",
        )
    return spec.model_copy(update={"num_shards": min(spec.num_shards, num_shards)}), num_shards
