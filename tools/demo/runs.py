"""Trains one run of the demo with the operator's own controller, and tests the model that it leaves."""

import asyncio
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from pipetransformer_client.timeline import read_record, write_timeline
from pipetransformer_contract.api.manifest import local_job
from pipetransformer_contract.api.status import ConditionType
from pipetransformer_operator.local.run import run_job
from tools.machine import machine

from .measured import Measured

#: Images that are tested at once.
_BATCH = 256


class RunFailed(Exception):
    """A run did not complete. The message says why, and where its logs are."""


def variant(manifest: Mapping[str, Any], *, freezing: bool, seed: int | None) -> dict[str, Any]:
    """The job that a run trains. The two runs differ in `freeze` alone.

    Args:
        manifest: from `local_manifest`.
        freezing: whether layers freeze as the manifest says; otherwise none does.
        seed: instead of the manifest's, if it is not None.
    """
    job = deepcopy(dict(manifest))
    if not freezing:
        job["spec"]["freeze"] = {"policy": "None"}
    if seed is not None:
        job["spec"]["training"]["seed"] = seed
    return job


def train(manifest: Mapping[str, Any], folder: Path, changed: Callable[[], None]) -> Measured:
    """Trains the job to its end in `folder`, draws its timeline, and tests its model.

    Args:
        manifest: from `variant`.
        folder: for the run's record. It is made.
        changed: called after each change of the job's status, and after each report.

    Raises:
        RunFailed: the job did not complete.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True)
    status = asyncio.run(run_job(local_job(manifest, folder), folder, on_status=lambda job: changed()))
    if not status.is_true(ConditionType.COMPLETE):
        failed = status.condition(ConditionType.FAILED)
        why = "it was stopped" if failed is None else failed.message
        raise RunFailed(f"{folder.name} did not complete: {why}; logs: {folder / 'logs'}")
    record = read_record(folder)
    write_timeline(record, folder.name, folder)
    wrong, tested = wrong_images(folder / "model")
    return Measured(record, wrong, tested, machine())


def wrong_images(model: Path) -> tuple[tuple[int, ...], int]:
    """Numbers of the held-out images whose class a finished model does not find, and the number of all."""
    import torch
    from transformers.utils import logging

    from pipetransformer import storage
    from pipetransformer.data import load_dataset
    from pipetransformer.models import MicroBatchContext, run_unit

    logging.disable_progress_bar()
    config = storage.load_config(str(model))
    network, images = storage.load_model(str(model)), load_dataset(config.data, dtype=config.torch_dtype).test
    wrong: list[int] = []
    with torch.no_grad():
        for start in range(0, len(images), _BATCH):
            numbers = range(start, min(start + _BATCH, len(images)))
            outputs, classes = images.batch(numbers)
            for unit in network.units:
                outputs = run_unit(unit, outputs, MicroBatchContext(0, numbers))
            wrong += [start + int(place) for place in (outputs.argmax(dim=-1) != classes).nonzero()]
    return tuple(wrong), len(images)
