"""Makes a worker's activation cache from the job's spec."""

import logging

from pipetransformer.cache.cache import ActivationCache

from .job import Job

logger = logging.getLogger(__name__)


def make_cache(job: Job) -> ActivationCache | None:
    """Make a worker's cache; None if the spec allows no cache, or if a sample's inputs change between two reads.

    In the second case a cache would replace the new inputs of later epochs by those of the first epoch.
    """
    if not job.may_cache:
        return None
    if job.inputs_change:
        warn_of_changes()
        return None
    computes = [job.spec.model.model_dump_json(), job.spec.data.model_dump_json(), job.spec.training.precision]
    return ActivationCache(job.spec.cache, job="\n".join(computes))


def warn_of_changes() -> None:
    """Log why there is no cache, although the spec allows one."""
    logger.warning(
        "no cache: inputs change between two reads. To use a cache, number their variants, as AugmentedSplit does"
    )
