"""The trainer as a library: one function that runs a script's model and data wherever the script is started.

- `python train.py`: in this process alone.
- `torchrun --nproc-per-node 4 train.py`: a fixed world; its leader chooses layouts.
- `torchrun --rdzv-backend pipetransformer train.py` in a worker's pod: the agents' processes start again, from the last
  checkpoint, whenever the operator changes the size.
- as the command of a `PipeTrainingJob`'s pod template: a worker of the operator, which regroups in process.

In the last two the manifest says all that it can say; the script brings only the parts that are `script` there.
"""

import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pipetransformer.callbacks.callback import Callback
from pipetransformer.data import Processor, importing_main
from pipetransformer.errors import SpecError, meant
from pipetransformer.freeze import FreezePolicy
from pipetransformer.job.checks import check_rules
from pipetransformer.job.script_parts import ModelFunction, OwnData, Parts, shown
from pipetransformer.models.metrics import Metric
from pipetransformer.pipeline import ScheduleClass
from pipetransformer.state.control import Control
from pipetransformer.worker.process import EXIT_STOPPED, WorkerIdentity, refuse, run_worker
from pipetransformer.worker.trainer import Ending
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
from pipetransformer_contract.spec_model import SpecModel
from pipetransformer_contract.wire import Env

from .progress import ProgressLine
from .standalone import run_fixed

#: Held while this process trains: random generators and the present micro-batch are the process's.
_training = threading.Lock()
_Given = ParamSpec("_Given")


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


def _knowing_its_arguments(function: Callable[_Given, Result]) -> Callable[_Given, Result]:
    """The function, which says what a misspelt argument may have meant."""
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args: _Given.args, **kwargs: _Given.kwargs) -> Result:
        for name in kwargs:
            if name not in known:
                words = f"train takes no such argument{meant(name, known)}: it takes {', '.join(known)}"
                _refuse(SpecError(name, words))
        return function(*args, **kwargs)

    return checked


@_knowing_its_arguments
def train(
    *,
    model: Model | ModelFunction,
    data: Data | OwnData,
    processor: Processor | None = None,
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
    progress: bool = True,
) -> Result:
    """Train to the end, on as many processes as there are. A process runs one `train` at a time.

    What is of a type of the spec (`Training`, `Freeze`, ...) may be a dict of its fields as well.

    Args:
        model: a `Model` of ours, or a function without arguments that builds yours: a `PipelineModel`, or a list of
            modules (embedding, blocks, head). Every process calls it with `training.seed` set.
        data: `Data` of ours, a `Dataset`, or a pair (training, held out) of map-style datasets of (input, target) or of
            tables of the `datasets` library.
        processor: the tokenizer or image processor that made the inputs of `data`. It is saved with the model.
        loader_processes: of each worker, that read samples ahead; as `Data` says it.
        training: how long, and how; in a pod the manifest's, as `freeze`, `pipeline`, `cache`, `evaluation` and
            `checkpoint` are.
        freeze: a `Freeze` of ours or a policy of yours; by default nothing freezes.
        pipeline: stages and micro-batches. Fewer processes than stages make shorter pipelines.
        schedule: a pipeline schedule class of torch or of yours, with one stage a worker.
        cache: where to keep what frozen layers made of samples; by default in memory, where that was measured to pay.
        evaluation: when to score the held-out samples, and whether to keep the best model or stop early.
        metrics: functions of (output, target, weight) that give numerator and denominator, summed over all samples.
        checkpoint: where to save; a run that finds one there goes on from it.
        callbacks: told what happens, on the leader.
        run_dir: for the record and the model. In a pod the operator says where.
        progress: shows step, time left, loss, held-out metric and layout on standard error: a line that is redrawn on
            a terminal, one line a minute elsewhere.

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
    try:
        parts = Parts(
            model=_own(model),
            data=_own(data),
            freeze=_own(freeze),
            schedule=schedule,
            metrics=metrics,
            callbacks=callbacks,
            processor=processor,
        )
        said = {
            "model": model if parts.model is None else Model(name=SCRIPT),
            "data": data if parts.data is None else Data(name=SCRIPT),
            "training": training,
            "freeze": freeze if parts.freeze is None else Freeze(policy=FreezePolicyName.SCRIPT),
            "pipeline": pipeline,
            "cache": cache,
            "evaluation": evaluation,
            "checkpoint": checkpoint,
        }
        spec = _spec(parts, said, loader_processes)
        if not isinstance(run_dir, str | os.PathLike):
            raise SpecError("run_dir", f"must be a path, not {shown(run_dir)}")
        if not isinstance(progress, bool):
            raise SpecError("progress", f"must be True or False, not {shown(progress)}")
    except SpecError as error:
        _refuse(error)
    if not _training.acquire(blocking=False):
        raise SpecError("train", "this process trains already: one run after another, or each in a process of its own")
    line = ProgressLine()
    if progress:
        parts = replace(parts, callbacks=(*parts.callbacks, line))
    try:
        if Env.WORKER_NAME in os.environ:
            return _as_worker(replace(parts, said=spec))
        check_rules(spec)
        ending, control = run_fixed(spec, parts, Path(run_dir))
    finally:
        line.close()
        _training.release()
    if ending is Ending.STOPPED:
        raise SystemExit(EXIT_STOPPED)
    return _result(control, Path(run_dir))


def _refuse(error: SpecError) -> NoReturn:
    if Env.WORKER_NAME in os.environ:  # otherwise its operator would start it again
        raise SystemExit(refuse(WorkerIdentity.from_environment(), error).exit_code) from error
    raise error


def _own(part: Any) -> Any:
    """A part that is the program's own; None where it is of the spec's types, or a dict of their fields."""
    return None if isinstance(part, SpecModel) or type(part) is dict else part


def _spec(parts: Parts, said: Mapping[str, Any], loader_processes: int) -> TrainerSpec:
    """What the program says of the job, once the spec's own types have taken it.

    Raises:
        SpecError: naming the first argument that they do not take.
    """
    fields = TrainerSpec.model_fields
    try:
        spec = TrainerSpec(**{k: part for k, part in said.items() if part is not None or fields[k].is_required()})
        changes: dict[str, SpecModel] = {}
        if loader_processes != 0:
            number = Data(name=SCRIPT, loader_processes=loader_processes).loader_processes
            changes["data"] = spec.data.model_copy(update={"loader_processes": number})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise SpecError(field, f"there is no such field{meant(*_near(fields, first['loc']))}") from error
        raise SpecError(field, f"{first['msg']}; given was {shown(first['input'])}") from error
    if parts.schedule is not None:
        changes["pipeline"] = spec.pipeline.model_copy(update={"schedule": ScheduleName.SCRIPT})
    if spec.checkpoint is not None:
        location = _absolute(spec.checkpoint.location)
        changes["checkpoint"] = spec.checkpoint.model_copy(update={"location": location})
    return spec.model_copy(update=changes)


def _near(fields: Mapping[str, FieldInfo], path: Sequence[int | str]) -> tuple[str, list[str]]:
    """The last name of a path, and what it could have been."""
    for part in path[:-1]:
        model = fields[str(part)].annotation
        kinds = [kind for kind in (model, *get_args(model)) if isinstance(kind, type) and issubclass(kind, SpecModel)]
        fields = kinds[0].model_fields if kinds else {}
    return str(path[-1]), [name for own, field in fields.items() for name in {own, field.alias or own}]


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
