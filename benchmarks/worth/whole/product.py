"""Runs a way through the product: controller, channel, rendezvous and one process for each worker."""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.status import ConditionType
from pipetransformer_operator.local.run import run_job
from pipetransformer_operator.plan import layouts
from pipetransformer_operator.plan.view import View

from .case import Case
from .took import Took, read_took
from .way import Shape, Way


def run(case: Case, way: Way) -> Took:
    """Train the job once.

    Raises:
        RuntimeError: the job failed.
    """
    with tempfile.TemporaryDirectory(prefix="bench-worth-") as folder:
        run_dir = Path(folder) / "run"
        run_dir.mkdir()
        seen: list[tuple[float, int]] = []
        job, load = case.job(way, run_dir), OtherLoad()
        with _without_recuts() if way.shape is Shape.AS_CUT else contextlib.nullcontext():
            asyncio.run(_train(job, run_dir, seen))
        return replace(read_took(run_dir, seen), other_cores=load.cores())


class OtherLoad:
    """Counts the processors that programs use which are neither this process nor its children."""

    def __init__(self) -> None:
        self._begun, self._before = time.monotonic(), _other_seconds()

    def cores(self) -> float:
        """Mean since this was made. All children must have ended."""
        return max(0.0, _other_seconds() - self._before) / (time.monotonic() - self._begun)


def busy_seconds(stat: str) -> float:
    """Seconds that all processors worked since the machine started, from the text of `/proc/stat`."""
    user, nice, system, _, _, *interrupts = stat.splitlines()[0].split()[1:8]
    return sum(map(int, (user, nice, system, *interrupts))) / os.sysconf("SC_CLK_TCK")


def _other_seconds() -> float:
    """Processor seconds of all programs except this process and its children."""
    return busy_seconds(Path("/proc/stat").read_text()) - sum(os.times()[:4])


async def _train(job: PipeTrainingJob, run_dir: Path, seen: list[tuple[float, int]]) -> None:
    status = await run_job(job, run_dir, on_status=lambda now: seen.append((time.time(), now.status.gpus.held)))
    if not status.is_true(ConditionType.COMPLETE):
        raise RuntimeError(f"{job.metadata.name} did not complete: {status.condition(ConditionType.FAILED)}")


@contextlib.contextmanager
def _without_recuts() -> Iterator[None]:
    """No stages are cut again once layers have frozen. The product always looks whether that pays."""
    pays = layouts.pays_to_recut

    def before_any_freeze(view: View) -> bool:
        report = view.status.last_report
        return report is not None and report.boundary == 0 and pays(view)

    with mock.patch.object(layouts, "pays_to_recut", before_any_freeze):
        yield
