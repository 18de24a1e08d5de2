"""Finds the checkpoint that a run resumes, and makes the run deal its data to as many shards as the checkpoint's run.

This happens before the job is loaded, because the number of shards decides the order of the samples.
"""

from pipetransformer.errors import SpecError, storing
from pipetransformer.job.checks import check_location
from pipetransformer.storage import CheckpointInfo, latest
from pipetransformer_contract.spec import TrainerSpec


def newest_checkpoint(spec: TrainerSpec) -> CheckpointInfo | None:
    """Read the marker of the checkpoint that a run of `spec` resumes; None if the run starts from the beginning.

    Raises:
        SpecError: the location's URL cannot be opened on this machine.
        StorageError: the location cannot be read.
    """
    if spec.checkpoint is None:
        return None
    check_location("spec.checkpoint.location", spec.checkpoint.location)
    with storing(f"spec.checkpoint.location: {spec.checkpoint.location}"):
        return latest(spec.checkpoint.location)


def in_order_of_checkpoint(spec: TrainerSpec) -> tuple[TrainerSpec, int | None]:
    """Limit `spec` to as many pipelines as the newest checkpoint has shards (C).

    With another C, an epoch that has begun would lose some samples and repeat others.

    Returns:
        The spec, and C; without a checkpoint the spec as it is, and None.

    Raises:
        SpecError: the spec starts with more pipelines than C, or the location's URL cannot be opened on this machine.
            Later layouts stay below C, because the leader reports C to the operator.
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
            f"allow at most {num_shards}: set workers to at most {num_shards * stages}, or name another "
            "spec.checkpoint.location",
        )
    return spec.model_copy(update={"num_shards": min(spec.num_shards, num_shards)}), num_shards
