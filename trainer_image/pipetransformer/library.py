"""The trainer as a library: one function that runs a script's model and data wherever the script is started.

- `python train.py`: in this process alone.
- `torchrun --nproc-per-node 4 train.py`: a fixed world; its leader chooses layouts.
- `torchrun --rdzv-backend pipetransformer train.py` in a worker's pod: the agents' processes start again, from the last
  checkpoint, whenever the operator changes the size.
- as the command of a `PipeTrainingJob`'s pod template: a worker of the operator, which regroups in process.

In the last two the manifest says all that it can say; the script brings only the parts that are `script` there.
"""

import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipetransformer_contract.spec import (
    SCRIPT,
    Cache,
    Checkpoint,
    Data,
    Evaluation,
    Freeze,
    FreezePolicyName,
    Model,
    Pipeline,
    ScheduleName,
    TrainerSpec,
    Training,
)
from pipetransformer_contract.wire import Env

from .callbacks import Callback
from .checks import check_rules
from .data import importing_main
from .errors import SpecError
from .fixed_run import run_fixed
from .freeze import FreezePolicy
from .metrics import Metric
from .parts import ModelFunction, OwnData, Parts
from .schedules import ScheduleClass
from .state import Control
from .trainer import Ending
from .worker import EXIT_STOPPED, WorkerIdentity, run_worker

#: Held while this process trains: random generators and the present micro-batch are the process's.
_training = threading.Lock()


@dataclass(frozen=True, slots=True)
class Result:
    """What a finished run leaves, known alike in every process.

    Attributes:
        steps: committed steps.
        frozen_layers: blocks that were frozen at the end.
        metrics: of the last evaluation, by name; empty where there was none.
        best: of the best evaluation.
        best_step: steps that were committed at the best evaluation.
        run_dir: the run's record, and the model in its folder `model`.
    """

    steps: int
    frozen_layers: int
    metrics: Mapping[str, float]
    best: Mapping[str, float]
    best_step: int
    run_dir: Path


def train(
    *,
    model: Model | ModelFunction,
    data: Data | OwnData,
    loader_processes: int = 0,
    training: Training,
    freeze: Freeze | FreezePolicy | None = None,
    pipeline: Pipeline | None = None,
    schedule: ScheduleClass | None = None,
    cache: Cache | None = None,
    evaluation: Evaluation | None = None,
    metrics: Sequence[Metric] = (),
    checkpoint: Checkpoint | None = None,
    callbacks: Sequence[Callback] = (),
    run_dir: str | Path = "run",
) -> Result:
    """Train to the end, on as many processes as there are.

    Args:
        model: a `Model` of ours, or a function without arguments that builds yours: a `PipelineModel`, or a list of
            modules (embedding, blocks, head). Every process calls it with `training.seed` set.
        data: `Data` of ours, a `Dataset`, or a pair (training, held out) of map-style datasets of (input, target).
        loader_processes: of each worker, that read samples ahead; as `Data` says it.
        training: how long, and how; in a pod the manifest's, as `freeze`, `pipeline`, `cache`, `evaluation` and
            `checkpoint` are.
        freeze: a `Freeze` of ours or a policy of yours; the paper's schedule by default.
        pipeline: stages and micro-batches. Fewer processes than stages make shorter pipelines.
        schedule: a pipeline schedule class of torch or of yours, with one stage a worker.
        cache: where to keep what frozen layers made of samples; by default in memory, where that was measured to pay.
        evaluation: when to score the held-out samples, and whether to keep the best model or stop early.
        metrics: functions of (output, target, weight) that give numerator and denominator, summed over all samples.
        checkpoint: where to save; a run that finds one there goes on from it.
        callbacks: told what happens, on the leader.
        run_dir: for the record and the model. In a pod the operator says where.

    Raises:
        SpecError: what was asked for cannot be trained, or this process trains already.
        ModelError: the model failed, or a metric.
        DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
        CallbackError: a callback failed.
        StorageError: a checkpoint or the model cannot be written.
        SystemExit: this process was told to stop, or it is a worker of the operator whose part has ended otherwise than
            with the finished model.
    """
    if importing_main():
        raise RuntimeError("processes that read samples import this program: train under `if __name__ == '__main__':`")
    _check_lists(metrics, callbacks)
    parts = Parts(
        model=None if isinstance(model, Model) else model,
        data=None if isinstance(data, Data) else data,
        freeze=None if freeze is None or isinstance(freeze, Freeze) else freeze,
        schedule=schedule,
        metrics=metrics,
        callbacks=callbacks,
    )
    spec = TrainerSpec(
        model=Model(name=SCRIPT) if parts.model is not None else model,
        data=_data(data, loader_processes),
        training=training,
        freeze=Freeze(policy=FreezePolicyName.SCRIPT) if parts.freeze is not None else freeze or Freeze(),
        pipeline=(pipeline or Pipeline()).model_copy(update={"schedule": ScheduleName.SCRIPT} if schedule else {}),
        cache=cache or Cache(),
        evaluation=evaluation or Evaluation(),
        checkpoint=checkpoint and checkpoint.model_copy(update={"location": _absolute(checkpoint.location)}),
    )
    if not _training.acquire(blocking=False):
        raise SpecError("train", "this process trains already: one run after another, or each in a process of its own")
    try:
        if Env.WORKER_NAME in os.environ:
            return _as_worker(replace(parts, said=spec))
        check_rules(spec)
        ending, control = run_fixed(spec, parts, Path(run_dir))
    finally:
        _training.release()
    if ending is Ending.STOPPED:
        raise SystemExit(EXIT_STOPPED)
    return _result(control, Path(run_dir))


def _check_lists(metrics: object, callbacks: object) -> None:
    """One thing in place of a list of them is taken for none, or fails in Python's words."""
    if not isinstance(metrics, Sequence) or not all(map(callable, metrics)):
        raise SpecError("metrics", f"must be a list of functions, not {metrics!r}")
    if not isinstance(callbacks, Sequence) or not all(isinstance(each, Callback) for each in callbacks):
        raise SpecError("callbacks", f"must be a list of Callback objects, not {callbacks!r}")


def _data(data: Data | OwnData, loader_processes: int) -> Data:
    said = data if isinstance(data, Data) else Data(name=SCRIPT)
    return said.model_copy(update={"loader_processes": loader_processes}) if loader_processes else said


def _absolute(location: str) -> str:
    return location if "://" in location else str(Path(location).absolute())


def _as_worker(parts: Parts) -> Result:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    identity = WorkerIdentity.from_environment()
    end = run_worker(identity, parts)
    if end.ending is Ending.FINISHED and end.trainer is not None:
        return _result(end.trainer.control, identity.run_dir)
    raise SystemExit(end.exit_code)


def _result(control: Control, run_dir: Path) -> Result:
    return Result(control.step, control.boundary, control.metrics, control.best, control.best_step, run_dir)
