"""`train` trains a script's model on its data. The way the script is started decides which processes take part:

- `python train.py`: this process alone.
- `torchrun --nproc-per-node 4 train.py`: a fixed number of processes. Rank 0 chooses layouts.
- `torchrun --rdzv-backend pipetransformer train.py` in a worker's pod: when the operator changes the layout, torchrun
  starts the processes again, and they resume from the last checkpoint.
- as the command in a `PipeTrainingJob`'s pod template: a worker. It regroups without a restart.

In the last two cases the manifest decides, and the script passes only the parts that the manifest names `script`.
"""

import inspect
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from pipetransformer.job.checks import check_parts
from pipetransformer.job.script_parts import Parts, ScriptData, shown
from pipetransformer.models import ModelFunction
from pipetransformer.models.metrics import Metric
from pipetransformer.schedules import Schedule
from pipetransformer.state.control import Control
from pipetransformer.storage import importing_for_model
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
from .standalone import run_standalone

#: The protocol of a URL that lacks a slash.
_ONE_SLASH = re.compile(r"([a-z][a-z0-9+.-]+:)/")

#: Held while this process trains, because random generators and the current micro-batch belong to the process.
_training = threading.Lock()
_Given = ParamSpec("_Given")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a finished run. All processes get the same.

    Attributes:
        steps: committed steps.
        frozen_layers: layers that were frozen at the end.
        metrics: metrics of the last evaluation, by name; empty if there was none.
        best: metrics of the best evaluation, by name.
        best_step: committed steps at the best evaluation.
        run_dir: folder of the run's record. The model is in its folder `model`.
    """

    steps: int
    frozen_layers: int
    metrics: Mapping[str, float]
    best: Mapping[str, float]
    best_step: int
    run_dir: Path


def _knowing_its_arguments(function: Callable[_Given, Result]) -> Callable[_Given, Result]:
    """Make `function` refuse unknown arguments by a `SpecError` that suggests a known one."""
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args: _Given.args, **kwargs: _Given.kwargs) -> Result:
        for name in kwargs:
            if name not in known:
                words = f"Unknown argument of train{meant(name, known)}. Known: {', '.join(known)}"
                _refuse(SpecError(name, words))
        return function(*args, **kwargs)

    return checked


@_knowing_its_arguments
def train(
    *,
    model: Model | ModelFunction,
    data: Data | ScriptData,
    processor: Processor | None = None,
    loader_processes: int = 0,
    training: Training,
    freeze: Freeze | FreezePolicy | None = None,
    pipeline: Pipeline | None = None,
    schedule: Schedule | type | None = None,
    cache: Cache | None = None,
    evaluation: Evaluation | None = None,
    metrics: Sequence[Metric] = (),
    checkpoint: Checkpoint | None = None,
    callbacks: Sequence[Callback] = (),
    run_dir: str | Path = "run",
    progress: bool = True,
) -> Result:
    """Train a model to the end, on all processes of the run. A process can run only one `train` at a time.

    For an argument of a spec's type, such as `Training` or `Freeze`, you can also pass a dict of its fields.

    Args:
        model: a `Model`, or a function without arguments that returns a `PipelineModel` or a list of modules
            (embedding, layers, head). Every process calls it with `training.seed` set.
        data: `Data`, a `Dataset`, or a pair (training, held out) of map-style datasets of (input, target) or of tables
            of the `datasets` library.
        processor: the tokenizer or image processor that made the inputs of `data`. It is saved with the model.
        loader_processes: number of processes of each worker that read samples ahead, as in `Data`.
        training: how long and how to train. In a pod the manifest overrules it, and also `freeze`, `pipeline`, `cache`,
            `evaluation` and `checkpoint`.
        freeze: a `Freeze` or your own policy; by default nothing freezes.
        pipeline: stages and micro-batches. Fewer processes than stages make shorter pipelines.
        schedule: your own `Schedule`, or a schedule class of torch that has a `pipeline_order`.
        cache: where to keep the outputs of frozen layers; by default in memory, if measurements show a gain.
        evaluation: when to evaluate the held-out samples, and whether to keep the best model or stop early.
        metrics: functions of (output, target, weight) that return a numerator and a denominator, each a scalar. The
            metric is the sum of all numerators, divided by the sum of all denominators. The arguments have the shapes
            of those of `PipelineModel.loss`: (micro-batch, ..., classes), (micro-batch, ...) and (micro-batch,). The
            weight is 0 for a sample that only pads the micro-batch, and 1 otherwise.
        checkpoint: where to write checkpoints. A run resumes the newest checkpoint that is there.
        callbacks: objects that the leader tells about steps, evaluations and layouts.
        run_dir: folder for the record and the model. In a pod the operator chooses it.
        progress: whether to show step, time left, loss, held-out metric and layout on standard error: one line that is
            redrawn on a terminal, otherwise one line a minute.

    Raises:
        SpecError: the job cannot be trained as specified, or this process already trains.
        ModelError: the model or a metric failed.
        DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
        CallbackError: a callback failed.
        StorageError: a checkpoint or the model cannot be written.
        SystemExit: this process was told to stop, or it is a worker of the operator and did not finish the model.
    """
    _refuse_imports()
    with _refusing():
        parts = Parts(_own(model), _own(data), _own(freeze), schedule, metrics, callbacks, processor)
        said = {
            "model": model,
            "data": data,
            "training": training,
            "freeze": freeze,
            "pipeline": pipeline,
            "cache": cache,
            "evaluation": evaluation,
            "checkpoint": checkpoint,
        }
        spec = _spec(parts, said, loader_processes)
        _check_kinds(run_dir, progress)
    return _train(spec, parts, Path(run_dir), progress=progress)


def _train(spec: TrainerSpec, parts: Parts, run_dir: Path, *, progress: bool) -> Result:
    """Do the work of `train`, with arguments that were checked."""
    if not _training.acquire(blocking=False):
        raise SpecError("train", "this process already trains: run one after the other, or each in its own process")
    line = ProgressLine()
    if progress:
        parts = replace(parts, callbacks=(*parts.callbacks, line))
    try:
        if Env.WORKER_NAME in os.environ:
            return _as_worker(replace(parts, said=spec))
        check_parts(spec)
        ending, control = run_standalone(spec, parts, run_dir)
    finally:
        line.close()
        _training.release()
    if ending is Ending.STOPPED:
        raise SystemExit(EXIT_STOPPED)
    return _result(control, run_dir)


def _refuse_imports() -> None:
    """Refuse to train while something only imports the program.

    Raises:
        RuntimeError: says what imports it.
    """
    for importing, who in (
        (importing_main(), "loader processes import"),
        (importing_for_model(), "load_model imports"),
    ):
        if importing:
            raise RuntimeError(f"{who} this program: call train under `if __name__ == '__main__':`")


@contextmanager
def _refusing() -> Iterator[None]:
    """A context that lets a `SpecError` pass. In a worker of the operator it reports the error and exits."""
    try:
        yield
    except SpecError as error:
        _refuse(error)


def _check_kinds(run_dir: object, progress: object) -> None:
    """Check the types of `run_dir` and `progress`.

    Raises:
        SpecError: an argument has the wrong type.
    """
    if not isinstance(run_dir, str | os.PathLike):
        raise SpecError("run_dir", f"must be a path, not {shown(run_dir)}")
    if not isinstance(progress, bool):
        raise SpecError("progress", f"must be True or False, not {shown(progress)}")


def _refuse(error: SpecError) -> NoReturn:
    if Env.WORKER_NAME in os.environ:  # after any other exit the operator would start the worker again
        raise SystemExit(refuse(WorkerIdentity.from_environment(), error, error.reason).exit_code) from error
    raise error


def _own(part: Any) -> Any:
    """`part` if it is an object of the program; None if it is a type of the spec, or a dict of its fields."""
    return None if isinstance(part, SpecModel) or type(part) is dict else part


def _spec(parts: Parts, said: Mapping[str, Any], loader_processes: int) -> TrainerSpec:
    """Make the spec from the arguments of `train`.

    Args:
        parts: the objects that a spec cannot hold. Their sections are named `script`.
        said: all arguments, by section of the spec.
        loader_processes: the argument of this name.

    Raises:
        SpecError: names the first argument that is invalid.
    """
    fields = TrainerSpec.model_fields
    own = {
        "model": None if parts.model is None else Model(name=SCRIPT),
        "data": None if parts.data is None else Data(name=SCRIPT),
        "freeze": None if parts.freeze is None else Freeze(policy=FreezePolicyName.SCRIPT),
    }
    said = {name: own.get(name) or part for name, part in said.items()}
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
        raise SpecError(field, f"{first['msg']}; got {shown(first['input'])}") from error
    if parts.schedule is not None:
        changes["pipeline"] = spec.pipeline.model_copy(update={"schedule": ScheduleName.SCRIPT})
    if spec.checkpoint is not None:
        location = _absolute(spec.checkpoint.location)
        changes["checkpoint"] = spec.checkpoint.model_copy(update={"location": location})
    return spec.model_copy(update=changes)


def _near(fields: Mapping[str, FieldInfo], path: Sequence[int | str]) -> tuple[str, list[str]]:
    """The last name of `path`, a path of fields and places in lists, and the names of all fields beside it."""
    *above, last = [part for part in path if isinstance(part, str)]
    for part in above:
        model = next(field.annotation for name, field in fields.items() if part in (name, field.alias))
        kinds = [kind for kind in (model, *get_args(model)) if isinstance(kind, type) and issubclass(kind, SpecModel)]
        fields = kinds[0].model_fields if kinds else {}
    return last, [name for own, field in fields.items() for name in {own, field.alias or own}]


def _absolute(location: str) -> str:
    """The location of checkpoints for all workers: a URL, or an absolute path.

    Raises:
        SpecError: the location is a URL with one slash in place of two.
    """
    if "://" in location:
        return location
    if match := _ONE_SLASH.match(location):
        raise SpecError("checkpoint.location", f"{location!r} has one slash after {match[1]!r}: write {match[1]}//...")
    return str(Path(location).expanduser().absolute())


def _as_worker(parts: Parts) -> Result:
    identity = WorkerIdentity.from_environment()
    end = run_worker(identity, parts)
    if end.ending is Ending.FINISHED and end.trainer is not None:
        return _result(end.trainer.control, identity.run_dir)
    raise SystemExit(end.exit_code)


def _result(control: Control, run_dir: Path) -> Result:
    return Result(control.step, control.boundary, control.metrics, control.best, control.best_step, run_dir)
