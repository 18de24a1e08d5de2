"""Shows the ways to run a layout among which measured costs choose, and why the others were not chosen.

A way to run a layout is a schedule with its spans and micro-batches, and when its frozen layers compute.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from pipetransformer_client.phases import Phase
from pipetransformer_contract.words import counted

if TYPE_CHECKING:
    from pipetransformer.partition import Candidate


def candidate_object(candidate: "Candidate") -> dict[str, Any]:
    """A candidate for `-o json`. Times are in seconds, and memory is in bytes."""
    found = candidate.predicted
    return {
        "schedule": candidate.option.schedule,
        "spansPerWorker": candidate.option.spans_per_worker,
        "microBatches": candidate.micro_batches,
        "microBatchSize": None if candidate.cut is None else candidate.cut.micro_batch_size,
        "unitsOfSpans": None if candidate.cut is None else [len(span) for span in candidate.cut.spans],
        "frozenTogether": candidate.together,
        "aheadWorkers": candidate.holders,
        "leastStepSeconds": candidate.least_seconds,
        "stepSeconds": None if found is None else found.seconds,
        "idleShare": None if found is None else found.idle_share,
        "bytesPerWorker": None if found is None else found.bytes_per_worker,
        "whyNot": candidate.why_not,
    }


def print_candidates(phases: Sequence[Phase], out: Console) -> None:
    """Print a table for each phase whose layout could run in several ways. It has the best way of each schedule, with
    frozen layers computed in place and computed ahead."""
    for phase in phases:
        best: dict[object, Candidate] = {}
        for candidate in phase.candidates:
            best.setdefault((candidate.option, candidate.holders > 0), candidate)
        if len(best) > 1:
            start = "?" if phase.first_step is None else phase.first_step
            layers = counted(phase.boundary, "frozen layer")
            title = f"From step {start}: {phase.layout.words}, {layers}"
            out.print(_table(title, list(best.values())))


def _table(title: str, candidates: Sequence["Candidate"]) -> Table:
    """Make the table of candidates. If some compute frozen layers ahead, it has two more columns: when frozen layers
    compute, and a lower bound for the step time."""
    ahead = any(candidate.holders for candidate in candidates)
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    columns = ["schedule", "spans", "micro-batches", "step", "idle", "memory", "why not"]
    for column in columns[:3] + ["frozen"] * ahead + columns[3:4] + ["at least"] * ahead + columns[4:]:
        table.add_column(column, justify="left" if column in ("schedule", "frozen", "why not") else "right")
    for candidate in candidates:
        found = candidate.predicted
        least = "" if candidate.cut is None else f"{1000 * candidate.least_seconds:.3g} ms"
        table.add_row(
            candidate.option.schedule,
            str(candidate.option.spans_per_worker),
            str(candidate.micro_batches),
            *([_frozen(candidate)] * ahead),
            "" if found is None else f"{1000 * found.seconds:.3g} ms",
            *([least] * ahead),
            "" if found is None else f"{found.idle_share:.0%}",
            "" if found is None else f"{found.bytes_per_worker / 2**20:,.0f} MiB",
            candidate.why_not or "chosen",
        )
    return table


def _frozen(candidate: "Candidate") -> str:
    """Words that say where and when frozen layers compute."""
    if candidate.holders:
        return "ahead" if candidate.holders > 1 else "ahead, first worker"
    return "cached" if candidate.together else "in place"
