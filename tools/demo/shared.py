"""`make demo-shared`: two jobs on four GPUs. The second waits, and starts on what the first releases as it freezes.

Workers are processes of this machine, one for each GPU of a cluster. Here this module counts the GPUs and starts the
second job, as Kubernetes' scheduler would. `make pictures` runs the same two jobs on real kubelets.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipetransformer_client.timeline import read_record, write_timeline
from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_contract.api.manifest import read_job
from pipetransformer_contract.api.status import ConditionType
from pipetransformer_operator.local.run import run_job
from tools import pictures

GPUS = 4
EXAMPLES = Path("examples/shared-cluster")
NAMES = ("first", "second")


class Cluster:
    """Counts the GPUs that jobs hold, and lets a job wait until enough are free.

    Args:
        gpus: number of GPUs of the cluster.

    Attributes:
        samples: time, and the GPUs that each job holds from then on.
    """

    def __init__(self, gpus: int = GPUS) -> None:
        self._gpus = gpus
        self._held: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self.samples: list[tuple[float, Counter[str]]] = []

    async def take(self, name: str, gpus: int) -> None:
        """Waits until so many GPUs are free, and gives them to the job."""
        while self._gpus - self._held.total() < gpus:
            self._changed.clear()
            await self._changed.wait()
        self.hold(name, gpus)

    def hold(self, name: str, gpus: int) -> None:
        """The job holds so many GPUs from now on."""
        if self._held[name] == gpus:
            return
        self._held[name] = gpus
        self.samples.append((time.monotonic(), Counter({job: held for job, held in self._held.items() if held})))
        self._changed.set()
        print(f"  {self._since():5.1f} s  " + ", ".join(f"{job} holds {held}" for job, held in self._held.items()))

    def _since(self) -> float:
        return self.samples[-1][0] - self.samples[0][0]


async def train(cluster: Cluster, file: Path, folder: Path) -> JobStatus:
    """Trains the job of a file as soon as its workers have GPUs, and draws its timeline. Returns its last status."""
    job, name = read_job(file, folder), file.stem
    await cluster.take(name, job.spec.elastic_policy.workers)

    def changed(job: PipeTrainingJob) -> None:
        if job.status.generation is not None and job.status.gpus.held:  # before, its workers start
            cluster.hold(name, job.status.gpus.held)

    try:
        return await run_job(job, folder, on_status=changed)
    finally:
        cluster.hold(name, 0)
        with contextlib.suppress(ValueError):  # it ended before its first generation, so there is nothing to draw
            write_timeline(read_record(folder), name, folder)


async def both(folder: Path) -> Cluster:
    """Trains the two jobs of examples/shared-cluster, the second behind the first.

    Raises:
        RuntimeError: one did not complete.
    """
    cluster = Cluster()
    jobs = [train(cluster, EXAMPLES / f"{name}.yaml", folder / name) for name in NAMES]  # they take GPUs in this order
    for name, status in zip(NAMES, await asyncio.gather(*jobs), strict=True):
        if not status.is_true(ConditionType.COMPLETE):
            raise RuntimeError(f"{name} did not complete; logs: {folder / name / 'logs'}")
    return cluster


def sentence(samples: Sequence[tuple[float, Mapping[str, int]]]) -> str:
    """When the second job started, and on what, from the GPUs by job over time."""
    began, ended = samples[0][0], samples[-1][0]
    started = next(time for time, held in samples if held.get("second"))
    first_ended = next(time for time, held in samples if time > began and not held.get("first"))
    when = "while the first trained" if started < first_ended else "only after the first had ended"
    return (
        f"the second job waited {started - began:.0f} s and started {when}; both ended after {ended - began:.0f} s,"
        f" and the first alone took {first_ended - began:.0f} s."
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.demo.shared", description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo-shared"), help="folder for both records")
    folder: Path = parser.parse_args().run_dir.absolute()
    for name in NAMES:
        (folder / name).mkdir(parents=True)
    print(f"{GPUS} GPUs, and the jobs that hold them:")
    try:
        samples = asyncio.run(both(folder)).samples
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    pictures.write(folder, "gpus", lambda width: pictures.gpus_by_job(samples, GPUS, width))
    print(f"picture: {folder / 'gpus.svg'}, records: {folder / 'first'}, {folder / 'second'}")
    print(sentence(samples))
    return 0


if __name__ == "__main__":
    sys.exit(main())
