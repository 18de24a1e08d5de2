"""Makes a job from a spec: reads the data, makes the model without weights, and refuses what cannot be trained."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from pipetransformer.data import (
    Dataset,
    EpochOrder,
    check_data_spec,
    default_micro_batch_size,
    load_dataset,
    makes_bytes,
    read_batch,
    script_dataset,
    task_before_reading,
)
from pipetransformer.errors import SpecError, building
from pipetransformer.freeze import always_frozen, limits_of, make_policy
from pipetransformer.models import (
    PipelineModel,
    ScriptModel,
    build_model,
    build_units,
    check_model_spec,
    fix_constants,
    name_of,
)
from pipetransformer.models.metrics import LOSS, make_metrics
from pipetransformer.schedules import TeraPipe, make_schedule
from pipetransformer.state.optimizer import names_without_decay
from pipetransformer_contract.spec import Freeze, Goal, Precision, TrainerSpec

from .checks import (
    ANOTHER_LOCATION,
    check_asynchronous,
    check_held_out,
    check_model,
    check_slices,
    check_spec,
    check_targets,
)
from .job import Job
from .levels import with_levels
from .script_parts import Parts, place_of_function

#: With this many shards, the shares of a few pipelines differ by some thousandths at most. More shards would make the
#: first step of an epoch slow, because each shard is shuffled by its own generator.
_ENOUGH_SHARDS = 1024


def load_job(spec: TrainerSpec, parts: Parts | None = None, *, num_shards: int | None = None) -> Job:
    """Check the spec, read the data and make the model without weights.

    Args:
        spec: the trainer's spec.
        parts: the objects that a program passes for the names `script` in the spec.
        num_shards: number of shards (C) in the checkpoint to resume; None without one. Then there is one shard for each
            sample of a global batch, at most 1,024 or the largest number of pipelines, whichever is more.

    Raises:
        SpecError: the job cannot be trained as specified.
    """
    parts = parts or Parts()
    parts.check(spec)
    training = spec.training
    # Read the data and make the model.
    dtype = torch.float64 if training.precision is Precision.FLOAT64 else torch.float32
    dataset = _dataset(spec, parts, dtype)
    order = _order(spec, len(dataset.train), num_shards)
    model, build = _model(spec, parts, dataset, dtype)
    if "num_layers" not in spec.model.model_fields_set and parts.model is not None:
        spec = spec.model_copy(update={"model": spec.model.model_copy(update={"num_layers": model.num_layers})})
    # Check that spec, data and model fit.
    check_spec(spec)
    check_held_out(spec.evaluation, len(dataset.test))
    check_targets(spec.pipeline, dataset)
    build = _with_same_weights(model, build)
    model, build = _without_constants(spec.freeze, model, build)
    check_model(model)
    # Make the schedule and the metrics.
    stages = spec.pipeline.stages
    inputs, targets = read_batch(dataset.train, [0], None)
    schedule = make_schedule(spec.pipeline.schedule, parts.schedule, spans_per_worker=spec.pipeline.spans_per_worker)
    if isinstance(schedule, TeraPipe):
        check_slices(spec.pipeline, model, name_of(spec.model), dataset.info, targets)
    check_asynchronous(spec.pipeline, model)
    metrics = make_metrics(spec.evaluation, model, targets, parts.metrics)
    if spec.evaluation.best_metric not in metrics:  # the default, accuracy, does not suit every task
        evaluation = spec.evaluation.model_copy(update={"best_metric": LOSS, "goal": Goal.LOWEST})
        spec = spec.model_copy(update={"evaluation": evaluation})
    # Put the job together.
    job = Job(
        spec=spec,
        dtype=dtype,
        dataset=dataset,
        order=order,
        policy=make_policy(spec.freeze, steps_per_epoch=order.steps_per_epoch, script_policy=parts.freeze),
        freeze_limits=limits_of(spec.freeze, model),
        schedule=schedule,
        model=model,
        callbacks=parts.callbacks,
        metrics=metrics,
        build_units=build,
        micro_batch_size=spec.pipeline.micro_batch_size
        or default_micro_batch_size(order.global_batch, stages, max(1, spec.workers // stages)),
        total_steps=training.steps or (training.epochs or 1) * order.steps_per_epoch,
        unit_bytes=[sum(tensor.nbytes for tensor in (*unit.parameters(), *unit.buffers())) for unit in model.units],
        no_decay=names_without_decay(training.optimizer.no_decay, model),
        overruled=parts.overruled(spec),
        model_function=place_of_function(parts.model),
        input_dtype=inputs.dtype,
    )
    return with_levels(job)


def _order(spec: TrainerSpec, count: int, num_shards: int | None) -> EpochOrder:
    """Make the order of `count` training samples. `num_shards` is that of `load_job`.

    Raises:
        SpecError: there are fewer samples than pipelines or shards.
    """
    if count < spec.num_shards:
        raise SpecError("spec.data", f"{count} training samples are too few for {spec.num_shards} pipelines")
    if num_shards is not None and count < num_shards:
        raise SpecError(
            "spec.checkpoint.location",
            f"{spec.checkpoint and spec.checkpoint.location} holds a checkpoint of a run with more data: they were "
            f"ordered in {num_shards} shards, and now there are {count} training samples: {ANOTHER_LOCATION},"
            " or use the same data",
        )
    return EpochOrder(
        seed=spec.training.seed,
        num_samples=count,
        global_batch=spec.training.global_batch_size,
        num_shards=num_shards or min(spec.training.global_batch_size, count, max(spec.num_shards, _ENOUGH_SHARDS)),
    )


def _dataset(spec: TrainerSpec, parts: Parts, dtype: torch.dtype) -> Dataset:
    """Read the samples. First check names and options, because reading may take long.

    Raises:
        SpecError: the model or the data options are wrong, or the data cannot be read.
    """
    from_script = parts.data is not None
    if not from_script:
        check_data_spec(spec.data)
    learns = None
    if parts.model is None:
        task, of_bytes = (None, False) if from_script else (task_before_reading(spec.data), makes_bytes(spec.data))
        learns = check_model_spec(spec.model, task=task, of_bytes=of_bytes)
    if from_script:
        return script_dataset(parts.data, dtype=dtype, processor=parts.processor, task=learns)
    dataset = load_dataset(spec.data, dtype=dtype)
    return dataset if parts.processor is None else replace(dataset, processor=parts.processor)


def _model(
    spec: TrainerSpec, parts: Parts, dataset: Dataset, dtype: torch.dtype
) -> tuple[PipelineModel, Callable[[Collection[int]], dict[int, nn.Module]]]:
    """Make the model without weights, and a function that builds the units with the given indices."""
    seed = spec.training.seed
    if parts.model is None:
        if spec.model.name == "vit" and dataset.info.num_classes < 1:
            raise SpecError("data", "has an unknown number of classes: pass a Dataset with a DataInfo")
        build = partial(build_units, spec.model, dataset.info, seed=seed, dtype=dtype)
        return build_model(spec.model, dataset.info, seed=seed, dtype=dtype, units=()), build
    made = ScriptModel(parts.model, read_batch(dataset.train, [0], None)[0], seed=seed, dtype=dtype)
    model = made.shell()
    if "num_layers" in spec.model.model_fields_set and model.num_layers != spec.model.num_layers:
        raise SpecError(
            "spec.model.numLayers", f"is {spec.model.num_layers}, but the program's model has {model.num_layers} layers"
        )
    return model, made.build_units


def _with_same_weights(
    model: PipelineModel, build: Callable[[Collection[int]], dict[int, nn.Module]]
) -> Callable[[Collection[int]], dict[int, nn.Module]]:
    """Make `build` refuse a function that returns other weights each time. Nothing compares the weights of workers."""

    def build_and_compare(indices: Collection[int]) -> dict[int, nn.Module]:
        units = build(indices)
        with building("spec.model", "cannot be built twice"):
            model.check_built(units)
        return units

    return build_and_compare


def _without_constants(
    spec: Freeze, model: PipelineModel, build: Callable[[Collection[int]], dict[int, nn.Module]]
) -> tuple[PipelineModel, Callable[[Collection[int]], dict[int, nn.Module]]]:
    """Turn the parameters that `freeze.always` names into constants, in the model and in units that are built later.

    Raises:
        SpecError: a pattern of `freeze.always` does not fit the model.
    """
    names = always_frozen(spec, model)
    if not names:
        return model, build

    def build_with_constants(indices: Collection[int]) -> dict[int, nn.Module]:
        units = build(indices)
        fix_constants(units, names)
        return units

    return model.with_constants(names), build_with_constants
