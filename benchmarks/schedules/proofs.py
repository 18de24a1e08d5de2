"""What is proven of the lists and of the planner of slices, counted beside the measurements."""

from tests.testkit.trainer import judged_schedules
from tests.testkit.trainer.slice_cases import planner_worst

from .part import Found


def run(pairs: int) -> Found:
    """Judge every generator's lists, and compare planned slices with all slicings. It measures nothing.

    Args:
        pairs: of blocks, which the other parts run.
    """
    by_paper, by_lists = planner_worst()
    counts = judged_schedules.main()
    return Found({**counts, "planner_worst": by_paper, "planner_worst_exact": by_lists})
