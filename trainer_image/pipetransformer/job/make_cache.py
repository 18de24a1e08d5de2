"""The cache that a job asks for."""

import logging

from pipetransformer.cache.cache import ActivationCache
from pipetransformer_contract.spec import CachePolicy

from .job import Job

logger = logging.getLogger(__name__)


def make_cache(job: Job, worker: str) -> ActivationCache | None:
    """A worker's cache, or None where there is nothing to keep entries in or for.

    Data that are augmented at random, without saying how, are not cached: every epoch would see the first one's inputs.
    """
    settings = job.spec.cache
    if settings.policy is CachePolicy.NEVER or settings.memory_bytes + settings.disk_bytes == 0:
        return None
    if job.inputs_change:
        logger.warning("no cache: inputs change from one read to the next; name their variants as AugmentedSplit does")
        return None
    computes = [job.spec.model.model_dump_json(), job.spec.data.model_dump_json(), job.spec.training.precision]
    return ActivationCache(settings, job="\n".join(computes), worker=worker)
