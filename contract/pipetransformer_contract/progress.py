"""The progress of a job as one line. The command line and a training script print the same line."""

from dataclasses import dataclass

_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a job. A value of None is unknown and is left out of the line.

    Attributes:
        step: committed steps.
        total_steps: steps of the whole job.
        seconds_left: seconds until the last step, from the measured step time of the present layout.
        loss: loss of the newest step.
        held_out: name and newest value of the metric that decides which evaluation is best.
        stages: workers per pipeline (K).
        pipelines: number of pipelines (R).
        frozen_layers: layers that no longer train.
        num_layers: layers of the model.
        samples_per_second: speed of all workers together.
    """

    step: int
    total_steps: int | None = None
    seconds_left: float | None = None
    loss: float | None = None
    held_out: tuple[str, float] | None = None
    stages: int | None = None
    pipelines: int | None = None
    frozen_layers: int | None = None
    num_layers: int | None = None
    samples_per_second: float | None = None

    def line(self) -> str:
        """Returns the line, such as `step 120/400 (30%)  ETA 3m20s  loss 0.4867  layout 2 x 2  frozen 6/12`."""
        total, held_out = self.total_steps, self.held_out
        ends = total is not None and self.step >= total
        parts = [
            f"step {self.step}" + (f"/{total} ({100 * min(self.step, total) // total}%)" if total else ""),
            "" if self.seconds_left is None or ends else f"ETA {duration(self.seconds_left)}",
            "" if self.loss is None else f"loss {self.loss:.4f}",
            "" if held_out is None else f"held-out {held_out[0]} {held_out[1]:.4f}",
            "" if self.stages is None else f"layout {self.stages} x {self.pipelines}",
            "" if self.num_layers is None else f"frozen {self.frozen_layers}/{self.num_layers}",
            "" if self.samples_per_second is None else f"{self.samples_per_second:.0f} samples/s",
        ]
        return "  ".join(filter(None, parts))


def duration(seconds: float) -> str:
    """Formats seconds in at most two units, such as `3d4h` or `12m5s`."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count}{unit}")
    return "".join(parts[:2])
