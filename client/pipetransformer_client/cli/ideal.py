"""Shows a job's forecast beside the best that layouts could reach, and beside runs that never change their layout."""

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from pipetransformer_client.against_ideal import AgainstIdeal
from pipetransformer_contract.words import counted

if TYPE_CHECKING:
    from pipetransformer.partition.ideal import Course


def ideal_object(runs: AgainstIdeal) -> dict[str, Any]:
    """The comparison as an object for `-o json`. Times are in seconds; without measured costs they are relative."""
    return {
        "gpus": runs.gpus,
        "exact": runs.exact,
        "cacheCounted": runs.cached,
        "offloadCounted": runs.offloads,
        "timesInSeconds": runs.measured,
        "runs": {
            name: {
                "time": course.seconds,
                "gpuTime": course.gpu_seconds,
                "steps": [
                    {
                        "firstStep": part.segment.first_step,
                        "frozenLayers": part.segment.boundary,
                        "cachedLayers": part.segment.cached if runs.cached else 0,
                        "stages": part.layout.stages,
                        "pipelines": part.layout.pipelines,
                        "stepTime": part.step_seconds,
                    }
                    for part in course.parts
                ],
            }
            for name, course in _named(runs)
        },
        "boundTime": runs.work_seconds,
        "jobOverIdeal": runs.job.seconds / runs.elastic.seconds,
    }


def print_ideal(runs: AgainstIdeal, out: Console) -> None:
    """Print the time that each run would take, then the steps of the job beside those of the ideal."""
    out.print(_runs_table(runs))
    out.print(_steps_table(runs))
    out.print(_words(runs), highlight=False)


def _named(runs: AgainstIdeal) -> list[tuple[str, "Course"]]:
    return [
        ("job", runs.job),
        ("ideal", runs.elastic),
        ("idealReleased", runs.released),
        ("staticFrozen", runs.kept),
        ("static", runs.unfrozen),
    ]


_TITLES = {
    "job": "this job, as planned",
    "ideal": "ideal",
    "idealReleased": "ideal, GPUs given back",
    "staticFrozen": "best static layout, frozen",
    "static": "best static layout",
}


def _runs_table(runs: AgainstIdeal) -> Table:
    table = Table(title=f"What each run would take on at most {runs.gpus} GPUs", title_justify="left", box=box.SIMPLE)
    table.add_column("run", no_wrap=True)
    for title in ("time", "GPU hours" if runs.measured else "GPU time", "over the ideal", "layouts"):
        table.add_column(title, justify="left" if title == "layouts" else "right")
    unit = runs.unfrozen

    def row(title: str, seconds: float, gpu_seconds: float, layouts: str) -> None:
        time = _duration(seconds) if runs.measured else f"{seconds / unit.seconds:.0%}"
        gpus = f"{gpu_seconds / 3600:.3g}" if runs.measured else f"{gpu_seconds / unit.gpu_seconds:.0%}"
        table.add_row(title, time, gpus, f"{seconds / runs.elastic.seconds:.2f}", layouts)

    for name, course in _named(runs):
        layouts = ", ".join(f"{layout.stages} x {layout.pipelines}" for layout in course.layouts)
        row(_TITLES[name], course.seconds, course.gpu_seconds, layouts)
    row("bound", runs.work_seconds, runs.work_seconds * runs.gpus, "")
    return table


def _steps_table(runs: AgainstIdeal) -> Table:
    table = Table(title="Steps of this job and of the ideal", title_justify="left", box=box.SIMPLE)
    for title in ("from step", "frozen", "in the cache", "job", "step", "ideal", "step", "job over ideal"):
        table.add_column(title, justify="right")
    unit = runs.unfrozen.parts[0].step_seconds
    for job, ideal in zip(runs.job.parts, runs.elastic.parts, strict=True):
        segment = job.segment
        cells = [str(segment.first_step), str(segment.boundary), str(segment.cached if runs.cached else 0)]
        for part in (job, ideal):
            seconds = part.step_seconds
            cells.append(f"{part.layout.stages} x {part.layout.pipelines}")
            cells.append(f"{1000 * seconds:.3g} ms" if runs.measured else f"{seconds / unit:.0%}")
        table.add_row(*cells, f"{job.step_seconds / ideal.step_seconds:.2f}")
    return table


def _words(runs: AgainstIdeal) -> str:
    said = [f"Not counted: the pauses of {counted(runs.regroups, 'regroup')} of this job, and those of any other run."]
    if not runs.measured:
        said.append("100% is the best static layout with nothing frozen, by assumed costs. --measure gives seconds.")
    if not runs.cached:
        said.append("No cache is counted, so each frozen layer still runs forward.")
    elif runs.offloads:
        said.append("Frozen layers in the cache are off the GPU, in layouts whose caches can hold all samples.")
    if not runs.exact:
        said.append("The model has too many cuts to try all of them, so the ideal may be a little faster.")
    return "\n".join(said)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
