"""Makes a worker's activation cache from the job's spec."""

import logging

from pipetransformer.cache.cache import ActivationCache
from pipetransformer_contract.spec import CachePolicy

from .job import Job

logger = logging.getLogger(__name__)


def make_cache(job: Job, worker: str) -> ActivationCache | None:
    """Make a worker's cache; None if the spec allows no cache, or if a sample's inputs change between two reads.

    In the second case a cache would replace the new inputs of later epochs by those of the first epoch.
    """
    settings = job.spec.cache
    if settings.policy is CachePolicy.NEVER or settings.memory_bytes + settings.disk_bytes == 0:
        return None
    if job.dataset.inputs_change:
        logger.warning(
            "no cache: inputs change between two reads. To use a cache, number their variants, as AugmentedSplit does"
        )
        return None
    computes = [job.spec.model.model_dump_json(), job.spec.data.model_dump_json(), job.spec.training.precision]
    return ActivationCache(settings, job="\n".join(computes), worker=worker)
