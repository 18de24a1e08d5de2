"""`plan`: predicts the layouts of a job without training it."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pipetransformer_client.against_ideal import compare_with_ideal
from pipetransformer_client.phases import Phase, Savings, phases, savings
from pipetransformer_contract.api import PipeTrainingJob, trainer_spec
from pipetransformer_contract.api.manifest import local_manifest
from pipetransformer_contract.spec import FrozenForward
from pipetransformer_contract.words import counted

from .app import app
from .candidates import candidate_object, print_candidates
from .ideal import ideal_object, print_ideal
from .manifests import File, Name, Settings, one_job
from .options import EXIT_INVALID, Output, console, error_console
from .output import print_object

if TYPE_CHECKING:
    from pipetransformer.partition import ModelCosts


@app.command()
def plan(
    file: File,
    name: Name = None,
    settings: Settings = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Time the model's layers on this machine. Default: assume equal layers."),
    ] = False,
    costs: Annotated[
        Path | None, typer.Option(help="Output of `plan --measure -o json` on a machine like the workers'.")
    ] = None,
    ideal: Annotated[
        bool, typer.Option("--ideal", help="Compare with the best that any layout could reach, and with static runs.")
    ] = False,
    output: Output = None,
) -> None:
    """Show the layouts that a job would take and what it would save, without training."""
    manifest = local_manifest(one_job(file, name, settings))
    try:
        from pipetransformer.errors import DeviceError, DeviceMemoryError, ModelError
        from pipetransformer.library.forecast import Forecast, measure_here
    except ModuleNotFoundError as error:
        error_console().print(f"error: plan builds the job's model, so it needs the trainer on this machine: {error}")
        raise typer.Exit(EXIT_INVALID) from error
    if measure and costs is not None:
        raise typer.BadParameter("give --measure or --costs, not both")
    given = None
    if costs is not None:
        given = _costs_of(costs)
    sys.path.insert(0, str(Path.cwd()))  # where the workers of `run` find the user's modules
    try:
        spec = PipeTrainingJob.from_manifest(manifest).spec
        forecast = Forecast.of(trainer_spec(spec), given)
        if measure:
            forecast = Forecast(forecast.job, measure_here(forecast.job))
        found = phases(spec, forecast)
        runs = compare_with_ideal(found, spec, forecast) if ideal else None
    except (ModelError, DeviceError, DeviceMemoryError, OSError, ValueError) as error:
        error_console().print(f"error: {error}")
        raise typer.Exit(EXIT_INVALID) from error
    saved = savings(found, spec, forecast)
    if output is not None:
        shown = _object(found, saved, forecast.costs.model_dump(mode="json") if forecast.costs else None)
        print_object(shown if runs is None else {**shown, "ideal": ideal_object(runs)}, output)
        return
    _print(found, saved, measured=forecast.costs is not None)
    if runs is not None:
        print_ideal(runs, console())
    if forecast.never_freezes:
        steps = forecast.job.total_steps
        error_console().print(f"warning: spec.freeze: no layer freezes in the {steps} steps of the job")
    if spec.freeze.ignored:
        fields = ", ".join(spec.freeze.ignored)
        error_console().print(f"warning: spec.freeze: policy {spec.freeze.policy} ignores {fields}")


def _costs_of(file: Path) -> "ModelCosts":
    """Reads the costs that `plan --measure -o json` printed."""
    from pipetransformer.partition import ModelCosts

    try:
        return ModelCosts.model_validate(json.loads(file.read_text())["costs"])
    except OSError as error:
        error_console().print(f"error: --costs: cannot read {file}: {error.strerror}")
    except (ValueError, KeyError, TypeError):
        error_console().print(f"error: --costs: {file} holds no costs: it must be the output of plan --measure -o json")
    raise typer.Exit(EXIT_INVALID)


def _object(found: list[Phase], saved: Savings | None, costs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "phases": [
            {
                "firstStep": phase.first_step,
                "level": phase.level,
                "frozenLayers": phase.boundary,
                "offDeviceLayers": phase.off_layers,
                "stages": phase.layout.stages,
                "pipelines": phase.layout.pipelines,
                "gpus": phase.gpus,
                "regroups": phase.regroups,
                "stageLayers": list(phase.stage_layers),
                "schedule": phase.schedule,
                "whySchedule": phase.why_schedule,
                "staleness": list(phase.staleness),
                "frozenForward": phase.frozen_forward,
                "whyFrozenForward": phase.why_frozen_forward,
                "candidates": [candidate_object(candidate) for candidate in phase.candidates],
                "stepSeconds" if costs else "relativeStepSeconds": phase.step_seconds
                / (1 if costs else found[0].step_seconds),
            }
            for phase in found
        ],
        "saved": None if saved is None else {"time": saved.time, "gpuTime": saved.gpu_time},
        "costs": costs,
    }


def _print_reasons(found: list[Phase], out: Console) -> None:
    """Print why layouts run another schedule than that of the spec, in one line for each schedule and reason."""
    stages: dict[tuple[str, str], list[int]] = {}
    for phase in found:
        same = stages.setdefault((phase.schedule, phase.why_schedule), [])
        if phase.why_schedule and phase.layout.stages not in same:
            same.append(phase.layout.stages)
    for (schedule, why), lengths in stages.items():
        if lengths:
            words = " or ".join(map(str, lengths))
            out.print(f"With {words} {'stage' if words == '1' else 'stages'} {schedule} runs: {why}.", highlight=False)


def _print_staleness(found: list[Phase], out: Console) -> None:
    """Print how old the weights of asynchronous schedules are, in one line for each number of stages."""
    lines = set()
    for phase in found:
        if phase.staleness:
            ages = f"weights that are up to {', '.join(map(str, phase.staleness))} steps old, by stage"
            used = ages if any(phase.staleness) else "no old weights"
            lines.add(f"With {counted(phase.layout.stages, 'stage')} {phase.schedule} uses {used}.")
    for line in sorted(lines):
        out.print(line, highlight=False)


def _print(found: list[Phase], saved: Savings | None, *, measured: bool) -> None:
    out = console()
    table = Table(box=box.SIMPLE)
    levels = any(phase.level for phase in found)
    titles = ["from step", *(["level"] if levels else []), "frozen", "stages", "pipelines", "GPUs"]
    for title in (*titles, "layers by stage", "step"):
        table.add_column(title, justify="right", no_wrap=True)
    for phase in found:
        step = f"{phase.step_seconds:.3f} s" if measured else f"{phase.step_seconds / found[0].step_seconds:.0%}"
        table.add_row(
            "?" if phase.first_step is None else str(phase.first_step),
            *([str(phase.level)] if levels else []),
            f"{phase.boundary} ({phase.off_layers} off)" if phase.off_layers else str(phase.boundary),
            str(phase.layout.stages),
            str(phase.layout.pipelines),
            str(phase.gpus),
            " ".join(map(str, phase.stage_layers)),
            step,
        )
    out.print(table)
    if any(phase.off_layers for phase in found):
        out.print("off: frozen layers that have left the GPU, because the cache has their outputs.")
    _print_reasons(found, out)
    _print_staleness(found, out)
    _print_frozen_forward(found, out)
    print_candidates(found, out)
    if saved is None:
        out.print("Gradients decide when layers freeze. The table shows the layout for each number of frozen layers.")
        return
    regroups = sum(phase.regroups for phase in found)
    out.print(
        f"Compared with the first layout without freezing{' or levels' if levels else ''}: {saved.time:.0%} of the time"
        f" and {saved.gpu_time:.0%} of the GPU time saved. Not counted: the pauses of {counted(regroups, 'regroup')}.",
        highlight=False,
    )


def _print_frozen_forward(found: list[Phase], out: Console) -> None:
    """Print which layouts compute frozen layers one step ahead, and why others do not."""
    for phase in found:
        layers = counted(phase.boundary, "frozen layer")
        where = f"With {layers} and {phase.layout.stages} x {phase.layout.pipelines} workers"
        if phase.why_frozen_forward:
            out.print(f"{where} frozen layers compute in place: {phase.why_frozen_forward}.", highlight=False)
        elif phase.frozen_forward is FrozenForward.AHEAD:
            out.print(f"{where} frozen layers compute one step ahead.", highlight=False)
