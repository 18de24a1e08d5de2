"""Makes the jobs of the smaller levels of `multiLevel`, and refuses a spec whose levels cannot be made."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from pipetransformer.errors import SpecError
from pipetransformer.models import PipelineModel, build_model, name_of, narrowed, widths_of
from pipetransformer.multilevel import EarlierWeights, Groups, Heads, LevelMap, Levels, family_of
from pipetransformer.state.control import Control
from pipetransformer_contract.spec import FreezePolicyName, MultiLevel

from .job import Job


def with_levels(job: Job) -> Job:
    """Add the jobs of the smaller levels to a job. Without `multiLevel`, return the job unchanged.

    Raises:
        SpecError: the levels contradict the model, the number of stages or the freeze policy.
    """
    spec = job.spec.multi_level
    if spec is None:
        return job
    _check_layers(job, spec)
    _check_freezing(job, spec)
    models = [job.model, *(_model(job, spec, level) for level in range(1, spec.levels))]
    smaller: list[Job] = []
    whole = replace(job, smaller=smaller)  # the smaller jobs refer to it, so they are added to the list below
    for level, model in enumerate(models[1:], start=1):
        above = smaller[-1] if smaller else whole
        smaller.append(_smaller(whole, above, level, model))
        _try_out(above, smaller[-1])
    return whole


def next_level(job: Job, earlier: EarlierWeights | None, control: Control, stages: int) -> LevelMap | None:
    """Make the map to the next visit's model.

    Args:
        job: the job of level 0.
        earlier: reads the weights that the levels had before they became smaller; None if `alpha` is 1.
        control: the control state, which says whether the present visit is done.
        stages: workers per pipeline (K) of the layout.

    Returns:
        The map. None if the present visit is not done, or if the next model is larger and does not fit in `stages`
        stages. Then the workers keep the present model, and in the second case they wait for a longer pipeline.
    """
    if not control.visit_done:
        return None
    larger = job.grows_into(control.visit)
    return level_map(job, control.visit, earlier) if larger is None or larger.layouts.fits(stages) else None


def level_map(job: Job, visit: int, earlier: EarlierWeights | None) -> LevelMap:
    """Make the map from the units of a visit's model to those of the next visit's model.

    Args:
        job: the job of level 0.
        visit: index of the present visit. It is not the last one.
        earlier: reads the weights that the levels had before they became smaller; None if `alpha` is 1.
    """
    spec, now, after = job.spec.multi_level, job.at(visit), job.at(visit + 1)
    down = after.level > now.level
    levels = (after if down else now).from_above
    assert spec is not None and levels is not None
    return LevelMap(levels, down, after.level, spec.alpha, earlier)


def _between(large: Job, small: PipelineModel) -> Levels:
    """Describe how the models of two neighbouring levels are made of each other.

    Args:
        large: the job of the larger level.
        small: the model of the next smaller level.
    """
    spec = large.spec.multi_level
    assert spec is not None
    depth, width = Groups(spec.depth_factor, spec.grouping), Groups(spec.width_factor, spec.grouping)
    if spec.width_factor == 1:
        return Levels(large.model, small, depth, width)
    found = widths_of(large.spec.model, large.dataset.info)
    assert found is not None
    earlier_factor = spec.width_factor**large.level
    shared = any(tie.places[0][0] == 0 and tie.last_unit == large.num_layers + 1 for tie in large.model.ties.all)
    heads = Heads(found.heads // earlier_factor, found.key_heads // earlier_factor, shared)
    return Levels(large.model, small, depth, width, family_of(found.model), heads)


def _check_layers(job: Job, spec: MultiLevel) -> None:
    layers, divisor = job.num_layers, spec.depth_factor ** (spec.levels - 1)
    if layers % divisor:
        raise SpecError(
            "spec.multiLevel.depthFactor",
            f"the model has {layers} layers, which cannot be divided by {divisor} for the smallest level: lower"
            " depthFactor or levels",
        )
    if layers // divisor < (stages := job.spec.pipeline.stages):
        raise SpecError(
            "spec.multiLevel.levels",
            f"the smallest level has {layers // divisor} layers, fewer than the {stages} stages of a pipeline: lower"
            " pipeline.stages, levels or depthFactor",
        )


def _check_freezing(job: Job, spec: MultiLevel) -> None:
    """Refuse a spec whose layers may freeze before the last visit, because a change of level changes all layers.

    The first decision of a policy must come after a step of the last visit. A policy of the program is not checked,
    because it may decide at other steps than the spec says.
    """
    freeze, begins = job.spec.freeze, spec.cycle_steps
    if freeze.always:
        raise SpecError("spec.freeze.always", "cannot be used with multiLevel, which changes all parameters")
    until = f"but the last visit of multiLevel begins after {begins}"
    if freeze.policy == FreezePolicyName.EXPLICIT:
        first = min((point.step for point in freeze.boundaries if point.boundary), default=None)
        if first is not None and first <= begins:
            raise SpecError(
                "spec.freeze.boundaries",
                f"layers would freeze after {first} steps, {until}: freeze after {begins + 1} or more",
            )
    elif freeze.policy not in (FreezePolicyName.NONE, FreezePolicyName.SCRIPT):
        epochs = freeze.start_after_epochs
        start = (freeze.start_after_steps or 0) if epochs is None else epochs * job.order.steps_per_epoch
        if start < begins:
            raise SpecError(
                f"spec.freeze.{'startAfterSteps' if epochs is None else 'startAfterEpochs'}",
                f"decisions would begin after {start} steps, {until}: begin after {begins} or more",
            )


def _model(job: Job, spec: MultiLevel, level: int) -> PipelineModel:
    """Make the model of a level, on the meta device.

    Raises:
        SpecError: the model cannot become narrower by `widthFactor`.
    """
    model = job.model
    if spec.width_factor > 1:
        own, info = job.spec.model, job.dataset.info
        widths = widths_of(own, info)
        if widths is None or family_of(widths.model) is None:
            raise SpecError(
                "spec.multiLevel.widthFactor",
                f"must be 1, because it is unknown how {name_of(own)} becomes narrower: only the depth can change",
            )
        smallest = spec.width_factor ** (spec.levels - 1)
        narrowed(own, widths, smallest)  # raises SpecError if a size cannot be divided
        spec_of_level = narrowed(own, widths, spec.width_factor**level)
        model = build_model(spec_of_level, info, seed=job.spec.training.seed, dtype=job.dtype, units=())
    return model.with_layers(job.num_layers // spec.depth_factor**level)


def _smaller(whole: Job, above: Job, level: int, model: PipelineModel) -> Job:
    """Make the job of a smaller level.

    Args:
        whole: the job of level 0.
        above: the job of the next larger level.
        level: the smaller level, from 1.
        model: its model.
    """
    levels = _between(above, model)
    no_decay = {
        f"{model.unit_name(unit)}.{name}"
        for unit, shell in enumerate(model.units)
        for name, _ in shell.named_parameters()
        if f"{above.model.unit_name(levels.members(unit)[0])}.{name}" in above.no_decay
    }
    return replace(
        whole,
        model=model,
        build_units=_never_built,
        unit_bytes=[sum(tensor.nbytes for tensor in (*unit.parameters(), *unit.buffers())) for unit in model.units],
        no_decay=no_decay,
        level=level,
        whole=whole,
        smaller=(),
        from_above=levels,
    )


def _never_built(indices: Collection[int]) -> dict[int, nn.Module]:
    raise AssertionError(f"units {list(indices)} of a smaller level are made of those of a larger one")


def _try_out(large: Job, small: Job) -> None:
    """Check that the units of two neighbouring levels can be made of each other, by mapping all shapes down and up.

    Raises:
        SpecError: it is unknown how a parameter becomes narrower, or layers that become one differ.
    """
    levels = small.from_above
    assert levels is not None
    for down, old, new in ((True, large, small), (False, small, large)):
        found = LevelMap(levels, down, new.level)
        units: Sequence[nn.Module] = new.shells
        for unit, shell in enumerate(units):
            sources = {
                f"{old.model.unit_name(source)}.{name}": tensor
                for source in found.sources(unit)
                for name, tensor in old.shells[source].state_dict().items()
            }
            made = found.make(unit, sources)
            for name, wanted in shell.state_dict().items():
                full = f"{new.model.unit_name(unit)}.{name}"
                if made[full].shape != wanted.shape:
                    raise SpecError(
                        "spec.multiLevel.widthFactor",
                        f"must be 1, because {full} would become {tuple(made[full].shape)}, not {tuple(wanted.shape)}",
                    )
